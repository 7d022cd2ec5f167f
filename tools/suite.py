"""What `make test` and the other suites do; parts print their times.

`make test` runs `nbdev_test` and pytest side by side, with five processes on two cores: a page or a
test often waits for others.
"""
import filecmp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from page import ROOT, pages

BIN = Path(sys.executable).parent
CORES = os.cpu_count() or 2
# Threads that wait leave their core to others, and no process starts more than its own
QUIET = {'OMP_WAIT_POLICY': 'passive', 'OMP_NUM_THREADS': '1',
         # torch.compile believes the processor: for each of its instruction sets it would first
         # build a program and start it, in every process that compiles
         'TORCHINDUCTOR_VEC_ISA_OK': '1'}
LIMIT_S = 2400  # Pages and tests take less than half of that on two cores


@contextmanager
def part(name: str) -> Iterator[None]:
    "Print how long the block took, whether it fails or not."
    start = time.monotonic()
    try: yield
    finally: print(f'-- {name}: {time.monotonic() - start:.1f} s', flush=True)


def run(*command: str, cwd: Path = ROOT) -> None:
    "Run one command and stop everything when it fails."
    done = subprocess.run(command, cwd=cwd)
    if done.returncode:
        names = [Path(word).name for word in command]
        sys.exit(f'failed: {" ".join(names)}')


# Export and clean

IGNORED = '__pycache__', '.ipynb_checkpoints', 'runs', '.last_checked'


def tracked_files(folder: Path) -> set[Path]:
    "List modules and pages, as paths below `folder`."
    files = [*folder.glob('llm_workbook/**/*.py'), *folder.glob('nbs/**/*.ipynb')]
    paths = {file.relative_to(folder) for file in files}
    return {path for path in paths if not set(IGNORED) & set(path.parts)}


def same(one: Path, other: Path) -> bool:
    "Say whether both files exist and have the same content."
    return one.exists() and other.exists() and filecmp.cmp(one, other, shallow=False)


def diff_free() -> None:
    """Export and clean a copy of the working tree.

    What then differs was not exported or not cleaned.
    """
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        shutil.copy(ROOT/'settings.ini', copy)
        ignore = shutil.ignore_patterns(*IGNORED)
        for folder in ('nbs', 'llm_workbook'):
            shutil.copytree(ROOT/folder, copy/folder, symlinks=True, ignore=ignore)
        for command in ('nbdev_export', 'nbdev_clean'): run(str(BIN/command), cwd=copy)
        paths = tracked_files(copy) | tracked_files(ROOT)
        changed = sorted(str(path) for path in paths if not same(copy/path, ROOT/path))
    if changed: sys.exit(f'run nbdev_export and nbdev_clean; they change: {", ".join(changed)}')


# Pages and tests

def pytest_command(workers: int, *options: str) -> tuple[str, ...]:
    "Give the command that runs tests in so many processes; those of one file stay together."
    spread = '-n', str(workers), '--dist', 'loadfile'
    return sys.executable, '-m', 'pytest', '-q', '--durations=8', *spread, *options


# Pages that take long and that no other page needs; `make test-slow` runs them
LONG_PAGES = ('02_run', '03_talk', 'audit', 'audit_cluster', 'museum', 'real_data', '07_findings',
              '10_two_nodes_classifier', '20_zero_from_objects', '30_two_24gb_cards',
              '40_two_nodes_full', '50_one_24gb_card', '60_eight_80gb_cards', '70_one_h200',
              '80_two_t4', '81_two_t4_sharded', '05_whole_way', '01_scores', '04_chat',
              '07_invariants', '06a_pair_relations', '15_compiled_blocks', '02_merge',
              '07_background', '13a_fused_head', '13b_liger_layers')
LONG = rf'^({"|".join(LONG_PAGES)})\.ipynb$'
# Folders of the learner's pages: the book with its quickstart, and the answers to exercises.
# `make test-workbook` runs them
LEARNING = 'book', 'answers'


def nbdev_command(workers: int, *options: str) -> tuple[str, ...]:
    "Give the command that runs pages in so many processes."
    flags = os.environ.get('FLAGS', '')
    return (sys.executable, str(ROOT/'tools/warm_pages.py'), '--timing', '--n_workers',
            str(workers), '--flags', flags, *options)


class Done(NamedTuple):
    "A command that has ended."
    status: int  # 0: success
    output: str  # What it has written to both streams


@contextmanager
def group_of(command: tuple[str, ...], output) -> Iterator[subprocess.Popen]:
    "Run a command in a process group of its own; kill what is left of it when the block ends."
    process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try: yield process
    finally:
        try: os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError: pass
        process.wait()


