"""`notebook_launcher` sets no variable of FSDP, so a prepared model is DDP, whatever a file
says."""
import torch

from llm_workbook.parallel.backends import cpu_fsdp
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.parallel.shard import assert_sharding

SETTINGS = {
    'ACCELERATE_USE_FSDP': 'true', 'FSDP_VERSION': '2', 'FSDP_AUTO_WRAP_POLICY': 'NO_WRAP',
    'ACCELERATE_MIXED_PRECISION': 'no'}


def prepare():
    from accelerate import Accelerator
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with cpu_fsdp():
        model, _ = Accelerator().prepare(model, torch.optim.SGD(model.parameters()))
    assert_sharding(model, 'fsdp2', 2)
    return True


def broken():
    run_ranks(prepare, 2)


def mended():
    assert run_ranks(prepare, 2, env=SETTINGS) == [True, True]
