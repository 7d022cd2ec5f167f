"""The parts: what each is called, what it imports, and whether a quick call takes it."""
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from bench.gpu import ceilings, checks, memory, runs, speed
from bench.gpu.place import Place
from bench.shared.gpu_rows import NAMED, PLAIN

LIBRARY = 'pydantic', 'yaml'
TRAINER = *LIBRARY, 'trl', 'datasets', 'bitsandbytes'


class Part(NamedTuple):
    "Something to find out, in a process of its own."
    group: str  # 'check', 'ceiling', 'memory', 'speed' or 'large'
    name: str
    run: Callable[[Place], dict]
    needs: tuple[str, ...] = ()  # Packages beside torch, transformers, accelerate and peft
    quick: bool = True
    limit_s: int = 240  # No part may take more than 480

    def absent(self) -> list[str]:
        "Name the packages that are not installed."
        return [name for name in self.needs if find_spec(name) is None]


def _check(call, *needs, **how) -> Part: return Part('check', call.__name__, call, needs, **how)


def _ceiling(call, *needs) -> Part: return Part('ceiling', call.__name__, call, needs)


def _speed(call, *needs) -> Part: return Part('speed', call.__name__, call, needs, False, 480)


def configurations() -> list[Part]:
    "A part for each configuration of memory."
    parts = []
    for number, row in enumerate(memory.CONFIGURATIONS):
        _, method, _, _, _, more = row
        parts.append(Part(
            'memory', memory.title(*row), partial(memory.configuration, number=number),
            memory.packages(method, more), number in memory.QUICK, 300))
    return parts


def large() -> list[Part]:
    "A part for each recipe at full size; of several ranks rank 0 is real, the rest pretended."
    names = [*(name for name, _ in NAMED), *(preset for preset, _, _ in PLAIN),
             *memory.WHOLE_CARD]
    return [Part('large', f'{number}-{name}', partial(memory.large, number=number),
                 TRAINER, False, 480) for number, name in enumerate(names)]


PARTS = (
    _check(checks.device_setup, *LIBRARY), _check(checks.nccl_probe),
    _check(runs.device_run, *TRAINER), _check(runs.cpu_ranks, *TRAINER),
    _check(runs.opened_kernel, *TRAINER), _check(checks.watchdog, *LIBRARY),
    _check(checks.float16_scaler, *LIBRARY), _check(checks.nf4_bytes, *LIBRARY, 'bitsandbytes'),
    _check(checks.packed_product, 'bitsandbytes'), _check(checks.tf32),
    _check(checks.loss_head, *LIBRARY, 'trl', 'bitsandbytes'),
    _check(checks.one_pass_head, *LIBRARY, 'trl', 'bitsandbytes'),
    _check(checks.segments, *LIBRARY), _ceiling(ceilings.matmul),
    _ceiling(ceilings.bandwidth), _ceiling(ceilings.host_copies), _ceiling(ceilings.launches),
    _ceiling(ceilings.dequantise, 'bitsandbytes'), _ceiling(ceilings.attention),
    _ceiling(ceilings.allocator), _ceiling(ceilings.nccl), *configurations(),
    _check(runs.cpu_zero, *TRAINER, 'deepspeed', quick=False),
    _check(runs.rehearsal, *TRAINER, quick=False), _check(runs.float16_run, *TRAINER, quick=False),
    _check(runs.sharded_run, *TRAINER, quick=False),
    _check(runs.activations_away, *TRAINER, quick=False),
    _check(runs.resumed, *TRAINER, quick=False, limit_s=480),
    _speed(speed.head_speed, *LIBRARY), _speed(speed.lora_8b, *TRAINER),
    _speed(speed.qlora_70b, *TRAINER), _speed(speed.long_context, *TRAINER),
    _speed(speed.long_context_16, *TRAINER), *large())
