"""Two passes fit, and Adam's states do not: they are made in its first step."""
import resource

import torch

from llm_workbook.parallel.ranks import run_ranks


def leave_room(room_b):
    "Let this process have so much more memory than it has now."
    with open('/proc/self/statm') as file: pages = int(file.read().split()[0])
    limit_b = pages * resource.getpagesize() + room_b
    resource.setrlimit(resource.RLIMIT_AS, (limit_b, limit_b))


def first_step(kind):
    model = torch.nn.Linear(3000, 3000)
    optimizer = kind(model.parameters(), lr=1e-3)
    model(torch.ones(1, 3000)).sum().backward()
    leave_room(40 * 2**20)
    optimizer.step()
    return True


def broken():
    run_ranks(first_step, 1, (torch.optim.AdamW,))


def mended():
    assert run_ranks(first_step, 1, (torch.optim.SGD,)) == [True]
