"""Recipe C, row 2: the model loads twice, and `Accelerator()` at the top was to cure it.

Measured on two ranks: with the installed transformers each loads every value in either order. What
cures it is a loader that reads only its own part.
"""
from pathlib import Path

from llm_workbook.config.recipe import Method
from llm_workbook.files import asset
from llm_workbook.parallel.load import load_sharded
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


def values(accelerator_first):
    "How many values of the base this rank holds after loading it, and how many there are."
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    dist.barrier()
    if not accelerator_first: dist.destroy_process_group()  # It would begin only after the load
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    if accelerator_first: dist.barrier()
    held = [part.numel() for part in model.parameters() if part.device.type != 'meta']
    return sum(held), sum(part.numel() for part in model.parameters())


def own_part():
    "The same, by a loader that gives each rank what it keeps."
    model = load_sharded('tiny-base', Method(kind='full'), device='cpu')
    held = [part.to_local().numel() for part in model.parameters()]
    return sum(held), sum(part.numel() for part in model.parameters())


def broken():
    for order in True, False:
        for held, whole in run_ranks(values, args=(order,), env=ENV): assert held == whole
    Path('train.py').write_text(SCRIPT)
    Path('accelerate.yaml').write_text(FILE)
    return '.'


def mended():
    for held, whole in run_ranks(own_part): assert held < 0.51 * whole
