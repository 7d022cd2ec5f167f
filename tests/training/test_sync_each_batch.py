"""Gradients that each of several passes reduces: the same run, with the memory of one pass."""
import pytest
from torch.distributed.fsdp import FSDPModule
from trouble import fine_tune, slow_case, small_recipe

from llm_workbook import memory, rehearse
from llm_workbook.config.recipe import Recipe, RecipeError
from llm_workbook.parallel.backends import fsdp_env
from llm_workbook.parallel.ranks import notebook_ranks
from llm_workbook.plan.collectives import step_messages
from llm_workbook.training import fine_tune as training
from llm_workbook.training.data import load_rows
from llm_workbook.training.effective import explain_config
from llm_workbook.training.loop import train_loop
from llm_workbook.training.run_directory import RunFiles, begin_run, read_metrics

SYNC = {'sharding.sync_each_batch': True}
FULL = {'method.kind': 'full', 'optimizer.steps': 3, 'batch.accumulation': 3}


def is_whole(parameter):
    "Whether FSDP2 holds an unsharded gradient, in the type of the weight or of the reduction."
    if parameter.unsharded_accumulated_grad is not None: return True
    unsharded = getattr(parameter, '_unsharded_param', None)
    return unsharded is not None and unsharded.grad is not None


def seen_by_layers(monkeypatch, folder):
    "Let rank 0 write what its layers hold when a forward pass begins: whole gradients, and parts."
    make_trainer = training.make_trainer

    def watched(*args):
        trainer = make_trainer(*args)
        step = trainer.training_step

        def training_step(model, *inputs):
            units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
            groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
            parameters = [p for group in groups if group for p in group.fsdp_params]
            whole = sum(is_whole(p) for p in parameters)
            parts = sum(p.sharded_param.grad is not None for p in parameters)
            if trainer.accelerator.is_main_process:
                with (folder/'seen').open('a') as file: file.write(f'{whole} {parts}\n')
            return step(model, *inputs)

        trainer.training_step = training_step
        return trainer

    monkeypatch.setattr(training, 'make_trainer', watched)


@pytest.mark.parametrize('changes', [
    FULL | {'precision.compute': 'bfloat16', 'precision.reduce': 'float32'},
    slow_case(FULL), slow_case(FULL | {'method.kind': 'lora'}),
    slow_case(FULL | {'cluster.processes': 4, 'sharding.group': 2})], ids=str)
def test_a_rank_holds_parts_between_passes_and_the_losses_are_the_same(
        monkeypatch, tmp_path, changes):
    recipe = small_recipe(tmp_path, 48, **changes)
    runs, held = [], []
    for name, more in ('late', {}), ('each', SYNC):
        folder = tmp_path/name
        folder.mkdir()
        with monkeypatch.context() as patch:
            seen_by_layers(patch, folder)
            run = fine_tune(recipe.changed(more), folder/'run')
        runs.append(read_metrics(RunFiles(run.directory).metrics))
        held.append([tuple(map(int, line.split())) for line in (folder/'seen').open()])
        setting = explain_config(run)['sharding.sync_each_batch']
        assert setting.found == setting.asked == bool(more)
    late, each = held
    assert len(late) == len(each) == 9
    assert late[1][0] > 0 == late[1][1]
    assert each[1][0] == 0 < each[1][1]
    for one, other in zip(*runs):
        assert one['loss'] == pytest.approx(other['loss'], rel=2e-3)
        assert one['grad_norm'] == pytest.approx(other['grad_norm'], rel=2e-3)
        assert one['num_tokens'] == other['num_tokens']


def without_deferring(recipe, directory, rows, start):
    "Run the plain loop where nothing may put a reduction off."
    from accelerate import Accelerator
    def no_sync(*args): raise RuntimeError('a pass put its reduction off')
    Accelerator.no_sync = no_sync
    return train_loop(recipe, directory, rows, start)


@pytest.mark.parametrize('changes, deferred', [(SYNC, False), slow_case({}, True)], ids=str)
def test_the_plain_loop_reduces_in_every_pass(tmp_path, changes, deferred):
    recipe = small_recipe(tmp_path, 48, **FULL | changes)
    rows = load_rows(recipe.data, recipe.seed)[0]
    begin = recipe, tmp_path/'run', rows, begin_run(recipe, tmp_path/'run')
    def run(): notebook_ranks(without_deferring, 2, begin, 200, fsdp_env(recipe))
    if not deferred: return run()
    with pytest.raises(RuntimeError, match='put its reduction off'): run()


def refused(**changes):
    with pytest.raises(RecipeError, match='sync-each-batch-is-fsdp2s'):
        Recipe.named('70b-2x8-a100-80-full').changed(SYNC | changes)


@pytest.mark.parametrize('strategy', ['ddp', 'zero1', 'zero2', 'zero3', 'fsdp1'])
def test_only_fsdp2_is_told(strategy): refused(**{'sharding.strategy': strategy})


def test_the_warning_of_whole_gradients_names_the_switch():
    from llm_workbook.config.rules import broken
    def warned(**changes):
        full = Recipe.named('70b-2x8-a100-80-full').changed({'batch.accumulation': 4} | changes)
        return [rule.fix for rule in broken(full.facts(), 'warn')
                if rule.id == 'accumulation-keeps-whole-gradients']
    [fix] = warned()
    assert 'sharding.sync_each_batch' in fix
    assert not warned(**SYNC)


# The plan

PASSES = {'batch.accumulation': 4, 'batch.length': 512, 'model.source': 'llama-3.2-1b',
          'cluster.nodes': 1, 'batch.packing': False, 'model.attention': 'sdpa'}


@pytest.mark.parametrize('changes', [
    {}, slow_case({'model.source': 'llama-3.1-8b'}), slow_case({'precision.master': 'bfloat16'}),
    slow_case({'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'}),
    slow_case({'sharding.group': 2}), slow_case({'sharding.reshard_after_forward': False}),
    slow_case({'method.kind': 'lora'}), slow_case({'method.kind': 'qlora'})], ids=str)
def test_the_plan_has_the_peak_and_the_messages_of_the_rehearsal(changes):
    recipe = Recipe.named('70b-2x8-a100-80-full').changed(PASSES | SYNC | changes)
    played = rehearse(recipe)
    assert memory(recipe).total('step', level='allocated') == pytest.approx(
        played.peak_b, rel=1e-3)
    planned_b = sum(message.count * message.tensor_b for exchange in step_messages(recipe)[0]
                    for message in exchange.messages if message.kind == 'reduce_scatter')
    played_b = sum(size_b for _, kind, size_b, _ in played.messages if kind == 'reduce_scatter')
    assert planned_b == played_b


def test_a_70b_that_cannot_keep_whole_gradients_fits():
    full = Recipe.named('70b-2x8-a100-80-full').changed({'batch.accumulation': 4})
    once, late, each = (memory(recipe).total('step', level='allocated') for recipe in (
        full.changed({'batch.accumulation': 1}), full, full.changed(SYNC)))
    assert late - once > 100 * 2**30
    assert 0 < each - once < 20 * 2**30


def test_one_pass_needs_no_switch():
    full = Recipe.named('70b-2x8-a100-80-full')
    assert memory(full).total('step') == memory(full.changed(SYNC)).total('step')
