"""FSDP1 keeps one gradient for a whole unit, so frozen weights beside an adapter have one too."""
import torch

from llm_workbook.config.recipe import Recipe
from llm_workbook.parallel.ranks import run_ranks


def gradient_numbers(apart):
    "How many numbers of gradients this rank holds after a backward pass."
    from torch.distributed.fsdp import FullyShardedDataParallel
    options = {'device_id': torch.device('cpu'), 'use_orig_params': True}
    base = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    adapter = torch.nn.Linear(64, 2, bias=False)
    if apart: adapter = FullyShardedDataParallel(adapter, **options)
    model = FullyShardedDataParallel(torch.nn.Sequential(base, adapter), **options)
    model(torch.ones(1, 64)).sum().backward()
    units = FullyShardedDataParallel.fsdp_modules(model)
    flat = [unit._handle.flat_param for unit in units]
    return sum(one.grad.numel() for one in flat if one.grad is not None)


def recipe(strategy):
    return Recipe(
        name='small', model={'source': 'tiny-base'}, data={'source': 'sample-conversations'},
        method={'kind': 'lora'}, sharding={'strategy': strategy},
        precision={'master': 'bfloat16'})


def broken():
    assert run_ranks(gradient_numbers, 2, (False,)) == [(64 * 64 + 64 * 2) // 2] * 2
    return recipe('fsdp1')


def mended():
    assert run_ranks(gradient_numbers, 2, (True,)) == [64 * 2 // 2] * 2
    assert recipe('fsdp2').sharding.strategy == 'fsdp2'
