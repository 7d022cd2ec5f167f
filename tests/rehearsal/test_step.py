"""The rehearsal: small models against themselves played whole, what it refuses, and what it leaves
behind."""
import json
import os
import subprocess
import sys

import pytest

os.environ['HF_HUB_OFFLINE'] = '1'

import torch
import torch.distributed as dist
from trouble import slow_case

from llm_workbook import Recipe, rehearse, shrink
from llm_workbook.config.document import RecipeError
from llm_workbook.plan.ledger import memory
from llm_workbook.rehearsal.program import record_step, rehearsable
from llm_workbook.config.recipe import recipe_names
from llm_workbook.model.architecture import configuration

SHAPE = dict(
    model_type='llama', hidden_size=128, intermediate_size=352, num_hidden_layers=14,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=1_000)
FULL, LORA = {'method.kind': 'full'}, {'method.kind': 'lora'}
AGAIN = {'sharding.activation_checkpointing': 'full'}
GPU = {'cluster.device': 'cuda', 'cluster.hardware': '8x-h100'}
WAYS = {
    'full, gpu': FULL | GPU,
    'lora, hybrid': LORA | AGAIN | {'sharding.group': 2, 'cluster.processes': 4},
    'qlora, gpu': GPU | AGAIN,
    'full logits, accumulated': FULL | {'batch.loss_head': 'full', 'batch.accumulation': 3},
    'offloaded': FULL
    | GPU
    | {'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'}}


def recipe_of(folder, **changes):
    (folder/'config.json').write_text(json.dumps(SHAPE | changes))
    batch = {'micro': 2, 'length': 64}
    return Recipe(
        name='small', model={'source': str(folder)}, data={'source': 'sample-conversations'},
        batch=batch)


@pytest.fixture(scope='module')
def plain(tmp_path_factory): return recipe_of(tmp_path_factory.mktemp('model'))


@pytest.fixture(scope='module')
def shallow(tmp_path_factory):
    "The same with three layers, all of which run: 13 run where 14 are derived from 6 and 7."
    return recipe_of(tmp_path_factory.mktemp('shallow'), num_hidden_layers=3)


@pytest.fixture(scope='module')
def seven(tmp_path_factory):
    "A folder with Llama 3.2 1B, but for nine of its 16 layers."
    folder = tmp_path_factory.mktemp('seven')
    _, raw = configuration('llama-3.2-1b')
    (folder/'config.json').write_text(json.dumps(raw | {'num_hidden_layers': 7}))
    return str(folder)


def away(source, **changes):
    "A model on one GPU, its saved tensors on the host."
    made = Recipe(
        name='away', model={'source': source}, data={'source': 'sample-conversations'},
        method={'kind': 'lora'}, cluster={'processes': 1, 'device': 'cuda'},
        sharding={'strategy': 'none', 'activation_checkpointing': 'full',
                  'offload_activations': 'cpu'},
        batch={'micro': 8, 'length': 1024})
    return made.changed(changes)


@pytest.mark.parametrize('changes', [
    {}, slow_case({'method.kind': 'full', 'batch.micro': 32, 'batch.accumulation': 2}),
    slow_case({'method.kind': 'qlora', 'batch.accumulation': 2}),
    slow_case({'batch.loss_head': 'one_pass'}), slow_case({'precision.compute': 'float32'}),
    slow_case({'method.kind': 'full', 'batch.micro': 32})], ids=str)
def test_saved_tensors_on_the_host_are_planned_as_they_play(seven, changes):
    asked = away(seven, **changes)
    kept = asked.changed({'sharding.offload_activations': 'none'})
    played, ledger = rehearse(asked), memory(asked)
    assert abs(ledger.total('step', level='allocated') / played.peak_b - 1) < .001
    assert played.peak_b < rehearse(kept).peak_b
    on_host = max(span.host_b for span in played.timeline.spans)
    planned_b = sum(line.size_b for line in ledger.lines
                    if line.place == 'pinned' and line.kind == 'activations')
    assert 1 > on_host / planned_b > .8  # A span has the host's bytes where the GPU's are the most


