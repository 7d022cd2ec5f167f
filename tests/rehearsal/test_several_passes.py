"""The plan of a step of several passes, and of what variables name, against the rehearsal: small
models in which either the head or the layers are the largest."""
from itertools import product

import pytest
from bench.gpu.place import recipe_folder
from bench.shared.gpu_rows import plain_recipe
from trouble import slow_case

from llm_workbook import Recipe, memory, rehearse

LLAMA = {'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], 'num_hidden_layers': 4,
         'num_attention_heads': 8, 'num_key_value_heads': 4, 'max_position_embeddings': 4096,
         'dtype': 'bfloat16'}
SHAPES = {
    'head': LLAMA | {'vocab_size': 128_256, 'hidden_size': 512, 'intermediate_size': 1024},
    'layers': LLAMA | {'vocab_size': 1024, 'hidden_size': 1024, 'intermediate_size': 4096}}
FULL = {'method.kind': 'full', 'optimizer.kind': 'sgd', 'batch.accumulation': 2}
LORA = {'method.kind': 'lora', 'batch.micro': 2, 'batch.loss_head': 'one_pass'}
AGAIN = {'sharding.activation_checkpointing': 'full'}


def apart_by(folder, shape: str, tied: bool, changes: dict, ranks: int = 1) -> float:
    "How far the plan is from the rehearsal, in percent."
    source = recipe_folder(str(folder), SHAPES[shape] | {'tie_word_embeddings': tied})
    plain = {'batch.length': 1024, 'cluster.hardware': f'{ranks}x-h100'}
    made = plain_recipe(source, ranks, plain | changes)
    planned_b = memory(made).total('step', 'gpu', 'allocated')
    return 100 * (planned_b / rehearse(made).peak_b - 1)


WAYS = [*product(('head', 'layers'), (True, False), (AGAIN, {}), ('chunked', 'one_pass'))]
QUICK = [('head', True, AGAIN, 'chunked'), ('layers', True, AGAIN, 'one_pass')]


@pytest.mark.parametrize('shape, tied, again, head', [
    way if way in QUICK else slow_case(*way) for way in WAYS])
def test_gradients_of_earlier_passes_and_copies_of_weights_are_planned(
        tmp_path, shape, tied, again, head):
    changes = FULL | again | {'batch.loss_head': head}
    assert abs(apart_by(tmp_path, shape, tied, changes)) < 0.5  # 4 MiB at most


@pytest.mark.parametrize('strategy', [slow_case('ddp'), 'fsdp2'])
@pytest.mark.parametrize('shape', SHAPES)
def test_so_they_are_of_two_ranks(tmp_path, shape, strategy):
    changes = FULL | AGAIN | {'sharding.strategy': strategy}
    assert abs(apart_by(tmp_path, shape, True, changes, ranks=2)) < 0.15


ADAM, SUMS = {'optimizer.kind': 'adamw'}, {'precision.reduce': 'float32'}
SYNC, ONE = {'sharding.sync_each_batch': True}, {'batch.accumulation': 1}
COPIES = {'sharding.group': 2, 'cluster.processes': 4}


@pytest.mark.parametrize('shape, tied, changes', [
    ('head', True, SUMS), ('head', False, SUMS | SYNC),
    *[slow_case('head', tied, {'batch.loss_head': 'full', 'batch.accumulation': passes} | changes)
      for tied in (True, False) for passes in (2, 4) for changes in ({}, SUMS, SYNC)],
    slow_case('layers', False, SUMS),
    ('head', True, COPIES | ONE), ('layers', False, COPIES | SYNC),
    *[slow_case(shape, tied, COPIES | changes) for shape, tied, changes in product(
        SHAPES, (True, False), (ONE | SUMS, {}, SUMS, SYNC | SUMS, ONE | {'method.kind': 'lora'}))]
], ids=str)
def test_gradients_in_the_type_of_the_sum_and_sums_over_copies_are_planned(
        tmp_path, shape, tied, changes):
    ranks = changes.get('cluster.processes', 2)
    made = FULL | ADAM | AGAIN | {'precision.master': 'float32'} | changes
    assert abs(apart_by(tmp_path, shape, tied, made, ranks)) < 0.15


def test_a_type_of_sums_is_planned_where_a_policy_has_it(tmp_path):
    "FSDP2 casts nothing where weights train in the type that computes: planned 28 % too large."
    made = FULL | ADAM | AGAIN | COPIES | ONE | SUMS | {'precision.master': 'bfloat16'}
    assert abs(apart_by(tmp_path, 'layers', False, made, ranks=4)) < 0.15


@pytest.mark.parametrize('changes', [
    {}, {'method.dropout': 0.1}, slow_case({'method.kind': 'qlora'}),
    slow_case({'method.kind': 'qlora', 'method.dropout': 0.1})], ids=str)
