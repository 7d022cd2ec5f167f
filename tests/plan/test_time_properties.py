"""What must hold for the seconds of any recipe: use of the GPUs up to 1, longer is slower, more
bandwidth is never slower, the host sets a least time, and its optimizer waits for its memory."""
import json
import random

import pytest
from bench.record import RESULTS

from llm_workbook.config.document import RecipeError
from llm_workbook.config.hardware import node
from llm_workbook.config.recipe import Recipe
from llm_workbook.config.rules import broken
from llm_workbook.model.spec import spec
from llm_workbook.plan import host_time, step_time
from llm_workbook.plan.host_time import (
    assumed_host, host_optimizer_bytes, host_pass_s, layer_launches)
from llm_workbook.plan.step_time import estimate_step

BASE = Recipe.parse('''
version: 2
name: base
model: {source: llama-3.1-8b}
method: {kind: lora}
data: {source: sample-conversations}
cluster: {processes: 2, device: cuda, hardware: 2x-a100-80}
sharding: {strategy: fsdp2}
batch: {length: 1024}
''')
AXES = {
    'model.source': ['llama-3.2-1b', 'llama-3.1-8b', 'qwen3-8b', 'mixtral-8x7b', 'gemma-2-9b'],
    'model.attention': ['sdpa', 'eager', 'flash', 'segments'],
    'method.kind': ['lora', 'qlora', 'full'],
    'method.dropout': [0.0, 0.1],
    'cluster.hardware': ['2x-rtx-3090', '2x-a100-80', '2x-h100', '2x-rtx-4090', '2x-l4'],
    'sharding.strategy': ['fsdp2', 'ddp', 'zero2', 'zero3'],
    'sharding.activation_checkpointing': ['none', 'selective', 'full'],
    'precision.compute': ['bfloat16', 'float16', 'float32', 'fp8'],
    'precision.master': ['float32', 'bfloat16'],
    'batch.micro': [1, 4],
    'batch.accumulation': [1, 8],
    'batch.length': [128, 2048, 32768, 131072],
    'optimizer.kind': ['adamw', 'adamw_fused', 'adamw_8bit']}


def drawn(count: int) -> list[Recipe]:
    "Draw recipes that the machine can multiply, the same ones each time."
    dice = random.Random(5)
    found = []
    while len(found) < count:
        changes = {path: dice.choice(values) for path, values in AXES.items()}
        if changes['precision.compute'] == 'float16': changes['precision.loss_scale'] = 'dynamic'
        try:
            recipe = BASE.changed(changes)
            estimate_step(recipe)
        except ValueError: continue
        found.append(recipe)
    return found


DRAWN = drawn(100)


@pytest.mark.parametrize('recipe', DRAWN, ids=range(len(DRAWN)))
def test_use_of_the_gpus_is_above_zero_and_at_most_its_ceiling(recipe):
    made = estimate_step(recipe)
    assert 0 < made.mfu <= 1
    assert made.mfu <= made.hfu * (1 + 1e-9) <= 1 + 1e-9
    card = made.node.gpu
    assert made.hfu <= (card.ceiling or 0.8) + 1e-9
    assert all(seconds >= 0 for _, seconds in made.parts)
    assert made.rank_flops <= made.rank_executed <= made.rank_counted * (1 + 1e-12)


@pytest.mark.parametrize('recipe', DRAWN[:40], ids=range(40))
@pytest.mark.parametrize('path, values', [
    ('batch.length', (256, 512, 1024, 4096, 16384)), ('batch.micro', (1, 2, 3, 8, 32))])
def test_longer_passes_take_longer(recipe, path, values):
    times = [estimate_step(recipe.changed({path: value})).step_s for value in values]
    assert times[0] > 0
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in zip(times, times[1:]))


@pytest.mark.parametrize('changes, hfu', [
    ({'model.source': 'qwen3-8b', 'method.kind': 'qlora', 'batch.length': 32768,
      'cluster.hardware': '2x-rtx-3090'}, 0.9),
    ({'method.kind': 'full', 'batch.length': 131072, 'cluster.hardware': '1x-rtx-3090',
      'cluster.processes': 1, 'sharding.strategy': 'none'}, 0.9)])
def test_long_rows_that_once_used_more_than_there_is(changes, hfu):
    made = estimate_step(BASE.changed(changes))
    assert 0.4 < made.mfu <= made.hfu < hfu


# The host

AWAY = {'sharding.offload_optimizer': 'cpu', 'sharding.offload_parameters': 'cpu',
        'method.kind': 'full', 'optimizer.clip': 0.0}


def optimizer_seconds(recipe, machine) -> float:
    return dict(estimate_step(recipe, node=machine).parts)['optimizer']


