"""The planner: what an estimate joins, what a search finds, that its pruning loses nothing, and how
fast it is."""
import json
import re
from collections import Counter

import pytest
from calls import calls_of
from trouble import slow_case

from llm_workbook import (
    Recipe, RecipeError, draft, estimate, memory, node, recipe_names, recipes, search,
    estimate_step)
from llm_workbook.model.layout import coverage
from llm_workbook.model.spec import spec
from llm_workbook.plan.estimate import plan_facts
from llm_workbook.plan.ranges import doubt_of, range_of

PAIR = draft('llama-3.1-70b', '2x-rtx-3090')
SMALL = {'optimizer.kind': 'adamw', 'batch.loss_head': ['chunked', 'full']}


@pytest.fixture(scope='module')
def found(): return search(PAIR)


@pytest.fixture(scope='module')
def eight(): return search(draft('llama-3.1-8b', '8x-h100', global_batch=64, length=4096))


def sample(rows, count=40): return rows[::max(1, len(rows) // count)]


def key(row): return json.dumps(row.settings, sort_keys=True)


# One recipe

def test_an_estimate_joins_the_parts():
    e = estimate(PAIR)
    assert e.ledger.to_dict() == memory(PAIR).to_dict()
    assert e.step == estimate_step(PAIR)
    assert e.margin_b == e.node.gpu.usable_b - e.rooms[0].need_b
    assert [room.place for room in e.rooms] == ['gpu', 'host', 'disk']
    assert json.loads(json.dumps(e.to_dict()))['fits'] is e.fits
    assert e.verdict[:20] in e._repr_html_()
    assert '<script' not in e._repr_html_()


def test_the_items_of_a_place_add_up():
    e = estimate(PAIR)
    for room in e.rooms: assert sum(e.peaks(room.place)[room.phase].values()) == room.need_b
    with pytest.raises(ValueError, match='did you mean'): e.peaks('gpus')


def test_a_place_that_is_too_small_is_enough_whichever_it_is():
    unsaved = PAIR.changed({'intervals.saving': 0})  # A save needs less of a host that has less
    made = estimate(unsaved)
    needed = {room.place: room.need_b for room in made.rooms}
    fields = {'gpu': 'gpu.memory_b', 'host': 'memory_b', 'disk': 'disk_b'}
    exact = {fields[place]: need for place, need in needed.items()} | {'gpu.usable': 1.0}
    assert estimate(unsaved, made.node.changed(exact)).fits, 'with room to the byte it fits'
    for place, field in fields.items():
        short = estimate(unsaved, made.node.changed(exact | {field: needed[place] - 1}))
        assert [room.place for room in short.rooms if room.spare_b < 0] == [place]
        assert not short.fits
        assert short.to_dict()['fits'] is False
        assert short.outcome == ('does not fit' if place == 'disk' else 'fits if')
        assert 'lacks 1 bytes' in short.verdict
        assert short.ledger.fits(short.node) is False


def test_what_is_below_the_range_of_a_place_does_not_fit():
    unsaved = PAIR.changed({'intervals.saving': 0})  # A save needs less of a host that has less
    made = estimate(unsaved)
    needed = next(room.need_b for room in made.rooms if room.place == 'host')
    host = range_of(needed, doubt_of('memory', PAIR).sure)
    for have_b, outcome in (
            (int(host.high) + 1, 'fits'), (int(host.high) - 1, 'fits if'),
            (int(host.low) + 1, 'fits if'), (int(host.low) - 1, 'does not fit')):
        found = estimate(unsaved, made.node.changed({'memory_b': have_b, 'gpu.memory_b': 2**36}))
        assert found.outcome == outcome
    assert found.verdict.startswith('Does not fit: host memory')


def test_a_plan_that_lacks_memory_says_so_first():
    made = estimate(PAIR)
    need_b = made.rooms[0].need_b
    short, tight = (estimate(PAIR, made.node.changed({'gpu.memory_b': int(share * need_b),
                                                      'gpu.usable': 1.0})) for share in (.95, 1.05))
    assert [(plan.outcome, plan.fits) for plan in (short, tight)] == [
        ('fits if', False), ('fits if', True)]
    assert short.verdict.startswith(
        'Probably does not fit, unless each GPU needs at least 5.0 % less than planned: each GPU')
    assert tight.verdict.startswith('Fits if ')
    html = short._repr_html_()
    assert short.verdict.partition('`')[0] in html
    assert '<code>memory_ladder</code>, or <code>--ladder</code> in a terminal' in html
    assert [plan.answer for plan in (short, tight)] == ['probably does not fit', 'fits if']


def test_idle_gpus_are_said_where_they_are_paid_for():
    alone = {'cluster.processes': 1, 'sharding.strategy': 'none', 'sharding.loading': 'every_rank'}
    one = draft('llama-3.1-8b', '8x-h100')
    note = '7 of 8 GPUs are idle, and all are paid for'
    plan = estimate(one.changed(alone))
    assert note in plan.warnings
    assert f'- {note}' in str(plan).splitlines()
    assert note in plan._repr_html_()
    assert not any('idle' in warning for warning in estimate(one).warnings)
    some = estimate(one.changed({'cluster.processes': 7}), plan.node.changed({'gpu.price_hour': 0}))
    assert '1 of 8 GPUs is idle' in some.warnings
    two = estimate(draft('llama-3.1-8b', 'dgx-h100', nodes=2).changed({'cluster.processes': 4}))
    assert any(warning.startswith('4 of 8 GPUs of each node are idle') for warning in two.warnings)


@pytest.mark.parametrize('model, changes, warned', [
    ('deepseek-v3', {'batch.accumulation': 8}, True),
    ('deepseek-v3', {'batch.accumulation': 1}, False),
    ('deepseek-v3', {'batch.accumulation': 8, 'sharding.strategy': 'zero3'}, False),
    ('llama-3.1-70b', {'batch.accumulation': 8}, False)],
    ids=['experts', 'one pass', 'zero3', 'small adapters'])
def test_whole_gradients_of_large_adapters_are_warned_of(model, changes, warned):
    lora = draft(model, 'dgx-h200', nodes=4, global_batch=32).changed({'method.kind': 'lora'})
    plan = estimate(lora.changed(changes))
    assert any('accumulation-keeps-adapter-gradients' in text for text in plan.warnings) == warned


@pytest.mark.parametrize('machine, warned', [('p3dn', True), ('kaggle-2x-t4', True),
                                             ('8x-h100', False), ('2x-rtx-3090', False)])
def test_a_card_without_a_published_run_is_said(machine, warned):
    plan = estimate(draft('llama-3.1-8b', machine, global_batch=64))
    note = f'no run on {plan.node.gpu.name} is behind the range of the seconds'
    assert (note in str(plan)) == (note in plan._repr_html_()) == warned
    short = estimate(draft('llama-3.1-8b', machine, global_batch=64, length=128))
    assert note not in str(short)  # They have no range at all
    assert 'the seconds have no range' in str(short)


def test_an_assumed_size_refuses_nothing_and_is_said():
    wide = {'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'}
    recipe = PAIR.changed(wide | {'model.source': 'llama-3.1-405b'})
    large = node('2x-rtx-3090').changed({'gpu.memory_b': 2**36})
    given = large.changed(memory_b=2**37)
    plan, refused = estimate(recipe, large), estimate(recipe, given)
    assert (plan.outcome, plan.fits) == ('fits if', True)
    assert re.match(r'Fits if the host has \d+ GiB, where 96 are assumed:', plan.verdict)
    assert 'host memory assumed: 96.0 GiB' in str(plan)
    assert 'host memory assumed: 96.0 GiB' in plan._repr_html_()
    assert (refused.outcome, refused.fits) == ('does not fit', False)
    assert 'host memory assumed' not in str(refused)


def test_a_plan_says_where_its_seconds_have_no_range():
    short = estimate(PAIR.changed({'batch.length': 128}))
    assert 'the seconds have no range' in str(short)
    assert short.ranges['hours'].low == short.ranges['hours'].high == short.step.hours
    assert 'the seconds have no range' not in str(estimate(PAIR))


def test_the_host_holds_the_lines_of_every_rank():
    offloaded = {'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'}
    one = estimate(PAIR.changed(offloaded))
    host = estimate(PAIR.changed(offloaded)).peaks('host')['step']
    own = sum(
        line.size_b
        for line in one.ledger.lines
        if line.kind == 'payload' and line.phase == 'step' and line.place in ('host', 'pinned'))
    assert own > 0
    assert host['payload'] == 2 * own


@pytest.mark.parametrize('changes, words', [
    ({'cluster.processes': 3}, 'at most one each'),
    ({'cluster.hardware': '2x-rtx-3900'}, "did you mean 'rtx-3090'"),
    ({'batch.length': 200_000}, r'this length \(context: 131,072\); .*length-in-context'),
    ({'cluster.nodes': 2}, 'cluster.nodes = 2: this machine has no network.*machines-have-a-net'),
    ({'model.source': 'llama-3.1-71b'}, 'did you mean')])
def test_what_cannot_be_planned_says_why(changes, words):
    with pytest.raises(ValueError, match=words): estimate(PAIR.changed(changes))


# GPUs by their compute capability

OLD = draft('llama-3.1-8b', '1x-t4')  # Computes in float16
IN_BF16 = {
    'precision.compute': 'bfloat16', 'precision.loss_scale': 'none', 'method.storage': 'bfloat16'}


@pytest.mark.parametrize('hardware', ['1x-t4', '1x-v100-16', 'kaggle-2x-t4', 'p3dn'])
@pytest.mark.parametrize('changes, words', [
    (IN_BF16, 'no bf16 units; set it to float16.* or to float32 .bf16-needs-units'),
    ({'model.attention': 'flash'}, 'T4 and RTX 20 have 7.5.*set it to sdpa .flash-needs-cap'),
    ({'precision.master': 'bfloat16'}, 'precision.master = .*set it to float32'),
    (IN_BF16 | {'precision.compute': 'fp8', 'method.kind': 'lora'}, 'to float16 .fp8-needs-units')])
def test_what_an_old_gpu_cannot_do_is_refused_with_the_fix(hardware, changes, words):
    recipe = draft('llama-3.1-8b', hardware)
    assert estimate(recipe).step.tokens_per_s > 0
    with pytest.raises(RecipeError, match=words): estimate(recipe.changed(changes))


def test_a_t4_can_be_planned_in_float16_and_in_float32():
    whole = IN_BF16 | {'precision.compute': 'float32', 'method.storage': 'float32'}
    plans = estimate(OLD), estimate(OLD.changed(whole))
    assert plans[0].step.tokens_per_s > 2 * plans[1].step.tokens_per_s
    assert plan_facts(OLD)['plan.capability'] == 7.5
    assert not any('does not run' in warning for plan in plans for warning in plan.warnings)


@pytest.mark.parametrize('hardware, flash', [
    ('1x-a100-80', True), ('1x-rtx-3060', True), ('1x-b300', True), ('1x-mi300x', True),
    ('1x-t4', False)])
def test_flash_attention_needs_capability_8(hardware, flash):
    recipe = draft('qwen3-0.6b', hardware).changed({'model.attention': 'flash'})
    if flash:
        assert estimate(recipe).fits
        return
    with pytest.raises(RecipeError, match='flash-needs-capability-8'): estimate(recipe)


def test_more_ranks_than_rows():
    with pytest.raises(RecipeError, match='ranks-have-rows'): estimate(PAIR, rows=15)
    assert estimate(PAIR, rows=16).recipe == PAIR
    with pytest.raises(ValueError, match='rows -3'): estimate(PAIR, rows=-3)


def test_a_recipe_that_breaks_two_rules_names_both():
    with pytest.raises(RecipeError, match='none-is-one-process') as caught:
        PAIR.changed({'sharding.strategy': 'none', 'sharding.group': 2})
    assert 'group-is-fsdp2s' in str(caught.value)


def test_warnings_are_rules_and_coverage():
    dense = estimate(
        draft('llama-3.1-8b', '1x-rtx-4090', length=8192).changed(
            {'batch.micro': 2, 'batch.loss_head': 'full'}))
    assert any('logits-are-large' in w for w in dense.warnings)
    chunked = estimate(dense.recipe.changed({'batch.loss_head': 'chunked'}))
    assert not any('logits-are-large' in w for w in chunked.warnings)
    experts = estimate(draft('mixtral-8x7b', '8x-h100').changed({'method.kind': 'qlora'}))
    assert any('16 bit' in w for w in experts.warnings)
    assert 'this version plans but does not run: method.unpacked 0.1' in experts.warnings


EXPERTS = 'mixtral-8x7b', 'qwen3-30b-a3b', 'gpt-oss-20b', 'deepseek-v3'


@pytest.mark.parametrize('source', EXPERTS)
def test_experts_without_adapters_are_named_and_no_others(source):
    def warned(**changes):
        made = draft(source, '8x-h100').changed({'method.kind': 'lora'} | changes)
        text = next((w for w in estimate(made).warnings if '[experts-are-not-adapted]' in w), '')
        bare = not any('expert' in name for name in coverage(spec(source), made.method).adapted)
        assert bool(text) == bare
        return text
    warned(**{'method.dropout': 0.0})
    text = warned(**{'method.targets': ['o_proj']})
    assert text.startswith('no adapter goes to the experts of this base')


@pytest.mark.parametrize('answers', [
    ('llama-3.1-70b', '2x-rtx-3090'), ('qwen3-4b', '1x-rtx-4060-ti-16'), ('llama-3.1-8b', '1x-t4')])
def test_a_long_draft_saves_about_every_half_hour_and_a_short_one_at_its_end(answers):
    long = estimate(draft(*answers, tokens=50_000_000))
    assert .4 < long.recipe.intervals.saving * long.step.step_s / 3600 < .6
    assert not any('crashes' in line for line in long.warnings)
    assert draft(*answers, tokens=32_768).intervals.saving == 0
    unsaved = estimate(long.recipe.changed({'intervals.saving': 0}))
    assert any(f'loses up to {long.step.hours:,.1f} hours' in line for line in unsaved.warnings)


# Questions of every day

def test_two_3090_and_70b_in_full_never_fit():
    full = search(PAIR, {'method.kind': 'full'})
    assert not full.accepted
    assert len(full.refused) > 100
    lacking = [r for r in full.refused if r.kind == 'memory']
    assert lacking
    assert all(r.short_b > 0 for r in lacking)
    with pytest.raises(ValueError, match=r'lacks [\d,.]+ GiB'): print(full.best)


def test_two_3090_and_70b_by_qlora_fit_with_offload(found):
    good = [p for p in found.accepted if p.draft.method.kind == 'qlora']
    assert good
    assert any(p.settings['sharding.offload_parameters'] == 'cpu' for p in good)
    assert not any(p.draft.method.kind == 'full' for p in found.accepted)


def test_one_24_gb_card_and_8b():
    plans = search(draft('llama-3.1-8b', '1x-rtx-4090'))
    kinds = {p.draft.method.kind for p in plans.accepted}
    assert 'qlora' in kinds
    assert plans.best.settings['sharding.strategy'] == 'none'
    divided = [p for p in plans.accepted if p.settings['sharding.strategy'] != 'none']
    assert {p.settings['sharding.strategy'] for p in divided} == {'fsdp2'}
    assert {p.settings['sharding.offload_parameters'] for p in divided} == {'cpu'}


def test_one_24_gb_card_and_70b_fit_with_the_weights_in_host_memory():
    plans = search(
        Recipe.named('8b-1x24gb-qlora').changed({'model.source': 'meta-llama/Llama-3.1-70B'}),
        {'method.kind': 'qlora', 'optimizer.kind': 'adamw'})
    assert plans.accepted
    assert {p.settings['sharding.strategy'] for p in plans.accepted} == {'fsdp2'}
    assert estimate(plans.best.recipe).fits


def test_two_nodes_of_eight_h100_train_a_70b_in_full():
    plans = search(
        draft('llama-3.1-70b', 'p5', nodes=2, global_batch=32, length=4096),
        {'method.kind': 'full'})
    assert plans.accepted
    assert plans.best.draft.sharding.strategy in ('fsdp2', 'zero3')
    assert {None, 8} == {p.settings['sharding.group'] for p in plans.accepted + plans.refused}


def test_a_disk_whose_size_nobody_gave_refuses_no_plan():
    base = draft('llama-3.1-70b', '8x-h200', tokens=100_000_000)
    only = {'method.kind': 'full', 'optimizer.kind': 'adamw_fused', 'sharding.strategy': 'fsdp2'}
    found = search(base, only)
    assert base.intervals.saving
    assert found.accepted
    assert estimate(found.best.recipe).fits
    assert 'the disk has' in estimate(found.best.recipe).verdict
    small = node('8x-h200').changed(disk_b=2 * 10**12)
    assert not estimate(found.best.recipe, small).fits


# The search

def test_every_accepted_plan_is_a_checked_recipe_with_the_figures_of_its_estimate(eight):
    for plan in sample(eight.accepted):
        e = estimate(plan.recipe)
        assert e.fits
        assert e.rooms[0].need_b == plan.gpu_b
        assert e.margin_b == plan.spare_b
        assert (e.step.tokens_per_s, e.step.hours, e.step.cost) == (
            plan.tokens_per_s, plan.hours, plan.usd)
        assert plan.recipe == plan.draft
        assert plan.recipe.global_batch == 64


def test_a_refusal_for_a_rule_is_one_of_the_recipe_too(found):
    broke = [r for r in found.refused if r.kind == 'rule']
    assert broke
    for refusal in sample(broke):
        strategy = refusal.settings['sharding.strategy']
        kind = refusal.settings['method.kind']
        slices = strategy == 'fsdp2' or strategy == 'zero3' and kind != 'qlora'
        with pytest.raises(RecipeError) as caught:
            found.base.changed(
                refusal.settings | {'sharding.loading': 'sharded' if slices else 'every_rank'})
        problems = ' '.join(map(str, caught.value.problems))
        assert all(reason.rpartition('[')[2] in problems for reason in refusal.reasons)
        assert len(caught.value.problems) == len(refusal.reasons)


def lacks_b(refusal):
    "What is missing where most is; the disk of these machines is assumed, and refuses nothing."
    return max(-room.spare_b for room in estimate(refusal.draft).rooms if room.place != 'disk')


def test_what_is_proved_by_a_lighter_plan_is_true(found):
    proved = [r for r in found.refused if r.proved]
    assert len(proved) > 100
    for refusal in sample(proved):
        assert lacks_b(refusal) >= refusal.short_b > 0


def test_what_is_counted_misses_exactly_so_many_bytes(found):
    counted = [r for r in found.refused if r.kind == 'memory' and not r.proved]
    assert counted
    for refusal in sample(counted):
        assert lacks_b(refusal) == refusal.short_b


def test_pruning_loses_no_plan(monkeypatch):
    from llm_workbook.plan import search as plans
    quick = search(PAIR, SMALL)
    monkeypatch.setattr(plans, '_family_and_weight', lambda trial, changes: (object(), ()))
    slow = search(PAIR, SMALL)
    assert not any(r.proved for r in slow.refused)
    assert any(r.proved for r in quick.refused)
    assert sorted(map(key, quick.accepted)) == sorted(map(key, slow.accepted))


def test_no_combination_is_tried_twice(found):
    counts = Counter(map(key, found.accepted + found.planned + found.refused))
    assert max(counts.values()) == 1
    assert len(found) == len(counts)


def test_plans_are_ranked_by_time_or_by_money():
    machines = ['8x-h100', '1x-rtx-4090', '8x-a100-80', '8x-l4']
    axes = {'cluster.hardware': machines, 'method.kind': 'lora', 'batch.loss_head': 'chunked'}
    base = draft('llama-3.1-8b', '8x-h100', global_batch=64)
    quick = search(base, axes)
    cheap = search(base, axes, by='usd')
    ranks = [
        [(p.tight, p.hours) for p in quick.accepted],
        [(p.tight, p.usd) for p in cheap.accepted]]
    assert all(row == sorted(row) for row in ranks)
    for p in sample(quick.accepted):
        assert p.tight == any(w.startswith('tight') for w in estimate(p.recipe).warnings)
    assert cheap.best.usd <= quick.best.usd
    assert quick.best.hours <= cheap.best.hours
    assert {p.draft.cluster.processes for p in quick.accepted} == {1, 8}
    assert all(p.draft.global_batch == 64 for p in quick.accepted)


@pytest.mark.parametrize('method', ['qlora', 'lora', 'full'])
def test_the_front_rises_and_nothing_is_beyond_it(eight, method):
    front = eight.front(method)
    own = [p for p in eight.accepted if p.draft.method.kind == method]
    assert [p.gpu_b for p in front] == sorted({p.gpu_b for p in front})
    assert [p.tokens_per_s for p in front] == sorted({p.tokens_per_s for p in front})
    assert front[-1].tokens_per_s == max(p.tokens_per_s for p in own)
    assert front[0].gpu_b == min(p.gpu_b for p in own)
    assert not [
        p for p in own for f in front if p.gpu_b < f.gpu_b and p.tokens_per_s >= f.tokens_per_s]


def test_why_speaks_of_those_that_were_asked_for(found):
    assert found.why({'method.kind': 'full'}).splitlines()[0].endswith('0 fit.')
    assert 'lacks' in found.why({'method.kind': 'full'})
    with pytest.raises(ValueError, match="did you mean 'method.kind'"):
        found.why({'method.knd': 'full'})
    with pytest.raises(ValueError, match='was not tried'): found.why({'batch.micro': 3})


def test_plans_can_be_written_and_drawn(eight):
    assert len(json.loads(json.dumps(eight.to_dict()))['accepted']) == len(eight.accepted)
    assert '<script' not in eight._repr_html_()
    assert len(eight.plot()._repr_png_()) < 60 * 1024
    assert len(eight.plot('money')._repr_png_()) < 60 * 1024


@pytest.mark.parametrize(
    'axes, by, words',
    [
        ({'method.knd': 'full'}, 'hours', "did you mean 'method.kind'"),
        ({'seed': 1}, 'hours', 'is no axis'),
        ({'batch.micro': []}, 'hours', 'no values'),
        ({'batch.accumulation': 2}, 'hours', 'follows from'),
        ({'batch.micro': -1}, 'hours', 'greater than or equal to 1'),
        ({'method.kind': 'qlorra'}, 'hours', 'qlora'),
        ({}, 'price', "'hours' or 'usd'")])
def test_axes_are_checked(axes, by, words):
    with pytest.raises(ValueError, match=words): search(PAIR, axes, by)


@pytest.mark.slow
def test_fewer_processes_than_gpus_and_several_machines():
    four = draft('llama-3.1-8b', '8x-h100', global_batch=64).changed(
        {'cluster.processes': 4, 'batch.accumulation': 16})
    half = search(four, {'method.kind': 'lora'})
    assert {p.draft.cluster.ranks for p in half.accepted} == {4}
    assert {p.draft.global_batch for p in half.accepted} == {64}
    axes = {'method.kind': 'lora', 'cluster.nodes': [1, 2], 'cluster.processes': [1, 8]}
    sizes = search(draft('llama-3.1-8b', 'p5', global_batch=64), axes)
    assert {(p.draft.cluster.nodes, p.draft.cluster.processes) for p in sizes.accepted} == {
        (1, 1),
        (1, 8),
        (2, 1),
        (2, 8)}
    assert {p.draft.global_batch for p in sizes.accepted} == {64}
    alone = [p.draft.sharding for p in sizes.accepted if p.draft.cluster.ranks == 1]
    assert {(how.strategy, how.offload_parameters) for how in alone} == {
        ('none', 'none'), ('fsdp2', 'cpu')}


def test_a_cpu_can_be_searched_too():
    plans = search(draft('tiny-base', 'cpu', global_batch=2, length=128))
    assert plans.accepted
    assert {p.draft.cluster.device for p in plans.accepted} == {'cpu'}


def test_a_whole_recipe_of_this_package_can_be_searched_around():
    plans = search(Recipe.named('70b-2x24gb-qlora'), {'method.kind': 'qlora'})
    assert plans.accepted
    assert all(
        p.draft.model == plans.base.model and p.draft.batch.length == 1024 for p in plans.accepted)


# Speed, in calls of functions: half a millisecond to three on quiet cores

def test_an_estimate_takes_milliseconds():
    large = draft('llama-3.1-405b', 'p5', nodes=4, global_batch=32)
    for recipe, most in (PAIR, 3_500), (PAIR.changed({'batch.micro': 2}), 4_400), (large, 11_500):
        estimate(recipe)
        assert calls_of(lambda: estimate(recipe)) < most


ALL_FIT = {
    'method.kind': 'lora', 'sharding.strategy': 'fsdp2', 'method.rank': [8, 16],
    'optimizer.kind': ['adamw', 'adamw_bf16', 'sgd'],
    'sharding.offload_parameters': 'none', 'sharding.offload_optimizer': 'none'}


@pytest.mark.parametrize('base, axes, most', [
    slow_case(draft('llama-3.1-8b', '8x-h100', global_batch=64, length=4096), None, 1_900),
    (draft('llama-3.2-1b', '8x-h100', global_batch=512, length=256), ALL_FIT, 2_400)],
    ids=['thousands', 'all fit'])
def test_plans_of_a_search_share_their_work(base, axes, most):
    "Two to three times as many calls where the sizes of a layer are computed for each plan."
    found = search(base, axes)  # What is known of a model once is known from here on
    assert bool(found.refused) == (axes is None)
    assert calls_of(lambda: search(base, axes)) / len(found) < most


# The packaged plans

def test_the_shelf_has_every_recipe_of_the_package_and_plans_none_before_it_is_asked(monkeypatch):
    from llm_workbook.plan import estimate as planner
    monkeypatch.setattr(planner, 'estimate', None)  # Looking at names calls nothing
    packaged = recipes()
    assert list(packaged) == recipe_names()
    assert len(packaged) == len(recipe_names())
    assert repr(packaged).split() == recipe_names()
    assert 'reviews-qlora' in packaged
    assert 'reviews' not in packaged


@pytest.mark.parametrize('name', recipe_names())
def test_a_recipe_on_the_shelf_is_its_estimate(name):
    found = recipes()[name]
    row = recipes().to_dict()[name]
    assert found.recipe == Recipe.named(name)
    assert found.ledger.to_dict() == estimate(Recipe.named(name)).ledger.to_dict()
    rooms, cluster = {room.place: room for room in found.rooms}, found.recipe.cluster
    for place in 'gpu', 'host':
        room = rooms.get(place)
        assert (row[f'{place}_need_b'], row[f'{place}_have_b']) == (
            (room.need_b, room.have_b) if room else (None, None))
    assert row['hardware'] == f'{cluster.nodes} x {cluster.processes} x {found.node.gpu.name}'
    assert (row['fits'], row['method'], row['strategy']) == (
        found.fits, found.recipe.method.kind, found.recipe.sharding.strategy)


def test_the_shelf_shows_itself_and_knows_what_it_lacks():
    shown = recipes()._repr_html_()
    rows = json.loads(json.dumps(recipes().to_dict()))
    for name, row in rows.items():
        assert f'>{name}</td>' in shown
        assert f'{row["host_need_b"] / 2**30:,.1f} GiB of' in shown
    with pytest.raises(RecipeError, match="did you mean '70b-2x24gb-qlora'"):
        recipes()['70b-2x24gb-qlra']


def test_a_second_look_at_the_shelf_is_free():
    recipes().to_dict()
    assert calls_of(lambda: recipes().to_dict()) < 2_000


# Shown

@pytest.mark.parametrize(
    'recipe',
    [
        PAIR,
        PAIR.changed({'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'}),
        draft('tiny-base', 'cpu', global_batch=2, length=128)])
def test_a_printed_plan_has_the_figures_of_its_table(recipe):
    plan = estimate(recipe)
    title, verdict, head, *rest = str(plan).splitlines()
    assert title == f'{recipe.name} on 1 x {plan.node.name}'
    assert head.split()[0] == 'GiB'
    assert verdict.lower().startswith(plan.answer)
    assert verdict.rstrip('.') in plan.verdict
    for room, line in zip(plan.rooms, rest):
        sizes = [
            sum(plan.peaks(room.place).get(phase, {}).values())
            for phase in ('load', 'step', 'save')]
        assert line.split()[-4:] == [f'{size_b / 2**30:,.1f}' for size_b in (*sizes, room.have_b)]
        assert max(sizes) == room.need_b
    speed, *notes = rest[len(plan.rooms):]
    assert plan.ranges['hours'].text(' hours') in speed
    assert plan.ranges['usd'].text(' USD', digits=2) in speed
    assert notes[:len(plan.warnings)] == [f'- {warning}' for warning in plan.warnings]
    assumed = [note for note in notes[len(plan.warnings):] if 'assumed' in note]
    assert len(assumed) == bool(plan.node.assumed)


def test_less_than_a_gibibyte_short_is_not_written_as_nothing():
    plan = estimate(PAIR)
    size_b = plan.rooms[0].need_b
    assert 'lacks 3.0 MiB' in str(plan.rooms[0]._replace(have_b=size_b - 3 * 2**20))
    assert '0.0 GiB free' in str(plan.rooms[0]._replace(have_b=size_b))


@pytest.mark.parametrize('steps, every', [(100, 10), (101, 10), (100, 40), (7, 10), (3, 1), (1, 1)])
def test_a_patience_that_can_end_no_run_is_said(steps, every):
    "Played through: held-out rows that gain nothing after the first evaluation."
    from llm_workbook.config.rules import broken
    from llm_workbook.training.early_stopping import out_of_patience
    judged = [{'step': step, 'loss': 1.0} for step in range(every, steps, every)]
    fields = {'optimizer.steps': steps, 'intervals.evaluation': every}
    ends_early = [count for count in range(1, 12) if out_of_patience(judged, count)]
    for patience in range(1, 12):
        facts = plan_facts(OLD.changed(fields | {'intervals.patience': patience}))
        said = [rule.id for rule in broken(facts, 'warn')]
        assert ('patience-within-the-run' in said) == (patience not in ends_early)
