"""Faults 5, 11 and 12: a rank out of memory, a rank that hangs, ranks that call different
collectives."""
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trouble import disturb, exit_code, files, fine_tune, torchrun

from llm_workbook.training.watchdog import HangWatch
from llm_workbook.parallel.ranks import RankError, RankTimeout, run_ranks


@pytest.fixture(autouse=True)
def collectives_are_compared(monkeypatch):
    "As somebody who looks for such a fault has it; it makes each step half as long again."
    monkeypatch.setenv('TORCH_DISTRIBUTED_DEBUG', 'DETAIL')


def reduce_in_steps(act, at=5, rank=1, count=400):
    "All-reduce after all-reduce; one rank calls `act` in the middle."
    for step in range(count):
        if dist.get_rank() == rank and step == at: act()
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.01)


# 5: a rank raises

def exhaust():
    "Take the memory of this rank away, and ask for some."
    pages = int(Path('/proc/self/statm').read_text().split()[0])
    limit_b = pages*resource.getpagesize() + 2**26
    resource.setrlimit(resource.RLIMIT_AS, (limit_b, limit_b))
    torch.ones(2**28)


def test_05_a_rank_out_of_memory_is_the_one_that_is_named():
    with pytest.raises(RankError, match='rank 1 failed: RuntimeError: .*allocate') as caught:
        run_ranks(reduce_in_steps, args=(exhaust,))
    assert caught.value.rank == 1
    assert 'in exhaust' in caught.value.traceback
    assert 'Connection' not in str(caught.value)


@pytest.mark.slow
def test_05_in_a_fine_tune_the_cause_comes_first_and_the_others_are_not_blamed(
    recipe, tmp_path, monkeypatch
):
    disturb(monkeypatch, exhaust)
    with pytest.raises(RankError, match='rank 1 failed: RuntimeError: .*allocate') as caught:
        fine_tune(recipe, tmp_path/'run')
    message = str(caught.value)
    assert message.startswith('rank 1 failed')
    assert 'in exhaust' in message
    assert 'rank 0' not in message.partition('Log of')[0]
    saved = 'model', 'adapters', 'checkpoint'
    assert not [name for name in files(tmp_path/'run') if name.startswith(saved)]


BROKEN = """
import sys
from llm_workbook.__main__ import main
import test_lost_ranks, trouble

class Patch:
    setattr = staticmethod(setattr)

trouble.disturb(Patch, getattr(test_lost_ranks, sys.argv.pop()))
sys.exit(main(['train', *sys.argv[1:]]))
"""


def broken_by_torchrun(recipe, folder, act, monkeypatch, *words):
    """Run under torchrun what this library starts there, with one rank that does `act` in its third
    pass; give back the log."""
    (folder/'broken.py').write_text(BROKEN)
    fault = Path(__file__).parent
    monkeypatch.setenv('PYTHONPATH', f'{fault}:{fault.parent}:{fault.parent.parent}')
    start = time.monotonic()
    words = (*words, act.__name__)
    code = exit_code(torchrun(recipe, folder/'run', program=(folder/'broken.py',), words=words))
    log = (folder/'log').read_text()
    assert code == 1, log
    print(f'over after {time.monotonic() - start:.1f} s')
    return log


@pytest.mark.slow
def test_05_torchrun_s_summary_has_the_cause_first(recipe, tmp_path, monkeypatch, warm):
    log = broken_by_torchrun(recipe, tmp_path, exhaust, monkeypatch)
    cause = log.rpartition('Root Cause (first observed failure):')[2]
    assert re.search(r'rank\s*: 1 ', cause), log
    assert 'RuntimeError' in cause, log
    assert 'in exhaust' in cause, log
    assert not re.search(r'rank\s*: 0 ', cause), log


# 11: a rank hangs

def sleep(): time.sleep(1000)


@pytest.mark.slow
def test_11_under_torchrun_the_hanging_rank_is_named_and_all_end(
    recipe, tmp_path, monkeypatch, warm
):
    log = broken_by_torchrun(recipe, tmp_path, sleep, monkeypatch, '--step-timeout', '8')
    who = 'ranks [1] stuck, ranks [0] waiting for another'
    assert f'RankHangs: no step was done in 8 s: {who}' in log, log
    assert 'time.sleep(1000)' in (tmp_path/'run/stacks/rank-1.json').read_text()


