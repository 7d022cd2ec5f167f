"""float16 with a loss scaler: it trains as float32 does, and what overflows is skipped on all
ranks, counted and kept in checkpoints."""
import json
import os
import signal
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_hybrid import REVIEWS
from trouble import files, fine_tune, slow_case, small_recipe

from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Recipe, planned_only, shrink
from llm_workbook.parallel import backends
from llm_workbook.parallel.backends import fsdp_env
from llm_workbook.parallel.ranks import RankError, notebook_ranks
from llm_workbook.training import fine_tune as training
from llm_workbook.training import float16
from llm_workbook.training import loop as loops
from llm_workbook.training.data import load_rows
from llm_workbook.training.fine_tune import check_recipe, train_rank
from llm_workbook.training.loop import train_loop
from llm_workbook.training.resume import Preempted
from llm_workbook.training.run_directory import begin_run, read_metrics

HALF = {
    'precision.compute': 'float16', 'precision.loss_scale': 'dynamic', 'method.storage': 'float16'}
WIDE = {'precision.compute': 'float32', 'method.storage': 'float32'}
ZERO = {
    'zero.persistence_threshold': 1000, 'zero.reduce_bucket': 1_000_000,
    'zero.prefetch_bucket': 1_000_000}
# Relative, at every step. Measured: 1e-5 and 2e-4; with a packed base, whose plain weights and
# products are rounded too, 1e-4 and 4e-3
LOSS = {'full': 1e-4, 'lora': 1e-4, 'qlora': 5e-4}
NORM = {'full': 1e-3, 'lora': 1e-3, 'qlora': 1e-2}