def side_by_side(hidden: tuple[str, ...], shown: tuple[str, ...]) -> tuple[Done, int]:
    """Run two commands at once: the first with its output kept, the second with its output shown.

    Give the first one's end and the exit status of the second; both have `LIMIT_S` in all.
    """
    end = time.monotonic() + LIMIT_S
    with (tempfile.TemporaryFile('w+', errors='replace') as output,
          group_of(hidden, output) as first, group_of(shown, None) as second):
        try:
            shown_status = second.wait(LIMIT_S)
            hidden_status = first.wait(max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            output.seek(0)
            print(output.read()[-20_000:], flush=True)  # It may say which page has failed
            raise
        output.seek(0)
        return Done(hidden_status, output.read()), shown_status


def pages_report(done: Done) -> str:
    "Shorten what `nbdev_test` printed: all of an error, or the times of the twelve slowest pages."
    if done.status: return done.output[-20_000:]
    lines = done.output.splitlines()
    left_out = [line for line in lines if ' is left out: ' in line]
    times = [line for line in lines if line.endswith(' secs')]
    passed = len(times) - len(left_out)
    return '\n'.join([f'{passed} pages passed; the slowest:', *times[:12], *left_out])


def pages_and_tests(name: str, page_command: tuple[str, ...],
                    test_command: tuple[str, ...]) -> None:
    "Run pages and tests side by side; remove the `runs` that pages have made."
    os.environ.update(QUIET)
    runs = {page.parent/'runs' for page in pages()}
    new = [folder for folder in runs if not folder.exists()]
    try:
        with part(name): done, status = side_by_side(page_command, test_command)
    except subprocess.TimeoutExpired as error: sys.exit(f'killed: {error}')
    finally:
        for folder in new: shutil.rmtree(folder, ignore_errors=True)
    print(pages_report(done), flush=True)
    failed = [name for name, code in (('nbdev_test', done.status), ('pytest', status)) if code]
    if failed: sys.exit(f'failed: {", ".join(failed)}')


# Commands

def checks() -> None:
    "Run every page but the long ones and the learner's, and every test that is not slow."
    # tests/exercises run the pages of the workbook, and look at each verdict
    folders = rf'^([_.]|workbook$|{"$|".join(LEARNING)}$)'
    pages_and_tests(
        'pages and tests',
        nbdev_command(max(2, CORES // 4), '--skip_file_re', rf'^[_.]|{LONG}',
                      '--skip_folder_re', folders),
        pytest_command(max(3, CORES // 2)))


NOT_HERE = 'not (cluster or cuda or net or wheel)'


def faults() -> None:
    "Run all tests of faults, those too that take long."
    os.environ.update(QUIET)
    with part('faults'): run(*pytest_command(max(3, CORES // 2), '-m', f'fault and {NOT_HERE}'))


def slow() -> None:
    "Run the pages and tests that `make test` leaves out because they take long."
    pages_and_tests('long pages and slow tests',
                    nbdev_command(max(1, CORES // 4), '--file_re', LONG),
                    pytest_command(max(3, CORES // 2), '-m', f'slow and not fault and {NOT_HERE}'))


def workbook() -> None:
    "Run the pages of the book and the answers, and the cheats that every exercise must reject."
    workers = max(2, CORES // 4)
    folders = rf'/({"|".join(LEARNING)})$'
    pages_and_tests('the book, the answers, and cheats on every exercise',
                    nbdev_command(workers, '--file_re', '^[0-9]', '--folder_re', folders),
                    pytest_command(workers, '-m', 'workbook', 'tests/exercises'))


def cluster() -> None:
    "Run what needs a SLURM of two nodes, which the tests bring up; they say why where they cannot."
    run(sys.executable, '-m', 'pytest', '-q', '--durations=8', '-m', 'cluster', 'tests/cluster')


def cuda_wheel() -> None:
    """Run recipes on CPU ranks with torch's build for CUDA, on an emulated machine with a GPU.

    This program runs in the environment that has this build.
    """
    os.environ.update(QUIET)
    with part('CPU runs with the CUDA build'):
        run(sys.executable, '-m', 'pytest', '-q', '--durations=8', '-n', str(max(2, CORES // 2)),
            '-m', 'not cuda', 'tests/parallel/test_gpu_machine.py')


# pytest keeps the files of tests compiled; its workers start at once, and each would compile them
COLLECT = sys.executable, '-m', 'pytest', '-q', '--collect-only'


def test() -> None:
    "Run the parts of `make test`, the longest last."
    with group_of(COLLECT, subprocess.DEVNULL) as collecting:  # The next two parts take one core
        with part('export and clean are diff-free'): diff_free()
        with part('wheel and sdist'): run('make', '-s', 'dist')
        collecting.wait(LIMIT_S)
    checks()


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.pop('PYTHONDONTWRITEBYTECODE', None)  # Else every process compiles the same modules
    commands = {
        'faults': faults, 'slow': slow, 'workbook': workbook, 'cluster': cluster,
        'cuda-wheel': cuda_wheel}
    with tempfile.TemporaryDirectory() as folder:  # No test writes into a reader's progress
        os.environ['LLMW_PROGRESS'] = f'{folder}/progress.json'
        commands.get(' '.join(sys.argv[1:]), test)()
