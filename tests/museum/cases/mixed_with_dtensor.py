"""An optimizer's own kernel gets FSDP2's DTensors next to plain tensors, and refuses the
mixture."""
import torch

from llm_workbook.parallel.ranks import run_ranks


def step(plain_state):
    from torch.distributed.fsdp import fully_shard
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    fully_shard(model)
    weight = next(model.parameters())
    momentum = torch.zeros(8, 8) if plain_state else torch.zeros_like(weight)
    model(torch.ones(2, 8)).sum().backward()
    with torch.no_grad(): weight.add_(momentum, alpha=-0.1)
    return type(weight.data).__name__


def broken():
    run_ranks(step, 2, (True,))


def mended():
    assert run_ranks(step, 2, (False,)) == ['DTensor', 'DTensor']
