"The figures and the ladder of every named recipe are those of its plan."
import re

import pytest

from llm_workbook.__main__ import main
from llm_workbook.config.hardware import node
from llm_workbook.config.hardware import node as find_node
from llm_workbook.config.recipe import Recipe, recipe_names
from llm_workbook.plan.estimate import draft, estimate
from llm_workbook.plan.model_states import PAGED as STATES
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


# Plans that lack memory

QWEN = Recipe.named(FULL).changed({
    'model.source': 'qwen2.5-32b', 'batch.micro': 1, 'batch.accumulation': 8, 'batch.length': 2048,
    'precision.reduce': 'float32'})
LOADING = draft('llama-3.1-70b', '8x-a100-40').changed(
    {'method.kind': 'lora', 'sharding.loading': 'every_rank'})
EXPERTS = Recipe.named(FULL).changed({
    'model.source': 'deepseek-v3', 'cluster.hardware': 'dgx-h200', 'cluster.nodes': 16,
    'batch.micro': 1, 'batch.accumulation': 1, 'batch.length': 2048})
DDP = draft('llama-3.1-70b', '8x-h100').changed(
    {'method.kind': 'lora', 'sharding.strategy': 'ddp', 'sharding.loading': 'every_rank'})


@pytest.mark.parametrize('recipe, first, changes, answers', [
    (LOADING, 'the base read in parts', {'sharding.loading': 'sharded'}, ('does not fit', 'fits')),
    (QWEN, '8 rows in a pass, 1 pass', {'batch.micro': 8, 'batch.accumulation': 1},
     ('does not fit', 'fits')),
    (DDP, 'sharded by fsdp2', {'sharding.strategy': 'fsdp2'}, ('does not fit', 'fits'))],
    ids=['loading', 'accumulation', 'ddp'])
def test_the_first_rung_helps_the_phase_that_lacks_memory(recipe, first, changes, answers):
    plan, rung = estimate(recipe), memory_ladder(recipe)[0]
    better, phase = estimate(recipe.changed(rung.changes)), rung.phase
    assert rung.what == first
    assert plan.ledger.total(phase) > plan.node.gpu.usable_b
    assert changes.items() <= rung.changes.items()
    assert rung.gpu_b == better.ledger.total(phase) == plan.ledger.total(phase) - rung.saved_b
    assert (plan.answer, better.answer, rung.answer) == (*answers, answers[1])
    assert recipe.changed(rung.changes).global_batch == recipe.global_batch


def test_zero3_is_a_rung_only_while_memory_is_short():
    whats = [rung.what for rung in memory_ladder(EXPERTS)]
    assert whats[0] == 'sharded by zero3'
    with_room = node('dgx-h200').changed({'gpu.memory_b': 2**39})
    assert estimate(EXPERTS, with_room).fits
    assert not any('sharded by' in rung.what for rung in memory_ladder(EXPERTS, with_room))


def test_more_ranks_share_the_weights_before_anything_else_changes():
    hybrid = QWEN.changed({'batch.accumulation': 1, 'sharding.group': 4})
    first, second, *others = memory_ladder(hybrid)
    assert (first.what, first.changes) == ('weights shared by 8 ranks', {'sharding.group': 8})
    assert (second.what, second.changes) == ('weights shared by 16 ranks', {'sharding.group': None})
    assert not any('shared' in rung.what for rung in others)


def test_reductions_in_every_pass_spare_whole_gradients():
    long = QWEN.changed({'batch.length': 16384, 'batch.accumulation': 64,
                         'precision.master': 'bfloat16'})  # So zero3 does not run it
    first = memory_ladder(long)[0]
    assert (first.what, first.answer) == ('gradients reduced in every pass', 'fits')
    assert first.saved_b > 100 * 2**30
    rows = QWEN.changed({'batch.accumulation': 1, 'batch.micro': 32, 'batch.length': 8192})
    less = [rung for rung in memory_ladder(rows) if 'reduction' in rung.what]
    assert less[0].what == '16 rows in a pass, 2 passes, each with its own reduction'
    assert all(rung.changes['sharding.sync_each_batch'] for rung in less)


def test_fewer_rows_in_a_step_are_the_last_way_to_spare_gradients_of_earlier_passes():
    alone = QWEN.changed({
        'model.source': 'qwen2.5-3b', 'cluster': {
            'hardware': '1x-rtx-4090', 'processes': 1, 'device': 'cuda'},
        'sharding.strategy': 'none', 'sharding.loading': 'every_rank',
        'precision.master': 'bfloat16', 'precision.reduce': None})
    assert estimate(alone).answer == 'probably does not fit'
    [rung] = memory_ladder(alone)
    assert rung.what == '1 row in a pass, 1 pass: fewer rows in a step'


def test_a_host_that_is_too_small_already_hides_no_rung():
    small = node('8x-a100-40').changed(memory_b=2**30)
    assert memory_ladder(LOADING, small)[0].what == 'the base read in parts'


def test_a_ladder_without_rungs_says_so():
    assert str(type(memory_ladder(LOADING))()) == 'no change that this version runs saves memory'


def test_a_terminal_shows_the_ladder_below_the_plan(tmp_path, capsys):
    file = str(LOADING.save(tmp_path/'mine.yaml'))
    assert main(['plan', file]) == main(['plan', file, '--ladder']) == 3
    plan, again = capsys.readouterr().out.split('llama-3.1-70b on 1 x 8x-a100-40\n')[1:]
    assert '`memory_ladder`, or `--ladder` in a terminal, lists' in plan
    assert again.startswith(plan)
    heading, first, *_ = again.removeprefix(plan).splitlines()
    assert heading == 'What makes room, each change on top of those above it:'
    assert first.startswith('the base read in parts: load 18.3 GiB, saves 131.5, ')
    assert first.endswith(', fits')


# Paged states

PAGED = draft('llama-3.2-3b', '1x-a100-80').changed({
    'method.kind': 'full', 'precision.master': 'bfloat16', 'optimizer.kind': 'paged_adamw'})


@pytest.mark.parametrize('usable_gib', [79, 20])
def test_paged_states_are_on_the_card_while_it_has_room(usable_gib):
    card = {'gpu.memory_b': usable_gib * 2**30, 'gpu.usable': 1.0}
    machine = node('1x-a100-80').changed(card)
    plan = estimate(PAGED, machine)
    step_b = plan.ledger.total('step')
    states_b = sum(line.size_b for line in plan.ledger.lines
                   if line.phase == 'step' and line.name.startswith(STATES))
    assert states_b > 2 * 4 * 3e9  # Two float32 numbers for each of 3.2 billion
    full_b = min(step_b + states_b, usable_gib * 2**30)
    [shown] = [row.figure for row in run_figures(PAGED, machine) if 'full rows' in row.what
               and 'nvidia-smi' in row.what]
    assert shown.startswith(f'{step_b / 2**20:,.0f} to {full_b / 2**20:,.0f} MiB (')
    assert shown.endswith('and paged states while there is room)')
    assert any('GiB of paged optimizer states' in warning for warning in plan.warnings)


def test_states_that_are_not_paged_get_no_note():
    plain = estimate(PAGED.changed({'optimizer.kind': 'adamw'}))
    assert not any('paged' in warning for warning in plain.warnings)
