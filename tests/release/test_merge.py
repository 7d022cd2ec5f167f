"""Merging: weight by weight, equal to peft and bitsandbytes, refused when it cannot be right, and
never two models in memory."""
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch

from llm_workbook.model.adapters import add_adapters, load_adapters, moved, save_adapters
from llm_workbook.files import asset
from llm_workbook.release.merge import Gate, Merge, gate, merged, predictions
from llm_workbook.model.quantize import fingerprint, load_base, load_nf4
from llm_workbook.config.recipe import Method, Precision

ROWS = [
    {
        'messages': [
            {'role': 'user', 'content': f'Add {i} and {i + 3}.'},
            {'role': 'assistant', 'content': f'{2 * i + 3}'}]}
    for i in range(8)]


def moved_adapters(folder, source='tiny-base', method=Method(), std=0.01):
    "Adapters with random numbers where training would put trained ones."
    torch.manual_seed(0)
    model = add_adapters(load_nf4(source, method, device='cpu'), method)
    for name, p in model.named_parameters():
        if 'lora_B' in name: torch.nn.init.normal_(p, std=std)
    save_adapters(model, folder)
    return folder


@pytest.fixture(scope='module')
def adapters(tmp_path_factory): return moved_adapters(tmp_path_factory.mktemp('run') / 'adapters')


@pytest.fixture
def tampered(adapters, tmp_path):
    "A copy of the adapters whose configuration says something else."
    def change(**fields):
        folder = shutil.copytree(adapters, tmp_path / 'adapters', dirs_exist_ok=True)
        file = folder / 'adapter_config.json'
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return folder
    return change


def test_into_16_bit_is_what_peft_merges(adapters):
    theirs = (
        load_adapters('tiny-base', adapters, Method(kind='lora'), device='cpu')
        .merge_and_unload()
        .state_dict())
    for method in (Method(kind='lora'), Method()):
        ours = merged('tiny-base', adapters, '16-bit', method).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(theirs[n], ours[n]) for n in theirs)


@pytest.mark.parametrize('double', [True, False])
def test_into_dequantised_starts_from_what_bitsandbytes_gives_back(adapters, double):
    import bitsandbytes.functional as F
    method = Method(double_quant=double)
    packed = load_nf4('tiny-base', method, device='cpu')
    ours = merged('tiny-base', adapters, 'dequantised', method)
    merge = None
    merge = Merge('tiny-base', adapters, 'dequantised', method)
    assert merge.changed == sorted(merge.packed, key=list(merge.weights.tensors).index)
    assert len(merge.changed) == 28
    for name, (a, b, scale, _) in merge.pairs.items():
        layer = packed.get_submodule(name.removesuffix('.weight'))
        seen = F.dequantize_4bit(layer.weight.data, layer.quant_state)
        assert torch.equal(ours.get_parameter(name), (seen.float() + scale * (b @ a)).bfloat16())


@pytest.mark.parametrize('double', [True, False])
@pytest.mark.parametrize('storage', ['bfloat16', 'uint8'])
def test_into_nf4_packs_as_bitsandbytes_does(adapters, double, storage):
    import bitsandbytes.functional as F
    method = Method(double_quant=double, storage=storage)
    whole = merged('tiny-base', adapters, '16-bit', method)
    ours = merged('tiny-base', adapters, 'nf4', method)
    for name in ('model.layers.0.mlp.down_proj', 'model.layers.3.self_attn.o_proj'):
        layer = ours.get_submodule(name)
        payload, state = F.quantize_4bit(
            whole.get_submodule(name).weight.data, quant_type='nf4', compress_statistics=double,
            quant_storage=getattr(torch, storage))
        assert torch.equal(layer.weight.data.view(torch.uint8), payload.view(torch.uint8))
        assert layer.weight.dtype == payload.dtype
        assert torch.equal(layer.quant_state.absmax, state.absmax)
        assert layer.quant_state.nested is double


def test_what_no_adapter_touches_keeps_its_payload(tmp_path):
    on_queries = moved_adapters(tmp_path / 'some', method=Method(targets=('q_proj',)))
    base = fingerprint(load_nf4('tiny-base', device='cpu'))
    ours = fingerprint(merged('tiny-base', on_queries, 'nf4'))
    changed = {name.rpartition('.')[0] for name in base.differences(ours)}
    assert changed == {f'model.layers.{i}.self_attn.q_proj' for i in range(4)}


def test_rank_stabilised_adapters_are_scaled_as_peft_does(tampered):
    folder = tampered(use_rslora=True)
    theirs = (
        load_adapters('tiny-base', folder, Method(kind='lora'), device='cpu')
        .merge_and_unload()
        .state_dict())
    ours = merged('tiny-base', folder, '16-bit').state_dict()
    assert all(torch.equal(theirs[n], ours[n]) for n in theirs)


