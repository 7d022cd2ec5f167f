"""Runs beside the kernel: what comes back, what is refused, how they stop, and that nothing stays
however they end."""
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import groupby
from types import SimpleNamespace

import psutil
import pytest
import torch
from trouble import files, fine_tune, small_recipe, steps_done, wait_for

from llm_workbook.launching import background as launching
from llm_workbook.checkpoint.manifest import check_checkpoint, latest_valid
from llm_workbook.launching.background import WorkerProcess, launch
from llm_workbook.parallel.ranks import RankError, log_tail
from llm_workbook.training.resume import Preempted
from llm_workbook.training.run_directory import run_state
from llm_workbook.training.run_lock import RunLocked, lock_holder, run_lock, take_hold


@pytest.fixture(scope='module')
def recipe(tmp_path_factory):
    """Two steps of a tiny full fine-tune on two ranks; it may be made longer without becoming
    another recipe."""
    return small_recipe(
        tmp_path_factory.mktemp('small'),
        **{'optimizer.steps': 2, 'optimizer.schedule': 'constant', 'optimizer.warmup': 0.0})


@pytest.fixture(scope='module')
def workers():
    with WorkerProcess() as made: yield made
    assert psutil.Process().children(recursive=True) == []


@pytest.fixture(scope='module')
def done(recipe, workers, tmp_path_factory):
    "A run that has finished."
    run = launch(recipe, tmp_path_factory.mktemp('done')/'run', workers)
    run.wait(120)
    return run


@pytest.fixture
def endless(recipe, workers, tmp_path):
    "A run of 5,000 steps that has done three."
    run = launch(recipe.changed({'optimizer.steps': 5000}), tmp_path/'run', workers)
    assert wait_for(lambda: steps_done(run.directory) >= 3 or run.state != 'running', 60), run.wait(
        1)
    assert run.state == 'running', run.wait(1)
    yield run
    run.kill()
    assert wait_for(lambda: run.state not in ('running', 'stopping'), 20)


def below(workers) -> list: return psutil.Process(workers._box.process.pid).children(recursive=True)


# What comes back

def test_a_run_gives_what_fine_tune_gives(done, recipe, tmp_path):
    run = done.wait()
    plain = fine_tune(recipe, tmp_path/'plain')
    assert run is done.wait()
    assert run.metrics[-1]['loss'] == pytest.approx(plain.metrics[-1]['loss'], abs=1e-6)
    assert [r['shards'] for r in run.ranks] == [r['shards'] for r in plain.ranks]
    assert run.saved.is_dir()
    assert run.to_dict().keys() == plain.to_dict().keys()
    assert run.ranks[0].keys() == plain.ranks[0].keys()


def test_it_tells_how_it_stands_and_takes_no_second_run(done, endless, recipe, tmp_path):
    assert done.state == 'finished'
    assert '2 of 2 steps' in repr(done)
    assert endless.state == 'running'
    assert 'running' in repr(endless)
    for run in done, endless:
        assert 'rank' in run._repr_html_()
        assert '<script' not in run._repr_html_()
    with pytest.raises(TimeoutError, match="'run' is still running after 0.01 s"):
        endless.wait(0.01)
    with pytest.raises(RuntimeError, match="busy with 'run'"):
        launch(recipe, tmp_path/'other', endless.workers)


def test_logs_stay_in_the_directory_and_are_read_from_their_end(done):
    assert sorted(path.name for path in (done.directory/'logs').iterdir()) == [
        'rank-0.log', 'rank-1.log']
    assert 'rank 1 of 2' in done.log(1)
    assert 'rank 1 has returned' in done.log(1)
    assert all(f'step {step} of 2: loss ' in done.log() for step in (1, 2))
    assert 'Warning' not in done.log()
    with open(done.directory/'logs/rank-1.log', 'ab') as log:
        log.truncate(2**30)  # A sparse gigabyte
        log.seek(0, os.SEEK_END)
        log.write(b'\nthe last line\n')
    start = time.process_time()
    assert done.log(1) == 'the last line\n'
    assert time.process_time() - start < 0.5
    for rank in -1, 2, 0.5:
        with pytest.raises(ValueError, match=f'rank {rank} is none of 0 to 1'): done.log(rank)


