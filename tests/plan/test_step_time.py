"""Messages against formulas and real ranks, FLOPs against torch's counter, and seconds that move
the right way."""
import json

import pytest
from calls import calls_of
from trouble import slow_case

from bench.shared.small_rehearsals import SHAPES

from llm_workbook.files import asset
from llm_workbook.config.hardware import node
from llm_workbook.plan.collectives import (
    Collective, Exchange, collective_s, node_of, step_messages, wire_bytes)
from llm_workbook.model.spec import spec
from llm_workbook.config.recipe import Recipe
from llm_workbook.plan.step_time import _exchange_waits, estimate_step

TINY = json.loads((asset('tiny-base') / 'config.json').read_text())
MODELS = {
    'tied': TINY, 'grouped': TINY | {'num_key_value_heads': 2, 'tie_word_embeddings': False},
    'qwen3': {
        'model_type': 'qwen3', 'hidden_size': 52, 'intermediate_size': 100, 'num_hidden_layers': 3,
        'num_attention_heads': 3, 'num_key_value_heads': 1, 'head_dim': 20, 'vocab_size': 107,
        'tie_word_embeddings': True},
    'gemma2': {
        'model_type': 'gemma2', 'hidden_size': 44, 'intermediate_size': 76, 'num_hidden_layers': 2,
        'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 18, 'vocab_size': 109,
        'sliding_window': 64, 'tie_word_embeddings': True}}
SMALL = Recipe.parse('''
version: 2
name: small
model: {source: tiny-base, attention: eager}
method: {kind: full}
data: {source: sample-conversations}
cluster: {processes: 1, hardware: cpu}
sharding: {strategy: none}
batch: {micro: 2, length: 32, loss_head: full}
''')
LARGE = Recipe.parse('''
version: 2
name: large
model: {source: llama-3.1-8b}
method: {kind: full}
data: {source: sample-conversations}
cluster: {processes: 8, nodes: 2, device: cuda, hardware: p4de}
sharding: {activation_checkpointing: full}
batch: {length: 4096}
''')


def sent(recipe, **more) -> list:
    large, small = step_messages(recipe, units='shard_model', **more)
    layers = []
    for exchange in large:
        layers += [*exchange.forward_gathers, *exchange.backward_gathers, *exchange.reductions]
    return layers + [c for c in small if c.instant != 'trainer']


# Messages

@pytest.mark.parametrize('ranks', range(2, 9))
def test_ring_factors(ranks):
    size = 840 * ranks
    assert (
        wire_bytes('all_gather', size, ranks)
        == wire_bytes('reduce_scatter', size, ranks)
        == 840 * (ranks - 1))
    assert (
        wire_bytes('all_reduce', size, ranks)
        == wire_bytes('reduce_scatter', size, ranks, 'gloo')
        == 2 * 840 * (ranks - 1))
    assert wire_bytes('all_gather', size, ranks, 'gloo') == wire_bytes('all_gather', size, ranks)


def test_one_rank_sends_nothing():
    assert wire_bytes('all_reduce', 10**9, 1) == 0
    assert collective_s('all_reduce', 10**9, 1, node('p4de')) == 0
    assert step_messages(SMALL)[1] == ()
    assert not sent(SMALL)
    with pytest.raises(ValueError, match='over 0 ranks'): wire_bytes('all_gather', 8, 0)


def test_a_network_is_never_faster_than_the_node_and_an_all_reduce_crosses_it_once():
    box = node('p4de')
    assert collective_s('all_gather', 10**9, 16, box, 2) > collective_s('all_gather', 10**9, 8, box)
    slow = box.changed(network={'name': 'slow', 'nominal_bps': 1e9})
    ring = 2 * 15 / 16 * 10**9 / slow.network.bps
    crossed = collective_s('all_reduce', 10**9, 16, slow, 2)
    assert crossed == pytest.approx(10**9 / slow.network.bps, rel=0.01)
    assert crossed < ring
    assert collective_s('all_reduce', 10**9, 2, box, 2, crowd=8) > 7 * collective_s(
        'all_reduce', 10**9, 2, box, 2)


