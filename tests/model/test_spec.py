"""The model chapter against the real thing: counts, grouping, and what bitsandbytes and PEFT do."""
import json
import subprocess
import sys

import pytest

from llm_workbook.model.adapters import add_adapters
from llm_workbook.model.architecture import configuration, in_modules, inventory, presets, skeleton
from llm_workbook.model.layout import coverage
from llm_workbook.model.spec import spec
from llm_workbook.config.recipe import Method
from llm_workbook.config.rules import broken

pytestmark = pytest.mark.filterwarnings(
    'ignore:.*(pattern keys did not match|is_gradient_checkpointing|script_method)')
SMALL = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=160)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=32)
MLA = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    num_key_value_heads=4)
VISION = dict(
    model_type='siglip_vision_model', hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, image_size=28, patch_size=14, vision_use_head=False)
TOYS = {
    'llama': SMALL,
    'llama-tied': SMALL | dict(model_type='llama', tie_word_embeddings=True),
    'qwen2': SMALL,
    'qwen3': SMALL | dict(head_dim=16),
    'gemma2': SMALL | dict(head_dim=16),
    'phi3': SMALL | dict(pad_token_id=0),
    'gemma3': dict(
        text_config=SMALL | dict(head_dim=16, model_type='gemma3_text'), vision_config=VISION,
        mm_tokens_per_image=4),
    'mixtral': SMALL | dict(num_local_experts=4, num_experts_per_tok=2),
    'qwen3_moe': SMALL | MOE | dict(num_experts=4, head_dim=16),
    'gpt_oss': SMALL | MOE | dict(num_local_experts=4, head_dim=16),
    'deepseek_v3': SMALL
    | MOE
    | MLA
    | dict(n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1)}
# PEFT drops a name in silence while another matches
IGNORED = [(('o_proj', 'down_proj'), name) for name in ('mixtral', 'gpt_oss')]
TOYS = {name: dict(model_type=name.partition('-')[0]) | config for name, config in TOYS.items()}


@pytest.mark.parametrize('name', presets())
def test_a_preset_counts_what_transformers_instantiates(name):
    model = skeleton(presets()[name].config)
    found = spec(name)
    assert (
        sum(p.numel() for p in model.parameters()) == presets()[name].parameters == found.parameters
    )
    assert sum(found.by_kind().values()) == found.parameters
    assert found.layers == model.config.get_text_config(decoder=True).num_hidden_layers
    assert found.buffers_b == sum(b.numel() * b.element_size() for b in model.buffers())
    if found.name.startswith('gemma-3') and not name.endswith(('1b', 'text')):
        assert found.by_kind()['tower'] > 4e8
    else: assert not found.by_kind()['tower']
    assert not found.by_kind()['other']
    assert sum(unit.count * unit.text.parameters for unit in found.units) == (
        found.parameters - found.by_kind()['tower'])


def test_units_put_together_are_the_model():
    model = skeleton(presets()['gemma-3-12b'].config)
    mine = [
        (f'{path}.{w.name}'.strip('.'), w.shape)
        for u in spec('gemma-3-12b').units
        for path in u.paths
        for w in u.weights]
    assert sorted(mine) == sorted((n, tuple(p.shape)) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    'name, units',
    {
        'gemma-2-2b': [('sliding layer', 13, 4096, 0), ('full layer', 13, None, 0)],
        'gpt-oss-120b': [('sliding layer', 18, 128, 128), ('full layer', 18, None, 128)],
        'gemma-3-1b': [('sliding layer', 22, 512, 0), ('full layer', 4, None, 0)],
        'mistral-7b-v0.1': [('layer', 32, 4096, 0)], 'mistral-7b-v0.3': [('layer', 32, None, 0)],
        'deepseek-v3': [('dense layer', 3, None, 0), ('moe layer', 58, None, 256)],
        'qwen2.5-72b': [('layer', 80, None, 0)]}.items())
def test_layers_are_sorted_by_window_and_experts(name, units):
    assert [(u.name, u.count, u.window, u.experts) for u in spec(name).units[:-1]] == units


@pytest.mark.parametrize(
    'name, billions',
    {
        'mixtral-8x7b': 12.9, 'qwen3-30b-a3b': 3.35, 'qwen3-235b-a22b': 22.2, 'deepseek-v3': 37.6,
        'llama-3.1-8b': 8.03}.items())
def test_active_parameters(name, billions):
    assert spec(name).active_parameters / 1e9 == pytest.approx(billions, rel=5e-3)


def test_facts():
    gemma = spec('gemma-2-9b')
    deep = spec('deepseek-v3')
    qwen = spec('qwen3-8b')
    assert (gemma.softcap, gemma.tied, gemma.activation, gemma.head_dim, gemma.norm_fp32) == (
        True, True, 'gelu_pytorch_tanh', 256, True)
    assert (qwen.qk_norm, qwen.tied, qwen.context, gemma.qk_norm) == (True, False, 40960, False)
    assert (deep.shared_experts, deep.moe_intermediate, deep.head_dim, deep.mla.kv_rank) == (
        1, 2048, 192, 512)
    assert any(w.name == 'self_attn.q_proj.bias' for w in spec('qwen2.5-7b').units[0].weights)


