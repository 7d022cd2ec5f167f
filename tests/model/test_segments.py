"""`model.attention: segments`: packed examples train as if each were alone, however the model is
trained; and the families of the bench are told apart."""
import inspect
import json
import os
from types import SimpleNamespace

import pytest

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
import torch
import transformers
from bench.shared.families import FAMILIES
from trouble import fine_tune, losses, slow_case, small_recipe

from llm_workbook import draft, estimate, rehearse
from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Method, Precision, Recipe
from llm_workbook.config.rules import broken
from llm_workbook.model import segments
from llm_workbook.model.adapters import add_adapters
from llm_workbook.model.architecture import configuration, presets
from llm_workbook.model.compiled_blocks import compile_blocks
from llm_workbook.model.quantize import load_base
from llm_workbook.model.recompute import _Selection, recompute_selectively
from llm_workbook.model.segment_check import segments_fail
from llm_workbook.model.segments import (
    _by_varlen, _has_varlen, register_segments, segment_attention)
from llm_workbook.parallel.backends import cpu_fsdp, fsdp_env
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.plan.ledger import memory
from llm_workbook.training.effective import explain_config

LENGTHS = 23, 1, 30, 10
BORDERS = [0, 23, 24, 54, 64]
IDS = torch.randint(5, 1200, (1, 64), generator=torch.Generator().manual_seed(0))
PACKED = {
    'position_ids': torch.cat([torch.arange(length) for length in LENGTHS])[None],
    'cu_seq_lens_q': torch.tensor(BORDERS, dtype=torch.int32)}
SEGMENTS = {'model.attention': 'segments'}


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def made(kind: str, attention: str, how: str = '', compute: str = 'float32'):
    method = Method(kind=kind, storage=compute)
    torch.manual_seed(0)
    model = load_base('tiny-base', method, Precision(compute=compute), 'cpu', attention=attention)
    if kind != 'full':
        model = add_adapters(model, method)
        for name, weight in model.named_parameters():  # Fresh adapters do nothing
            if 'lora_B' in name: torch.nn.init.normal_(weight, std=.02)
    if how == 'full':
        model.gradient_checkpointing_enable({'use_reentrant': False})
    if how == 'reentrant':
        model.gradient_checkpointing_enable({'use_reentrant': True})
        model.enable_input_require_grads()
    if how == 'selective': recompute_selectively(model)
    return model.train()


def gradients(model, batches: list[dict]) -> list:
    "The loss of all tokens that train, and the gradients of all that is trained."
    total = 0.
    for batch in batches:
        logits = model(**batch, use_cache=False).logits.float()
        weights = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(1))
        loss = (logits.log_softmax(-1) @ weights.to(logits.device)).sum() / 64
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad.float() for p in model.parameters() if p.grad is not None)]


def alone() -> list[dict]: return [{'input_ids': part} for part in IDS.split(LENGTHS, dim=1)]


def off(found: list, expected: list) -> float:
    assert len(found) == len(expected) > 8
    pairs = zip(found, expected)
    return max(((one - two).norm() / two.norm()).item() for one, two in pairs)


# Parity

@pytest.mark.parametrize('how', ['', 'full', 'selective', slow_case('reentrant')])
@pytest.mark.parametrize('kind', ['full', 'lora'])
def test_a_packed_row_trains_as_its_examples_alone(kind, how):
    expected = gradients(made(kind, 'sdpa'), alone())
    found = gradients(made(kind, 'segments', how), [{'input_ids': IDS} | PACKED])
    assert off(found, expected) < 1e-5
    masked = gradients(made(kind, 'sdpa', how),
                       [{'input_ids': IDS, 'position_ids': PACKED['position_ids']}])
    assert off(found, masked) < 1e-5  # Under the mask that transformers makes of positions


def test_a_planted_leak_is_caught():
    expected = gradients(made('full', 'sdpa'), alone())
    leaking = PACKED | {'cu_seq_lens_q': torch.tensor([0, 24, 54, 64], dtype=torch.int32)}
    found = gradients(made('full', 'segments'), [{'input_ids': IDS} | leaking])
    assert off(found, expected) > 1e-3