@pytest.mark.parametrize('group', [2, 4, 8])
def test_hybrid_groups(group):
    made = sent(LARGE.changed({'sharding.group': group}))
    whole = sent(LARGE)
    assert {c.group for c in made if c.kind in ('all_gather', 'reduce_scatter')} == {group}
    reduced = [c for c in made if c.kind == 'all_reduce' and c.instant == 'backward']
    assert {c.group for c in reduced} == {16 // group}
    assert len(reduced) == 2
    scattered = {c.tensor_b for c in made if c.kind == 'reduce_scatter'}
    # The slices that one group is left with
    assert {group * c.tensor_b for c in reduced} == scattered
    assert not [c for c in whole if c.kind == 'all_reduce' and c.instant == 'backward']


def test_an_even_model_sends_the_textbook_bytes():
    model, layers = spec('llama-3.1-8b'), 32
    rest = model.units[-1].parameters
    gathers = sum(c.count * c.tensor_b for c in sent(LARGE) if c.kind == 'all_gather')
    # Two bytes a parameter; what is outside the layers once
    assert gathers == 2 * (2 * (model.parameters - rest) + rest)
    assert sum(c.count for c in sent(LARGE) if c.kind == 'all_gather') == 2 * layers + 1
    kept = sent(LARGE.changed({'sharding.reshard_after_forward': False}))
    assert sum(c.count * c.tensor_b for c in kept if c.kind == 'all_gather') == 2 * model.parameters


def test_accumulation_gathers_again_and_reduces_once():
    def count(recipe, kind): return sum(c.count for c in sent(recipe) if c.kind == kind)
    more = LARGE.changed({'batch.accumulation': 4})
    assert count(more, 'all_gather') == 4 * count(LARGE, 'all_gather')
    assert count(more, 'reduce_scatter') == count(LARGE, 'reduce_scatter')
    def zero(stage, steps):
        changes = {'sharding.strategy': f'zero{stage}', 'batch.accumulation': steps}
        return count(LARGE.changed(changes), 'all_reduce')
    assert zero(1, 4) == zero(1, 1) < zero(2, 4)


@pytest.mark.parametrize('compute, size', [('bfloat16', 2), ('float32', 4)])
@pytest.mark.parametrize('strategy', ['zero1', 'zero2'])
def test_zero_gathers_updated_weights_in_the_type_that_computes(strategy, compute, size):
    """Llama 3.1 8B has 8,030,261,248 parameters, 266,240 of them in norms, which are a group of
    their own. Both groups are multiples of 2 x 16; each rank sends its sixteenth to 15 others."""
    made = sent(LARGE.changed({'sharding.strategy': strategy, 'precision.compute': compute}))
    gathers = [
        (c.count, c.tensor_b, c.wire_b)
        for c in made
        if c.kind == 'all_gather' and c.instant == 'optimizer']
    assert gathers == [
        (1, size * numbers, size * numbers // 16 * 15) for numbers in (8_029_995_008, 266_240)]


@pytest.mark.parametrize('group', [2, 4, 8])
def test_copies_of_slices_share_the_network(group):
    """Each node puts the gradients of a layer, all slices of one copy, through its network once, in
    and out at the same time.

    A layer of Llama 3.1 8B: 4096 x (4096 + 1024 + 1024 + 4096) attention, 3 x 4096 x 14336 MLP,
    2 x 4096 norms are 218,112,000 numbers, 436,224,000 bytes in bfloat16. Two nodes of 8 ranks hold
    16 / group copies; the sets that reduce one slice are `group` many, each of 1 / group of the
    layer, and both factors cancel: whatever the group, a layer passes once."""
    layer_b, network = 436_224_000, node('p4de').network
    reduced = [
        c
        for c in sent(LARGE.changed({'sharding.group': group}))
        if c.kind == 'all_reduce' and c.instant == 'backward']
    layers, = [c for c in reduced if c.count == 32]
    assert layers.tensor_b == layer_b // group
    assert layers.time_s == pytest.approx(layer_b / network.bps, rel=0.01)


def test_qlora_gathers_the_payload_and_reduces_adapters():
    lora = LARGE.changed({'method.kind': 'qlora', 'method.rank': 16})
    reduced = sum(c.count * c.tensor_b for c in sent(lora) if c.kind == 'reduce_scatter')
    assert reduced == 4 * 41_943_040  # Adapters of rank 16 on all linear layers, float32
    def gathered(recipe):
        gathers = [c for c in sent(recipe) if c.instant == 'backward' and c.kind == 'all_gather']
        return sum(c.count * c.tensor_b for c in gathers)
    assert gathered(lora) < 0.3 * gathered(LARGE)


@pytest.mark.parametrize('strategy', ['fsdp2', 'fsdp1', 'ddp', 'zero1', 'zero2', 'zero3'])
def test_every_strategy_reduces_every_gradient(strategy):
    made = sent(LARGE.changed({'sharding.strategy': strategy}))
    reduced = sum(
        c.count * c.tensor_b
        for c in made
        if c.instant == 'backward' and c.kind in ('reduce_scatter', 'all_reduce'))
    size = 4 if strategy == 'ddp' else 2
    assert reduced == pytest.approx(size * spec('llama-3.1-8b').parameters, rel=1e-6)


def test_the_machine_must_have_room():
    with pytest.raises(ValueError, match='8 processes on the 4 GPUs'):
        node_of(LARGE, node('4x-a100-80'))
    with pytest.raises(ValueError, match='no network'):
        estimate_step(LARGE, node=node('p4de').changed(network=None))


# FLOPs

def counted(recipe, config) -> int:
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from llm_workbook.model.adapters import add_adapters
    from llm_workbook.model.recompute import recompute_selectively
    made = CONFIG_MAPPING[config['model_type']].from_dict(dict(config))
    model = AutoModelForCausalLM.from_config(
        made, dtype=torch.float32, attn_implementation='eager').train()
    if recipe.method.kind != 'full': model = add_adapters(model, recipe.method)
    layers = model.get_decoder().layers
    how = recipe.sharding.activation_checkpointing
    if how == 'full':
        for i, layer in enumerate(layers): layers[i] = checkpoint_wrapper(layer)
    if how == 'selective': recompute_selectively(model)
    ids = torch.randint(5, 100, (2, 32))
    with FlopCounterMode(display=False) as flops:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return flops.get_total_flops()


@pytest.mark.parametrize('again', ['none', 'selective', 'full'])
@pytest.mark.parametrize('kind', ['full', 'lora', slow_case('dora')])
@pytest.mark.parametrize('name', [
    name if name == 'grouped' else slow_case(name) for name in MODELS])
def test_flops_are_those_that_torch_counts(name, kind, again):
    recipe = SMALL.changed({'method.kind': 'full' if kind == 'full' else 'lora',
                            'method.dora': kind == 'dora',
                            'sharding.activation_checkpointing': again})
    made = estimate_step(recipe, spec=spec(MODELS[name]))
    assert made.flops_counted == counted(recipe, MODELS[name])
    # Written out, attention runs the scores that nothing needs
    assert made.flops_model < made.flops_executed <= made.flops_counted


def test_model_flops_are_six_per_parameter_and_four_for_frozen_ones():
    eight = spec('llama-3.1-8b')
    tokens = LARGE.global_batch * 4096
    matrices = eight.parameters - 128_256 * 4096 - 65 * 4096
    attention = 12 * 32 * 4096 * 4096 / 2  # Of causal attention a half is needed
    assert estimate_step(LARGE).flops_model == tokens * (6 * matrices + attention)
    frozen = estimate_step(LARGE.changed({'method.kind': 'lora', 'method.rank': 1})).flops_model
    assert frozen == pytest.approx(tokens * (4 * matrices + attention), rel=4e-3)


def test_a_loss_in_tiles_computes_its_logits_twice():
    eight = spec('llama-3.1-8b')
    again = LARGE.global_batch * 4096 * 2 * eight.hidden * eight.vocab
    for kind in 'full', 'lora':
        whole, tiles, once = (
            estimate_step(LARGE.changed({'method.kind': kind, 'batch.loss_head': head}))
            for head in ('full', 'chunked', 'one_pass'))
        assert tiles.flops_counted - whole.flops_counted == again
        assert tiles.flops_executed - whole.flops_executed == again
        assert tiles.flops_model == once.flops_model == whole.flops_model
        second_walk = again if kind == 'full' else 0  # Of a head that trains, on a GPU
        assert once.flops_counted - whole.flops_counted == second_walk


def test_fused_attention_runs_half_a_forward_pass_more():
    fused = estimate_step(SMALL.changed({'model.attention': 'sdpa'}))
    # Two products of 2 T T d, four heads of 64, four layers, two rows; half of it is causal
    attention = 4 * 2 * 32 * 32 * 4 * 64 * 4 / 2
    assert fused.flops_executed - fused.flops_model == attention // 2
    # Torch counts both halves of three and a half passes
    assert fused.flops_counted - fused.flops_executed == 3.5 * attention
    # Written out it runs both halves of three passes, and nothing beyond
    eager = estimate_step(SMALL)
    assert eager.flops_model == fused.flops_model
    assert eager.flops_executed - eager.flops_model == 3 * attention
    assert eager.flops_counted == eager.flops_executed


# What a trainer changes

def test_ddp_fills_its_buckets_as_the_trainer_lets_it():
    """Bytes as two ranks sent them for the `brief` shape of the benchmarks.

    Where DDP looks for weights without a gradient it keeps to the order of their names, and sums
    one number for each besides.
    """
    brief = spec(SHAPES['brief'])
    ddp = SMALL.changed({'sharding.strategy': 'ddp', 'cluster.processes': 2,
                         'precision.compute': 'bfloat16'})
    again, lora = {'sharding.activation_checkpointing': 'full'}, {'method.kind': 'lora'}

    def sums(changes, **more):
        large, small = step_messages(ddp.changed(changes), brief, **more)
        return [c.tensor_b for c in (*large[0].reductions, *small)
                if (c.kind, c.instant) == ('all_reduce', 'backward')]
    assert sums({}) == [31_762_944, 12_288_000, 120]
    assert sums(again) == sums({}, units='shard_model') == [12_288_000, 31_762_944]
    assert sums(lora) == sums(lora | again) == [270_336, 1_056_768, 168]


@pytest.mark.parametrize('kind, gathered', [
    ('full', [22_020_096, 5_376]), ('lora', [663_552])])
def test_zero_gathers_each_parameter_group_by_itself(kind, gathered):
    "Bytes as DeepSpeed's engine sent them on three ranks in a rehearsal of the `brief` shape."
    of = SMALL.changed({'sharding.strategy': 'zero2', 'cluster.processes': 3, 'method.kind': kind,
                        'precision.compute': 'bfloat16'})
    _, small = step_messages(of, spec(SHAPES['brief']))
    updates = [c for c in small if c.instant == 'optimizer']
    assert [c.tensor_b for c in updates if c.kind == 'all_gather'] == gathered
    norms = [c.count for c in updates if (c.kind, c.tensor_b) == ('all_reduce', 4)]
    assert norms == [len(gathered)]


def test_only_a_head_in_tiles_counts_tokens_for_the_log():
    "Gathers as two ranks sent them in a step of two passes: bytes of all ranks -> how often."
    twice = SMALL.changed({
        'sharding.strategy': 'ddp', 'cluster.processes': 2, 'precision.compute': 'bfloat16',
        'batch.accumulation': 2, 'intervals.logging': 1})

    def gathered(changes):
        _, small = step_messages(twice.changed(changes))
        return {c.tensor_b: c.count for c in small if c.instant == 'trainer'}
    assert gathered({}) == {16: 1, 8: 2}
    assert gathered({'batch.loss_head': 'chunked'}) == {16: 7, 8: 4}
    sharded = {'batch.loss_head': 'chunked', 'sharding.strategy': 'fsdp2'}
    assert gathered(sharded) == {16: 7, 8: 4}  # The entropy too is in float32


# Seconds

@pytest.mark.parametrize(
    'path',
    [
        'link.measured_bps', 'network.nominal_bps', 'gpu.bandwidth_bps', 'gpu.bf16_flops',
        'host_link.measured_bps'])
@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'sharding.group': 8},
        {'sharding.strategy': 'ddp'},
        {'sharding.strategy': 'zero3'},
        {'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'},
        {'method.kind': 'qlora'}])
