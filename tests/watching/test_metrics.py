"""Metrics of every rank: phases that add up against another clock, a late rank that the others wait
for, killed ranks whose half lines a reader survives, and no secret in any line."""
import json
import os
import random
import signal
import statistics
import time

import pytest
import torch
from trouble import CANARY, TOKENS, fine_tune, small_recipe

from llm_workbook.config.recipe import Recipe
from llm_workbook.parallel.ranks import RankError
from llm_workbook.training import rank_metrics, rank_run
from llm_workbook.training.rank_metrics import LINE_KEYS, MEMORY_CLASSES
from llm_workbook.training.run_directory import RunFiles, read_metrics
from llm_workbook.training.step_phases import PHASES, StepClock, timed_waits
from llm_workbook.watching.metrics import RowWork, RunMetrics, Tailer

ALONE = {'cluster.processes': 1, 'sharding.strategy': 'none'}


@pytest.fixture(scope='module')
def small(tmp_path_factory): return small_recipe(tmp_path_factory.mktemp('small'))


@pytest.fixture(scope='module', params=['fsdp2', 'one process'])
def run(small, request, tmp_path_factory):
    "A run that saves in the middle, with tokens in its environment, and its metrics."
    changes = {'optimizer.steps': 10, 'intervals.saving': 5, 'batch.accumulation': 2}
    if request.param == 'one process': changes |= ALONE
    recipe = small.changed(changes)
    directory = tmp_path_factory.mktemp('run')/'run'
    with pytest.MonkeyPatch.context() as patch:
        for name in TOKENS: patch.setenv(name, CANARY)
        fine_tune(recipe, directory)
    metrics = RunMetrics(directory)
    metrics.update()
    return recipe, directory, metrics


def test_every_rank_writes_every_key_of_every_step(run):
    recipe, directory, metrics = run
    assert sorted(metrics.ranks) == list(range(recipe.cluster.ranks))
    for rank, rows in metrics.ranks.items():
        assert [row['step'] for row in rows] == list(range(1, recipe.optimizer.steps + 1))
        for row in rows:
            assert list(row) == list(LINE_KEYS)
            assert list(row['phases']) == list(PHASES)
            assert list(row['memory_b']) == list(MEMORY_CLASSES)
            assert (row['rank'], row['ranks']) == (rank, recipe.cluster.ranks)


def test_lines_of_ranks_agree_with_those_of_the_run(run):
    recipe, directory, metrics = run
    logged = read_metrics(RunFiles(directory).metrics)
    for rows in metrics.ranks.values():
        assert [row['loss'] for row in rows] == [row['loss'] for row in logged]
        assert [row['grad_norm'] for row in rows] == [row['grad_norm'] for row in logged]
    tokens = [sum(rows[i]['tokens'] for rows in metrics.ranks.values()) for i in range(len(logged))]
    so_far = [row['num_tokens'] for row in logged]
    assert tokens == [after - before for after, before in zip(so_far, [0, *so_far])]


def test_phases_add_up_to_the_step_by_another_clock(run):
    """Rank 0 writes the seconds of the run into `metrics.jsonl`. The first step and that after a
    save are left out: loading and saving are in those seconds, and in no phase.

    Another process may hold the core between two phases of a step. A phase that nothing counts is
    missing from every step: so the nearest quarter of the steps is asked."""
    recipe, directory, metrics = run
    seconds = [row['seconds'] for row in read_metrics(RunFiles(directory).metrics)]
    errors = []
    for i in (1, 2, 3, 4, 6, 7, 8, 9):
        by_run_s = seconds[i] - seconds[i - 1]
        for rows in metrics.ranks.values():
            errors.append(abs(sum(rows[i]['phases'].values()) / by_run_s - 1))
    assert statistics.quantiles(errors, n=4)[0] < .03


def test_utilisation_is_flop_over_time_over_peak(run):
    recipe, directory, metrics = run
    peak = RowWork(recipe).peak
    for rows in metrics.ranks.values():
        for row in rows:
            assert row['mfu'] == pytest.approx(row['model_flop'] / row['step_s'] / peak, rel=1e-6)
            assert row['hfu'] == pytest.approx(row['hardware_flop'] / row['step_s'] / peak,
                                               rel=1e-6)
            assert 0 < row['mfu'] <= row['hfu']


