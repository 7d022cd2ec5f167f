"""Recipe C, row 1: uint8 storage was the fix for OOM before step 1, and it keeps the base whole.

Its other two, a 4-bit configuration and offload, are right. Measured: bytes of the packed base that
each of two ranks holds after accelerate's FSDP2 has prepared the model.
"""
from pathlib import Path

import torch

from llm_workbook.config.recipe import Method
from llm_workbook.model.adapters import add_adapters
from llm_workbook.model.quantize import load_nf4
from llm_workbook.parallel.backends import cpu_fsdp
from llm_workbook.parallel.ranks import run_ranks

SLOW = True  # Several ranks or models, in seconds of processor

ENV = {'ACCELERATE_USE_CPU': 'true', 'ACCELERATE_USE_FSDP': 'true', 'FSDP_VERSION': '2',
       'FSDP_AUTO_WRAP_POLICY': 'TRANSFORMER_BASED_WRAP',
       'FSDP_TRANSFORMER_CLS_TO_WRAP': 'LlamaDecoderLayer'}
SCRIPT = """accelerator = Accelerator()
config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4',
                            bnb_4bit_quant_storage=torch.uint8)
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)
"""
FILE = 'distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nnum_processes: 2\n'


def packed_bytes(storage):
    "Bytes of the packed base on this rank, and of all of it."
    from accelerate import Accelerator
    with cpu_fsdp():
        accelerator = Accelerator(cpu=True)
        model = add_adapters(load_nf4('tiny-base', Method(storage=storage), device='cpu'))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, _ = accelerator.prepare(model, torch.optim.AdamW(trained))
    packed = [parameter for name, parameter in model.named_parameters() if 'base_layer' in name]
    here = [part.to_local() if hasattr(part, 'to_local') else part for part in packed]
    return sum(part.nbytes for part in here), sum(part.nbytes for part in packed)


def broken():
    for here_b, whole_b in run_ranks(packed_bytes, args=('uint8',), env=ENV):
        assert here_b == whole_b
    Path('train.py').write_text(SCRIPT)
    Path('accelerate.yaml').write_text(FILE)
    return '.'


def mended():
    for here_b, whole_b in run_ranks(packed_bytes, args=('bfloat16',), env=ENV):
        assert 2 * here_b == whole_b
