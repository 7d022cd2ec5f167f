"""Programs that are forked from the process of the tests, which has imported what they import.

An interpreter that imports torch, transformers and trl takes 6 s of processor time before its first
line, and torchrun with two ranks 13. A fork is a process like any other, with its own pid, session,
variables, folder, streams and signals; what its program does, ranks of torchrun included, is what
it does after an exec. Where the start itself is the subject, a test does without; so does one of
DeepSpeed's converter, whose pool of processes was seen to hang in a fork.
"""
import atexit
import ctypes
import faulthandler
import inspect
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from libraries import bring_libraries

from llm_workbook.parallel.ranks import _leave_kernel_state

_PR_SET_NAME = 15  # Of Linux's prctl
EXECUTE = inspect.signature(subprocess.Popen._execute_child)


class ForkedProgram(subprocess.Popen):
    "A program in Python is a fork of this process; any other command is started as ever."
    def _execute_child(self, *values, **named):
        asked = EXECUTE.bind(self, *values, **named).arguments
        program = program_of(asked['args'])
        if program is None: return super()._execute_child(*values, **named)
        for stream in sys.stdout, sys.stderr: stream.flush()
        self.pid = os.fork()
        if self.pid == 0: become(program, asked)
        self._child_created = True
        pipes = 'p2cread', 'p2cwrite', 'c2pread', 'c2pwrite', 'errread', 'errwrite'
        self._close_pipe_fds(*(asked[name] for name in pipes))


def program_of(args) -> list[str] | None:
    "`-m`, `-c` or a file, with its words, if this interpreter is to run it without options."
    if isinstance(args, str | bytes | os.PathLike): return None
    interpreter, *words = map(os.fspath, args)
    if interpreter != sys.executable: return None
    if words[:1] == ['-u']: words = words[1:]
    if words and (words[0] in ('-m', '-c') or not words[0].startswith('-')): return words
    return None


def become(program: list[str], asked: dict):
    "In the fork: be the process that was asked for, and run its program to the end."
    code = 1
    try:
        take_streams(asked)
        if asked['env'] is not None:
            os.environ.clear()
            os.environ.update(asked['env'])
        if asked['cwd'] is not None: os.chdir(asked['cwd'])
        if asked['start_new_session']: os.setsid()
        forget_the_tests()
        code = exit_code_of(program)
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in sys.stdout, sys.stderr: stream.flush()
    except BaseException: traceback.print_exc()
    finally: os._exit(code)


def take_streams(asked: dict) -> None:
    "Lead the three streams where they were asked to go, and close all other files."
    ends = asked['p2cread'], asked['c2pwrite'], asked['errwrite']
    for number, end in enumerate(ends):
        if end != -1: os.dup2(end, number)
    faulthandler.disable()
    kept = [int(number) for number in asked['pass_fds']]
    begin = 3
    for number in [*sorted(kept), os.sysconf('SC_OPEN_MAX')]:
        os.closerange(begin, number)
        begin = number + 1
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, 'w', 1, closefd=False)
    sys.stderr = sys.__stderr__ = open(2, 'w', 1, closefd=False)
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, 'handlers', ()):
            if 'stream' in vars(handler): handler.stream = sys.stderr


def forget_the_tests() -> None:
    "Empty what Python and libraries remember of the process of the tests."
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)): signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    weakref.finalize._registry.clear()  # Temporary folders of the tests
    weakref.finalize._registered_with_atexit = False
    tempfile.tempdir = None
    sys.excepthook = sys.__excepthook__  # torch has wrapped it at each process group
    warnings.filters[:] = WARNINGS
    warnings._showwarnmsg_impl = show_warning
    warnings._filters_mutated()
    os.environ.setdefault('OMP_NUM_THREADS', '1')  # As torchrun does
    _leave_kernel_state({})
    if 'RANK' in os.environ: rename(f'rank-{os.environ["RANK"]}')


WARNINGS = [('ignore', None, kind, None, 0) for kind in (
    DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)]


def show_warning(message) -> None: sys.stderr.write(warnings._formatwarnmsg(message))


