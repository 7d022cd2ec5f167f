"""Questions of a user: whatever the card, the best plan of a search is a recipe that this version
runs and that fits; what cannot be run is kept apart, with the reason."""
import json

import pytest
from llm_workbook import (
    Recipe, RecipeError, differences, draft, estimate, memory, memory_ladder, node, panel_state,
    search)
from llm_workbook.config.recipe import planned_only
from llm_workbook.plan.estimate import plan_facts

QUICK = {
    'optimizer.kind': ['adamw_fused', 'adamw_8bit'], 'batch.loss_head': 'chunked',
    'sharding.reshard_after_forward': True}
QLORA, LORA, FULL = ({'method.kind': kind} | QUICK for kind in ('qlora', 'lora', 'full'))
QUESTIONS = [  # Model, machine, machines, more for `draft`, axes
    ('llama-3.1-8b', '1x-t4', 1, {}, QLORA),
    ('llama-3.1-8b', 'kaggle-2x-t4', 1, {}, QLORA),
    ('llama-2-7b', '1x-v100-16', 1, {}, QLORA),
    ('qwen3-4b', '1x-rtx-3060', 1, {'length': 1024}, QLORA),
    ('llama-3.1-8b', '1x-rtx-4070', 1, {'length': 512}, QLORA),
    ('llama-3.1-8b', '1x-l4', 1, {}, QLORA),
    ('llama-3.1-8b', '1x-a10', 1, {}, QLORA),
    ('llama-3.1-8b', '1x-rtx-4090', 1, {}, {}),
    ('qwen3-14b', '1x-rtx-5090', 1, {}, QLORA),
    ('qwen3-32b', 'desktop-2x-4090', 1, {}, QLORA),
    ('llama-3.1-70b', '2x-rtx-3090', 1, {}, QLORA),
    ('llama-3.1-8b', '1x-a40', 1, {}, LORA),
    ('qwen3-32b', '1x-rtx-a6000', 1, {}, QLORA),
    ('qwen3-14b', '1x-l20', 1, {}, QLORA),
    ('llama-3.1-70b', '1x-rtx-pro-6000', 1, {}, QLORA),
    ('llama-2-7b', '8x-a100-80', 1, {}, FULL),
    ('llama-3.1-70b', '8x-h100', 1, {}, LORA),
    ('llama-3.1-70b', '8x-h20', 1, {}, LORA),
    ('llama-3.1-405b', 'dgx-h100', 4, {'global_batch': 32}, LORA),
    ('llama-3.1-70b', '1x-h200', 1, {}, QLORA),
    ('llama-3.1-70b', 'dgx-b200', 1, {}, FULL),
    ('llama-3.1-70b', 'gb200-4x', 1, {}, LORA),
    ('llama-3.1-70b', '1x-mi300x', 1, {}, QLORA),
    ('gpt-oss-20b', '1x-h100', 1, {}, {}),
    ('gemma-2-9b', '1x-a100-40', 1, {}, QLORA),
    ('mixtral-8x7b', '8x-a100-80', 1, {}, LORA)]


@pytest.mark.parametrize('model, hardware, nodes, more, axes', QUESTIONS,
                         ids=[f'{model} on {nodes} x {machine}'
                              for model, machine, nodes, *_ in QUESTIONS])
def test_the_best_plan_of_a_question_runs_and_fits(model, hardware, nodes, more, axes):
    plans = search(draft(model, hardware, nodes, **more), axes)
    recipe = plans.best.recipe
    assert recipe == Recipe.parse(recipe.dump())
    assert planned_only(recipe, plan_facts(recipe)) == []
    assert estimate(recipe).fits
    assert not plans.best.not_run


# What runs and what does not

@pytest.fixture(scope='module')
def card(): return search(draft('llama-3.1-8b', '1x-rtx-4090'))


def test_what_is_planned_only_is_kept_apart_with_the_reason(card):
    assert card.accepted
    assert card.planned
    for plan in card.accepted + card.planned:
        facts = plan_facts(plan.recipe)
        assert plan.not_run == tuple(map(str, planned_only(plan.recipe, facts)))
        assert bool(plan.not_run) == (plan in card.planned)
    assert len(card) == len(card.accepted) + len(card.planned) + len(card.refused)
    assert f'{len(card.planned)} fit and are planned only' in repr(card)
    assert f'fit, and planned only: {card.planned[0].not_run[0]}.' in card.why()
    assert 'fit, planned only' in card._repr_html_()
    assert len(json.loads(json.dumps(card.to_dict()))['planned']) == len(card.planned)


