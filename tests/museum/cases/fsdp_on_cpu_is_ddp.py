"""FSDP is asked for on a CPU, and accelerate gives DDP: the same losses, nothing is sharded."""
from pathlib import Path

import torch

from llm_workbook.parallel.backends import cpu_fsdp
from llm_workbook.parallel.ranks import run_ranks

FILE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1
num_machines: 1
num_processes: 2
use_cpu: true
"""
ENV = {'ACCELERATE_USE_CPU': 'true', 'ACCELERATE_USE_FSDP': 'true', 'FSDP_VERSION': '2',
       'FSDP_AUTO_WRAP_POLICY': 'SIZE_BASED_WRAP', 'FSDP_MIN_NUM_PARAMS': '1'}


def kind():
    from accelerate import Accelerator
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = Accelerator(cpu=True).prepare(model, optimizer)
    return type(next(model.parameters())).__name__


def kind_with_fsdp():
    with cpu_fsdp(): return kind()


def broken():
    assert run_ranks(kind, env=ENV) == ['Parameter'] * 2
    Path('accelerate.yaml').write_text(FILE)
    return 'accelerate.yaml'


def mended():
    assert run_ranks(kind_with_fsdp, env=ENV) == ['DTensor'] * 2
