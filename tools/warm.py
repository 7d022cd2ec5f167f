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
from typing import NamedTuple, TextIO

from page import ROOT

LIBRARIES = (
    'nbdev.test', 'pytest', 'matplotlib.pyplot', 'matplotlib_inline.backend_inline', 'datasets',
    'torch._dynamo', 'torch.distributed.fsdp', 'torch.distributed.checkpoint',
    'transformers.models.llama.modeling_llama', 'transformers.trainer', 'peft', 'bitsandbytes',
    'trl.trainer.sft_trainer')
LIMIT_S = 1500  # No job takes a half of that on two cores


class Job(NamedTuple):
    "A program to run."
    name: str  # As the table of times shows it
    program: str  # Path of a script, or name of a module
    arguments: tuple[str, ...]
    cold: bool = False  # In an interpreter of its own, in which nothing is imported yet

    @property
    def is_script(self) -> bool:
        "Say whether `program` is a path."
        return os.sep in self.program


class Done(NamedTuple):
    "A program that has ended."
    job: Job
    status: int  # 0: success
    output: str
    wall_s: float
    cpu_s: float  # Of the program and of all processes that it waited for


class _Running(NamedTuple):
    "A program that runs."
    job: Job
    output: TextIO  # The file that it writes to
    start: float  # On the monotonic clock


def import_libraries() -> bool:
    """Import the libraries; say whether programs can be forks of this process.

    A GPU must not be touched before a fork, and not every system can fork what they have loaded.
    """
    if sys.platform != 'linux' or Path('/dev/nvidiactl').exists(): return False
    for name in LIBRARIES: import_module(name)
    if threading.active_count() > 1:
        raise SystemExit(f'a library has started threads: {threading.enumerate()}')
    gc.collect()
    gc.freeze()  # A collection in a fork would write to every page of memory that it shares
    return True


# In the fork

def run_program(job: Job) -> int:
    "Run the program as the interpreter would run it, and return its exit status."
    sys.argv = [job.program, *job.arguments]
    sys.path[0] = str(Path(job.program).parent if job.is_script else ROOT)
    try:
        if job.is_script: runpy.run_path(job.program, run_name='__main__')
        else: runpy.run_module(job.program, run_name='__main__', alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str): print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def become(job: Job, output: TextIO, warm: bool) -> None:
    "Turn this process into the job; end as an interpreter ends."
    for number in (1, 2): os.dup2(output.fileno(), number)
    sys.stdout, sys.stderr = (open(number, 'w', 1, closefd=False) for number in (1, 2))
    os.chdir(ROOT)
    if job.cold or not warm:
        program = [job.program] if job.is_script else ['-m', job.program]
        os.execv(sys.executable, [sys.executable, *program, *job.arguments])
    status = run_program(job)
    threading._shutdown()  # Waits for threads, as every interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# In the parent

def start(job: Job, warm: bool) -> tuple[int, _Running]:
    "Fork a job; return its process number."
    output = tempfile.TemporaryFile('w+', errors='replace')
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid: return pid, _Running(job, output, time.monotonic())
    try: become(job, output, warm)
    finally: os._exit(1)


def kill_overdue(running: dict[int, _Running]) -> None:
    "Kill every job that has run longer than LIMIT_S."
    for pid, (job, _, start) in running.items():
        if time.monotonic() - start < LIMIT_S: continue
        print(f'{job.name} has run for {LIMIT_S:.1f} s, and is killed', flush=True)
        os.kill(pid, signal.SIGKILL)


def next_done(running: dict[int, _Running]) -> Done:
    "Wait until a job ends, and take it out of `running`."
    while True:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if pid: break
        kill_overdue(running)
        time.sleep(0.05)
    job, output, start = running.pop(pid)
    wall_s = time.monotonic() - start
    with output:
        output.seek(0)
        text = output.read()
    return Done(job, os.waitstatus_to_exitcode(status), text, wall_s, used.ru_utime + used.ru_stime)


def run_all(jobs: list[Job], width: int) -> Iterator[Done]:
    "Run the jobs, `width` at a time, and give each as it ends."
    warm = not os.environ.get('COLD') and import_libraries()
    waiting, running = list(jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < width:
                pid, job = start(waiting.pop(0), warm)
                running[pid] = job
            yield next_done(running)
    finally:
        for pid in running: os.kill(pid, signal.SIGTERM)
