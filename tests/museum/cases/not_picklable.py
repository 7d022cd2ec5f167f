"""Spawned processes get their function by pickle, and one that is defined inside another has no name."""
import torch.multiprocessing as mp


def say_hello(rank): print(f'hello from {rank}')


def broken():
    def hello(rank): print(f'hello from {rank}')
    mp.spawn(hello, nprocs=2)


def mended():
    mp.spawn(say_hello, nprocs=2)
