"""What a notebook cell cannot test well about ranks: kills, hangs, interrupts, a kernel that dies
or must survive."""
import faulthandler
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
# DistributedDataParallel imports it, which takes seconds and makes a folder: here, once
import torch._dynamo
import torch.distributed as dist
from trouble import slow_case, ports

from llm_workbook.training import memory_trace as gauges

from llm_workbook.training.memory_trace import memory_trace
from llm_workbook.parallel.ranks import (
    RankError, RankTimeout, free_port, notebook_ranks, run_ranks)

both = pytest.mark.parametrize('launch', [run_ranks, slow_case(notebook_ranks)])


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path_factory, monkeypatch):
    "After every test: no child process, no file, the same environment and interrupt handler."
    folder = tmp_path_factory.mktemp('temp')
    environment = dict(os.environ)
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(tempfile, 'tempdir', str(folder))
    yield
    assert wait_for(lambda: psutil.Process().children(recursive=True) == [])
    assert list(folder.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is handler
    assert {k: v for k, v in os.environ.items() if k != 'PYTEST_CURRENT_TEST'} == \
           {k: v for k, v in environment.items() if k != 'PYTEST_CURRENT_TEST'}


def join():
    "Make sure of a process group under either launcher; return the rank."
    if not dist.is_initialized():
        from accelerate import PartialState
        PartialState(cpu=True)
    return dist.get_rank()


def train(rank_to_stop, stop, steps=2000):
    "Step after step of an all-reduce; one rank calls `stop` in the middle."
    for step in range(steps):
        if join() == rank_to_stop and step == 20: stop()
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.005)


def crash():
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def wait_for(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end: time.sleep(0.05)
    return condition()


@both
@pytest.mark.parametrize('world', [2, 3])
def test_a_killed_rank_is_named_within_5_s(launch, world, tmp_path):
    def stop():
        (tmp_path/'killed').write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankError, match='rank 1 was killed by SIGKILL') as caught:
        launch(train, world, (1, stop))
    assert caught.value.rank == 1
    assert time.monotonic() - float((tmp_path/'killed').read_text()) < 5


@pytest.mark.slow
@pytest.mark.parametrize(('end', 'reason'), [
    (lambda: os.kill(os.getpid(), signal.SIGKILL), 'was killed by SIGKILL'),
    (lambda: os._exit(3), 'left with exit code 3'),
    (lambda: os._exit(0), 'left with exit code 0')], ids=['killed', 'exit 3', 'exit 0'])
def test_a_rank_that_the_agent_of_torch_reaps_first_is_named_rightly(end, reason):
    "The thread that watches the ranks sleeps when the rank ends, as on a busy machine."
    def work():
        if join() == 1:
            time.sleep(0.3)
            end()
        dist.barrier()
    with pytest.raises(RankError, match=f'rank 1 {reason}'):
        notebook_ranks(work, watch=lambda: time.sleep(2), timeout_s=30)


@pytest.mark.parametrize('launch', [run_ranks, notebook_ranks])
def test_the_error_of_a_launch_holds_no_port(launch):
    "While the error is kept, as a notebook keeps the last one, and nothing is collected."
    listening = ports()
    def fail():
        if join() == 1: raise LookupError('spoilt')
        dist.barrier()
    with pytest.raises(RankError, match='rank 1 failed: LookupError') as caught: launch(fail)
    gc.disable()
    try: assert wait_for(lambda: ports() <= listening), (ports() - listening, caught.value)
    finally: gc.enable()


@both
def test_a_rank_killed_from_outside_is_named(launch, tmp_path):
    def work():
        if join() == 1: (tmp_path/'pid').write_text(str(os.getpid()))
        train(None, None, 20_000)
    def kill():
        os.kill(
            int(wait_for(lambda: (tmp_path/'pid').exists() and (tmp_path/'pid').read_text(), 30)),
            signal.SIGKILL)

    killer = threading.Timer(0.2, kill)
    killer.start()
    with pytest.raises(RankError, match='rank 1 was killed by SIGKILL'): launch(work)
    killer.join()


@both
def test_a_hanging_rank_is_named_at_the_limit(launch):
    start = time.monotonic()
    with pytest.raises(RankTimeout) as caught:
        launch(train, 3, (2, lambda: time.sleep(1000)), timeout_s=4)
    assert 4 < time.monotonic() - start < 14
    assert (caught.value.rank, caught.value.stuck, caught.value.waiting) == (2, [2], [0, 1])
    assert 'all_reduce' in caught.value.stacks[0]
    assert 'in train' in caught.value.stacks[2]


@both
def test_a_busy_loop_that_ignores_everything_is_killed(launch):
    def ignore():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
    with pytest.raises(RankTimeout) as caught: launch(train, 2, (0, ignore), timeout_s=3)
    assert caught.value.stuck == [0]