def test_faster_is_never_slower(path, changes):
    box = node('p4de')
    recipe = LARGE.changed(changes)
    part, field = path.split('.')
    now = getattr(getattr(box, part), field) or getattr(box, part).bps
    times = [
        estimate_step(recipe, node=box.changed({path: now * factor})).step_s
        for factor in (0.25, 1, 4)]
    assert times == sorted(times, reverse=True)


def test_parts_add_up_and_utilisation_is_below_one():
    made = estimate_step(LARGE)
    parts = dict(made.parts)
    assert made.step_s == pytest.approx(sum(parts.values()))
    assert made.exposed_s <= made.comm_s + 1e-9
    assert 0 < made.mfu < made.hfu < 1
    assert made.bound in parts
    assert made.tokens_per_s == pytest.approx(made.tokens / made.step_s)
    assert made.cost == pytest.approx(2 * made.hours * node('p4de').price_hour)
    assert json.loads(json.dumps(made.to_dict()))['tokens'] == made.tokens


@pytest.mark.parametrize('each, exposed', [(False, 11.0), (True, 9.0)])
def test_what_hides_in_the_early_and_in_the_last_backward_pass(each, exposed):
    """Four passes, by hand. Half of a message can hide behind arithmetic, and no more than there is
    arithmetic.

    Forward passes: 4 x 1 s of gathers beside 4 x 1 s of arithmetic: 2 s hide, 2 s show.
    Gradients after the last pass alone: three early backward passes gather 3 x 2 s beside 3 x 2 s:
    3 hide, 3 show; the last gathers 2 s and reduces 6 s beside 2 s: at most 2 hide, 6 show.
    Together 2 + 3 + 6 = 11 s.
    Gradients after every pass: 8 + 6 s beside 8 s: 7 hide, 7 show. Together 2 + 7 = 9 s."""
    def message(kind, seconds): return (Collective(kind, 'backward', 1, 1, 1, 16, seconds),)
    recipe = LARGE.changed({'batch.accumulation': 4})
    x = Exchange(
        0, message('all_gather', 4.0), message('all_gather', 8.0), message('reduce_scatter', 6.0),
        each, 0, 0, 0)
    waits = _exchange_waits(x, recipe, [1.0, 2.0], node('p4de'))
    assert waits == (pytest.approx(exposed), 0.0, pytest.approx(2.0))


