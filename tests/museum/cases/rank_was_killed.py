"""A rank is killed by signal 9, as the system does when memory runs out."""
import os
import signal

from llm_workbook.parallel.ranks import run_ranks


def step(killed):
    import torch.distributed as dist
    if killed and dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return True


def broken():
    run_ranks(step, 2, (True,))


def mended():
    assert run_ranks(step, 2, (False,)) == [True, True]
