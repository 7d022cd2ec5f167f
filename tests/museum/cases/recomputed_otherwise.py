"""Checkpointing recomputes a layer in another type than it ran in: autocast was left in between."""
import torch
from torch.utils.checkpoint import checkpoint


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.half = True

    def forward(self, inputs):
        with torch.autocast('cpu', torch.bfloat16, enabled=self.half):
            return self.linear(inputs).relu()


def step(changes):
    layer, inputs = Layer(), torch.ones(2, 8, requires_grad=True)
    loss = checkpoint(layer, inputs, use_reentrant=False).sum()
    layer.half = not changes
    loss.backward()
    return inputs.grad


def broken():
    step(changes=True)


def mended():
    assert step(changes=False).abs().max() > 0
