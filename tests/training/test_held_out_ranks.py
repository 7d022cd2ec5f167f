"""A held-out loss is one number, however many ranks share the rows and however they are batched.

No step changes a weight here (the rate is 0), so every run judges the same model.
"""
import pytest
from trouble import fine_tune, slow_case, small_recipe

from llm_workbook.files import asset
from llm_workbook.training.run_directory import RunFiles

REVIEWS = {
    'data.format': 'classification', 'data.text_column': 'text', 'data.label_column': 'stars',
    'data.labels': {1: 'bad', 2: 'bad', 3: None, 4: 'good', 5: 'good'},
    'model.head': 'classification'}
PAIRS = {'data.format': 'preference', 'method.objective': 'dpo'}
# Ranks and rows of a batch. No product divides the number of held-out rows
QUICK, OTHERS = (3, 2), [(1, 2), (1, 5), (2, 1), (2, 2), (3, 1), (3, 5)]


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    return small_recipe(tmp_path_factory.mktemp('rows'), 23, **{
        'batch.length': 128, 'intervals.evaluation': 1, 'intervals.saving': 0,
        'optimizer.steps': 1, 'optimizer.learning_rate': 0.0})


def first_rows(folder, name, train, test):
    for split, count in ('train', train), ('test', test):
        lines = (asset(name)/f'{split}.jsonl').read_text().splitlines(keepends=True)
        (folder/f'{split}.jsonl').write_text(''.join(lines[:count]))
    return {'data.source': str(folder)}


def judged(recipe, directory, ranks, micro, **changes):
    strategy = 'none' if ranks == 1 else 'fsdp2'
    recipe = recipe.changed({
        'cluster.processes': ranks, 'batch.micro': micro, 'sharding.strategy': strategy, **changes})
    [line] = fine_tune(recipe, directory).evaluations
    return line


@pytest.fixture(scope='module')
def answers(plain, tmp_path_factory):
    return judged(plain, tmp_path_factory.mktemp('one')/'run', 1, 1)


@pytest.mark.parametrize('ranks,micro', [QUICK, *(slow_case(*case) for case in OTHERS)])
@pytest.mark.parametrize('packing', [False, True])
def test_answers(plain, answers, tmp_path, ranks, micro, packing):
    changes = {'batch.packing': packing, 'batch.length': 36}  # The longest row: many packed ones
    line = judged(plain, tmp_path/'run', ranks, micro, **changes)
    assert (line['rows'], line['tokens']) == (23, answers['tokens'])
    assert line['loss'] == pytest.approx(answers['loss'], rel=1e-6)


@pytest.fixture(scope='module')
def classes(plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp('reviews')
    recipe = plain.changed(REVIEWS | first_rows(folder, 'sample-reviews', 60, 23))
    return recipe, judged(recipe, folder/'run', 1, 1)


@pytest.mark.parametrize('ranks,micro', [QUICK, *(slow_case(*case) for case in OTHERS)])
def test_classes(classes, tmp_path, ranks, micro):
    recipe, one = classes
    line = judged(recipe, tmp_path/'run', ranks, micro)
    assert (line['rows'], line['counts']) == (one['rows'], one['counts'])
    assert line['loss'] == pytest.approx(one['loss'], rel=1e-6)


@pytest.fixture(scope='module')
def pairs(plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp('pairs')
    recipe = plain.changed(PAIRS | first_rows(folder, 'sample-preferences', 30, 13))
    return recipe, judged(recipe, folder/'run', 1, 1), reference(folder/'run')


def reference(directory):
    "Log-probabilities of both answers of the held-out pairs: all margins are 0 at the rate 0."
    from safetensors.torch import load_file
    return load_file(RunFiles(directory).reference)['held']


@pytest.mark.parametrize('ranks,micro', [QUICK, *(slow_case(*case) for case in OTHERS)])
def test_pairs(pairs, tmp_path, ranks, micro):
    recipe, one, expected = pairs
    line = judged(recipe, tmp_path/'run', ranks, micro)
    assert (line['pairs'], line['loss']) == (13, pytest.approx(one['loss'], abs=1e-6))
    found = reference(tmp_path/'run')
    assert found.flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=1e-5)
    assert len({round(value, 3) for value in found.flatten().tolist()}) > 20, 'pairs are alike'