@pytest.mark.parametrize('kind', ['lora', 'qlora'])
def test_bfloat16_is_as_near_as_another_order_of_its_sums(kind):
    """bfloat16 keeps 8 bits, and both ways round at every product: they may differ from each other
    by what each differs from float32."""
    exact = gradients(made(kind.removeprefix('q'), 'sdpa'), alone())
    theirs = gradients(made(kind, 'sdpa', compute='bfloat16'), alone())
    ours = gradients(made(kind, 'segments', compute='bfloat16'), [{'input_ids': IDS} | PACKED])
    rounding = gradients(made(kind, 'sdpa', compute='bfloat16'),
                         [{'input_ids': IDS, 'position_ids': PACKED['position_ids']}])
    if kind == 'lora': assert off(ours, exact) < 1.5 * off(theirs, exact)
    assert off(ours, theirs) < 1.5 * off(rounding, theirs)


@pytest.mark.cuda
def test_a_gpu_is_as_near_as_another_order_of_its_sums():
    "The same by the kernel that takes borders; the test above is its twin on a CPU."
    def on_gpu(attention, batches):
        moved = [{key: tensor.cuda() for key, tensor in batch.items()} for batch in batches]
        found = gradients(made('lora', attention, compute='bfloat16').cuda(), moved)
        return [tensor.cpu() for tensor in found]

    theirs = on_gpu('sdpa', alone())
    ours = on_gpu('segments', [{'input_ids': IDS} | PACKED])
    rounding = on_gpu('sdpa', [{'input_ids': IDS, 'position_ids': PACKED['position_ids']}])
    assert off(ours, theirs) < 1.5 * off(rounding, theirs)


TAKES = {  # What torch's kernel can be told, by torch's version
    '2.10': {'is_causal'}, '2.11': {'scale', 'window_size'},
    '2.12': {'scale', 'window_size', 'enable_gqa'}}


def kernel_of(version: str):
    "A stand-in for `varlen_attn` as a version of torch has it, which notes what it was told."
    told = {}

    def attend(query, key, value, *borders_and_lengths, **options):
        assert options.keys() == TAKES[version]
        borders, _, longest, _ = borders_and_lengths
        told.update(options, borders=borders, longest=longest)
        return torch.zeros_like(query)
    words = [inspect.Parameter(word, inspect.Parameter.KEYWORD_ONLY) for word in TAKES[version]]
    attend.__signature__ = inspect.Signature(words)
    return attend, told


@pytest.fixture(params=['2.10', '2.11', '2.12'])
def kernel(request, monkeypatch):
    "The version of torch that is pretended, and what its kernel was told."
    import torch.nn.attention.varlen as module
    attend, told = kernel_of(request.param)
    monkeypatch.setattr(module, 'varlen_attn', attend)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (9, 0))
    return request.param, told


def on_meta(heads: int): return torch.empty(1, heads, 64, 16, device='meta', dtype=torch.bfloat16)


def test_the_kernel_of_gpus_is_told_what_its_torch_takes(kernel):
    version, told = kernel
    query = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 4, 64, 16), device='cuda')
    assert _has_varlen(query) == (version != '2.10')
    if version == '2.10': return
    borders = torch.tensor(BORDERS, dtype=torch.int32)
    out = _by_varlen((on_meta(4), on_meta(2), on_meta(2)), borders, 30, None, 0.25)
    assert out.shape == (1, 64, 4, 16)
    assert told['borders'] is borders and told['longest'] == 30 and told['scale'] == 0.25
    assert told.get('enable_gqa') == (True if version == '2.12' else None)


def test_a_compiled_layer_of_a_gpu_hands_borders_on_as_they_are(kernel, monkeypatch):
    version, told = kernel
    if version == '2.10': pytest.skip('its kernel is not used')
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)
    monkeypatch.setattr(segments, '_has_varlen', lambda query: True)
    monkeypatch.setattr(segments, '_in_one_type', lambda tensors: tensors)  # No autocast on meta
    borders = torch.empty(5, dtype=torch.int32, device='meta')  # Whoever reads its numbers fails
    out, _ = segment_attention(torch.nn.Module(), on_meta(4), on_meta(2), on_meta(2), None,
                               cu_seq_lens_q=borders, is_causal=True)
    assert out.shape == (1, 64, 4, 16)
    assert told['borders'] is borders and told['longest'] == 64


@pytest.mark.cuda
def test_a_compiled_layer_of_a_gpu_trains_as_a_plain_one():
    plain = made('lora', 'segments', compute='bfloat16').cuda()
    packed = {'input_ids': IDS} | PACKED
    batch = {name: values.cuda() for name, values in packed.items()}
    expected = gradients(plain, [batch])
    compiled = made('lora', 'segments', compute='bfloat16').cuda()
    blocks = compile_blocks(compiled)
    found = gradients(compiled, [batch])
    blocks.update()
    assert off(found, expected) < 2e-2 and not blocks.breaks