@pytest.mark.slow
def test_with_saved_tensors_on_the_host_every_layer_runs(plain):
    """Five inputs are on their way, however many layers there are: two small models in which that
    number still grows would say too much of the forward pass."""
    asked = away(plain.model.source, **{'batch.micro': 1})
    assert rehearse(asked).played == (14,)
    kept = asked.changed({'sharding.offload_activations': 'none'})
    assert rehearse(kept).played == (6, 7)


def test_the_stand_in_has_the_settings_of_trl():
    "Another version of TRL may hold more tensors, or not take page-locked memory."
    from inspect import getsource, signature
    from trl import SFTTrainer
    from trl.models.activation_offloading import OffloadActivations, get_act_offloading_ctx_manager
    from llm_workbook.rehearsal import host_activations
    for made in (OffloadActivations, get_act_offloading_ctx_manager):
        given = {name: one.default for name, one in signature(made).parameters.items()}
        assert (given['min_offload_size'], given['max_fwd_stash_size']) == (
            host_activations._SMALLEST_B, host_activations._ON_THE_WAY)
        assert given['use_streams'] and given['use_pin_memory']
    assert 'with self.maybe_activation_offload_context' in getsource(SFTTrainer.training_step)


# For QLoRA the page of `step` compares the same, on a model of 16 layers
@pytest.mark.slow
@pytest.mark.parametrize('name', WAYS)
def test_two_small_models_determine_the_large_one(plain, name):
    recipe = plain.changed(WAYS[name])
    whole = rehearse(recipe, exact=True)
    derived = rehearse(recipe)
    assert (whole.played, derived.played, derived.exact) == ((14,), (6, 7), False)
    assert abs(derived.peak_b / whole.peak_b - 1) < .005
    assert (derived.messages, derived.flops) == (whole.messages, whole.flops)
    assert [span[:2] for span in derived.timeline.spans] == [
        span[:2] for span in whole.timeline.spans]


def test_a_micro_batch_in_the_middle_stands_for_all_of_them(shallow):
    three, five = (rehearse(shallow.changed(FULL | {'batch.accumulation': n})) for n in (3, 5))
    assert five.peak_b == three.peak_b
    assert five.flops * 3 == three.flops * 5
    assert len(five.messages) > len(three.messages)


def test_what_waits_in_host_memory_is_not_on_the_gpu(shallow):
    on_gpu, away = (rehearse(shallow.changed(WAYS[name])) for name in ('full, gpu', 'offloaded'))
    kinds = away.timeline.peak.kinds
    assert not kinds.get('weights')
    assert not kinds.get('optimizer')
    assert away.timeline.peak.host_b > 0
    assert away.peak_b < on_gpu.peak_b


@pytest.mark.parametrize('rank, model', [
    (0, 'shallow'), (1, 'shallow'), slow_case(2, 'plain')])
def test_every_rank_can_be_played(rank, model, request):
    recipe = request.getfixturevalue(model).changed(FULL | {'cluster.processes': 3})
    played = rehearse(recipe, rank=rank)
    planned = memory(recipe, rank=rank).total('step', level='allocated')
    assert abs(planned / played.peak_b - 1) < .03


@pytest.mark.parametrize(
    'device, mask_b', [(GPU, 1), slow_case({}, 4)], ids=['gpu', 'cpu'])
def test_a_mask_of_dropout_is_a_byte_a_number_on_a_gpu_and_float32_on_a_cpu(
        shallow, device, mask_b):
    kept = shallow.changed(LORA | device | {'batch.length': 512})
    dropped = kept.changed({'method.dropout': .1})
    played_b, without_b = rehearse(dropped).peak_b, rehearse(kept).peak_b
    planned_b = memory(dropped).total('step', level='allocated')
    assert played_b == pytest.approx(planned_b, rel=.005)
    widths = 6 * SHAPE['hidden_size'] + SHAPE['intermediate_size']  # Of what seven adapters get
    masks_b = 3 * widths * kept.batch.micro * kept.batch.length * mask_b
    assert played_b - without_b == pytest.approx(masks_b, rel=.2)


