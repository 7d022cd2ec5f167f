"""Dense layers and shared experts whose names PEFT takes for those of experts: reached, planned,
saved, read by plain PEFT, and merged."""
import json

import pytest

from bench.shared.families import family_fields, make_base
from llm_workbook.config.recipe import Method, Model, Precision
from llm_workbook.model.adapters import add_adapters, check_targets, load_adapters, save_adapters
from llm_workbook.model.architecture import skeleton
from llm_workbook.model.layout import coverage
from llm_workbook.model.miniature import miniature
from llm_workbook.model.quantize import load_base
from llm_workbook.model.spec import spec
from llm_workbook.release.merge import merged

pytestmark = pytest.mark.filterwarnings(
    'ignore:.*(pattern keys did not match|is_gradient_checkpointing|script_method)')
QUICK, OTHERS = ('Qwen 3 Next', 'GLM 4.5'), ('DeepSeek V2', 'DeepSeek V3', 'ERNIE 4.5 MoE')
FAMILIES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
MIXED = ('o_proj', 'gate_proj', 'up_proj', 'down_proj')
FLOAT32 = Precision(compute='float32')


def layers_of(model):
    "Path and class of everything that has an adapter."
    return {path: type(module).__name__ for path, module in model.get_base_model().named_modules()
            if hasattr(module, 'lora_A')}


def of_peft(model, targets):
    "What plain PEFT adapts."
    from peft import LoraConfig, get_peft_model
    targets = targets if targets == 'all-linear' else list(targets)
    return layers_of(get_peft_model(model, LoraConfig(r=4, target_modules=targets)))


def fields_of(family, folder):
    "The configuration of the miniature of a family."
    miniature(family_fields(family), folder/'base')
    return json.loads((folder/'base'/'config.json').read_text())


@pytest.mark.parametrize('targets', ['all-linear', MIXED], ids=['all', 'names'])
@pytest.mark.parametrize('family', FAMILIES)
def test_every_layer_that_is_named_and_planned_is_reached(family, targets, tmp_path):
    fields = fields_of(family, tmp_path)
    method = Method(kind='lora', rank=4, targets=targets)
    named = {*check_targets(fields, targets)}
    model = add_adapters(skeleton(fields), method)
    reached = layers_of(model)
    assert named == {path for path, kind in reached.items() if kind == 'Linear'}
    plan = coverage(spec(fields), method)
    shapes = sorted(tuple(p.shape) for p in model.parameters() if p.requires_grad)
    assert shapes == sorted(s for p in plan.pairs for s in (p.a, p.b) * len(p.paths))
    bare = reached.keys() - of_peft(skeleton(fields), targets)
    assert len(bare) == 6 and bare <= named  # Where PEFT reaches them, this page can go


def test_a_shared_expert_is_not_taken_for_the_others(tmp_path):
    fields = fields_of('GLM 4.5', tmp_path)
    targets = ('shared_experts.up_proj', 'shared_experts.gate_proj')
    path = 'model.layers.1.mlp.shared_experts'
    model = add_adapters(skeleton(fields), Method(targets=targets))
    assert layers_of(model) == {f'{path}.gate_proj': 'Linear', f'{path}.up_proj': 'Linear'}
    assert 'model.layers.1.mlp.experts' in of_peft(skeleton(fields), targets)


def test_the_old_names_mean_dense_layers_where_no_layer_has_experts(tmp_path):
    dense = fields_of('DeepSeek V3', tmp_path) | {
        'first_k_dense_replace': 2, 'num_hidden_layers': 2}
    model = add_adapters(skeleton(dense), Method(targets=('up_proj',)))
    assert layers_of(model) == {f'model.layers.{i}.mlp.up_proj': 'Linear' for i in range(2)}
    assert model.peft_config['default'].target_modules == set()
    assert {*layers_of(add_adapters(skeleton(dense), Method()))} == {
        *check_targets(dense, 'all-linear')}


def from_the_files(family, method, folder):
    "Logits of the trained model; of ours, of plain PEFT and of a merge, from its files."
    import torch
    from peft import PeftModel
    base, files, ids = str(folder/'base'), folder/'adapters', torch.arange(5, 40)[None]
    make_base(family, folder/'base')
    model = add_adapters(load_base(base, method, FLOAT32, 'cpu'), method).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if 'lora_B' in name: parameter.data.normal_(0, .1, generator=generator)
    save_adapters(model, files)
    ours = load_adapters(base, files, method, FLOAT32, 'cpu')
    assert layers_of(ours) == layers_of(model)
    theirs = PeftModel.from_pretrained(load_base(base, method, FLOAT32, 'cpu'), str(files)).eval()
    assert layers_of(theirs).keys() == layers_of(model).keys()
    into = 'dequantised' if method.kind == 'qlora' else '16-bit'
    whole = merged(Model(source=base), files, into, method, FLOAT32)
    with torch.no_grad(): return [m(input_ids=ids).logits for m in (model, ours, theirs, whole)]


def compare(family, kind, folder):
    method = Method(kind=kind, rank=4, storage='float32')
    trained, ours, theirs, whole = from_the_files(family, method, folder)
    assert (ours - trained).abs().max() == 0
    assert (theirs - trained).abs().max() < 2e-5
    if kind == 'lora': assert (whole - trained).abs().max() < 1e-4


@pytest.mark.parametrize('family', ['GLM 4.5', *FAMILIES[2:]])
def test_files_give_the_trained_model(family, tmp_path):
    compare(family, 'lora', tmp_path)


@pytest.mark.slow
def test_files_give_what_was_trained_on_a_packed_base(tmp_path):
    compare('GLM 4.5', 'qlora', tmp_path)