def test_a_rank_that_returns_while_the_stacks_are_written_is_late_all_the_same():
    with pytest.raises(RankTimeout) as caught: run_ranks(time.sleep, 2, (1.1,), timeout_s=1)
    assert (caught.value.rank, caught.value.stuck, caught.value.waiting) == (0, [0, 1], [])


def test_a_wait_in_the_backward_pass_is_a_wait():
    def step():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        if dist.get_rank() == 1: time.sleep(1000)
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RankTimeout) as caught: run_ranks(step, timeout_s=5)
    assert (caught.value.stuck, caught.value.waiting) == ([1], [0]), str(caught.value)


@pytest.mark.parametrize('has_gpu', [True, False])
def test_a_rank_that_asks_its_gpu_for_a_number_waits(tmp_path, has_gpu):
    "A file that is mapped stands for the device of a GPU, and a sleep for its silence."
    device = tmp_path/'dev'/('nvidia0' if has_gpu else 'other')
    device.parent.mkdir()
    device.write_bytes(bytes(mmap.PAGESIZE))
    def step():
        with open(device, 'r+b') as file, mmap.mmap(file.fileno(), 0):
            if dist.get_rank() == 1: time.sleep(1000)
            float(time.sleep(1000))
    with pytest.raises(RankTimeout) as caught: run_ranks(step, timeout_s=1)
    expected = ([1], [0]) if has_gpu else ([0, 1], [])
    assert (caught.value.stuck, caught.value.waiting) == expected, str(caught.value)


def test_a_wait_for_an_asynchronous_operation_is_a_wait():
    def receive():
        work = dist.irecv(torch.zeros(1), 1) if dist.get_rank() == 0 else None
        if work: work.wait()
        else: time.sleep(1000)
    with pytest.raises(RankTimeout) as caught: run_ranks(receive, timeout_s=1)
    assert (caught.value.stuck, caught.value.waiting) == ([1], [0]), str(caught.value)


@both
def test_the_first_failure_is_told_not_its_victims(launch):
    def stop(): raise ValueError('the batch is empty')
    with pytest.raises(RankError, match='rank 2 failed: ValueError: the batch is empty') as caught:
        launch(train, 3, (2, stop))
    assert caught.value.rank == 2
    assert 'in train' in caught.value.traceback
    assert 'site-packages' not in str(caught.value)


@both
@pytest.mark.parametrize(
    'leave, words',
    [
        (lambda: os._exit(3), 'exit code 3'),
        (lambda: os._exit(0), 'exit code 0|left just before'),
        (lambda: sys.exit('enough'), 'SystemExit: enough'),
        (crash, 'SIGSEGV')])
def test_a_rank_that_leaves_without_a_result_is_told(launch, leave, words):
    with pytest.raises(RankError, match=words) as caught: launch(train, 2, (1, leave))
    assert caught.value.rank == 1


@both
def test_the_log_of_the_failed_rank_is_shown(launch, capsys):
    def stop():
        print('before the end', file=sys.stderr)
        os._exit(1)
    with pytest.raises(RankError, match='before the end'): launch(train, 2, (1, stop))
    assert 'before the end' not in ''.join(capsys.readouterr())


@both
def test_only_rank_0_prints_in_the_cell(launch, capsys):
    def talk(): print(f'héllo from {join()}')
    launch(talk)
    assert capsys.readouterr() == ('héllo from 0\n', '')


@both
@pytest.mark.parametrize('world', [1, 2])
def test_results_come_back_by_rank(launch, world):
    def work(x):
        return {
            'rank': int(os.environ['RANK']), 'x': x.double(), 'pid': os.getpid(),
            'big': torch.zeros(3_000_000)}

    found = launch(work, world, (torch.arange(3),))
    assert [f['rank'] for f in found] == list(range(world))
    assert all(
        f['x'].dtype == torch.float64
        and f['x'].tolist() == [0, 1, 2]
        and f['big'].shape == (3_000_000,)
        for f in found)
    assert len({os.getpid(), *(f['pid'] for f in found)}) == world + 1


@both
def test_what_cannot_be_pickled_is_an_error_of_its_rank(launch):
    with pytest.raises(RankError, match='pickle'): launch(lambda: threading.Lock())


@both
def test_env_reaches_the_ranks_only(launch):
    seen = launch(
        lambda: (os.environ['FSDP_VERSION'], os.environ['GLOO_SOCKET_IFNAME']),
        env={'FSDP_VERSION': 2})
    assert seen == [('2', 'lo')] * 2
    assert 'FSDP_VERSION' not in os.environ


@both
@pytest.mark.parametrize('delay_s', [0.01, 0.03, 0.06, 0.1, 0.7])
def test_an_interrupt_stops_everything(launch, delay_s):
    interrupt = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupt.start()  # In the block: on busy cores it may come before `launch` does
        launch(train, 2, (0, lambda: time.sleep(1000)))
    assert time.monotonic() - start < 15


