"""A build that was killed leaves its lock in torch's folder: the next one takes it."""
import os
import time
from types import SimpleNamespace

import pytest
from torch.utils.file_baton import FileBaton

from llm_workbook.config.recipe import Recipe
from llm_workbook.parallel import extension_locks
from llm_workbook.parallel.extension_locks import guard_builds, lock_holders

ZERO = Recipe.named('7b-zero2-offload').changed({'cluster.device': 'cpu'})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    "Look often, spare no young lock, and put torch's own functions back at the end."
    monkeypatch.setattr(FileBaton, 'try_acquire', FileBaton.try_acquire)
    monkeypatch.setattr(extension_locks, '_YOUNG_S', 0.0)
    monkeypatch.setattr(extension_locks, '_LOOK_S', 0.02)


@pytest.fixture
def lock(tmp_path): return tmp_path.resolve()/'lock'


def forked(job):
    "A process that does a job, says that it has, and stays."
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            job()
            os.write(tell, b'.')
            time.sleep(60)
        finally: os._exit(1)
    os.close(tell)
    assert os.read(ready, 1) == b'.'
    os.close(ready)
    return pid


def end(pid):
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def make(lock): os.open(lock, os.O_CREAT | os.O_EXCL)  # As torch does


def test_a_rank_of_zero_builds_where_a_build_was_killed(tmp_path, monkeypatch):
    "A real build, which would wait for ever."
    import accelerate.state
    from torch.utils.cpp_extension import load

    from llm_workbook.training.rank_run import set_up_device
    monkeypatch.setattr(accelerate.state, 'PartialState', SimpleNamespace)  # It needs no group
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    def wait(baton): raise AssertionError(f'this waits for ever for {baton.lock_file_path}')
    monkeypatch.setattr(FileBaton, 'wait', wait)
    set_up_device(ZERO)
    source = tmp_path/'nothing.cpp'
    source.write_text('extern "C" int nothing() { return 0; }\n')
    place = tmp_path/'nothing'
    place.mkdir()
    end(forked(lambda: make(place/'lock')))
    load('nothing', [str(source)], build_directory=str(place), is_python_module=False)
    assert (place/'nothing.so').is_file()
    assert not lock_holders(place/'lock')  # torch 2.15 leaves the file, which alone locks nothing


def test_a_lock_that_is_held_is_waited_for_and_said(lock, caplog, monkeypatch):
    monkeypatch.setattr(extension_locks, '_SILENT_S', 0.1)
    holder = forked(lambda: make(lock))
    assert lock_holders(lock) == [holder]
    guard_builds(limit_s=0.3)
    with pytest.raises(TimeoutError, match=f'{lock} was there .* process {holder}: end what holds'):
        FileBaton(lock).try_acquire()
    assert caplog.messages == [f'waiting for a build: {lock} is held by process {holder}']
    end(holder)
    baton = FileBaton(lock)
    assert baton.try_acquire()
    assert caplog.messages[1:] == [f'removed {lock}: the process that built there was killed']
    baton.release()
    assert not lock.exists()


def test_a_compiler_that_outlives_the_owner_is_waited_for(lock):
    end(forked(lambda: make(lock)))
    compiler = forked(lambda: os.chdir(lock.parent))
    guard_builds(limit_s=0.1)
    with pytest.raises(TimeoutError, match=f'process {compiler}'): FileBaton(lock).try_acquire()
    end(compiler)
    assert FileBaton(lock).try_acquire()


@pytest.mark.parametrize('hidden', ['a network', 'another user'])
def test_a_lock_whose_owner_cannot_be_seen_stays(lock, monkeypatch, hidden):
    lock.touch()
    if hidden == 'a network': monkeypatch.setattr(extension_locks, '_file_system', lambda _: 'nfs4')
    else: monkeypatch.setattr(os, 'geteuid', lambda: lock.stat().st_uid + 1)
    guard_builds(limit_s=0.1)
    with pytest.raises(TimeoutError, match='cannot be seen from here: .*delete the file'):
        FileBaton(lock).try_acquire()
    assert lock.exists()


def test_of_two_that_find_a_lock_one_takes_it(lock, monkeypatch):
    "The first has looked and not yet removed it as the second comes."
    lock.touch()
    guard_builds()
    look = extension_locks._is_left_behind
    asked, tell = os.pipe()

    def slow_take():
        def look_slowly(lock):
            found = look(lock)
            os.write(tell, b'.')
            time.sleep(0.3)
            return found
        extension_locks._is_left_behind = look_slowly
        FileBaton(lock).try_acquire()

    pid = os.fork()
    if pid == 0:
        try: slow_take(), time.sleep(0.3)
        finally: os._exit(0)
    os.read(asked, 1)
    baton = FileBaton(lock)
    assert baton.try_acquire()
    os.waitpid(pid, 0)
    assert lock_holders(lock) == [os.getpid()]
