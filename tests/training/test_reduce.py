"""Gradients that are summed in float32: asked for, in force, and another sum than in bfloat16."""
import pytest
from trouble import fine_tune, slow_case, small_recipe

from llm_workbook.config.recipe import Recipe, planned_only
from llm_workbook.config.rules import broken
from llm_workbook.training.effective import explain_config
from llm_workbook.training.run_directory import RunFiles, read_metrics

FULL = {'method.kind': 'full', 'optimizer.steps': 3}
WAYS = {
    'fsdp2': FULL,
    'zero2': FULL | {'sharding.strategy': 'zero2', 'zero.reduce_bucket': 1_000_000},
    'ddp': FULL | {'sharding.strategy': 'ddp'},
    'adapters': {'method.kind': 'lora', 'optimizer.steps': 3},
}


@pytest.mark.parametrize('way', ['fsdp2', *map(slow_case, ['zero2', 'ddp', 'adapters'])])
def test_what_is_asked_is_in_force(tmp_path, way):
    recipe = small_recipe(tmp_path, **(WAYS[way] | {
        'precision.compute': 'bfloat16', 'precision.reduce': 'float32'}))
    assert not planned_only(recipe)
    setting = explain_config(fine_tune(recipe, tmp_path/'run'))['precision.reduce']
    assert setting.found == setting.asked == 'float32'


def test_fsdp2_sums_otherwise_where_it_is_asked_to(tmp_path):
    recipe = small_recipe(tmp_path, **(FULL | {'precision.compute': 'bfloat16'}))
    seen = []
    for reduce in None, 'float32':
        fine_tune(recipe.changed({'precision.reduce': reduce}), tmp_path/f'{reduce}')
        seen.append(read_metrics(RunFiles(tmp_path/f'{reduce}').metrics))
    short, exact = seen
    assert short[0]['loss'] == exact[0]['loss']  # Before the first update
    norms = [(one['grad_norm'], other['grad_norm']) for one, other in zip(short, exact)]
    assert all(one != other for one, other in norms)
    assert all(abs(one / other - 1) < 1e-3 for one, other in norms)


def test_many_ranks_are_told_to_sum_in_float32():
    full = Recipe.named('70b-2x8-a100-80-full')
    def told(**changes):
        facts = full.changed(changes).facts()
        return 'sums-of-many-ranks-round' in [rule.id for rule in broken(facts, 'warn')]
    assert told()
    assert not told(**{'precision.reduce': 'float32'})
    assert not told(**{'precision.master': 'bfloat16'})  # FSDP2 casts nothing there
    assert not told(**{'cluster.nodes': 1, 'cluster.processes': 4})