def test_a_watch_that_raises_stops_everything():
    def watch(): raise RuntimeError('no display')
    with pytest.raises(RuntimeError, match='no display'):
        notebook_ranks(time.sleep, args=(1000,), watch=watch)


@both
def test_what_a_rank_starts_dies_with_it(launch, tmp_path):
    def stop():
        print(subprocess.Popen(['sleep', '1000']).pid, file=open(path, 'w'), flush=True)
        time.sleep(1000)
    path = tmp_path/'pid'
    with pytest.raises(RankTimeout): launch(train, 2, (0, stop), timeout_s=4)
    pid = int(path.read_text())
    assert wait_for(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@both
def test_ranks_and_their_files_go_with_a_killed_kernel(launch, tmp_path):
    code = f'''
        import os, time
        from llm_workbook.parallel.ranks import run_ranks, notebook_ranks
        def work():
            open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid()))
            time.sleep(1000)
        {launch.__name__}(work)
    '''
    kernel = subprocess.Popen(
        [sys.executable, '-c', textwrap.dedent(code)], env={**os.environ, 'TMPDIR': str(tmp_path)})
    files = [tmp_path/'0', tmp_path/'1']
    assert wait_for(lambda: all(file.exists() and file.read_text() for file in files), 60)
    pids = [int(file.read_text()) for file in files]
    kernel.kill()
    kernel.wait()
    assert wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert wait_for(
        lambda: (
            not list(tmp_path.glob('llmw-ranks-*')) and not list(tmp_path.glob('torchelastic_*'))))


@both
def test_ranks_compute_with_many_threads_after_the_kernel_has(launch):
    code = f'''
        import torch
        from llm_workbook.parallel.ranks import run_ranks, notebook_ranks
        torch.set_num_threads(4)
        def work():
            model = torch.nn.Linear(256, 256)
            model(torch.softmax(torch.randn(2048, 256), -1)).pow(2).mean().backward()
            return torch.get_num_threads()
        work()
        for threads in 1, 4, 4, 4:
            found = {launch.__name__}(work, timeout_s=30, env={{'OMP_NUM_THREADS': threads}})
            assert found == [threads] * 2
    '''
    subprocess.run([sys.executable, '-c', textwrap.dedent(code)], check=True, timeout=180)


ZERO3 = {'zero_optimization': {'stage': 3}}


def test_it_works_with_bitsandbytes_peft_and_an_accelerator_in_the_kernel(monkeypatch):
    import bitsandbytes, peft  # noqa: E401, F401
    from accelerate import Accelerator, state
    from transformers.integrations import deepspeed
    kernel, held = Accelerator(cpu=True), deepspeed.HfDeepSpeedConfig(ZERO3)
    saved = dict(state.AcceleratorState._shared_state)
    def work():
        from accelerate import Accelerator
        return Accelerator().num_processes, deepspeed.is_deepspeed_zero3_enabled()
    alone, pair = (1, False), (2, False)
    assert [notebook_ranks(work, world) for world in (1, 2)] == [[alone], [pair, pair]]
    assert deepspeed.is_deepspeed_zero3_enabled() and held.is_zero3()
    assert dict(state.AcceleratorState._shared_state) == saved
    assert kernel.num_processes == 1
    for kind in state.AcceleratorState, state.PartialState, state.GradientState:
        kind._shared_state.clear()


@both
def test_a_rank_never_frees_what_it_inherited(launch):
    class Server:
        def __init__(self): self.cycle = self
        def __del__(self): freed.append(os.getpid())
    freed = []
    Server()  # Garbage in the kernel, for the collector only
    assert launch(lambda: (gc.collect(), list(freed))[1]) == [[], []]


def test_a_taken_default_port_does_not_matter():
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # Where another program has it, it is taken as well
            s.bind(('127.0.0.1', 29500))
            s.listen()
        assert notebook_ranks(join) == [0, 1]


def test_no_outgoing_connection_takes_a_port_before_rank_0_does():
    "Ranks import libraries before rank 0 listens, and programs beside them connect meanwhile."
    given = Path('/proc/sys/net/ipv4/ip_local_port_range')
    lowest = int(given.read_text().split()[0]) if given.exists() else 49_152
    found = {free_port() for _ in range(50)}
    assert max(found) < lowest
    assert len(found) > 40, 'two kernels at once would often take the same'


def test_a_machine_without_free_ports_is_an_error(monkeypatch):
    def refuse(address): raise OSError('in use')
    monkeypatch.setattr(socket, 'create_server', refuse)
    with pytest.raises(OSError, match='100 ports between 12000 and 29000 are all in use'):
        free_port()


def test_colab_starts_processes_too(monkeypatch):
    colab = SimpleNamespace(get_ipython=lambda: '<google.colab._shell.Shell>')
    monkeypatch.setitem(sys.modules, 'IPython', colab)
    assert notebook_ranks(join) == [0, 1]


def test_a_kernel_that_has_spoilt_cuda_is_told_to_restart(monkeypatch):
    monkeypatch.setattr('accelerate.utils.is_cuda_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    with pytest.raises(
        RuntimeError, match='CUDA is initialised in this kernel.*restart the kernel'
    ):
        notebook_ranks(join)
    assert notebook_ranks(join, env={'ACCELERATE_USE_CPU': 'true'}) == [0, 1]
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: False)
    monkeypatch.setitem(sys.modules, 'bitsandbytes', SimpleNamespace())
    with pytest.raises(RuntimeError, match='bitsandbytes .* restart the kernel'):
        notebook_ranks(join)


