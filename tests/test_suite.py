"""The programs behind `make test`: a fork is the program it stands for, and nothing that fails is
lost on the way."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import suite
import warm
from warm import Done, Job, run_all

NBDEV = str(Path(sys.executable).parent/'nbdev_test')


@pytest.fixture(autouse=True)
# What is imported here is enough
def forked(monkeypatch): monkeypatch.setattr(warm, 'import_libraries', lambda: True)


def program(folder, text):
    path = folder/'program.py'
    path.write_text(text)
    return path


def both(path, *arguments):
    "Run a script as a fork and in an interpreter of its own: (fork, interpreter)."
    found = {
        done.job.cold: done
        for done in run_all(
            [Job('program', str(path), arguments, cold) for cold in (False, True)], 2)}
    return found[False], found[True]


@pytest.mark.parametrize(
    'text, status, words',
    [
        (
            'import sys; print(__name__, sys.argv[1:], sys.path[0] == '
            'sys.argv[0].rpartition("/")[0])',
            0, "__main__ ['a', '-b'] True"),
        ('import os; print(os.getcwd(), flush=True); os.system("echo below")', 0, 'below'),
        ('raise SystemExit(3)', 3, ''),
        ('raise SystemExit("not today")', 1, 'not today'),
        ('raise SystemExit', 0, ''),
        ('print(1); 1 / 0', 1, 'ZeroDivisionError: division by zero'),
        ('import atexit; atexit.register(print, "at the end")', 0, 'at the end'),
        (
            'import threading, time; threading.Thread(target=lambda: (time.sleep(.2), '
            'print("late"))).start()',
            0, 'late'),
        ('import os, signal; os.kill(os.getpid(), signal.SIGKILL)', -signal.SIGKILL, '')])
def test_a_fork_ends_and_speaks_as_the_program_does(tmp_path, text, status, words):
    fork, own = both(program(tmp_path, text), 'a', '-b')
    assert fork.status == own.status == status
    assert words in fork.output
    assert words in own.output
    if 'Error' not in words: assert fork.output == own.output


def test_the_processor_time_of_a_job_is_counted_with_that_of_its_children(tmp_path):
    busy = 'import time\nend = time.process_time() + .3\nwhile time.process_time() < end: pass\n'
    text = f'import subprocess, sys\nsubprocess.run([sys.executable, "-c", {busy!r}])\n{busy}'
    fork, own = both(program(tmp_path, text))
    assert fork.cpu_s >= .6
    assert own.cpu_s >= .6
    assert fork.wall_s >= .6


def page(folder, *sources):
    path = folder/'page.ipynb'
    cells = [
        {
            'cell_type': 'code', 'id': f'c{i}', 'metadata': {}, 'source': source, 'outputs': [],
            'execution_count': None}
        for i, source in enumerate(sources)]
    path.write_text(
        json.dumps(
            {
                'cells': cells,
                'metadata': {'kernelspec': {'name': 'python3', 'language': 'python'}},
                'nbformat': 4, 'nbformat_minor': 5}))
    return path


@pytest.mark.parametrize(
    'flags, cells, status',
    [
        ('', ['x = 1', 'assert x == 1'], 0),
        ('', ['x = 1', 'assert x == 2'], 1),
        ('', ['#| slow\nassert False', '#| eval: false\nassert False'], 0),
        ('slow', ['#| slow\nassert False'], 1),
        ('slow', ['#| slow\n#| cuda\nassert False', '#| eval: false\nassert False'], 0),
        (
            '', ['import os\nassert os.path.exists("page.ipynb") and os.environ["IN_TEST"] == "1"'],
            0),
    ],
)
def test_a_page_is_tested_as_nbdev_tests_it(tmp_path, flags, cells, status):
    fork, own = both(NBDEV, '--path', str(page(tmp_path, *cells)), '--flags', flags)
    assert fork.status == own.status == status, fork.output + own.output
    assert ('Success.' in fork.output) is ('Success.' in own.output) is (status == 0)
    if status: assert 'AssertionError' in fork.output and 'page.ipynb' in fork.output


USED = """
import bitsandbytes, torch
from accelerate import Accelerator
from nbdev.test import nbdev_test
Accelerator(cpu=True)
# glibc keeps what is freed
tensors = [torch.ones(2**16, dtype=torch.uint8) for _ in range(4000)]
block = torch.ones(2**16, dtype=torch.uint8)
del tensors
nbdev_test(path='nbs', file_re=r'01_ranks|07_background|04_memory_trace|03_names', n_workers=0)
"""


@pytest.mark.slow
def test_pages_that_need_a_new_process_also_pass_in_a_used_one():
    "Without `make test`, `nbdev_test` runs many pages in each of its processes."
    command = sys.executable, '-c', USED
    done = subprocess.run(command, cwd=suite.ROOT, capture_output=True, text=True)
    assert 'Success.' in done.stdout, done.stdout + done.stderr


def test_no_more_than_asked_run_at_once(tmp_path):
    text = (
        f'import os, time\nfrom pathlib import Path\nhere = Path({str(tmp_path)!r})\n'
        'mine = here/f"{os.getpid()}.pid"\nmine.touch()\ntime.sleep(.2)\n'
        'print(len(list(here.glob("*.pid"))))\nmine.unlink()'
    )
    done = list(run_all([Job(str(i), str(program(tmp_path, text)), ()) for i in range(5)], 2))
    assert len(done) == 5
    assert {int(one.output) for one in done} <= {1, 2}


def test_every_page_and_every_test_is_in_one_job():
    jobs = suite.page_jobs() + suite.file_jobs()
    assert len({job.name for job in jobs}) == len(jobs)
    assert {Path(job.name).stem for job in jobs} >= set(suite.COLD)
    assert all(
        Path(suite.ROOT/folder / job.name).exists()
        for job in jobs
        for folder in [('nbs' if job.name.endswith('.ipynb') else '')])
    files = {str(path.relative_to(suite.ROOT)) for path in (suite.ROOT/'tests').rglob('test_*.py')}
    covered = {
        name
        for name in files
        for job in jobs
        if name == job.name or name.startswith(job.name + os.sep)}
    assert covered == files


SAID = """..s
0.50s call     tests/test_a.py::test_slow
2.50s setup    tests/test_a.py::test_slower
SKIPPED [1] tests/test_a.py:3: no root
12 passed, 1 skipped, 3 deselected, 14 warnings in 61.20s (0:01:01)
"""


def test_the_summary_adds_up_what_pytest_said():
    ran = [
        Done(Job(name, 'pytest', ()), 0, SAID.replace('test_a', name), 1.0, 2.0)
        for name in ('test_a', 'test_b')]
    lines = suite.summary(ran).splitlines()
    assert lines[-1] == '24 passed, 2 skipped, 6 deselected, 28 warnings'
    assert lines[:2] == [
        'SKIPPED [1] tests/test_a.py:3: no root', 'SKIPPED [1] tests/test_b.py:3: no root']
    assert [line[:5] for line in lines[2:6]] == ['2.50s', '2.50s', '0.50s', '0.50s']
    assert suite.table(ran).splitlines()[-1].strip() == '4.0 s of the processor for all 2 jobs'


@pytest.mark.parametrize(
    'status, output, well',
    [
        (0, '', True),
        (1, '3 deselected', False),
        (5, '3 deselected in 1s', True),
        (5, 'no tests ran', False),
        (-9, '', False),
        (2, '', False)])
def test_only_an_empty_selection_may_end_otherwise(status, output, well):
    assert suite.passed(Done(Job('x', 'pytest', ()), status, output, 1., 1.)) is well


def test_a_job_that_hangs_is_named_and_ended(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(warm, 'LIMIT_S', .5)
    (done,) = run_all(
        [Job('that hangs', str(program(tmp_path, 'import time; time.sleep(60)')), ())], 1)
    assert done.status == -signal.SIGKILL
    assert done.wall_s < 20
    assert 'that hangs has run for 0.5 s, and is killed' in capfd.readouterr().out


def test_slow_tests_are_found_and_no_other_file_is_run_for_them():
    names = {job.name for job in suite.fault_jobs()}
    assert {'tests/fault/test_stopped_runs.py', 'tests/training/test_parity.py'} <= names
    assert 'tests/plan/test_ledger_bytes.py' in names, 'its cases are slow by `slow_case` alone'
    assert not {'tests/test_house.py', 'tests/fault'} & names
    assert {
        str(path.relative_to(suite.ROOT)) for path in (suite.ROOT/'tests/fault').glob('test_*.py')
    } <= names
    assert all('-m' in job.arguments for job in suite.fault_jobs())
