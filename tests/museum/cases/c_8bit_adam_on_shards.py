"""Recipe C, row 3: 8-bit Adam was to be a memory hog, and fails on FSDP2's shards instead."""
import torch
from torch.distributed.fsdp import fully_shard

from llm_workbook.parallel.ranks import run_ranks


def step(kind):
    "Bytes of optimizer state on this rank after one step."
    import bitsandbytes as bnb
    model = fully_shard(torch.nn.Linear(256, 256, bias=False))
    kinds = {'adamw_bnb_8bit': bnb.optim.AdamW8bit, 'adamw_torch': torch.optim.AdamW}
    optimizer = kinds[kind](model.parameters())
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    return sum(state[name].to_local().nbytes for name in ('exp_avg', 'exp_avg_sq'))


def unsharded_state():
    "Bytes of 8-bit states for as many values: a quarter, and not more, where it does work."
    import bitsandbytes as bnb
    weight = torch.nn.Parameter(torch.ones(256, 256))
    optimizer = bnb.optim.AdamW8bit([weight])
    weight.grad = torch.ones(256, 256)
    optimizer.step()
    return sum(optimizer.state[weight][name].nbytes for name in ('state1', 'state2'))


def broken():
    run_ranks(step, args=('adamw_bnb_8bit',))


def mended():
    whole_b = 2 * 4 * 256 * 256
    assert run_ranks(step, args=('adamw_torch',)) == [whole_b // 2] * 2
    assert run_ranks(unsharded_state, ranks=1) == [whole_b // 4]
