"""Guards: one rank alone is enough to stop all, a watch that was paused counts again, and of ranks
that run ahead of their collectives it names the one that is behind."""
import json
import math
import time
import traceback

import pytest
from trouble import wait_for

from llm_workbook.config.recipe import Recipe
from llm_workbook.parallel.agreement import on_every_rank
from llm_workbook.training import watchdog
from llm_workbook.training.rank_run import RankRun, set_up_device
from llm_workbook.training.run_directory import Start
from llm_workbook.training.watchdog import HangWatch, Votes, check_finite
from llm_workbook.parallel.ranks import RankError, run_ranks


def only_rank_1():
    "The loss is no number on rank 1, and every value of rank 0 is well."
    votes = Votes(timeout_s=5)
    check_finite(votes, 2, [votes.rank, 7], loss=[2.4, math.nan][votes.rank], grad_norm=1.0)


def both_say_it():
    try: only_rank_1()
    except FloatingPointError as error: return str(error)


def test_a_value_of_one_rank_that_is_no_number_stops_all_of_them():
    words = 'loss nan at step 2: nothing is saved, and no weight was updated (rank 1, rows 1, 7)'
    first, second = run_ranks(both_say_it, 2, timeout_s=10)
    assert first == second
    assert first.startswith(f'{words}. Lower optimizer.learning_rate')
    with pytest.raises(RankError, match='FloatingPointError: loss nan at step 2'):
        run_ranks(only_rank_1, 2, timeout_s=10)


@pytest.mark.parametrize('step, half, said, unsaid', [
    (1, False, 'no learning rate is the cause: look at these rows', 'float16'),
    (1, True, 'set precision.compute to bfloat16 or float32', 'Lower optimizer.learning_rate'),
    (2, False, 'Lower optimizer.learning_rate; if the same rows', 'No update came before'),
    (2, True, 'loss_scale to none. Lower optimizer.learning_rate', 'No update came before')])
def test_the_advice_fits_what_can_be_the_cause(step, half, said, unsaid):
    with pytest.raises(FloatingPointError) as caught:
        check_finite(Votes(), step, [4], half=half, loss=math.inf)
    assert said in str(caught.value)
    assert unsaid not in str(caught.value)


def test_a_watch_counts_nothing_in_a_pause_and_everything_after_it(tmp_path):
    hangs = []
    with HangWatch(tmp_path, 0.2, act=hangs.append) as watch:
        with watch.paused(): time.sleep(0.6)
        assert hangs == []
        assert wait_for(lambda: hangs, 5), 'after a save or a load nobody would be named any more'
    assert hangs[0].args[0] == 'no step was done in 0.2 s: ranks [0] stuck'


def test_a_pause_that_an_error_ends_is_over_too(tmp_path):
    hangs = []
    with HangWatch(tmp_path, 0.2, act=hangs.append) as watch:
        with pytest.raises(OSError), watch.paused(): raise OSError('the disk is full')
        assert wait_for(lambda: hangs, 5)


def test_a_pause_lasts_until_its_outermost_block_ends(tmp_path):
    hangs = []
    with HangWatch(tmp_path, 0.2, act=hangs.append) as watch:
        with watch.paused():
            with watch.paused(): watch.beat()
            time.sleep(0.6)
        assert hangs == []
        assert wait_for(lambda: hangs, 5)


# Ranks on GPUs run ahead of their collectives

def silence():
    "Stand for a GPU that gives no number back; the line below is the innermost of the stack."
    float(time.sleep(60))


def claim_gpu():
    import torch
    torch.cuda.is_initialized = lambda: True


def hang(function, folder, ranks, **how):
    "Let ranks run `function` under a watch, then wait for a GPU; give back error and reports."
    def work():
        import torch.distributed as dist
        claim_gpu()
        with HangWatch(folder, 1.0, dist.get_rank(), ranks):
            function(dist.get_rank())
            silence()
    with pytest.raises(RankError, match='RankHangs') as caught: run_ranks(work, ranks, **how)
    files = [folder/'stacks'/f'rank-{rank}.json' for rank in range(ranks)]
    return caught.value, [json.loads(file.read_text()) for file in files]


