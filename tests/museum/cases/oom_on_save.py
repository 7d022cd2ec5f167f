"""The state is gathered whole on every rank, and there is no room for it beside the run."""
import resource

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from llm_workbook.parallel.ranks import run_ranks

SLOW = True  # Several ranks or models, in seconds of processor


def save_with_little_room(whole):
    model = fully_shard(torch.nn.Linear(4096, 8192, bias=False))  # 128 MiB, 64 on each rank
    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20, resource.RLIM_INFINITY))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=whole))
    if not whole: dcp.save(state, checkpoint_id='checkpoint')


def broken():
    run_ranks(save_with_little_room, args=(True,), timeout_s=30)


def mended():
    run_ranks(save_with_little_room, args=(False,), timeout_s=30)
