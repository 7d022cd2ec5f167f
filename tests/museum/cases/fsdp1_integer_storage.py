"""A 4-bit base keeps its payload as uint8 unless it is told otherwise, and FSDP1 refuses
integers."""
import torch

from llm_workbook.parallel.ranks import run_ranks


def wrap(storage):
    import bitsandbytes as bnb
    from torch.distributed.fsdp import FullyShardedDataParallel
    base = torch.nn.Linear(64, 64, bias=False)
    packed = bnb.nn.Linear4bit(
        64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type='nf4', quant_storage=storage)
    packed.load_state_dict(base.state_dict())
    packed.to('cpu')  # Packs it
    FullyShardedDataParallel(torch.nn.Sequential(packed), device_id=torch.device('cpu'))
    return str(storage)


def broken():
    run_ranks(wrap, 2, (torch.uint8,))


def mended():
    assert run_ranks(wrap, 2, (torch.bfloat16,)) == ['torch.bfloat16'] * 2