def test_memory_of_a_rank_is_its_share(run):
    recipe, directory, metrics = run
    memory_b = metrics.latest[0]['memory_b']
    assert memory_b['gradients'] == memory_b['weights']  # A full fine-tune, in float32 all of it
    assert 2 * memory_b['weights'] <= memory_b['optimizer'] < 2.01 * memory_b['weights']
    assert memory_b['adapters'] == 0
    assert memory_b['allocated'] is memory_b['other'] is None
    assert metrics.latest[0]['rss_b'] > 100 * 2**20


def test_no_secret_is_in_any_file_and_the_run_says_that_it_has_ended(run):
    recipe, directory, metrics = run
    texts = [file.read_text() for file in RunFiles(directory).of_ranks.iterdir()]
    assert len(texts) == recipe.cluster.ranks + 1
    assert not [text for text in texts if CANARY in text or 'TOKEN' in text]
    assert metrics.stage['stage'] == 'ended'


@pytest.mark.parametrize('strategy', ['fsdp2', 'ddp'])
def test_a_late_rank_computes_and_the_others_wait_for_it(
    strategy, small, tmp_path, monkeypatch
):
    "Rank 1 takes 150 ms more in the forward pass: there it is forward, on rank 0 communication."
    begin_forward = StepClock.mark
    def late(clock, phase):
        begin_forward(clock, phase)
        if phase == 'forward' and clock._phase and os.environ['RANK'] == '1': time.sleep(.15)
    monkeypatch.setattr(StepClock, 'mark', late)
    recipe = small.changed({'sharding.strategy': strategy, 'batch.accumulation': 1})
    fine_tune(recipe, tmp_path/'run')
    metrics = RunMetrics(tmp_path/'run')
    metrics.update()
    first, second = [[row['phases'] for row in metrics.ranks[rank]] for rank in (0, 1)]
    assert min(phases['forward'] for phases in second) > .15
    def later(phase):  # Of a middle step: a rank that another process stops in one is late too
        apart = [there[phase] - here[phase] for here, there in zip(first[1:], second[1:])]
        return statistics.median(apart)
    assert later('communication') < -.1
    assert later('forward') > .1


def test_stages_come_in_their_order(small, tmp_path, monkeypatch):
    told = tmp_path/'told'
    mark_stage = rank_run.mark_stage
    def note(directory, stage, *reason):
        with told.open('a') as file: file.write(f'{stage}\n')
        mark_stage(directory, stage, *reason)
    monkeypatch.setattr(rank_run, 'mark_stage', note)
    recipe = small.changed(ALONE | {'intervals.saving': 3, 'intervals.evaluation': 3,
                                    'data.test_share': .2})
    fine_tune(recipe, tmp_path/'run')
    assert told.read_text().split() == [
        'loading', 'training', *['evaluating', 'training', 'saving', 'training'] * 2, 'saving',
        'ended']


@pytest.mark.slow
def test_killed_ranks_and_a_resume_leave_one_line_for_each_step(small, tmp_path, monkeypatch):
    "Both ranks are killed within a line; one reader sees the run, the kill and the resume."
    recipe = small.changed({'intervals.saving': 2})
    write = rank_metrics._write
    def die_within_a_line(metrics, waiting):
        if waiting[0]['step'] < 4: return write(metrics, waiting)
        metrics._lines.write('{"version": 1, "ru')
        metrics._lines.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    metrics = RunMetrics(tmp_path/'run')
    with monkeypatch.context() as patch:
        patch.setattr(rank_metrics, '_write', die_within_a_line)
        with pytest.raises(RankError): fine_tune(recipe, tmp_path/'run')
    metrics.update()
    assert metrics.latest[0]['step'] == 3
    fine_tune(recipe, tmp_path/'run', resume=True)
    metrics.update()
    for rank in (0, 1):
        steps = [row['step'] for row in metrics.ranks[rank]]
        assert steps == list(range(1, recipe.optimizer.steps + 1))
        assert [row['step'] for row in read_metrics(RunFiles(tmp_path/'run').rank_metrics(rank))
                ] == steps
    assert metrics.damaged == 0


