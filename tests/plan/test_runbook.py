"The figures and the ladder of every named recipe are those of its plan."
import re

import pytest

from llm_workbook.config.hardware import node as find_node
from llm_workbook.config.recipe import Recipe, recipe_names
from llm_workbook.plan.estimate import estimate
from llm_workbook.plan.runbook import memory_ladder, run_figures

ON_GPUS = [name for name in recipe_names() if Recipe.named(name).cluster.device == 'cuda']
FULL = '70b-2x8-a100-80-full'


@pytest.mark.parametrize('name', ON_GPUS)
def test_every_rung_saves_what_it_says_and_keeps_the_rows_of_a_step(name):
    recipe = Recipe.named(name)
    before_b, rows = estimate(recipe).ledger.total('step'), recipe.global_batch
    rungs = memory_ladder(recipe)
    assert rungs
    for rung in rungs:
        assert rung.counted
        smaller = recipe.changed(rung.changes)
        plan = estimate(smaller)
        assert plan.ledger.total('step') == rung.gpu_b == before_b - rung.saved_b
        assert rung.saved_b >= 2**30 // 20
        assert plan.step.step_s == rung.step_s
        assert all(room.spare_b >= 0 for room in plan.rooms if room.place != 'gpu')
        assert smaller.global_batch == rows * smaller.cluster.nodes // recipe.cluster.nodes
        before_b = rung.gpu_b


@pytest.mark.parametrize('name', ['PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'])
def test_segments_that_cannot_grow_are_the_first_rung(name):
    fixed = {'cluster.variables': {name: 'expandable_segments:False', 'NCCL_DEBUG': 'INFO'}}
    recipe = Recipe.named('8b-1x24gb-qlora').changed(fixed)
    first, *others = memory_ladder(recipe)
    fixed_b, grown_b = (estimate(one).ledger.total('step')
                        for one in (recipe, recipe.changed(first.changes)))
    assert first.counted
    assert (first.gpu_b, first.saved_b) == (grown_b, fixed_b - grown_b)
    assert recipe.changed(first.changes).cluster.allocator == {name: 'expandable_segments:True'}
    assert ('NCCL_DEBUG', 'INFO') in recipe.changed(others[-1].changes).cluster.variables


@pytest.mark.parametrize('name', recipe_names())
def test_figures_are_those_of_the_plan(name):
    recipe = Recipe.named(name)
    plan, figures = estimate(recipe), run_figures(recipe)
    shown = {(row.when, row.what): row.figure for row in figures}
    assert shown['from step 1', 'each line in the terminal, full rows'] == (
        f'{plan.step.step_s:,.2f} s a step')
    smi = [row for row in figures if 'nvidia-smi' in row.what]
    phases = ('load', 'step') if name in ON_GPUS else ()
    assert [re.split(' MiB| to ', row.figure)[0] for row in smi] == [
        f'{plan.ledger.total(phase) / 2**20:,.0f}' for phase in phases]
    assert sum('90 % of runs' in row.figure for row in smi) == bool(phases)
    saves = [row for row in figures if row.when == 'at a save']
    assert len(saves) == (recipe.intervals.saving > 0)
    locked = any('page-locked' in row.what for row in figures)
    assert locked == (recipe.sharding.offload_optimizer == 'cpu')


def test_offload_is_left_out_where_the_host_cannot_take_it():
    recipe = Recipe.named(FULL)
    whats = [rung.what for rung in memory_ladder(recipe)]
    assert whats[-1] == 'optimizer and parameters in host memory'
    small = find_node('p4de').changed(memory_b=200 * 2**30)
    assert not any('host memory' in rung.what for rung in memory_ladder(recipe, small))


def test_the_speed_of_the_disk_is_that_of_the_machine():
    recipe = Recipe.named('8b-1x24gb-qlora')
    slow = find_node(recipe.cluster.hardware).changed(disk_bps=1e9)
    [row] = [row for row in run_figures(recipe, slow) if '1.0 GB/s' in row.what]
    assert row.figure.startswith('16 s')


def test_odd_rows_of_a_pass_go_down_to_one():
    recipe = Recipe.named('8b-1x24gb-qlora').changed({'batch.micro': 6})
    whats = [rung.what for rung in memory_ladder(recipe)]
    assert '3 rows in a pass, 2 passes' in whats
    assert '1 row in a pass, 6 passes' in whats