@pytest.mark.parametrize('name', TOYS)
@pytest.mark.parametrize('quant', ['nf4', 'int8'])
def test_packed_modules_are_those_bitsandbytes_makes(name, quant):
    from bitsandbytes.nn import Linear4bit, Linear8bitLt
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.auto import AutoHfQuantizer
    model = skeleton(TOYS[name])
    config = BitsAndBytesConfig(load_in_4bit=quant == 'nf4', load_in_8bit=quant == 'int8')
    left = AutoHfQuantizer.from_config(config).get_modules_to_not_convert(
        model, None, model._keep_in_fp32_modules)
    model = replace_with_bnb_linear(model, left, config)
    mine = coverage(spec(TOYS[name]), Method(quant=quant))
    assert (
        mine.packed
        == sorted(n for n, m in model.named_modules() if isinstance(m, (Linear4bit, Linear8bitLt)))
        != [])


@pytest.mark.parametrize(
    'targets',
    [
        'all-linear', ('o_proj', 'down_proj'), ('mlp.down_proj',), ('gate_proj', 'up_proj'),
        ('w1', 'w3'), ('layers.1.self_attn.o_proj',), ('gate',), ('q_prj',),
        ('shared_experts.gate_proj',), ('mlp.experts.down_proj',)],
    ids=str)
@pytest.mark.parametrize('name', TOYS)
def test_adapters_are_those_peft_makes(name, targets):
    method = Method(kind='lora', rank=4, targets=targets)
    try: real = add_adapters(skeleton(TOYS[name]), method)
    except ValueError: real = None
    def ask(): return coverage(spec(TOYS[name]), method)
    if real is None or (targets, name) in IGNORED: return pytest.raises(ValueError, ask) and None
    mine = ask()
    shapes = sorted(tuple(p.shape) for p in real.parameters() if p.requires_grad)
    assert sorted(s for p in mine.pairs for s in (p.a, p.b) * len(p.paths)) == shapes
    assert mine.trained == real.get_nb_trainable_parameters()[0]
    plain = [
        n.removeprefix('base_model.model.')
        for n, m in real.named_modules()
        if hasattr(m, 'lora_A') and '.experts' not in n]
    assert [n for n in mine.adapted if '.experts' not in n] == sorted(plain)


@pytest.mark.parametrize('name', ['llama', 'llama-tied', 'mixtral', 'deepseek_v3', 'qwen2'])
@pytest.mark.parametrize(
    'method', [Method(), Method(double_quant=False, storage='uint8'), Method(storage='float32')],
    ids=lambda m: m.storage)