class Writer:
    "Writes lines as ranks and their surroundings do, and knows which are whole."
    def __init__(self, file): self.file, self.whole, self.rest = file, [], None

    def write(self, text):
        with self.file.open('a') as lines: lines.write(text)

    def add(self, number, line, chance):
        "Finish the line that was begun, or write a whole one."
        if self.rest: number, line = self.rest
        self.write(line)
        self.whole.append(number)
        self.rest = None

    def half(self, number, line, chance):
        if self.rest: return
        cut = chance.randrange(1, len(line))
        self.write(line[:cut])
        self.rest = number, line[cut:]

    def rotate(self, number, line, chance):
        if not self.rest and self.file.exists(): self.file.rename(self.file.parent/f'old-{number}')

    def truncate(self, number, line, chance):
        if self.file.exists(): self.file.write_text('')
        self.rest = None


@pytest.mark.parametrize('seed', range(20))
def test_a_tailer_reads_every_whole_line_once_whatever_happens_to_the_file(seed, tmp_path):
    "It looks at least once at every file, and before and after one is emptied."
    chance, file = random.Random(seed), tmp_path/'rank-00000.jsonl'
    tailer, writer, read = Tailer(file), Writer(file), []
    acts, seen = ['add', 'add', 'add', 'half', 'rotate', 'truncate'], False
    def look(): read.extend(row['step'] for row in tailer.new())
    for number in range(80):
        act = chance.choice(acts)
        if act == 'truncate' or act == 'rotate' and not seen: look()
        line = json.dumps({'step': number, 'text': 'ü' * chance.randrange(9)}) + '\n'
        getattr(writer, act)(number, line, chance)
        if act == 'rotate': seen = False
        if act == 'truncate' or chance.random() < .4:
            look()
            seen = file.exists()
    look()
    assert read == writer.whole
    assert len(read) > 20
    assert tailer.damaged == 0


def test_two_numbers_of_a_line_give_the_flops_of_all_its_rows():
    "The sum over rows of unequal length, from their token count and token-weighted length."
    recipe = Recipe.named('8b-1x24gb-qlora')
    work, rows = RowWork(recipe), (9, 100, 1001, 37)
    def line(lengths):
        tokens = sum(lengths)
        mean = sum(n * n for n in lengths) / tokens
        return {'tokens': tokens, 'row_tokens': mean, 'positions': tokens, 'row_positions': mean,
                'step_s': 1.0}
    whole = work.of(line(rows))
    each = [work.of(line([n])) for n in rows]
    for key in ('model_flop', 'hardware_flop', 'mfu', 'hfu'):
        assert whole[key] == pytest.approx(sum(part[key] for part in each), rel=1e-9)


def test_flops_are_those_that_torch_counts():
    "Eager attention runs all scores, and the counter counts them; so it runs what `hfu` divides."
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    from llm_workbook.files import asset
    recipe = Recipe.named('reviews-qlora').changed(
        {'method.kind': 'full', 'model.attention': 'eager', 'batch.loss_head': 'full',
         'batch.micro': 2, **ALONE,
         'sharding.activation_checkpointing': 'none'})
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'), attn_implementation='eager')
    ids = torch.ones(2, 40, dtype=torch.int64)
    with FlopCounterMode(display=False) as flops:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    line = {'tokens': 64, 'row_tokens': 32.5, 'positions': 80, 'row_positions': 40.0, 'step_s': 1.0}
    assert RowWork(recipe).of(line)['hardware_flop'] == flops.get_total_flops()


def test_other_threads_do_not_wait_for_the_step():
    from threading import Thread
    from torch._C._distributed_c10d import Work
    clock = StepClock()
    wait = Work.wait
    class Slow:
        def wait(self): time.sleep(.05)
    with timed_waits(clock):
        assert Work.wait is not wait
        clock.begin()
        thread = Thread(target=lambda: pytest.raises(TypeError, Work.wait, Slow()))
        thread.start()
        thread.join()
        assert clock._waits == []
        with pytest.raises(TypeError): Work.wait(Slow())
        assert len(clock._waits) == 1
    assert Work.wait is wait
