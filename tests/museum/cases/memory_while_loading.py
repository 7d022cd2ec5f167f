"""Each rank reads the whole base; a limit on its memory stands for a small host."""
import resource

import torch
from transformers import AutoConfig, LlamaForCausalLM

from llm_workbook.files import asset
from llm_workbook.parallel.ranks import run_ranks


def leave_room(room_b):
    "Let this process have so much more memory than it has now."
    with open('/proc/self/statm') as file: pages = int(file.read().split()[0])
    limit_b = pages * resource.getpagesize() + room_b
    resource.setrlimit(resource.RLIMIT_AS, (limit_b, limit_b))


def load(room_b):
    config = AutoConfig.from_pretrained(asset('tiny-base'), vocab_size=100_000)
    torch.zeros(1)
    leave_room(room_b)
    model = LlamaForCausalLM.from_pretrained(
        asset('tiny-base'), config=config, ignore_mismatched_sizes=True, dtype=torch.float64)
    return sum(p.numel() for p in model.parameters()) > 10**7


def broken():
    run_ranks(load, 1, (60 * 2**20,))


def mended():
    assert run_ranks(load, 1, (4 * 2**30,)) == [True]
