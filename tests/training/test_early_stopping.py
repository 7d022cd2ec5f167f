"""A run that ends early: at the same step on every rank, with the weights that were asked for, and
once it has ended it stays so."""
import os
import shutil
import signal

import pytest
from safetensors.torch import load_file
from trouble import disturb, fine_tune, slow_case, small_recipe

from llm_workbook.training import fine_tune as training
from llm_workbook.training import trainer as module
from llm_workbook.training.resume import Preempted
from llm_workbook.training.run_directory import mark_run, run_stage, run_state, run_status

LOSSES = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.25, 5: 1.0}
EARLY = {
    'optimizer.steps': 8, 'optimizer.schedule': 'constant', 'optimizer.warmup': 0.0,
    'intervals.evaluation': 1, 'intervals.saving': 1, 'intervals.patience': 2,
    'intervals.keep': 'best'}


@pytest.fixture(scope='module')
def recipe(tmp_path_factory): return small_recipe(tmp_path_factory.mktemp('rows'), **EARLY)


@pytest.fixture
def given(monkeypatch):
    "Let held-out rows have the losses of `LOSSES`, whatever the weights."
    def evaluate(trainer, batch_size): return {'loss': LOSSES[trainer.state.global_step]}
    monkeypatch.setattr(module, '_evaluate', evaluate)


def weights(directory):
    [file] = directory.glob('*.safetensors')
    return load_file(file)


def are_equal(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize('changes', [
    {}, slow_case({'method.kind': 'qlora', 'precision.compute': 'bfloat16'}),
    slow_case({'sharding.strategy': 'ddp'})])
def test_it_ends_two_evaluations_after_the_best_and_keeps_the_best(
    recipe, given, tmp_path, changes
):
    asked = recipe.changed(changes)
    run = fine_tune(asked, tmp_path/'run')
    assert [row['step'] for row in run.metrics] == [1, 2, 3, 4]
    state = run_state(run.directory)
    assert (state['state'], state['step']) == ('finished', 4)
    assert state['reason'] == (
        '2 evaluations without a lower held-out loss than 2.0000 of step 2; '
        'the result is that of step 2')
    assert run_stage(run.directory)['reason'] == state['reason']
    code, text = run_status(run.directory)
    assert code == 0 and state['reason'] in text
    short = fine_tune(asked.changed({'optimizer.steps': 2}), tmp_path/'short')
    assert are_equal(weights(run.saved), weights(short.saved))


@pytest.mark.slow
def test_the_last_weights_are_kept_unless_the_best_are_asked_for(recipe, given, tmp_path):
    last = recipe.changed({'intervals.keep': 'last', 'intervals.saving': 0})
    run = fine_tune(last, tmp_path/'run')
    short = fine_tune(last.changed({'optimizer.steps': 4}), tmp_path/'short')
    assert run_state(run.directory)['step'] == 4
    assert are_equal(weights(run.saved), weights(short.saved))


def no_rank(*args, **how): raise AssertionError('ranks were started')


def test_a_run_that_has_ended_does_nothing_more(recipe, given, tmp_path, monkeypatch):
    run = fine_tune(recipe, tmp_path/'run')
    monkeypatch.setattr(training, 'notebook_ranks', no_rank)
    again = fine_tune(recipe, tmp_path/'run', resume=True)
    assert again.metrics == run.metrics
    shutil.rmtree(run.saved)
    with pytest.raises(ValueError, match='holds no weights'):
        fine_tune(recipe, tmp_path/'run', resume=True)


@pytest.mark.slow
def test_one_that_is_killed_before_its_result_is_saved_takes_no_other_step(
    recipe, given, tmp_path
):
    run = fine_tune(recipe, tmp_path/'run')
    before, metrics = weights(run.saved), run.metrics
    shutil.rmtree(run.saved)
    mark_run(run.directory, 'running', 4)  # As a kill leaves it
    again = fine_tune(recipe, tmp_path/'run', resume=True)
    assert again.metrics == metrics
    assert are_equal(weights(again.saved), before)
    assert run_state(run.directory)['step'] == 4


@pytest.mark.slow
@pytest.mark.parametrize('strategy, best', [('fsdp2', 2), ('ddp', 2), ('fsdp2', 4)])
def test_the_best_step_of_two_ranks_comes_back_on_one(
    recipe, tmp_path, monkeypatch, strategy, best
):
    "The run goes on as one rank after step 3: the best step is of two ranks, or of the one."
    def evaluate(trainer, batch_size): return {'loss': abs(trainer.state.global_step - best)}
    monkeypatch.setattr(module, '_evaluate', evaluate)
    asked = recipe.changed({
        'sharding.strategy': strategy, 'optimizer.steps': 6, 'intervals.patience': 0})
    with monkeypatch.context() as patch:
        disturb(patch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Preempted): fine_tune(asked, tmp_path/'run')
    alone = asked.changed({'cluster.processes': 1, 'batch.accumulation': 2})
    run = fine_tune(alone, tmp_path/'run', resume=True)
    assert [row['step'] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert run_state(run.directory)['reason'] == f'the result is that of step {best}'
    short = fine_tune(asked.changed({'optimizer.steps': best}), tmp_path/'short')
    given, wanted = weights(run.saved), weights(short.saved)
    assert given.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (given[name] - tensor).abs().max() < 1e-6, name  # Of one rank, in another order
    assert best == 4 or are_equal(given, wanted)


@pytest.mark.slow
def test_a_classifier_ends_early_too(tmp_path):
    lines = ['text,stars', *(f'Number {n} is fine.,{1 + n % 5}' for n in range(30))]
    (tmp_path/'rows.csv').write_text('\n'.join(lines) + '\n')
    recipe = small_recipe(tmp_path, **EARLY | {
        'model.head': 'classification', 'batch.micro': 2,
        'data': {
            'source': str(tmp_path/'rows.csv'), 'format': 'classification',
            'labels': {1: 'bad', 2: 'bad', 3: 'good', 4: 'good', 5: 'good'}},
        'optimizer.learning_rate': 0.0})  # So no evaluation is better than the first
    run = fine_tune(recipe, tmp_path/'run')
    assert [line['step'] for line in run.evaluations] == [1, 2, 3]
    state = run_state(run.directory)
    assert (state['step'], state['reason'][:13]) == (3, '2 evaluations')
    assert state['reason'].endswith('the result is that of step 1')
