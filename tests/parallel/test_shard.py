"""Sharding through accelerate and TRL: the silent fall-back is caught, NF4 survives, the share law
holds."""
import json
import os
import tempfile

import pytest
from trouble import slow_case

from llm_workbook.model.adapters import add_adapters, cast_adapters, load_adapters, save_adapters
from llm_workbook.model.quantize import fingerprint, load_base, load_nf4
from llm_workbook.parallel.ranks import RankError, notebook_ranks, run_ranks
from llm_workbook.files import asset
from llm_workbook.config.recipe import Method, Recipe, Sharding
from llm_workbook.parallel.backends import cpu_fsdp, fsdp_env
from llm_workbook.parallel.shard import ShardingMismatch, ShardReport, assert_sharding, shard_model

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
RECIPE = Recipe.parse(
    '{version: 2, name: test, model: {source: tiny-base}, data: {source: sample-conversations}}')


@pytest.fixture(scope='module', autouse=True)
def imported():
    "Import once what every rank needs; forks share it."
    import accelerate, bitsandbytes, datasets, peft, transformers, trl  # noqa: E401, F401
    import torch.distributed.fsdp, torch.distributed.tensor  # noqa: E401, F401
    from trl import SFTTrainer  # noqa: F401
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def adapted(storage='bfloat16'):
    return add_adapters(load_nf4('tiny-base', Method(storage=storage), device='cpu'))


def trainer(model, folder):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer
    lines = (asset('sample-conversations') / 'train.jsonl').read_text().splitlines()[:12]
    config = SFTConfig(
        output_dir=folder, use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=1,
        learning_rate=1e-3, logging_steps=1, save_strategy='no', report_to=[], disable_tqdm=True,
        max_length=64, gradient_checkpointing=False, dataloader_pin_memory=False, log_level='error')
    rows = Dataset.from_list([{'messages': json.loads(line)['messages']} for line in lines])
    return SFTTrainer(model=model, args=config, train_dataset=rows,
                      processing_class=AutoTokenizer.from_pretrained(asset('tiny-base')))


def fine_tune(recipe, switched, folder):
    "Train two steps with TRL; give the report, whether the fingerprint held, and what was saved."
    from contextlib import nullcontext
    model = adapted(recipe.method.storage)
    before = fingerprint(model)
    with cpu_fsdp() if switched else nullcontext(), tempfile.TemporaryDirectory() as out:
        run = trainer(model, out)
        assert cast_adapters(run.model) == 56, 'TRL no longer casts adapters: drop cast_adapters'
        run.train()
    report = assert_sharding(run.model_wrapped, recipe.sharding.strategy, 2)
    return report, before == fingerprint(run.model), save_adapters(run.model, folder)


def test_trl_shards_and_saves(tmp_path):
    ranks = notebook_ranks(
        fine_tune, 2, args=(RECIPE, True, tmp_path), env=fsdp_env(RECIPE), timeout_s=180)
    for report, same, moved in ranks:
        assert same
        assert len(moved) == 28
        assert report.here_b <= report.total_b / 2 + report.largest_unit_b
        assert all(whole[0] >= 2 * share[0] - 1 for _, _, whole, share, _, _ in report.rows)
    assert load_adapters('tiny-base', tmp_path, device='cpu')


def test_another_number_of_ranks_than_asked_for_is_refused():
    def asked_otherwise():
        messages = []
        for ranks in 1, 3:
            try: assert_sharding(None, ranks=ranks)
            except ShardingMismatch as mismatch: messages.append(str(mismatch))
        return messages
    expected = [f'{ranks} ranks were asked for, and there are 2' for ranks in (1, 3)]
    assert run_ranks(asked_otherwise, 2) == [expected, expected]


def test_activation_checkpointing_saves_adapters_too(tmp_path):
    recipe = RECIPE.changed({'sharding.activation_checkpointing': 'full'})
    ranks = notebook_ranks(
        fine_tune, 2, args=(recipe, True, tmp_path), env=fsdp_env(recipe), timeout_s=180)
    assert len(ranks[0][2]) == 28


def test_silent_fallback_to_ddp_raises(tmp_path):
    with pytest.raises(
        RankError, match='94 of 94 parameters are not DTensors.*Parallel is whole on every rank'
    ):
        notebook_ranks(
            fine_tune, 2, args=(RECIPE, False, tmp_path), env=fsdp_env(RECIPE), timeout_s=180)
    assert not list(tmp_path.iterdir())