HALF = {'precision.compute': 'float16', 'precision.loss_scale': 'dynamic'}


def test_float16_is_played_with_its_loss_scale_and_skips_no_step(shallow):
    bfloat, half = (shallow.changed(FULL | changes) for changes in (
        {'precision.compute': 'bfloat16'}, HALF))
    of_bfloat, of_half = rehearse(bfloat), rehearse(half)
    assert of_half.flops == of_bfloat.flops
    assert 'optimizer' in of_half.timeline.phases()
    assert of_half.timeline.phases()['forward'] > of_bfloat.timeline.phases()['forward']
    assert any('no gradient is infinite' in note for note in of_half.notes)


@pytest.mark.parametrize('head', ['chunked', 'one_pass'])
def test_the_plan_of_float16_is_as_full_as_its_rehearsal(shallow, head):
    recipe = shallow.changed(FULL | GPU | HALF | {'batch.loss_head': head})
    planned_b = memory(recipe).total('step', 'gpu', 'allocated')
    assert planned_b == pytest.approx(rehearse(recipe).peak_b, rel=.003)


def test_tiles_of_logits_that_a_tanh_keeps_small_are_planned_on_a_cpu(tmp_path):
    gemma = recipe_of(
        tmp_path, model_type='gemma2', num_hidden_layers=2, head_dim=32, vocab_size=40_000)
    recipe = gemma.changed(LORA | {'model.attention': 'eager', 'batch.length': 512})
    planned_b = memory(recipe).total('step', 'gpu', 'allocated')
    assert planned_b == pytest.approx(rehearse(recipe).peak_b, rel=.005)


@pytest.mark.parametrize('strategy, compute', [('zero3', 'bfloat16'), ('fsdp2', 'float16')])
def test_float16_is_replaced_where_the_strategy_is_and_the_notes_say_which(
        plain, strategy, compute):
    made, notes = rehearsable(plain.changed(FULL | HALF | {'sharding.strategy': strategy}))
    assert made.precision.compute == compute
    assert ['float16 runs as bfloat16' in note for note in notes].count(True) == (
        compute == 'bfloat16')


@pytest.mark.parametrize('name', recipe_names())
def test_every_recipe_of_the_package_can_be_scripted_or_says_why_not(name):
    try: made, notes = rehearsable(Recipe.named(name))
    except RecipeError as error: assert 'cannot be rehearsed' in str(error)
    else: assert made.cluster.device == 'cpu' and notes and rehearsable(made)[0] == made


@pytest.mark.parametrize('strategy', ['zero1', 'zero2', 'zero3'])
def test_zero_is_played_as_itself_for_two_steps(plain, strategy):
    asked = plain.changed(FULL | {'sharding.strategy': strategy, 'precision.compute': 'bfloat16',
                                  'sharding.offload_optimizer': 'cpu', 'zero.reduce_bucket': 10**6})
    made, notes = rehearsable(asked)
    assert (made.sharding.strategy, made.sharding.offload_optimizer) == (strategy, 'cpu')
    assert (made.zero, made.optimizer.steps) == (asked.zero, 2)
    assert any("DeepSpeed's engine" in note for note in notes)


@pytest.mark.parametrize('kind, compute', [
    slow_case('adamw', 'bfloat16'), ('adamw_fused', 'bfloat16'),
    slow_case('adamw_8bit', 'bfloat16'), slow_case('adamw_fused', 'float32')])
def test_the_step_of_zero_takes_what_its_optimizer_makes(shallow, kind, compute):
    "Rows so short for the model that the optimizer's step is the fullest."
    recipe = shallow.changed(FULL | GPU | {
        'sharding.strategy': 'zero2', 'optimizer.kind': kind, 'precision.compute': compute,
        'batch.micro': 1, 'batch.length': 8, 'zero.reduce_bucket': 10_000})
    planned_b = memory(recipe).total('step', 'gpu', 'allocated')
    seen = rehearse(recipe)
    assert 'in the optimizer' in str(seen)
    assert planned_b == pytest.approx(seen.peak_b, rel=.005)


