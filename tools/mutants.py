"""Plant each mistake of tests/mistakes.yaml in a copy of the project, and see who catches it.

`make mutants` does. A mistake is written into the module and into the exported cell of its page
alike. Its tests run one after the other until one fails; that test must pass without the mistake,
or its failure says nothing. `ONLY=name` (or names, or patterns such as `nf4-*`) takes some of the
mistakes, `JOBS=1` one at a time.
"""
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue

from suite import LONG_PAGES

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT/'tests'/'mistakes.yaml'
LIMIT_S = 300  # For one test; one that takes longer has noticed something
FOLDERS = 'llm_workbook', 'nbs', 'tests', 'tools', 'bench'
ABSENT = '__pycache__', '.ipynb_checkpoints', 'runs', '.pytest_cache', '.last_checked'
PASSED = 0  # What pytest and nbdev_test leave with
NO_TEST = 4, 5  # pytest says by these that there is no such test


class RowError(ValueError):
    "A row of the table that cannot be carried out; its text begins with the name of the row."


@dataclass(frozen=True)
class Caught:
    "What became of one planted mistake."
    name: str  # Of the row
    by: str  # The test that failed; empty when none did
    seconds: float  # Of all its tests together
    equivalent: bool = False  # Nobody could see it

    @property
    def slow(self) -> bool:  # Whether `make test` leaves out what caught it
        long_page = Path(self.by.partition(' ')[0]).stem in LONG_PAGES
        return long_page or bool(re.search(r'(^| )-m ', self.by))


def rows() -> list[dict]:
    "Read the table."
    import yaml
    return yaml.safe_load(TABLE.read_text('utf-8'))


def chosen(table: list[dict], only: str) -> list[dict]:
    "Take the rows that `only` names; all where it is empty."
    patterns = only.replace(',', ' ').split()
    wanted = patterns or ['*']
    found = [row for row in table if any(fnmatch.fnmatch(row['name'], p) for p in wanted)]
    if not found: raise RowError(f'{only}: no row of {TABLE.name} has this name')
    return found


def copy_project(folder: Path) -> Path:
    "Copy what pages and tests need; link nothing, since a mistake is written into it."
    for name in FOLDERS:
        ignore = shutil.ignore_patterns(*ABSENT)
        shutil.copytree(ROOT/name, folder/name, symlinks=True, ignore=ignore)
    for path in ROOT.iterdir():
        if path.is_file() and path.name[0] != '.': shutil.copy(path, folder)
    (folder/'tmp').mkdir()
    return folder


# The edit

def mutated(row: dict, text: str) -> str:
    "Give the text of the module with the mistake in it."
    if (count := text.count(row['find'])) != 1:
        raise RowError(f"{row['name']}: `find` occurs {count} times in {row['module']}, not once")
    return text.replace(row['find'], row['replace'])


def exported_from(row: dict, text: str) -> tuple[str, str]:
    "Find the page and the id of the cell that the line to change was exported from."
    before = text[:text.index(row['find'])]
    marks = re.findall(r'^# %% (?:\.\./)+(\S+\.ipynb) #(\S+)', before, re.MULTILINE)
    if not marks: raise RowError(f"{row['name']}: no cell exports this line of {row['module']}")
    return marks[-1]


def as_in_page(text: str) -> str:
    "Write imports as a page has them: nbdev makes them relative in the module."
    return re.sub(r'^(\s*)from \.(\w)', r'\1from llm_workbook.\2', text, flags=re.MULTILINE)


def mutated_page(row: dict, page: Path, cell_id: str) -> str:
    "Give the notebook with the mistake in the exported cell."
    notebook = json.loads(page.read_text('utf-8'))
    cell = next((cell for cell in notebook['cells'] if cell.get('id') == cell_id), {'source': ''})
    source = ''.join(cell['source']) + '\n'  # A module ends its cells with a line break
    wanted = as_in_page(row['find'])
    if (count := source.count(wanted)) != 1:
        where = f'cell {cell_id} of {page.name}'
        raise RowError(f"{row['name']}: `find` occurs {count} times in {where}, not once")
    new = source.replace(wanted, as_in_page(row['replace'])).removesuffix('\n')
    cell['source'] = new.splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + '\n'


def edits(row: dict, tree: Path) -> dict:
    "List what the mistake makes of module and page: path -> text."
    module = tree/row['module']
    text = module.read_text('utf-8')
    new = mutated(row, text)
    if module.suffix != '.py': return {module: new}  # An asset, which no page exports
    page, cell_id = exported_from(row, text)
    return {module: new, tree/page: mutated_page(row, tree/page, cell_id)}


@contextmanager
def planted(row: dict, tree: Path) -> Iterator[None]:
    "Keep the mistake in the copy for as long as the block lasts."
    changed = edits(row, tree)
    kept = {path: path.read_text('utf-8') for path in changed}
    try:
        for path, text in changed.items(): path.write_text(text, 'utf-8')
        yield
    finally:
        for path, text in kept.items(): path.write_text(text, 'utf-8')


# The tests

