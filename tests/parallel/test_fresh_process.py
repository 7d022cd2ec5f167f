"""A function in a new Python process: outcome, output, signals, and what is left behind. And what
spoils a kernel for GPU ranks, simulated on torch's Python side."""
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from errands import (
    SentError, Unhappy, facts, fail, fail_locally, save_and_return, speak, start_and_leave,
    wait_long, wait_stubbornly)
from trouble import wait_for

from llm_workbook.parallel import fresh_process
from llm_workbook.parallel.backends import fsdp_env
from llm_workbook.parallel.fresh_process import (
    noted_signals, run_fresh, why_no_fork, why_no_gpu_fork)
from llm_workbook.parallel.ranks import RankError, RankTimeout, notebook_ranks
from llm_workbook.config.recipe import Recipe
from llm_workbook.training.resume import Preempted


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path_factory, monkeypatch):
    "After every test: no child, nothing in the temporary folder, the handlers of before."
    temp = tmp_path_factory.mktemp('temp')
    monkeypatch.setenv('TMPDIR', str(temp))
    monkeypatch.setattr(tempfile, 'tempdir', str(temp))
    handlers = [signal.getsignal(number) for number in fresh_process._NOTED_SIGNALS]
    yield
    assert psutil.Process().children(recursive=True) == []
    assert list(temp.iterdir()) == []
    assert [signal.getsignal(number) for number in fresh_process._NOTED_SIGNALS] == handlers


def signal_when_there(place, *numbers):
    "From a thread: wait until the process runs, then send this one signals, half a second apart."
    def send():
        wait_for(place.exists)
        for number in numbers:
            time.sleep(0.5)
            os.kill(os.getpid(), number)
    thread = threading.Thread(target=send)
    thread.start()
    return thread


# Outcome and output

def test_value_and_state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('COLOUR', 'green')
    folder, colour, path, has_torch, session = run_fresh(facts)
    assert (folder, colour, path) == (str(tmp_path), 'green', sys.path[:2])
    assert session != os.getsid(0)
    assert not has_torch


def test_a_tensor_comes_back():
    sent = torch.arange(3, dtype=torch.bfloat16)
    back = run_fresh(torch.neg, (sent,))
    assert back.dtype == sent.dtype
    assert back.tolist() == [0, -1, -2]


@pytest.mark.parametrize(
    'error',
    [
        Preempted(7), RankError(1, 'failed: no', 'a traceback', 'a log'),
        RankTimeout(0, 'is stuck', '', '', [0], [1], {0: 'a stack'}), ValueError('no', 2),
        FileNotFoundError(2, 'none', 'x'), Unhappy('much', 'too'), KeyboardInterrupt(),
        SystemExit(3)],
    ids=lambda error: type(error).__name__)
def test_an_exception_arrives_as_it_is(error):
    with pytest.raises(type(error)) as caught: run_fresh(fail, (SentError(error),))
    arrived = caught.value
    assert (type(arrived), str(arrived), arrived.args) == (type(error), str(error), error.args)
    notes = vars(arrived).pop('__notes__', [])
    assert vars(arrived) == vars(error)
    if getattr(error, 'traceback', ''):
        assert notes == []
    else:
        assert 'In the other process' in notes[0]
        assert ', in fail' in notes[0]
        assert '_serve' not in notes[0], 'a frame of the library'


def test_an_exception_of_a_class_that_nobody_can_import():
    with pytest.raises(RuntimeError, match='^Local: only here\n') as caught: run_fresh(fail_locally)
    assert ', in fail_locally' in caught.value.__notes__[0]


def test_a_value_that_cannot_be_pickled_is_an_error():
    with pytest.raises(Exception, match='pickle'): run_fresh(eval, ('lambda: 0',))


@pytest.mark.parametrize(
    'call, words',
    [
        ((3,), '3 is no function'),
        ((lambda: 0,), 'lambda.* exists only in this kernel.*write it into a module'),
        ((print, (lambda: 0,)), 'print.* or its arguments cannot be pickled')])
def test_refused_before_a_process_is_started(call, words, monkeypatch):
    monkeypatch.setattr(subprocess, 'Popen', lambda *args, **kwargs: pytest.fail('started'))
    with pytest.raises(ValueError, match=words): run_fresh(*call)


