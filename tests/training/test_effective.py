"""Whatever is in force and was not asked for is found in the live objects, on the ranks where it
is, and stops all of them."""
import json
import tempfile
from types import SimpleNamespace as Named

import pytest
from trouble import slow_case, small_recipe

from llm_workbook.__main__ import main as command
from llm_workbook.training import fine_tune as training, live_settings
from llm_workbook.training.effective import (
    ConfigMismatch, check_launcher, confirm_settings, explain_config)
from llm_workbook.config.recipe import Method
from llm_workbook.model.adapters import add_adapters
from llm_workbook.model.architecture import auto_class, parsed_config
from llm_workbook.model.miniature import small_config
from llm_workbook.model.quantize import load_base
from llm_workbook.training.live_settings import read_settings
from llm_workbook.parallel.ranks import RankError, notebook_ranks
from llm_workbook.parallel.backends import fsdp_env, zero_config


@pytest.fixture(scope='module')
def recipe(tmp_path_factory):
    return small_recipe(
        tmp_path_factory.mktemp('rows'),
        **{'optimizer.steps': 2, 'optimizer.warmup': 0.0, 'optimizer.schedule': 'constant'})


def prepared(recipe):
    "What a plain loop has before its first step."
    import torch
    from accelerate import Accelerator
    model = load_base(recipe.model.source, recipe.method, recipe.precision, 'cpu')
    if recipe.method.kind != 'full': model = add_adapters(model, recipe.method)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    accelerator = Accelerator()
    loader = torch.utils.data.DataLoader([{'input_ids': [1] * 20}] * 8, batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return Named(model=model, optimizer=optimizer, accelerator=accelerator, loader=loader)


def attention(o): o.model.config._attn_implementation = 'eager'
def accumulation(o): o.accelerator.gradient_accumulation_steps = 2
def rate(o): o.optimizer.param_groups[0]['lr'] = 2e-3
def decay(o): o.optimizer.param_groups[0]['weight_decay'] = 0.1
def fused(o): o.optimizer.param_groups[0]['fused'] = True
def world(o): o.accelerator.state._shared_state['num_processes'] = 1
def whole_rows(o):
    o.loader = __import__('torch').utils.data.DataLoader(o.loader.dataset, batch_size=1)
def two_rows(o):
    o.loader = __import__('torch').utils.data.DataLoader(o.loader.dataset, batch_size=2)
def long_rows(o): o.loader.dataset[3]['input_ids'] = [1] * 65
def source(o): o.model.config._name_or_path = 'tiny-base'
def kept_whole(o): o.model.set_reshard_after_forward(False)
def each(o): o.accelerator.gradient_state.plugin_kwargs['sync_each_batch'] = True
def frozen(o): next(o.model.parameters()).requires_grad_(False)
def reduced(o):
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy
    layer = o.model.model.layers[0]
    for parameter in layer._get_fsdp_state()._fsdp_param_group.fsdp_params:
        parameter.mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def stowaway(o):
    import torch
    o.model.model.layers[0].register_parameter('stowaway', torch.nn.Parameter(torch.ones(3)))


SPOILT = {
    attention: 'model.attention', accumulation: 'batch.accumulation batch.global',
    rate: 'optimizer.learning_rate', decay: 'optimizer.weight_decay', fused: 'optimizer.kind',
    world: 'accelerate.ranks', whole_rows: 'batch.global batch.parts',
    two_rows: 'batch.micro batch.parts', long_rows: 'batch.length', source: 'model.source',
    frozen: 'method.kind', kept_whole: 'sharding.reshard_after_forward',
    each: 'sharding.sync_each_batch',
    reduced: 'precision.compute', stowaway: 'sharding.share'}


def spoilt_one_by_one(recipe):
    """Spoil one object after the other, first on rank 1 alone, then on both; give what each rank
    was told."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from llm_workbook.parallel.backends import cpu_fsdp
    errors = {}
    for spoil in SPOILT:
        for who in (1,), (0, 1):
            for kind in AcceleratorState, PartialState, GradientState: kind._shared_state.clear()
            with cpu_fsdp(), tempfile.TemporaryDirectory() as folder:
                made = prepared(recipe)
                if made.accelerator.process_index in who: spoil(made)
                try:
                    confirm_settings(
                        recipe, made.model, made.optimizer, made.accelerator, made.loader, folder)
                except ConfigMismatch as error:
                    errors[spoil.__name__, who] = str(error)
    return errors


@pytest.fixture(scope='module')
def mismatches(recipe):
    "What each rank was told, by what was spoilt and on which ranks."
    import peft, trl  # noqa: E401, F401
    return notebook_ranks(spoilt_one_by_one, 2, (recipe,), 240, fsdp_env(recipe))


@pytest.mark.parametrize('spoil', SPOILT, ids=lambda spoil: spoil.__name__)
def test_what_was_not_asked_for_is_told_to_every_rank(mismatches, spoil):
    for who, where in ((1,), 'rank 1 of 2'), ((0, 1), 'every rank'):
        messages = [rank.get((spoil.__name__, who), '') for rank in mismatches]
        assert messages[0] == messages[1]
        assert messages[0].startswith('what is in force is not what')
        for name in SPOILT[spoil].split(): assert f'{name}: asked' in messages[0], messages[0]
        assert where in messages[0]


@pytest.mark.parametrize(
    'other, words',
    [
        (
            {'sharding.strategy': 'ddp'},
            "sharding.strategy: asked 'ddp', found 'fsdp2' on every rank"),
        (
            {'sharding.activation_checkpointing': 'full'},
            "sharding.activation_checkpointing: asked 'full', found 'none' on every rank"),
        (
            {'precision.compute': 'bfloat16'},
            "precision.compute: asked 'bfloat16', found 'float32' on every rank"),
        ({'optimizer.kind': 'sgd'}, "optimizer.kind: asked 'sgd', found 'adamw' on every rank"),
        ({'cluster.processes': 3}, 'cluster.ranks: asked 3, found 2 on every rank')])
def test_another_recipe_than_that_of_the_objects(recipe, tmp_path, other, words):
    def rank():
        from llm_workbook.parallel.backends import cpu_fsdp
        with cpu_fsdp(): made = prepared(recipe)
        confirm_settings(
            recipe.changed(other), made.model, made.optimizer, made.accelerator, made.loader,
            tmp_path/'run')

    with pytest.raises(RankError) as caught: notebook_ranks(rank, 2, (), 60, fsdp_env(recipe))
    assert words in str(caught.value)
    assert not (tmp_path/'run').exists()


@pytest.mark.parametrize(
    'changes',
    [
        {'sharding.strategy': 'zero2', 'precision.compute': 'bfloat16'},
        slow_case({'sharding.strategy': 'ddp', 'batch.accumulation': 2}),
        slow_case({
            'sharding.activation_checkpointing': 'full', 'method.kind': 'qlora',
            'precision.compute': 'bfloat16', 'optimizer.warmup': 0.5}),
        {'cluster.variables': {'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}}])
def test_a_run_keeps_what_was_in_force(recipe, tmp_path, changes):
    run = training.fine_tune(recipe.changed(changes), tmp_path/'run', 120, live=False)
    in_force = explain_config(run)
    asked = run.recipe.facts()
    for name in changes:
        if name != 'optimizer.warmup':
            assert in_force[name].found == asked[name]
            assert in_force[name].came.startswith('line ')
    assert in_force['batch.global'].found == run.recipe.global_batch
    asked_of_torch = ''.join(run.recipe.cluster.allocator.values())
    assert in_force['cluster.allocator'].found == asked_of_torch
    assert in_force['cluster.allocator'].read == 'torch'
    assert in_force['optimizer.warmup_steps'].found == round(asked['optimizer.warmup'] * 2)
    assert in_force['optimizer.clip'].found == 1.0
    assert in_force['optimizer.steps'].found == 2
    assert in_force['data.source'].read == 'not readable'
    lines = (tmp_path/'run'/'recipe.yaml').read_text().splitlines()
    rate = in_force['optimizer.learning_rate'].came
    assert 'learning_rate' in lines[int(rate.split()[1]) - 1]
    assert (
        json.loads((tmp_path/'run'/'effective.json').read_text())['ranks'][1]['accelerate.rank']
        == 1)


# One process, plain objects

@pytest.fixture
def alone(recipe):
    one = {
        'cluster.processes': 1, 'sharding.strategy': 'none', 'method.kind': 'qlora',
        'precision.compute': 'bfloat16'}
    from accelerate.state import AcceleratorState, GradientState, PartialState
    for state in AcceleratorState, GradientState, PartialState: state._reset_state()
    asked = recipe.changed(one)
    import torch
    from accelerate import Accelerator

    model = add_adapters(
        load_base(recipe.model.source, asked.method, asked.precision, 'cpu'), asked.method)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    yield (
        asked,
        [
            model, optimizer, Accelerator(cpu=True),
            torch.utils.data.DataLoader([{'input_ids': [1]}] * 2, batch_size=1)])
    for state in AcceleratorState, GradientState, PartialState: state._reset_state()


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'method.rank': 8}, 'method.rank: asked 8, found 16'),
        ({'method.alpha': 8}, 'method.alpha: asked 8, found 32'),
        ({'method.dropout': 0.1}, 'method.dropout: asked 0.1, found 0.0'),
        ({'method.scaling': 'rslora'}, "method.scaling: asked 'rslora', found 'lora'"),
        ({'method.dora': True}, 'method.dora: asked True, found False'),
        (
            {'method.targets': ('q_proj',)},
            r"method.targets: asked \['q_proj'\], found \['down_proj'"),
        ({'method.double_quant': False}, 'method.double_quant: asked False, found True'),
        ({'method.kind': 'lora'}, "method.kind: asked 'lora', found 'qlora'"),
        (
            {'precision.compute': 'float32', 'method.storage': 'float32'},
            "method.storage: asked 'float32', found 'bfloat16'"),
        (
            {'model.head': 'classification', 'data.format': 'classification',
             'data.labels': {1: 'negative', 5: 'positive'}},
            "model.head: asked 'classification', found 'causal_lm'")])
def test_adapters_and_packed_layers(alone, tmp_path, changes, words):
    asked, made = alone
    confirm_settings(asked, *made, tmp_path)
    with pytest.raises(ConfigMismatch, match=words):
        confirm_settings(asked.changed(changes), *made, tmp_path)


def test_what_a_family_keeps_in_float32_under_float16_is_no_second_type(alone, tmp_path):
    "Trinity's norms; an embedding in float32 is one."
    import torch
    from transformers import AutoConfig
    config = parsed_config(small_config(AutoConfig.for_model('afmoe').to_dict()).fields)
    auto_class(config).from_config(config).save_pretrained(tmp_path/'base')
    model = auto_class(config).from_pretrained(tmp_path/'base', dtype=torch.float16)
    assert model.model.norm.weight.dtype == torch.float32
    asked, (_, *others) = alone
    model = add_adapters(model, Method(kind='lora', targets=('q_proj',)))
    assert read_settings(asked, model, *others)['precision.frozen'].value == 'float16'
    model.get_input_embeddings().float()
    found = read_settings(asked, model, *others)['precision.frozen'].value
    assert found == ['float16', 'float32']


def test_one_layer_of_many_is_seen(alone, tmp_path):
    asked, made = alone
    layer = made[0].base_model.model.model.layers[1].mlp.up_proj
    for name, spoil in {
        'method.scaling': lambda: layer.scaling.update(default=4.0),
        'method.alpha': lambda: layer.lora_alpha.update(default=64),
        'precision.compute': lambda: setattr(
            layer.base_layer, 'compute_dtype', __import__('torch').float32),
        'precision.frozen': lambda: (
            layer.get_submodule('base_layer') and made[0].get_input_embeddings().float())
    }.items():
        spoil()
        with pytest.raises(ConfigMismatch, match=f'{name}: asked'):
            confirm_settings(asked, *made, tmp_path)


def test_a_clip_is_watched_in_the_first_step(alone, tmp_path):
    asked, (model, optimizer, accelerator, loader) = alone
    settings = confirm_settings(asked, model, optimizer, accelerator, loader, tmp_path)
    assert settings['optimizer.clip'].read == 'watched in the first step'
    with pytest.raises(ConfigMismatch, match='asked 1.0, the loop clips at 5.0'):
        accelerator.clip_grad_norm_(model.parameters(), 5.0)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    confirm_settings(asked, model, optimizer, accelerator, loader, tmp_path)
    with pytest.raises(ConfigMismatch, match='asked 1.0, and the loop steps without'):
        optimizer.step()


def test_what_no_object_says_is_said_so(alone, tmp_path):
    asked, made = alone
    settings = confirm_settings(asked, *made, tmp_path)
    assert {
        s.read
        for s in settings.settings
        if s.name.startswith(('data.', 'intervals.')) or s.name == 'seed'} == {'not readable'}
    assert settings['sharding.pin_memory'].read == 'not in use'
    assert settings['sharding.pin_memory'].found is None


# The launcher

FULL = {
    'ACCELERATE_USE_FSDP': 'true',
    'FSDP_VERSION': '2',
    'FSDP_RESHARD_AFTER_FORWARD': 'True',
    'FSDP_OFFLOAD_PARAMS': 'false',
    'FSDP_AUTO_WRAP_POLICY': 'TRANSFORMER_BASED_WRAP',
    'FSDP_STATE_DICT_TYPE': 'SHARDED_STATE_DICT',
    'FSDP_MIN_NUM_PARAMS': '100000000',
    'FSDP_CPU_RAM_EFFICIENT_LOADING': 'false',
    'FSDP_ACTIVATION_CHECKPOINTING': 'false',
    'ACCELERATE_MIXED_PRECISION': 'no',
    # As accelerate launch leaves them
    'ACCELERATE_USE_CPU': 'True',
    'ACCELERATE_DYNAMO_BACKEND': 'NO',
    'OMP_NUM_THREADS': '4',
}


def test_a_launcher_that_says_the_same_passes(recipe):
    assert set(check_launcher(recipe, FULL)) == FULL.keys() - {
        'FSDP_MIN_NUM_PARAMS', 'OMP_NUM_THREADS'}
    assert check_launcher(recipe, {'RANK': '0', 'FSDP_VERSION': '2'}) == {'FSDP_VERSION': '2'}


@pytest.mark.parametrize(
    'name, value',
    [
        ('ACCELERATE_USE_FSDP', 'false'),
        ('FSDP_VERSION', '1'),
        ('FSDP_RESHARD_AFTER_FORWARD', 'false'),
        ('FSDP_OFFLOAD_PARAMS', 'true'),
        ('FSDP_AUTO_WRAP_POLICY', 'SIZE_BASED_WRAP'),
        ('FSDP_ACTIVATION_CHECKPOINTING', 'true'),
        ('ACCELERATE_MIXED_PRECISION', 'fp16'),
        ('FSDP_STATE_DICT_TYPE', 'FULL_STATE_DICT'),
        ('ACCELERATE_USE_DEEPSPEED', 'true'),
        ('ACCELERATE_DYNAMO_BACKEND', 'INDUCTOR'),
        ('ACCELERATE_USE_CPU', 'false'),
        ('ACCELERATE_GRADIENT_ACCUMULATION_STEPS', '2'),
        ('PARALLELISM_CONFIG_TP_SIZE', '2'),
        ('PARALLELISM_CONFIG_DP_REPLICATE_SIZE', '2'),
        ('FSDP_IGNORED_MODULES', 'lm_head'),
        ('ACCELERATE_USE_MEGATRON_LM', 'true')])
def test_a_launcher_that_says_something_else_is_refused(recipe, name, value):
    with pytest.raises(ConfigMismatch, match=f'{name} is {value!r}, the recipe says'):
        check_launcher(recipe, FULL | {name: value})


@pytest.mark.parametrize(
    'path, value',
    [
        ('zero_optimization.stage', 2),
        ('gradient_accumulation_steps', 4),
        ('bf16.enabled', True),
        ('gradient_clipping', 0.5),
        ('zero_optimization.offload_optimizer.device', 'cpu')])
def test_deepspeed_s_file_is_compared_key_by_key(recipe, tmp_path, path, value):
    zero = recipe.changed({'sharding.strategy': 'zero3'})
    config = zero_config(zero)
    file = tmp_path/'zero.json'
    env = {
        'ACCELERATE_USE_DEEPSPEED': 'true', 'ACCELERATE_DEEPSPEED_CONFIG_FILE': str(file),
        'ACCELERATE_MIXED_PRECISION': 'no'}
    file.write_text(json.dumps(config | {'train_micro_batch_size_per_gpu': 'auto'}))
    check_launcher(zero, env)
    place, *parts = config, *path.split('.')
    for part in parts[:-1]: place = place.setdefault(part, {})
    place[parts[-1]] = value
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigMismatch, match=f'{path} is {value!r} in zero.json, the recipe says'):
        check_launcher(zero, env)


def test_the_program_asks_before_it_sets_anything(recipe, tmp_path, monkeypatch):
    recipe.save(tmp_path/'recipe.yaml')
    for name, value in {'WORLD_SIZE': '2', 'RANK': '0', 'FSDP_VERSION': '1'}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigMismatch, match="FSDP_VERSION is '1', the recipe says '2'"):
        command(['train', str(tmp_path/'recipe.yaml'), '--directory', str(tmp_path/'run')])
    assert not (tmp_path/'run').exists()


def test_what_nobody_asked_for_must_be_the_same_on_all_ranks_but_where_each_has_its_own():
    from llm_workbook.training.effective import _differences
    names = 'precision.trained', 'precision.products', 'held', 'host'  # The first is no rank's own
    def read_on_ranks(*values):
        return [{name: Named(value=value) for name in names} for value in values]
    asked = dict.fromkeys(names)
    assert _differences(asked, read_on_ranks(4, 4, 4)) == []
    assert _differences(asked, read_on_ranks(4, 4, 2)) == [
        'precision.trained: 4 on rank 0, 2 on rank 2 of 3']


def test_weight_decay_of_norms_is_found(recipe):
    from torch import nn, optim
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2))
    matrix, *norm = net.parameters()

    def decay(*decays):
        groups = [{'params': params, 'weight_decay': each}
                  for params, each in zip(([matrix], norm), decays)]
        return live_settings._decay(Named(bare=net, optimizer=optim.AdamW(groups)))

    assert (decay(0.1, 0.0), decay(0.0, 0.0)) == (0.1, 0.0)
    assert decay(0.1, 0.1) == '0.1, of norms and biases too'
    for p in norm: p.requires_grad_(False)
    assert decay(0.1) == 0.1


def test_a_parameter_that_its_class_makes_in_float32_is_no_mismatch():
    "transformers loads it so; any other weight in float32 among those of bfloat16 is found."
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model(
        'olmo_hybrid', hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=160,
        num_attention_heads=4, layer_types=['linear_attention', 'full_attention'],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    assert model.model.layers[0].linear_attn.A_log.dtype == torch.float32
    live = live_settings._Live.__new__(live_settings._Live)
    live.bare, live.base, live.packed = model, model, []
    assert {parameter.dtype for parameter in live.frozen} == {torch.bfloat16}
    model.model.norm.to(torch.float32)
    assert {parameter.dtype for parameter in live.frozen} == {torch.bfloat16, torch.float32}
