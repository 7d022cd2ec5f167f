"""Runs on packed rows learn what runs on the same rows alone learn, on any number of ranks.

Every step takes all rows, packed or not, so that a step has the same examples in both.
"""
import pytest
from trouble import fine_tune, slow_case, small_recipe

from llm_workbook.training import trainer_rows
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.training.fine_tune import check_recipe
from llm_workbook.training.packed_rows import fill_bins, pack_rows
from llm_workbook.training.run_directory import RunFiles, read_metrics

ROWS, STEPS = 16, 3
ALONE = {'cluster.processes': 1, 'sharding.strategy': 'none'}
PLAIN = {'batch.packing': False, 'batch.micro': 1}
# As in test_parity: float32, sums in another order. The base is untrained and attends to little: a
# leak moves its loss by 5e-4, and the norm of its gradient by more
LOSS, NORM = 1e-5, 1e-4


@pytest.fixture(scope='module')
def recipe(tmp_path_factory):
    "Rows that fill a number of bins that four divides; several examples in most of them."
    asked = small_recipe(
        tmp_path_factory.mktemp('rows'), ROWS, **{
            'optimizer.steps': STEPS, 'intervals.evaluation': 1, 'intervals.saving': 0})
    lengths = [len(row['input_ids']) for row in check_recipe(asked)[0]]
    for length in range(max(lengths), 3 * max(lengths)):
        bins = len(fill_bins(lengths, length))
        if bins % 4 == 0 and bins <= ROWS / 2: break
    asked = asked.changed({'batch.length': length, 'batch.packing': True})
    return asked.changed({'batch.accumulation': bins // 2})


def parts(recipe, **changes):
    "The recipe with `changes`, and as much accumulation as makes one step of all rows."
    changed = recipe.changed({name.replace('__', '.'): value for name, value in changes.items()})
    rows = 2 * recipe.batch.accumulation if changed.batch.packing else ROWS
    return changed.changed({
        'batch.accumulation': rows // (changed.cluster.ranks * changed.batch.micro)})


def run(recipe, directory): return fine_tune(recipe, directory/'run')


@pytest.fixture(scope='module')
def unpacked(recipe, tmp_path_factory):
    plain = parts(recipe.changed(ALONE | PLAIN))
    return run(plain, tmp_path_factory.mktemp('unpacked'))


def assert_equal_runs(packed, unpacked):
    assert len(packed.metrics) == STEPS
    for ours, theirs in zip(packed.metrics, unpacked.metrics, strict=True):
        assert ours['loss'] == pytest.approx(theirs['loss'], rel=LOSS)
        assert ours['grad_norm'] == pytest.approx(theirs['grad_norm'], rel=NORM)
    for ours, theirs in zip(packed.evaluations, unpacked.evaluations, strict=True):
        assert ours['loss'] == pytest.approx(theirs['loss'], rel=LOSS)
        assert (ours['rows'], ours['tokens']) == (theirs['rows'], theirs['tokens'])


@pytest.mark.parametrize('changes', [
    ALONE, ALONE | {'batch.micro': 2}, {},
    slow_case({'model.attention': 'eager', 'batch.micro': 2})],
    ids=['alone', 'alone, two rows a pass', 'two ranks', 'two ranks, two rows a pass, eager'])
def test_a_packed_run_learns_what_its_rows_learn_alone(recipe, unpacked, tmp_path, changes):
    packed = run(parts(recipe.changed(changes)), tmp_path)
    assert_equal_runs(packed, unpacked)


def test_tokens_of_packed_rows_are_counted_one_by_one(recipe, unpacked, tmp_path):
    packed = run(parts(recipe.changed({'batch.micro': 2, 'optimizer.steps': 2})), tmp_path)
    counted = [row['num_tokens'] for row in packed.metrics]
    assert counted == [row['num_tokens'] for row in unpacked.metrics][:2]
    ranks = [read_metrics(RunFiles(packed.directory).rank_metrics(rank)) for rank in (0, 1)]
    alone = read_metrics(RunFiles(unpacked.directory).rank_metrics(0))
    for step in range(2):
        assert sum(lines[step]['tokens'] for lines in ranks) == alone[step]['tokens']
        assert all(lines[step]['positions'] >= lines[step]['tokens'] for lines in ranks)
        assert all(lines[step]['row_tokens'] < lines[step]['row_positions'] for lines in ranks)


def test_a_run_in_which_rows_see_each_other_is_another_run(
    recipe, unpacked, tmp_path, monkeypatch
):
    def running_on(*arguments):
        packed = pack_rows(*arguments)
        for row in packed: row['position_ids'] = list(range(len(row['input_ids'])))
        return packed
    monkeypatch.setattr(trainer_rows, 'pack_rows', running_on)
    leaky = run(parts(recipe.changed(ALONE | {'intervals.evaluation': 0})), tmp_path)
    first, true = leaky.metrics[0], unpacked.metrics[0]
    assert abs(first['loss'] / true['loss'] - 1) > 20 * LOSS
    assert abs(first['grad_norm'] / true['grad_norm'] - 1) > 20 * NORM


def test_packed_rows_that_are_too_few_are_refused_before_anything_is_loaded(recipe):
    few = recipe.changed({'batch.accumulation': 2 * recipe.batch.accumulation})
    bins = 2 * recipe.batch.accumulation
    with pytest.raises(ValueError, match=f'{bins} packed rows of {ROWS} examples are fewer than'):
        check_recipe(few)


def packed_here(recipe):
    "Rows as a rank reads and packs them."
    rows = check_recipe(recipe)[0]
    numbered = [row | {'row': number} for number, row in enumerate(rows)]
    return pack_rows(numbered, recipe.batch.length, recipe.seed)


def test_every_rank_packs_the_same(recipe):
    packed = run_ranks(packed_here, 2, (recipe,), 120)
    assert packed[0] == packed[1] != packed_here(recipe.changed(seed=recipe.seed + 1))
    assert sorted(number for row in packed[0] for number in row['rows']) == list(range(ROWS))