@pytest.mark.parametrize(
    'most_b, after_b, found',
    [
        (100, 0, 'one\ntwo\nthree\n'),
        (6, 0, 'three\n'),
        (9, 0, 'three\n'),
        (10, 0, 'two\nthree\n'),
        (100, 4, 'two\nthree\n'),
        (3, 0, 'ee\n'),
        (100, 14, '')])
def test_the_end_of_a_log_is_whole_lines(most_b, after_b, found, tmp_path):
    (tmp_path/'log').write_text('one\ntwo\nthree\n')
    assert log_tail(tmp_path/'log', most_b, after_b) == found
    assert log_tail(tmp_path/'none') == ''


# The state of the kernel does not matter

def test_a_kernel_in_the_worst_of_states(recipe, workers, tmp_path, monkeypatch):
    import bitsandbytes, peft  # noqa: E401, F401
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr('accelerate.utils.is_cuda_available', lambda: True)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    torch.nn.Linear(256, 256)(torch.randn(2048, 256)).pow(2).mean().backward()
    torch.set_num_threads(threads)
    assert len(launch(recipe, tmp_path/'run', workers).wait(120).metrics) == 2


def test_the_next_run_has_the_variables_and_the_folder_of_the_moment(
    recipe, workers, tmp_path, monkeypatch
):
    (tmp_path/'rows').symlink_to(recipe.data.source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('LLMW_LOGS', str(tmp_path/'elsewhere'))
    monkeypatch.setenv('TORCH_DISTRIBUTED_DEBUG', 'MUCH')
    with pytest.raises(RankError, match='TORCH_DISTRIBUTED_DEBUG'):
        launch(recipe.changed({'data.source': 'rows'}), 'run', workers).wait(120)
    assert (tmp_path/'run/logs').is_dir()
    assert not (tmp_path/'elsewhere').exists()


# Refused

@pytest.mark.parametrize(
    'change, words',
    [
        ({'data.source': 'nowhere'}, 'nowhere'),
        ({'cluster.nodes': 2}, 'cluster.nodes is 2'),
        ({'batch.length': 8}, '8')])
def test_a_bad_recipe_is_refused_in_the_kernel(change, words, recipe, workers, tmp_path):
    with pytest.raises(ValueError, match=words):
        launch(recipe.changed(change), tmp_path/'run', workers)
    assert not (tmp_path/'run').exists()
    assert 'busy' not in repr(workers)
    assert below(workers) == []


def test_without_workers_a_bad_recipe_starts_none(recipe, tmp_path, monkeypatch):
    def fail(*words, **how): pytest.fail('a process was started')
    monkeypatch.setattr(subprocess, 'Popen', fail)
    with pytest.raises(ValueError, match='nowhere'):
        launch(recipe.changed({'data.source': 'nowhere'}), tmp_path/'run')
    with pytest.raises(ValueError, match='timeout_s must be more than 0'):
        launch(recipe, tmp_path/'run', timeout_s=0)


def test_a_directory_refuses_before_a_process_starts(done, recipe, tmp_path, monkeypatch):
    def fail(*words, **how): pytest.fail('a process was started')
    monkeypatch.setattr(subprocess, 'Popen', fail)
    with run_lock(tmp_path/'run'), pytest.raises(RunLocked, match='is taken by process'):
        launch(recipe, tmp_path/'run')
    with pytest.raises(ValueError, match="'run' holds a run already"):
        launch(recipe, done.directory)
    with pytest.raises(ValueError, match='the recipe has changed since .*optimizer.clip'):
        launch(recipe.changed({'optimizer.clip': 0.5}), done.directory, resume=True)


LAUNCH = """
import sys
from llm_workbook.config.recipe import Recipe
from llm_workbook.launching.background import launch
run = launch(Recipe.load('recipe.yaml'), 'run')
print('launched', flush=True)
sys.stdin.readline()
run.kill()
"""


def test_of_two_launches_the_second_is_refused_while_the_first_one_imports(recipe, tmp_path):
    recipe.save(tmp_path/'recipe.yaml')
    first = subprocess.Popen(
        [sys.executable, '-c', LAUNCH], cwd=tmp_path, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == 'launched\n'
        assert files(tmp_path/'run') <= {'.llmw.lock'}, 'the run has begun: it is too late'
        with pytest.raises(RunLocked, match=f'taken by a start by process {first.pid} on'):
            launch(recipe, tmp_path/'run')
        first.kill()
        first.wait()
        with run_lock(tmp_path/'run', wait_s=20): pass  # Until its workers have seen that
    finally:
        first.kill()
        first.communicate()


def test_a_directory_is_free_at_no_instant_between_launch_and_end(recipe, workers, tmp_path):
    workers.ready()
    run = launch(recipe, tmp_path/'run', workers)
    holders = []
    while run.state == 'running': holders.append(lock_holder(tmp_path/'run'))
    run.wait()
    in_turn = [holder for holder, _ in groupby(holders)]
    assert all(in_turn[:-1]), in_turn
    assert any(re.fullmatch(r'process \d+ on .*', holder) for holder in in_turn), in_turn
    assert f'process {os.getpid()} on' not in in_turn[-1]
    assert lock_holder(tmp_path/'run') == ''


def test_a_finished_run_starts_nothing_and_says_how_to_begin_anew(
    done, recipe, monkeypatch, capsys
):
    def fail(*words, **how): pytest.fail('a process was started')
    monkeypatch.setattr(subprocess, 'Popen', fail)
    same = launch(recipe, done.directory, resume=True)
    assert "'run' is finished already, at step 2" in capsys.readouterr().out
    same.stop()
    same.kill()
    assert (same.state, same.error, same.wait(1).ranks) == ('finished', '', [])
    assert same.wait().saved.is_dir()


def test_a_python_that_ends_says_which_run_it_ends(done, endless, capsys, monkeypatch):
    launching._say_what_ends()
    said = capsys.readouterr().err
    assert said.count('\n') == 1
    assert "the run in 'run' ends with this Python, at step" in said
    assert 'of 5000' in said
    assert 'resume=True goes on' in said
    monkeypatch.setattr(os, 'getpid', lambda: 1)  # As in a fork
    launching._say_what_ends()
    assert capsys.readouterr().err == ''


def test_the_error_of_a_rank_arrives_as_it_is(recipe, workers, tmp_path):
    bursting = recipe.changed(
        {'optimizer.learning_rate': 1e30, 'optimizer.clip': 1e30, 'optimizer.steps': 6})
    words = r'rank \d failed: FloatingPointError: (loss|grad_norm)'
    with pytest.raises(RankError, match=words) as found:
        launch(bursting, tmp_path/'run', workers).wait(120)
    assert found.value.traceback
    assert '--- 20' not in found.value.log
    assert 'busy' not in repr(workers)


# Stop, go on, interrupt

def test_stop_saves_and_frees_and_resume_goes_on(endless, recipe, workers):
    start = time.monotonic()
    # Twice is once
    endless.stop()
    endless.stop()
    with pytest.raises(Preempted) as preempted: endless.wait(60)
    assert time.monotonic() - start < 20  # A second on quiet cores
    assert endless.state == 'preempted'
    assert below(workers) == []
    step = preempted.value.step
    assert 3 <= step < 5000
    assert check_checkpoint(latest_valid(endless.directory), deep=True).step == step
    assert run_state(endless.directory) == {'state': 'preempted', 'step': step}
    two_steps_more = recipe.changed({'optimizer.steps': step + 2})
    run = launch(two_steps_more, endless.directory, workers, resume=True).wait(120)
    assert len(run.metrics) == step + 2
    assert endless.log(0).count('rank 0 of 2') == 2


def interrupt(after_s, times=1):
    def act():
        for _ in range(times):
            time.sleep(after_s)
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=act, daemon=True).start()


def test_an_interrupt_saves_and_frees_everything(endless, workers):
    start = time.monotonic()
    with pytest.raises(Preempted) as preempted:
        interrupt(0.2)
        endless.wait(60)
    assert time.monotonic() - start < 20  # A second on quiet cores
    assert preempted.value.step >= 3
    assert below(workers) == []


def test_a_second_interrupt_does_not_wait_for_the_save(endless, workers, monkeypatch):
    for child in below(workers):  # Ranks that do not listen
        if child.parent().pid != workers._box.process.pid: child.suspend()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupt(0.3, times=2)
        endless.wait(60)
    assert time.monotonic() - start < 20  # A second on quiet cores
    assert below(workers) == []
    assert endless.state == 'preempted'
    with pytest.raises(Preempted, match='before its first step'): endless.wait()
    assert list(os.scandir(workers._box.temp)) == []


# Nothing stays

def test_a_run_whose_process_is_killed_says_so(endless, workers):
    below(workers)[0].kill()
    with pytest.raises(RuntimeError, match='exit code -9'): endless.wait(30)
    assert endless.state == 'failed'
    assert below(workers) == []


def test_a_run_that_is_withdrawn_cannot_be_handed_over(monkeypatch, tmp_path):
    hold = take_hold(tmp_path/'run')
    box = SimpleNamespace(
        lock=threading.RLock(), ready=threading.Event(), once=False, waits=({'do': 'run'}, hold))
    sent = []
    box.run = launching.Launched(None, None, SimpleNamespace(_box=box))
    monkeypatch.setattr(launching, '_send', lambda box, **what: sent.append(what))
    monkeypatch.setattr(launching, '_committed', lambda directory: 0)
    ready, plain = threading.Thread(target=launching._hand_over, args=(box,)), launching._end_run
    # The workers become ready at the worst of moments
    def end_late(*what):
        ready.start()
        ready.join(0.3)
        plain(*what)
    monkeypatch.setattr(launching, '_end_run', end_late)
    run = box.run
    run.stop()
    ready.join(5)
    assert run.state == 'preempted'
    assert sent == []
    assert box.run is None
    assert box.waits is None
    assert lock_holder(tmp_path/'run') == ''


def test_what_a_nursery_has_imported_is_not_collected_again_in_every_child(monkeypatch):
    monkeypatch.setattr(launching, '_HEAVY', [])
    monkeypatch.setattr(launching, '_OPENS_CUDA', ())
    gc.unfreeze()  # What conftest.py has frozen
    try:
        launching._import_all()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 100_000
        assert gc.get_count()[0] < 1000
    finally: gc.unfreeze()


SAVING = """trap 'echo saved > {place}; exit 0' TERM; touch {place}; while :; do sleep 0.02; done"""
DEAF = "trap '' TERM; touch {place}; while :; do sleep 0.02; done"


@pytest.mark.parametrize(
    'program, words, code', [(SAVING, 'saved\n', 0), (DEAF, '', -signal.SIGKILL)],
    ids=['saves', 'does not listen'])
def test_the_run_of_a_kernel_that_has_gone_is_told_to_save_before_it_is_killed(
    program, words, code, tmp_path, monkeypatch
):
    """The nursery's own signals to a process that stands for the run; the whole of it is in
    tests/fault."""
    run = subprocess.Popen(['bash', '-c', program.format(place=tmp_path/'run')])
    assert wait_for((tmp_path/'run').exists)
    monkeypatch.setattr(launching, '_LAST_S', 0.5 if code else 10)
    nursery = launching._Nursery.__new__(launching._Nursery)
    nursery.child, nursery.stop_sent = run.pid, False
    nursery.bury = lambda: run.poll() is not None and setattr(nursery, 'child', None)
    launching._save_and_end(nursery)
    assert (run.wait(5), (tmp_path/'run').read_text()) == (code, words)


def test_a_nursery_takes_no_second_run():
    nursery = launching._Nursery.__new__(launching._Nursery)
    nursery.child = 1
    with pytest.raises(RuntimeError, match='a run is there already'): nursery.fork({})


def test_a_nursery_that_cannot_start_says_why(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(launching, '_PROGRAM', 'raise SystemExit("no torch here")')
    with pytest.raises(RuntimeError, match='no torch here'): launch(recipe, tmp_path/'run').wait(30)
    with pytest.raises(RuntimeError, match='no torch here'): WorkerProcess().ready()