@pytest.fixture(scope='module')
def dora(tmp_path_factory):
    "Adapters of DoRA with the scale of rsLoRA, whose magnitudes have moved by up to a fifth."
    torch.manual_seed(0)
    method = Method(kind='lora', dora=True, scaling='rslora', targets=('q_proj', 'down_proj'))
    model = add_adapters(load_base('tiny-base', method, device='cpu'), method)
    for name, p in model.named_parameters():
        if 'lora_B' in name: torch.nn.init.normal_(p, std=0.01)
        if 'magnitude' in name: p.data *= 0.8 + 0.4 * torch.rand(len(p))
    folder = tmp_path_factory.mktemp('dora') / 'adapters'
    save_adapters(model, folder)
    return folder


def test_magnitudes_are_merged_as_peft_does(dora):
    """Both add and divide in float32, in another order, and round to bfloat16 once: a number may
    fall to the other side of a tie, one part in 128 of it."""
    loaded = load_adapters('tiny-base', dora, Method(kind='lora'), device='cpu')
    theirs = loaded.merge_and_unload().state_dict()
    ours = merged('tiny-base', dora, '16-bit').state_dict()
    for name in theirs:
        apart = (ours[name].float() - theirs[name].float()).abs()
        assert (apart <= theirs[name].float().abs() / 128).all(), name
    plain = load_base('tiny-base', Method(kind='lora'), device='cpu').state_dict()
    changed = {name for name in ours if not torch.equal(ours[name], plain[name])}
    assert {name.split('.')[-2] for name in changed} == {'q_proj', 'down_proj'}


def test_a_merged_layer_computes_what_its_adapter_computes(dora):
    """Of a float32 base nothing is rounded: 256 to 768 products in float32, 24 bits, in another
    order stay within 768 / 2 ** 24 of the sum of their sizes."""
    precision, rows = Precision(compute='float32'), torch.randn(5, 768)
    method = Method(kind='lora')
    adapted = load_adapters('tiny-base', dora, method, precision, 'cpu').get_base_model()
    whole = merged('tiny-base', dora, '16-bit', method, precision)
    for name in ('model.layers.0.self_attn.q_proj', 'model.layers.3.mlp.down_proj'):
        weight = whole.get_parameter(f'{name}.weight')
        x = rows[:, :weight.shape[1]]
        with torch.no_grad(): apart = (adapted.get_submodule(name)(x) - x @ weight.T).abs()
        assert (apart <= 4 * 768 / 2**24 * (x.abs() @ weight.abs().T)).all(), name


@pytest.mark.parametrize('into', ['dequantised', 'nf4'])
def test_a_packed_base_takes_magnitudes_too(dora, into):
    "Every row of the merged weight has the length that was trained, but for rounding or packing."
    layer = merged('tiny-base', dora, into).get_submodule('model.layers.1.self_attn.q_proj')
    from safetensors.torch import load_file
    tensors = load_file(dora/'adapter_model.safetensors')
    name = 'base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector'
    weight = layer.weight
    if into == 'nf4':
        from bitsandbytes.functional import dequantize_4bit
        weight = dequantize_4bit(weight.data, layer.quant_state)
    share = weight.float().norm(dim=1) / tensors[name]
    assert share.shape == (256,)
    # bfloat16 rounds by one part in 512 at most; four bits leave a tenth of a weight, at random
    assert (share - 1).abs().max() < (1/512 if into == 'dequantised' else .05)


def test_float32_is_written_in_float32(adapters):
    ours = merged(
        'tiny-base', adapters, '16-bit', Method(kind='lora'), Precision(compute='float32'))
    assert {p.dtype for p in ours.parameters()} == {torch.float32}


# Refused, before a weight is read

@pytest.mark.parametrize(
    'fields, words',
    [
        ({'use_dora': True}, 'should have A.weight, B.weight, magnitude_vector'),
        ({'bias': 'all'}, 'more than plain LoRA'),
        # The base changed
        ({'init_lora_weights': 'pissa'}, 'init_lora_weights'),
        ({'init_lora_weights': 'olora'}, 'init_lora_weights'),
        ({'alpha_pattern': {'q_proj': 3}}, 'alpha_pattern'),
        ({'peft_type': 'LOHA'}, 'more than plain LoRA'),
        # It acts after these tokens alone
        ({'alora_invocation_tokens': [5, 6]}, r'more than plain LoRA \(alora_invocation_tokens\)'),
        ({'use_something_new': True}, r'more than plain LoRA \(use_something_new\)'),
        (
            {'base_model_name_or_path': 'owner/other'},
            "trained on 'owner/other', not on 'tiny-base'"),
    ],
)
def test_other_adapters_are_refused(tampered, fields, words):
    with pytest.raises(ValueError, match=words): Merge('tiny-base', tampered(**fields))


