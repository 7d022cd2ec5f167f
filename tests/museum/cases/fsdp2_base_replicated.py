"""accelerate leaves a 4-bit base of uint8 out of FSDP2, so that each rank holds all of it."""
import warnings

import torch

from llm_workbook.parallel.backends import cpu_fsdp
from llm_workbook.parallel.ranks import run_ranks

SETTINGS = {
    'ACCELERATE_USE_FSDP': 'true', 'FSDP_VERSION': '2', 'FSDP_AUTO_WRAP_POLICY': 'NO_WRAP',
    'ACCELERATE_MIXED_PRECISION': 'bf16'}


def prepare(storage):
    "What accelerate warned of, and how many numbers of the packed weight this rank holds."
    import bitsandbytes as bnb
    from accelerate import Accelerator
    packed = bnb.nn.Linear4bit(
        64, 64, bias=False, compute_dtype=torch.bfloat16, quant_storage=storage)
    packed.load_state_dict(torch.nn.Linear(64, 64, bias=False).state_dict())
    model = torch.nn.Sequential(packed.to('cpu'), torch.nn.Linear(64, 64))
    packed.weight.requires_grad = False
    optimizer = torch.optim.SGD(model[1].parameters())
    with warnings.catch_warnings(record=True) as caught, cpu_fsdp():
        warnings.simplefilter('always')
        model, _ = Accelerator().prepare(model, optimizer)
    weight = model[0].weight
    held = weight.to_local() if hasattr(weight, 'to_local') else weight
    return [str(warning.message) for warning in caught], held.numel() * held.element_size()


def broken():
    (said, held_b), _ = run_ranks(prepare, 2, (torch.uint8,), env=SETTINGS)
    assert held_b == 64 * 64 // 2
    return '\n'.join(said)


def mended():
    assert run_ranks(prepare, 2, (torch.bfloat16,), env=SETTINGS)[0][1] == 64 * 64 // 2 // 2
