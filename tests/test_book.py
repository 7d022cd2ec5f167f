"""A page's outputs are those of its code: `make book` records a hash of the code it executed."""
import copy
import json

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
