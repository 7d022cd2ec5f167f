"""What fresh processes run in tests: functions of a module that is quick to import."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trouble import wait_for

from llm_workbook.parallel.fresh_process import noted_signals, pack_outcome, unpack_outcome


class Unhappy(Exception):
    "Pickle would rebuild it by a call with one value, and its class takes two."
    def __init__(self, what, how):
        super().__init__(f'{what} {how}')
        self.how = how


def fail(error): raise error


def fail_locally(): raise type('Local', (ValueError,), {})('only here')


def speak(times):
    for number in range(times):
        print(f'line {number} ü')
        print(f'warning {number}', file=sys.stderr)
    os.system('echo from a program')
    return times


def start_and_leave(command):
    "Start a program that holds the output open, and do not wait for it."
    return subprocess.Popen(command).pid


def wait_long(place):
    Path(place).write_text(str(os.getpid()))
    time.sleep(100)


def wait_stubbornly(place):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wait_long(place)


def save_and_return(place):
    "As ranks do: note the signal, save, and return."
    with noted_signals() as interrupts:
        Path(place).write_text(str(os.getpid()))
        wait_for(lambda: interrupts)
    return list(interrupts)


def facts():
    return os.getcwd(), os.environ.get('COLOUR'), sys.path[:2], 'torch' in sys.modules, os.getsid(0)


class SentError(BaseException):
    "Brings an exception over that pickle cannot, as an argument."
    def __new__(cls, error): return super().__new__(cls)
    def __init__(self, error): self.packed = pack_outcome(error)
    def __reduce__(self): return unpack_outcome, (self.packed,)
