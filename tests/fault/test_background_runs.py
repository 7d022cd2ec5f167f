"""Runs beside the kernel that are stopped, killed or orphaned at every moment: no process, port,
file or descriptor stays."""
import gc
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from itertools import chain

import psutil
import pytest
from trouble import children, wait_for

from llm_workbook.training.run_lock import RunLocked
from llm_workbook.checkpoint.manifest import latest_valid
from llm_workbook.launching.background import WorkerProcess, launch
from llm_workbook.training.resume import Preempted
from llm_workbook.training.run_directory import run_state

RUNS = 22  # Three ends at seven moments are 21; the first run is what the others are compared with
RUNS_WITHOUT_WORKERS = 3  # One of each end
# May be made longer without becoming another recipe
STEADY = {'optimizer.schedule': 'constant', 'optimizer.warmup': 0.0}


def held(process) -> tuple:
    "Open files, sockets and threads of a process."
    return process.num_fds(), len(process.net_connections('inet')), process.num_threads()


def below(process) -> list: return psutil.Process(process.pid).children(recursive=True)


def gone(family) -> bool:
    def alive(process): return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return wait_for(lambda: not any(map(alive, family)), 20)


def start_and_end(recipe, directory, workers, number) -> str:
    "Start a run; let it finish, or stop or kill it at one of many moments. Give back its state."
    end = ('finish', 'stop', 'kill')[number % 3]
    steps = 1 if end == 'finish' else 500
    run = launch(recipe.changed({'optimizer.steps': steps}), directory, workers)
    if end != 'finish': time.sleep(number % 7 / 4)
    if end == 'stop': run.stop()
    if end == 'kill': run.kill()
    try: run.wait(120)
    except Preempted: pass
    assert 'busy' not in repr(run.workers)
    return run.state


