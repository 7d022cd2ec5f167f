"""`device_map='auto'` cuts the model over all devices, and each of two ranks would want them
all."""
import torch

from llm_workbook.parallel.ranks import run_ranks


def prepare(device_map):
    from accelerate import Accelerator
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model.hf_device_map = device_map
    return type(Accelerator().prepare(model)).__name__


def broken():
    run_ranks(prepare, 2, ({'0': 0, '1': 1},))


def mended():
    assert run_ranks(prepare, 2, ({'': 'cpu'},)) == ['DistributedDataParallel'] * 2
