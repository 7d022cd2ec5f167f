"""Faults 9 and 25: a run that goes on, on the same ranks to the last digit, and on other ranks as
far as that is possible."""
import warnings

import pytest
import torch
import torch.distributed as dist
from test_resume import (
    SLOW, other_ranks_take_the_same_rows_and_nearly_the_same_steps, recipe, stopped_and_resumed,
    watched)  # noqa: F401

from llm_workbook.checkpoint.save_load import load_checkpoint, save_checkpoint
from llm_workbook.parallel.ranks import run_ranks

# With DETAIL, DistributedDataParallel of torch 2.13 ends in a segmentation fault
OFF = {'TORCH_DISTRIBUTED_DEBUG': 'OFF'}


@pytest.mark.slow
@pytest.mark.parametrize('how', SLOW)
def test_25_a_run_that_was_stopped_within_an_epoch_is_the_run_that_was_not(
    how, recipe, watched, tmp_path, monkeypatch):  # noqa: F811
    """Loss, gradient norm, learning rate and rows of every step, with accumulation and dropout; in
    one process to the last digit."""
    changes, tolerance = SLOW[how]
    # DETAIL ends DDP as below, and takes zero3 half as long again
    monkeypatch.setenv('TORCH_DISTRIBUTED_DEBUG', 'OFF')
    assert tolerance == (0 if 'one process' in how else 1e-6)
    stopped_and_resumed(recipe.changed(changes), watched, tmp_path, tolerance)


# 9: another number of ranks

@pytest.mark.slow
def test_09_a_fine_tune_goes_on_with_half_the_ranks(recipe, watched, tmp_path):  # noqa: F811
    other_ranks_take_the_same_rows_and_nearly_the_same_steps(recipe, watched, tmp_path)


def study(how, folder=None, other=None, steps=3):
    """Train a small model for some steps, from a checkpoint if there is one; save it, and give the
    loss of each step."""
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    if how == 'fsdp2': fully_shard(model)
    if how == 'ddp': model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x = torch.randn(18, 9)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        if other: load_checkpoint(other, model, optimizer)
    rank = dist.get_rank()
    world = dist.get_world_size()
    found = []
    for _ in range(steps):
        loss = (model(x[rank::world]) - x[rank::world].sum(1, True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach() / world)
        found.append(loss.item())
    if folder: save_checkpoint(folder, model, optimizer)
    return found, [str(s.message) for s in said if 'ranks' in str(s.message)]


@pytest.mark.parametrize('before, after', [(2, 1), (1, 2), (2, 3)])
def test_09_a_sharded_run_goes_on_with_other_ranks_and_the_same_losses(before, after, tmp_path):
    whole = run_ranks(study, 1, ('fsdp2', None, None, 6))[0][0]
    first = run_ranks(study, before, ('fsdp2', tmp_path/'checkpoint-3'))[0][0]
    then = run_ranks(study, after, ('fsdp2', None, tmp_path/'checkpoint-3'))
    assert first + then[0][0] == pytest.approx(whole, abs=2e-6)
    assert all(said == [] for _, said in then)


@pytest.mark.parametrize('before, after', [(2, 1), (1, 2)])
def test_09_ddp_with_other_ranks_warns(before, after, tmp_path):
    first = run_ranks(study, before, ('ddp', tmp_path/'checkpoint-3'), env=OFF)[0][0]
    for _, said in run_ranks(study, after, ('ddp', None, tmp_path/'checkpoint-3'), env=OFF):
        assert len(said) == 1
        assert f'is of {before} ranks and there are {after}' in said[0]
        assert 'any_ranks=True' in said[0]
    assert len(first) == 3
