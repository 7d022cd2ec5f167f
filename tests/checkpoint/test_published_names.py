"""What a full fine-tune and a merge leave has the names, shapes and numbers that `save_pretrained`
of plain transformers writes, though each rank assembles only a part of it."""
import json
import warnings
from pathlib import Path

import pytest
import torch

from trouble import fine_tune, slow_case, some_rows
from llm_workbook.checkpoint.consolidate import export_full
from llm_workbook.checkpoint.manifest import begin_save, commit_checkpoint
from llm_workbook.checkpoint.save_load import save_checkpoint
from llm_workbook.checkpoint.sharded_files import checkpoint_tensors, local_slices, write_slices
from llm_workbook.config.recipe import Method, Precision, Recipe
from llm_workbook.files import asset
from llm_workbook.model.adapters import add_adapters, save_adapters
from llm_workbook.model.architecture import auto_class, parsed_config
from llm_workbook.model.miniature import small_config, with_few_words
from llm_workbook.model.quantize import load_base
from llm_workbook.parallel.load import load_sharded
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.release.export import export
from llm_workbook.release.merge import merged
from llm_workbook.training.fine_tune import check_recipe

ROWS = torch.arange(1, 41).view(2, 20)
TOKENIZER = 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
SIZES = {
    'mixtral': dict(num_local_experts=4), 'qwen3_moe': EXPERTS | dict(num_experts=4),
    'deepseek_v3': EXPERTS | dict(n_routed_experts=4, first_k_dense_replace=1)}


def tensors_of(place: Path) -> dict:
    from safetensors.torch import load_file
    return {name: tensor for file in sorted(place.glob('*.safetensors'))
            for name, tensor in load_file(file).items()}


def assert_same(ours: Path, theirs: Path):
    "Names, shapes, types and every bit."
    given, wanted = tensors_of(ours), tensors_of(theirs)
    assert given.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (given[name].shape, given[name].dtype) == (tensor.shape, tensor.dtype), name
        assert given[name].equal(tensor), name


def made(kind: str, few_words: bool = True):
    "A small model of a family, with random weights."
    from transformers import AutoConfig
    tiny = json.loads((asset('tiny-base')/'config.json').read_text())
    tokens = {key: tiny[key] for key in tiny if key == 'vocab_size' or key.endswith('token_id')}
    sizes = SIZES.get(kind, {}) | ({} if few_words else tokens)
    fields = small_config(AutoConfig.for_model(kind, **sizes).to_dict()).fields
    config = parsed_config(with_few_words(fields) if few_words else fields)
    torch.manual_seed(0)
    return auto_class(config).from_config(config, dtype=torch.bfloat16)


def base_of(kind: str, place: Path) -> Path:
    "The files of a family as they are published, with the tokenizer of the tiny base."
    made(kind, few_words=False).save_pretrained(place)
    for name in TOKENIZER: (place/name).write_bytes((asset('tiny-base')/name).read_bytes())
    return place


def inside_a_larger_one(place: Path):
    "Give the tensors of a text model the names that they have in a model that sees, too."
    from safetensors.torch import save_file
    inner = {name.replace('model.', 'model.language_model.', 1): tensor
             for name, tensor in tensors_of(place).items()}
    save_file(inner, place/'model.safetensors', {'format': 'pt'})