def test_a_loaded_model_has_the_bytes(name, method, tmp_path):
    from llm_workbook.model.quantize import float32_modules, load_base, payload_bytes
    import torch
    from transformers import AutoModelForCausalLM, CONFIG_MAPPING
    kind = TOYS[name]['model_type']
    AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind].from_dict(TOYS[name]), dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = load_base(str(tmp_path), method, device='cpu')
    # Routers, which transformers 5.24 keeps in float32 in many families: a spec has 16 bits
    wide = float32_modules(model, torch.bfloat16)
    extra_b = sum(p.nbytes // 2 for name, p in model.named_parameters() if in_modules(name, wide))
    assert sum(payload_bytes(model).values()) - extra_b == coverage(spec(tmp_path), method).size_b


@pytest.mark.parametrize('name', ['llama', 'llama-tied', 'mixtral', 'gemma2'])
def test_a_classifier_is_trained_with_its_head(name):
    from peft import LoraConfig, get_peft_model

    real = get_peft_model(
        skeleton(TOYS[name], head='classification', classes=5),
        LoraConfig(r=4, target_modules='all-linear', task_type='SEQ_CLS'))
    found = spec(TOYS[name], head='classification', classes=5)
    mine = coverage(found, Method(rank=4))
    assert found.architecture.endswith('ForSequenceClassification')
    assert found.by_kind()['head'] == 5 * 64
    assert mine.trained == sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert 'score' not in mine.packed + mine.adapted


@pytest.mark.parametrize(
    'name, share',
    {
        'mixtral-8x7b': 0.971, 'qwen3-30b-a3b': 0.970, 'gpt-oss-20b': 0.970, 'deepseek-v3': 0.977,
        'qwen2.5-0.5b': 0.276, 'llama-2-7b': None, 'llama-3.1-70b': None}.items())
def test_a_qlora_that_leaves_much_in_16_bit_warns(name, share):
    found = coverage(spec(name), Method())
    if share is None: assert not found.warning and found.share('16 bit') < .1
    else:
        assert f'{share:.1%} of the weights of {name}' in found.warning
        assert found.share('16 bit') == pytest.approx(share, abs=5e-4)
    assert 'GB, stay in 16 bit' not in coverage(spec(name), Method(kind='lora')).warning


@pytest.mark.parametrize(
    'source, words',
    [
        ({}, 'no model_type'),
        ({'model_type': 'vit'}, 'ViTConfig'),
        ({'model_type': 't5'}, 'T5Config'),
        ({'model_type': 'bert'}, 'BertConfig'),
        ({'model_type': 'whisper'}, 'Whisper'),
        ({'model_type': 'llamma'}, "'llama'"),
        ({'model_type': 'zz9', 'auto_map': {}}, 'never run'),
        ({'model_type': 'clip'}, 'CLIPConfig'),
        ({'model_type': 'llama', 'num_hidden_layers': 0}, 'num_hidden_layers = 0'),
        (TOYS['llama'] | {'num_key_value_heads': 3}, 'num_key_value_heads = 3'),
        (TOYS['mixtral'] | {'num_experts_per_tok': 9}, 'num_experts_per_tok = 9'),
        (TOYS['llama'] | {'num_attention_heads': 7}, '7'),
        (TOYS['llama'] | {'hidden_size': -64}, 'hidden_size = -64'),
        (TOYS['llama'] | {'hidden_size': 1e3}, '1000.0'),
        (TOYS['llama'] | {'vocab_size': 10**12}, 'vocab_size = 1000000000000'),
        (TOYS['gemma3'] | {'text_config': {'hidden_size': -5}}, 'hidden_size = -5'),
        ('llama-3.1-9b', "'llama-3.1-"),
        ('', 'no preset'),
        ('Qwen/Qwen2.5-7', 'qwen/qwen2.5-7b')],
    ids=str)
def test_what_is_no_language_model_is_named(source, words, monkeypatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    with pytest.raises(ValueError) as error: spec(source)
    assert words in str(error.value)
    assert len(str(error.value)) < 900


def test_sources_mean_the_same(tmp_path):
    (tmp_path/'config.json').write_text(json.dumps(presets()['qwen3-4b'].config))
    assert (
        spec(tmp_path).units
        == spec('qwen3-4b').units
        == spec('Qwen/Qwen3-4B').units
        == spec(presets()['qwen3-4b'].config).units)
    assert configuration('Qwen/Qwen3-4B-Base')[1]['max_position_embeddings'] == 32768
    assert spec('tiny-base').parameters == 3_344_640
    assert spec('qwen3-4b') is spec('qwen3-4b')
    (tmp_path/'config.json').write_text('{')
    with pytest.raises(ValueError, match='cannot be read as JSON'): spec(tmp_path)


def test_an_inventory_agrees_with_a_model_that_has_numbers():
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    real = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING['gpt2'](n_layer=2, n_embd=32, n_head=2, vocab_size=50))
    found = inventory(real)
    assert sum(w.numel for w in found.values()) == sum(p.numel() for p in real.parameters())
    assert spec(real.config.to_dict()).by_kind()['attention'] == 2 * (32 * 96 + 96 + 32 * 32 + 32)


@pytest.mark.parametrize('kind, sizes, context', [
    ('bloom', {'hidden_size': 64, 'n_layer': 2, 'n_head': 4}, 0),
    ('bloom', {'hidden_size': 64, 'n_layer': 2, 'n_head': 4, 'seq_length': 2048}, 2048),
    ('mpt', {'d_model': 64, 'n_layers': 2, 'n_heads': 4, 'max_seq_len': 256}, 256),
    ('gptj', {'n_embd': 64, 'n_layer': 2, 'n_head': 4, 'n_positions': 128, 'rotary_dim': 8}, 128)])
def test_the_context_is_read_under_each_name_and_none_forbids_no_row(kind, sizes, context):
    model = spec({'model_type': kind, 'vocab_size': 160} | sizes)
    assert model.context == context
    assert ('not stated' if context == 0 else f'{context:,} tokens') in model._repr_html_()
    for length in (1, context or 10**6, context + 1):
        found = [rule.id for rule in broken({'plan.context': context, 'batch.length': length})]
        assert found == ['length-in-context'] * (0 < context < length)


@pytest.mark.slow
def test_the_largest_dense_model_is_cheap():
    program = ('''import time, torch, transformers
from llm_workbook.model.layout import coverage
from llm_workbook.model.spec import spec
from llm_workbook.config.recipe import Method
times = [spec('tiny-base') and time.process_time(), spec('llama-3.1-405b') and time.process_time()]
for rank in range(1, 101): coverage(spec('llama-3.1-405b'), Method(rank=rank))
peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))
print(times[1] - times[0], (time.process_time() - times[1]) / 100, int(peak) * 1024 / 1e6)''')
    first, each, peak_mb = map(
        float,
        subprocess.run(
            [sys.executable, '-c', program], capture_output=True, text=True, check=True
        ).stdout.split(),
    )
    assert first < 2
    assert each < 5e-3
    assert peak_mb < 600  # Of which Triton takes 80