@pytest.mark.parametrize('strategy, kind, master, moved', [
    # A loop moves 20 numbers, a fused step 7; the gradient is written, the weights are read
    ('fsdp2', 'adamw', 'float32', 88), ('fsdp2', 'adamw_fused', 'float32', 36),
    ('fsdp2', 'adamw_fused', 'bfloat16', 18),
    # DeepSpeed: 28, the gradient written 4, a copy in 16 bit 6; stage 3 always scales: 8
    ('zero2', 'adamw', 'float32', 38), ('zero3', 'adamw', 'float32', 46)])
def test_the_host_optimizer_takes_its_bytes_over_its_bandwidth(strategy, kind, master, moved):
    recipe = BASE.changed(AWAY | {
        'sharding.strategy': strategy, 'optimizer.kind': kind, 'precision.master': master,
        'sharding.offload_parameters': 'none' if strategy == 'zero2' else 'cpu'})
    assert host_optimizer_bytes(recipe) == moved
    box = node('2x-a100-80').changed(memory_bps=200e9)
    seconds = 8_030_261_248 * moved / (0.5 * 200e9)
    assert optimizer_seconds(recipe, box) == pytest.approx(seconds, rel=2e-3)
    faster = box.changed(memory_bps=800e9)
    assert optimizer_seconds(recipe, faster) == pytest.approx(seconds / 4, rel=2e-3)


def test_an_unknown_host_is_planned_cautiously_and_the_plan_says_so():
    recipe = BASE.changed(AWAY)
    unknown = node('2x-a100-80')
    assert unknown.memory_bps is None
    assert unknown.host_bps < node('dgx-a100').host_bps
    assert 'memory_bps' in estimate_step(recipe, node=unknown).notes[0]
    assert '25.6 GB/s' in estimate_step(recipe, node=unknown)._repr_html_()
    assert estimate_step(BASE, node=unknown).notes == ()
    assert assumed_host(recipe, node('dgx-a100')) == ()


def test_a_pass_has_a_least_time_that_the_host_needs():
    times = {length: estimate_step(BASE.changed({'batch.length': length})).step_s
             for length in (16, 128, 256)}
    assert times[256] < 1.15 * times[16]
    found = spec('llama-3.1-8b')
    layers = layer_launches(found, BASE.method, BASE.precision)
    least = sum(layer.count * sum(host_pass_s(layer, BASE)) for layer in layers)
    assert least < times[16] < 1.3 * least


@pytest.mark.parametrize('path', [
    'memory_bps', 'gpu.bandwidth_bps', 'link.measured_bps', 'host_link.measured_bps'])
@pytest.mark.parametrize('changes', [
    {}, {'sharding.strategy': 'ddp'}, {'batch.length': 128}, {'sharding.strategy': 'zero3'},
    {'sharding.offload_optimizer': 'cpu', 'sharding.offload_parameters': 'cpu'}])
def test_more_bandwidth_is_never_slower(path, changes):
    box = node('2x-a100-80').changed(memory_bps=100e9)
    recipe = BASE.changed(changes)
    times = [estimate_step(recipe, node=box.changed({path: rate})).step_s
             for rate in (1e10, 5e10, 2e11, 1e12)]
    assert all(more <= less * (1 + 1e-9) for less, more in zip(times, times[1:]))


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp2', 'zero3'])
def test_sharding_costs_host_time(strategy):
    alone = BASE.changed({'cluster.processes': 1, 'sharding.strategy': 'none'})
    layers = layer_launches(spec('llama-3.1-8b'), BASE.method, BASE.precision)
    sharded = BASE.changed({'sharding.strategy': strategy})
    assert sum(host_pass_s(layers[0], sharded)) > sum(host_pass_s(layers[0], alone))


def test_the_constants_are_those_of_the_committed_fit():
    fitted = json.loads((RESULTS/'cpu/host_fit.json').read_text('utf-8'))['fitted']
    assert fitted == {'_LAUNCH_S': host_time._LAUNCH_S, '_GATHER_S': host_time._GATHER_S,
                      '_BLEND': step_time._BLEND}


# Number formats

def test_adapters_in_a_format_without_units_are_refused_with_a_fix():
    recipe = BASE.changed({
        'cluster.hardware': '2x-t4', 'precision.compute': 'float16', 'method.storage': 'float16',
        'precision.loss_scale': 'dynamic', 'precision.master': 'bfloat16'})
    with pytest.raises(RecipeError, match='precision.master.*no bfloat16 units.*float32'):
        estimate_step(recipe)
    assert estimate_step(recipe.changed({'precision.master': 'float32'})).step_s > 0
    assert any(rule.id == 'bf16-master-needs-units' for rule in broken(
        recipe.facts() | {'plan.bf16': False}))


def test_zero_multiplies_adapters_in_the_type_of_the_base():
    box = node('2x-a100-80')
    def products(strategy):
        recipe = BASE.changed({'sharding.strategy': strategy, 'method.rank': 64})
        return dict(estimate_step(recipe, node=box).parts)['matmul']
    assert products('zero3') < 0.95 * products('fsdp2')
