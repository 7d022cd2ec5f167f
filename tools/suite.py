"""What `make test`, `make test-fault` and `make test-cluster` do; each part prints its time.

Pytest's summary comes last.
"""
import filecmp
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from page import ROOT, pages
from warm import Done, Job, run_all

BIN = Path(sys.executable).parent
OPTIONS = '-q', '--durations=8'
QUIET = {'OMP_WAIT_POLICY': 'passive'}  # Threads that wait leave their core to the job beside them


def part(name: str, start: float) -> None:
    "Print how long a part took."
    print(f'-- {name}: {time.monotonic() - start:.1f} s', flush=True)


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


# Jobs

COLD = {  # In an interpreter of its own, which has imported nothing yet
    '04_memory_trace': 'measures the memory of its process',
    'test_house': 'shows what an import does not load',
    'test_install': 'shows what an import does not load',
}
SHARED = 'fault', 'cluster'  # Folders of tests whose files share what is slow to make


def file_jobs() -> list[Job]:
    "Make a job of every file of tests, and of each folder in SHARED."
    paths = set()
    for file in (ROOT/'tests').rglob('test_*.py'):
        paths.add(file.parent if file.parent.name in SHARED else file)
    return [pytest_job(path) for path in sorted(paths)]


def pytest_job(path: Path, *options: str) -> Job:
    "Make a job of a file or a folder of tests."
    # Jobs run side by side, and there is only one cache
    arguments = *OPTIONS, '-p', 'no:cacheprovider', *options, str(path)
    return Job(str(path.relative_to(ROOT)), 'pytest', arguments, path.stem in COLD)


def page_jobs() -> list[Job]:
    "Make a job of every page."
    program, flags = str(BIN/'nbdev_test'), os.environ.get('FLAGS', '')
    jobs = []
    for page in pages():
        arguments = '--path', str(page), '--flags', flags
        jobs.append(Job(str(page.relative_to(ROOT/'nbs')), program, arguments, page.stem in COLD))
    return jobs


def has_slow_tests(file: Path) -> bool:
    "Say whether a file of tests has some that `make test` leaves out."
    return bool(re.search(r'mark\.slow|slow_case', file.read_text()))


def fault_jobs() -> list[Job]:
    "Make a job of every file with tests of faults, which take longest, and with slow tests."
    tests = ROOT/'tests'
    files = sorted(tests.glob('fault/test_*.py'))
    for file in sorted(tests.rglob('test_*.py')):
        if file.parent.name not in SHARED and has_slow_tests(file): files.append(file)
    chosen = '(fault or slow) and not (cluster or cuda or net)'
    return [pytest_job(file, '-m', chosen) for file in files]


# Results

def passed(done: Done) -> bool:
    "Say whether a job succeeded; pytest ends with 5 where all tests of a file are deselected."
    return done.status == 0 or done.status == 5 and 'deselected' in done.output


def plural(word: str) -> str:
    "Pytest writes `1 error` and `2 errors`; `passed` has no plural."
    return word if word.endswith('d') else word.rstrip('s') + 's'


def counts(lines: list[str]) -> str:
    "Add up the last lines of pytest, such as `3 passed, 1 skipped in 0.5s`."
    last_line = re.compile(r'(\d+ [a-z]+(, |(?= in )))+ in [\d.]+s.*')
    totals = Counter()
    for line in filter(last_line.fullmatch, lines):
        for number, word in re.findall(r'(\d+) ([a-z]+)', line.split(' in ')[0]):
            totals[plural(word)] += int(number)
    return ', '.join(f'{number} {word}' for word, number in totals.items())


def summary(ran: list[Done]) -> str:
    "Add up what pytest printed for every file; name what was skipped and the eight slowest tests."
    lines = [line for done in ran for line in done.output.splitlines()]
    slow = [line for line in lines if re.match(r'[\d.]+s (call|setup|teardown) ', line)]
    slow.sort(key=lambda line: -float(line.split('s ')[0]))
    skips = [line for line in lines if line.startswith(('SKIPPED', 'XFAIL', 'XPASS'))]
    return '\n'.join([*skips, *slow[:8], counts(lines)])


def table(ran: list[Done]) -> str:
    "List the jobs that took most of the processor."
    lines = ['   processor       wall  the twenty slowest']
    for done in sorted(ran, key=lambda done: -done.cpu_s)[:20]:
        lines.append(f'   {done.cpu_s:7.1f} s  {done.wall_s:7.1f} s  {done.job.name}')
    total_s = sum(done.cpu_s for done in ran)
    lines.append(f'   {total_s:7.1f} s of the processor for all {len(ran)} jobs')
    return '\n'.join(lines)


def run_jobs(name: str, jobs: list[Job]) -> None:
    """Run jobs and end with an error if one has failed.

    Two cores run three jobs: a job often waits.
    """
    start, ran = time.monotonic(), []
    os.environ.update(QUIET)
    for done in run_all(jobs, max(3, (os.cpu_count() or 2) // 2)):
        ran.append(done)
        if not passed(done): print(done.output[-12_000:], end='')
        print(f'   {done.job.name}: {done.wall_s:.1f} s', flush=True)
    print(table(ran), flush=True)
    part(name, start)
    print(summary(ran), flush=True)
    failed = [done.job.name for done in ran if not passed(done)]
    if failed: sys.exit(f'failed: {", ".join(failed)}')


# Commands

def checks() -> None:
    "Run every page and every file of tests; remove the `runs` that pages have made."
    runs = {page.parent/'runs' for page in pages()}
    new = [folder for folder in runs if not folder.exists()]
    try: run_jobs('pages and tests', page_jobs() + file_jobs())
    finally:
        for folder in new: shutil.rmtree(folder, ignore_errors=True)


def faults() -> None:
    "Run all tests of faults, and the slow tests that `make test` leaves out."
    run_jobs('faults and slow tests', fault_jobs())


def cluster() -> None:
    "Run what needs a SLURM of two nodes, which the tests bring up; they say why where they cannot."
    command = sys.executable, '-m', 'pytest', *OPTIONS, '-m', 'cluster', 'tests/cluster'
    sys.exit(subprocess.run(command, cwd=ROOT).returncode)


def test() -> None:
    "Run the parts of `make test`, the longest last."
    steps = {'export and clean are diff-free': diff_free,
             'wheel and sdist': lambda: run('make', '-s', 'dist')}
    for name, step in steps.items():
        start = time.monotonic()
        step()
        part(name, start)
    checks()


if __name__ == '__main__':
    {'faults': faults, 'cluster': cluster}.get(' '.join(sys.argv[1:]), test)()