def test_output_appears_as_it_comes(capsys, tmp_path):
    "The process goes on only when its first word has been seen here."
    seen, go = [], tmp_path/'go'
    def look():
        seen.append(capsys.readouterr().out)
        if 'first' in ''.join(seen): go.touch()
    waits = f'echo first; for i in $(seq 400); do test -e {go} && break; sleep .05; done'
    assert run_fresh(os.system, (f'{waits}; test -e {go} && echo second',), watch=look) == 0
    assert len(seen) >= 2
    assert ''.join(seen) == 'first\nsecond\n'


def test_much_output_comes_whole(capsys):
    assert run_fresh(speak, (50_000,)) == 50_000
    out, err = capsys.readouterr()
    assert out == ''.join(f'line {number} ü\n' for number in range(50_000)) + 'from a program\n'
    assert err.count('warning') == 50_000


def test_a_process_that_left_without_an_outcome():
    with pytest.raises(RuntimeError, match='fresh process left with exit code 3'):
        run_fresh(os._exit, (3,))
    with pytest.raises(RuntimeError, match=r'killed by SIGKILL \(.*memory runs out'):
        run_fresh(signal.raise_signal, (signal.SIGKILL,))


# What it leaves

def test_no_file_stays_open():
    before = os.listdir('/proc/self/fd')
    for _ in range(2):
        run_fresh(os.getpid)
        with pytest.raises(ValueError, match='invalid literal'): run_fresh(int, ('x',))
    assert os.listdir('/proc/self/fd') == before


def test_a_program_that_it_started_ends_with_it():
    pid = run_fresh(start_and_leave, (['sleep', '100'],))
    assert wait_for(lambda: not psutil.pid_exists(pid) or is_zombie(pid))


def is_zombie(pid): return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_watch_that_fails_ends_it(tmp_path):
    place = tmp_path/'pid'
    def fail_once_it_runs():
        if place.exists(): raise ZeroDivisionError('in watch')
    with pytest.raises(ZeroDivisionError, match='in watch'):
        run_fresh(wait_long, (place,), fail_once_it_runs)
    assert not psutil.pid_exists(int(place.read_text()))


def test_it_dies_with_the_kernel(tmp_path):
    place = tmp_path/'pid'
    program = (
        'import sys; sys.path[:] = eval(sys.argv[1]); import errands; '
        'from llm_workbook.parallel.fresh_process import run_fresh; '
        'run_fresh(errands.wait_long, (sys.argv[2],))')
    kernel = subprocess.Popen([sys.executable, '-c', program, repr(sys.path), str(place)])
    assert wait_for(lambda: place.exists() and place.read_text(), 60)
    pid = int(place.read_text())
    assert psutil.Process(pid).ppid() == kernel.pid
    kernel.kill()
    kernel.wait()
    assert wait_for(lambda: not psutil.pid_exists(pid) or is_zombie(pid))


# Signals

def test_ctrl_c_reaches_the_process(tmp_path):
    place = tmp_path/'pid'
    thread = signal_when_there(place, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt): run_fresh(wait_long, (place,))
    thread.join()


def test_the_third_ctrl_c_ends_a_process_that_does_not_listen(tmp_path):
    place = tmp_path/'pid'
    start = time.monotonic()
    thread = signal_when_there(place, *[signal.SIGINT] * 3)
    with pytest.raises(KeyboardInterrupt): run_fresh(wait_stubbornly, (place,))
    thread.join()
    assert time.monotonic() - start < 60


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_saves_may_return(tmp_path, number):
    place = tmp_path/'pid'
    thread = signal_when_there(place, number)
    assert run_fresh(save_and_return, (place,)) == [number]
    thread.join()


def test_sigterm_does_here_what_it_would_have_done(tmp_path):
    place, came = tmp_path/'pid', []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        thread = signal_when_there(place, signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt): run_fresh(wait_long, (place,))
        thread.join()
    finally: signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]


def test_a_signal_that_the_caller_ignores_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with noted_signals() as interrupts: os.kill(os.getpid(), signal.SIGTERM)
    finally: signal.signal(signal.SIGTERM, before)
    assert interrupts == []


def test_it_runs_from_a_thread():
    values = []
    thread = threading.Thread(target=lambda: values.append(run_fresh(os.getpid)))
    thread.start()
    thread.join()
    assert values[0] != os.getpid()


