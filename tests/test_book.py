"""A page's outputs are those of its code: `make book` records a hash of the code it executed."""
import copy
import json
import re
from pathlib import Path

import pytest
from page import KEY, ROOT, code_hash, pages


@pytest.mark.parametrize('page', pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_outputs_are_those_of_the_code(page):
    nb = json.loads(page.read_text('utf-8'))
    assert nb['metadata'].get(KEY, {}).get('code') == code_hash(nb['cells']), 'run make book: the code has changed since'


def test_only_a_change_of_code_counts():
    cells = [{'cell_type': 'code', 'source': ['x = 1\n', 'y = 2'], 'outputs': []}, {'cell_type': 'markdown', 'source': ['# A']}]
    other = copy.deepcopy(cells)
    other[1]['source'], other[0]['outputs'], other[0]['source'] = ['# B'], ['z'], 'x = 1\ny = 2\n'
    assert code_hash(other) == code_hash(cells)
    other[0]['source'] = 'x = 1\ny = 3'
    assert code_hash(other) != code_hash(cells)


TAUGHT = tuple('config model plan parallel checkpoint training rehearsal launching release recipes'.split())  # Folders whose pages follow each other
BESIDE = {'next': 1, 'before': -1, 'last': -1}


def misled(page: Path, text: str) -> list[str]:
    "Links and mentions in `text` that lead nowhere, or not where their words say."
    found = [m[0] for m in re.finditer(r'(?<!\[)[Cc]hapter \d+', text) if page.parent.name in TAUGHT]  # By a link, or it is soon wrong
    row = [other.resolve() for other in pages() if other.parent == page.parent]
    for words, target in re.findall(r'\[([^]]*)\]\(([^)#:]+\.ipynb)', text):
        number = re.fullmatch(r'[Cc]hapter (\d+)', words)
        side = re.fullmatch(r'(?:the )?(?:(next|last) (?:page|chapter)|(?:page|chapter) (before))', words)
        if not (page.parent/target).exists(): found.append(target)
        elif number and int(number[1]) != int(Path(target).name[:2]): found.append(f'{words}: {target}')
        elif side and (page.parent/target).resolve() != row[(row.index(page) + BESIDE[side[1] or side[2]]) % len(row)]:
            found.append(f'{words}: {target}')
    return found


@pytest.mark.parametrize('page', pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_where_they_say(page):
    cells = json.loads(page.read_text('utf-8'))['cells']
    assert misled(page, '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown')) == []


@pytest.mark.parametrize('text', ['as chapter 12 says', '[chapter 7](06_collectives.ipynb)', '[the page before](06_collectives.ipynb)', '[there](99_no.ipynb)'])
def test_a_link_that_misleads_is_seen(text):
    assert len(misled(ROOT/'nbs/plan/05_ledger.ipynb', text)) == 1
    assert misled(ROOT/'nbs/plan/05_ledger.ipynb', '[chapter 6](06_collectives.ipynb), the [next page](06_collectives.ipynb)') == []