def test_ddp_that_was_asked_for_passes(tmp_path):
    recipe = RECIPE.changed({'sharding.strategy': 'ddp'})
    report = notebook_ranks(
        fine_tune, 2, args=(recipe, False, tmp_path), env=fsdp_env(recipe), timeout_s=180)[0][0]
    assert report.here_b == report.total_b


def sharded(storage):
    model = adapted(storage)
    before = fingerprint(model)
    return before, fingerprint(shard_model(model)), assert_sharding(model)


@pytest.mark.parametrize('ranks', [slow_case(2), 3])
def test_fingerprint_is_bit_identical(ranks):
    whole = fingerprint(load_nf4('tiny-base', device='cpu'))
    for before, after, report in run_ranks(sharded, ranks, args=('bfloat16',), timeout_s=120):
        assert before == after == whole
        assert after.differences(before) == []
        assert report.here_b <= report.total_b / ranks + report.largest_unit_b


def test_three_ranks_do_not_divide():
    reports = [report for _, _, report in run_ranks(sharded, 3, args=('bfloat16',), timeout_s=120)]
    assert any(first[3] != last[3] for first, last in zip(reports[0].rows, reports[2].rows))
    for rows in zip(*(report.rows for report in reports)):
        assert sum(row[3][0] for row in rows) == rows[0][2][0]
    assert sum(report.here_b for report in reports) == reports[0].total_b


def left_out():
    import torch
    model = adapted()
    layer = model.base_model.model.model.layers[0]
    shard_model(model)
    layer.register_parameter('stowaway', torch.nn.Parameter(torch.ones(3)))
    return assert_sharding(model)


def test_one_parameter_left_out_raises():
    with pytest.raises(
        RankError, match='1 of 95 parameters are not DTensors, first .*layers.0.stowaway'
    ):
        run_ranks(left_out, 2, timeout_s=120)


def toy(units, rows, mesh):
    "Layers of one matrix each, every one a unit of FSDP2 of its own."
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh('cpu', mesh, mesh_dim_names=('copies', 'parts')[-len(mesh):])
    model = torch.nn.Sequential(*(torch.nn.Linear(64, rows, bias=False) for _ in range(units)))
    for layer in model: fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_a_rank_that_holds_nearly_all_one_row_tensors_breaks_the_share_law():
    """Every row is where torch puts it, and rank 0 has all 12: 3,072 bytes, where a third and one
    unit are 1,280."""
    def judge():
        try: return assert_sharding(toy(12, 1, (3,)), 'fsdp2', 3)
        except ShardingMismatch as error: return str(error)
    first, *others = run_ranks(judge, 3)
    assert first == 'fsdp2 over 3 ranks was asked for, but 3,072 bytes are here, more than 1,280'
    assert [report.here_b for report in others] == [0, 0]


def test_a_hybrid_share_is_that_of_the_group():
    "Five rows over groups of two: three and two, on both copies."
    def judge(): return assert_sharding(toy(2, 5, (2, 2)), 'fsdp2', 4, 2)
    reports = run_ranks(judge, 4)
    assert [[row[3] for row in report.rows] for report in reports] == [
        [(3, 64)] * 2,
        [(2, 64)] * 2] * 2
    assert [(report.here_b, report.limit_b) for report in reports] == [
        (1536, 2560),
        (1024, 2560)] * 2


def test_activation_checkpointing_and_resharding_change_no_loss():
    def loss(**sharding):
        import torch

        model = shard_model(
            load_base('tiny-base', Method(kind='full'), device='cpu'), Sharding(**sharding))
        ids = torch.arange(5, 69).view(2, 32)
        value = model.train()(input_ids=ids, labels=ids).loss
        value.backward()
        grads = [p.grad for p in model.parameters()]
        return value.item(), torch.nn.utils.get_total_norm(grads).full_tensor().item()

    def losses():
        return [loss(), loss(activation_checkpointing='full'), loss(reshard_after_forward=False)]
    plain, checkpointed, kept = run_ranks(losses, 2, timeout_s=120)[0]
    assert plain == kept == pytest.approx(checkpointed, rel=1e-6)


def test_one_process():
    model = adapted()
    with pytest.raises(ShardingMismatch, match='is whole on every rank'):
        assert_sharding(model, 'fsdp2')
    with pytest.raises(ShardingMismatch, match='2 ranks were asked for'):
        assert_sharding(model, 'none', 2)
    assert assert_sharding(model, 'none').ranks == 1


def test_a_report_shows_names_as_text():
    hostile = '<img src=x onerror=alert(1)>'
    report = ShardReport(hostile, 2, 0, [(hostile, hostile, (2,), (1,), 8, 4)], 8, 0)
    assert '<img' not in report._repr_html_()
    assert report._repr_html_().count('&lt;img') == 3
