"""What a recipe says to accelerate, DeepSpeed, gloo and NCCL."""
import json
import os
import subprocess
import sys

import pytest

from llm_workbook.config.recipe import Recipe, recipe_names, shrink
from llm_workbook.parallel.backends import (
    check_transport, fsdp_env, read_allocator, set_allocator, transport_env, zero_config)
from llm_workbook.parallel.ranks import RankError, run_ranks

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
RECIPE = Recipe.parse(
    '{version: 2, name: test, model: {source: tiny-base}, data: {source: sample-conversations}}')


def zero(**changes):
    return zero_config(
        RECIPE.changed(
            {'sharding.strategy': 'zero3'}
            | {key.replace('__', '.'): value for key, value in changes.items()}))


def test_offload_is_said_with_who_steps():
    away = zero(
        sharding__offload_parameters='cpu', sharding__offload_optimizer='cpu',
        sharding__pin_memory=False)
    kept = {'device': 'cpu', 'pin_memory': False}
    assert (
        away['zero_optimization']['offload_param'],
        away['zero_optimization']['offload_optimizer']) == (kept, kept)
    assert away['zero_force_ds_cpu_optimizer'] is False, 'on CPU ranks nothing is to be compiled'
    gpus = {'cluster__device': 'cuda', 'sharding__offload_optimizer': 'cpu'}
    assert zero(**gpus)['zero_force_ds_cpu_optimizer'] is True
    assert zero(**gpus, optimizer__kind='sgd')['zero_force_ds_cpu_optimizer'] is False, (
        'accelerate would make it an Adam')
    assert 'offload' not in str(zero())
    assert 'zero_force_ds_cpu_optimizer' not in zero()
    with pytest.raises(ValueError, match="aio operator: set it to 'cpu'"):
        zero(sharding__offload_optimizer='nvme')