def call(group=None, times=1):
    import torch, torch.distributed as dist
    for _ in range(times): dist.all_reduce(torch.ones(2), group=group, async_op=True)


def test_of_ranks_with_equal_stacks_the_one_that_called_less_is_to_blame(tmp_path):
    error, reports = hang(lambda rank: call(times=4 if rank == 1 else 6), tmp_path, 3)
    assert error.rank == 1
    assert ('ranks [1] behind the others, ranks [0, 2] waiting for a GPU; of process group gloo 0 '
            'ranks [1] have called 4 collectives, others 6') in error.reason
    assert {report['stack'][-1] for report in reports} == {reports[0]['stack'][-1]}
    assert [report['collectives']['gloo 0'] for report in reports] == [
        {'called': 6, 'open': 'all_reduce'}, {'called': 4, 'open': ''},
        {'called': 6, 'open': 'all_reduce'}]


def test_who_is_late_because_it_waits_is_not_to_blame(tmp_path):
    "As with hybrid sharding: 0 waits for 1, so 2 waits for 0; 1 has never used its group before."
    def work(rank):
        import torch.distributed as dist
        pair, other = dist.new_group([0, 1]), dist.new_group([0, 2])
        if rank == 0: call(pair)
        if rank == 2: call(other)
    error, reports = hang(work, tmp_path, 3)
    assert error.rank == 1
    assert 'ranks [1] behind the others, ranks [0, 2] waiting for a GPU' in error.reason
    assert 'gloo 1 ranks [1] have called 0 collectives, others 1' in error.reason


def test_a_group_whose_record_is_overwritten_makes_nobody_late(tmp_path):
    def work(rank):
        import torch._C._distributed_c10d as c10d
        import torch.distributed as dist
        dump = c10d._dump_fr_trace_json
        def short():  # As with TORCH_FR_BUFFER_SIZE=3, which torch reads once in a process
            record = json.loads(dump())
            return json.dumps(record | {'entries': record['entries'][-3:]}).encode()
        c10d._dump_fr_trace_json = short
        alone = [dist.new_group([0]), dist.new_group([1])]
        call()
        time.sleep(0.2)
        if rank == 1: call(alone[1], times=5)
    error, reports = hang(work, tmp_path, 2)
    assert error.reason.endswith('ranks [0, 1] waiting for a GPU')
    assert reports[0]['collectives']['gloo 0'] == {'called': 1, 'open': ''}
    assert reports[1]['collectives'] == {'gloo 2': {'called': 5, 'open': ''}}


def test_a_group_is_not_taken_for_an_earlier_one_of_the_same_name(tmp_path):
    "As after `destroy_process_group`, or in ranks of a kernel that was in a group itself."
    def work(rank):
        import torch.distributed as dist
        call(times=9)
        time.sleep(0.2)
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path/'store'), 2)
        dist.init_process_group('gloo', store=store, rank=rank, world_size=2)
        call(times=2 + rank)
    error, reports = hang(work, tmp_path, 2)
    assert error.rank == 0
    assert [report['collectives']['gloo 0']['called'] for report in reports] == [2, 3]


def test_a_rank_that_is_stuck_beside_a_gpu_is_told_from_those_that_wait_for_it(tmp_path):
    def work(rank):
        call(times=2)
        if rank == 0: time.sleep(60)
        call()
    error, _ = hang(work, tmp_path, 2)
    assert error.rank == 0
    assert error.reason.endswith('ranks [0] stuck, ranks [1] waiting for a GPU')


@pytest.mark.parametrize('line', [
    'values = {"loss": float(self._tr_loss)}', 'if int(flag) == 1:', 'return x.item()',
    'counts.tolist()', 'torch.cuda.synchronize()', 'return torch._C._cuda_synchronize()',
    'row = row.to(device)', 'kept = mask.nonzero()', 'norm.cpu()'])
