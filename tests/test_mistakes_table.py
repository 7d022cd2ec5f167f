"""The table of planted mistakes can be carried out as it stands; `make mutants` carries it out."""
import ast
import re
import shlex
import subprocess
import sys
from collections import Counter
from functools import cache

import mutants
import pytest
import yaml

ROWS = mutants.rows()
FIELDS = {'name', 'module', 'find', 'replace', 'harm', 'tests'}


@cache
def text(path: str) -> str: return (mutants.ROOT/path).read_text('utf-8')


@pytest.mark.parametrize('words', [['--only=nf4-1'], ['nf4-1']])
def test_words_that_nobody_reads_are_refused(words):
    program = mutants.ROOT/'tools'/'mutants.py'
    done = subprocess.run([sys.executable, program, *words], capture_output=True, text=True)
    assert done.returncode == 1
    assert f'{words[0]}: no arguments are read; say ONLY=name' in done.stderr


def test_the_table_is_long_and_names_are_unique():
    assert len(ROWS) >= 120
    assert [name for name, count in Counter(row['name'] for row in ROWS).items() if count > 1] == []
    assert len({row['module'] for row in ROWS}) >= 45


@pytest.mark.parametrize('row', ROWS, ids=lambda row: row['name'])
def test_a_row_can_be_carried_out(row):
    "The line is there once, in module and cell, and what takes its place is read by Python."
    assert FIELDS <= row.keys() <= FIELDS | {'slow', 'equivalent'}
    assert 1 <= len(row['find'].splitlines()) <= 3
    assert row['find'] != row['replace']
    assert row['harm'].endswith('.')
    made = mutants.edits(row, mutants.ROOT)
    for path, new in made.items():
        if path.suffix == '.py': ast.parse(new)
        if path.suffix == '.yaml': yaml.safe_load(new)
    assert len(made) == 2 or not row['module'].endswith('.py')


@pytest.mark.parametrize('row', ROWS, ids=lambda row: row['name'])
def test_its_tests_exist(row):
    assert row['tests'], 'nobody looks for it'
    for test in row['tests']:
        place, *options = shlex.split(test)
        path, _, name = place.partition('::')
        assert (mutants.ROOT/path).is_file(), test
        chosen = dict(zip(options[::2], options[1::2], strict=True))
        assert chosen.keys() <= {'-k', '-m'}, test
        words = {name, *re.findall(r'\w+', chosen.get('-k', ''))} - {'and', 'or', 'not', ''}
        assert all(word in text(path) for word in words), test
    quick = [test for test in row['tests'] if ' -m ' not in test]
    assert bool(quick) is not row.get('slow', False), 'slow: only tests marked slow catch it'


# The tool

ROW = {
    'name': 'a-1', 'module': 'llm_workbook/training/watchdog.py', 'find': 'nowhere', 'replace': '',
    'harm': '', 'tests': []}


def test_a_row_at_fault_is_named():
    words = 'a-1: `find` occurs 0 times in llm_workbook/training/watchdog.py'
    with pytest.raises(mutants.RowError, match=words):
        mutants.edits(ROW, mutants.ROOT)
    with pytest.raises(mutants.RowError, match='occurs [0-9]{2,} times'):
        mutants.edits(ROW | {'find': 'self'}, mutants.ROOT)
    with pytest.raises(mutants.RowError, match='no row of mistakes.yaml'):
        mutants.chosen(ROWS, 'no-such-row')


def test_names_and_beginnings_choose_rows():
    assert [row['name'] for row in mutants.chosen(ROWS, 'guards-2')] == ['guards-2']
    names = {row['name'] for row in mutants.chosen(ROWS, 'guards-2, nf4-*')}
    assert names == {'guards-2', 'nf4-1', 'nf4-2', 'nf4-3'}
    assert mutants.chosen(ROWS, '') == ROWS


