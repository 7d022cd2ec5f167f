"""Rows of like length train together, each once in a pass, on all ranks and after a stop."""
import json
import random
from collections import Counter

import pytest
from trouble import fine_tune, slow_case, small_recipe

from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Recipe
from llm_workbook.files import asset
from llm_workbook.model.quantize import load_base
from llm_workbook.parallel.ranks import RankError
from llm_workbook.plan.ledger import memory
from llm_workbook.rehearsal.program import rehearsable
from llm_workbook.training import trainer as trainers
from llm_workbook.training.classifier import class_tokenizer, token_rows
from llm_workbook.training.fine_tune import check_recipe
from llm_workbook.training.grouped_rows import (
    GroupedSampler, grouped_order, padding_share, row_lengths)
from llm_workbook.training.run_directory import RunFiles, mark_run, read_metrics
from llm_workbook.training.trainer import make_trainer

ROWS = 32
GROUPED = {'batch.group_by_length': True}
ALONE = {'cluster.processes': 1, 'sharding.strategy': 'none'}


@pytest.fixture(scope='module')
def recipe(tmp_path_factory):
    "Two ranks, two rows a pass, two passes a step: groups of 8, four steps for all rows."
    asked = small_recipe(tmp_path_factory.mktemp('rows'), ROWS, **{
        'batch.micro': 2, 'batch.accumulation': 2, 'optimizer.steps': 6, 'data.test_share': 0.0})
    return asked.changed(GROUPED)


def positions(run):
    "Positions and tokens that all ranks computed in each step."
    ranks = [read_metrics(RunFiles(run.directory).rank_metrics(rank))
             for rank in range(run.recipe.cluster.ranks)]
    return [tuple(sum(line[name] for line in lines) for name in ('positions', 'tokens'))
            for lines in zip(*ranks, strict=True)]


