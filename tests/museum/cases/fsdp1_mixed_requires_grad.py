"""FSDP1 makes one parameter of a unit, and a unit of a frozen base and an adapter cannot be one."""
import torch

from llm_workbook.parallel.ranks import run_ranks


def wrap(apart):
    from torch.distributed.fsdp import FullyShardedDataParallel
    options = {'device_id': torch.device('cpu'), 'use_orig_params': False}
    base = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
    adapter = torch.nn.Linear(8, 2, bias=False)
    if apart: adapter = FullyShardedDataParallel(adapter, **options)
    model = FullyShardedDataParallel(torch.nn.Sequential(base, adapter), **options)
    return sum(parameter.requires_grad for parameter in model.parameters())


def broken():
    run_ranks(wrap, 2, (False,))


def mended():
    assert run_ranks(wrap, 2, (True,)) == [1, 1]