def rename(name: str) -> None:
    "Give this process a name: the system keeps showing the variables it was forked with."
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def rank_of(process: psutil.Process) -> int:
    "The rank that a process is; KeyError if it is none."
    name = process.name()
    if name.startswith('rank-'): return int(name.removeprefix('rank-'))
    return int(process.environ()['RANK'])


def exit_code_of(program: list[str]) -> int:
    "Run a program, and give the code with which its interpreter would end."
    try: run(program)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int): return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def run(program: list[str]) -> None:
    "Be the interpreter that was asked for `-m module`, `-c text` or a file."
    kind, *words = program
    if kind == '-c':
        text, *words = words
        sys.argv[:] = ['-c', *words]
        sys.path.insert(0, '')
        sys.modules['__main__'] = main = ModuleType('__main__')
        exec(compile(text, '<string>', 'exec'), vars(main))
    elif kind == '-m':
        module, *words = words
        sys.argv[:] = [module, *words]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name='__main__', alter_sys=True)
    else:
        sys.argv[:] = [kind, *words]
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name='__main__')


@contextmanager
def forked_programs():
    "Inside, programs in Python are forks of this process, and so are the ranks of a torchrun."
    import accelerate.commands.launch, torch.distributed.run  # noqa: E401, F401
    bring_libraries()
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    with pytest.MonkeyPatch.context() as patch:
        for module in subprocess, subprocess_handler: patch.setattr(module, 'Popen', ForkedProgram)
        yield


# A script that calls an interpreter calls this file: it hands its words, variables, folder, streams
# and ignored signals over, leaves word of the process, and ends as that does
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.connect({address!r})
ignored = [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
asked = {{'words': sys.argv[1:], 'env': dict(os.environ), 'cwd': os.getcwd(), 'ignored': ignored}}
socket.send_fds(door, [json.dumps(asked).encode()], [0, 1, 2])
pid = int(door.recv(100))
with open(os.path.join({forks!r}, str(os.getpid())), 'w') as file: file.write(str(pid))
for number in signal.SIGTERM, signal.SIGINT:
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = int(door.recv(100))
if code >= 0: os._exit(code)
signal.signal(-code, signal.SIG_DFL)
os.kill(os.getpid(), -code)
"""


@contextmanager
def warm_interpreter(folder: Path):
    """Give a file that a script can call as Python; `forks` holds for each such call the process
    that runs its program."""
    file, forks, address = folder/'warm-python', folder/'forks', f'\0llmw-{folder}'
    forks.mkdir()
    file.write_text(CLIENT.format(python=sys.executable, address=address, forks=str(forks)))
    file.chmod(0o755)
    with forked_programs(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(address)
        door.listen()
        server = os.fork()
        if server == 0: serve(door)
        try: yield file
        finally:
            for child in psutil.Process(server).children(recursive=True): child.kill()
            os.kill(server, signal.SIGTERM)
            os.waitpid(server, 0)


def serve(door: socket.socket):
    "Be a process that starts what clients ask for, each under a keeper."
    def end(*received):
        try:
            while os.wait(): pass
        except ChildProcessError: os._exit(0)
    try:
        signal.signal(signal.SIGTERM, end)
        while True:
            client, _ = door.accept()
            if os.fork() == 0: keep(client)
            client.close()
    finally: os._exit(1)


def keep(client: socket.socket):
    "Start the program that a client asks for, and tell the client how it ends."
    try:
        text, streams, _, _ = socket.recv_fds(client, 2**20, 3)
        asked = json.loads(text)
        for number in asked['ignored']: signal.signal(number, signal.SIG_IGN)
        job = ForkedProgram(
            [sys.executable, *asked['words']], env=asked['env'], cwd=asked['cwd'],
            stdin=streams[0], stdout=streams[1], stderr=streams[2])
        for stream in streams: os.close(stream)
        client.send(str(job.pid).encode())
        client.send(str(job.wait()).encode())
    finally: os._exit(0)


@pytest.fixture
def warm():
    "Let programs of this test be forks."
    with forked_programs(): yield
