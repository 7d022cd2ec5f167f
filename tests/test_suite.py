"""The program behind `make test`: pages and tests run side by side, and no failure is lost."""
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import suite
from libraries import join_pages
from suite import Done

PYTHON = sys.executable, '-c'


def printing(text: str, status: int = 0) -> tuple[str, ...]:
    return *PYTHON, f'import sys; print({text!r}); sys.exit({status})'


@pytest.fixture
def commands(monkeypatch):
    "Let `checks` run other commands: a function that takes those for pages and for tests."
    def choose(pages, tests):
        monkeypatch.setattr(suite, 'nbdev_command', lambda workers, *options: pages)
        monkeypatch.setattr(suite, 'pytest_command', lambda workers, *options: tests)
        monkeypatch.setattr(suite, 'QUIET', {})
    return choose


@pytest.mark.parametrize(
    'page_status, test_status, failed',
    [(0, 0, ''), (1, 0, 'nbdev_test'), (0, 2, 'pytest'), (1, 1, 'nbdev_test, pytest')])
def test_a_failure_of_either_side_fails_the_suite(
    commands, capfd, page_status, test_status, failed
):
    commands(printing('of the pages', page_status), printing('of the tests', test_status))
    if failed:
        with pytest.raises(SystemExit, match=f'^failed: {failed}$'): suite.checks()
    else: suite.checks()
    output = capfd.readouterr().out
    assert 'of the tests' in output
    assert '-- pages and tests: ' in output
    assert ('of the pages' in output) is bool(page_status)


WAIT_FOR_THE_OTHER = """
import sys, time
from pathlib import Path
folder, own, other = Path(sys.argv[1]), *sys.argv[2:]
(folder/own).touch()
end = time.monotonic() + 60
while not (folder/other).exists():
    if time.monotonic() > end: sys.exit(1)
    time.sleep(0.05)
"""


def test_both_sides_run_at_once(tmp_path):
    command = *PYTHON, WAIT_FOR_THE_OTHER, str(tmp_path)
    ended = suite.side_by_side((*command, 'pages', 'tests'), (*command, 'tests', 'pages'))
    assert ended == (Done(0, ''), 0)


def is_running(pid):
    try: return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess: return False


def ends_soon(pid):
    "A killed process takes a moment to end."
    end = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_hangs_is_killed_with_its_children_and_named(commands, monkeypatch, tmp_path, capfd):
    note = tmp_path/'child'
    program = (
        'import subprocess, sys, time\n'
        'child = subprocess.Popen(["sleep", "60"])\n'
        f'open({str(note)!r}, "w").write(str(child.pid))\n'
        'print("a page has failed", flush=True)\n'
        'time.sleep(60)')
    commands((*PYTHON, program), printing('of the tests'))
    monkeypatch.setattr(suite, 'LIMIT_S', 3)
    with pytest.raises(SystemExit, match='killed: .*sleep.*timed out'): suite.checks()
    assert 'a page has failed' in capfd.readouterr().out
    ends_soon(int(note.read_text()))


def test_runs_of_pages_are_removed_and_those_that_were_there_are_kept(
    commands, monkeypatch, tmp_path
):
    pages = [tmp_path/room/'page.ipynb' for room in ('new', 'old')]
    for page in pages: page.parent.mkdir()
    kept = tmp_path/'old'/'runs'
    kept.mkdir()
    monkeypatch.setattr(suite, 'pages', lambda: pages)
    made = tmp_path/'new'/'runs'
    commands((*PYTHON, f'import os; os.mkdir({str(made)!r})'), printing(''))
    suite.checks()
    assert kept.exists()
    assert not made.exists()


def test_the_report_keeps_an_error_and_shortens_a_success():
    times = '\n'.join(f'{number:02}_page.ipynb: {90 - number} secs' for number in range(30))
    report = suite.pages_report(Done(0, f'a warning\nSuccess.\n{times}\n')).splitlines()
    assert report[:2] == ['30 pages passed; the slowest:', '00_page.ipynb: 90 secs']
    assert len(report) == 13
    assert suite.pages_report(Done(1, 'Traceback\nof a page')) == 'Traceback\nof a page'


@pytest.fixture
def pages_of(monkeypatch):
    "A function that gives the pages which `nbdev_test` finds for one of the suites."
    from nbdev.doclinks import nbglob
    def find(suite_function):
        found = []
        def note(name, page_command, test_command):
            options = page_command[page_command.index('--flags') + 2:]
            filters = {key.strip('-'): value for key, value in zip(options[::2], options[1::2])}
            found.extend(page.resolve() for page in nbglob(None, as_path=True, **filters))
        monkeypatch.setattr(suite, 'pages_and_tests', note)
        monkeypatch.chdir(suite.ROOT)
        suite_function()
        return found
    return find


