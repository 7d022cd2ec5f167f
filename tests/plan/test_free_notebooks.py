"""The recipes for two T4 of a free notebook: they fit the cards, the host, the disk that is kept
and, start after start, the hours of a session."""
import pytest

from llm_workbook.config.document import RecipeError
from llm_workbook.config.hardware import node as find_node
from llm_workbook.config.recipe import Recipe
from llm_workbook.plan.estimate import estimate
from llm_workbook.plan.runbook import run_figures
from llm_workbook.training.watchdog import Preemption

NAMES = '8b-2x16gb-qlora', '14b-2x16gb-qlora'
KEPT_B, SESSION_H, HOST_B = 20 * 10**9, 12, 30 * 2**30  # As Kaggle gives them


@pytest.fixture(params=NAMES)
def recipe(request): return Recipe.named(request.param)


def test_it_fits_the_cards_and_the_host_with_its_range(recipe):
    plan = estimate(recipe)
    assert plan.outcome == 'fits'
    assert plan.ranges['gpu'].high <= plan.node.gpu.memory_b
    assert plan.node.memory_b == HOST_B
    assert plan.ranges['host'].high < HOST_B / 4


def test_what_is_kept_fits_the_disk_that_is_kept_and_the_base_another(recipe):
    ledger = estimate(recipe).ledger
    assert ledger.on_node('save', 'disk') < KEPT_B / 4
    assert ledger.on_node('load', 'disk') < find_node('kaggle-2x-t4').disk_b - KEPT_B


def test_a_32b_is_not_said_to_fit():
    larger = Recipe.named('14b-2x16gb-qlora').changed({'model.source': 'Qwen/Qwen3-32B'})
    plan = estimate(larger, find_node('kaggle-2x-t4').changed(disk_b=10**12))
    assert plan.outcome == 'fits if'
    assert plan.rooms[0].need_b > plan.node.gpu.memory_b


def test_a_start_ends_within_the_session_and_a_step_and_a_save_later(recipe):
    plan = estimate(recipe)
    spare_s = 3600 * (SESSION_H - recipe.intervals.session_h)
    assert recipe.intervals.session_s == 3600 * recipe.intervals.session_h
    assert plan.ranges['step_s'].high < spare_s / 20
    assert recipe.intervals.saving * plan.step.step_s < 3600


@pytest.mark.parametrize('name, starts', zip(NAMES, '12'))
def test_the_figures_say_how_many_starts_it_takes(name, starts):
    figures = {row.what: row.figure for row in run_figures(Recipe.named(name))}
    assert figures['starts of 11 h, loading not counted'] == starts
    endless = run_figures(Recipe.named(name).changed({'intervals.session_h': 0}))
    assert not any('starts' in row.what for row in endless)


@pytest.mark.parametrize('changes, rule', [
    ({'precision.compute': 'bfloat16', 'precision.loss_scale': 'none',
      'method.storage': 'bfloat16'}, 'bf16-needs-units'),
    ({'model.attention': 'flash'}, 'flash-needs-capability-8'),
    ({'precision.loss_scale': 'none'}, 'fp16-needs-loss-scale')])
def test_what_a_t4_cannot_do_is_refused(recipe, changes, rule):
    with pytest.raises(RecipeError, match=rule): estimate(recipe.changed(changes))


def test_another_storage_would_not_be_sharded():
    with pytest.raises(RecipeError, match='qlora-storage-shards'):
        Recipe.named('14b-2x16gb-qlora').changed({'method.storage': 'uint8'})


@pytest.mark.parametrize('hours', [-1, float('nan'), float('inf')])
def test_hours_of_a_session_are_a_number_from_zero(hours):
    with pytest.raises(RecipeError, match='intervals.session_h'):
        Recipe.named(NAMES[0]).changed({'intervals.session_h': hours})


def test_no_limit_is_none_and_a_limit_of_nothing_is_refused():
    assert Recipe.named('8b-1x24gb-qlora').intervals.session_s is None
    with pytest.raises(ValueError, match='limit_s must be more than 0 seconds, not -2'):
        Preemption(limit_s=-2)


def test_an_inner_block_may_end_sooner_and_not_later():
    with Preemption(limit_s=100) as outer:
        with Preemption(limit_s=10) as sooner: assert sooner.end_s < outer.end_s
        with Preemption(limit_s=1000) as later: assert later.end_s == outer.end_s
        with Preemption() as open_end: assert open_end.end_s == outer.end_s
    with Preemption() as after: assert after.end_s > 1e300
