"""Bytes of this process as glibc counts them, and of the tensors that stay between steps.

A process started with the variables in COUNTING has every tensor in an mmapped block.
"""
import ctypes
import os
import re
import tempfile

COUNTING = {
    'GLIBC_TUNABLES': 'glibc.malloc.mmap_threshold=16384',
    'OMP_NUM_THREADS': '1',
    'HF_HUB_OFFLINE': '1',
}


class Heap(ctypes.Structure):
    "What `mallinfo2` returns."
    _fields_ = [(name, ctypes.c_size_t) for name in
                ('arena', 'ordblks', 'smblks', 'hblks', 'hblkhd',
                 'usmblks', 'fsmblks', 'uordblks', 'fordblks', 'keepcost')]


LIBC = ctypes.CDLL(None)
LIBC.mallinfo2.restype = Heap


def mapped_b() -> int:
    "Bytes in mmapped blocks now."
    return LIBC.mallinfo2().hblkhd


def highest_b() -> int:
    """The most bytes that were in mmapped blocks at once since the process began.

    Only `malloc_stats` tells, on stderr.
    """
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        LIBC.malloc_stats()
        os.dup2(kept, 2)
        os.close(kept)
        file.seek(0)
        return int(re.search(rb'max mmap bytes\s*=\s*(\d+)', file.read())[1])


def held_b(model, optimizer) -> int:
    """Bytes that this rank keeps between steps, each storage once.

    Parameters, buffers, 4-bit statistics, optimizer states, and DDP's buckets.
    """
    import torch
    from llm_workbook.model.quantize import payload_bytes
    made = model._get_ddp_logging_data() if hasattr(model, '_get_ddp_logging_data') else {}
    buckets = made.get('rebuilt_bucket_sizes') or made.get('bucket_sizes', '')
    local = lambda t: getattr(t, '_local_tensor', t)
    states = [t for s in optimizer.state.values() for t in s.values()
              if isinstance(t, torch.Tensor)]
    stores = {local(t).untyped_storage()._cdata: local(t).untyped_storage().nbytes()
              for t in [*model.parameters(), *model.buffers(), *states]}
    buckets_b = sum(map(int, re.findall(r'\d+', buckets)))
    return sum(stores.values()) + payload_bytes(model)['absmax'] + buckets_b
