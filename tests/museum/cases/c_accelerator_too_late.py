"""Recipe C, row 2: the model loads twice, and `Accelerator()` at the top was to cure it.

Measured on two ranks: with the installed transformers each loads every value in either order. What
cures it is a loader that reads only its own part.
"""
from pathlib import Path

from llm_workbook.files import asset
from llm_workbook.parallel.ranks import run_ranks

ENV = {'ACCELERATE_USE_CPU': 'true', 'ACCELERATE_USE_FSDP': 'true', 'FSDP_VERSION': '2',
       'FSDP_CPU_RAM_EFFICIENT_LOADING': 'true'}
SCRIPT = """import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-3.1-70B')
from accelerate import Accelerator
accelerator = Accelerator()
"""
FILE = 'distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nnum_processes: 2\n'


def values(early):
    "How many values of the base this rank holds after loading it."
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    if not early: dist.destroy_process_group()  # As if Accelerator() came later
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    return sum(part.numel() for part in model.parameters() if part.device.type != 'meta')