def expected(recipe, rows=None):
    "Positions and tokens of each step, as the order of the rows gives them."
    lengths, micro = row_lengths(rows or check_recipe(recipe)[0]), recipe.batch.micro
    group, found = recipe.global_batch, []
    for step in range(recipe.optimizer.steps):
        epoch, place = divmod(step, ROWS // group)
        order = grouped_order(lengths, group, recipe.seed, epoch)[place * group:][:group]
        sizes = [lengths[row] for row in order]
        widths = [max(sizes[first:first + micro]) for first in range(0, group, micro)]
        found.append((micro * sum(widths), sum(sizes)))
    return found


@pytest.mark.parametrize('changes', [
    {}, ALONE,
    slow_case({'sharding.strategy': 'zero3', 'zero.persistence_threshold': 1000})],
    ids=['two ranks', 'alone', 'zero3'])
def test_a_run_takes_the_rows_in_the_order_that_was_promised(recipe, tmp_path, changes):
    asked = recipe.changed(changes)
    run = fine_tune(asked, tmp_path/'run')
    assert positions(run) == expected(asked)
    settings = json.loads(RunFiles(run.directory).effective.read_text())['settings']
    found = {setting['name']: setting['found'] for setting in settings}
    assert found['batch.group_by_length'] is True


def test_a_run_of_another_order_is_refused_before_its_first_step(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(trainers, 'group_loader', lambda *_: None)
    with pytest.raises(RankError, match='batch.group_by_length'):
        fine_tune(recipe.changed(ALONE), tmp_path/'run')


def test_a_run_that_goes_on_in_its_second_pass_takes_what_is_left_of_it(recipe, tmp_path):
    "accelerate tells the number of a pass to few samplers when it passes over rows."
    longer = recipe.changed({'optimizer.steps': 8, 'optimizer.schedule': 'constant',
                             'optimizer.warmup': 0.0, 'intervals.saving': 2})
    fine_tune(longer.changed({'optimizer.steps': 6}), tmp_path/'run')
    mark_run(tmp_path/'run', 'preempted', 6)
    run = fine_tune(longer, tmp_path/'run', resume=True)
    assert [line['step'] for line in run.metrics] == list(range(1, 9))
    assert positions(run) == expected(longer)


@pytest.fixture(scope='module')
def judge(recipe, tmp_path_factory):
    "Reviews under a head of two classes, which the plain loop trains."
    folder = tmp_path_factory.mktemp('reviews')
    lines = (asset('sample-reviews')/'train.jsonl').read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"stars": 3' not in line][:ROWS]
    (folder/'train.jsonl').write_text(''.join(kept))
    labels = {1: 'negative', 2: 'negative', 4: 'positive', 5: 'positive'}
    return recipe.changed({
        'model.head': 'classification', 'data.source': str(folder), 'data.text_column': 'text',
        'data.format': 'classification', 'data.label_column': 'stars', 'data.labels': labels})


@pytest.mark.parametrize('changes', [ALONE, slow_case({})], ids=['alone', 'two ranks'])
def test_the_plain_loop_takes_this_order_too(judge, tmp_path, changes):
    asked = judge.changed(changes)
    run = fine_tune(asked, tmp_path/'run')
    rows = token_rows(asked, check_recipe(asked)[0], class_tokenizer(asked))
    assert positions(run) == expected(asked, rows)


def test_pairs_are_as_long_as_their_longer_answer(recipe, tmp_path):
    pairs = recipe.changed(ALONE | {
        'method.objective': 'dpo', 'data.source': 'sample-preferences', 'batch.length': 96,
        'data.format': 'preference', 'optimizer.steps': 1})
    run = fine_tune(pairs, tmp_path/'run')
    lengths = row_lengths(check_recipe(pairs)[0])
    order = grouped_order(lengths, pairs.global_batch)[:pairs.global_batch]
    widths = [max(lengths[row] for row in order[first:first + 2]) for first in (0, 2)]
    assert [places for places, _ in positions(run)] == [4 * sum(widths)]


def test_no_row_is_lost_or_there_twice_whatever_the_rows():
    draw = random.Random(1)
    for _ in range(200):
        rows, group = draw.randrange(0, 90), draw.randrange(1, 20)
        lengths = [draw.randrange(1, 300) for _ in range(rows)]
        order = grouped_order(lengths, group, draw.randrange(5), draw.randrange(5))
        assert Counter(order) == Counter(range(rows))
        if rows >= group: assert lengths[order[0]] == max(lengths)


def test_every_pass_and_seed_has_an_order_of_its_own():
    lengths = list(range(1, 65))
    places = [(seed, epoch) for seed in range(3) for epoch in range(3)]
    orders = {tuple(grouped_order(lengths, 4, *place)) for place in places}
    assert len(orders) == 9
    sampler = GroupedSampler(lengths, 4)
    first = list(sampler)
    sampler.set_epoch(1)
    assert first != list(sampler) == grouped_order(lengths, 4, 0, 1)


def test_the_plan_is_that_of_the_longest_row_either_way():
    plain = Recipe.named('8b-1x24gb-qlora')
    assert not plain.batch.packing
    grouped = plain.changed(GROUPED)
    assert memory(grouped).total('step') == memory(plain).total('step')
    assert rehearsable(grouped)[0] == rehearsable(plain)[0]  # It plays rows of one length


def test_a_trainer_that_is_used_by_itself_groups_rows_too(recipe, tmp_path):
    asked = recipe.changed(ALONE | {'optimizer.steps': 1})
    rows = check_recipe(asked)[0]
    base = load_base(asked.model.source, asked.method, asked.precision, 'cpu')
    trainer, widths = make_trainer(asked, tmp_path, rows, base), []
    step = trainer.training_step
    def watched(model, inputs, *more):
        widths.append(inputs['input_ids'].shape[1])
        return step(model, inputs, *more)
    trainer.training_step = watched
    trainer.train()
    lengths = row_lengths(rows)
    first = grouped_order(lengths, asked.global_batch)[:asked.global_batch]
    assert widths == [max(lengths[row] for row in first[place:place + 2]) for place in (0, 2)]


def test_padding_falls_to_little_where_lengths_vary():
    draw = random.Random(2)
    lengths = [max(1, round(draw.lognormvariate(5, 1))) for _ in range(2000)]
    order = grouped_order(lengths, 64)
    assert padding_share(lengths, order, 8) < .2 * padding_share(lengths, range(2000), 8)


def test_packed_rows_are_not_grouped(recipe):
    with pytest.raises(RecipeError, match='packed-rows-need-no-groups'):
        recipe.changed({'batch.packing': True})
