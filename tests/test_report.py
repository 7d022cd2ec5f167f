"""The report: differences that a hand can check, files that are whole or not there, and values of
two recipes refused."""
import json
from dataclasses import replace
from pathlib import Path

import pytest

from llm_workbook.config.hardware import node
from llm_workbook.plan.lines import Line
from llm_workbook.plan.estimate import estimate
from llm_workbook.plan.ledger import Ledger, memory
from llm_workbook.model.spec import spec
from llm_workbook.training.memory_trace import Bytes, MemoryTrace
from llm_workbook.config.recipe import Recipe, recipe_names, shrink
from llm_workbook.rehearsal.step import Rehearsal
from llm_workbook.report import CLASSES, Compared, Report, reconcile
from llm_workbook.parallel.shard import ShardReport
from llm_workbook.rehearsal.recorder import Recorder
from llm_workbook.rehearsal.timeline import Span, Timeline
from llm_workbook.plan.step_time import estimate_step
from llm_workbook.training.fine_tune import Run

MIB = 2**20


@pytest.fixture(scope='module')
def recipe(): return shrink(Recipe.named('reviews-qlora')).changed({'optimizer.steps': 3})


def line(kind, instant, size, place='gpu'):
    return Line(kind, 'step', instant, place, size, 'n', {'n': size}, 'by hand')


@pytest.fixture(scope='module')
def ledger(recipe):
    "Fullest at the head, with 152 bytes of tensors."
    lines = (
        line('weights', '', 100), line('padding', '', 1), line('optimizer', '', 20),
        line('counters', '', 1), line('activations', 'forward', 7), line('logits', 'loss', 9),
        line('activations', 'head', 10), line('prefetch', 'head', 20),
        line('gradients', 'last layer', 5), line('context', '', 10**6),
        line('process', '', 10**6, 'host'), line('optimizer', '', 50, 'pinned'))
    return Ledger(recipe, spec('tiny-base'), 0, lines)


def span(phase, where, messages=(), flops=0, host_b=0, **kinds):
    return Span(phase, where, kinds, host_b, 'mm', flops, messages)


HELD = {'weights': 101, 'optimizer': 21}


@pytest.fixture(scope='module')
def rehearsal(recipe):
    "Fullest in the second layer of the backward pass, with 182 bytes."
    parts = (
        span('between', '', **HELD),
        span('forward', 'model.embed_tokens', (('all_gather', 64, 2),), 5, activations=1, **HELD),
        span('forward', 'model.layers.0', (('all_gather', 32, 2),), 6, activations=2, **HELD),
        span('forward', 'model', activations=8, **HELD),
        span('backward', 'model', activations=9, collective=20, host_b=50, **HELD),
        span('backward', 'model.layers.1', gradients=60, **HELD),
        span('backward', 'model.layers.0', (('reduce_scatter', 16, 2),), 7, gradients=5, **HELD),
        span('backward', '', gradients=6, **HELD), span('optimizer', '', gradients=5, **HELD),
        span('between', '', **HELD, gradients=40))
    return Rehearsal(
        recipe=recipe, timeline=Timeline(parts, 2), rank=0, exact=True, played=(2,), seconds=1.0,
        step_s=0.5, notes=('a note',))


@pytest.fixture
def run(recipe, tmp_path):
    "A run that nobody ran."
    metrics = [
        {'step': step, 'seconds': seconds, 'loss': 1.0}
        for step, seconds in enumerate((4.0, 4.5, 5.25), 1)]
    lines = [json.dumps(row) + '\n' for row in metrics]
    (tmp_path/'metrics.jsonl').write_text(''.join(lines))
    def rank(number):
        rows = [('w', 'bfloat16', (20, 5), (10, 5), 200, 100)]
        shards = ShardReport('fsdp2', 2, number, rows, 200, 7)
        trace = MemoryTrace(Bytes(300 * MIB), Bytes(700 * MIB))
        return {'shards': shards, 'payload': None, 'memory': trace, 'saved': {}, 'seconds': 6.0}
    return Run(recipe, tmp_path, [rank(0), rank(1)])


def row(report, part, item): return next(r for r in report.rows if (r.part, r.item) == (part, item))


# Differences

