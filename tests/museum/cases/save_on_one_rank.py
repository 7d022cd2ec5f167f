"""`state_dict` gathers with all ranks, and only rank 0 calls it: the others leave, or wait for
ever."""
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from llm_workbook.parallel.ranks import run_ranks

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_on_rank_0():
    rank = dist.get_rank()
    model = fully_shard(torch.nn.Linear(8, 8))
    if rank == 0:
        state = get_model_state_dict(model, options=WHOLE)
        torch.save(state, 'model.pt')


def save_on_all():
    rank = dist.get_rank()
    model = fully_shard(torch.nn.Linear(8, 8))
    state = get_model_state_dict(model, options=WHOLE)
    if rank == 0: torch.save(state, 'model.pt')
    dist.barrier()


def broken():
    run_ranks(save_on_rank_0, timeout_s=20)


def mended():
    run_ranks(save_on_all, timeout_s=20)
    assert torch.load('model.pt', weights_only=True)['weight'].shape == (8, 8)
