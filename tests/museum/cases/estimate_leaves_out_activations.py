"""DeepSpeed's estimate counts weights, gradients and optimizer; the step then asks for more."""
import contextlib
import io
import os
import resource

import torch

from llm_workbook.parallel.ranks import RankError, run_ranks

BLOCKS, WIDTH, ROWS = 8, 256, 16_384
COUNT = BLOCKS * (WIDTH + 1) * WIDTH


def estimate():
    "What DeepSpeed prints, and what it says for a run without offload, bytes."
    os.environ['DS_ACCELERATOR'] = 'cpu'
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        estimate_zero3_model_states_mem_needs_all_cold(COUNT, WIDTH**2, num_gpus_per_node=1)
    return printed.getvalue(), 18 * COUNT + 4 * WIDTH**2


def step_within(room_b):
    blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())
              for _ in range(BLOCKS)]
    model = torch.nn.Sequential(*blocks)
    used_b = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_b + room_b, resource.RLIM_INFINITY))
    model(torch.randn(ROWS, WIDTH)).sum().backward()


def broken():
    table, states_b = estimate()
    try: run_ranks(step_within, ranks=1, args=(states_b,))
    except RankError as error: return f'{table}\n{error}'
    raise AssertionError('the step fits into what was estimated')


def mended():
    # Of every layer, and what is passed back; threads reserve a hundred megabytes too
    activations_b = 4 * ROWS * WIDTH * (2 * BLOCKS + 10)
    run_ranks(step_within, ranks=1, args=(estimate()[1] + activations_b,))