def test_imports_are_written_as_the_page_has_them():
    made = mutants.as_in_page('from .model import spec\n    from .a import b\nimport c')
    wanted = 'from llm_workbook.model import spec\n    from llm_workbook.a import b\nimport c'
    assert made == wanted


@pytest.fixture
def project(tmp_path, monkeypatch):
    "A project of one module, one page and two tests, which the tool takes for this one."
    monkeypatch.setattr(mutants, 'ROOT', tmp_path/'project')
    for folder in mutants.FOLDERS: (mutants.ROOT/folder).mkdir(parents=True)
    source = ['#| export\n', 'def add(a, b): return a + b']
    cell = {'cell_type': 'code', 'id': 'c1', 'source': source}
    (mutants.ROOT/'nbs/a.ipynb').write_text(mutants.json.dumps({'cells': [cell]}))
    head = '# File to edit: ../nbs/a.ipynb.\n\n# %% ../nbs/a.ipynb #c1\n'
    (mutants.ROOT/'llm_workbook/a.py').write_text(head + 'def add(a, b): return a + b\n')
    body = ('import sys\nsys.path.insert(0, "llm_workbook")\n'
            'from a import add\ndef test_add(): assert ')
    tests = {'sees': 'add(1, 2) == 3', 'blind': 'add(2, 2) == 4', 'broken': 'add(1, 1) == 3',
             'hangs': 'add(1, 2) == 3 or __import__("time").sleep(60)'}
    for name, test in tests.items():
        text = f'{body}{test}\nif __name__ == "__main__": test_add()\n'
        (mutants.ROOT/f'tests/test_{name}.py').write_text(text)
    return mutants.ROOT


MUL = ROW | {'module': 'llm_workbook/a.py', 'find': 'a + b\n', 'replace': 'a * b\n'}


def ran(tmp_path, *names):
    runner = mutants.Runner(1, tmp_path)
    tests = [f'tests/test_{name}.py' for name in names]
    try: return runner.plant(MUL | {'tests': tests}), runner
    finally: runner.end()


def test_a_mistake_is_caught_by_the_first_test_that_fails_and_taken_out_again(project, tmp_path):
    found, runner = ran(tmp_path, 'blind', 'sees')
    assert (found.by, found.slow) == ('tests/test_sees.py', False)
    tree = runner.trees.get()
    for name in 'llm_workbook/a.py', 'nbs/a.ipynb':
        assert (tree/name).read_text() == (project/name).read_text()
    assert not list((tree/'tmp').iterdir())


def test_a_mistake_that_nobody_sees_survives(project, tmp_path):
    found, _ = ran(tmp_path, 'blind')
    assert found.by == ''
    assert 'SURVIVED' in mutants.line(found)
    caught = mutants.Caught('a', 'tests/test_b.py -m slow', 1.0)
    hidden = mutants.Caught('c', '', 1.0, True)
    assert caught.slow and not hidden.slow
    assert mutants.Caught('d', 'nbs/rehearsal/07_findings.ipynb', 1.0).slow
    assert mutants.summary([found, caught, hidden]) == (
        '3 mistakes, 1 caught, 1 survived, 1 equivalent: quick tests catch 0.0%, all tests 50.0%')


def test_a_test_that_fails_anyway_proves_nothing(project, tmp_path):
    with pytest.raises(mutants.RowError, match='broken.py. fails without the mistake, too'):
        ran(tmp_path, 'broken')


def test_a_test_that_is_not_there_is_no_catch(project, tmp_path):
    with pytest.raises(mutants.RowError, match="there is no test 'tests/test_no.py'"):
        ran(tmp_path, 'no')


def test_a_test_that_never_ends_has_noticed_something(project, tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, 'LIMIT_S', 1.5)
    monkeypatch.setattr(mutants, 'command', lambda test: [sys.executable, test])  # Quicker
    assert ran(tmp_path, 'hangs')[0].by == 'tests/test_hangs.py'
