"""Two ranks call different collectives; with TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares them."""
import torch

from llm_workbook.parallel.ranks import run_ranks


def call(differ):
    import torch.distributed as dist
    loss = torch.tensor([2.5])
    if differ and dist.get_rank() == 1: dist.broadcast(torch.ones(4), src=0)
    else: dist.all_reduce(loss)
    return float(loss)


def broken():
    run_ranks(call, 2, (True,), env={'TORCH_DISTRIBUTED_DEBUG': 'DETAIL'})


def mended():
    run_ranks(call, 2, (False,), env={'TORCH_DISTRIBUTED_DEBUG': 'DETAIL'})
