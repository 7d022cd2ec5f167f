"""Lines every N steps and held-out losses: what they are the mean of, on any number of ranks, and
across a stop."""
import json
import os
import signal

import pytest
from trouble import slow_case
from trouble import small_recipe

from llm_workbook.training import watchdog as guards
from llm_workbook.training import fine_tune as training
from llm_workbook.parallel.ranks import RankError
from llm_workbook.release.scores import exact_match
from llm_workbook.training.resume import Preempted
from llm_workbook.training.run_directory import read_metrics

SPARSE = {
    'intervals.logging': 3, 'intervals.evaluation': 2, 'optimizer.steps': 8, 'intervals.saving': 0}


@pytest.fixture(scope='module')
# 23: it does not divide
def recipe(tmp_path_factory): return small_recipe(tmp_path_factory.mktemp('rows'), 23, **SPARSE)


def run(recipe, directory, **how):
    return training.fine_tune(recipe, directory, timeout_s=120, live=False, **how)


@pytest.fixture(scope='module')
def whole(recipe, tmp_path_factory): return run(recipe, tmp_path_factory.mktemp('whole')/'run')


def test_lines_come_for_the_first_step_every_third_and_the_last(recipe, whole, tmp_path):
    every = run(
        recipe.changed({'intervals.logging': 1, 'intervals.evaluation': 0}), tmp_path/'every'
    ).metrics
    losses = [row['loss'] for row in every]
    def mean(first, last):
        return pytest.approx(sum(losses[first - 1:last])/(last - first + 1), rel=1e-12)
    assert [(row['step'], row['loss']) for row in whole.metrics] == [
        (1, losses[0]),
        (3, mean(2, 3)),
        (6, mean(4, 6)),
        (8, mean(7, 8))]
    # And looking at held-out rows has changed no weight
    assert not (tmp_path/'every'/'evaluation.jsonl').exists()


def test_a_held_out_loss_is_the_mean_over_all_tokens_whatever_the_ranks(recipe, whole, tmp_path):
    assert [row['step'] for row in whole.evaluations] == [2, 4, 6, 8]
    assert {row['rows'] for row in whole.evaluations} == {23}
    one = recipe.changed(
        {'cluster.processes': 1, 'sharding.strategy': 'none', 'batch.accumulation': 2})
    alone = run(one, tmp_path/'one').evaluations
    assert [row['tokens'] for row in alone] == [row['tokens'] for row in whole.evaluations]
    assert [row['loss'] for row in alone] == pytest.approx(
        [row['loss'] for row in whole.evaluations], rel=1e-5)


def test_it_is_the_loss_that_transformers_gives(whole):
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(whole.saved)
    held = training.make_trainer(
        whole.recipe.changed({'sharding.strategy': 'none', 'cluster.processes': 1}),
        whole.directory, training.check_recipe(whole.recipe)[0], model, None,
        training.check_recipe(whole.recipe)[1]).held
    total = tokens = 0
    with torch.no_grad():
        for row in held:
            ids = torch.tensor([row['input_ids']])
            labels = torch.tensor([row['labels']])
            count = int((labels[:, 1:] != -100).sum())
            total = total + float(model(input_ids=ids, labels=labels).loss) * count
            tokens = tokens + count
    last = whole.evaluations[-1]
    assert (last['step'], last['tokens']) == (8, tokens)
    assert last['loss'] == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize('strategy', ['ddp', slow_case('zero3')])
def test_other_strategies_give_the_same(recipe, whole, tmp_path, strategy):
    other = run(recipe.changed({'sharding.strategy': strategy}), tmp_path/'other').evaluations
    assert [row['loss'] for row in other] == pytest.approx(
        [row['loss'] for row in whole.evaluations], rel=1e-4)


@pytest.mark.slow
def test_a_packed_base_is_untouched_by_evaluation(recipe, tmp_path):
    packed = recipe.changed(
        {'method.kind': 'qlora', 'precision.compute': 'bfloat16', 'optimizer.steps': 4})
    done = run(packed, tmp_path/'packed')  # Which compares the payload before and after
    assert [row['step'] for row in done.evaluations] == [2, 4]
    assert done.ranks[0]['payload']


@pytest.mark.parametrize(
    'given, share', [('yes', 1), ('Yes', 0), ('YES', 0), ('yes.', 0), ('yes …', 0), ('', 0)])
def test_an_exact_match_is_exact(given, share):
    row = {
        'messages': [{'role': 'user', 'content': 'Is it?'}, {'role': 'assistant', 'content': 'yes'}]
    }
    assert exact_match([row], [given]).share == share


def stop_after(monkeypatch, step):
    make = training.make_trainer
    def make_told(*args):
        from transformers import TrainerCallback
        class Told(TrainerCallback):
            def on_step_begin(self, args, state, control, **more):
                if (os.environ['RANK'], state.global_step + 1) == ('1', step):
                    os.kill(os.getpid(), signal.SIGTERM)
        trainer = make(*args)
        trainer.add_callback(Told())
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_told)


def lines(directory):
    rows = {name: read_metrics(directory/name) for name in ('metrics.jsonl', 'evaluation.jsonl')}
    return {
        name: [{key: value for key, value in row.items() if key != 'seconds'} for row in found]
        for name, found in rows.items()}


# In the middle of a line, once with a look at the held-out rows, once without
@pytest.mark.parametrize('step', [slow_case(4), 5])
@pytest.mark.slow
def test_a_run_that_was_stopped_writes_the_same_lines(recipe, whole, tmp_path, monkeypatch, step):
    with monkeypatch.context() as patch, pytest.raises(Preempted, match=f'step {step}'):
        stop_after(patch, step)
        run(recipe, tmp_path/'run')
    # Not committed
    with (tmp_path/'run'/'evaluation.jsonl').open('a') as file:
        file.write(json.dumps({'step': 6, 'loss': 0.0}) + '\n')
    run(recipe, tmp_path/'run', resume=True)
    assert lines(tmp_path/'run') == lines(whole.directory)


def test_without_held_out_rows_it_is_refused(recipe, tmp_path):
    rows = recipe.changed(
        {'data.source': f'{recipe.data.source}/train.jsonl', 'data.test_share': 0.0})
    with pytest.raises(ValueError, match='intervals.evaluation is 2, and no row is held out'):
        training.check_recipe(rows)


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_looks_at_held_out_rows_is_named(recipe, tmp_path, monkeypatch):
    make = training.make_trainer
    def make_hanging(*args):
        import time
        trainer = make(*args)
        def hang(layer, inputs):
            if not layer.training and os.environ['RANK'] == '1': time.sleep(1000)
        trainer.model.model.layers[1].register_forward_pre_hook(hang)
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_hanging)
    with pytest.raises(RankError) as caught: run(recipe, tmp_path/'run', step_timeout_s=10.0)
    assert 'ranks [1] stuck' in caught.value.log
    assert len(read_metrics(tmp_path/'run'/'metrics.jsonl')) == 1


def test_every_batch_of_held_out_rows_is_a_sign_of_life(recipe, tmp_path, monkeypatch):
    beat = guards.HangWatch.beat
    def noted(watch):
        with open(tmp_path/f'beats-{watch.rank}', 'a') as file: file.write('.')
        beat(watch)
    monkeypatch.setattr(guards.HangWatch, 'beat', noted)
    run(recipe.changed({'optimizer.steps': 2}), tmp_path/'run')
    # At the start, for each step, for each batch of its 12 rows
    assert len((tmp_path/'beats-0').read_text()) >= 1 + 2 + 12