def command(test: str) -> list[str]:
    "Say how a line of `tests` is run: a page by nbdev_test, all else by pytest with its options."
    first, *options = shlex.split(test)
    if first.endswith('.ipynb'):
        return [str(Path(sys.executable).parent/'nbdev_test'), '--path', first, *options]
    return [sys.executable, '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', first, *options]


class Runner:
    "Runs tests in copies of the project, each in processes that end with it."
    def __init__(self, jobs: int, folder: Path):
        self.trees, self.folder, self.running, self.ended = Queue(), folder, set(), False
        self.lock, self.well = threading.Lock(), {}
        for i in range(jobs):
            (folder/f'{i}').mkdir()
            self.trees.put(copy_project(folder/f'{i}'))

    def exit_code(self, test: str, tree: Path) -> int | None:
        "Run one test; None when it took too long."
        env = os.environ | {'PYTHONPATH': str(tree), 'TMPDIR': str(tree/'tmp'),
                            'PYTHONDONTWRITEBYTECODE': '1', 'HF_HUB_OFFLINE': '1'}
        silent = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.DEVNULL)
        with self.lock:
            if self.ended: raise KeyboardInterrupt
            process = subprocess.Popen(command(test), cwd=tree, env=env, start_new_session=True,
                                       **silent)
            self.running.add(process)
        try: code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired: code = None
        finally:
            kill_group(process)
            self.running.discard(process)
            shutil.rmtree(tree/'tmp', ignore_errors=True)
            (tree/'tmp').mkdir(exist_ok=True)
        if self.ended: raise KeyboardInterrupt  # It was killed, and has noticed nothing
        return code

    def fails(self, row: dict, test: str, tree: Path) -> bool:
        "Say whether a test notices what is in the tree now."
        code = self.exit_code(test, tree)
        if code in NO_TEST: raise RowError(f"{row['name']}: there is no test {test!r}")
        return code != PASSED

    def is_well(self, row: dict, test: str, tree: Path) -> None:
        "Raise unless a test passes without the mistake; each is asked once."
        if test not in self.well: self.well[test] = not self.fails(row, test, tree)
        if not self.well[test]:
            raise RowError(f"{row['name']}: {test!r} fails without the mistake, too")

    def plant(self, row: dict) -> Caught:
        "Carry out one row."
        tree, start = self.trees.get(), time.monotonic()
        try:
            with planted(row, tree):
                by = next((test for test in row['tests'] if self.fails(row, test, tree)), '')
            seconds = time.monotonic() - start
            if by: self.is_well(row, by, tree)
            return Caught(row['name'], by, seconds, 'equivalent' in row)
        finally: self.trees.put(tree)

    def end(self) -> None:
        "Start nothing more, and kill what runs."
        with self.lock: self.ended = True
        for process in [*self.running]: kill_group(process)


def kill_group(process: subprocess.Popen) -> None:
    "Kill a process and all that is still in its session's group."
    try: os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError: pass
    process.wait()


# The report

def line(found: Caught) -> str:
    "Say what became of one."
    what = f'caught by {found.by}' if found.by else 'SURVIVED' + ' (equivalent)' * found.equivalent
    return f'{found.name:18} {found.seconds:6.1f} s  {what}'


def summary(found: list[Caught]) -> str:
    "Give the shares; a mistake that nobody could see counts for neither."
    counted = [one for one in found if not one.equivalent]
    caught, total = [one for one in counted if one.by], max(1, len(counted))
    quick = sum(not one.slow for one in caught)
    return (f'{len(found)} mistakes, {len(caught)} caught, {len(counted) - len(caught)} survived, '
            f'{len(found) - len(counted)} equivalent: quick tests catch {quick / total:.1%}, '
            f'all tests {len(caught) / total:.1%}')


def attempt(runner: Runner, row: dict) -> Caught | RowError:
    "Carry out one row and print what became of it."
    try: made = runner.plant(row)
    except RowError as error: made = error
    print(f'ERROR {made}' if isinstance(made, RowError) else line(made), flush=True)
    return made


def main(only: str = '', jobs: int = 2) -> int:
    "Plant all that are asked for; 0 when none survived and no row is at fault."
    table = chosen(rows(), only)
    for row in table: edits(row, ROOT)  # A row at fault is told before anything runs
    with tempfile.TemporaryDirectory(prefix='llmw-mutants-', ignore_cleanup_errors=True) as folder:
        runner = Runner(min(jobs, len(table)), Path(folder))
        pool = ThreadPoolExecutor(jobs)
        try: made = list(pool.map(partial(attempt, runner), table))
        finally:
            runner.end()
            pool.shutdown(cancel_futures=True)
    found = [one for one in made if isinstance(one, Caught)]
    print(summary(found))
    return int(len(found) < len(made) or any(not one.by and not one.equivalent for one in found))


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.argv[1:]:
        words = ' '.join(sys.argv[1:])
        sys.exit(f'{words}: no arguments are read; say ONLY=name and JOBS=1 in the environment')
    try: sys.exit(main(os.environ.get('ONLY', ''), int(os.environ.get('JOBS') or 2)))
    except RowError as error: sys.exit(f'{error}')
    except KeyboardInterrupt:
        print('interrupted; nothing is left behind', file=sys.stderr)
        sys.exit(130)
