"""Which models keep packed examples apart: asked of every family in miniature."""
import pytest
from trouble import slow_case

from bench.shared.families import FAMILIES, family_fields
from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Recipe
from llm_workbook.model.architecture import usual_attention
from llm_workbook.training.packed_attention import LEAK, check_packed_rows, packing_leak

LEAKY = {  # With transformers 5.23
    'Qwen 3 Next', 'Qwen 3.5', 'Qwen 3.5 MoE', 'Qwen 3.5 (images)', 'Nemotron H', 'Granite 4',
    'Falcon H1', 'Kimi Linear', 'Jamba', 'gpt-oss', 'Falcon', 'Qwen 2.5 VL', 'GLM 4.1V',
    'DeepSeek V3.2', 'DeepSeek V4'}
QUICK = 'Llama 3.1', 'Qwen 3 MoE', 'Gemma 3', 'DeepSeek V3', 'GPT-2', 'Qwen 3 Next', 'gpt-oss'
ROUNDING = 1e-4  # The largest seen is 1e-5


@pytest.mark.parametrize(
    'family', [family if family in QUICK else slow_case(family) for family in FAMILIES])
def test_a_family_keeps_packed_examples_apart_or_is_known_to_leak(family):
    fields = family_fields(family)
    leak = packing_leak(fields, usual_attention(fields))
    if family in LEAKY: assert leak > 1
    else: assert leak < ROUNDING
    assert ROUNDING < LEAK < 1


@pytest.mark.parametrize('attention', ['eager', 'flash', 'segments'])
def test_other_attentions_are_asked_too(attention):
    assert packing_leak(family_fields('Qwen 3'), attention) < ROUNDING


@pytest.mark.parametrize('attention', ['sdpa', 'segments'])
def test_a_leak_that_is_planted_is_seen(monkeypatch, attention):
    "As if the batch brought a mask of ones; and, for `segments`, no border inside."
    import torch
    from llm_workbook.training import packed_rows
    collate = packed_rows.PackedCollator.__call__
    def with_ones(self, rows):
        batch = collate(self, rows)
        ones = torch.ones_like(batch['input_ids'])
        if attention == 'sdpa': return batch | {'attention_mask': ones}
        ends = torch.tensor([0, ones.shape[1]], dtype=torch.int32)
        return batch | {'cu_seq_lens_q': ends, 'cu_seq_lens_k': ends}
    monkeypatch.setattr(packed_rows.PackedCollator, '__call__', with_ones)
    assert packing_leak('tiny-base', attention) > 1


def packed_recipe(**changes):
    plain = Recipe(
        name='packed', model={'source': 'tiny-base'}, data={'source': 'sample-conversations'},
        batch={'packing': True})
    return plain.changed({name.replace('__', '.'): value for name, value in changes.items()})


def test_a_leaky_model_is_refused_and_the_way_out_is_named():
    with pytest.raises(RecipeError, match='batch.packing.*see each other.*set it to False'):
        check_packed_rows(packed_recipe(model__source='gpt-oss-20b', model__attention='eager'))
    assert check_packed_rows(packed_recipe()) < ROUNDING
    assert check_packed_rows(packed_recipe(batch__packing=False)) == 0
