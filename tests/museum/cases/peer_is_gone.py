"""Rank 1 ends in the middle of a step, and rank 0 reports a lost connection."""
import os

from llm_workbook.parallel.ranks import run_ranks


def step(leaves):
    import torch
    import torch.distributed as dist
    if leaves and dist.get_rank() == 1: os._exit(3)
    loss = torch.ones(1)
    dist.all_reduce(loss)
    return float(loss)


def broken():
    run_ranks(step, 2, (True,))


def mended():
    assert run_ranks(step, 2, (False,)) == [2.0, 2.0]
