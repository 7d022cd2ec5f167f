"""Rank 1 is somewhere else, and rank 0 waits for it until the limit."""
import time

from llm_workbook.parallel.ranks import run_ranks


def save(): time.sleep(30)


def train(alone):
    import torch
    import torch.distributed as dist
    if alone and dist.get_rank() == 1: save()
    dist.all_reduce(torch.ones(1))
    return True


def broken():
    run_ranks(train, 2, (True,), timeout_s=2)


def mended():
    assert run_ranks(train, 2, (False,), timeout_s=20) == [True, True]
