"""Rank 0 writes for longer than the others' collective waits."""
import datetime
import time

import torch
import torch.distributed as dist

from llm_workbook.parallel.ranks import run_ranks


def save_slowly(timeout_s):
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    if dist.get_rank() == 0:
        torch.save(torch.zeros(8), 'model.pt')
        time.sleep(3)  # As long as a file of 140 GB on a slow disk
    dist.barrier(group)


def broken():
    run_ranks(save_slowly, args=(1,), timeout_s=20)


def mended():
    run_ranks(save_slowly, args=(20,), timeout_s=20)