def loaded(place: Path):
    "What plain transformers loads, all of it trained."
    from transformers import AutoConfig
    kind = auto_class(AutoConfig.from_pretrained(place))
    model = kind.from_pretrained(place, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters(): parameter.requires_grad_().mul_(1.25)
    return model


def checkpoint_of(model, folder: Path) -> Path:
    "A committed checkpoint of all weights, as one rank writes it."
    folder.mkdir(exist_ok=True)
    step = begin_save(folder, 1)
    (step/'model').mkdir()
    slices = local_slices(checkpoint_tensors(model))
    write_slices(step/'model'/'rank-0.safetensors', slices)
    facts = dict(step=1, ranks=1, strategy='fsdp2', method='full', recipe_hash='')
    commit_checkpoint(step, facts)
    return step


def logits(model):
    with torch.no_grad(): return model(input_ids=ROWS).logits


# A result against `save_pretrained`

FAMILIES = [
    'mixtral', 'qwen3_moe', 'deepseek_v3', 'qwen3', 'granitemoe', 'gemma3', 'qianfan_ocr',
    *map(slow_case, ('phimoe', 'jamba', 'nemotron_h', 'kimi_linear', 'minimax_m2', 'olmo_hybrid',
                     'hyperclovax_vision_v2', 'gpt_oss', 'deepseek_v4', 'qwen3_vl_moe', 'gpt2'))]


@pytest.mark.parametrize('kind', FAMILIES)
def test_a_result_has_the_names_that_transformers_writes(kind, tmp_path):
    made(kind).save_pretrained(tmp_path/'base')
    model = loaded(tmp_path/'base')
    model.save_pretrained(tmp_path/'theirs')
    step = checkpoint_of(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        shapes = export_full(step, tmp_path/'ours', model, shard_b=200_000, load=False)
    assert_same(tmp_path/'ours', tmp_path/'theirs')
    assert shapes == {n: tuple(t.shape) for n, t in tensors_of(tmp_path/'theirs').items()}
    again, info = type(model).from_pretrained(tmp_path/'ours', output_loading_info=True)
    assert not any(info.values())
    assert logits(again).equal(logits(model))


def test_the_names_are_other_ones_than_those_of_parameters(tmp_path):
    "Without this the test above says nothing."
    for kind in 'mixtral', 'gemma3', 'granitemoe':
        model = made(kind)
        model.save_pretrained(tmp_path/kind)
        assert tensors_of(tmp_path/kind).keys() - model.state_dict().keys()


def test_files_hold_no_more_than_was_asked_and_the_index_knows_them(tmp_path):
    made('mixtral').save_pretrained(tmp_path/'base')
    model = loaded(tmp_path/'base')
    limit_b = 100_000
    export_full(checkpoint_of(model, tmp_path), tmp_path/'ours', model, shard_b=limit_b, load=False)
    index = json.loads((tmp_path/'ours'/'model.safetensors.index.json').read_text())
    assert index['weight_map'].keys() == tensors_of(tmp_path/'ours').keys()
    files = {*index['weight_map'].values()}
    assert files == {path.name for path in (tmp_path/'ours').glob('*.safetensors')}
    experts = {file for name, file in index['weight_map'].items() if 'layers.0.block' in name}
    assert len(experts) > 4  # The experts of a layer are more than a file
    from safetensors import safe_open
    for file in files:
        with safe_open(tmp_path/'ours'/file, 'pt') as opened:
            sizes_b = [opened.get_tensor(name).nbytes for name in opened.keys()]
        assert len(sizes_b) == 1 or sum(sizes_b) <= limit_b


@pytest.mark.parametrize('kind', ['mixtral', 'gemma3'])
def test_a_checkpoint_is_exported_later_by_the_name_of_its_base(kind, tmp_path):
    base = base_of(kind, tmp_path/'base')
    model = loaded(base)
    model.save_pretrained(tmp_path/'theirs')
    export_full(checkpoint_of(model, tmp_path), tmp_path/'ours', str(base))
    assert_same(tmp_path/'ours', tmp_path/'theirs')
    assert (tmp_path/'ours'/'tokenizer.json').is_file()


@pytest.mark.parametrize('kind', ['deepseek_v3', slow_case('deepseek_v4')])
def test_an_export_in_half_the_bytes_keeps_in_float32_what_transformers_keeps(kind, tmp_path):
    made(kind).save_pretrained(tmp_path/'base')
    model = loaded(tmp_path/'base')
    model.save_pretrained(tmp_path/'full')
    halved = type(model).from_pretrained(tmp_path/'full', dtype=torch.bfloat16)
    halved.save_pretrained(tmp_path/'theirs')
    export_full(checkpoint_of(model, tmp_path), tmp_path/'ours', model, dtype='bfloat16')
    assert_same(tmp_path/'ours', tmp_path/'theirs')
    types = {tensor.dtype for tensor in tensors_of(tmp_path/'ours').values()}
    assert {torch.float32, torch.bfloat16} <= types


@pytest.mark.parametrize('by', ['model', 'name'])
@pytest.mark.parametrize('kind, mark', [
    ('qwen3_moe', 'experts.gate_up_proj'), ('qwen3_5_text', 'language_model.embed_tokens')])
def test_a_base_under_other_names_keeps_them_as_in_transformers(kind, mark, by, tmp_path):
    "Files with the names of parameters, and a text model inside files of a larger one."
    base = base_of(kind, tmp_path/'base')
    if kind == 'qwen3_moe':
        made(kind, few_words=False).save_pretrained(base, save_original_format=False)
    else: inside_a_larger_one(base)
    model = loaded(base)
    model.save_pretrained(tmp_path/'theirs')
    step = checkpoint_of(model, tmp_path/'run')
    export_full(step, tmp_path/'ours', model if by == 'model' else str(base), load=False)
    assert_same(tmp_path/'ours', tmp_path/'theirs')
    assert any(mark in name for name in tensors_of(tmp_path/'ours'))


def test_files_that_are_not_here_leave_the_names_of_the_family(tmp_path):
    base = base_of('mixtral', tmp_path/'base')
    model = loaded(base)
    step = checkpoint_of(model, tmp_path/'run')
    published = tensors_of(base).keys()
    (base/'model.safetensors').unlink()
    assert export_full(step, tmp_path/'ours', str(base), load=False).keys() == published


def test_names_that_cannot_be_turned_back_are_told_and_the_model_is_written(tmp_path):
    from transformers.core_model_loading import Transpose, WeightConverter

    class OneWay(Transpose):
        @property
        def reverse_op(self): raise NotImplementedError('it goes one way')

    made('mixtral').save_pretrained(tmp_path/'base')
    model = loaded(tmp_path/'base')
    model._weight_conversions.append(WeightConverter('wq.weight', 'q_proj.weight', [OneWay()]))
    with pytest.raises(NotImplementedError): model.save_pretrained(tmp_path/'theirs')
    step = checkpoint_of(model, tmp_path)
    with pytest.warns(UserWarning, match='cannot be turned back .*it goes one way.*other programs'):
        export_full(step, tmp_path/'ours', model)
    assert tensors_of(tmp_path/'ours').keys() == dict(model.named_parameters()).keys()
    again = type(model).from_pretrained(tmp_path/'ours')
    assert logits(again).equal(logits(model))


# Ranks

def resaved(base, folder):
    "Load a share, save a checkpoint, and write the result; nothing was trained."
    model = load_sharded(str(base), Method(kind='full'), device='cpu')
    save_checkpoint(folder/'checkpoint-1', model)
    return export_full(folder/'checkpoint-1', folder/'ours', model, shard_b=1_000_000)


def test_two_ranks_write_the_names_of_the_base_that_they_read_in_shares(tmp_path):
    base = base_of('mixtral', tmp_path/'base')
    first, second = run_ranks(resaved, 2, (base, tmp_path), timeout_s=120)
    assert first == second
    model = auto_class(made('mixtral').config).from_pretrained(base, dtype=torch.float32)
    model.save_pretrained(tmp_path/'theirs')
    assert_same(tmp_path/'ours', tmp_path/'theirs')


def test_a_prefix_of_the_base_comes_back_after_a_load_in_shares(tmp_path):
    "A text model that was published inside a larger one."
    made('qwen3_5_text', few_words=False).save_pretrained(tmp_path/'base')
    inside_a_larger_one(tmp_path/'base')
    run_ranks(resaved, 1, (tmp_path/'base', tmp_path), timeout_s=120)
    auto = auto_class(made('qwen3_5_text').config)
    auto.from_pretrained(tmp_path/'base', dtype=torch.float32).save_pretrained(tmp_path/'theirs')
    assert 'model.language_model.embed_tokens.weight' in tensors_of(tmp_path/'theirs')
    assert_same(tmp_path/'ours', tmp_path/'theirs')


@pytest.mark.slow
@pytest.mark.parametrize('kind, loading', [
    ('mixtral', 'sharded'), ('qwen3_moe', 'every_rank'), ('deepseek_v3', 'sharded')])
def test_a_full_fine_tune_of_experts_is_saved_and_trained_again(kind, loading, tmp_path):
    "Two ranks under FSDP2; the result is a base like any other."
    recipe = Recipe(
        name='experts', model={'source': str(base_of(kind, tmp_path/'base'))},
        data={'source': str(some_rows(tmp_path/'rows', 12)), 'format': 'messages'},
        method={'kind': 'full'}, precision={'compute': 'float32'}, sharding={'loading': loading},
        batch={'micro': 1, 'length': 32}, optimizer={'steps': 2, 'learning_rate': 1e-3})
    run = fine_tune(recipe, tmp_path/'run')
    auto = auto_class(made(kind).config)
    auto.from_pretrained(run.saved).save_pretrained(tmp_path/'theirs')
    assert_same(run.saved, tmp_path/'theirs')
    base, result = tensors_of(tmp_path/'base'), tensors_of(run.saved)
    assert base.keys() == result.keys() == run.ranks[0]['saved'].keys()
    experts = [name for name in base if '.experts.' in name]
    moved = [name for name in experts if not result[name].equal(base[name].float())]
    assert len(moved) > .5 * len(experts)  # An expert that no token reaches stays as it was
    again = fine_tune(recipe.changed({'model.source': str(run.saved)}), tmp_path/'again')
    assert tensors_of(again.saved).keys() == base.keys()
    assert again.metrics[0]['loss'] < run.metrics[0]['loss']  # The same rows, after two steps


# Merged

def adapters_of(base: Path, method: Method, precision: Precision, place: Path) -> Path:
    "Adapters with random numbers where training would put trained ones."
    model = add_adapters(load_base(str(base), method, precision, device='cpu'), method)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'lora_B' in name: parameter.normal_(std=.1)
    save_adapters(model, place)
    return place


@pytest.mark.parametrize('kind', ['mixtral', 'deepseek_v3', slow_case('qwen3_moe')])
def test_a_merged_model_has_the_names_that_transformers_writes(kind, tmp_path):
    base = base_of(kind, tmp_path/'base')
    method, precision = Method(kind='lora', rank=2), Precision(compute='float32')
    adapters = adapters_of(base, method, precision, tmp_path/'adapters')
    recipe = Recipe(
        name='merge', model={'source': str(base)}, method=method, precision=precision,
        data={'source': str(some_rows(tmp_path/'rows', 4)), 'format': 'messages'})
    place = tmp_path/'ours'
    export(recipe, adapters, place, '16-bit', {'gate': False}, prove=False)
    auto = auto_class(made(kind).config)
    auto.from_pretrained(place).save_pretrained(tmp_path/'theirs')
    assert_same(place, tmp_path/'theirs')
    assert tensors_of(place).keys() == tensors_of(base).keys()
    given = merged(str(base), adapters, '16-bit', method, precision)
    given.save_pretrained(tmp_path/'in-memory')
    assert_same(place, tmp_path/'in-memory')


@pytest.mark.parametrize('kind', ['afmoe', slow_case('deepseek_v32')])
@pytest.mark.parametrize('compute', ['float16', slow_case('bfloat16')])
def test_a_merge_in_half_the_bytes_keeps_in_float32_what_transformers_keeps(
        kind, compute, tmp_path):
    base = base_of(kind, tmp_path/'base')
    method = Method(kind='lora', rank=2, targets=('q_proj',) if kind == 'afmoe' else ('q_b_proj',))
    loss_scale = 'dynamic' if compute == 'float16' else 'none'
    precision = Precision(compute=compute, loss_scale=loss_scale)
    adapters = adapters_of(base, method, precision, tmp_path/'adapters')
    recipe = Recipe(
        name='merge', model={'source': str(base)}, method=method, precision=precision,
        data={'source': str(some_rows(tmp_path/'rows', 4)), 'format': 'messages'})
    place = tmp_path/'ours'
    export(recipe, adapters, place, '16-bit', {'gate': False}, prove=False)
    auto, dtype = auto_class(made(kind).config), getattr(torch, compute)
    auto.from_pretrained(base, dtype=dtype).save_pretrained(tmp_path/'theirs')
    given, wanted = tensors_of(place), tensors_of(tmp_path/'theirs')
    assert {name: t.dtype for name, t in given.items()} == {
        name: t.dtype for name, t in wanted.items()}
    changed = {name for name, tensor in wanted.items() if not given[name].equal(tensor)}
    assert changed and all(f'{method.targets[0]}.weight' in name for name in changed)
    kept = [name for name, tensor in given.items() if tensor.dtype == torch.float32]
    norms = [name for name in kept if name.endswith('norm.weight')]
    assert bool(norms) == (kind == 'afmoe' and compute == 'float16')


@pytest.mark.slow
def test_adapters_train_beside_what_stays_in_float32_and_are_merged(tmp_path):
    "Two ranks under FSDP2 in float16, in which the indexer of DeepSeek 3.2 keeps float32."
    recipe = Recipe(
        name='half', model={'source': str(base_of('deepseek_v32', tmp_path/'base'))},
        data={'source': str(some_rows(tmp_path/'rows', 12)), 'format': 'messages'},
        method={'kind': 'lora', 'rank': 2, 'targets': ('q_b_proj',)},
        precision={'compute': 'float16', 'loss_scale': 'dynamic'},
        batch={'micro': 1, 'length': 32}, optimizer={'steps': 2, 'learning_rate': 1e-3})
    run = fine_tune(recipe, tmp_path/'run')
    exported = export(recipe, run.saved, tmp_path/'out', '16-bit', {'gate': False})
    assert exported.proof['difference'] == 0
    weight = tensors_of(tmp_path/'out')['model.layers.0.self_attn.indexer.weights_proj.weight']
    assert weight.dtype == torch.float32


# Memory

def held(folder, shard_b):
    "Export a model with eight experts in each layer; bytes of it, of a layer's, and held for it."
    from transformers import MixtralConfig, MixtralForCausalLM
    from llm_workbook.training.memory_trace import memory_trace
    config = MixtralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, vocab_size=1000)
    model = MixtralForCausalLM(config)
    step = checkpoint_of(model, folder)
    with memory_trace() as memory:
        export_full(step, folder/'ours', model, shard_b=shard_b, load=False)
    layer = model.get_parameter('model.layers.0.mlp.experts.gate_up_proj')
    total_b = sum(parameter.nbytes for parameter in model.parameters())
    return total_b, layer.nbytes, memory.peak.host_b - memory.begin.host_b


@pytest.mark.slow
def test_an_export_holds_a_layer_of_experts_twice_and_not_the_model(tmp_path):
    (total_b, layer_b, parts_b), = run_ranks(held, 1, (tmp_path/'parts', 10**6), timeout_s=120)
    (_, _, whole_b), = run_ranks(held, 1, (tmp_path/'whole', 10**9), timeout_s=120)
    assert total_b > 12 * layer_b
    assert layer_b < parts_b < 3 * layer_b + 2**24 < total_b / 2  # Pages of the files count too
    assert whole_b > total_b


def test_a_base_that_was_published_packed_is_saved_whole(tmp_path):
    "Its loading unpacked it; a reverse of that would write whole numbers under packed names."
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.mxfp4 import Mxfp4Deserialize
    model = load_base(
        base_of('gpt_oss', tmp_path/'base'), Method(kind='full'),
        Precision(compute='float32'), 'cpu')
    for name in 'gate_up_proj', 'down_proj':
        sources = [f'{name}_blocks', f'{name}_scales']
        model._weight_conversions = [
            *(model._weight_conversions or ()),
            WeightConverter(sources, name, [Mxfp4Deserialize(None)])]
    model.config.quantization_config = {'quant_method': 'mxfp4'}
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        names = export_full(checkpoint_of(model, tmp_path), tmp_path/'out', model, load=False)
    assert not any(name.endswith(('_blocks', '_scales')) for name in names)
    assert any(name.endswith('experts.gate_up_proj') for name in names)
    assert 'quantization_config' not in (tmp_path/'out'/'config.json').read_text()


def fp8_base(kind: str, place: Path) -> Path:
    "Files as DeepSeek publishes them: numbers of 8 bits, and a scale for each block of 16 x 16."
    from safetensors.torch import save_file
    base_of(kind, place)
    packed = {}
    for name, tensor in tensors_of(place).items():
        if not name.endswith('proj.weight'):
            packed[name] = tensor
            continue
        rows, columns = (size // 16 for size in tensor.shape)
        blocks = tensor.float().view(rows, 16, columns, 16)
        scales = blocks.abs().amax((1, 3)) / 448  # The largest number of this type
        numbers = (blocks / scales[:, None, :, None]).view(tensor.shape)
        packed[name] = numbers.to(torch.float8_e4m3fn)
        packed[f'{name}_scale_inv'] = scales
    save_file(packed, place/'model.safetensors', {'format': 'pt'})
    fields = json.loads((place/'config.json').read_text())
    fields['quantization_config'] = {
        'quant_method': 'fp8', 'weight_block_size': [16, 16], 'activation_scheme': 'dynamic'}
    (place/'config.json').write_text(json.dumps(fields))
    return place


def fp8_recipe(kind: str, folder: Path, **changes) -> Recipe:
    return Recipe(
        name='fp8', model={'source': str(fp8_base(kind, folder/'base'))},
        data={'source': str(some_rows(folder/'rows', 12)), 'format': 'messages'},
        method={'kind': 'full'}, sharding={'loading': 'every_rank'},
        batch={'micro': 1, 'length': 32}, optimizer={'steps': 2, 'learning_rate': 1e-3},
    ).changed(changes)


def test_a_base_in_fp8_is_judged_before_a_rank_starts(tmp_path):
    recipe = fp8_recipe('qwen3', tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        check_recipe(recipe)
    with pytest.raises(ValueError, match='packed on disk by fp8, and is not packed in NF4'):
        check_recipe(recipe.changed({'method.kind': 'qlora'}))
    with pytest.warns(UserWarning, match='a merged model is in 16 bit'):
        check_recipe(recipe.changed({'method.kind': 'lora'}))


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['qwen3', 'deepseek_v3'])
def test_a_base_in_fp8_is_trained_and_saved_whole(kind, tmp_path):
    "Two ranks under FSDP2; plain transformers loads the result, in one type."
    recipe = fp8_recipe(kind, tmp_path)
    run = fine_tune(recipe, tmp_path/'run')
    result = tensors_of(run.saved)
    assert {tensor.dtype for tensor in result.values()} == {torch.float32}
    assert not any(name.endswith('_scale_inv') for name in result)
    again = fine_tune(recipe.changed({'model.source': str(run.saved)}), tmp_path/'again')
    assert again.metrics[0]['loss'] < run.metrics[0]['loss']  # The same rows, after two steps


def test_an_export_that_could_not_be_written_can_be_repeated(tmp_path, monkeypatch):
    from llm_workbook.checkpoint import consolidate
    model = loaded(base_of('qwen3', tmp_path/'base'))
    step, write, done = checkpoint_of(model, tmp_path), consolidate.write_slices, []

    def fails_once(file, slices):
        done.append(file)
        if len(done) == 2: raise OSError('disk full')
        return write(file, slices)

    monkeypatch.setattr(consolidate, 'write_slices', fails_once)
    out = tmp_path/'out'
    with pytest.raises(OSError, match='disk full'): export_full(step, out, model, shard_b=10**5)
    assert not [*out.glob('*.safetensors')]
    assert export_full(step, out, model, shard_b=10**5).keys() == model.state_dict().keys()
