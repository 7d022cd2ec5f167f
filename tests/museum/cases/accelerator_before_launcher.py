"""A cell makes an `Accelerator`, and a later one calls `notebook_launcher`."""
import sys

from llm_workbook.parallel.ranks import free_port, run_ranks


def say_hello(): return 'hello'


def cells(early):
    import torch.distributed as dist
    from accelerate import Accelerator, notebook_launcher
    dist.destroy_process_group()
    sys.modules.pop('bitsandbytes', None)  # The launcher refuses a kernel that has imported it
    if early: Accelerator()
    notebook_launcher(say_hello, num_processes=2, use_port=str(free_port()))
    return 'ran'


def broken():
    run_ranks(cells, 1, (True,))


def mended():
    assert run_ranks(cells, 1, (False,)) == ['ran']