def recipe_of(folder, method, strategy, **changes):
    "Six steps whose gradients are clipped in every one."
    ranks = 1 if strategy == 'none' else 2
    return small_recipe(
        folder, 24, **{
            'method.kind': method, 'sharding.strategy': strategy, 'cluster.processes': ranks,
            'batch.micro': 2, 'optimizer.clip': 0.5} | WIDE | changes)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A function that fine-tunes once by a method and strategy, with these changes.

    It gives the metrics and what was found in force.
    """
    @cache
    def run(method, strategy, **changes):
        folder = tmp_path_factory.mktemp('trained')
        recipe = recipe_of(folder, method, strategy, **changes)
        metrics = fine_tune(recipe, folder/'run').metrics
        return metrics, found_in(folder/'run')
    return run


def wide_metrics(trained, method):
    "In float32 on one process, with the rows that two ranks take in a step."
    return trained(method, 'none', **WIDE | {'batch.accumulation': 2})[0]


def found_in(directory):
    "What was in force, by the names of the settings."
    effective = json.loads((directory/'effective.json').read_text())
    return {setting['name']: setting['found'] for setting in effective['settings']}


def assert_parity(wide, half, method):
    assert len(wide) == len(half) == 6
    for a, b in zip(wide, half):
        assert b['loss'] == pytest.approx(a['loss'], rel=LOSS[method])
        assert b['grad_norm'] == pytest.approx(a['grad_norm'], rel=NORM[method])
        assert b['learning_rate'] == pytest.approx(a['learning_rate'])
        assert (b['loss_scale'], b['skipped']) == (2**16, 0)
        assert not {'loss_scale', 'skipped'} & a.keys()
    # Where both compute in float32, one process and two ranks differ by 1e-7 at most; here by 5e-6
    apart = [abs(a['loss'] - b['loss']) / a['loss'] for a, b in zip(wide, half)]
    assert max(apart) > 1e-6, 'float16 did not compute'


# What it trains

@pytest.mark.parametrize('method, strategy', [
    ('full', 'fsdp2'), slow_case('lora', 'ddp'), slow_case('qlora', 'none'),
    slow_case('full', 'none'), slow_case('lora', 'fsdp2')])
def test_float16_trains_as_float32_does(trained, method, strategy):
    half, found = trained(method, strategy, **HALF)
    if strategy == 'none': wide = trained(method, strategy, **WIDE)[0]
    else: wide = wide_metrics(trained, method)
    assert_parity(wide, half, method)
    assert (
        found['precision.compute'], found['precision.master'], found['precision.loss_scale']
    ) == ('float16', 'float32', 'dynamic')


def test_gradients_are_summed_in_float16_if_the_recipe_names_no_type(trained):
    assert trained('full', 'fsdp2', **HALF)[1]['precision.reduce'] == 'float16'


@pytest.mark.slow
def test_other_ways_through_fsdp2(tmp_path):
    "A base that arrives, layers that are computed again, a fused optimizer and two micro-batches."
    recipe = recipe_of(tmp_path, 'qlora', 'fsdp2', **{
        'sharding.loading': 'sharded', 'sharding.activation_checkpointing': 'full',
        'optimizer.kind': 'adamw_fused', 'batch.micro': 1, 'batch.accumulation': 2})
    wide = fine_tune(recipe.changed(WIDE), tmp_path/'wide')
    half = fine_tune(recipe.changed(HALF), tmp_path/'half')
    assert_parity(wide.metrics, half.metrics, 'qlora')


def loop(recipe, directory):
    rows = load_rows(recipe.data, recipe.seed)[0]
    start = begin_run(recipe, directory)
    notebook_ranks(
        train_loop, recipe.cluster.ranks, (recipe, directory, rows, start), 200, fsdp_env(recipe))
    return read_metrics(Path(directory)/'metrics.jsonl')


@pytest.mark.slow
def test_the_loss_is_not_rounded_under_fsdp2(tmp_path, trained, monkeypatch):
    """By accelerate's policy it would be, and the loop, which sums what the model gives, would send
    the scale itself back in float16, where it is infinite."""
    recipe = recipe_of(tmp_path, 'full', 'fsdp2')
    half = loop(recipe.changed(HALF), tmp_path/'half')
    assert_parity(wide_metrics(trained, 'full'), half, 'full')
    monkeypatch.setattr(float16, '_keep_outputs', lambda plugin: None)
    monkeypatch.setattr(loops, 'keep_output_types', lambda model: None)
    rounded = loop(recipe.changed(HALF | {'optimizer.steps': 1}), tmp_path/'rounded')
    assert rounded[0]['skipped'] == 1


# What it skips

def observed(monkeypatch, plant, folder):
    "Let every rank note its weights after each step, and `plant(trainer, step)` after a backward."
    make = training.make_trainer
    def make_observed(*args):
        import torch
        from transformers import TrainerCallback
        trainer = make(*args)
        step_of = trainer.training_step
        def planting_step(*args):
            loss = step_of(*args)
            plant(trainer, trainer.state.global_step + 1)
            return loss
        class Weights(TrainerCallback):
            def on_step_end(self, args, state, control, **objects):
                parts = [getattr(p, '_local_tensor', p) for p in trainer.model.parameters()]
                total = float(sum(p.detach().double().abs().sum() for p in parts))
                with open(folder/f'weights.{os.environ["RANK"]}', 'a') as file:
                    file.write(f'{total!r}\n')
        trainer.training_step = planting_step
        trainer.add_callback(Weights())
        torch.set_num_threads(1)
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_observed)


def infinity_in_the_part_of_the_last_rank(trainer, step):
    "After the ranks have summed: under FSDP2 no other rank sees it."
    if step != 3 or int(os.environ['RANK']) != trainer.accelerator.num_processes - 1: return
    gradient = next(p.grad for p in trainer.model.parameters() if p.grad is not None)
    getattr(gradient, '_local_tensor', gradient).view(-1)[0] = float('inf')


@pytest.mark.parametrize('method, strategy, kind', [
    slow_case('full', 'fsdp2', 'adamw_fused'), ('lora', 'fsdp2', 'adamw'),
    ('full', 'none', 'adamw_fused')])
def test_one_infinity_skips_the_step_of_all_ranks(tmp_path, monkeypatch, method, strategy, kind):
    observed(monkeypatch, infinity_in_the_part_of_the_last_rank, tmp_path)
    recipe = recipe_of(
        tmp_path, method, strategy,
        **{**HALF, 'optimizer.kind': kind, 'optimizer.schedule': 'linear'})
    lines = fine_tune(recipe, tmp_path/'run').metrics
    assert [line['skipped'] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert [line['loss_scale'] for line in lines] == [2**16] * 2 + [2**15] * 4
    assert ['grad_norm' in line for line in lines] == [True, True, False, True, True, True]
    rates = [line['learning_rate'] for line in lines]
    assert rates[2] == rates[3], 'the schedule does not go on in a step that is skipped'
    assert len(set(rates)) == 5
    for rank in range(recipe.cluster.ranks):
        weights = (tmp_path/f'weights.{rank}').read_text().split()
        moved = [a != b for a, b in zip(weights, weights[1:])]
        assert moved == [True, False, True, True, True]  # The first step warms up, at rate 0


def far_too_large(monkeypatch, scale=2.0**40):
    monkeypatch.setattr(float16, 'make_scaler', partial(float16.make_scaler, scale=scale))


def overflow_on_the_way_back(monkeypatch, rank, steps):
    "Let a gradient become infinite on its way back through one rank, in these passes."
    make = training.make_trainer
    def make_disturbed(*args):
        trainer = make(*args)
        passes = []
        def hook(layer, inputs, output):
            passes.append(1)
            if len(passes) in steps: output.register_hook(lambda gradient: gradient * float('inf'))
        if int(os.environ['RANK']) == rank:
            layers = [m for m in trainer.model.modules() if type(m).__name__ == 'LlamaMLP']
            layers[1].register_forward_hook(hook)
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_disturbed)


@pytest.mark.parametrize('strategy, reduce', [
    slow_case('ddp', None), slow_case('fsdp2', None), ('fsdp2', 'float32')])
def test_an_overflow_on_one_rank_is_one_of_all(tmp_path, monkeypatch, strategy, reduce):
    "Under FSDP2 also where the recipe has its gradients summed in another type."
    overflow_on_the_way_back(monkeypatch, rank=1, steps=[3])
    observed(monkeypatch, lambda *ignored: None, tmp_path)
    recipe = recipe_of(tmp_path, 'full', strategy, **HALF | {'precision.reduce': reduce})
    lines = fine_tune(recipe, tmp_path/'run').metrics
    if reduce: assert found_in(tmp_path/'run')['precision.reduce'] == reduce
    assert [line['skipped'] for line in lines] == [0, 0, 1, 1, 1, 1]
    if strategy == 'ddp': assert len({(tmp_path/f'weights.{r}').read_text() for r in (0, 1)}) == 1


@pytest.mark.slow
def test_the_loop_skips_what_the_trainer_skips(tmp_path, monkeypatch):
    far_too_large(monkeypatch, 2.0**18)
    recipe = recipe_of(tmp_path, 'full', 'ddp', **HALF)
    trained = fine_tune(recipe, tmp_path/'trainer').metrics
    looped = loop(recipe, tmp_path/'loop')
    assert trained[-1]['skipped'] > 0
    for a, b in zip(trained, looped):
        assert a.keys() == b.keys()
        assert {key: a[key] for key in a if key != 'seconds'} == pytest.approx(
            {key: b[key] for key in b if key != 'seconds'}, rel=1e-5)


@pytest.mark.slow
def test_a_classifier_computes_in_float16(tmp_path):
    recipe = recipe_of(tmp_path, 'qlora', 'fsdp2', **REVIEWS, **{'optimizer.steps': 4})
    runs = [fine_tune(recipe.changed(x), tmp_path/x['precision.compute']) for x in (WIDE, HALF)]
    for a, b in zip(*(run.metrics for run in runs)):
        assert b['loss'] == pytest.approx(a['loss'], rel=2e-3)
        assert b['grad_norm'] == pytest.approx(a['grad_norm'], rel=3e-2)


# Where it ends

FLOOR = 'FloatingPointError: the loss scale fell below 1 after 3 .*set precision.compute to bf'


@pytest.mark.parametrize('strategy', [slow_case('none'), 'fsdp2'])
def test_a_scale_that_falls_to_its_floor_ends_the_run(tmp_path, monkeypatch, strategy):
    far_too_large(monkeypatch, 4.0)
    recipe = recipe_of(tmp_path, 'lora', strategy, **HALF)
    overflow_on_the_way_back(monkeypatch, recipe.cluster.ranks - 1, range(100))
    with pytest.raises(RankError, match=FLOOR): fine_tune(recipe, tmp_path/'run')
    assert [line['skipped'] for line in read_metrics(tmp_path/'run'/'metrics.jsonl')] == [1, 2]
    assert not [name for name in files(tmp_path/'run') if name.startswith(('adapter', 'check'))]


def test_a_loss_beyond_the_range_ends_the_run_and_names_the_type(tmp_path, monkeypatch):
    make = training.make_trainer
    def make_loud(*args):
        trainer = make(*args)
        layer = next(m for m in trainer.model.modules() if type(m).__name__ == 'LlamaMLP')
        layer.register_forward_hook(lambda layer, inputs, output: output * 1e9)
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_loud)
    fine_tune(recipe_of(tmp_path, 'lora', 'none', **WIDE), tmp_path/'wide')
    with pytest.raises(RankError, match='loss (nan|inf) at step 1.*above 65,504 is infinite: set'):
        fine_tune(recipe_of(tmp_path, 'lora', 'none', **HALF), tmp_path/'half')


# How it goes on

@pytest.mark.parametrize('strategy', ['none', slow_case('fsdp2')])
def test_a_resumed_run_keeps_its_scale(tmp_path, monkeypatch, strategy):
    far_too_large(monkeypatch, 2.0**18)
    recipe = recipe_of(tmp_path, 'full', strategy, **HALF)
    whole = fine_tune(recipe, tmp_path/'whole').metrics
    def stop(trainer, step):
        if step == 4: os.kill(os.getpid(), signal.SIGTERM)
    with monkeypatch.context() as patch:
        observed(patch, stop, tmp_path)
        with pytest.raises(Preempted): fine_tune(recipe, tmp_path/'two')
    facts = json.loads((tmp_path/'two'/'checkpoint-4'/'facts.json').read_text())
    assert facts['scaler']['skipped'] == whole[3]['skipped'] > 0
    resumed = fine_tune(recipe, tmp_path/'two', resume=True).metrics
    assert len(whole) == len(resumed) == 6
    for a, b in zip(whole, resumed):
        assert {**a, 'seconds': 0} == pytest.approx({**b, 'seconds': 0}, rel=1e-6)


# What is refused before a weight is loaded

def test_what_cannot_work_is_refused_at_once(tmp_path):
    recipe = recipe_of(tmp_path, 'full', 'ddp', **HALF)
    assert planned_only(recipe) == []
    with pytest.raises(RecipeError, match='precision.master'):
        check_recipe(recipe.changed({'precision.master': 'bfloat16'}))
    with pytest.raises(RecipeError, match='fp16-needs-loss-scale'):
        recipe.changed({'precision.loss_scale': 'none'})
    zero = recipe.changed({'sharding.strategy': 'zero2'})
    with pytest.raises(RecipeError, match='zero-half-needs-a-gpu'): check_recipe(zero)
    assert planned_only(zero.changed({'cluster.device': 'cuda'})) == []
    assert shrink(recipe).precision.compute == 'float16'
    assert shrink(zero).precision.compute == 'float32'


# DeepSpeed, which has a scaler of its own

def train_under_zero(recipe, directory, resume=False):
    "On CPU ranks, though `check_recipe` refuses that: some CPUs can."
    rows = load_rows(recipe.data, recipe.seed)[0]
    start = begin_run(recipe, directory, resume)
    notebook_ranks(train_rank, 2, (recipe, directory, rows, start), 200, fsdp_env(recipe))
    return read_metrics(Path(directory)/'metrics.jsonl')


@pytest.fixture
def any_cpu(monkeypatch):
    accelerator = pytest.importorskip('deepspeed.accelerator.cpu_accelerator')
    monkeypatch.setattr(accelerator.CPU_Accelerator, 'is_fp16_supported', lambda self: True)
    return accelerator.CPU_Accelerator


@pytest.mark.skipif(not find_spec('deepspeed'), reason='needs DeepSpeed')
def test_deepspeed_refuses_float16_where_a_cpu_has_none_of_it(tmp_path, any_cpu, monkeypatch):
    monkeypatch.setattr(any_cpu, 'is_fp16_supported', lambda self: False)
    with pytest.raises(RankError, match='Type fp16 is not supported on your device'):
        train_under_zero(recipe_of(tmp_path, 'full', 'zero2', **ZERO | HALF), tmp_path/'run')


@pytest.mark.parametrize('method, strategy', [
    ('full', 'zero2'), slow_case('lora', 'zero3'), slow_case('qlora', 'zero2')])
def test_deepspeed_trains_as_float32_does(tmp_path, trained, any_cpu, method, strategy):
    recipe = recipe_of(tmp_path, method, strategy, **ZERO)
    half = train_under_zero(recipe.changed(HALF), tmp_path/'half')
    assert_parity(wide_metrics(trained, method), half, method)


@pytest.mark.parametrize('method, strategy', [('full', 'zero2'), slow_case('lora', 'zero3')])
def test_deepspeed_skips_and_counts(tmp_path, any_cpu, monkeypatch, method, strategy):
    recipe = recipe_of(tmp_path, method, strategy, **ZERO)
    monkeypatch.setitem(backends._LOSS_SCALE, 'initial_scale_power', 19)
    lines = train_under_zero(recipe.changed(HALF), tmp_path/'skips')
    skipped = [line['skipped'] for line in lines]
    assert skipped[0] == 1
    assert skipped[-1] < 6
    assert [line['loss_scale'] for line in lines] == [2**(19 - count) for count in skipped]
    assert ['grad_norm' in line for line in lines] == [
        now == before for before, now in zip([0, *skipped], skipped)]


@pytest.mark.slow
def test_deepspeed_goes_on_with_its_scale(tmp_path, any_cpu, monkeypatch):
    monkeypatch.setitem(backends._LOSS_SCALE, 'initial_scale_power', 17)
    recipe = recipe_of(tmp_path, 'full', 'zero3', **ZERO | HALF)
    whole = train_under_zero(recipe, tmp_path/'whole')
    def stop(trainer, step):
        if step == 4: os.kill(os.getpid(), signal.SIGTERM)
    with monkeypatch.context() as patch:
        observed(patch, stop, tmp_path)
        assert len(train_under_zero(recipe, tmp_path/'two')) == 4
    resumed = train_under_zero(recipe, tmp_path/'two', resume=True)
    assert whole[-1]['skipped'] > 0
    for a, b in zip(whole, resumed, strict=True):
        assert {**a, 'seconds': 0} == pytest.approx({**b, 'seconds': 0}, rel=1e-6)


def test_deepspeed_ends_at_the_floor_too(tmp_path, any_cpu, monkeypatch):
    monkeypatch.setitem(backends._LOSS_SCALE, 'initial_scale_power', 3)
    overflow_on_the_way_back(monkeypatch, 1, range(100))
    with pytest.raises(RankError, match=FLOOR):
        train_under_zero(recipe_of(tmp_path, 'full', 'zero2', **ZERO | HALF), tmp_path/'run')


# The quickstart

@pytest.mark.slow
def test_the_quickstart_learns_in_float16(tmp_path):
    "After two fifths of its steps, when 67 % have been measured."
    from transformers import AutoTokenizer

    from llm_workbook import answers, asset, exact_match, load_adapters
    recipe = shrink(Recipe.named('70b-2x24gb-qlora')).changed(
        {'optimizer.steps': 30, 'intervals.evaluation': 0, 'intervals.saving': 0, **HALF})
    held = check_recipe(recipe)[1][::2]
    run = training.fine_tune(recipe, tmp_path/'run', 600, live=False)
    assert run.metrics[-1]['loss_scale'] >= 1
    model = load_adapters(
        recipe.model.source, run.saved, recipe.method, recipe.precision, recipe.cluster.device)
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    score = exact_match(held, answers(model, tokenizer, held))
    print(score, run.metrics[-1])
    assert score.share >= 0.5
