"""A forked rank uses CUDA that its parent has opened. The mark of such a fork is set by hand here,
as torch sets it on a machine with a GPU."""
import subprocess
import sys

from llm_workbook.parallel.ranks import run_ranks

SLOW = True  # Several ranks or models, in seconds of processor


def use_gpu():
    import torch
    torch.cuda._is_in_bad_fork = lambda: True
    torch.cuda.init()


def broken():
    run_ranks(use_gpu, 1)


def mended():
    program = 'import torch; print(torch.cuda._is_in_bad_fork())'
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert done.stdout.strip() == 'False'
