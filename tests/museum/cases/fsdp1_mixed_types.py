"""FSDP1 flattens a unit of bfloat16 base weights and float32 adapters into one tensor."""
import torch

from llm_workbook.parallel.ranks import run_ranks


def wrap(adapter_type):
    from torch.distributed.fsdp import FullyShardedDataParallel
    base = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    adapter = torch.nn.Linear(8, 8, bias=False, dtype=adapter_type)
    unit = torch.nn.Sequential(base, adapter)
    sharded = FullyShardedDataParallel(unit, device_id=torch.device('cpu'))
    return sharded(torch.ones(1, 8, dtype=torch.bfloat16)).shape


def broken():
    run_ranks(wrap, 2, (torch.float32,))


def mended():
    assert run_ranks(wrap, 2, (torch.bfloat16,)) == [(1, 8)] * 2
