"""Faults 14 and 15: settings that are wrong, and settings that are right and not applied."""
import pytest
import torch
from test_recipe import WRONG, plain
from test_fine_tune import REFUSED, no_weights  # noqa: F401
from trouble import files, fine_tune

from llm_workbook.__main__ import main as command
from llm_workbook.training import fine_tune as training
from llm_workbook.config.document import RecipeError
from llm_workbook.parallel.ranks import RankError, notebook_ranks, run_ranks
from llm_workbook.config.recipe import Recipe
from llm_workbook.parallel.backends import cpu_fsdp, fsdp_env
from llm_workbook.parallel.shard import ShardingMismatch, assert_sharding

# Two of the three settings that DeepSpeed and accelerate pass over without a word; the third is
# fault 15
SILENT = {
    'zero_optimizaton: {stage: 3}': (
        {'zero_optimizaton': {'stage': 3}}, 'zero_optimizaton',
        'unknown key; known: version, name, model'),
    'reshard_after_foward': (
        {'sharding.reshard_after_foward': False}, 'sharding.reshard_after_foward',
        "did you mean 'reshard_after_forward'")}
IMPOSSIBLE = {
    'QLoRA kept in float32 under ZeRO-3': (
        {'method.storage': 'float32', 'sharding.strategy': 'zero3'}, 'method.storage', 'uint8'),
    'an 8-bit base under FSDP2': (
        {'method.quant': 'int8'}, 'method.quant', 'use nf4, or sharding.strategy'),
    'uint8 under FSDP2': ({'method.storage': 'uint8'}, 'method.storage', 'precision.compute'),
    'ZeRO-3 that loads shares of a packed base': (
        {'sharding.strategy': 'zero3', 'sharding.loading': 'sharded'}, 'sharding.loading',
        'every_rank')}


@pytest.mark.usefixtures('no_weights')
@pytest.mark.parametrize('field, value, words', WRONG, ids=lambda v: str(v)[:24])
def test_14_a_wrong_field_is_named_with_what_to_write_before_a_weight_is_loaded(
    field, value, words, tmp_path
):
    import yaml
    (tmp_path/'r.yaml').write_text(yaml.safe_dump(plain(**{field: value})))
    with pytest.raises(RecipeError, match=field.split('.')[0]) as caught:
        fine_tune(Recipe.load(tmp_path/'r.yaml'), tmp_path/'run')
    assert words in str(caught.value)
    assert caught.value.problems[0].line
    assert not (tmp_path/'run').exists()


@pytest.mark.usefixtures('no_weights')
@pytest.mark.parametrize(
    'changes, field, words', [*SILENT.values(), *IMPOSSIBLE.values()], ids=[*SILENT, *IMPOSSIBLE])
def test_14_what_others_pass_over_and_what_cannot_work_is_refused(changes, field, words):
    good = Recipe(
        name='good', model={'source': 'tiny-base'}, data={'source': 'sample-conversations'})
    with pytest.raises(RecipeError) as caught: training.check_recipe(good.changed(changes))
    assert any(p.path == field and words in p.reason for p in caught.value.problems), caught.value


def test_14_there_are_thirty_cases_and_more():
    assert len(WRONG) + len(SILENT) + len(IMPOSSIBLE) + len(REFUSED) > 80


def test_14_a_typo_on_the_command_line_is_refused(tmp_path, capsys):
    for words in (['r.yaml', '--directroy', 'x'], ['r.yaml'], []):
        with pytest.raises(SystemExit) as caught: command(['train', *words])
        assert caught.value.code == 2
    with pytest.raises(RecipeError, match='No such file'):
        command(['train', str(tmp_path/'none.yaml'), '--directory', str(tmp_path)])


# 15: the sharding that was asked for is not there

def prepare_with_accelerate(recipe, tamed):
    """Prepare the base with accelerate's FSDP settings on the CPU, with our switch (`tamed`) or
    without it; give back the bytes that this rank holds, or the error."""
    from contextlib import nullcontext
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM
    with cpu_fsdp() if tamed else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(recipe.model.source)
        model = Accelerator().prepare(model, torch.optim.SGD(model.parameters(), 0.1))[0]
    try: return assert_sharding(model, 'fsdp2', 2).here_b
    except ShardingMismatch as error: return str(error)


def test_15_accelerate_s_silent_ddp_is_a_sharding_mismatch(recipe):
    environment = fsdp_env(recipe)
    errors = notebook_ranks(prepare_with_accelerate, 2, (recipe, False), 100, environment)
    for words in 'fsdp2 over 2 ranks was asked for', 'are not DTensors', 'cpu_fsdp()':
        assert all(words in error for error in errors), errors
    held_b = notebook_ranks(prepare_with_accelerate, 2, (recipe, True), 100, environment)
    assert all(isinstance(rank_b, int) for rank_b in held_b), held_b


def judge_sharding(strategy, forgotten, ranks):
    "Shard a model of two layers but for those that are forgotten, and judge it by what was asked."
    from torch.distributed.fsdp import fully_shard
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for layer in list(model)[forgotten:]: fully_shard(layer)
    if not forgotten: fully_shard(model)
    try: return assert_sharding(model, strategy, ranks) and 'fine'
    except ShardingMismatch as error: return str(error)


@pytest.mark.parametrize(
    'strategy, forgotten, ranks, words',
    [
        ('fsdp2', 0, 2, 'fine'),
        ('fsdp2', 1, 2, '2 of 4 parameters are not DTensors'),
        ('fsdp2', 2, 2, '4 of 4 parameters'),
        ('ddp', 2, 2, 'nothing joins the ranks'),
        ('none', 2, 2, 'each rank trains its own model'),
        ('ddp', 0, 2, 'are DTensors'),
        ('fsdp2', 0, 3, '3 ranks were asked for, and there are 2')])
def test_15_what_is_there_is_compared_with_what_was_asked(strategy, forgotten, ranks, words):
    verdicts = run_ranks(judge_sharding, 2, (strategy, forgotten, ranks))
    assert all(words in verdict for verdict in verdicts), verdicts


@pytest.mark.slow
def test_15_a_fine_tune_that_is_not_sharded_stops_before_its_first_step(
    recipe, tmp_path, monkeypatch
):
    from contextlib import nullcontext
    monkeypatch.setattr(training, 'cpu_fsdp', nullcontext)
    with pytest.raises(RankError, match='ShardingMismatch: fsdp2 over 2 ranks was asked for'):
        fine_tune(recipe, tmp_path/'run')
    assert files(tmp_path/'run') <= {
        'recipe.yaml', 'run.json', 'metrics/stage.json', '.llmw.lock',
        'errors/rank-00000.txt', 'errors/rank-00001.txt'}