def test_a_residual_is_measured_or_rehearsed_minus_planned():
    assert Compared('peak', 'weights', 'B', 10, 12).residual == 2
    assert Compared('peak', 'weights', 'B', 10, 12, 9).residual == -1
    assert Compared('peak', 'weights', 'B', 10, 12, 9).share == -.1
    assert Compared('peak', 'weights', 'B', 10, None, 0).residual == -10
    assert Compared('peak', 'weights', 'B', None, 12, 9).residual is None
    assert Compared('peak', 'weights', 'B', 0, 12).share is None


def test_two_peaks_at_two_stages_are_named_and_both_stages_shown(ledger, rehearsal):
    report = reconcile(ledger, rehearsal)
    assert report.instants['peak'] == (
        'backward, head (head)', 'backward, layers (backward of model.layers.1, at mm)')
    assert (
        row(report, 'peak', 'all tensors').planned,
        row(report, 'peak', 'all tensors').rehearsed) == (152, 182)
    assert row(report, 'backward, head', 'all tensors')[3:5] == (152, 151)
    assert row(report, 'backward, layers', 'all tensors')[3:5] == (127, 182)
    page = report._repr_html_()
    for words in (
        '<b>backward, head</b>', '<b>backward, layers</b>', '+19.74%', 'a note', 'not stored'
    ):
        assert words in page, words


def test_classes_are_those_of_the_rehearsal(ledger, rehearsal):
    report = reconcile(ledger, rehearsal)
    items = {r.item: (r.planned, r.rehearsed, r.residual) for r in report.part('backward, head')}
    assert items == {
        'all tensors': (152, 151, -1), 'weights': (101, 101, 0), 'optimizer': (21, 21, 0),
        'activations': (10, 9, -1), 'collective': (20, 20, 0), 'in host memory': (50, 50, 0)}
    assert set(CLASSES.values()) <= {'weights', 'optimizer', 'collective', 'buffers', 'activations'}


def test_every_stage_has_its_instants(ledger, rehearsal):
    report, all_of = reconcile(ledger, rehearsal), {}
    for r in report.rows:
        if r.item == 'all tensors': all_of[r.part] = r[3:5]
    assert all_of == {
        'peak': (152, 182), 'between steps': (122, 122), 'forward, embedding': (None, 123),
        'forward, layers': (None, 124), 'forward, head': (129, 130), 'backward, head': (152, 151),
        'backward, layers': (127, 182), 'backward, embedding': (None, 128),
        'optimizer': (None, 127)}
    assert report.instants['forward, embedding'] == (None, 'forward of model.embed_tokens, at mm')


def test_of_several_micro_batches_the_fullest_counts(ledger, rehearsal):
    first, *rest = rehearsal.timeline.spans
    more = [
        part._replace(kinds=part.kinds | {'activations': 30}) if part.phase == 'forward' else part
        for part in rest[:-1]]
    twice = replace(rehearsal, timeline=Timeline((first, *rest[:-2], *more, rest[-1]), 2))
    assert row(reconcile(ledger, twice), 'forward, head', 'activations').rehearsed == 30


def test_what_lies_between_two_micro_batches_is_no_optimizer(ledger, rehearsal):
    first, *rest = rehearsal.timeline.spans
    # The stage calls so what follows a backward pass
    gap = span('optimizer', '', gradients=1000, **HELD)
    twice = replace(rehearsal, timeline=Timeline((first, *rest[:-2], gap, *rest), 2))
    assert row(reconcile(ledger, twice), 'optimizer', 'gradients').rehearsed == 5


@pytest.mark.parametrize('name', recipe_names())
def test_every_instant_of_a_ledger_has_its_stage(name, rehearsal):
    plan = memory(Recipe.named(name))
    stages = {
        'peak', 'between steps', 'optimizer', 'work',
        *(
            f'{phase}, {part}'
            for phase in ('forward', 'backward')
            for part in ('embedding', 'layers', 'head'))}
    assert {r.part for r in reconcile(plan, replace(rehearsal, recipe=plan.recipe)).rows} <= stages


def test_work_is_that_of_the_step(ledger, rehearsal):
    report = reconcile(ledger, rehearsal)
    step = estimate_step(ledger.recipe, ledger.spec)
    sent = [c for c in step.collectives if c.kind == 'all_gather']
    assert row(report, 'work', 'arithmetic of this rank')[3:5] == (round(step.rank_counted), 18)
    assert row(report, 'work', 'all_gather, messages')[3:5] == (sum(c.count for c in sent), 2)
    assert row(report, 'work', 'all_gather, whole tensors')[3:5] == (
        sum(c.count * c.tensor_b for c in sent), 96)
    assert row(report, 'work', 'reduce_scatter, messages').rehearsed == 1


