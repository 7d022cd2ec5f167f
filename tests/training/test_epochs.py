"""Passes over the rows: turned into steps where the rows are known, refused beside steps, followed
by the rate, the directory and a start that goes on."""
import json
import subprocess
import sys
from math import ceil

import pytest
from trouble import fine_tune, slow_case, small_recipe

from llm_workbook.config.document import RecipeError
from llm_workbook.config.passes import in_steps, steps_of_pass
from llm_workbook.config.recipe import Recipe, shrink
from llm_workbook.launching.render import check_rendered, render
from llm_workbook.plan.estimate import estimate
from llm_workbook.plan.ledger import memory
from llm_workbook.plan.panel import panel_state
from llm_workbook.training.epochs import count_rows, note_epochs, noted_steps, rows_of_pass
from llm_workbook.training.fine_tune import check_recipe
from llm_workbook.training.run_directory import RunFiles, rate_schedule
from llm_workbook.training.trainer_rows import trainer_table

PASSES = {'optimizer.epochs': 0.5, 'optimizer.steps': None}


@pytest.fixture(scope='module')
def recipe(tmp_path_factory): return small_recipe(tmp_path_factory.mktemp('rows'), **PASSES)


def test_a_run_has_the_steps_of_its_passes_and_writes_both_down(recipe, tmp_path):
    rows = count_rows(recipe)
    steps = ceil(.5 * steps_of_pass(recipe, rows))
    run = fine_tune(recipe, tmp_path/'run')
    files = RunFiles(run.directory)
    assert run.recipe.optimizer.steps == run.metrics[-1]['step'] == steps
    assert Recipe.load(files.recipe).optimizer.steps == steps
    assert json.loads(files.epochs.read_text()) == {'epochs': .5, 'rows': rows, 'steps': steps}
    again = fine_tune(recipe, tmp_path/'run', resume=True)  # Finished: nothing is left to do
    assert again.ranks == [] and noted_steps(run.directory, recipe) == run.recipe
    with pytest.raises(ValueError, match='optimizer.steps was'):
        fine_tune(recipe.changed({'optimizer.epochs': 2.0}), tmp_path/'run', resume=True)


def test_a_rendered_recipe_of_passes_starts_where_it_lies(tmp_path, monkeypatch):
    for name in ('RANK', 'WORLD_SIZE'): monkeypatch.delenv(name, raising=False)
    alone = {'cluster.processes': 1, 'sharding.strategy': 'none', 'sharding.loading': 'every_rank'}
    recipe = small_recipe(tmp_path, **PASSES, **alone)
    file = render(recipe, tmp_path/'run').files['recipe.yaml']
    command = [sys.executable, '-m', 'llm_workbook', 'train', str(file), '--directory', file.parent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert fine_tune(recipe, file.parent, resume=True).ranks == []  # It is finished
    steps = in_steps(recipe, count_rows(recipe)).optimizer.steps
    assert Recipe.load(file) == recipe.changed(
        {'optimizer.epochs': None, 'optimizer.steps': steps})
    assert check_rendered(file.parent).recipe == recipe
    assert render(recipe, file.parent).recipe == recipe  # It is ours: nothing is refused
    with pytest.raises(ValueError, match='optimizer.steps was'):
        fine_tune(recipe.changed({'optimizer.epochs': 2.0}), file.parent, resume=True)


def test_plain_steps_leave_no_file_of_passes(recipe, tmp_path):
    note_epochs(tmp_path, in_steps(recipe, 8), 8)
    assert not RunFiles(tmp_path).epochs.exists()
    note_epochs(tmp_path, recipe, 8)
    assert RunFiles(tmp_path).epochs.exists()


@pytest.mark.parametrize('micro', [slow_case(1), 3])
@pytest.mark.slow
def test_packed_rows_are_counted_as_they_train(micro):
    packs = shrink(Recipe.named('70b-2x24gb-qlora')).changed(
        {'batch.packing': True, 'batch.length': 512, 'batch.micro': micro})
    rows, _ = check_recipe(packs)
    table = trainer_table(rows, ('input_ids', 'labels'), packs, packs.batch.length)
    assert rows_of_pass(packs, rows) == len(table) < len(rows)
    assert count_rows(packs) == len(table)


def test_nothing_takes_other_steps_in_the_place_of_those_that_are_not_known(recipe):
    for use in (rate_schedule, estimate):
        with pytest.raises(RecipeError, match='the number of rows that train'):
            use(recipe)
    state = panel_state({}, Recipe.named('70b-2x24gb-qlora').changed(PASSES))
    assert not state.fits and 'the number of rows' in state.errors[0]


def test_a_plan_with_rows_follows_the_steps_of_the_passes(recipe):
    passes = Recipe.named('70b-2x24gb-qlora').changed(PASSES | {'optimizer.epochs': 3.0})
    plan = estimate(passes, rows=1000)
    assert plan.recipe.optimizer.steps == 3 * ceil(1000 / passes.global_batch)
    assert plan.hours * 3600 == pytest.approx(plan.recipe.optimizer.steps * plan.step.step_s)


def test_bytes_need_no_rows_but_for_checkpoints_and_these_are_the_most():
    passes = Recipe.named('70b-2x8-a100-80-full').changed(PASSES)
    unknown, short, long = (
        memory(one) for one in (passes, in_steps(passes, 16), in_steps(passes, 10**6)))
    assert unknown.total('step') == short.total('step') == long.total('step')
    kept = [ledger.total('save', 'disk') for ledger in (short, unknown, long)]
    assert kept[0] < kept[1] == kept[2]


@pytest.mark.parametrize('beside', [1, 50, 100])
def test_steps_beside_passes_are_refused_even_if_they_are_the_default(beside):
    with pytest.raises(RecipeError, match=f'stands beside steps {beside}: keep one'):
        Recipe.named('reviews-qlora').changed(
            {'optimizer.epochs': 1.0, 'optimizer.steps': beside})


def test_a_recipe_with_passes_survives_its_file(recipe, tmp_path):
    assert Recipe.load(recipe.save(tmp_path/'recipe.yaml')) == recipe
    assert 'steps:' not in recipe.dump()
    assert recipe.changed(seed=1).optimizer.epochs == .5
    assert shrink(recipe).optimizer.epochs is None