def test_a_search_in_which_nothing_runs_names_the_nearest_plan():
    plans = search(draft('llama-3.1-8b', '1x-rtx-4090'), QLORA | {
        'intervals.checkpoint': 'full', 'batch.loss_head': ['full', 'chunked']})
    assert plans.planned
    assert not plans.accepted
    for name in ('best', 'fastest', 'cheapest', 'longest_context', 'fewest_changes'):
        with pytest.raises(ValueError, match='this version runs none of') as caught:
            getattr(plans, name)
        near = str(caught.value).partition('The nearest, ')[2]
        assert 'loss_head chunked' in near
        assert 'intervals.checkpoint = ' in near and 'can be planned, not run' in near


def test_the_trainers_reentrant_checkpointing_is_said_by_the_recipe():
    plans = search(draft('llama-3.1-8b', '8x-h100'), LORA | {
        'sharding.strategy': 'zero3', 'sharding.activation_checkpointing': 'full'})
    assert plans.accepted
    assert not plans.planned
    assert all(plan.draft.sharding.reentrant for plan in plans.accepted)


# Plans by name

def test_plans_are_found_by_name(card):
    plain = [plan for plan in card.accepted if not plan.tight]
    assert card.fastest.hours == min(plan.hours for plan in plain)
    assert card.cheapest.usd == min(plan.usd for plan in plain)
    changed = [len(differences(card.base, plan.draft)) for plan in plain]
    assert len(differences(card.base, card.fewest_changes.recipe)) == min(changed)


def test_the_longest_rows_are_the_longest_that_fit(card):
    longest = card.longest_context
    length = longest.draft.batch.length
    assert length > card.base.batch.length
    plan = estimate(longest.recipe)
    assert plan.fits
    assert (plan.rooms[0].need_b, plan.step.hours) == (longest.gpu_b, longest.hours)
    assert not any(warning.startswith('tight') for warning in plan.warnings)
    for other in card.accepted:
        longer = estimate(other.recipe.changed({'batch.length': length + 128}))
        assert not longer.fits or any(w.startswith('tight') for w in longer.warnings)


def test_rows_do_not_outgrow_the_context_of_the_base():
    plans = search(draft('gemma-2-2b', '1x-b200', global_batch=1), {'method.kind': 'lora'})
    assert plans.longest_context.draft.batch.length == 8192


# A price of 0 is not known

def test_what_has_no_price_is_not_cheap():
    machines = ['1x-rtx-4060-ti-16', '1x-rtx-4090']
    assert [node(name).price_hour > 0 for name in machines] == [False, True]
    base = draft('qwen3-4b', '1x-rtx-4090')
    axes = QLORA | {'cluster.hardware': machines}
    plans = search(base, axes, by='usd')
    names = [plan.draft.cluster.hardware for plan in plans.accepted]
    assert set(names) == set(machines)
    assert names == sorted(names, reverse=True), 'with a price first'
    assert plans.best == plans.cheapest == search(base, axes).cheapest
    assert plans.best.draft.cluster.hardware == '1x-rtx-4090'
    assert '>unknown<' in plans._repr_html_()


def test_where_no_price_is_known_the_cheapest_is_an_error():
    base = draft('qwen3-4b', '1x-rtx-4060-ti-16')
    words = 'no price is known for 1x-rtx-4060-ti-16: give one'
    with pytest.raises(ValueError, match=words): search(base, QLORA, by='usd')
    plans = search(base, QLORA)
    assert plans.best
    with pytest.raises(ValueError, match=words): print(plans.cheapest)
    with pytest.raises(ValueError, match=words): plans.plot('money')


# What only the model or the machine shows

ONE = draft('llama-3.1-8b', '1x-rtx-4090')
EXPERTS = draft('mixtral-8x7b', '8x-a100-80')


@pytest.mark.parametrize('recipe, changes, words', [
    (ONE, {'method.targets': ['qkv_proj']}, r"method.targets = \['qkv_proj'\]: .*did you mean"),
    (EXPERTS, {'method.dropout': .1}, 'method.dropout = 0.1: .*set it to 0'),
    (EXPERTS, {'method.dora': True}, 'method.dora = True: .*set it to false'),
    (EXPERTS, {'method.scaling': 'rslora'}, "method.scaling = 'rslora': .*set it to lora"),
    (EXPERTS, {'method.targets': ['w1']}, r"method.targets = \['w1'\]: w1 and w3 are one"),
    (ONE, {'model.source': 'llama-3.1-9b'}, "model.source = 'llama-3.1-9b': .*did you mean"),
    (ONE, {'cluster.processes': 2, 'sharding.strategy': 'ddp'},
     'cluster.processes = 2: .*at most one each'),
    (ONE, {'cluster.hardware': '1x-rtx-3900'}, "cluster.hardware = '1x-rtx-3900': .*did you mean"),
    (ONE, {'cluster.nodes': 2, 'sharding.strategy': 'ddp'}, 'cluster.nodes = 2: .*no network')])
