"What pages and tests import once, so that the processes they fork need not."
import ctypes
import os
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch


@cache
def bring_libraries() -> None:
    """Import what every rank imports: without it, most of a short rank's time.

    DeepSpeed is one of them: accelerate imports it wherever it is installed.
    """
    import llm_workbook.model.quantize  # noqa: F401  First: it silences bitsandbytes
    from llm_workbook.model.half_matmul import upcast_half_matmul
    import datasets, peft, torch.distributed.checkpoint, torch.distributed.fsdp  # noqa: E401, F401
    import transformers.trainer, trl.trainer.sft_trainer  # noqa: E401, F401
    if find_spec('deepspeed'):
        with tempfile.TemporaryDirectory() as folder:
            # It opens a cache at import
            names = {'TORCHINDUCTOR_CACHE_DIR': folder, 'DS_ACCELERATOR': 'cpu'}
            with patch.dict(os.environ, names):
                import deepspeed, torch.utils.cpp_extension  # noqa: E401, F401
    # As `load_base` does, also for models that pages and tests load themselves: without AVX-512
    # they take ten times as long
    upcast_half_matmul()
    join_pages()


COLLAPSE = 25  # Of Linux's madvise


def join_pages() -> None:
    """Ask Linux to keep the memory of this process in pages of 2 MiB, where it can.

    A fork copies an entry for each page; with pages of 4 KiB it takes twice the time.
    """
    if sys.platform != 'linux': return
    libc = ctypes.CDLL(None)
    for line in Path('/proc/self/maps').read_text().splitlines():
        span, rights, _, _, file, *_ = line.split()
        if (rights, file) != ('rw-p', '0'): continue
        begin, end = (int(address, 16) for address in span.split('-'))
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), COLLAPSE)
