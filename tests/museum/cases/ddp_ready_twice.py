"""Reentrant checkpointing under DDP that looks for unused parameters: a weight is ready twice."""
import torch
from torch.utils.checkpoint import checkpoint

from llm_workbook.parallel.ranks import run_ranks


class Recomputed(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, inputs):
        hidden = self.first(inputs)
        return checkpoint(self.second, hidden, use_reentrant=self.reentrant).sum()


def step(reentrant):
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(Recomputed(reentrant), find_unused_parameters=True)
    model(torch.ones(2, 8)).backward()
    return all(parameter.grad is not None for parameter in model.parameters())


def broken():
    run_ranks(step, 2, (True,))


def mended():
    assert run_ranks(step, 2, (False,)) == [True, True]
