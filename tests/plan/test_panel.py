"""The panel: its logic without a browser, its widgets by their values, and how quick it is."""
import base64
import json
import re
import sys
import time
from itertools import product
from xml.etree import ElementTree

import pytest
from llm_workbook import PlannerPanel, Recipe, controls, draft, panel_state, recipe_names
from llm_workbook.plan.panel import nearest_fit

BASE = draft('llama-3.1-70b', '2x-rtx-3090')


@pytest.fixture(scope='module')
def panel():
    pytest.importorskip('ipywidgets')
    return PlannerPanel()


@pytest.fixture(autouse=True)
def _restored(request):
    if 'panel' not in request.fixturenames: return
    shown = request.getfixturevalue('panel')
    start = panel_state({}, shown.base).settings
    for path, widget in shown.widgets.items(): widget.value = start[path]


# Without a view

def test_a_state_is_a_recipe_and_its_estimate():
    state = panel_state({'batch.micro': 2})
    assert state.recipe == BASE.changed({'batch.micro': 2, 'name': f'{BASE.name}-changed'})
    assert state.estimate.recipe == state.recipe
    assert Recipe.parse(state.yaml) == state.recipe
    assert state.verdict == state.estimate.verdict
    assert state.fits is state.estimate.fits
    assert json.loads(json.dumps(state.to_dict()))['settings']['batch.micro'] == 2


@pytest.mark.parametrize('card, rows, outcome, sign', [
    ('h200', 8, 'fits', '&#10003;'), ('h100', 12, 'fits if', '?'),
    ('a100-40', 24, 'does not fit', '&#10007;')])
def test_the_sign_follows_the_outcome(card, rows, outcome, sign):
    state = panel_state({'cluster.hardware': card, 'batch.micro': rows})
    assert state.estimate.outcome == outcome
    assert f'<b>{sign}</b> {outcome.capitalize()}' in state._repr_html_()


def test_a_state_is_a_function_of_its_settings():
    assert panel_state({'batch.micro': 4}) == panel_state({'batch.micro': 4})
    assert (
        panel_state({'batch.micro': 4})._repr_html_()
        == panel_state({'batch.micro': 4})._repr_html_())


def test_a_gpu_and_a_count_make_a_machine():
    assert (
        panel_state({'cluster.hardware': 'h100', 'cluster.processes': 8}).recipe.cluster.hardware
        == '8x-h100')
    two = {'cluster.hardware': 'h100', 'cluster.processes': 8, 'cluster.nodes': 2}
    assert 'no network' in panel_state(two).errors[0]
    assert panel_state(two | {'network': 'efa-400'}).recipe.cluster.hardware == '8x-h100@efa-400'
    assert (
        panel_state({'cluster.hardware': 'p5', 'cluster.processes': 4}).recipe.cluster.hardware
        == 'p5')
    assert (
        panel_state(
            {'cluster.hardware': 'cpu'}, draft('tiny-base', 'cpu', global_batch=2, length=128)
        ).recipe.cluster.device
        == 'cpu'
    )
    assert (
        '16 processes' in panel_state({'cluster.hardware': 'p5', 'cluster.processes': 16}).errors[0]
    )


@pytest.mark.slow
def test_every_choice_alone_is_a_state_and_never_an_exception():
    for control in controls(BASE):
        for value in control.values:
            state = panel_state({control.path: value})
            assert state.errors or state.estimate, (control.path, value)
            assert '<script' not in state._repr_html_()


def test_whatever_goes_wrong_can_be_mended_in_the_panel():
    """An error names a field that has a control, or a fact about the machine or the base that has
    one."""
    rows = {c.path: c.values for c in controls(BASE)}
    names = [
        p
        for p in rows
        if p not in ('model.source', 'batch.length', 'batch.micro', 'batch.accumulation')]
    seen = set()
    for a, b in product(names, names):
        if a >= b: continue
        for x, y in product(rows[a][-3:], rows[b][-3:]):
            seen |= set(panel_state({a: x, b: y}).errors)
    matches = [re.match(r'([a-z]+\.[a-z_]+) ', error) for error in seen]
    paths = {match[1] for match in matches if match}
    assert paths
    assert not paths - set(rows)


