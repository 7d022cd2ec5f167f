"""Everything `make test` does once the environment is there; each part prints its time, and pytest speaks last."""
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from page import ROOT, pages

BIN = Path(sys.executable).parent


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


def notebooks() -> None:
    "Test every page in a process of its own, one at a time: pages start two ranks themselves."
    flags, failed = os.environ.get('FLAGS', ''), []
    for page in pages():
        start, left = time.monotonic(), page.parent/'runs'
        mine = left.exists()
        done = subprocess.run([BIN/'nbdev_test', '--path', page, '--flags', flags], cwd=ROOT, capture_output=True, text=True)
        if not mine: shutil.rmtree(left, ignore_errors=True)
        if done.returncode:
            failed.append(page.name)
            print(done.stdout[-4000:] + done.stderr[-8000:])
        print(f'   {page.relative_to(ROOT/"nbs")}: {time.monotonic() - start:.1f} s', flush=True)
    if failed: sys.exit('failed pages: ' + ', '.join(failed))


def main() -> None:
    "Run the parts in the order of what they cost."
    for name, step in (('export and clean are diff-free', diff_free), ('wheel and sdist', lambda: run('make', '-s', 'dist')),
                       ('pages', notebooks)):
        start = time.monotonic()
        step()
        part(name, start)
    sys.exit(subprocess.run([sys.executable, '-m', 'pytest', '-q', '--durations=8', 'tests'], cwd=ROOT).returncode)


if __name__ == '__main__':
    main()
