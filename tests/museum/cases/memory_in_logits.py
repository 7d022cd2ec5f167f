"""Logits of all tokens in float32 do not fit; in tiles they do. A limit on memory stands for a
card."""
import resource

import torch

from llm_workbook.parallel.ranks import run_ranks

TOKENS, VOCABULARY, WIDTH = 1024, 32_000, 64


def leave_room(room_b):
    "Let this process have so much more memory than it has now."
    with open('/proc/self/statm') as file: pages = int(file.read().split()[0])
    limit_b = pages * resource.getpagesize() + room_b
    resource.setrlimit(resource.RLIMIT_AS, (limit_b, limit_b))


def loss_of(tiles):
    hidden = torch.randn(TOKENS, WIDTH)
    head, labels = torch.randn(VOCABULARY, WIDTH), torch.zeros(TOKENS, dtype=torch.int64)
    torch.randn(64, WIDTH) @ head.T
    leave_room(150 * 2**20)
    total = 0.0
    for part, wanted in zip(hidden.chunk(tiles), labels.chunk(tiles)):
        logits = part @ head.T
        total += torch.nn.functional.cross_entropy(logits, wanted, reduction='sum').item()
    return total > 0


def broken():
    run_ranks(loss_of, 1, (1,))


def mended():
    assert run_ranks(loss_of, 1, (16,)) == [True]