def test_both_rules_that_are_broken_are_named():
    state = panel_state({'sharding.strategy': 'ddp', 'sharding.offload_parameters': 'cpu'})
    assert state.recipe is None
    assert not state.fits
    assert state.yaml == ''
    for rule in ('offload-needs-sharded-weights', 'sharded-loading-needs-shards'):
        assert any(rule in e for e in state.errors)


def test_unknown_settings_and_values():
    with pytest.raises(ValueError, match="did you mean 'batch.micro'"):
        panel_state({'batch.mikro': 2})
    assert 'batch.micro' in panel_state({'batch.micro': -2}).errors[0]
    assert 'did you mean' in panel_state({'cluster.hardware': 'rtx-3900'}).errors[0]


def test_the_bars_are_valid_svg_and_say_what_they_show():
    state = panel_state()
    rooms = {room.place: room for room in state.estimate.rooms}
    images = re.findall(r'<img alt="([^"]*)"[^>]*base64,([^"]*)"', state._repr_html_())
    assert [alt for alt, _ in images if alt.startswith('GPU, step')]
    assert f'{rooms["gpu"].have_b / 2**30:,.2f} GiB' in images[0][0]
    for _, data in images:
        svg = ElementTree.fromstring(base64.b64decode(data))
        parts = [part for part in svg if part.tag.endswith('rect')]
        ends = [percent(part.get('x')) + percent(part.get('width')) for part in parts]
        assert 0 < max(ends) <= 100.05
        lines = [part for part in svg if part.tag.endswith('line')]
        assert all(0 < percent(line.get('x1')) < 100 for line in lines)


def test_each_bar_says_how_much_of_how_much_since_gpu_and_host_have_other_scales():
    html = panel_state()._repr_html_()
    for alt in re.findall(r'<img alt="([^"]*)"', html):
        size, have = re.search(r'([\d.,]+) GiB of ([\d.,]+) GiB', alt).groups()
        assert f'>{size} of {float(have.replace(",", "")):,.1f} GiB</td>' in html


def test_a_tiny_run_on_a_cpu_has_figures_that_say_something():
    state = panel_state({}, Recipe.named('reviews-qlora').changed({'cluster.hardware': 'cpu'}))
    html = state._repr_html_()
    assert 'the GPU' not in html and 'Weights in: <b>device memory</b>' in html
    assert re.search(r'<p [^>]*>[\d,]+ tokens/s, 0\.\d\d s per step, 0\.\d\d hours', html)
    assert ' 0.00 USD' not in html


def percent(length): return float(length.removesuffix('%'))


def test_the_figures_beside_the_bars_are_those_of_the_estimate():
    state = panel_state()
    for phase in ('load', 'step', 'save'):
        total = sum(state.estimate.peaks('gpu')[phase].values())
        assert f'>{total / 2**30:,.2f}</th>' in state._repr_html_()
    assert state.estimate.rooms[0].need_b == max(
        sum(v.values()) for v in state.estimate.peaks('gpu').values())


def test_every_class_of_the_ledger_has_a_group():
    from llm_workbook.plan import panel
    from llm_workbook.plan.lines import KINDS
    grouped = [kind for group in panel._GROUPS.values() for kind in group.kinds]
    assert sorted(grouped) == sorted(KINDS)


def test_what_a_user_wrote_is_escaped():
    base = BASE.changed({'data.source': 'me/<script>alert(1)</script>'})
    assert '<script' not in panel_state({}, base)._repr_html_()


# The view

def test_every_control_has_a_label_and_its_values(panel):
    for control in controls(panel.base):
        widget = panel.widgets[control.path]
        assert widget.description == control.label
        assert tuple(v for _, v in widget.options) == control.values
        assert all(label for label, _ in widget.options)


def test_a_change_reaches_the_picture_and_the_recipe(panel):
    before = panel.picture.value
    panel.widgets['batch.length'].value = 8192
    assert panel.picture.value != before
    assert 'length: 8192' in panel.recipe_text.value
    assert panel.adopt.batch.length == 8192
    assert panel.adopt == panel.state.recipe