def test_a_single_layer_or_none_is_cut_too(ledger, rehearsal):
    flat = replace(
        rehearsal,
        timeline=Timeline((span('between', '', weights=1), span('forward', '', weights=2)), 0))
    parts = {r.part for r in reconcile(ledger, flat).rows if r.rehearsed is not None}
    assert {'between steps', 'forward, embedding'} <= parts


# A run

def test_a_run_is_measured_per_rank(ledger, rehearsal, run):
    report = reconcile(ledger, rehearsal, run)
    assert row(report, 'run', 'rank 0: parameters')[3:] == (100, 101, 100)
    assert row(report, 'run', 'rank 0: whole on every rank')[3:] == (0, 0, 7)
    assert row(report, 'run', 'rank 1: parameters').rehearsed is None
    assert row(report, 'run', 'rank 0: resident memory at its peak').measured == 700 * MIB
    assert not [r for r in report.rows if 'GPU' in r.item]


def test_resident_memory_is_compared_with_the_whole_process(ledger, rehearsal, run):
    mine = row(reconcile(ledger, rehearsal, run), 'run', 'rank 0: resident memory at its peak')
    assert (mine.planned, mine.rehearsed) == (
        ledger.peak('host') + ledger.peak('pinned') + ledger.peak('gpu'), None)
    assert any('not of tensors alone' in note for note in reconcile(ledger, rehearsal, run).notes)


def test_a_second_rank_has_its_own_plan(recipe, rehearsal, run):
    plan = memory(recipe)
    other = memory(recipe, rank=1)
    kinds = ('weights', 'payload', 'adapters')
    held = sum(
        x.size_b for x in other.lines if x.phase == 'step' and not x.instant and x.kind in kinds)
    assert row(reconcile(plan, rehearsal, run), 'run', 'rank 1: parameters').planned == held


def test_seconds_are_the_middle_step_and_planned_where_a_machine_is_named(ledger, rehearsal, run):
    report = reconcile(ledger, rehearsal, run)
    assert row(report, 'run', 'seconds per step')[3:] == (None, None, .625)
    assert any('cluster.hardware names no machine' in note for note in report.notes)
    step_s = estimate_step(ledger.recipe, ledger.spec, node('cpu')).step_s
    on = reconcile(replace(ledger, node='cpu'), rehearsal, run)
    assert row(on, 'run', 'seconds per step').planned == step_s
    assert not any('names no machine' in note for note in on.notes)


def test_an_estimate_brings_its_own_seconds_and_messages(rehearsal, run):
    """reconcile(estimate(r), rehearse(r), run): the report shows the seconds that the estimate
    showed."""
    plan = estimate(rehearsal.recipe, node('cpu'))
    slower = replace(
        plan,
        step=replace(
            plan.step, parts=(('matmul', 7.0),), collectives=plan.step.collectives[:1]))
    report = reconcile(slower, rehearsal, run)
    assert row(report, 'run', 'seconds per step').planned == 7. == slower.step.step_s
    assert [r.item for r in report.part('work') if r.planned and r.unit == 'messages'] == [
        'all_gather, messages']
    assert not any('names no machine' in note for note in report.notes)
    alone = reconcile(plan.ledger, rehearsal, run)
    # A ledger with a machine gives the same
    assert alone.rows == reconcile(plan, rehearsal, run).rows
    with pytest.raises(ValueError, match=r'take memory\(recipe, rank=1\)'):
        reconcile(plan, replace(rehearsal, rank=1))


def test_one_step_or_no_metrics_take_the_whole_time(ledger, rehearsal, run):
    (run.directory/'metrics.jsonl').unlink()
    assert row(reconcile(ledger, rehearsal, run), 'run', 'seconds per step').measured == 2.


def test_what_a_gpu_allocates_is_compared(ledger, rehearsal, run):
    for rank in run.ranks: rank['memory'].peak.gpu_b = 160
    report = reconcile(ledger, rehearsal, run)
    assert row(report, 'run', 'rank 0: most allocated on the GPU')[3:] == (152, 182, 160)
    assert row(report, 'run', 'rank 1: most allocated on the GPU').rehearsed is None


# The file

