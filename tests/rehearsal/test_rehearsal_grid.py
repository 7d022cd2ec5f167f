"""The ledger and the rehearsal: two ways to the same bytes, on a few recipes here and on the grid
of the committed record."""
import json
import os
import statistics

import pytest
from bench.lines import rehearsal_grid as grid
from bench.record import RESULTS
from trouble import slow_case

os.environ.setdefault('HF_HUB_OFFLINE', '1')
SOME = [
    slow_case('llama-3.2-1b', 'full, whole logits'),
    ('llama-3.2-1b', 'full, ddp'),
    slow_case('llama-3.2-1b', 'lora'),
    slow_case('llama-3.2-1b', 'qlora, cpu'),
    slow_case('qwen2.5-0.5b', 'full, nothing recomputed'),
    slow_case('mixtral-8x7b', 'full')]


def committed() -> dict: return json.loads((RESULTS/'cpu/rehearsal_grid.json').read_text('utf-8'))


@pytest.mark.parametrize('preset, name', SOME)
def test_two_ways_to_the_same_bytes(preset, name):
    found = grid.row(preset, name)
    assert abs(found['difference']) <= 1, found


def test_the_grid_is_wide():
    assert len(set(grid.PAIRS)) == len(grid.PAIRS) >= 60
    assert len(grid.GRID) >= 10
    assert set(grid.WHY) <= set(grid.PAIRS)
    made = [grid.recipe(*pair) for pair in grid.PAIRS]
    assert {r.method.kind for r in made} == {'full', 'lora', 'qlora'}
    assert {r.cluster.device for r in made} == {'cpu', 'cuda'}
    assert min(r.cluster.ranks for r in made) == 2
    assert max(r.cluster.ranks for r in made) == 1024
    assert {name for _, name in grid.PAIRS} == set(grid.RECIPES)


def test_every_row_of_the_record_agrees_or_says_why():
    rows = committed()['rows']
    made = committed()
    assert [(row['preset'], row['recipe']) for row in rows] == list(grid.PAIRS)
    for row in rows:
        assert (
            abs(row['difference']) <= grid.GOAL
            or row['why'] == grid.WHY[row['preset'], row['recipe']]), row
    assert made['value'] == pytest.approx(
        statistics.median(abs(row['difference']) for row in rows), abs=1e-4)
    assert made['value'] < .1
    assert sum('why' in row for row in rows) == len(grid.WHY) <= 3
    assert made['goal'] == grid.GOAL


@pytest.mark.parametrize('preset, name', grid.PAIRS)
def test_the_ledger_is_the_one_of_the_record(preset, name):
    from llm_workbook.plan.ledger import memory

    recorded = next(
        row for row in committed()['rows'] if (row['preset'], row['recipe']) == (preset, name))
    ledger = memory(grid.recipe(preset, name))
    assert (ledger.total('step', level='allocated'), grid.fullest_instant(ledger)) == (
        recorded['ledger_b'], recorded['ledger_instant'])