def test_what_does_not_go_with_the_model_or_the_machine_names_its_field(recipe, changes, words):
    with pytest.raises(RecipeError, match=words): estimate(recipe.changed(changes))


def test_a_ladder_and_a_count_name_the_field_too():
    cpu = draft('tiny-base', 'cpu', global_batch=2, length=128)
    with pytest.raises(RecipeError, match="cluster.device = 'cpu': .*set it to cuda"):
        memory_ladder(cpu)
    with pytest.raises(RecipeError, match='method.dropout = 0.1'):
        memory(EXPERTS.changed({'method.dropout': .1}))


@pytest.mark.parametrize('base, axis, good, bad', [
    (ONE, 'method.targets', ('q_proj', 'v_proj'), ('qkv_proj',)),
    (EXPERTS, 'method.dropout', 0.0, 0.1),
    (draft('llama-3.1-8b', '2x-rtx-3090'), 'cluster.processes', 2, 4),
    (draft('llama-3.1-8b', '2x-rtx-3090', global_batch=16), 'cluster.nodes', 1, 2)])
def test_a_search_skips_what_does_not_go_with_the_model_and_keeps_the_reason(base, axis, good, bad):
    plans = search(base, LORA | {axis: [good, bad], 'batch.micro': 1})
    assert {plan.settings[axis] for plan in plans.accepted} == {good}
    refused = [row for row in plans.refused if row.settings[axis] == bad]
    wrong = [row for row in refused if any(axis in reason or 'network' in reason
                                           for reason in row.reasons)]
    assert wrong
    assert {row.kind for row in wrong} <= {'model', 'rule'}
    assert wrong[0].reasons[0] in plans.why({axis: bad})


# Models without some attention

@pytest.mark.parametrize('model', ['gpt-oss-20b', 'gemma-2-9b'])
def test_a_model_without_sdpa_is_drafted_with_what_it_has(model):
    recipe = draft(model, '8x-h100')
    assert recipe.model.attention == 'eager'
    assert planned_only(recipe, plan_facts(recipe)) == []
    assert estimate(recipe).fits
    assert estimate(recipe.changed({'model.attention': 'flash'})).fits
    with pytest.raises(RecipeError, match="attention = 'sdpa': .*set it to eager .model-has-no"):
        estimate(recipe.changed({'model.attention': 'sdpa'}))
    plans = search(recipe, LORA | {'model.attention': ['sdpa', 'eager'], 'batch.micro': 1})
    assert {plan.draft.model.attention for plan in plans.accepted} == {'eager'}


def test_the_rules_say_what_the_classes_of_transformers_say():
    from transformers import Gemma2ForCausalLM, GptOssForCausalLM, LlamaForCausalLM
    classes = {'gemma-2-9b': Gemma2ForCausalLM, 'gpt-oss-20b': GptOssForCausalLM,
               'llama-3.1-8b': LlamaForCausalLM}
    for name, kind in classes.items():
        facts = plan_facts(draft(name, '8x-h100'))
        assert facts['plan.sdpa'] is kind._supports_sdpa
        assert facts['plan.flash'] is kind._supports_flash_attn
        assert facts['plan.segments'] is (name == 'llama-3.1-8b')


def test_experts_that_stay_in_16_bit_are_drafted_as_lora():
    assert EXPERTS.method.kind == 'lora'
    packed = EXPERTS.changed({'method.kind': 'qlora'})
    (problem,) = planned_only(packed, plan_facts(packed))
    assert problem.path == 'method.unpacked'
    raised = packed.changed({'method.unpacked': .98})
    assert planned_only(raised, plan_facts(raised)) == []


def test_a_panel_gives_a_model_an_attention_that_it_has():
    state = panel_state({'model.source': 'openai/gpt-oss-20b', 'method.kind': 'lora'})
    assert not state.errors
    assert state.recipe.model.attention == 'eager'
    assert panel_state().recipe.model.attention == 'sdpa'


@pytest.mark.parametrize('recipe', [
    EXPERTS.changed({'batch.micro': 2, 'batch.accumulation': 1}),
    draft('llama-3.1-70b', '8x-h100').changed(
        {'method.kind': 'lora', 'sharding.strategy': 'zero3', 'sharding.loading': 'every_rank',
         'sharding.activation_checkpointing': 'none'})], ids=['experts', 'zero3'])
def test_a_ladder_has_only_rungs_that_this_version_runs(recipe):
    assert planned_only(recipe, plan_facts(recipe)) == []
    ladder = memory_ladder(recipe)
    assert len(ladder) > 1
    for rung in ladder:
        lower = recipe.changed(rung.changes)
        assert planned_only(lower, plan_facts(lower)) == []
    if recipe.sharding.activation_checkpointing == 'none':
        assert 'all layers recomputed' in [rung.what for rung in ladder]