def test_the_picture_names_no_function_where_a_button_does_it(panel):
    assert '`memory_ladder`' in panel.state.verdict
    assert 'ladder' not in panel.picture.value and 'payload 15.9 GiB' in panel.picture.value
    assert '`' not in panel.picture.value


def test_a_recipe_that_was_changed_is_no_longer_the_named_one(panel):
    panel.start.value = '70b-1xh200-qlora'
    panel.widgets['batch.length'].value = 8192
    assert panel.start.value == ''
    assert panel.adopt.batch.length == 8192
    assert panel.adopt.name == '70b-1xh200-qlora-changed'
    panel.widgets['batch.micro'].value = 2
    assert panel.adopt.name == '70b-1xh200-qlora-changed'
    panel.start.value = '70b-1xh200-qlora'
    assert panel.adopt == Recipe.named('70b-1xh200-qlora')
    panel.widgets['batch.micro'].value = 64
    panel.fit_button.click()
    assert panel.start.value == ''
    assert panel.adopt.name == '70b-1xh200-qlora-changed'
    panel.begin(BASE)


def test_a_recipe_that_was_made_to_fit_or_has_a_long_name_is_called_changed():
    large = Recipe.named('70b-1xh200-qlora').changed({'batch.micro': 64, 'name': 'a' * 64})
    state = panel_state({}, large)
    assert state.recipe == large
    fitting = nearest_fit(state, large)
    assert fitting.name == 'a' * 56 + '-changed'
    assert nearest_fit(panel_state({}, fitting), fitting).name == fitting.name
    back = panel_state({'batch.micro': 32}, large).settings | {'batch.micro': 64}
    assert panel_state(back, large).recipe.name == large.name


def test_a_contradiction_is_shown_and_left_again(panel):
    panel.widgets['sharding.strategy'].value = 'none'
    assert 'none-is-one-process' in panel.picture.value
    assert panel.recipe_text.value == ''
    with pytest.raises(ValueError, match='none-is-one-process'): print(panel.adopt)
    panel.widgets['sharding.strategy'].value = 'fsdp2'
    assert panel.adopt == panel.base


@pytest.mark.parametrize('name', recipe_names())
def test_the_panel_starts_from_any_recipe(name):
    pytest.importorskip('ipywidgets')
    recipe = Recipe.named(name)
    assert PlannerPanel(recipe).adopt == recipe


def test_the_bundle_has_its_static_twin(panel):
    bundle = panel._repr_mimebundle_()
    assert 'application/vnd.jupyter.widget-view+json' in bundle
    assert bundle['text/html'] == panel.state._repr_html_()


def test_without_ipywidgets_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, 'ipywidgets', None)
    with pytest.raises(ImportError, match=r"pip install '.\[lab\]'"): PlannerPanel()


def test_twenty_changes_take_less_than_a_tenth_of_a_second_each(panel):
    models = [v for _, v in panel.widgets['model.source'].options]
    changes = [('batch.length', n) for n in (512, 1024, 4096, 8192)] + [
        ('model.source', m) for m in models[:8]]
    changes += [('batch.micro', n) for n in (2, 4, 8, 16)] + [
        ('method.kind', 'lora'),
        ('cluster.hardware', 'h100'),
        ('sharding.activation_checkpointing', 'none'),
        ('batch.loss_head', 'chunked')]
    spent = []
    for path, value in changes:
        start = time.process_time()
        panel.widgets[path].value = value
        spent.append(time.process_time() - start)
        assert panel.state.settings[path] == value
    assert len(spent) == 20
    assert sorted(spent)[-2] < 0.1  # In one of them Python may collect what is no longer used


def test_no_control_is_blank_and_an_open_choice_has_a_name(panel):
    "A list of ipywidgets shows nothing for None, so no control may hold it."
    for path, widget in panel.widgets.items():
        assert widget.index is not None, path
        assert widget.value is not None, path
    assert panel.widgets['network'].label == 'its own, or none'
    assert panel.state.settings['network'] == ''
    assert panel_state({'network': None}).recipe == panel_state({'network': ''}).recipe