def test_a_test_that_is_left_out_is_run_by_another_suite(monkeypatch):
    "Faults that are quick are run twice: with all others, and among the faults."
    asked = {}
    def note(name, pages, tests): asked[name] = tests[-1]
    monkeypatch.setattr(suite, 'pages_and_tests', note)
    monkeypatch.setattr(suite, 'run', lambda *command: asked.update(faults=command[-1]))
    suite.slow()
    suite.faults()
    for marks, expected in (((), []), (('slow',), ['long pages and slow tests']),
                            (('fault',), ['faults']), (('fault', 'slow'), ['faults']),
                            (('slow', 'cluster'), []), (('fault', 'cuda'), [])):
        values = {name: name in marks for name in 'slow fault cluster cuda net wheel'.split()}
        assert [name for name, text in asked.items() if eval(text, values)] == expected, marks


def test_every_page_and_every_file_of_tests_is_run(pages_of):
    "Nothing is left out by a name or a folder: `nbdev_test` and pytest find what is there."
    plain, learning, long = map(pages_of, (suite.checks, suite.workbook, suite.slow))
    stubs = [page for page in suite.pages() if page.parent.name == 'workbook']  # tests/exercises
    found = [*plain, *learning, *long, *stubs]
    assert sorted(found) == sorted(page.resolve() for page in suite.pages())  # Each once
    assert sorted(page.stem for page in long) == sorted(suite.LONG_PAGES)
    assert {page.parent.name for page in learning} == {'book', 'answers'}
    assert '00_quickstart' in [page.stem for page in learning]
    assert 'tests' not in ' '.join(suite.pytest_command(2))
    assert suite.pytest_command(2, '-m', 'slow')[-2:] == ('-m', 'slow')


OVER = os.environ | {'LLMW_TESTS_UNTIL': '0'}  # In 1970


def test_no_test_begins_after_the_end():
    tests = 'tests/test_suite.py', '-k', 'begins_after or report_keeps'
    command = sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *tests
    done = subprocess.run(command, cwd=suite.ROOT, env=OVER, text=True, capture_output=True)
    assert not done.returncode
    assert 'SKIPPED [2] ' in done.stdout
    assert 'left out: this machine is slow' in done.stdout


@pytest.mark.parametrize('options', [(), ('-n', '1')], ids=str)
def test_the_end_holds_for_what_ci_starts_and_not_for_what_a_test_starts(options):
    tests = 'tests/test_suite.py', '-k', 'not_seen_by_a_test'
    command = sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *options, *tests
    far = os.environ | {'LLMW_TESTS_UNTIL': '1e12'}
    done = subprocess.run(command, cwd=suite.ROOT, env=far, text=True, capture_output=True)
    assert '1 passed' in done.stdout, done.stdout


def test_the_end_is_not_seen_by_a_test():
    assert 'LLMW_TESTS_UNTIL' not in os.environ


@pytest.mark.slow
def test_a_process_runs_one_page_after_another():
    command = suite.nbdev_command(1, '--file_re', r'^0[23]_(files|names)\.ipynb$')
    done = subprocess.run(command, cwd=suite.ROOT, text=True, capture_output=True)
    assert suite.pages_report(Done(done.returncode, done.stdout)).startswith('2 pages passed')


@pytest.mark.slow
def test_no_page_begins_after_the_end():
    command = suite.nbdev_command(1, '--path', 'nbs/model/09_half_matmul.ipynb')
    done = subprocess.run(command, cwd=suite.ROOT, env=OVER, text=True, capture_output=True)
    report = suite.pages_report(Done(done.returncode, done.stdout)).splitlines()
    assert report[0] == '0 pages passed; the slowest:'
    assert report[-1].startswith('09_half_matmul.ipynb is left out: this machine is slow')


def test_a_part_that_fails_ends_the_collection_beside_it(monkeypatch):
    def fail(): sys.exit('differs')
    monkeypatch.setattr(suite, 'COLLECT', (*PYTHON, 'import time; time.sleep(60)'))
    monkeypatch.setattr(suite, 'diff_free', fail)
    before = psutil.Process().children()
    with pytest.raises(SystemExit, match='differs'): suite.test()
    assert psutil.Process().children() == before


def test_memory_in_large_pages_is_what_it_was():
    held = os.urandom(2**23)
    copy = bytearray(held)
    join_pages()
    assert copy == held
    pid = os.fork()
    if pid == 0: os._exit(copy != held)
    assert os.waitpid(pid, 0)[1] == 0
