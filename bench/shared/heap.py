"""Bytes of this process as glibc counts them, and of the tensors that stay between steps.

A process started with the variables in COUNTING has every tensor in an mmapped block.
"""
import ctypes
import os
import re
import sys
import tempfile
import time

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
    "Give the bytes that are in mmapped blocks now."
    return LIBC.mallinfo2().hblkhd


def highest_b() -> int:
    """Give the most bytes that were in mmapped blocks at once since the process began.

    Only `malloc_stats` has this number, and prints it to stderr.
    """
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        LIBC.malloc_stats()
        os.dup2(stderr, 2)
        os.close(stderr)
        file.seek(0)
        return int(re.search(rb'max mmap bytes\s*=\s*(\d+)', file.read())[1])


def wait_for_release(before_b: int, size_b: int, seconds: float = 30) -> None:
    """Wait until less than `size_b` is mapped beyond `before_b`.

    A thread of gloo wakes the one that waits for a collective, and only then frees its copy of
    the tensor: on a busy machine that comes milliseconds later, or after the next allocation.
    """
    deadline = time.monotonic() + seconds
    while mapped_b() - before_b >= size_b:
        if time.monotonic() > deadline:
            more_b = mapped_b() - before_b
            raise RuntimeError(f'{more_b:,} bytes more than before are mapped after {seconds} s: '
                               f'a copy of {size_b:,} bytes was not freed')
        time.sleep(0)


def held_b(model, optimizer) -> int:
    """Give the bytes that this rank keeps between steps, each storage once.

    Parameters, buffers, 4-bit statistics, optimizer states, the buckets of DDP, and what ZeRO
    keeps besides.
    """
    import torch
    from bench.shared.real_ranks import gradients, optimizer_tensors
    from llm_workbook.model.quantize import payload_bytes
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    if hasattr(optimizer, 'ipg_buckets'):
        tensors += [getattr(parameter, 'ds_tensor', None) for parameter in model.parameters()]
        named = *optimizer_tensors(optimizer), *gradients(model, optimizer)
        tensors += [tensor for _, tensor in named]
    storages = {}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor): continue
        local = getattr(tensor, '_local_tensor', tensor)  # This rank's part of a sharded tensor
        storage = local.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    # No layer is packed before bitsandbytes is imported
    packed = 'bitsandbytes' in sys.modules
    absmax_b = payload_bytes(model)['absmax'] if packed else 0
    return sum(storages.values()) + absmax_b + buckets_b(model)


def buckets_b(model) -> int:
    "Give the bytes of the buckets of DDP; 0 where a model has none."
    if not hasattr(model, '_get_ddp_logging_data'): return 0
    data = model._get_ddp_logging_data()
    sizes = data.get('rebuilt_bucket_sizes') or data.get('bucket_sizes', '')
    return sum(map(int, re.findall(r'\d+', sizes)))