# Ranks

def test_the_error_of_a_rank_that_started_there_arrives_as_it_is():
    "The page starts ranks that return."
    with pytest.raises(RankError) as caught: run_fresh(notebook_ranks, (int, 2, ('x',)))
    assert caught.value.reason == "failed: ValueError: invalid literal for int() with base 10: 'x'"
    assert not hasattr(caught.value, '__notes__')


# What spoils a kernel

@pytest.fixture
def clean(monkeypatch):
    "A kernel on a machine with GPUs that nothing has spoilt."
    monkeypatch.setattr('accelerate.utils.is_cuda_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: False)
    monkeypatch.setattr(torch.cuda, '_is_in_bad_fork', lambda: False)
    monkeypatch.delitem(sys.modules, 'bitsandbytes', raising=False)
    return monkeypatch


def poison(patch):
    "Do what `torch.cuda.is_available()` does: mark all later forks, and leave `_initialized`."
    kernel = os.getpid()
    patch.setattr(torch.cuda, '_is_in_bad_fork', lambda: os.getpid() != kernel)


def test_what_spoils_a_kernel(clean):
    assert why_no_gpu_fork() is None
    with clean.context() as patch:
        poison(patch)
        assert not torch.cuda.is_initialized()
        assert why_no_gpu_fork() == 'CUDA was asked for its devices'
    with clean.context() as patch:
        patch.setattr(torch.cuda, 'is_initialized', lambda: True)
        assert why_no_gpu_fork() == 'CUDA is initialised'
    with clean.context() as patch:
        patch.setitem(sys.modules, 'bitsandbytes', SimpleNamespace())
        assert why_no_gpu_fork() == 'bitsandbytes is loaded'
        patch.setattr('accelerate.utils.is_cuda_available', lambda: False)
        assert why_no_gpu_fork() is None


def test_a_torch_that_cannot_say_spoils_nothing(clean):
    clean.delattr(torch.cuda, '_is_in_bad_fork')
    assert why_no_gpu_fork() is None


def test_a_kernel_that_is_a_bad_fork_itself(clean):
    clean.setattr(torch.cuda, '_is_in_bad_fork', lambda: True)
    assert why_no_gpu_fork() == 'CUDA was asked for its devices'


def test_a_kernel_whose_forks_cannot_train_is_found(monkeypatch):
    "As torch refuses it: in every process but this one."
    kernel, backward = os.getpid(), torch.Tensor.backward

    def refused(*args):
        if os.getpid() == kernel: return backward(*args)
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based")

    monkeypatch.setattr(torch.Tensor, 'backward', refused)
    assert why_no_fork() == 'a backward pass has started threads'
    def broken(*args): raise RuntimeError('another reason')
    monkeypatch.setattr(torch.Tensor, 'backward', broken)
    assert why_no_fork() is None


@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
def test_a_mode_of_the_kernel_is_no_obstacle(mode):
    before = why_no_fork()
    with mode(): assert why_no_fork() == before


def test_without_torch_nothing_is_spoilt():
    program = ('import sys; from llm_workbook.parallel.fresh_process import why_no_fork, '
               'why_no_gpu_fork; print(why_no_fork(), why_no_gpu_fork(), "torch" in sys.modules)')
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert done.stdout == 'None None False\n'


def test_ranks_for_gpus_are_refused_where_cuda_was_asked_for_its_devices(clean):
    poison(clean)
    with pytest.raises(RuntimeError, match='CUDA was asked for its devices in this kernel'):
        notebook_ranks(os.getpid)


def test_cpu_ranks_of_deepspeed_are_not_taken_for_gpu_ranks(clean):
    "accelerate is told `ACCELERATE_USE_CPU=false` for them, and the GPUs are hidden."
    clean.setattr(torch.cuda, 'is_initialized', lambda: True)
    env = fsdp_env(Recipe(
        name='zero', model={'source': 'tiny-base'}, data={'source': 'sums', 'format': 'messages'},
        sharding={'strategy': 'zero2'}, cluster={'device': 'cpu'}))
    assert env['ACCELERATE_USE_CPU'] == 'false'
    found = notebook_ranks(os.getenv, args=('CUDA_VISIBLE_DEVICES',), env=env)
    assert found == ['', '']