def test_what_variables_name_is_planned(tmp_path, changes):
    "The fullest instant is the last layer's forward pass: nothing runs again."
    assert abs(apart_by(tmp_path, 'layers', False, LORA | changes)) < 0.15


@pytest.mark.parametrize('strategy, passes', [
    ('zero2', 2), slow_case('zero2', 1), slow_case('zero1', 1), slow_case('zero3', 2)])
def test_a_tied_gradient_waits_under_zero_and_no_small_bucket_holds_it(tmp_path, strategy, passes):
    "It was planned up to 11 % too small where the loss is short; now never, and up to 7 % above."
    changes = FULL | AGAIN | {
        'sharding.strategy': strategy, 'batch.accumulation': passes, 'batch.length': 256,
        'batch.loss_head': 'one_pass', 'zero.reduce_bucket': 20_000_000, 'optimizer.kind': 'adamw'}
    assert -1.5 < apart_by(tmp_path, 'head', True, changes, ranks=4) < 7  # Not too small


TO_HOST, BRIEF = {'sharding.offload_optimizer': 'cpu'}, {'batch.length': 256}


@pytest.mark.parametrize('stage, shape, changes', [
    (1, 'layers', {}), (1, 'head', ONE | BRIEF), (2, 'head', ONE | TO_HOST),
    slow_case(1, 'head', {}), slow_case(2, 'head', {}), slow_case(2, 'head', ONE),
    slow_case(1, 'head', ONE | TO_HOST), slow_case(2, 'head', TO_HOST),
    slow_case(1, 'layers', TO_HOST), slow_case(1, 'head', ONE | ADAM | {'method.kind': 'lora'}),
    slow_case(2, 'layers', ONE | ADAM | {'method.kind': 'lora'})], ids=str)
def test_buckets_of_zero_and_a_head_larger_than_one_are_planned(tmp_path, stage, shape, changes):
    """Planned 28 % too small with states on the host, 17 % with a head that no bucket holds, and
    where ZeRO-1 keeps its buckets for the next pass."""
    made = FULL | AGAIN | {'sharding.strategy': f'zero{stage}', 'zero.reduce_bucket': 20_000_000}
    assert abs(apart_by(tmp_path, shape, False, made | changes, ranks=4)) < 0.2


@pytest.mark.parametrize('device', ['cuda', slow_case('cpu')])
@pytest.mark.parametrize('head', ['one_pass', slow_case('fused')])
def test_one_process_has_no_buckets_and_judges_without_gradients(tmp_path, device, head):
    """accelerate would wrap it in DDP, where it sees a process group; and weights that autocast
    has cast were counted twice in an evaluation."""
    if (device, head) == ('cpu', 'fused'): pytest.skip('a CPU does not run it')
    source = recipe_folder(str(tmp_path), SHAPES['head'] | {'tie_word_embeddings': True})
    made = plain_recipe(source, 1, FULL | AGAIN | {
        'batch.length': 1024, 'cluster.hardware': '1x-h100', 'batch.loss_head': head,
        'intervals.evaluation': 1, 'intervals.saving': 1})
    if device == 'cpu': made = made.changed({'cluster.device': 'cpu', 'cluster.hardware': None})
    planned, rehearsed = memory(made), rehearse(made)
    judged_b = planned.total('evaluation', 'gpu', 'allocated')
    assert abs(planned.total('step', 'gpu', 'allocated') / rehearsed.peak_b - 1) < .01
    assert abs(judged_b / rehearsed.evaluation.peak.size_b - 1) < .02


@pytest.mark.parametrize('kind', ['lora', slow_case('qlora')])
@pytest.mark.slow
def test_a_frozen_head_is_gathered_with_a_copy_on_a_cpu(tmp_path, kind):
    source = recipe_folder(str(tmp_path), SHAPES['head'] | {
        'hidden_size': 2048, 'intermediate_size': 2048, 'tie_word_embeddings': False})
    made = plain_recipe(source, 2, LORA | {'method.kind': kind, 'batch.length': 256})
    made = made.changed({'cluster.device': 'cpu', 'cluster.hardware': None})
    assert abs(memory(made).total('step', 'gpu', 'allocated') / rehearse(made).peak_b - 1) < .01


def test_a_tied_embedding_is_reduced_last():
    "On two ranks that is the fullest instant of a step of Llama 3.2 1B."
    made = Recipe.named('70b-2x8-a100-80-full').changed({
        'model.source': 'llama-3.2-1b', 'model.attention': 'sdpa', 'batch.packing': False,
        'batch.length': 512, 'cluster.nodes': 1, 'cluster.processes': 2})
    over = memory(made).total('step', level='allocated') / rehearse(made).peak_b - 1
    assert -1e-3 < over < .014  # 1.3 % since torch 2.15, which frees more before it reduces
