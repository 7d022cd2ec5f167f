"""Run programs as forks of this process, which has imported once what nearly all of them import."""
import atexit
import gc
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from page import ROOT

LIBRARIES = ('nbdev.test pytest matplotlib.pyplot matplotlib_inline.backend_inline datasets torch._dynamo torch.distributed.fsdp '
             'torch.distributed.checkpoint transformers.models.llama.modeling_llama transformers.trainer peft bitsandbytes '
             'trl.trainer.sft_trainer').split()


LIMIT_S = 1500  # No job takes a half of that on two cores


class Job(NamedTuple):
    "A program to run."
    name: str  # As the table of times shows it
    program: str  # Path of a script, or name of a module
    arguments: tuple[str, ...]
    cold: bool = False  # In an interpreter of its own: what it shows is that something is not imported


class Done(NamedTuple):
    "A program that has ended."
    job: Job
    status: int  # 0: all is well
    said: str
    wall_s: float
    cpu_s: float  # Of the program and of all processes that it waited for


def imported() -> bool:
    "Import the libraries; a GPU must not be touched before a fork, and not every system can fork what they have loaded."
    if sys.platform != 'linux' or Path('/dev/nvidiactl').exists(): return False
    for name in LIBRARIES: import_module(name)
    if threading.active_count() > 1: raise SystemExit(f'a library has started threads: {threading.enumerate()}')
    gc.collect()
    gc.freeze()  # A collection in a fork would write to every page that it shares
    return True


def command(job: Job) -> list[str]:
    "Say how a shell would run the job."
    return [sys.executable, *([] if os.sep in job.program else ['-m']), job.program, *job.arguments]


def become(job: Job) -> None:
    "Be the program, as the interpreter would run it, and end as the interpreter ends."
    status = 1
    try:
        script = os.sep in job.program
        sys.argv, sys.path[0] = [job.program, *job.arguments], str(Path(job.program).parent if script else ROOT)
        runpy.run_path(job.program, run_name='__main__') if script else runpy.run_module(job.program, None, '__main__', True)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str): print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException: traceback.print_exc()
    threading._shutdown()  # Waits for threads, as every interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def start(job: Job, warm: bool) -> tuple:
    "Fork a job: its process, the file it writes to, the time."
    out = tempfile.TemporaryFile('w+', errors='replace')
    sys.stdout.flush(), sys.stderr.flush()
    if pid := os.fork(): return pid, job, out, time.monotonic()
    try:
        for number in 1, 2: os.dup2(out.fileno(), number)
        sys.stdout, sys.stderr = (open(number, 'w', 1, closefd=False) for number in (1, 2))
        os.chdir(ROOT)
        if job.cold or not warm: os.execv(sys.executable, command(job))
        become(job)
    finally: os._exit(1)


def ended(running: dict) -> Done:
    "Wait for one of the jobs that run; end one that has hung."
    while not (found := os.wait4(-1, os.WNOHANG))[0]:
        for pid, (_, job, _, began) in running.items():
            if time.monotonic() - began < LIMIT_S: continue
            print(f'{job.name} has run for {LIMIT_S:.1f} s, and is killed', flush=True)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    pid, status, used = found
    _, job, out, began = running.pop(pid)
    with out:
        out.seek(0)
        return Done(job, os.waitstatus_to_exitcode(status), out.read(), time.monotonic() - began, used.ru_utime + used.ru_stime)


def run_all(jobs: list[Job], width: int) -> Iterator[Done]:
    "Run the jobs, `width` at a time, and give each as it ends."
    warm, waiting, running = not os.environ.get('COLD') and imported(), list(jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < width:
                begun = start(waiting.pop(0), warm)
                running[begun[0]] = begun
            yield ended(running)
    finally:
        for pid in running: os.kill(pid, signal.SIGTERM)
