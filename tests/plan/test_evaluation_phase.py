"An evaluation is a phase of the plan: its peak, which phase is the fullest, seconds and hours."
from math import ceil

import pytest

from llm_workbook.config.hardware import node
from llm_workbook.config.recipe import Recipe, recipe_names
from llm_workbook.launching.node_limits import memory_needs
from llm_workbook.plan.estimate import estimate
from llm_workbook.plan.evaluation import evaluation_b, evaluation_lines
from llm_workbook.plan.evaluation_time import EvaluationTime, evaluation_time
from llm_workbook.plan.ledger import memory
from llm_workbook.plan.panel import panel_state
from llm_workbook.plan.runbook import run_figures
from llm_workbook.plan.step_time import estimate_step

RECIPE = Recipe.named('70b-2x8-a100-80-full')
PHASES = 'load', 'step', 'evaluation', 'save'


def judging(name, **changes):
    return Recipe.named(name).changed({'intervals.evaluation': 7} | changes)


@pytest.mark.parametrize('name', recipe_names())
def test_the_peak_is_that_of_the_fullest_phase_and_has_its_name(name):
    ledger = memory(judging(name))
    assert ledger.phases == PHASES
    for place in ('gpu', 'host', 'pinned', 'disk'):
        sizes = {phase: ledger.total(phase, place) for phase in PHASES}
        assert ledger.peak(place) == max(sizes.values()) == sizes[ledger.fullest(place)]
    assert ledger.total('evaluation', level='allocated') == evaluation_b(ledger.recipe)
    assert 0 < ledger.total('evaluation', level='allocated') <= ledger.total('evaluation')


def test_a_recipe_that_judges_nothing_has_no_such_phase():
    ledger = memory(RECIPE.changed({'intervals.evaluation': 0}))
    assert ledger.phases == ('load', 'step', 'save')
    assert not [line for line in ledger.lines if line.phase == 'evaluation']
    with pytest.raises(ValueError, match="'evaluation' is none of load, step, save"):
        ledger.total('evaluation')


def test_every_other_phase_stays_as_it_is():
    without = memory(RECIPE.changed({'intervals.evaluation': 0}))
    beside = [line for line in memory(RECIPE).lines if line.phase != 'evaluation']
    assert sorted(map(str, beside)) == sorted(map(str, without.lines))


def test_an_evaluation_that_is_the_fullest_phase_sets_the_peak_and_is_named():
    ledger = memory(RECIPE)
    line = evaluation_lines(RECIPE)[0]._replace(size_b=ledger.peak(), instant='')
    fuller = ledger.with_lines((line,), ledger.node)
    assert fuller.fullest() == 'evaluation'
    assert fuller.peak() == fuller.total('evaluation') > ledger.peak()
    assert 'in evaluation' in fuller.why('p4de')
    assert memory_needs(fuller)['gpu_b'] == fuller.peak()


def test_on_a_cpu_the_host_has_room_for_the_judged_rows_too():
    ledger = memory(judging('reviews-qlora', **{'cluster.hardware': 'cpu'}))
    ranks = ledger.recipe.cluster.processes
    judged_b = ledger.on_node('evaluation', 'host') + ranks * ledger.total('evaluation')
    assert memory_needs(ledger)['host_b'] >= judged_b > 0


@pytest.mark.parametrize(('steps', 'every', 'times'), [(100, 50, 2), (101, 50, 3), (10, 50, 1)])
def test_the_end_of_a_run_is_judged_once(steps, every, times):
    changes = {'optimizer.steps': steps, 'intervals.evaluation': every}
    assert evaluation_time(estimate_step(RECIPE.changed(changes))).times == times


def test_hours_and_money_have_the_evaluations_whose_rows_are_known():
    told, untold = estimate(RECIPE, held=500), estimate(RECIPE)
    passes = ceil(500 / (RECIPE.batch.micro * RECIPE.cluster.ranks))
    judged_s = told.evaluation.times * passes * told.step.forward_s
    assert told.hours == pytest.approx(told.step.hours + judged_s / 3600)
    assert told.ranges['hours'].planned == told.hours > untold.ranges['hours'].planned
    price = RECIPE.cluster.nodes * node('p4de').price_hour
    assert told.ranges['usd'].planned == pytest.approx(told.hours * price)
    assert untold.hours == untold.step.hours
    assert untold.evaluation.note in str(untold) and not told.evaluation.note


@pytest.mark.parametrize(('data', 'rows'), [
    ({}, 100), ({'test_share': 0.25}, 300), ({'test_share': 0.0}, None),
    ({'test': 'held.jsonl'}, None)])
def test_rows_that_are_held_out_follow_from_a_share_and_from_nothing_else(data, rows):
    changes = {f'data.{name}': value for name, value in data.items()}
    assert estimate(RECIPE.changed(changes), rows=900).evaluation.rows == rows


@pytest.mark.parametrize('held', [0, -3, 2.5, True])
def test_a_number_of_held_out_rows_is_a_count(held):
    with pytest.raises(ValueError, match='must be a count of held-out rows'):
        estimate(RECIPE, held=held)


def test_panel_and_run_book_show_peak_and_time():
    html = panel_state({}, RECIPE)._repr_html_()
    assert 'GPU, evaluation' in html and 'hours and USD lack 5 x an evaluation' in html
    rows = [row for row in run_figures(RECIPE, held=500) if row.when == 'at an evaluation']
    peak_b = memory(RECIPE, node='p4de').total('evaluation')
    assert rows[0].figure == f'{peak_b / 2**30:.1f} GiB'
    assert [row.what for row in rows[1:]] == ['500 held-out rows', 'how often, the end among them']
    quiet = RECIPE.changed({'intervals.evaluation': 0})
    assert not [row for row in run_figures(quiet) if row.when == 'at an evaluation']
    assert 'evaluation' not in panel_state({}, quiet)._repr_html_().replace('evaluation: 0', '')


def test_a_forward_pass_is_less_than_a_step_and_grows_with_its_messages():
    fast, slow = node('p4de'), node('p4de').changed({'link.measured_bps': 1e9})
    passes = RECIPE.batch.accumulation
    quick, waiting = (estimate_step(RECIPE, node=machine) for machine in (fast, slow))
    assert passes * quick.forward_s < .5 * quick.step_s
    assert waiting.forward_s > quick.forward_s
    assert EvaluationTime(2, 8, 3.0, 17).one_s == 9.0


@pytest.mark.slow
def test_a_report_sets_the_planned_evaluation_beside_the_rehearsed_one():
    from llm_workbook.rehearsal.step import rehearse
    from llm_workbook.report import reconcile
    recipe = judging('reviews-qlora', **{'model.source': 'tiny-base', 'cluster.hardware': 'cpu'})
    report = reconcile(estimate(recipe), rehearse(recipe))
    [row] = report.part('evaluation')
    assert row.planned == evaluation_b(recipe)
    assert abs(row.share) < .02