def test_11_a_rank_that_sleeps_is_named_with_its_stack_at_the_limit():
    start = time.monotonic()
    with pytest.raises(RankTimeout) as caught:
        run_ranks(reduce_in_steps, args=(sleep,), timeout_s=3)
    assert time.monotonic() - start < 8
    assert (caught.value.rank, caught.value.stuck, caught.value.waiting) == (1, [1], [0])
    assert 'in reduce_in_steps' in caught.value.stacks[1]
    assert 'all_reduce' in caught.value.stacks[0]


def test_11_a_monitored_barrier_names_the_missing_rank():
    from datetime import timedelta
    def wait():
        if dist.get_rank() == 1: time.sleep(1000)
        dist.monitored_barrier(timeout=timedelta(seconds=2))
    words = '(?i)rank 0 failed.*rank 1 failed to pass monitoredBarrier'
    with pytest.raises(RankError, match=words): run_ranks(wait, timeout_s=20)


def test_05_who_waited_in_a_barrier_is_not_the_cause():
    """Under TORCH_DISTRIBUTED_DEBUG=DETAIL the peers of a rank that leaves complain of a barrier,
    perhaps before it has gone."""
    def leave():
        dist.barrier()  # Both have started
        if dist.get_rank() == 0:
            raise RuntimeError('[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 100000 ms')
        time.sleep(0.4)
        os._exit(1)
    with pytest.raises(RankError, match='rank 1 left with exit code 1'):
        run_ranks(leave, timeout_s=20)


def test_11_the_watch_beside_each_rank_ends_all_of_them(tmp_path):
    """What runs under torchrun, where nobody stands beside the ranks: within the limit, with stacks
    of all ranks."""
    def watched():
        with HangWatch(tmp_path, 2, dist.get_rank(), 2) as watch:
            for step in range(100):
                if dist.get_rank() == 1 and step == 5: time.sleep(1000)
                dist.all_reduce(torch.ones(10))
                watch.beat()
    start = time.monotonic()
    words = 'rank 1 failed: RankHangs: no step was done in 2 s'
    with pytest.raises(RankError, match=words) as caught: run_ranks(watched, timeout_s=40)
    assert time.monotonic() - start < 12
    assert caught.value.rank == 1
    assert 'ranks [1] stuck, ranks [0] waiting for another' in str(caught.value)
    assert {'stacks/rank-0.json', 'stacks/rank-1.json'} <= files(tmp_path)
    assert 'time.sleep(1000)' in (tmp_path/'stacks/rank-1.json').read_text()


def test_11_a_stopped_rank_is_blamed_and_not_the_one_that_waits_for_it(tmp_path):
    def watched():
        with HangWatch(tmp_path, 2, dist.get_rank(), 2) as watch:
            for step in range(100):
                if dist.get_rank() == 1 and step == 5: os.kill(os.getpid(), signal.SIGSTOP)
                dist.all_reduce(torch.ones(10))
                watch.beat()
    with pytest.raises(RankError) as caught: run_ranks(watched, timeout_s=40)
    assert caught.value.rank == 1
    who = 'ranks [0] waiting for another, ranks [1] without a sign'
    assert f'RankHangs: no step was done in 2 s: {who}' in caught.value.reason
    assert 'exit code' not in str(caught.value)


# 12: collectives that do not match

def another_kind(rank):
    if rank: dist.broadcast(torch.ones(4), 1)
    else: dist.all_reduce(torch.ones(4))


def another_shape(rank): dist.all_reduce(torch.ones(4 + rank))


def another_type(rank):
    dtype = torch.float64 if rank else torch.float32
    dist.all_reduce(torch.ones(4, dtype=dtype))


@pytest.mark.parametrize('call', [another_kind, another_shape, another_type])
def test_12_collectives_that_differ_are_an_error_at_once_that_shows_both(call):
    def work():
        reduce_in_steps(lambda: None, count=10)
        call(dist.get_rank())
    start = time.monotonic()
    with pytest.raises(RankError, match='Detected mismatch between collectives on ranks') as caught:
        run_ranks(work, timeout_s=40)
    assert time.monotonic() - start < 10
    assert str(caught.value).count('CollectiveFingerPrint') >= 2
    assert 'differ in the following aspects' in str(caught.value)


def test_12_the_check_can_be_asked_for_after_torch_was_imported(monkeypatch):
    monkeypatch.delenv('TORCH_DISTRIBUTED_DEBUG')
    def levels(): return os.environ.get('TORCH_DISTRIBUTED_DEBUG'), dist.get_debug_level().name
    assert run_ranks(levels) == [(None, 'OFF')] * 2
    asked = {'TORCH_DISTRIBUTED_DEBUG': 'DETAIL'}
    assert run_ranks(levels, env=asked) == [('DETAIL', 'DETAIL')] * 2