def test_fsdp_moves_both_offloads_with_one_control(panel):
    places = [panel.widgets[f'sharding.offload_{what}'] for what in ('parameters', 'optimizer')]
    for moved, value in product(places, ('cpu', 'none')):
        moved.value = value
        assert [place.value for place in places] == [value, value]
        assert panel.state.errors == ()
    panel.widgets['sharding.strategy'].value = 'zero3'
    panel.widgets['sharding.loading'].value = 'every_rank'
    places[1].value = 'cpu'
    assert [place.value for place in places] == ['none', 'cpu']  # ZeRO has two
    assert panel.state.errors == ()
    panel.widgets['sharding.strategy'].value = 'fsdp2'
    assert places[0].value == places[1].value


@pytest.mark.parametrize('settings', [
    {'batch.micro': 16}, {'sharding.strategy': 'ddp'}, {'method.kind': 'lora'},
    {'cluster.processes': 1, 'cluster.hardware': 'h100', 'sharding.strategy': 'ddp'},
    {'cluster.processes': 1, 'sharding.strategy': 'none', 'sharding.loading': 'every_rank'}])
def test_make_it_fit_finds_a_plan_for_the_same_work(panel, settings):
    for path, value in settings.items(): panel.widgets[path].value = value
    asked = panel.state
    assert not asked.fits
    panel.fit_button.click()
    assert panel.state.estimate.outcome == 'fits'
    for path in ('model.source', 'batch.length', 'cluster.hardware', 'cluster.processes'):
        assert panel.state.settings[path] == asked.settings[path]
    assert {path: widget.value for path, widget in panel.widgets.items()} == panel.state.settings
    assert panel.adopt == panel.state.recipe
    assert 'Changed: ' in panel.note.value
    panel.begin(BASE)
    assert panel.adopt == BASE


def test_what_no_plan_can_fit_says_how_much_is_lacking(panel):
    panel.widgets['model.source'].value = 'meta-llama/Llama-3.1-405B'
    before = panel.state
    panel.fit_button.click()
    assert re.search(r'none of [\d,]+ plans fits; the nearest lacks [\d,.]+ GiB', panel.note.value)
    assert panel.state == before


def test_a_named_recipe_is_taken_over_whole(panel):
    panel.start.value = '70b-2x4-h100-zero3-qlora-classifier'
    assert panel.adopt == Recipe.named('70b-2x4-h100-zero3-qlora-classifier')
    assert panel.widgets['network'].value == 'ethernet-100'
    panel.start.value = 'reviews-qlora'
    assert panel.adopt == Recipe.named('reviews-qlora')
    panel.start.value = ''
    panel.begin(BASE)


def test_the_copy_button_carries_the_recipe_and_nothing_that_could_break_out_of_it(panel):
    element = ElementTree.fromstring(panel.copy_button.value)
    assert Recipe.parse(element.get('data-text')) == panel.adopt
    panel.begin(BASE.changed({'data.source': 'me/"><script>alert(1)</script>'}))
    assert '<script' not in panel.copy_button.value
    assert Recipe.parse(ElementTree.fromstring(panel.copy_button.value).get('data-text')) == (
        panel.adopt)
    panel.begin(BASE)
    panel.widgets['sharding.strategy'].value = 'ddp'
    assert panel.copy_button.value == ''


def test_the_plan_stands_beside_the_controls_and_its_verdict_first(panel):
    head, columns = panel.box.children
    left, right = columns.children
    assert columns.layout.flex_flow == 'row wrap'  # The plan goes below where it has no 230 pixels
    assert left.layout.flex == '0 0 300px'
    assert (right.layout.flex, right.layout.min_width) == ('1 1 230px', '0')
    assert set(panel.widgets.values()) < set(left.children)
    assert right.children[:2] == (panel.note, panel.picture)
    assert {panel.start, panel.fit_button, panel.copy_button} == set(head.children)
    assert panel.picture.value.index('role="status"') < panel.picture.value.index('<img')


def test_the_longest_choice_fits_its_control(panel):
    "170 pixels, of which a list needs 30: 23 characters of 6 pixels."
    for widget in panel.widgets.values():
        assert max(len(label) for label, _ in widget.options) <= 23, widget.description
        assert len(widget.description) <= 16
