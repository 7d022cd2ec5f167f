"""A page's outputs are those of its code: `make book` records a hash of the code it executed."""
import ast
import copy
import json
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
from page import KEY, ROOT, code_hash, library_hash, module_file, pages, record, used_modules


@pytest.mark.parametrize('page', pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_outputs_are_those_of_the_code(page):
    nb = json.loads(page.read_text('utf-8'))
    assert nb['metadata'].get(KEY) == record(nb['cells']), (
        'run make book: the code, or what it uses of the library, has changed since')


@pytest.mark.parametrize('page', pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_warnings_and_no_retries_are_kept(page):
    outputs = [
        output
        for cell in json.loads(page.read_text('utf-8'))['cells']
        for output in cell.get('outputs', [])]
    assert [
        ''.join(output['text'])[:200] for output in outputs if output.get('name') == 'stderr'] == []


def cell(source): return [{'cell_type': 'code', 'source': source, 'outputs': []}]


def test_a_page_uses_what_its_modules_use():
    used = used_modules(cell('from llm_workbook import estimate'))
    assert {'plan.estimate', 'plan.ledger', 'config.recipe', 'display'} <= used
    assert 'launching.render' not in used
    assert used_modules(cell('import llm_workbook.plan.ledger')) >= {'plan.ledger', 'config.recipe'}
    assert used_modules(cell('from llm_workbook.training import data')) >= {'training.data'}
    assert used_modules(cell('#| default_exp files\n%matplotlib inline')) == {'files', 'display'}
    assert used_modules(cell('x = 1')) == set()
    assert module_file('plan') is None


def test_a_change_of_a_module_or_an_asset_makes_pages_stale(monkeypatch, tmp_path):
    import page
    copy = tmp_path/'llm_workbook'
    shutil.copytree(page.PACKAGE, copy, ignore=shutil.ignore_patterns('__pycache__'))
    monkeypatch.setattr(page, 'PACKAGE', copy)
    parse, unparse = cache(ast.parse), cache(ast.unparse)  # What has not changed is read once
    monkeypatch.setattr(page, 'tree_of', lambda file: parse(file.read_text('utf-8')))
    monkeypatch.setattr(page, 'plain_text', lambda file: unparse(page.tree_of(file)))
    plan = cell('from llm_workbook.plan.estimate import estimate')
    other = cell('from llm_workbook.display import gib')

    def forget():
        for cached in page.owners, page.imported_by, page.reached, page.asset_digest:
            cached.cache_clear()

    def hashes():
        forget()
        return library_hash(plan), library_hash(other)
    before = hashes()
    with (copy/'plan/ledger.py').open('a') as file: file.write('\n# A comment\n')
    assert hashes() == before
    with (copy/'plan/ledger.py').open('a') as file: file.write('\nCHANGED = 1\n')
    changed = hashes()
    assert changed[0] != before[0]
    assert changed[1] == before[1]
    with (copy/'assets/hardware.yaml').open('a') as file: file.write('# A comment\n')
    again = hashes()
    assert again[0] != changed[0]
    assert again[1] == before[1]
    monkeypatch.undo()
    forget()


def test_only_a_change_of_code_counts():
    cells = [
        {'cell_type': 'code', 'source': ['x = 1\n', 'y = 2'], 'outputs': []},
        {'cell_type': 'markdown', 'source': ['# A']},
    ]
    other = copy.deepcopy(cells)
    other[1]['source'], other[0]['outputs'], other[0]['source'] = ['# B'], ['z'], 'x = 1\ny = 2\n'
    assert code_hash(other) == code_hash(cells)
    other[0]['source'] = 'x = 1\ny = 3'
    assert code_hash(other) != code_hash(cells)


# Folders whose pages follow each other
TAUGHT = tuple(
    'config model plan parallel checkpoint training rehearsal launching release recipes'.split())
BESIDE = {'next': 1, 'before': -1, 'last': -1}


def misled(page: Path, text: str) -> list[str]:
    "Links and mentions in `text` that lead nowhere, or not where their words say."
    # By a link, or it is soon wrong
    found = [
        m[0] for m in re.finditer(r'(?<!\[)[Cc]hapter \d+', text) if page.parent.name in TAUGHT]
    row = [other.resolve() for other in pages() if other.parent == page.parent]
    for words, target in re.findall(r'\[([^]]*)\]\(([^)#:]+\.ipynb)', text):
        number = re.fullmatch(r'[Cc]hapter (\d+)', words)
        side = re.fullmatch(
            r'(?:the )?(?:(next|last) (?:page|chapter)|(?:page|chapter) (before))', words)
        if not (page.parent/target).exists(): found.append(target)
        elif number and int(number[1]) != int(Path(target).name[:2]):
            found.append(f'{words}: {target}')
        elif (
            side
            and (page.parent / target).resolve()
            != row[(row.index(page) + BESIDE[side[1] or side[2]]) % len(row)]
        ):
            found.append(f'{words}: {target}')
    return found


@pytest.mark.parametrize('page', pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_where_they_say(page):
    cells = json.loads(page.read_text('utf-8'))['cells']
    assert (
        misled(
            page,
            '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown'))
        == [])


@pytest.mark.parametrize(
    'text',
    [
        'as chapter 12 says', '[chapter 7](09_collectives.ipynb)',
        '[the page before](09_collectives.ipynb)', '[there](99_no.ipynb)'])
def test_a_link_that_misleads_is_seen(text):
    assert len(misled(ROOT/'nbs/plan/08_ledger.ipynb', text)) == 1
    assert (
        misled(
            ROOT/'nbs/plan/08_ledger.ipynb',
            '[chapter 9](09_collectives.ipynb), the [next page](09_collectives.ipynb)')
        == [])


def test_the_site_must_show_what_stands_in_code_though_it_looks_like_a_tag():
    from site_check import paragraphs
    assert paragraphs('Its `eos_token` is `<eos>`, <b>not</b> the end') == [
        'Its `eos_token` is `<eos>`,  not  the end']
