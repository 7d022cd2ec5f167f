"""Several sources in one run: who trains how often, held-out losses told apart, and a mix that has
changed."""
import json
import math

import pytest
from test_same_run import stopped_run
from trouble import fine_tune, small_recipe

from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Recipe
from llm_workbook.launching.node_report import _sources
from llm_workbook.training.classifier import class_names, class_rows
from llm_workbook.training import fine_tune as training
from llm_workbook.training.fine_tune import check_recipe
from llm_workbook.training.packed_rows import fill_bins
from llm_workbook.training.run_directory import begin_run

ALONE = {'cluster.processes': 1, 'sharding.strategy': 'none', 'batch.accumulation': 2}


@pytest.fixture(scope='module')
def recipe(tmp_path_factory):
    "18 rows, of two to one: 24 rows of conversations, and 5 pairs of which one is held out."
    folder = tmp_path_factory.mktemp('mix')
    plain = small_recipe(folder, **{'optimizer.steps': 9, 'intervals.evaluation': 9})
    pairs = [{'prompt': f'What follows {n}?', 'completion': str(n + 1)} for n in range(5)]
    (folder/'pairs.jsonl').write_text('\n'.join(map(json.dumps, pairs)))
    mix = [
        {'source': plain.data.source, 'weight': 2},
        {'source': str(folder/'pairs.jsonl'), 'format': 'prompt_completion', 'test_share': 0.2}]
    return plain.changed({'data.source': None, 'data.mix': mix})


@pytest.fixture(scope='module')
def whole(recipe, tmp_path_factory):
    return fine_tune(recipe, tmp_path_factory.mktemp('whole')/'run')


def names(rows): return [row['source'] for row in rows]


def test_rows_train_in_the_proportions_of_the_weights(recipe):
    rows, held = check_recipe(recipe)
    assert (names(rows).count('rows'), names(rows).count('pairs.jsonl')) == (12, 6)
    assert (names(held).count('rows'), names(held).count('pairs.jsonl')) == (24, 1)
    short = [row for row in rows if row['source'] == 'pairs.jsonl']
    assert len({id(row) for row in short}) == 4  # All four, two of them twice
    assert check_recipe(recipe)[0] == rows


def test_a_small_source_that_comes_too_often_is_a_warning(recipe):
    often = recipe.changed({'optimizer.steps': 36})
    with pytest.warns(UserWarning, match='pairs.jsonl: each of its 4 rows is seen 6.0 times'):
        check_recipe(often)


def test_the_held_out_loss_is_told_by_source(recipe, whole):
    [line] = whole.evaluations
    assert set(line['sources']) == {'rows', 'pairs.jsonl'}
    parts = list(line['sources'].values())
    assert [part['rows'] for part in parts] == [24, 1]
    assert sum(part['tokens'] for part in parts) == line['tokens']
    total = sum(part['loss'] * part['tokens'] for part in parts)
    assert line['loss'] == pytest.approx(total / line['tokens'], rel=1e-9)
    for part in (line, *parts): assert part['perplexity'] == pytest.approx(math.exp(part['loss']))


def test_one_rank_trains_on_the_same_and_judges_the_same(recipe, whole, tmp_path):
    alone = fine_tune(recipe.changed(ALONE), tmp_path/'run')
    for name, part in whole.evaluations[0]['sources'].items():
        other = alone.evaluations[0]['sources'][name]
        assert other['tokens'] == part['tokens']
        assert other['loss'] == pytest.approx(part['loss'], rel=1e-4)
    assert [row['loss'] for row in alone.metrics] == pytest.approx(
        [row['loss'] for row in whole.metrics], rel=1e-4)


def test_another_mix_does_not_go_on_as_the_same_run(recipe, tmp_path):
    begin_run(recipe, tmp_path/'run')
    mix = recipe.model_dump()['data']['mix']
    other = recipe.changed({'data.mix': [mix[0] | {'weight': 3.0}, mix[1]]})
    with pytest.raises(ValueError, match='data.mix was '): begin_run(other, tmp_path/'run', True)


def test_a_mix_of_more_steps_is_told_that_they_draw_other_rows(recipe, tmp_path):
    constant = recipe.changed({
        **ALONE, 'optimizer.schedule': 'constant', 'optimizer.warmup': 0.0, 'optimizer.steps': 6})
    stopped_run(constant, tmp_path/'run')
    more = constant.changed({'optimizer.steps': 9})
    rows = training._rows_facts(more, *check_recipe(more))
    words = 'training rows: 12 then and 18 now.*a mix draws .* put optimizer.steps back to 6'
    with pytest.raises(ValueError, match=words): begin_run(more, tmp_path/'run', True, rows)


def test_labels_of_each_source_lead_to_the_same_classes(tmp_path):
    (tmp_path/'stars.csv').write_text('text,stars\nFine.,5\nBad.,1\nGreat.,4\n')
    (tmp_path/'moods.tsv').write_text('review\tmood\nI like it.\tup\nI do not.\tdown\n')
    moods = {
        'source': str(tmp_path/'moods.tsv'), 'text_column': 'review', 'label_column': 'mood',
        'labels': {'down': 'bad', 'up': 'good'}}
    recipe = Recipe(
        name='judge', model={'source': 'tiny-base', 'head': 'classification'},
        cluster={'processes': 1}, sharding={'strategy': 'none'}, optimizer={'steps': 10},
        data={
            'format': 'classification', 'text_column': 'text', 'label_column': 'stars',
            'labels': {1: 'bad', 4: 'good', 5: 'good'}, 'test_share': 0.0,
            'mix': [{'source': str(tmp_path/'stars.csv')}, moods]})
    rows, _ = class_rows(recipe)
    assert class_names(recipe) == ('bad', 'good')
    found = {row['text']: row['label'] for row in rows}
    assert found == {'Fine.': 1, 'Bad.': 0, 'Great.': 1, 'I like it.': 1, 'I do not.': 0}
    assert names(rows).count('stars.csv') == names(rows).count('moods.tsv')


def test_a_fault_in_a_mix_is_named_with_its_line(tmp_path):
    text = (
        'version: 2\nname: x\nmodel: {source: tiny-base}\ndata:\n  mix:\n'
        '  - source: a.jsonl\n    weight: 3\n  - source: b.jsonl\n    weight: 0\n')
    with pytest.raises(RecipeError) as caught: Recipe.parse(text)
    assert [(p.path, p.line) for p in caught.value.problems] == [('data.mix.1.weight', 9)]


def test_a_node_says_what_each_source_leads_to(recipe, tmp_path):
    found = _sources(recipe, tmp_path)
    assert [name for name in found if name.startswith('data.source')] == [
        f'data.source {part.source}' for part in recipe.data.mix]


def test_a_packed_mix_has_rows_for_every_step(recipe):
    packed = recipe.changed({
        **ALONE, 'batch.packing': True, 'batch.micro': 2, 'batch.length': 64, 'optimizer.steps': 2})
    rows, _ = check_recipe(packed)
    shares = [names(rows).count(name) / len(rows) for name in ('rows', 'pairs.jsonl')]
    assert shares == pytest.approx([2 / 3, 1 / 3], abs=.02)
    bins = fill_bins([len(row['input_ids']) for row in rows], 64)
    assert abs(len(bins) - 2 * packed.global_batch) <= 1