def test_a_rehearsal_knows_nothing_of_the_optimizers_before_it(shallow):
    "bitsandbytes keeps by its position which tensor has states of 32 bits: here an embedding."
    eight = shallow.changed(FULL | {'optimizer.kind': 'adamw_8bit', 'sharding.strategy': 'ddp',
                                    'precision.compute': 'bfloat16'})
    flat = eight.changed({'sharding.strategy': 'zero2', 'zero.reduce_bucket': 10**6})
    alone = rehearse(flat).peak_b
    rehearse(eight)
    assert rehearse(flat).peak_b == alone


@pytest.mark.parametrize('kind', ['lora', slow_case('qlora')])
def test_adapters_play_in_the_type_that_is_planned(shallow, kind):
    "Training has them in float32 alone; a plan may ask for bfloat16."
    half = shallow.changed(AGAIN | GPU | {
        'method.kind': kind, 'precision.master': 'bfloat16', 'precision.compute': 'bfloat16'})
    whole, played = rehearse(half.changed({'precision.master': 'float32'})), rehearse(half)
    assert played.by_kind()['adapters'] == whole.by_kind()['adapters'] / 2
    planned_b = memory(half).total('step', 'gpu', 'allocated')
    assert planned_b == pytest.approx(played.peak_b, rel=.01)


@pytest.mark.parametrize('layers, instant', [
    (0.6, 'embedding'), slow_case(2.2, 'first layer')])
def test_the_last_weight_that_zero_fetches_comes_whole(tmp_path, layers, instant):
    "The embedding, however little room the head and some layers have left."
    width, words, layer = 256, 30_000, 812_032
    source = recipe_of(tmp_path, hidden_size=width, intermediate_size=704, num_hidden_layers=3,
                       vocab_size=words)
    recipe = source.changed(LORA | AGAIN | GPU | {
        'sharding.strategy': 'zero3', 'precision.compute': 'bfloat16', 'batch.micro': 1,
        'batch.length': 8, 'zero.persistence_threshold': 1_000, 'zero.reduce_bucket': 1_000,
        'zero.prefetch_bucket': 1_000, 'zero.max_reuse': 1,
        'zero.max_live': width * words + int(layers * layer)})
    planned = memory(recipe)
    assert planned.instant() == instant
    assert planned.total('step', 'gpu', 'allocated') == pytest.approx(
        rehearse(recipe).peak_b, rel=.001)


@pytest.mark.slow
def test_a_layer_that_runs_again_has_all_its_weights_whatever_room_zero_has(tmp_path):
    _, raw = configuration('llama-3.1-8b')
    few = {'num_hidden_layers': 4, 'vocab_size': 1_000}
    small = recipe_of(tmp_path, **raw | few)
    recipe = small.changed(GPU | LORA | AGAIN | {
        'batch.micro': 8, 'batch.length': 512, 'cluster.processes': 8,
        'sharding.strategy': 'zero3', 'zero.max_live': 10**6, 'zero.max_reuse': 10**6,
        'zero.prefetch_bucket': 10**6, 'zero.reduce_bucket': 10**6})
    rehearsed_b = rehearse(recipe).peak_b
    assert memory(recipe).total('step', 'gpu', 'allocated') == pytest.approx(rehearsed_b, rel=.02)


def test_fsdp1_is_played_by_fsdp2_and_the_notes_say_so(plain):
    part, notes = rehearsable(
        plain.changed(FULL | {'sharding.strategy': 'fsdp1', 'precision.compute': 'bfloat16'}))
    assert (part.sharding.strategy, part.sharding.reshard_after_forward) == ('fsdp2', True)
    assert [note for note in notes if ' runs as FSDP2' in note]


@pytest.mark.slow  # The page of `report` rehearses a shrunk recipe
def test_shrunk_recipes_and_one_process(plain):
    assert rehearse(shrink(Recipe.named('70b-2x24gb-qlora'))).peak_b > 0
    alone = rehearse(plain.changed(FULL | {'sharding.strategy': 'none', 'cluster.processes': 1}))
    assert {size for *_, size in alone.messages} == {1}


