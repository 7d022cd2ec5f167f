"""Properties of the memory plan over 2,000 random recipes that no rule refuses, and the recipes of
properties that once did not hold."""
import json

import pytest
from bench.lines import plan_properties
from bench.record import RESULTS
from bench.shared.properties import PROPERTIES, Property, judged, ledger, padding_note
from bench.shared.random_recipes import PLAIN, minimal, recipes
from hypothesis import HealthCheck, given, settings
from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Recipe
from llm_workbook.model.spec import spec
from llm_workbook.plan.collectives import step_messages
from llm_workbook.plan.ledger import memory
from llm_workbook.plan.step_memory import instant_lines

EXAMPLES = 1000 // len(PROPERTIES)
RECORD = json.loads((RESULTS/'cpu/plan_properties.json').read_text())


def check(one: Property, examples: int) -> None:
    "Fail with the least recipe of which a property does not hold."
    @settings(max_examples=examples, derandomize=True, database=None, deadline=None,
              suppress_health_check=[HealthCheck.too_slow])
    @given(recipes())
    def holds(recipe):
        said = judged(recipe, one.broken)
        assert not said, f'{one.name}: {said}, of a plain recipe with {minimal(recipe)}'
    holds()


@pytest.mark.parametrize('one', PROPERTIES, ids=lambda one: one.broken.__name__)
def test_it_holds_of_random_recipes(one): check(one, EXAMPLES)


def test_a_property_that_does_not_hold_names_its_least_recipe():
    false = Property('few ranks', lambda recipe: 'many' if recipe.cluster.ranks > 4 else '')
    with pytest.raises(AssertionError, match='few ranks: many, of a plain recipe with') as caught:
        check(false, 100)
    assert "'cluster." in str(caught.value)
    assert 'batch' not in str(caught.value)
    assert 'method' not in str(caught.value)


def test_the_record_counts_violations_of_20_000_recipes():
    assert RECORD['value'] == sum(row['violations'] for row in RECORD['rows']) == 0
    assert RECORD['recipes'] == sum(row['recipes'] for row in RECORD['rows']) >= 20_000
    assert {row['name'] for row in RECORD['rows']} == {one.name for one in PROPERTIES}


def test_the_line_counts_what_does_not_hold(monkeypatch):
    false = Property('few ranks', lambda recipe: 'many' if recipe.cluster.ranks > 4 else '')
    monkeypatch.setattr(plan_properties, 'PROPERTIES', (false, PROPERTIES[0]))
    made = plan_properties.measure(examples=60, seed=1)
    bad, good = made['rows']
    assert made['value'] == bad['violations'] > 5
    assert bad['said'] == 'many'
    assert {'cluster.processes', 'cluster.nodes'} & set(bad['least'])
    assert good['violations'] == 0
    assert 'least' not in good


# What once did not hold

def gpu_b(recipe): return memory(recipe).total('step')


def test_offload_of_a_small_adapter_frees_memory():
    recipe = PLAIN.changed({
        'model.source': 'llama-3.1-8b', 'method.kind': 'lora', 'method.rank': 8,
        'sharding.strategy': 'zero2', 'cluster.processes': 2, 'batch.length': 1024,
        'sharding.activation_checkpointing': 'full'})
    away = recipe.changed({'sharding.offload_optimizer': 'cpu'})
    assert gpu_b(away) < gpu_b(recipe)
    lines = {line.name: line for line in memory(away).lines if line.phase == 'step'}
    # DeepSpeed asks for the largest trained tensor: B of the widest layer, 14336 x 8, in 16 bit
    assert lines['largest gradient, on the GPU'].size_b == 2 * 14336 * 8


def test_the_host_keeps_the_gradients_of_earlier_passes():
    recipe = PLAIN.changed({
        'sharding.strategy': 'zero2', 'cluster.processes': 2, 'sharding.offload_optimizer': 'cpu'})
    names = [{line.name for line in memory(made).lines if line.place in ('host', 'pinned')}
             for made in (recipe, recipe.changed({'batch.accumulation': 2}))]
    assert names[1] - names[0] >= {'gradients of earlier passes'}


def test_nothing_is_kept_twice_under_selective_checkpointing():
    recipe = PLAIN.changed({
        'model.source': 'llama-3.1-8b', 'batch.length': 512, 'precision.master': 'bfloat16',
        'sharding.activation_checkpointing': 'selective'})
    assert min(line.size_b for line in memory(recipe).lines) >= 0
    works = [line.size_b for lines in instant_lines(spec('llama-3.1-8b'), recipe).values()
             for line in lines if line.name == 'kept by the part at work']
    assert works
    assert min(works) > 0


def test_fsdp1_pads_by_less_than_a_number_a_rank():
    recipe = PLAIN.changed({
        'model.source': 'mixtral-8x7b', 'sharding.strategy': 'fsdp1', 'cluster.processes': 8,
        'cluster.nodes': 4, 'cluster.hardware': 'p4d'})
    layer = spec('mixtral-8x7b').units[0].parameters
    gathers = [message.tensor_b for exchange in step_messages(recipe, units='shard_model')[0]
               for message in exchange.forward_gathers]
    assert 0 <= gathers[0] - 2 * layer < 2 * 32
    held = [line.size_b for line in memory(recipe).lines if line.name == 'gathered weights']
    fsdp2 = recipe.changed({'sharding.strategy': 'fsdp2'})
    assert max(held) < 8 * 2 * layer
    assert gpu_b(recipe) < gpu_b(fsdp2)


@pytest.mark.parametrize('nodes, said', [(1, ''), (2, ''), (4, 'sharding.group 8')])
def test_a_plan_names_the_ranks_that_only_pad(nodes, said):
    recipe = PLAIN.changed({
        'model.source': 'mixtral-8x7b', 'sharding.strategy': 'fsdp2', 'cluster.processes': 8,
        'cluster.nodes': nodes, 'sharding.activation_checkpointing': 'full'})
    note = padding_note(ledger(recipe))
    assert said in note
    assert bool(said) == bool(note)


@pytest.mark.parametrize('changes, field', [
    ({'method.targets': ('q_proj', 'nowhere')}, 'method.targets'),
    ({'model.source': 'mixtral-8x7b', 'method.dropout': .1}, 'method.dropout')])
def test_what_a_model_refuses_is_a_recipe_error(changes, field):
    with pytest.raises(RecipeError) as caught: memory(PLAIN.changed(
        {'method.kind': 'lora'} | changes))
    assert [problem.path for problem in caught.value.problems] == [field]


def zero3(changes: dict) -> dict[str, int]:
    recipe = PLAIN.changed({
        'model.source': 'llama-3.1-8b', 'method.kind': 'lora', 'sharding.strategy': 'zero3',
        'cluster.processes': 8} | changes)
    return {line.name: line.size_b for line in memory(recipe).lines if line.instant == 'loss'}


def test_zero3_gathers_up_to_max_live():
    name = 'gathered weights, up to zero.max_live'
    assert abs(zero3({})[name] - 2 * 10**9) < 2 * 10**7  # 16 bit, a few adapters in float32
    assert abs(zero3({'zero.max_live': 3 * 10**9})[name] - 6 * 10**9) < 6 * 10**7
    small = zero3({'model.source': 'llama-3.2-1b', 'zero.max_live': 3 * 10**9})[name]
    assert small > 2 * .99 * spec('llama-3.2-1b').parameters


def test_every_packaged_recipe_has_no_padding_note():
    assert not padding_note(memory(Recipe.named('70b-2x8-a100-80-full')))