def test_a_line_that_asks_for_a_number_waits_for_the_gpu_if_there_is_one(line, monkeypatch):
    frames = [('rows.py', 'for row in rows:'), ('trainer.py', line)]
    def stack(frames):
        return [traceback.FrameSummary(file, 1, 'step', line=text) for file, text in frames]
    assert not watchdog._report(stack(frames))['gpu']
    monkeypatch.setattr('torch.cuda.is_initialized', lambda: True)
    report = watchdog._report(stack(frames))
    assert report['gpu'] and not report['waits']
    assert not watchdog._report(stack(frames[:1]))['gpu']
    assert not watchdog._report(stack([('rows.py', 'time.sleep(1000)')]))['gpu']


def pretend_nccl(called, ended):
    "Let NCCL's flight recorder tell this, in the form that it has."
    import torch._C._distributed_c10d as c10d
    entries = [{
        'pg_id': 7, 'process_group': ['0', 'default_pg'], 'profiling_name': f'nccl:{name}',
        'collective_seq_id': number, 'is_p2p': name == 'send', 'retired': number <= ended}
        for number, name in ((39, 'send'), (40, 'all_reduce'), (41, '_allgather_base'))]
    status = {'last_enqueued_collective': str(called), 'last_completed_collective': str(ended)}
    record = {'entries': entries[:called - 38], 'pg_status': {'7': status}}
    c10d._dump_nccl_trace_json = lambda: json.dumps(record).encode()


def test_a_collective_that_all_have_called_is_named_itself(tmp_path):
    def work(rank):
        pretend_nccl(called=41, ended=40)
        exec('time.sleep(60)')  # No line asks for a number: the queue of the GPU is full
    error, reports = hang(work, tmp_path, 2)
    assert ('ranks [0, 1] waiting for a GPU; all have called _allgather_base of process group '
            'nccl 0, and it does not end') in error.reason
    seen = reports[0]['collectives']
    seen.pop('gloo ', None)  # A group without a name, of a test before this one: forks inherit it
    assert seen == {
        'nccl 0': {'called': 41, 'open': '_allgather_base'}, 'gloo 0': {'called': 0, 'open': ''}}


def test_nccl_shows_who_is_behind_though_all_wait_for_a_gpu(tmp_path):
    def work(rank): pretend_nccl(called=41 - (rank == 0), ended=40)
    error, _ = hang(work, tmp_path, 2)
    assert 'nccl 0 ranks [0] have called 40 collectives, others 41' in error.reason


def test_a_record_of_another_form_leaves_the_stacks(tmp_path):
    def work(rank):
        import torch._C._distributed_c10d as c10d
        c10d._dump_fr_trace_json = lambda: b'{"entries": [{}]}'
        if rank == 1: time.sleep(60)
    error, reports = hang(work, tmp_path, 2)
    assert error.reason.endswith('ranks [1] stuck, ranks [0] waiting for a GPU')
    assert reports[0]['collectives'] == {}


@pytest.mark.parametrize('step_timeout_s, limit_s', [(None, 864_000), (1200.0, 1800)])
def test_all_groups_of_a_run_wait_as_long_as_its_steps_may_take(tmp_path, step_timeout_s, limit_s):
    recipe = Recipe.named('reviews-qlora').changed({
        'cluster.device': 'cpu', 'cluster.processes': 2, 'sharding.strategy': 'ddp'})

    def limits():
        import torch.distributed as dist
        made, new_group = [], dist.new_group

        def noted(*ranks, **how):
            made.append(how['timeout'].total_seconds())
            return new_group(*ranks, **how)

        dist.new_group = noted
        set_up_device(recipe, step_timeout_s)
        RankRun(tmp_path).meet(Start())
        on_every_rank(lambda: None)
        return made

    assert run_ranks(limits, 2) == [[limit_s] * 3] * 2
