"""Rows of unequal length under sdpa: what plan and rehearsal count, and what transformers does.

The rehearsal plays a CPU's kernel in both cases; `cuda` counts it as a GPU's efficient kernel.
"""
import pytest
import torch
from trouble import wide_base

from llm_workbook import Recipe, draft, estimate, memory, rehearse
from llm_workbook.files import asset

LORA = {'method.kind': 'lora', 'sharding.activation_checkpointing': 'none'}
QLORA = {'method.kind': 'qlora', 'sharding.activation_checkpointing': 'full'}
FULL = {'method.kind': 'full', 'sharding.activation_checkpointing': 'none'}


def three_rows(device: str, changes: dict) -> Recipe:
    return draft('llama-3.2-1b', '2x-rtx-3090').changed(changes | {
        'batch': {'micro': 3, 'accumulation': 1, 'length': 1024, 'padded': True},
        'cluster.device': device})


def assert_agreement(recipe: Recipe) -> None:
    played_b = rehearse(recipe).peak_b
    planned_b = memory(recipe).total('step', level='allocated')
    assert abs(planned_b / played_b - 1) < .01
    if recipe.method.kind != 'lora': return
    full = recipe.changed({'batch.padded': False})  # The mask is in both of them
    more_b = planned_b - memory(full).total('step', level='allocated')
    assert more_b > .02 * planned_b
    assert abs(more_b / (played_b - rehearse(full).peak_b) - 1) < .02


def test_plan_and_rehearsal_agree_on_masked_rows_of_wide_layers(tmp_path):
    assert_agreement(three_rows('cuda', LORA | {'model.source': str(wide_base(tmp_path))}))


@pytest.mark.slow
@pytest.mark.parametrize('device, changes', [
    ('cuda', FULL), ('cpu', LORA), ('cpu', QLORA)])
def test_plan_and_rehearsal_agree_on_masked_rows(device, changes):
    assert_agreement(three_rows(device, changes))


def test_each_layer_keeps_a_mask_and_every_head_its_keys_and_values():
    recipe = three_rows('cuda', LORA)
    plain = recipe.changed({'batch.padded': False})
    spec = memory(recipe).spec
    rows, length = 3 * 1024, 1024
    bias_b = spec.layers * rows * length * 2
    repeated_b = spec.layers * rows * 2 * (spec.heads - spec.kv_heads) * spec.head_dim * 2
    more_b = (memory(recipe).total('step', level='allocated')
              - memory(plain).total('step', level='allocated'))
    assert more_b == pytest.approx(bias_b + repeated_b + rows * length, rel=.01)


@pytest.mark.parametrize('changes', [
    {'batch.micro': 1}, {'model.attention': 'flash'}, {'model.attention': 'eager'}])
def test_rows_that_need_no_mask_cost_nothing_more(changes):
    padded = three_rows('cuda', LORA).changed(changes)
    plain = padded.changed({'batch.padded': False})
    tensors_b = [memory(one).total('step', level='allocated') for one in (padded, plain)]
    assert tensors_b[0] == tensors_b[1]
    assert estimate(padded).step.step_s == estimate(plain).step.step_s


def test_a_mask_makes_attention_compute_every_key():
    long = three_rows('cuda', LORA).changed({'batch.length': 8192})
    padded, plain = (estimate(long.changed({'batch.padded': masked})).step
                     for masked in (True, False))
    longer, shorter = (dict(step.parts)['attention'] for step in (padded, plain))
    assert longer == pytest.approx(2 * shorter, rel=1e-6)
    assert padded.step_s > plain.step_s


@pytest.mark.parametrize('lengths, masked', [
    ([6, 6], False), ([6, 4], True), ([6], False)], ids=['equal', 'unequal', 'one row'])
def test_transformers_masks_rows_of_unequal_length_alone(monkeypatch, lengths, masked):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import sdpa_attention
    config = AutoConfig.from_pretrained(asset('tiny-base'), num_key_value_heads=2)
    assert config.num_attention_heads > config.num_key_value_heads
    model = AutoModelForCausalLM.from_config(config, attn_implementation='sdpa')
    seen = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    def watched(q, k, v, attn_mask=None, **options):
        seen.append((attn_mask is not None, k.shape[1] == q.shape[1], options))
        return kernel(q, k, v, attn_mask=attn_mask, **options)
    monkeypatch.setattr(sdpa_attention.torch.nn.functional, 'scaled_dot_product_attention', watched)
    mask = torch.tensor([[1] * length + [0] * (6 - length) for length in lengths])
    model(input_ids=torch.ones(len(lengths), 6, dtype=torch.long), attention_mask=mask)
    assert len(seen) == model.config.num_hidden_layers
    for is_masked, repeated, options in seen:
        assert is_masked == repeated == masked
        assert options['is_causal'] != masked
