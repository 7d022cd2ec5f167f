"""A miniature has the class, the sorts of layers, the names on disk and traits of its source."""
import json

import pytest
import torch

from llm_workbook.files import asset
from llm_workbook.model.architecture import configuration, presets, skeleton
from llm_workbook.model.miniature import miniature, small_config
from llm_workbook.model.weight_files import Weights

FAMILIES = {  # Made by AutoConfig at full size -> layers of the miniature
    'qwen3_next': (0, 3),
    'deepseek_v3': (0, 3),
    'falcon_h1': (0, 1),
    'llama4_text': (0, 3),
    'gpt_oss': (0, 1),
    'nemotron_h': (0, 1, 2, 3),
    'granitemoehybrid': (0, 1),
    'ernie4_5_moe': (0, 1),
    'cohere2': (0, 3),
    'gpt_neo': (0, 1),
    'phimoe': (0, 1),
    'gemma4_text': (0, 5),
    'gemma3n_text': (0, 4, 10, 14, 20, 24),
    'jamba': (0, 1, 4),
    'kimi_linear': (0, 1, 4),
    'mamba': (0, 1)}


def full(kind, **changes):
    from transformers import AutoConfig
    return AutoConfig.for_model(kind, **changes).to_dict()


def run(fields, tokens=40):
    "Logits of random weights, for more tokens than a window has."
    from transformers import AutoModelForCausalLM
    from llm_workbook.model.architecture import parsed_config
    torch.manual_seed(0)
    config = parsed_config(fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    rows = torch.arange(1, tokens + 1)[None]
    with torch.no_grad(): return model(rows, use_cache=False).logits


@pytest.mark.parametrize('kind', FAMILIES)
def test_a_family_at_full_size_becomes_small_with_every_sort_of_layer_and_runs(kind):
    small = small_config(full(kind, vocab_size=200, pad_token_id=0))
    assert small.layers == FAMILIES[kind]
    assert small.fields['vocab_size'] == 200
    assert run(small.fields).isfinite().all()


@pytest.mark.parametrize('name', presets())
def test_every_preset_becomes_small(name):
    small = small_config(name)
    model = skeleton(small.fields)
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    rest = [p.numel() for p in model.parameters() if not any(p is end for end in ends)]
    assert 2 <= len(small.layers) <= 4
    assert sum(rest) < 1_500_000
    assert small.text['vocab_size'] == small.before['vocab_size']


@pytest.mark.parametrize('name, changes, kept', [
    ('llama-3.2-1b', {}, {'tie_word_embeddings': True}),
    ('gemma-2-9b', {}, {'final_logit_softcapping': 30.0, 'attn_logit_softcapping': 50.0}),
    ('qwen2.5-7b', {}, {'num_attention_heads': 14, 'num_key_value_heads': 2}),  # 28 and 4
    ('llama-3.1-8b', {'attention_bias': True}, {'attention_bias': True}),
    ('deepseek-v3', {}, {'n_shared_experts': 1, 'topk_group': 1, 'head_dim': 8}),
    ('qwen3-30b-a3b', {}, {'num_local_experts': 4, 'num_experts_per_tok': 2})])
def test_what_makes_it_that_model_is_kept(name, changes, kept):
    small = small_config(configuration(name)[1] | changes).fields
    assert {field: small[field] for field in kept} == kept


def test_values_of_single_layers_and_shared_keys_are_kept():
    gemma4 = small_config(full('gemma4_text')).fields
    assert gemma4['head_dim'] == 16
    assert gemma4['per_layer_config'] == {'1': {'head_dim': 32}}  # 256, and 512 of every sixth
    assert small_config(full('gemma3n_text')).fields['num_kv_shared_layers'] == 2
    jamba = small_config(full('jamba')).fields
    assert (jamba['attn_layer_period'], jamba['attn_layer_offset']) == (3, 2)


def test_no_parameter_of_a_miniature_is_all_zeros(tmp_path):
    with Weights(miniature(full('qwen2', vocab_size=200), tmp_path/'small')) as weights:
        assert all(weights.read(name).any() for name in weights.tensors)


def test_rotary_scaling_keeps_its_type_and_fits_the_head():
    before = configuration('llama-3.1-8b')[1]
    rope = small_config(before).fields['rope_parameters']
    assert rope['rope_type'] == 'llama3'
    assert run(small_config(before | {'vocab_size': 200}).fields).isfinite().all()
    factors = {'rope_type': 'longrope', 'short_factor': [1.0] * 48, 'long_factor': [2.0] * 48,
               'original_max_position_embeddings': 4096, 'rope_theta': 1e4}
    phi = full('phi3', rope_parameters=factors, vocab_size=200, pad_token_id=0)
    small = small_config(phi).fields
    assert small['rope_parameters']['long_factor'] == [2.0] * 8
    assert run(small).isfinite().all()


def test_a_quantised_checkpoint_becomes_one_in_bfloat16_and_it_is_said(tmp_path):
    raw = json.loads((asset('tiny-base')/'config.json').read_text())
    packed = raw | {'quantization_config': {'quant_method': 'fp8'}}
    assert small_config(packed).notes == (
        'quantization_config is left out: the miniature is in bfloat16',)
    place = miniature(packed, tmp_path/'small')
    assert 'quantization_config' not in json.loads((place/'config.json').read_text())
    with Weights(place) as weights:
        assert {entry.dtype for entry in weights.tensors.values()} == {'bfloat16'}
        assert len({entry.file for entry in weights.tensors.values()}) > 1


def test_a_number_of_layers_is_taken_or_refused():
    assert small_config('gemma-3-1b', layers=4).layers == (0, 1, 2, 5)
    with pytest.raises(ValueError, match='layers = 1: gemma-3-1b has 26 layers of 2 sorts'):
        small_config('gemma-3-1b', layers=1)


def test_a_full_directory_and_what_stays_large_are_refused(tmp_path, monkeypatch):
    from llm_workbook.model import miniature as page
    (tmp_path/'file').write_text('')
    with pytest.raises(ValueError, match='is not empty: name a directory of its own'):
        miniature('tiny-base', tmp_path)
    monkeypatch.setattr(page, '_MOST', 1000)
    with pytest.raises(ValueError, match='llama stays large, first .* cannot be made small here'):
        small_config('tiny-base')
