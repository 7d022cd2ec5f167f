"""The activations of a large batch do not fit; those of a quarter of it do."""
import resource

import torch

from llm_workbook.parallel.ranks import run_ranks


def leave_room(room_b):
    "Let this process have so much more memory than it has now."
    with open('/proc/self/statm') as file: pages = int(file.read().split()[0])
    limit_b = pages * resource.getpagesize() + room_b
    resource.setrlimit(resource.RLIMIT_AS, (limit_b, limit_b))


def train_step(rows, passes):
    layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    model(torch.ones(2, 512)).sum().backward()
    leave_room(120 * 2**20)
    for _ in range(passes): model(torch.ones(rows, 512)).sum().backward()
    return True


def broken():
    run_ranks(train_step, 1, (8_192, 1))


def mended():
    assert run_ranks(train_step, 1, (512, 2)) == [True]
