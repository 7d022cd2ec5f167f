"""What `make test`, `make test-fault` and `make test-cluster` do; each part prints its time, and pytest speaks last."""
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
PYTEST = sys.executable, '-m', 'pytest', '-q', '--durations=8'  # It prints its time last
QUIET = {'OMP_WAIT_POLICY': 'passive'}  # Threads that wait leave their core to the job beside them


def part(name: str, start: float) -> None:
    "Print how long a part took."
    print(f'-- {name}: {time.monotonic() - start:.1f} s', flush=True)


def run(*command: str, cwd: Path = ROOT) -> None:
    "Run one command and stop everything when it fails."
    done = subprocess.run(command, cwd=cwd)
    if done.returncode: sys.exit(f'failed: {" ".join(Path(c).name for c in command)}')


def diff_free() -> None:
    "Export and clean a copy of the working tree, dirty or not; what then differs was not exported or not cleaned."
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        shutil.copy(ROOT/'settings.ini', copy)
        for folder in ('nbs', 'llm_workbook'):
            ignore = shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints', 'runs', '.last_checked')
            shutil.copytree(ROOT/folder, copy/folder, symlinks=True, ignore=ignore)
        for command in ('nbdev_export', 'nbdev_clean'): run(str(BIN/command), cwd=copy)
        made = [p.relative_to(copy) for p in [*copy.glob('llm_workbook/**/*.py'), *copy.glob('nbs/**/*.ipynb')]]
        kept = [p.relative_to(ROOT) for p in ROOT.glob('llm_workbook/**/*.py')]
        bad = sorted(str(p) for p in {*made, *kept} if not ((copy/p).exists() and (ROOT/p).exists()
                                                            and filecmp.cmp(copy/p, ROOT/p, shallow=False)))
    if bad: sys.exit('run nbdev_export and nbdev_clean; they change: ' + ', '.join(bad))


COLD = {  # In an interpreter of its own, which has imported nothing yet
    '03_names': 'shows what an import does not load',
    '04_memory_trace': 'measures the memory of its process',
    '01_ranks': 'shows what may not be loaded before ranks start',
    '07_background': 'shows what may not be loaded before ranks start',
    'test_house': 'shows what an import does not load',
    'test_install': 'shows what an import does not load',
}


SHARED = 'fault', 'cluster'  # Folders of tests whose files share what is slow to make


def file_jobs() -> list[Job]:
    "Make a job of every file of tests, and of each folder in SHARED."
    files = {path.parent if path.parent.name in SHARED else path for path in (ROOT/'tests').rglob('test_*.py')}
    return [pytest_job(file) for file in sorted(files)]


def pytest_job(path: Path, *options: str) -> Job:
    "Make a job of a file or a folder of tests."
    how = *PYTEST[3:], '-p', 'no:cacheprovider', *options  # Jobs run side by side, and the cache is one
    return Job(str(path.relative_to(ROOT)), 'pytest', (*how, str(path)), path.stem in COLD)


def page_jobs() -> list[Job]:
    "Make a job of every page."
    flags, nbs = os.environ.get('FLAGS', ''), ROOT/'nbs'
    return [Job(str(page.relative_to(nbs)), str(BIN/'nbdev_test'), ('--path', str(page), '--flags', flags), page.stem in COLD)
            for page in pages()]


def fault_jobs() -> list[Job]:
    "Make a job of every file that has tests which `make test` leaves out; those of faults first, which take longest."
    tests = ROOT/'tests'
    slow = [file for file in tests.rglob('test_*.py')
            if file.parent.name not in SHARED and re.search(r'mark\.slow|slow_case', file.read_text())]
    return [pytest_job(file, '-m', '(fault or slow) and not (cluster or cuda or net)')
            for file in [*sorted(tests.glob('fault/test_*.py')), *sorted(slow)]]


def passed(done: Done) -> bool:
    "Say whether a job is well; pytest ends with 5 where all tests of a file are deselected."
    return done.status == 0 or done.status == 5 and 'deselected' in done.said


def summary(ran: list[Done]) -> str:
    "Add up what pytest said of every file, and name what was skipped and what is slow."
    said = [line for done in ran for line in done.said.splitlines()]
    counts, ends = Counter(), re.compile(r'(\d+ [a-z]+(, |(?= in )))+ in [\d.]+s.*')
    for line in filter(ends.fullmatch, said):
        for number, word in re.findall(r'(\d+) ([a-z]+)', line.split(' in ')[0]):
            counts[word if word[-1] == 'd' else word.rstrip('s') + 's'] += int(number)  # 1 error, 2 errors
    slow = [line for line in said if re.match(r'[\d.]+s (call|setup|teardown) ', line)]
    slow.sort(key=lambda line: -float(line.split('s ')[0]))
    skips = [line for line in said if line.startswith(('SKIPPED', 'XFAIL', 'XPASS'))]
    return '\n'.join([*skips, *slow[:8], ', '.join(f'{number} {word}' for word, number in counts.items())])


def table(ran: list[Done]) -> str:
    "List the jobs that took most of the processor."
    most = sorted(ran, key=lambda done: -done.cpu_s)[:20]
    lines = [f'   {done.cpu_s:7.1f} s  {done.wall_s:7.1f} s  {done.job.name}' for done in most]
    return '\n'.join(['   processor       wall  the twenty slowest', *lines,
                      f'   {sum(done.cpu_s for done in ran):7.1f} s of the processor for all {len(ran)} jobs'])


def run_jobs(name: str, jobs: list[Job]) -> None:
    "Run jobs, three at a time on two cores: some wait, and some start two ranks. End with an error if one has failed."
    start, ran = time.monotonic(), []
    os.environ.update(QUIET)
    for done in run_all(jobs, max(3, (os.cpu_count() or 2) // 2)):
        ran.append(done)
        print(('' if passed(done) else done.said[-12_000:]) + f'   {done.job.name}: {done.wall_s:.1f} s', flush=True)
    print(table(ran), flush=True)
    part(name, start)
    print(summary(ran), flush=True)
    sys.exit('failed: ' + ', '.join(failed) if (failed := [done.job.name for done in ran if not passed(done)]) else 0)


def checks() -> None:
    "Run every page and every file of tests."
    folders = [folder for page in pages() if not (folder := page.parent/'runs').exists()]
    try: run_jobs('pages and tests', page_jobs() + file_jobs())
    finally:
        for folder in folders: shutil.rmtree(folder, ignore_errors=True)


def faults() -> None:
    "Run all that is broken on purpose, and every other test that takes long; `make test` runs what is quick."
    run_jobs('faults and slow tests', fault_jobs())


def cluster() -> None:
    "Run what needs a SLURM of two nodes, which the tests bring up; they say why where they cannot."
    sys.exit(subprocess.run([*PYTEST, '-m', 'cluster', 'tests/cluster'], cwd=ROOT).returncode)


def main() -> None:
    "Run the parts, the longest last."
    for name, step in (('export and clean are diff-free', diff_free), ('wheel and sdist', lambda: run('make', '-s', 'dist'))):
        start = time.monotonic()
        step()
        part(name, start)
    checks()


if __name__ == '__main__':
    {'faults': faults, 'cluster': cluster}.get(' '.join(sys.argv[1:]), main)()
