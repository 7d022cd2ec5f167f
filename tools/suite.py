"""What `make test` and `make test-fault` do once the environment is there; each part prints its time, and pytest speaks last."""
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from page import ROOT, pages

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


def job(*command: str | Path) -> tuple[int, str, float]:
    "Run one command beside others: exit status, what it said, seconds."
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | QUIET, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout, time.monotonic() - start


def checks() -> None:
    "Run the tests, and beside them every page in a process of its own: two jobs at a time, because some start two ranks."
    start, flags = time.monotonic(), os.environ.get('FLAGS', '')
    folders = [folder for page in pages() if not (folder := page.parent/'runs').exists()]
    workers = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2))
    try:
        tests = workers.submit(job, *PYTEST, 'tests')
        shown = {page: workers.submit(job, BIN/'nbdev_test', '--path', page, '--flags', flags) for page in pages()}
        for page, result in shown.items():
            status, said, seconds = result.result()
            print(said[-12_000:] * bool(status) + f'   {page.relative_to(ROOT/"nbs")}: {seconds:.1f} s', flush=True)
    finally: workers.shutdown(cancel_futures=True)
    for folder in folders: shutil.rmtree(folder, ignore_errors=True)
    part('pages and tests', start)
    status, said, _ = tests.result()
    print(said, end='', flush=True)
    failed = [page.name for page, result in shown.items() if result.result()[0]]
    sys.exit('failed pages: ' + ', '.join(failed) if failed else status)


def faults() -> None:
    "Run all that is broken on purpose; `make test` runs only what of it is quick."
    sys.exit(subprocess.run([*PYTEST, '-m', 'fault and not cuda and not net', 'tests/fault'], cwd=ROOT).returncode)


def main() -> None:
    "Run the parts, the longest last."
    for name, step in (('export and clean are diff-free', diff_free), ('wheel and sdist', lambda: run('make', '-s', 'dist'))):
        start = time.monotonic()
        step()
        part(name, start)
    checks()


if __name__ == '__main__':
    faults() if sys.argv[1:] == ['faults'] else main()