@pytest.mark.parametrize('group, ranks', [(None, 16), (8, 8), (4, 4)])
def test_the_optimizer_steps_over_what_its_group_leaves_to_a_rank(group, ranks):
    """A fused AdamW reads and writes weight, mean and variance and reads the gradient: 7 x 4 bytes.
    Clipping reads the gradient, then reads and writes it: 3 x 4 bytes. A rank does that to its part
    of 8,030,261,248 numbers, at 0.9 of 2.039 TB/s on an A100 80."""
    box = node('p4de')
    assert box.gpu.bandwidth_bps == pytest.approx(2.039e12, rel=0.02)
    seconds = 40 * 8_030_261_248 / ranks / (0.9 * box.gpu.bandwidth_bps)
    made = dict(estimate_step(
        LARGE.changed({'sharding.group': group, 'optimizer.kind': 'adamw_fused'})).parts)
    assert made['optimizer'] == pytest.approx(seconds, rel=1e-6)


def test_nothing_hides_on_cpu_ranks():
    made = estimate_step(SMALL.changed({'cluster.processes': 2, 'sharding.strategy': 'fsdp2'}))
    assert made.exposed_s == pytest.approx(made.comm_s)


def test_offload_costs_copies_and_dequantisation_costs_time():
    plain = estimate_step(LARGE)
    away = estimate_step(
        LARGE.changed({'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'}))
    packed = estimate_step(LARGE.changed({'method.kind': 'qlora'}))
    assert dict(plain.parts)['copies'] == 0 < dict(away.parts)['copies']
    assert away.step_s > plain.step_s
    assert dict(plain.parts)['dequantise'] == 0 < dict(packed.parts)['dequantise']


