"""A machine with a GPU, emulated.

Torch's Python side answers as a CUDA build does where one GPU is visible and a library has opened
it, as bitsandbytes does when it is imported: it has counted one device, a forked process can open
none, and FSDP2's default device is CUDA.

Usage: emulated_gpu.py PAGE. It runs the cells of a page on such a machine, as nbdev_test would.
"""
import os
import sys
from pathlib import Path


def names_of_a_gpu() -> dict:
    "What changes in `torch.cuda` where a kernel has opened a GPU, by name."
    import torch
    kernel = os.getpid()

    def open_cuda():
        if os.getpid() != kernel:
            raise RuntimeError('Cannot re-initialize CUDA in forked subprocess')
        raise AssertionError('the kernel touches CUDA')

    def device_count():
        known = torch.cuda._cached_device_count
        if known is not None: return known
        return 0 if os.environ.get('CUDA_VISIBLE_DEVICES') == '' else 1

    return {  # Each is a function of its own, or torch.compile refuses them
        '_lazy_init': open_cuda,
        'set_device': lambda device: open_cuda(),
        'current_device': lambda: open_cuda(),
        'device_count': device_count,
        'is_available': lambda: device_count() > 0,
        '_is_in_bad_fork': lambda: os.getpid() != kernel,
        'manual_seed_all': lambda seed: None,  # Of a kernel that has opened CUDA, harmless
        '_cached_device_count': 1}


def emulate(patch) -> None:
    "Let torch say that there is a GPU and that this process has opened it; `patch` is a `setattr`."
    # Imported before CUDA says that it is there
    import datasets, peft, transformers.trainer, trl.trainer.sft_trainer  # noqa: E401, F401
    import torch
    for name, value in names_of_a_gpu().items(): patch(torch.cuda, name, value)
    accelerator = torch.device('cuda')
    patch(torch._C, '_get_accelerator', lambda *args: accelerator)
    patch(torch.accelerator, 'current_accelerator', lambda check_available=False: accelerator)


def run_page(page: Path) -> bool:
    "Run the cells of a page on the emulated machine and say whether all of them passed."
    from nbdev.test import test_nb
    from page import settings
    emulate(setattr)
    passed, _ = test_nb(page.resolve(), skip_flags=settings()['tst_flags'].split())
    return passed


if __name__ == '__main__':
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'tools'))
    sys.exit(0 if run_page(Path(sys.argv[1])) else 1)
