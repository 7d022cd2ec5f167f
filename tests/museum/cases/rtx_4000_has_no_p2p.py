"""accelerate finds cards that cannot reach each other's memory. There are none here: its two
questions
for them are answered by hand."""
from unittest.mock import patch

import torch

from llm_workbook.parallel.ranks import run_ranks


def say_cuda(state): state.device = torch.device('cuda', 0)


def start():
    from accelerate import state
    with (
        patch.object(state, 'check_cuda_p2p_ib_support', lambda: False),
        patch.object(state.PartialState, 'set_device', say_cuda),
    ):
        return state.PartialState(cpu=True).num_processes


def broken():
    run_ranks(start, 2)


def mended():
    switched_off = {'NCCL_P2P_DISABLE': '1', 'NCCL_IB_DISABLE': '1'}
    assert run_ranks(start, 2, env=switched_off) == [2, 2]