def test_a_plan_is_quick():
    model = spec('llama-3.1-8b')
    box = node('p4de')
    estimate_step(LARGE, model, box)
    assert calls_of(lambda: estimate_step(LARGE, model, box)) < 1_000  # 0.3 ms on quiet cores


def test_fp8_speeds_up_products_alone():
    box, pair = node('8x-h100'), {'cluster.nodes': 1, 'cluster.hardware': '8x-h100'}
    def parts(**more): return dict(estimate_step(LARGE.changed(pair | more), node=box).parts)
    plain = parts()
    quick = parts(**{'precision.compute': 'fp8'})
    assert quick['matmul'] < 0.6 * plain['matmul']
    assert quick['attention'] == plain['attention']


# The units of a plan

def gathers(recipe, units='trainer') -> list:
    large, _ = step_messages(recipe, units=units)
    return [(c.count, c.tensor_b) for x in large for c in (*x.forward_gathers, *x.backward_gathers)]


def test_a_plan_gathers_what_lies_outside_the_layers_as_a_trainer_does():
    frozen = LARGE.changed({'method.kind': 'lora'})
    embedding_b, passes = 2 * 128_256 * 4096, LARGE.batch.accumulation
    # Embedding forward and backward, and the head, which is kept
    assert gathers(frozen).count((passes, embedding_b)) == 3
    # Here they are one unit
    assert (passes, 2 * embedding_b + 2 * 4096) in gathers(frozen, 'shard_model')
    once = sum(count * size for count, size in gathers(frozen, 'shard_model'))
    assert sum(count * size for count, size in gathers(frozen)) == once + passes * embedding_b
    assert (
        estimate_step(frozen).collectives
        == estimate_step(frozen, spec('llama-3.1-8b')).collectives)
    assert sorted(
        (c.count, c.tensor_b)
        for c in estimate_step(frozen).collectives
        if c.kind == 'all_gather' and c.instant != 'trainer') == sorted(gathers(frozen))
    with pytest.raises(ValueError, match="'trainer' or 'shard_model'"):
        step_messages(frozen, units='zero')