def test_a_run_gets_its_report_and_the_report_says_where(ledger, rehearsal, run):
    report = reconcile(ledger, rehearsal, run)
    assert report.path == run.directory/'reconcile.json'
    assert repr(report).endswith(f'stored in {run.directory.name}/reconcile.json')
    relative = replace(report, path=Path('runs/mine/reconcile.json'))
    assert repr(relative).endswith('stored in runs/mine/reconcile.json')
    back = Report.load(report.path)
    assert back == report
    assert (back.residual, back.path, back.instants) == (
        report.residual, report.path, report.instants)
    assert back.to_dict() == report.to_dict()


def test_without_a_run_nothing_is_written(ledger, rehearsal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = reconcile(ledger, rehearsal)
    assert (report.path, list(tmp_path.iterdir())) == (None, [])
    assert report.save('here.json')
    assert Report.load('here.json') == report


def test_a_run_whose_directory_is_gone_says_so(ledger, rehearsal, run, tmp_path):
    report = reconcile(ledger, rehearsal, replace(run, directory=tmp_path/'gone'))
    assert report.path is None
    assert any("'gone', is not there" in note for note in report.notes)


def test_a_residual_in_the_file_is_the_residual(ledger, rehearsal, run):
    value = (
        json.loads((run.directory/'reconcile.json').read_text())
        if reconcile(ledger, rehearsal, run).path
        else {})
    assert all(r['residual'] == Compared(*list(r.values())[:6]).residual for r in value['rows'])
    assert {'torch', 'llm-workbook'} <= value['versions'].keys()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    ledger, rehearsal, tmp_path, monkeypatch
):
    report = reconcile(ledger, rehearsal)
    report.save(tmp_path/'r.json')
    before = (tmp_path/'r.json').read_text()
    broken = replace(report, rows=(*report.rows, Compared('run', 'x', 'B', float('nan'), 1)))
    with pytest.raises(ValueError): broken.save(tmp_path/'r.json')
    def full(part, path):
        with open(part, 'w') as file: file.write('{')
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr('os.replace', full)
    with pytest.raises(OSError, match='No space'): report.save(tmp_path/'r.json')
    assert [p.name for p in tmp_path.iterdir()] == ['r.json']
    assert (tmp_path/'r.json').read_text() == before


@pytest.mark.parametrize(
    'text', ['', '{"format": 1', '[]', '{"format": 1}', '{"format": 99, "rows": []}'])
def test_what_is_no_report_is_refused_by_name(text, tmp_path):
    (tmp_path/'x.json').write_text(text)
    with pytest.raises(ValueError, match='x.json.*is no report'): Report.load(tmp_path/'x.json')


# Refused

def test_values_of_two_recipes_are_refused_with_the_first_field(ledger, rehearsal, run):
    other = ledger.recipe.changed({'batch.micro': 3, 'method.rank': 4})
    with pytest.raises(ValueError, match='method.rank is 16 in the Ledger and 4 in the Rehearsal'):
        reconcile(ledger, replace(rehearsal, recipe=other))
    with pytest.raises(ValueError, match='in the Run: compare values of one recipe'):
        reconcile(ledger, rehearsal, replace(run, recipe=ledger.recipe.changed({'seed': 1})))
    assert not (run.directory/'reconcile.json').exists()


def test_another_rank_or_type_is_refused_with_the_fix(ledger, rehearsal):
    with pytest.raises(ValueError, match=r'take memory\(recipe, rank=1\)'):
        reconcile(ledger, replace(rehearsal, rank=1))
    with pytest.raises(ValueError, match=r'is no Estimate: make one, as in estimate\(recipe\)'):
        reconcile(rehearsal, ledger)
    with pytest.raises(ValueError, match='is no Rehearsal'): reconcile(ledger, Recorder)
    with pytest.raises(ValueError, match='is no Run'): reconcile(ledger, rehearsal, {})


# Shown

def test_the_picture_names_both_instants(ledger, rehearsal):
    figure = reconcile(ledger, rehearsal).plot()
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [w.split(':')[0] for w in words] == ['planned', 'rehearsed']
    assert 'backward, head (head)' in words[0]
    assert figure.axes[0].get_xlabel().startswith('bytes')
    assert len(figure.axes[0].patches) == 2 * len(figure.axes[0].get_yticks())
    assert figure.get_size_inches()[0] * figure.dpi <= 700


def test_everything_shown_is_escaped(ledger, rehearsal):
    page = reconcile(ledger, replace(rehearsal, notes=('<script>',)))._repr_html_()
    assert '<script>' not in page
    assert '&lt;script&gt;' in page