def test_selective_checkpointing_keeps_what_the_kernel_of_gpus_gives():
    import torch.nn.attention.varlen  # noqa: F401
    from torch.utils.checkpoint import CheckpointPolicy
    kernel = torch.ops.torch_attn._varlen_attn.default
    assert _Selection().policy(None, kernel) == CheckpointPolicy.MUST_SAVE


# Compiled

SIZES = {
    'vocab_size': 97, 'hidden_size': 64, 'intermediate_size': 96, 'num_hidden_layers': 4,
    'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 16, 'pad_token_id': 0}
WINDOWS = {'layer_types': ['sliding_attention', 'full_attention'] * 2, 'sliding_window': 16}
EXPERTS = {'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 32}
LATENT = {
    'head_dim': 8, 'num_key_value_heads': 4, 'n_routed_experts': 4, 'num_experts_per_tok': 2,
    'n_group': 1, 'topk_group': 1, 'moe_intermediate_size': 32, 'q_lora_rank': 16,
    'kv_lora_rank': 16, 'qk_rope_head_dim': 8, 'qk_nope_head_dim': 8, 'v_head_dim': 8}
# Family -> its fields, and how many programs it takes: two for each sort of layer
COMPILED = {
    'gemma3_text': (WINDOWS, 4), 'qwen3': ({}, 2), 'mistral': ({'sliding_window': 16}, 2),
    'granite': ({}, 2), 'olmo2': ({}, 2), 'phi3': ({}, 2), 'smollm3': ({}, 4),
    'qwen3_moe': (EXPERTS, 2), 'deepseek_v3': (LATENT, 4)}


@pytest.mark.parametrize('family', [
    family if family == 'qwen3' else slow_case(family) for family in COMPILED])
def test_compiled_layers_keep_examples_apart_in_a_few_programs(family):
    "Batches whose borders are others each time, to the bit as the plain layers."
    fields, programs = COMPILED[family]
    register_segments()
    config = transformers.AutoConfig.for_model(family, **SIZES | fields)

    def made():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation='segments').train()
    plain, compiled = made(), made()
    torch._dynamo.reset()
    record = compile_blocks(compiled, 'aot_eager')
    for lengths in (29, 1, 19, 15), (64,), (10, 50, 4), (3, 3, 3, 55):
        packed = {
            'input_ids': IDS % 97,
            'position_ids': torch.cat([*map(torch.arange, lengths)])[None],
            'cu_seq_lens_q': torch.tensor([0, *lengths]).cumsum(0).int()}
        for model in plain, compiled: model.zero_grad()
        found, expected = (gradients(model, [packed]) for model in (compiled, plain))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert (len(record.compilations), record.breaks) == (programs, {})


# On ranks

def sharded_gradients(attention: str) -> list:
    "Gradients of two ranks, a packed row or its examples, through FSDP2."
    from accelerate import Accelerator
    with cpu_fsdp():
        accelerator = Accelerator(cpu=True)
        model = made('full', attention)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        packed = attention == 'segments'
        given = [{'input_ids': IDS} | PACKED] if packed else alone()
        for batch in given:
            logits = model(**batch, use_cache=False).logits.float()
            weights = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(1))
            ((logits.log_softmax(-1) @ weights).sum() / 64).backward()
        return [p.grad.full_tensor().clone() for p in model.parameters()]


def both_sharded() -> float:
    return off(sharded_gradients('segments'), sharded_gradients('sdpa'))


def test_two_ranks_of_fsdp2_train_the_same():
    recipe = Recipe(name='segments', model={'source': 'tiny-base'},
                    data={'source': 'sample-conversations'}, method={'kind': 'full'},
                    precision={'compute': 'float32'}, cluster={'processes': 2})
    assert max(run_ranks(both_sharded, 2, env=fsdp_env(recipe), timeout_s=180)) < 1e-5


@pytest.mark.slow
def test_a_run_without_packing_is_that_of_sdpa_and_says_what_is_in_force(tmp_path):
    plain = small_recipe(tmp_path, **{'optimizer.steps': 2, 'batch.micro': 2})
    seen = []
    for changes in {}, SEGMENTS:
        run = fine_tune(plain.changed(changes), tmp_path/f'run-{len(seen)}')
        seen.append(losses(run.directory))
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)
    setting = explain_config(run)['model.attention']
    assert setting.found == setting.asked == 'segments'
    saved = run.saved/'config.json'
    assert not saved.exists() or 'segments' not in saved.read_text()


# Plan and rehearsal

