"""Rank 0 tokenises for longer than the others may wait for it."""
import os
import time
from datetime import timedelta

from llm_workbook.parallel.ranks import run_ranks


def tokenise(): time.sleep(3)


def prepare(before):
    import torch.distributed as dist
    dist.destroy_process_group()
    if before and os.environ['RANK'] == '0': tokenise()
    from accelerate import PartialState
    state = PartialState(cpu=True, timeout=timedelta(seconds=1 if not before else 20))
    with state.main_process_first():
        if state.is_main_process and not before: tokenise()
    return state.num_processes


def broken():
    run_ranks(prepare, 2, (False,))


def mended():
    assert run_ranks(prepare, 2, (True,)) == [2, 2]
