"""Hybrid sharding on four real ranks, two copies on two ranks each: the run of one process, what
each rank holds and sends, and a run that goes on in other groups."""
import os

import pytest

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
from bench.lines.ledger_bytes import bytes_apart, sent_apart
from bench.shared.real_ranks import run_trainer
from safetensors.torch import load_file
from trouble import fine_tune, slow_case, small_base, small_recipe

from llm_workbook.checkpoint.manifest import survey
from llm_workbook.config.recipe import Recipe, planned_only, shrink
from llm_workbook.training.effective import ConfigMismatch, check_launcher, explain_config
from llm_workbook.training.run_directory import mark_run, read_metrics

FOUR = {'cluster.processes': 4, 'optimizer.steps': 3, 'optimizer.clip': 0.5}
PAIRS = FOUR | {'sharding.group': 2}
ONE = FOUR | {'cluster.processes': 1, 'sharding.strategy': 'none', 'batch.micro': 4,
              'sharding.loading': 'every_rank'}
LORA, QLORA = {'method.kind': 'lora'}, {'method.kind': 'qlora'}
FLOAT32 = {'precision.compute': 'float32', 'method.storage': 'float32'}
REVIEWS = {
    'model.head': 'classification', 'data.source': 'sample-reviews',
    'data.format': 'classification', 'data.text_column': 'text', 'data.label_column': 'stars',
    'data.labels': {1: 'negative', 2: 'negative', 3: None, 4: 'positive', 5: 'positive'}}
KINDS = {
    'full, twice': {'batch.accumulation': 2}, 'lora': LORA,
    'qlora, arriving': QLORA | FLOAT32 | {'sharding.loading': 'sharded'},
    'loop': QLORA | FLOAT32 | REVIEWS}


def trained(recipe, directory):
    "Metrics of a run, and the tensors that it saved."
    run = fine_tune(recipe, directory)
    assert run.ranks
    saved = {}
    for file in sorted(run.saved.rglob('*.safetensors')): saved |= load_file(file)
    return run, read_metrics(directory/'metrics.jsonl'), saved


def assert_same(one, other, tolerance=1e-5):
    for key in 'loss', 'grad_norm':
        assert [m[key] for m in one] == pytest.approx([m[key] for m in other], rel=tolerance)


@pytest.mark.parametrize(
    'kind', [name if name == 'full, twice' else slow_case(name) for name in KINDS])
@pytest.mark.slow
def test_groups_train_what_one_process_trains(tmp_path, kind):
    "The norm is clipped in every step, so that a norm of a part alone would change the losses."
    recipe = small_recipe(tmp_path, **KINDS[kind])
    assert not planned_only(recipe.changed(PAIRS))
    run, pairs, saved = trained(recipe.changed(PAIRS), tmp_path/'pairs')
    _, one, expected = trained(recipe.changed(ONE), tmp_path/'one')
    assert min(m['grad_norm'] for m in one) > 0.5
    assert_same(pairs, one)
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        assert tensor.float().sub(expected[name].float()).abs().max() < 2e-4, name
    setting = explain_config(run)['sharding.group']
    assert (setting.asked, setting.found, setting.read) == (2, 2, 'device mesh')
    for rank in run.ranks:  # A half and one unit, not a quarter
        assert rank['shards'].here_b <= rank['shards'].limit_b
    held = sum(rank['shards'].here_b for rank in run.ranks)
    assert held == 2 * run.ranks[0]['shards'].total_b


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['full', 'qlora'])
def test_a_trainer_in_groups_holds_and_sends_what_the_plan_says(tmp_path, kind):
    how = {'optimizer.steps': 3, 'batch.length': 128, 'batch.micro': 2, 'method.rank': 4}
    recipe = Recipe(name='groups', model={'source': str(small_base(tmp_path/'base'))},
                    data={'source': 'sample-conversations'})
    recipe = recipe.changed(PAIRS | how | {'method.kind': kind})
    results = run_trainer(recipe, tmp_path/'run')
    assert bytes_apart(recipe, results) == {}
    assert sent_apart(recipe, results, trainer=True) == {}
    whole = bytes_apart(recipe.changed({'sharding.group': None}), results)
    assert min(whole.values()) > 0  # The plan of another sharding is another


@pytest.mark.slow
def test_a_run_goes_on_in_other_groups(tmp_path):
    "Two steps in pairs, two over all four ranks, two on two ranks, two in pairs again."
    recipe = small_recipe(tmp_path).changed(
        {'optimizer.schedule': 'constant', 'optimizer.warmup': 0.0, 'intervals.saving': 2})
    _, alone, _ = trained(recipe.changed(ONE | {'optimizer.steps': 8}), tmp_path/'one')
    ways = [PAIRS, FOUR, {'cluster.processes': 2, 'batch.micro': 2, 'optimizer.clip': 0.5}, PAIRS]
    stop_after(recipe, tmp_path/'run', ways)
    assert_same(read_metrics(tmp_path/'run'/'metrics.jsonl'), alone, 1e-4)
    saved = survey(tmp_path/'run').valid[0]
    assert saved.step == 8


def stop_after(recipe, directory, ways):
    "Do two steps in each of `ways`; a run that is stopped by its number of steps goes on."
    for number, way in enumerate(ways, 1):
        done = 2 * number
        asked = recipe.changed(way | {'optimizer.steps': done})
        fine_tune(asked, directory, resume=number > 1)
        files = sorted((directory/f'checkpoint-{done}'/'model').iterdir())
        writes = [bool(load_file(file)) for file in files]
        group = asked.sharding.group or asked.cluster.ranks
        assert writes == [True] * group + [False] * (asked.cluster.ranks - group)
        if number < len(ways): mark_run(directory, 'preempted', done)


def test_a_launcher_with_other_groups_is_refused(tmp_path):
    recipe = small_recipe(tmp_path).changed(PAIRS)
    sizes = {'PARALLELISM_CONFIG_DP_SHARD_SIZE': '4', 'PARALLELISM_CONFIG_DP_REPLICATE_SIZE': '1'}
    with pytest.raises(ConfigMismatch, match="DP_REPLICATE_SIZE is '1', the recipe says '2'"):
        check_launcher(recipe, sizes)
    same = {'PARALLELISM_CONFIG_DP_SHARD_SIZE': '2', 'PARALLELISM_CONFIG_DP_REPLICATE_SIZE': '2'}
    assert check_launcher(recipe, same) == same


def test_a_hybrid_recipe_stays_one_on_two_nodes(tmp_path):
    recipe = small_recipe(tmp_path).changed(PAIRS)
    assert [shrink(recipe, nodes).sharding.group for nodes in (1, 2)] == [None, 2]
    whole = recipe.changed({'sharding.group': 4})
    assert shrink(whole, 2).sharding.group is None
