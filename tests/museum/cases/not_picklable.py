"""Spawned processes get their function by pickle, and one that is defined inside another has no
name."""
import torch.multiprocessing as mp

from llm_workbook.parallel.ranks import run_ranks


def broken():
    def hello(rank): return f'hello from {rank}'
    mp.spawn(hello, nprocs=2)


def mended():
    def hello(): return 'hello'
    assert run_ranks(hello, 2) == ['hello', 'hello']
