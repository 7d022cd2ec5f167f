"""Faults 9 and 25: a run that goes on, on the same ranks to the last digit, and on other ranks as
far as that is possible."""
import warnings

import pytest
import torch
import torch.distributed as dist
from test_resume import recipe, watched  # noqa: F401
from test_resume import SLOW, stopped_and_resumed
from test_resume import other_ranks_take_the_same_rows_and_nearly_the_same_steps
from trouble import some_rows

from llm_workbook.checkpoint.save_load import load_checkpoint, save_checkpoint
from llm_workbook.parallel.ranks import run_ranks


@pytest.fixture(scope='module')
def shorter(recipe, tmp_path_factory):  # noqa: F811
    "With 19 rows and 6 steps, of which the second pass begins with the last but one."
    rows = some_rows(tmp_path_factory.mktemp('rows'), 19)
    return recipe.changed({'data.source': str(rows), 'optimizer.steps': 6})


@pytest.mark.slow
@pytest.mark.parametrize('how', SLOW)
def test_25_a_run_that_was_stopped_within_an_epoch_is_the_run_that_was_not(
    how, shorter, watched, tmp_path  # noqa: F811
):
    """Loss, gradient norm, learning rate and rows of every step, with accumulation and dropout; in
    one process to the last digit."""
    changes, tolerance = SLOW[how]
    assert tolerance == (0 if 'one process' in how else 1e-6)
    stopped_and_resumed(shorter.changed(changes), watched, tmp_path, tolerance)


# 9: another number of ranks

@pytest.mark.slow
def test_09_a_fine_tune_goes_on_with_half_the_ranks(recipe, watched, tmp_path):  # noqa: F811
    other_ranks_take_the_same_rows_and_nearly_the_same_steps(recipe, watched, tmp_path)


def train_small_model(strategy, save_to=None, go_on_from=None, steps=3):
    """Train a small model for some steps, from a checkpoint if there is one, and save it if asked;
    give back the loss of each step and the warnings about ranks."""
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    if strategy == 'fsdp2': fully_shard(model)
    if strategy == 'ddp': model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows = torch.randn(18, 9)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        if go_on_from: load_checkpoint(go_on_from, model, optimizer)
    world = dist.get_world_size()
    rows_of_this_rank = rows[dist.get_rank()::world]
    losses = []
    for _ in range(steps):
        error = model(rows_of_this_rank) - rows_of_this_rank.sum(1, True)
        loss = error.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_of_ranks = loss.detach() / world
        dist.all_reduce(mean_of_ranks)
        losses.append(mean_of_ranks.item())
    if save_to: save_checkpoint(save_to, model, optimizer)
    messages = [str(warning.message) for warning in warned]
    return losses, [message for message in messages if 'ranks' in message]


@pytest.mark.parametrize('before, after', [(2, 1), (1, 2), (2, 3)])
def test_09_a_sharded_run_goes_on_with_other_ranks_and_the_same_losses(before, after, tmp_path):
    checkpoint = tmp_path/'checkpoint-3'
    undisturbed, _ = run_ranks(train_small_model, 1, ('fsdp2', None, None, 6))[0]
    first_half, _ = run_ranks(train_small_model, before, ('fsdp2', checkpoint))[0]
    by_rank = run_ranks(train_small_model, after, ('fsdp2', None, checkpoint))
    second_half, _ = by_rank[0]
    assert first_half + second_half == pytest.approx(undisturbed, abs=2e-6)
    assert all(messages == [] for _, messages in by_rank)


@pytest.mark.parametrize('before, after', [(2, 1), (1, 2)])
def test_09_ddp_with_other_ranks_warns(before, after, tmp_path):
    checkpoint = tmp_path/'checkpoint-3'
    first_half, _ = run_ranks(train_small_model, before, ('ddp', checkpoint))[0]
    for _, messages in run_ranks(train_small_model, after, ('ddp', None, checkpoint)):
        assert len(messages) == 1
        assert f'is of {before} ranks and there are {after}' in messages[0]
        assert 'any_ranks=True' in messages[0]
    assert len(first_half) == 3
