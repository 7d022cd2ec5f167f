"""Adapters of a base in FP8 are merged into what they were trained on: its numbers in 16 bit.

transformers packs a model in FP8 on a GPU alone, and unpacks it anywhere. So the operation that
packs one weight makes the base here.
"""
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from trouble import small_base, some_rows

from llm_workbook.config.recipe import Method, Model, Precision, Recipe
from llm_workbook.files import asset
from llm_workbook.model.adapters import add_adapters, load_adapters, save_adapters
from llm_workbook.model.quantize import check_packed_base, load_base
from llm_workbook.model.weight_files import UnpackedWeights, Weights
from llm_workbook.release.export import export
from llm_workbook.release.merge import Merge, merged

LORA = Method(kind='lora', rank=4)


def pack_in_fp8(folder, dtype=torch.bfloat16, scale='float'):
    "Pack the projections of a base in place, in blocks of 16 x 16."
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    class Quantiser:
        quantization_config = FineGrainedFP8Config(weight_block_size=(16, 16), scale_fmt=scale)
    packed, file = {}, folder/'model.safetensors'
    for name, tensor in load_file(file).items():
        tensor = tensor.to(dtype)
        if name.endswith('proj.weight'):
            packed |= Fp8Quantize(Quantiser).convert({name: [tensor]})
        else: packed[name] = tensor
    save_file(packed, file, {'format': 'pt'})
    fields = json.loads((folder/'config.json').read_text()) | {'dtype': 'bfloat16'}
    fields['quantization_config'] = {
        'quant_method': 'fp8', 'weight_block_size': [16, 16], 'activation_scheme': 'dynamic',
        'scale_fmt': scale}
    (folder/'config.json').write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope='module')
def base(tmp_path_factory): return pack_in_fp8(small_base(tmp_path_factory.mktemp('base')))


@pytest.fixture(scope='module')
def adapters(base, tmp_path_factory):
    torch.manual_seed(0)
    model = add_adapters(load_base(str(base), LORA, Precision(), 'cpu'), LORA)
    for name, parameter in model.named_parameters():
        if 'lora_B' in name: torch.nn.init.normal_(parameter, std=0.05)
    folder = tmp_path_factory.mktemp('run')/'adapters'
    save_adapters(model, folder)
    return folder


@pytest.fixture(autouse=True)
def no_notice():
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*is packed in FP8 and is merged unpacked')
        yield


@pytest.mark.parametrize('scale', ['float', 'ue8m0'])
def test_each_weight_is_unpacked_as_transformers_does(tmp_path, scale):
    base = pack_in_fp8(small_base(tmp_path), scale=scale)
    theirs = load_base(str(base), LORA, Precision(), 'cpu').state_dict()
    with UnpackedWeights(Weights(base)) as ours:
        assert len(ours.scaled) == 14
        for name, entry in ours.tensors.items():
            read = ours.read(name).view(entry.shape).to(torch.bfloat16)
            assert read.equal(theirs[name]), name


def test_into_16_bit_is_what_peft_merges(base, adapters):
    theirs = load_adapters(str(base), adapters, LORA, device='cpu').merge_and_unload().state_dict()
    ours = merged(str(base), adapters, '16-bit', LORA).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    plain = load_base(str(base), LORA, Precision(), 'cpu').state_dict()
    assert not ours['model.layers.0.mlp.up_proj.weight'].equal(
        plain['model.layers.0.mlp.up_proj.weight'])


def test_what_was_merged_is_saved_as_it_is(base, adapters, tmp_path):
    from transformers import AutoModelForCausalLM
    model = merged(str(base), adapters, '16-bit', LORA)
    model.save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path/'model.safetensors').values()} == {
        torch.bfloat16}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype='auto')
    assert not hasattr(again.config, 'quantization_config')
    assert all(torch.equal(tensor, again.state_dict()[name])
               for name, tensor in model.state_dict().items())


def test_the_size_is_told(base, adapters):
    with pytest.warns(UserWarning, match=r'is merged unpacked: .* in 16 bit in the place of'):
        merge = Merge(str(base), adapters, '16-bit', LORA)
    assert 1.25 * merge.weights.packed.total_b < merge.weights.total_b
    assert merge.weights.total_b == sum(
        2 * torch.Size(shape).numel() for _, shape in merge.stored().values())


@pytest.mark.slow
def test_an_export_is_loaded_by_plain_transformers(base, adapters, tmp_path):
    recipe = Recipe(
        name='fp8', model={'source': str(base)}, method={'kind': 'lora', 'rank': 4},
        data={'source': str(some_rows(tmp_path/'rows', 4)), 'format': 'messages'})
    out = export(recipe, adapters, tmp_path/'out', into='16-bit')
    assert 'quantization_config' not in (tmp_path/'out'/'config.json').read_text()
    assert not any(name.endswith('_scale_inv') for name in Weights(tmp_path/'out').tensors)
    assert out


def test_another_packing_is_still_refused(base, adapters, tmp_path):
    import shutil
    other = shutil.copytree(base, tmp_path/'other')
    fields = json.loads((other/'config.json').read_text())
    fields['quantization_config'] = {'quant_method': 'mxfp4'}
    (other/'config.json').write_text(json.dumps(fields))
    own = shutil.copytree(adapters, tmp_path/'adapters')
    config = json.loads((own/'adapter_config.json').read_text())
    config['base_model_name_or_path'] = str(other)
    (own/'adapter_config.json').write_text(json.dumps(config))
    with pytest.raises(ValueError, match='is packed already'):
        Merge(str(other), own, '16-bit', LORA)


def packed_by(folder, **packed):
    fields = json.loads((asset('tiny-base')/'config.json').read_text())
    (folder/'config.json').write_text(json.dumps(fields | {'quantization_config': packed}))
    return Model(source=str(folder))


@pytest.mark.parametrize('kind', ['lora', 'qlora'])
@pytest.mark.parametrize('by', ['gptq', 'awq'])
def test_a_refusal_says_what_peft_alone_would_need(tmp_path, by, kind):
    base = packed_by(tmp_path, quant_method=by, bits=4, group_size=128)
    with pytest.raises(ValueError, match='needs gptqmodel 7.0 and optimum 1.24') as error:
        check_packed_base(base, Method(kind=kind))
    assert 'it never trains here' in str(error.value)


def test_the_installed_peft_and_transformers_ask_for_what_the_refusal_says():
    from inspect import getsource
    from peft import import_utils
    from transformers.quantizers import quantizer_aqlm, quantizer_awq, quantizer_gptq
    asked = getsource(import_utils.is_gptqmodel_available)
    assert 'GPTQMODEL_MINIMUM_VERSION = packaging.version.parse("7.0.0")' in asked
    assert 'OPTIMUM_MINIMUM_VERSION = packaging.version.parse("1.24.0")' in asked
    assert 'version.parse("1.0.2")' in getsource(quantizer_aqlm.AqlmHfQuantizer.is_trainable.fget)
    assert 'gptqmodel' in getsource(quantizer_awq.AwqQuantizer.validate_environment)
    assert 'gptq_supports_cpu' in getsource(quantizer_gptq.GptqHfQuantizer.validate_environment)