WIDE = {'model_type': 'mistral', 'hidden_size': 256, 'intermediate_size': 512,
        'num_hidden_layers': 4, 'num_attention_heads': 8, 'num_key_value_heads': 2,
        'vocab_size': 1000, 'sliding_window': 256}


LATENT = {'model_type': 'deepseek_v2', 'hidden_size': 256, 'intermediate_size': 512,
          'num_hidden_layers': 4, 'num_attention_heads': 8, 'num_key_value_heads': 8,
          'kv_lora_rank': 64, 'q_lora_rank': None, 'qk_nope_head_dim': 48,
          'qk_rope_head_dim': 16, 'v_head_dim': 48, 'n_routed_experts': 4,
          'first_k_dense_replace': 4, 'moe_intermediate_size': 128, 'vocab_size': 1000}


@pytest.mark.parametrize('model, device, changes', [
    slow_case(WIDE, 'cpu', {}), (WIDE, 'cuda', {}),
    slow_case(WIDE, 'cpu', {'precision.master': 'bfloat16'}),
    (WIDE, 'cpu', {'batch.packing': True, 'batch.micro': 2}),
    slow_case(WIDE, 'cuda', {'batch.packing': True, 'batch.micro': 2}), (LATENT, 'cpu', {}),
    slow_case(LATENT, 'cpu', {'precision.master': 'bfloat16'})],
    ids=lambda value: value.get('model_type', str(value)) if isinstance(value, dict) else value)
def test_plan_and_rehearsal_agree(tmp_path, model, device, changes):
    (tmp_path/'config.json').write_text(json.dumps(model))
    recipe = Recipe(
        name='segments', model={'source': str(tmp_path), 'attention': 'segments'},
        data={'source': 'sample-conversations'}, method={'kind': 'full'},
        cluster={'processes': 2, 'device': device},
        batch={'micro': 1, 'length': 1024}).changed(changes)
    played = rehearse(recipe, exact=True)
    planned_b = memory(recipe).total('step', level='allocated')
    assert abs(planned_b / played.peak_b - 1) < .01
    assert any('one example for segments' in note for note in played.notes)


def test_the_plan_says_what_it_takes_packed_rows_for():
    packed = {'batch.packing': True, 'cluster.device': 'cuda', 'batch.length': 4096}
    recipe = draft('llama-3.2-1b', '2x-rtx-3090').changed(packed | SEGMENTS)
    assert 'packing-by-a-mask' not in {rule.id for rule in broken(recipe.facts(), 'warn')}
    step = estimate(recipe).step
    assert any('counts as one example' in note for note in step.notes)
    plain = estimate(recipe.changed({'batch.packing': False})).step
    assert not any('counts as one example' in note for note in plain.notes)
    assert dict(step.parts)['attention'] == dict(plain.parts)['attention']
    by_mask = recipe.changed({'model.attention': 'sdpa'})
    assert memory(recipe).total('step') < memory(by_mask).total('step')


def test_the_plan_refuses_what_a_class_does_not_have():
    recipe = draft('gemma-2-9b', '8x-h100').changed(SEGMENTS)
    with pytest.raises(RecipeError, match='model-has-no-segments'): estimate(recipe)


# Families

NEEDS = {  # Family -> a word of why it is refused; all others are apart
    'Llama 4': 'chunked_attention', 'Llama 4 (images)': 'chunked_attention',
    'Qwen 3 Next': 'linear_attention', 'Qwen 3.5': 'linear_attention',
    'Qwen 3.5 MoE': 'linear_attention', 'Qwen 3.5 (images)': 'linear_attention',
    'Nemotron H': 'linear_attention', 'Granite 4': 'linear_attention',
    'Kimi Linear': 'linear_attention', 'Jamba': 'linear_attention', 'Falcon H1': 'hybrid',
    'DeepSeek V3.2': 'indexed_attention', 'DeepSeek V4': 'compressed_attention',
    'Gemma 2': 'caps its scores', 'gpt-oss': 'attention sinks', 'Falcon': 'by its name'}
QUICK = 'Llama 3.1', 'Gemma 2', 'Gemma 3', 'gpt-oss', 'Falcon', 'Qwen 3 Next'


def source_of(family: str):
    source, changes = FAMILIES[family]
    if source in presets(): return configuration(source)[1] | changes
    return transformers.AutoConfig.for_model(source, **changes).to_dict()


@pytest.mark.parametrize(
    'family', [family if family in QUICK else slow_case(family) for family in FAMILIES])
def test_a_family_is_apart_or_refused(family):
    reason = segments_fail(source_of(family))
    assert NEEDS[family] in reason if family in NEEDS else reason == '', reason
