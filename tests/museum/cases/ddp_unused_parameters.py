"""A layer takes part in no loss: DDP waits for its gradient, and refuses the next step."""
import torch

from llm_workbook.parallel.ranks import run_ranks


class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, inputs): return self.used(inputs).sum()


def steps(freeze):
    from torch.nn.parallel import DistributedDataParallel
    model = Half()
    model.unused.requires_grad_(not freeze)
    model = DistributedDataParallel(model)
    for _ in range(2): model(torch.ones(2, 8)).backward()
    return True


def broken():
    run_ranks(steps, 2, (False,))


def mended():
    assert run_ranks(steps, 2, (True,)) == [True, True]