@pytest.mark.slow
def test_starts_and_stops_at_all_moments_leave_nothing(recipe, tmp_path, record_property, warm):
    begin = time.monotonic()
    threads = threading.active_count()
    with WorkerProcess() as workers:
        workers.ready()
        start_and_end(recipe, tmp_path/'first', workers, 0)
        gc.collect()
        nursery = psutil.Process(workers._box.process.pid)
        temp = set(os.listdir(tempfile.gettempdir()))
        before = [held(psutil.Process()), held(nursery)]
        states = []
        for number in range(1, RUNS):
            without_workers = number % (RUNS // RUNS_WITHOUT_WORKERS) == 1
            chosen = None if without_workers else workers
            states.append(start_and_end(recipe, tmp_path/f'run-{number}', chosen, number))
        gc.collect()

        def not_more():
            "Say whether neither process holds more; a run's listening thread ends after the run."
            after = [held(psutil.Process()), held(nursery)]
            pairs = zip(chain(*after), chain(*before), strict=True)
            return all(now <= then for now, then in pairs)

        assert wait_for(not_more), (before, [held(psutil.Process()), held(nursery)])
        assert [child.pid for child in children()] == [nursery.pid]
        assert set(os.listdir(tempfile.gettempdir())) == temp
    assert threading.active_count() <= threads
    assert states.count('finished') >= 7
    assert states.count('preempted') >= 12
    record_property(
        'report',
        f'{RUNS} starts and stops in {time.monotonic() - begin:.0f} s: '
        f'{states.count("finished") + 1} finished, '
        f'{states.count("preempted")} stopped or killed; nothing is left')


@pytest.mark.slow
def test_a_stop_at_any_moment_of_the_start_can_be_resumed(recipe, tmp_path, warm):
    with WorkerProcess() as workers:
        for number in range(6):
            directory = tmp_path/f'run-{number}'
            endless = recipe.changed(STEADY | {'optimizer.steps': 5000})
            run = launch(endless, directory, workers)
            time.sleep(number // 2 * 0.4)
            if number % 2: run.stop()
            else: run.kill()
            with pytest.raises(Preempted): run.wait(60)
            assert below(workers._box.process) == []
            assert os.listdir(workers._box.temp) == []
            steps = len(run.metrics) + 1
            one_step_more = recipe.changed(STEADY | {'optimizer.steps': steps})
            resumed = launch(one_step_more, directory, workers, resume=True).wait(120)
            assert [row['step'] for row in resumed.metrics] == list(range(1, steps + 1))


@pytest.mark.slow
def test_a_run_that_waits_for_the_imports_is_withdrawn(recipe, tmp_path):
    workers = WorkerProcess()
    run = launch(recipe, tmp_path/'run', workers)
    run.stop()
    with pytest.raises(Preempted, match='before its first step'): run.wait(5)
    assert repr(workers).startswith('WorkerProcess(importing')
    assert not (tmp_path/'run').exists()
    temp = workers._box.temp
    start = time.monotonic()
    alone = launch(recipe, tmp_path/'run')
    alone.stop()
    with pytest.raises(Preempted): alone.wait(5)
    workers.close()
    assert time.monotonic() - start < 5
    assert not os.path.exists(temp)


@pytest.mark.slow
def test_two_workers_do_not_share_a_directory(recipe, tmp_path, warm):
    with WorkerProcess() as one, WorkerProcess() as two:
        first = launch(recipe.changed({'optimizer.steps': 5000}), tmp_path/'run', one)
        assert wait_for(lambda: first.metrics, 120)
        with pytest.raises(RunLocked, match='is taken by'):
            launch(first.recipe, first.directory, two, resume=True)
    assert first.state == 'preempted'
    assert run_state(first.directory)['state'] == 'preempted'


KERNEL = '''
    import time
    from pathlib import Path
    from llm_workbook.launching.background import WorkerProcess, launch
    from llm_workbook.config.recipe import Recipe
    workers = WorkerProcess()
    run = launch(Recipe.load('recipe.yaml'), 'run', workers)
    while len(run.metrics) < 3: time.sleep(0.05)
    Path('pid').write_text(str(workers._box.process.pid))
    {then}
'''
# What holds the pipe open when the kernel is gone
FORKED = 'import os; os.fork() or (time.sleep(60), os._exit(0))'


@pytest.mark.slow
@pytest.mark.parametrize(
    'then', [FORKED + '; time.sleep(1000)', ''], ids=['killed with a fork', 'ended'])
def test_a_kernel_that_is_gone_takes_all_with_it(then, recipe, tmp_path, warm):
    recipe.changed(STEADY | {'optimizer.steps': 5000}).save(tmp_path/'recipe.yaml')
    (tmp_path/'temp').mkdir()
    code = textwrap.dedent(KERNEL.format(then=then))
    kernel = subprocess.Popen(
        [sys.executable, '-c', code], cwd=tmp_path,
        env=os.environ | {'TMPDIR': str(tmp_path/'temp')})
    pid_file = tmp_path/'pid'
    pid = wait_for(lambda: pid_file.exists() and pid_file.read_text(), 120)
    assert pid
    nursery = psutil.Process(int(pid))
    family = [nursery, *nursery.children(recursive=True)]
    others = [child for child in psutil.Process(kernel.pid).children() if child != nursery]
    if then: kernel.kill()
    kernel.wait(60)
    assert len(family) >= 4
    assert gone(family)
    for other in others: other.kill()
    assert list((tmp_path/'temp').iterdir()) == []
    assert run_state(tmp_path/'run')['state'] == 'preempted'
    assert latest_valid(tmp_path/'run') is not None


@pytest.mark.slow
def test_a_nursery_that_is_killed_takes_its_ranks_with_it_and_is_told(recipe, tmp_path, warm):
    workers = WorkerProcess()
    run = launch(recipe.changed({'optimizer.steps': 5000}), tmp_path/'run', workers)
    assert wait_for(lambda: len(run.metrics) >= 2, 120)
    ranks = below(workers._box.process)
    workers._box.process.kill()
    with pytest.raises(RuntimeError, match='the workers have ended'): run.wait(30)
    assert gone(ranks)
    assert run.state == 'failed'
    assert not os.path.exists(workers._box.temp)
    with pytest.raises(RuntimeError, match='make new ones'):
        launch(recipe, tmp_path/'other', workers)
    workers.close()


@pytest.mark.slow
def test_workers_that_nobody_holds_end_by_themselves(warm):
    process = WorkerProcess()._box.process
    gc.collect()
    assert process.wait(60) == 0


@pytest.mark.slow
def test_where_there_is_a_gpu_the_nursery_imports_nothing_that_may_open_it():
    code = """
        import sys
        from unittest.mock import patch
        from llm_workbook.launching import background as launching
        with patch('accelerate.utils.is_cuda_available', lambda: True): launching._import_all()
        print(*sorted({'bitsandbytes', 'peft', 'trl', 'transformers', 'datasets'} & {*sys.modules}))
    """
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == 'datasets transformers\n'