def test_adapters_that_never_moved_are_refused(tampered):
    from safetensors.torch import load_file, save_file
    folder = tampered()
    tensors = load_file(folder / 'adapter_model.safetensors')
    save_file(
        {n: t.zero_() if 'lora_B' in n else t for n, t in tensors.items()},
        folder/'adapter_model.safetensors')
    with pytest.raises(ValueError, match='28 of 28 adapters were not trained'):
        merged('tiny-base', folder)


def test_one_adapter_that_never_moved_is_named_and_a_kind_of_them_is_refused():
    import torch
    tensors = {f'base_model.model.{layer}.{name}.lora_B.weight': torch.ones(2, 2)
               for layer in '01' for name in ('up', 'down')}
    tensors['base_model.model.0.up.lora_B.weight'].zero_()
    with pytest.warns(UserWarning, match='1 of 4 adapters change nothing.* zero: 0.up$'):
        assert moved(tensors)['0.up'] == 0
    tensors['base_model.model.1.up.lora_B.weight'].zero_()
    with pytest.raises(ValueError, match='2 of 4 adapters were not trained.*: 0.up, 1.up$'):
        moved(tensors)


def test_adapters_that_training_has_destroyed_are_refused(tampered):
    from safetensors.torch import load_file, save_file
    file = tampered() / 'adapter_model.safetensors'
    tensors = load_file(file)
    name = next(n for n in tensors if 'layers.1.self_attn.q_proj.lora_B' in n)
    tensors[name][3, 1] = math.nan
    save_file(tensors, file)
    words = (
        '1 of 28 adapters were not trained, their B is zero or NaN: model.layers.1.self_attn.q_proj'
    )
    with pytest.raises(ValueError, match=words): merged('tiny-base', file.parent)


def test_half_a_pair_and_other_shapes_are_refused(tampered):
    from safetensors.torch import load_file, save_file
    folder = tampered()
    file = folder / 'adapter_model.safetensors'
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if 'layers.3.mlp.up_proj.lora_A' not in n}, file)
    words = 'has B.weight and should have A.weight, B.weight'
    with pytest.raises(ValueError, match=words): merged('tiny-base', folder)
    save_file(
        {
            n: t[:-1].contiguous() if 'layers.1.self_attn.q_proj.lora_B' in n else t
            for n, t in tensors.items()},
        file)
    with pytest.raises(
        ValueError,
        match=r"1 of 28 adapters do not fit 'tiny-base': .*q_proj.*\(256, 256\), its adapter 255 "
              r"x 256"
    ):
        merged('tiny-base', folder)
    save_file({n.replace('layers.3', 'layers.9'): t for n, t in tensors.items()}, file)
    with pytest.raises(ValueError, match="stores no model.layers.9"): merged('tiny-base', folder)


def test_a_tensor_that_no_layer_wants_is_named(tampered):
    from safetensors.torch import load_file, save_file
    file = tampered() / 'adapter_model.safetensors'
    odd = 'base_model.model.model.layers.9.mlp.up_proj.lora_A.weight'
    save_file(load_file(file) | {odd: torch.ones(16, 256)}, file)
    with pytest.raises(
        ValueError, match=rf'1 tensors are wrong; {odd} is \(16, 256\) and should be absent'
    ):
        load_adapters('tiny-base', file.parent, device='cpu')


def test_what_was_never_asked_of_the_method_is_refused(adapters, tmp_path):
    for arguments, words in (
        (('16-bits',), "did you mean '16-bit'"),
        (('nf4', Method(kind='lora')), "method says lora: take '16-bit'"),
        (('dequantised', Method(quant='int8')), 'qlora on int8'),
        (('16-bit', Method(kind='full')), 'no adapters')
    ):
        with pytest.raises(ValueError, match=words): merged('tiny-base', adapters, *arguments)
    for folder, words in ((None, 'no adapters to merge'), (tmp_path, 'has no adapter_config.json')):
        with pytest.raises(ValueError, match=words): merged('tiny-base', folder)
    shutil.copytree(adapters, tmp_path/'run/adapters')
    words = "it is the folder of a run; did you mean '.*/run/adapters'"
    with pytest.raises(ValueError, match=words): merged('tiny-base', tmp_path/'run')
    with pytest.raises(ValueError, match=words):
        load_adapters('tiny-base', tmp_path/'run', device='cpu')


def test_a_packed_base_is_refused(tampered, tmp_path):
    base = tmp_path / 'packed'
    shutil.copytree(asset('tiny-base'), base)
    config = json.loads((base/'config.json').read_text()) | {
        'quantization_config': {'quant_method': 'bitsandbytes'}}
    (base / 'config.json').write_text(json.dumps(config))
    with pytest.raises(ValueError, match='is packed already'):
        merged(str(base), tampered(base_model_name_or_path=str(base)), '16-bit')


