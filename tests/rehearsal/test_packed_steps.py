"""Packed rows: what plan and rehearsal count of them, and what real ranks hold.

Under `sdpa` and `eager` each row has a mask and rotary tables of its own; under `flash` the rows
are joined to one, without a mask.
"""
from functools import cache

import pytest
from trouble import slow_case, wide_base

from llm_workbook import Recipe, draft, estimate, memory, rehearse

LORA = {'method.kind': 'lora', 'sharding.activation_checkpointing': 'none'}
QLORA = {'method.kind': 'qlora', 'sharding.activation_checkpointing': 'full'}
FULL = {'method.kind': 'full', 'sharding.activation_checkpointing': 'none'}


def packed_rows(changes: dict, **batch) -> Recipe:
    batch = {'micro': 2, 'accumulation': 1, 'length': 1024, 'packing': True} | batch
    return draft('llama-3.2-1b', '2x-rtx-3090').changed(changes | {'batch': batch})


@cache
def rehearsed_b(recipe: Recipe) -> int: return rehearse(recipe).peak_b


def planned_b(recipe: Recipe) -> int: return memory(recipe).total('step', level='allocated')


@pytest.mark.parametrize('attention, changes', [
    ('sdpa', LORA), slow_case('flash', LORA), slow_case('eager', LORA), slow_case('sdpa', QLORA),
    slow_case('sdpa', FULL | {'batch.micro': 1})])
@pytest.mark.slow
def test_plan_and_rehearsal_agree_on_packed_rows(attention, changes):
    recipe = packed_rows({'model.attention': attention}).changed(changes)
    assert abs(planned_b(recipe) / rehearsed_b(recipe) - 1) < .01


def test_the_mask_is_in_both(tmp_path):
    recipe = packed_rows(LORA | {'model.source': str(wide_base(tmp_path))})
    plain = recipe.changed({'batch.packing': False})
    more_b = planned_b(recipe) - planned_b(plain)
    assert more_b > .02 * planned_b(plain)
    assert abs(more_b / (rehearsed_b(recipe) - rehearsed_b(plain)) - 1) < .02


def test_each_packed_row_has_rotary_tables_of_its_own():
    recipe = packed_rows(LORA)
    padded = recipe.changed({'batch.packing': False, 'batch.padded': True})
    spec = memory(recipe).spec
    assert planned_b(recipe) - planned_b(padded) == 2 * 1024 * spec.head_dim * 2


def test_rows_that_are_joined_need_no_mask():
    joined = packed_rows(LORA | {'model.attention': 'flash'})
    plain = joined.changed({'batch.packing': False})
    tables_b = 2 * 1024 * memory(joined).spec.head_dim * 2
    assert planned_b(joined) - planned_b(plain) == tables_b
    assert estimate(joined).step.step_s == estimate(plain).step.step_s


def test_a_mask_makes_attention_compute_every_key():
    long = packed_rows(LORA, micro=1, length=8192)
    packed, plain = (estimate(long.changed({'batch.packing': packs})).step
                     for packs in (True, False))
    whole, causal = (dict(step.parts)['attention'] for step in (packed, plain))
    assert whole == pytest.approx(2 * causal, rel=1e-6)
    assert packed.step_s > plain.step_s