@both
@pytest.mark.parametrize(
    'wrong, words',
    [
        (dict(ranks=0), 'not 0'),
        (dict(ranks=True), 'not True'),
        (dict(ranks=2.0), 'not 2.0'),
        (dict(timeout_s=0), 'not 0'),
        (dict(function=3), 'callable')])
def test_wrong_arguments_are_refused_before_anything_starts(launch, wrong, words):
    with pytest.raises((ValueError, TypeError), match=words): launch(**{'function': join, **wrong})


@both
def test_a_kernel_in_a_process_group_is_refused(launch):
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match='destroy_process_group'): launch(join)
    finally: dist.destroy_process_group()


def test_a_rank_begins_when_all_have_joined(monkeypatch):
    join_group = dist.init_process_group
    def join_late(*args, rank, **kwargs):
        join_group(*args, rank=rank, **kwargs)
        if rank == 0: time.sleep(0.5)
        dist.joined_s = time.monotonic()
    def leave_at_once():
        began_s = time.monotonic()
        dist.destroy_process_group()
        return dist.joined_s, began_s
    monkeypatch.setattr(dist, 'init_process_group', join_late)
    (late_s, _), (_, early_s) = run_ranks(leave_at_once, 2)
    assert early_s >= late_s


def test_memory_is_sampled_where_the_peak_cannot_be_reset():
    class ReadOnlyPath(type(Path())):
        def write_text(self, *args): raise PermissionError
    def work(forbidden):
        if forbidden: gauges.Path = ReadOnlyPath
        with memory_trace() as trace:
            block = torch.ones(100 * 2**20, dtype=torch.uint8)
            time.sleep(0.1)
            del block
        return trace.method, (trace.peak.host_b - trace.begin.host_b) / 2**20
    for forbidden, method in (False, 'kernel'), (True, 'samples'):
        found, peak_mib = run_ranks(work, 1, (forbidden,))[0]
        assert found == method
        assert 95 < peak_mib < 110


@pytest.mark.slow
def test_the_kernel_survives_kill_hang_and_interrupt():
    nbformat = pytest.importorskip('nbformat')
    nbclient = pytest.importorskip('nbclient')
    cells = '''
        import os, signal, time, torch, torch.distributed as dist
        from llm_workbook.parallel.ranks import run_ranks, notebook_ranks
        def work(stop):
            if not dist.is_initialized():
                from accelerate import Accelerator
                Accelerator()
            if dist.get_rank() == 1: stop()
            dist.barrier()
            return dist.get_rank()
        kill, kernel = lambda: os.kill(os.getpid(), signal.SIGKILL), os.getpid()
        # %%
        run_ranks(work, args=(kill,))
        # %%
        notebook_ranks(work, args=(kill,))
        # %%
        notebook_ranks(work, args=(lambda: time.sleep(1000),), timeout_s=1)
        # %%
        print('interrupt me')
        notebook_ranks(work, args=(lambda: time.sleep(1000),))
        # %%
        assert os.getpid() == kernel
        assert run_ranks(work, args=(int,)) == notebook_ranks(work, args=(int,)) == [0, 1]
        print('alive')
    '''
    nb = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(c) for c in textwrap.dedent(cells).split('# %%\n')]
    )
    client = nbclient.NotebookClient(nb, timeout=120, kernel_name='python3', allow_errors=True)
    def on_start(cell, cell_index):
        if 'interrupt me' in cell.source:
            threading.Timer(2, lambda: os.killpg(os.getpgid(pid()), signal.SIGINT)).start()
    def pid(): return client.km.provisioner.process.pid
    client.on_cell_execute = on_start
    client.execute()
    errors = [
        [(o.ename, o.evalue) for o in cell.outputs if o.output_type == 'error'] for cell in nb.cells
    ]
    assert [e[0][0] if e else None for e in errors] == [
        None, 'RankError', 'RankError', 'RankTimeout', 'KeyboardInterrupt', None]
    assert nb.cells[-1].outputs[0].text == 'alive\n'