# The gate

def test_the_gate_measures_what_it_says():
    wanted = torch.tensor([[.5, .25, .25], [.1, .8, .1]]).log()
    given = torch.tensor([[.25, .5, .25], [.1, .8, .1]]).log()
    found = gate(given, wanted, least=0.5, most=1)
    assert found.top1 == 0.5
    assert math.isclose(found.kl, .125 * math.log(2), rel_tol=1e-5)
    assert math.isclose(found.worst, .25 * math.log(2), rel_tol=1e-5)
    with pytest.raises(
        ValueError,
        match=r"50.00% of 2 tokens .*budget 95.00%.*KL 0.087 nats \(budget 0.02\): refused; "
              r"merge into 'dequ"
    ):
        gate(given, wanted, 'nf4')
    with pytest.raises(ValueError, match='1 predictions are NaN'):
        gate(given.index_fill(0, torch.tensor([1]), math.nan), wanted)
    assert not Gate('nf4', .99, .1, 1, 100).passed
    assert json.loads(json.dumps(found.to_dict()))['passed']


def test_a_model_in_training_is_judged_without_dropout(adapters):
    from transformers import AutoTokenizer
    from llm_workbook.release.scores import answers
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    model = load_adapters('tiny-base', adapters, Method(kind='lora'), device='cpu').train()
    dropped = [module for name, module in model.named_modules() if name.endswith('lora_dropout')]
    for module in dropped: module.default = torch.nn.Dropout(.9)

    def judged(): return (predictions(model, tokenizer, ROWS[:2]),
                          answers(model, tokenizer, ROWS[:2], 4))

    (first, texts), (second, again) = judged(), judged()
    assert torch.equal(first, second) and texts == again
    assert dropped and all(module.default.training for module in dropped)


def test_predictions_do_not_depend_on_the_batch(adapters):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    model = merged('tiny-base', adapters, '16-bit', precision=Precision(compute='float32'))
    one, all_at_once = (predictions(model, tokenizer, ROWS, batch) for batch in (1, 8))
    assert one.shape == all_at_once.shape
    assert torch.allclose(one, all_at_once, atol=1e-4)
    assert torch.allclose(one.exp().sum(-1), torch.ones(len(one)), atol=1e-5)


# Memory

PROGRAM = '''
import sys, torch
from pathlib import Path
from llm_workbook.release.merge import Merge
def peak_b():
    status = open('/proc/self/status').read().splitlines()
    peak = next(line for line in status if line.startswith('VmHWM'))
    return int(peak.split()[1]) * 1024
for into in ('dequantised', 'nf4'):
    merge = Merge(sys.argv[1], sys.argv[2], into)
    for name in list(merge.weights.tensors)[:8]: merge.parts(name)  # Wakes allocators and threads
    Path('/proc/self/clear_refs').write_text('5')
    before = peak_b()
    for name in merge.weights.tensors: merge.parts(name)
    print(peak_b() - before)
'''


def drawn(folder, source, rank=2):
    "Adapters for the queries of every layer, written by hand."
    from safetensors.torch import save_file
    from llm_workbook.model.weight_files import Weights
    shapes = {n: e.shape for n, e in Weights(source).tensors.items() if n.endswith('q_proj.weight')}
    def name(n, side): return f"base_model.model.{n.removesuffix('weight')}lora_{side}.weight"
    folder.mkdir()
    save_file(
        {name(n, 'A'): torch.randn(rank, i) for n, (_, i) in shapes.items()}
        | {name(n, 'B'): torch.randn(o, rank) for n, (o, _) in shapes.items()},
        folder/'adapter_model.safetensors')
    config = {
        'peft_type': 'LORA', 'r': rank, 'lora_alpha': 4, 'base_model_name_or_path': str(source)}
    (folder / 'adapter_config.json').write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_a_merge_holds_one_weight_not_one_model(tmp_path):
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8,
        vocab_size=1280)
    config.save_pretrained(tmp_path / 'base')
    with torch.device('meta'): state = LlamaForCausalLM(config).state_dict()
    save_file(
        {n: torch.randn(t.shape, dtype=torch.bfloat16) for n, t in state.items()},
        tmp_path/'base/model.safetensors')
    adapters = drawn(tmp_path / 'adapters', tmp_path / 'base')
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM, tmp_path/'base', adapters], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    total = sum(2 * t.numel() for t in state.values())
    grown = list(map(int, done.stdout.split()))
    assert total > 80_000_000, (grown, total)
    assert max(grown) < total / 2, (grown, total)