def test_a_new_head_under_adapters_is_gathered_twice():
    """PEFT trains a copy, and the weight that it was copied from stays in the model; a rehearsal
    sees both on the wire."""
    recipe = Recipe.named('70b-2x4-h100-zero3-qlora-classifier').changed(
        {
            'sharding.strategy': 'fsdp2', 'sharding.reentrant': False,
            'sharding.loading': 'every_rank', 'method.kind': 'lora',
            'sharding.offload_parameters': 'none', 'sharding.offload_optimizer': 'none'})
    ranks, hidden = recipe.cluster.ranks, 8192
    large, _ = step_messages(recipe)
    padded = ranks * hidden  # Of fewer rows than ranks each has one, padded
    assert recipe.model.classes <= ranks
    assert large[-1].trained == recipe.model.classes * hidden
    # The copy in float32, the other in bfloat16
    assert large[-1].forward_gathers[0].tensor_b == padded * (4 + 2)
    assert large[-1].reductions[0].tensor_b == padded * 4


def test_zero3_gathers_again_what_is_used_too_late():
    """q, k, v and o of a Llama 70B, 151 million numbers of a layer, are used again after 1.4e9 and
    more; the matrices of its MLP after 0.94e9 at most."""
    recipe = LARGE.changed({
        'model.source': 'llama-3.1-70b', 'method.kind': 'full', 'precision.master': 'float32',
        'sharding.strategy': 'zero3', 'sharding.activation_checkpointing': 'full'})
    def backward_b(reuse):
        made = estimate_step(recipe.changed({'zero.max_reuse': reuse, 'zero.max_live': 1}))
        return sum(c.count * c.tensor_b for c in made.collectives
                   if c.kind == 'all_gather' and c.instant == 'backward')
    attention = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192)
    live_b = {reuse: 2 * (128256 * 8192 + max(0, reuse - 2 * 128256 * 8192) // 3)
              for reuse in (945 * 10**6, 10**9)}
    more_b = backward_b(945 * 10**6) + live_b[945 * 10**6]
    assert abs(more_b - (backward_b(10**9) + live_b[10**9])) < .01 * more_b
    whole_b = 2 * 70.55e9
    assert abs(more_b - (whole_b + 2 * attention)) < .02 * whole_b