def test_accelerate_would_make_an_adam_of_any_offloaded_optimizer(monkeypatch):
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed
    ops = pytest.importorskip('deepspeed.ops.adam')
    monkeypatch.setattr(ops, 'DeepSpeedCPUAdam', lambda groups, **how: how)  # Not compiled
    made = map_pytorch_optim_to_deepspeed(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
    assert made['adamw_mode'] is False


def test_half_precision_is_rendered():
    half = zero(
        cluster__device='cuda', precision__compute='float16', precision__loss_scale='dynamic',
        method__storage='float16', precision__reduce='float16')
    assert half['fp16'] == {
        'enabled': True, 'loss_scale': 0, 'initial_scale_power': 16, 'loss_scale_window': 2000,
        'hysteresis': 1, 'min_loss_scale': 1}
    assert half['bf16'] == {'enabled': False}
    assert half['communication_data_type'] == 'fp16'
    assert not {'fp16', 'communication_data_type'} & zero().keys()


@pytest.mark.parametrize(
    'name', [n for n in recipe_names() if Recipe.named(n).sharding.strategy.startswith('zero')])
def test_deepspeed_takes_every_key(name):
    config = pytest.importorskip('deepspeed.runtime.config')
    for recipe in Recipe.named(name), shrink(Recipe.named(name)):
        settings = zero_config(recipe)
        read = config.DeepSpeedConfig(
            {
                'train_batch_size': settings['train_micro_batch_size_per_gpu']
                * settings['gradient_accumulation_steps'],
                **settings})
        assert read.zero_config.stage == int(recipe.sharding.strategy[4:])
        offloads = [
            getattr(place, 'device', 'none')
            for place in (read.zero_config.offload_param, read.zero_config.offload_optimizer)]
        assert [str(getattr(o, 'value', o)) for o in offloads] == [
            recipe.sharding.offload_parameters, recipe.sharding.offload_optimizer]
        assert set(settings['zero_optimization']) <= {
            field.alias or key for key, field in type(read.zero_config).model_fields.items()}
        assert read.float16_config.enabled == (recipe.precision.compute == 'float16')
        assert (
            not read.float16_config.enabled
            or read.float16_config.loss_scale == 0
            and read.float16_config.initial_scale_power == 16)


def test_an_interface_that_is_not_here_is_refused_by_name(monkeypatch):
    on_loopback = RECIPE.changed(
        {
            'cluster.interface': 'lo',
            'cluster.variables': {'NCCL_DEBUG': 'INFO', 'OMP_NUM_THREADS': '3'}})
    env = {
        'GLOO_SOCKET_IFNAME': 'lo', 'NCCL_SOCKET_IFNAME': '=lo', 'NCCL_DEBUG': 'INFO',
        'OMP_NUM_THREADS': '3'}
    assert transport_env(on_loopback) == env
    assert env.items() <= fsdp_env(on_loopback).items()
    assert transport_env(RECIPE) == {}
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    check_transport(on_loopback)
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    with pytest.raises(ValueError, match='OMP_NUM_THREADS=3, and this process started with 1'):
        check_transport(on_loopback)
    with pytest.raises(ValueError, match=r"'ib7' is not on \S+, which has (\S+, )*lo\b"):
        check_transport(on_loopback.changed({'cluster.interface': 'ib7'}))


GROWS = 'expandable_segments:True'
ON_GPUS = RECIPE.changed({'cluster.device': 'cuda'})
NAMES = 'PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'  # That a recipe may set
FIXED = {'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:False'}


def test_every_rank_on_a_gpu_is_told_of_segments_that_grow():
    for recipe in map(Recipe.named, recipe_names()):
        told = {'PYTORCH_ALLOC_CONF': GROWS} if recipe.cluster.device == 'cuda' else {}
        assert told.items() <= fsdp_env(recipe).items()
        assert 'PYTORCH_ALLOC_CONF' not in fsdp_env(recipe).keys() - told.keys()
    fixed = ON_GPUS.changed({'cluster.variables': FIXED})
    assert transport_env(fixed) == FIXED


@pytest.mark.parametrize('shell', [
    FIXED, {'PYTORCH_HIP_ALLOC_CONF': 'backend:native'}, {'PYTORCH_ALLOC_CONF': ''}])
def test_a_shell_may_not_overrule_the_allocator_of_a_recipe(monkeypatch, shell):
    [name] = shell
    monkeypatch.setenv(name, shell[name])
    for asks in check_transport, set_allocator:
        with pytest.raises(ValueError, match=f'{name}={shell[name]} is set here, and torch would'):
            asks(ON_GPUS)
    check_transport(RECIPE)  # It asks for nothing
    given = ON_GPUS.changed({'cluster.variables': {name: shell[name]}}) if name in NAMES else RECIPE
    check_transport(given)


SPLITS = 'max_split_size_mb:64'
FIRST_OF_THREE = [  # What a shell sets, and what counts
    ({}, ''),
    ({'PYTORCH_ALLOC_CONF': GROWS}, GROWS),
    (FIXED | {'PYTORCH_ALLOC_CONF': GROWS}, 'expandable_segments:False'),
    (FIXED | {'PYTORCH_HIP_ALLOC_CONF': GROWS}, 'expandable_segments:False'),
    ({'PYTORCH_HIP_ALLOC_CONF': SPLITS, 'PYTORCH_ALLOC_CONF': GROWS}, SPLITS)]
READ_IN_FORKS = """
import json, os, sys
import torch
from llm_workbook import read_allocator
for env in json.loads(sys.argv[1]):
    if os.fork():
        os.wait()
        continue
    os.environ.update(env)
    said = [read_allocator()]
    del torch._C._accelerator_getAllocatorSettings
    print(json.dumps([*said, read_allocator()]), flush=True)
    os._exit(0)
"""


def test_the_first_of_three_names_counts_to_us_as_to_torch():
    # Each in a process of its own: torch reads these names once; an older torch has no such call
    names = 'PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_HIP_ALLOC_CONF', 'PYTORCH_ALLOC_CONF'
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    asked = json.dumps([env for env, _ in FIRST_OF_THREE])
    said = subprocess.run([sys.executable, '-c', READ_IN_FORKS, asked], env=inherited,
                          check=True, capture_output=True, text=True)
    answers = [json.loads(line) for line in said.stdout.splitlines()]
    assert answers == [[found] * 2 for _, found in FIRST_OF_THREE]


def test_an_allocator_that_torch_has_read_already_is_set_too():
    named = RECIPE.changed({'cluster.variables': {'PYTORCH_ALLOC_CONF': GROWS}})
    def set_late():
        before = read_allocator()
        return before, set_allocator(named), os.environ['PYTORCH_ALLOC_CONF']
    assert run_ranks(set_late, 1) == [('', GROWS, GROWS)]


def test_gloo_takes_the_interface():
    def address():
        import torch
        import torch.distributed as dist
        total = torch.ones(1)
        dist.all_reduce(total)
        return os.environ['GLOO_SOCKET_IFNAME'], total.item()
    env = fsdp_env(RECIPE.changed({'cluster.interface': 'lo'}))
    assert run_ranks(address, 2, env=env, timeout_s=60) == [('lo', 2.)] * 2
    with pytest.raises(RankError, match='no-such'):
        run_ranks(address, 2, env=env | {'GLOO_SOCKET_IFNAME': 'no-such'}, timeout_s=60)