def test_nothing_is_left_behind(shallow):
    rehearse(shallow.changed(LORA))  # Libraries set variables when they are imported first
    variables = dict(os.environ)
    numbers = torch.get_rng_state()
    rehearse(shallow.changed(LORA))
    with pytest.raises(ValueError, match="did you mean 'v_proj'"):
        rehearse(shallow.changed(LORA | {'method.targets': ['q_proj', 'v_prj']}))
    assert dict(os.environ) == variables
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), numbers)
    assert type(torch.ones(2)) is torch.Tensor
    assert torch.ones(2).sum().item() == 2


def test_an_error_of_the_program_comes_out_as_it_is_and_leaves_nothing(plain):
    class Odd(Exception): pass
    from unittest.mock import patch
    with patch('llm_workbook.rehearsal.program.make_trainer', side_effect=Odd), pytest.raises(Odd):
        record_step(rehearsable(plain)[0])
    assert not dist.is_initialized()


def test_a_process_that_is_a_rank_already_is_told_so(plain):
    dist.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match='is one of 1 ranks already'): rehearse(plain)
    finally: dist.destroy_process_group()


@pytest.fixture(scope='module')
def full_70b(): return Recipe.named('70b-2x8-a100-80-full')


# `make test` leaves out the cells of the page that show these two

@pytest.mark.slow
def test_what_saves_memory_alone_and_together(full_70b):
    plain = full_70b.changed({
        'name': '8b', 'model.source': 'meta-llama/Llama-3.1-8B', 'model.attention': 'sdpa',
        'cluster.nodes': 1, 'cluster.hardware': '8x-h100', 'sharding': {'loading': 'sharded'},
        'batch': {'micro': 2, 'length': 4096, 'loss_head': 'full'}, 'optimizer.kind': 'adamw'})
    def peak_b(*changes): return rehearse(plain.changed(dict(changes))).peak_b
    again = 'sharding.activation_checkpointing', 'full'
    tiles = 'batch.loss_head', 'chunked'
    away = 'sharding.offload_optimizer', 'cpu'
    nothing_b, kept_b = peak_b(), peak_b(('sharding.reshard_after_forward', False))
    again_b = peak_b(again)
    assert again_b < nothing_b <= kept_b
    assert peak_b(tiles) < nothing_b
    assert peak_b(again, tiles, away, ('sharding.offload_parameters', 'cpu')) < again_b


@pytest.mark.slow
def test_405_billion_parameters_on_1024_gpus(full_70b):
    giant = rehearse(full_70b.changed({
        'model.source': 'meta-llama/Llama-3.1-405B', 'cluster.nodes': 128}))
    assert (giant.timeline.layers, giant.played) == (126, (6, 7))
    assert {size for *_, size in giant.messages} == {1024}
    assert giant.peak_b < 80 * 2**30


@pytest.mark.slow
def test_no_fake_tensor_outlives_a_rehearsal():
    code = (
        'import gc; from llm_workbook import Recipe, rehearse, shrink; '
        'rehearse(shrink(Recipe.named("70b-2x24gb-qlora"))); '
        'gc.collect(); from torch._subclasses.fake_tensor import FakeTensor; '
        'print(sum(isinstance(thing, FakeTensor) for thing in gc.get_objects()))')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == '0', (
        'a library that was imported inside keeps a tensor among its defaults')


@pytest.mark.parametrize('family, reason', [
    ('jetmoe', 'it cuts its tokens'), ('longcat_flash', 'it looks for the tokens'),
    ('minimax', 'its attention multiplies float32')])
def test_a_family_whose_code_reads_numbers_is_refused_by_name(plain, tmp_path, family, reason):
    (tmp_path/'config.json').write_text(json.dumps({'model_type': family}))
    made = plain.changed({'model.source': str(tmp_path)})
    refused = f'{family} cannot be rehearsed: {reason}.*another family'
    with pytest.raises(RecipeError, match=refused):
        rehearse(made)
