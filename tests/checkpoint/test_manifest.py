"""Checkpoints that count and those that must not: kills at every step of a save, full disks,
damage, lies, locks."""
import errno
import hashlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from llm_workbook.checkpoint import manifest as commits
from llm_workbook.checkpoint.disk import disk_errors, check_disk
from llm_workbook.training.run_lock import RunLocked, run_lock
from llm_workbook.checkpoint.manifest import (
    MANIFEST, DamagedCheckpoint, Manifest, Seal, begin_save, check_checkpoint, commit_checkpoint,
    latest_valid, prune,
    survey)

FACTS = dict(
    ranks=2, strategy='fsdp2', method='qlora', recipe_hash='0123', versions={'torch': '2.13.0'})
FILES = {
    'model/rank-0.safetensors': b'm' * 3000, 'model/rank-1.safetensors': b'n' * 3000,
    'optimizer/rank-0.safetensors': b'o' * 5000, 'state/rank-0.json': b'{"rng": 1}'}


def write(folder, files=FILES):
    for name, content in files.items():
        (folder/name).parent.mkdir(exist_ok=True, parents=True)
        (folder/name).write_bytes(content)


def save(directory, step, files=FILES, **facts):
    "Save a whole checkpoint and return its folder."
    folder = begin_save(directory, step)
    write(folder, files)
    commit_checkpoint(folder, FACTS | {'step': step} | facts, expected=[*files])
    return folder


@pytest.fixture
def tmp_path():
    """A folder in memory, where there is one: a killed process loses nothing that the system knows,
    so no disk need be waited for."""
    with tempfile.TemporaryDirectory(
        dir='/dev/shm' if os.access('/dev/shm', os.W_OK) else None
    ) as folder:
        yield Path(folder)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    "A directory with the valid checkpoints 5 and 10, to copy."
    directory = tmp_path_factory.mktemp('saved')
    for step in (5, 10): save(directory, step)
    return directory


@pytest.fixture
def run(saved, tmp_path):
    "A directory with the valid checkpoints 5 and 10, to spoil."
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


def child(function):
    """Run `function` in a process of its own and return how it ended: its exit code, or minus the
    signal."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 99
        try: code = function() or 0
        except BaseException as error:
            print(f'child: {type(error).__name__}: {error}', file=sys.stderr)
        finally: os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Damage, file by file

def cut(path): path.write_bytes(path.read_bytes()[:-1])
def empty(path): path.write_bytes(b'')
def grow(path): path.write_bytes(path.read_bytes() + b'x')
def delete(path): path.unlink()
def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize('file', [*FILES, MANIFEST])
@pytest.mark.parametrize('damage', [cut, empty, grow, delete, flip])
def test_damage_to_any_file_is_named_and_the_checkpoint_before_it_is_used(
    run, file, damage, caplog
):
    damage(run/'checkpoint-10'/file)
    if damage is flip and file != MANIFEST:
        assert latest_valid(run) == run/'checkpoint-10', 'sizes alone cannot show it'
    assert latest_valid(run, deep=True) == run/'checkpoint-5'
    message = caplog.records[-1].getMessage()
    assert message.startswith('skipped checkpoint-10')
    assert file in message or file == MANIFEST and 'no manifest' in message
    with pytest.raises(DamagedCheckpoint) as caught:
        check_checkpoint(run/'checkpoint-10', deep=True)
    assert not caught.value.interrupted
    assert caught.value.folder == run/'checkpoint-10'
    damage(run/'checkpoint-5'/file)
    with pytest.raises(
        DamagedCheckpoint, match='none of its checkpoints.*checkpoint-10:.*checkpoint-5:'
    ):
        latest_valid(run, deep=True)
    assert {p.name for p in run.iterdir()} == {'checkpoint-5', 'checkpoint-10'}, (
        'looking deletes nothing')


def test_a_first_start_has_no_checkpoint(tmp_path):
    assert latest_valid(tmp_path/'absent') is None
    assert latest_valid(tmp_path) is None
    write(begin_save(tmp_path, 5))
    (tmp_path/'checkpoint-7').mkdir()
    assert latest_valid(tmp_path) is None, (
        'a first save that was interrupted leaves nothing to lose')
    assert {f.state for f in survey(tmp_path).found} == {'interrupted'}


def test_a_folder_of_somebody_else_is_not_taken_for_an_interrupted_save(tmp_path):
    write(tmp_path/'checkpoint-5', {'model.safetensors': b'x'})
    with pytest.raises(DamagedCheckpoint, match='no manifest'): latest_valid(tmp_path)
    begin_save(tmp_path, 5)
    assert (tmp_path/'checkpoint-5.aside-0/model.safetensors').exists()


def test_what_is_committed_is_never_written_over(run):
    with pytest.raises(FileExistsError, match="'checkpoint-10' is committed"): begin_save(run, 10)
    with pytest.raises(FileExistsError):
        commit_checkpoint(run/'checkpoint-10', FACTS | {'step': 10})
    cut(run/'checkpoint-10/state/rank-0.json')
    with pytest.raises(FileExistsError):
        commit_checkpoint(run/'checkpoint-10', FACTS | {'step': 10})
    begin_save(run, 10)
    assert (run/'checkpoint-10.aside-0'/MANIFEST).exists()
    assert [f.folder.name for f in survey(run).found] == ['checkpoint-10', 'checkpoint-5']


def test_the_order_is_that_of_the_steps_whatever_the_clock_says(run):
    for age, step in enumerate((9, 100, 99)):
        folder = save(run, step)
        for path in (*folder.iterdir(), folder):
            os.utime(path, (10**9 * (1 + age % 2), 4 * 10**9 - 10**9 * age))
    for name in (
        'checkpoint-0100', 'checkpoint-1e3', 'checkpoint-200.aside-0', 'checkpoint--7',
        'checkpoint-' + '9' * 30, 'model'
    ):
        (run/name).mkdir()
    assert [f.step for f in survey(run).found] == [100, 99, 10, 9, 5]
    assert prune(run, 2) == [run/f'checkpoint-{n}' for n in (5, 9, 10)]
    assert latest_valid(run) == run/'checkpoint-100'


def test_of_a_very_large_file_the_head_alone_is_hashed_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(commits, '_WHOLE_B', 1000)
    monkeypatch.setattr(commits, '_HEAD_B', 100)
    big = {'model.safetensors': bytes(5000), 'small.json': b'{}'}
    for step, deep in (1, False), (2, True):
        folder = begin_save(tmp_path, step)
        write(folder, big)
        manifest = commit_checkpoint(folder, FACTS | {'step': step}, deep=deep)
        assert manifest.files['model.safetensors'].hashed_b == (5000 if deep else 100)
        assert manifest.files['small.json'].hashed_b == 2
        assert manifest.total_b == 5002
        flip(folder/'model.safetensors')
    assert survey(tmp_path, deep=True).to_dict() == {
        'checkpoint-2': {
            'state': 'damaged',
            'reason': "'model.safetensors' is not what was committed (its first 5,000 bytes)"},
        'checkpoint-1': {'state': 'valid', 'reason': ''}}


# Kills

FEW = {'model.safetensors': b'm' * 3000, 'state/rank-0.json': b'{}'}
POINTS = 'open close fsync replace rename mkdir unlink rmdir utime scandir'.split()


def a_save(directory):
    """Replace an interrupted save of step 15, commit it, and delete what is old: all that a run
    does to its directory."""
    save(directory, 15, FEW)
    prune(directory, 2)


def counted(directory, at, after):
    "Do `a_save` and send SIGKILL to this process at call number `at`, before it or after it."
    calls = 0

    def wrap(function):
        def called(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == at and not after: os.kill(os.getpid(), signal.SIGKILL)
            value = function(*args, **kwargs)
            if calls >= at and after: os.kill(os.getpid(), signal.SIGKILL)
            return value
        return called
    for name in POINTS: setattr(os, name, wrap(getattr(os, name)))
    a_save(directory)
    if at > 10**6: (directory/'calls').write_text(str(calls))


def assert_nothing_is_lost(directory):
    "After a kill: at least two valid checkpoints, none damaged, and the next save works."
    seen = survey(directory, deep=True)
    assert {f.state for f in seen.found} <= {'valid', 'interrupted'}, seen.to_dict()
    assert len(seen.valid) >= 2
    assert seen.newest.name in ('checkpoint-10', 'checkpoint-15')
    assert latest_valid(directory, deep=True) == seen.newest
    step = 20 if seen.newest.name == 'checkpoint-15' else 15
    assert latest_valid(save(directory, step, FEW).parent, deep=True).name == f'checkpoint-{step}'
    prune(directory, 1)
    assert [p.name for p in directory.iterdir()] == [f'checkpoint-{step}'], (
        'the next prune sweeps what is left')


def kill_at_each_call(folder):
    "Kill a save at each of its calls, before it or after it, and see that nothing is lost."
    template = folder/'template'
    template.mkdir()
    for step in (2, 5, 10): save(template, step, FEW)
    write(begin_save(template, 15), FEW)
    shutil.copytree(template, folder/'dry')
    assert child(lambda: counted(folder/'dry', 10**9, False)) == 0
    calls = int((folder/'dry/calls').read_text())
    assert calls > 60
    ended = {}
    for at in range(1, calls + 1):
        directory = shutil.copytree(template, folder/f'{at}')
        assert child(lambda: counted(directory, at, at % 2)) == -signal.SIGKILL
        newest = latest_valid(directory).name
        ended[newest] = ended.get(newest, 0) + 1
        assert_nothing_is_lost(directory)
        shutil.rmtree(directory)
    print(f'{calls} kills: {ended}')
    assert set(ended) == {'checkpoint-10', 'checkpoint-15'}


def test_a_kill_at_any_call_of_a_save_loses_nothing(tmp_path):
    # A process of its own: to fork this one, with all it has imported, takes 0.2 s each time
    code = (f'import sys; from pathlib import Path; sys.path[:] = {sys.path}; '
            f'import test_manifest; test_manifest.kill_at_each_call(Path({str(tmp_path)!r}))')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ' kills: ' in done.stdout


ENDLESS = """
import sys, time
from pathlib import Path
from llm_workbook.checkpoint.manifest import begin_save, commit_checkpoint, latest_valid, prune
directory = Path(sys.argv[1])
first = step = int(latest_valid(directory, deep=True).name.split('-')[1])
while True:
    time.sleep(0.01)
    step += 1
    folder = begin_save(directory, step)
    data = bytes([step % 256]) * 200_000
    for rank in range(2): (folder/f'rank-{rank}.safetensors').write_bytes(data)
    facts = dict(step=step, ranks=2, strategy='ddp', method='full', recipe_hash='', versions={})
    commit_checkpoint(folder, facts)
    if step == first + 1: print('committed', flush=True)
    prune(directory, 2)
"""


@pytest.mark.parametrize('after_s', [0.12, 0.17, 0.22, 0.28])
def test_a_kill_while_checkpoints_are_written_loses_nothing(run, after_s):
    with subprocess.Popen(
        [sys.executable, '-c', ENDLESS, str(run)], stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        time.sleep(after_s)
        process.kill()
    seen = survey(run, deep=True)
    assert {f.state for f in seen.found} <= {'valid', 'interrupted'}, seen.to_dict()
    assert len(seen.valid) >= 2
    assert latest_valid(run, deep=True).name != 'checkpoint-10'


def test_the_manifest_appears_after_everything_else_is_on_the_disk(tmp_path, monkeypatch):
    folder, done = begin_save(tmp_path, 5), []
    write(folder)

    def fsync(handle, real=os.fsync):
        done.append(os.path.relpath(os.readlink(f'/proc/self/fd/{handle}'), folder))
        real(handle)
    def replace(a, b, real=os.replace):
        done.append('replace')
        real(a, b)
    monkeypatch.setattr(os, 'fsync', fsync)
    monkeypatch.setattr(os, 'replace', replace)
    commit_checkpoint(folder, FACTS | {'step': 5})
    at = done.index('replace')
    before = done[:at]
    after = done[at + 1:]
    assert {*FILES, 'model', 'optimizer', 'state', '.'} == {*before[:-1]}
    assert re.fullmatch(rf'\.{MANIFEST}\.[\d.]+part', before[-1])
    assert after == ['.', '..']


# The disk

def limited(directory, limit_b):
    """Save with a limit on the size of a file, as on a disk that is full; return 0 if that was said
    clearly."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_b, limit_b))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    folder = begin_save(directory, 15)
    try:
        with disk_errors(folder, 11_010): write(folder)
        commit_checkpoint(folder, FACTS | {'step': 15, 'extra': {'long': 'x' * 10_000}})
    except OSError as error:
        return (
            0
            if error.errno == errno.EFBIG and '11,010 bytes' in str(error) and ' free' in str(error)
            else 1)
    return 2


# 9000: every file fits, the manifest does not
@pytest.mark.parametrize('limit_b', [0, 2999, 4999, 9000])
def test_a_full_disk_is_said_clearly_and_leaves_the_old_checkpoint(run, limit_b):
    assert child(lambda: limited(run, limit_b)) == 0
    assert survey(run).to_dict()['checkpoint-15']['state'] == 'interrupted'
    assert latest_valid(run, deep=True) == run/'checkpoint-10'
    assert save(run, 15) == latest_valid(run, deep=True)


@pytest.fixture
def disk(tmp_path):
    "A disk of 1 MiB and 200 entries, where this user may mount one."
    place = tmp_path/'disk'
    place.mkdir()
    made = subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', 'size=1m,nr_inodes=200', 'tmpfs', str(place)],
        capture_output=True)
    if made.returncode: pytest.skip('mounting a small disk needs root')
    yield place
    subprocess.run(['umount', '-l', str(place)], check=True)


def test_a_disk_that_fills_while_saving(disk):
    save(disk, 5)
    with pytest.raises(OSError, match=r'takes 2,000,000 bytes; [\d,]+ are free'):
        begin_save(disk, 10, 2_000_000)
    assert not (disk/'checkpoint-10').exists()
    folder = begin_save(disk, 10)
    write(folder)
    with (
        pytest.raises(
            OSError,
            match=r"'checkpoint-10' is not saved: it needs 2,000,000 bytes and the disk has \d"),
        disk_errors(folder, 2_000_000)
    ):
        (folder/'big').write_bytes(bytes(2_000_000))
    with pytest.raises(OSError, match='is not saved.*make room') as caught:
        commit_checkpoint(folder, FACTS | {'step': 10})
    assert caught.value.errno == errno.ENOSPC
    assert latest_valid(disk, deep=True) == disk/'checkpoint-5'
    assert save(disk, 10) == latest_valid(disk, deep=True)


def test_a_disk_without_entries_is_refused_before(disk):
    assert check_disk(disk, 1000, files=150) > 500_000
    with pytest.raises(OSError, match='makes 250 files; the disk takes 19[0-9] more'):
        check_disk(disk, 1000, files=250)


def test_a_read_only_directory_is_refused_before(disk):
    save(disk, 5, files={'a': b'1'})
    subprocess.run(['mount', '-o', 'remount,ro', str(disk)], check=True)
    for refused in (
        lambda: check_disk(disk, 1),
        lambda: begin_save(disk, 10),
        lambda: run_lock(disk).__enter__()
    ):
        with pytest.raises(OSError, match="'disk' cannot be written to: Read-only file system"):
            refused()
    assert latest_valid(disk) == disk/'checkpoint-5'


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_a_directory_without_the_right_to_write_is_refused_before(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(PermissionError, match='cannot be written to'): check_disk(tmp_path, 1)


def test_a_vanished_directory_is_refused_before(run):
    folder = begin_save(run, 15)
    shutil.rmtree(run)
    for refused in lambda: check_disk(run, 1), lambda: begin_save(run, 20):
        with pytest.raises(FileNotFoundError, match='was removed or never made'): refused()
    with pytest.raises(FileNotFoundError): commit_checkpoint(folder, FACTS | {'step': 15})
    with pytest.raises(ValueError, match='is no directory'): prune(run, 1)
    assert latest_valid(run) is None


def test_only_errors_of_the_disk_are_explained(tmp_path):
    with pytest.raises(KeyError), disk_errors(tmp_path, 1): raise KeyError('x')
    with pytest.raises(PermissionError), disk_errors(tmp_path, 1):
        raise PermissionError(errno.EACCES, 'no')
    with pytest.raises(OSError, match='needs 7 bytes'), disk_errors(tmp_path/'gone/deeper', 7):
        raise RuntimeError(
            'Error while serializing: I/O error: No space left on device (os error 28)')


# Lies

def lie(folder, change):
    "Rewrite a manifest with a matching digest, as somebody who knows the format would."
    values = json.loads((folder/MANIFEST).read_text())
    del values['digest']
    change(values)
    values['digest'] = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    (folder/MANIFEST).write_text(json.dumps(values, indent=1) + '\n')


def named(name):
    return lambda values: values['files'].update({name: values['files'].pop('state/rank-0.json')})
def sealed(**what): return lambda values: values['files']['state/rank-0.json'].update(what)
def said(**what): return lambda values: values.update(what)


NAMES = [
    '../checkpoint-5/state/rank-0.json', 'state/../../x', '/etc/hostname', '', '.', '..', 'state/',
    './state', 'a//b', 'a\\b', 'a\0b', 'a\nb', '\ud800', MANIFEST, '.llmw_saving', '~/x', 'C:x',
    'x' * 5000]
LIES = {
    **{f'name {n[:20]!r}': named(n) for n in NAMES}, 'negative size': sealed(size_b=-1),
    'huge size': sealed(size_b=10**30), 'size as text': sealed(size_b='10'),
    'size as fraction': sealed(size_b=10.0), 'size as truth': sealed(size_b=True),
    'hash of more': sealed(hashed_b=11), 'negative hash': sealed(hashed_b=-1),
    'short hash': sealed(sha256='0'), 'hash with a line': sealed(sha256='0' * 64 + '\n'),
    'more about a file': sealed(mode='0777'),
    'no seal': lambda v: v['files'].update({'state/rank-0.json': None}),
    'files as a list': said(files=[['state/rank-0.json', 10]]),
    'files as text': said(files='state/rank-0.json'), 'no files': said(files={}),
    'another step': said(step=11), 'negative step': said(step=-1), 'step as text': said(step='10'),
    'no ranks': said(ranks=0), 'no strategy': said(strategy=''), 'another format': said(version=2),
    'more': said(run='touch x'),
    'object': said(
        extra={'__class__': {'py/object': 'os.system'}},
        step='!!python/object/apply:os.system [touch x]'),
    'program': lambda v: v['files'].update({'optimizer.pt': v['files']['state/rank-0.json']}),
    'template': said(method=['{{ cycler.__init__ }}']), 'step missing': lambda v: v.pop('step')}


@pytest.mark.parametrize('change', LIES.values(), ids=LIES)
def test_a_manifest_that_lies_is_refused_without_a_trace(run, change, monkeypatch):
    lie(run/'checkpoint-10', change)
    monkeypatch.chdir(run)
    before = sorted(run.rglob('*'))
    with pytest.raises(DamagedCheckpoint, match='checkpoint-10') as caught:
        check_checkpoint(run/'checkpoint-10')
    assert 'byte for byte' not in str(caught.value), 'refused for what it says'
    assert 'digest' not in str(caught.value), 'refused for what it says'
    assert latest_valid(run) == run/'checkpoint-5'
    assert sorted(run.rglob('*')) == before


TEXTS = {
    'nothing': b'', 'no JSON': b'version: 1', 'twice': b'{"version": 1, "step": 1, "step": 2}',
    'twice below': b'{"files": {"a": {}, "a": {}}}', 'deep list': b'[' * 100_000,
    'deep object': b'{"a":' * 50_000, 'no UTF-8': b'\xff\xfe{}', 'UTF-16': '{}'.encode('utf-16'),
    'BOM': b'\xef\xbb\xbf{}', 'digits': b'{"step": ' + b'9' * 5000 + b'}',
    'infinity': b'{"step": 1e999, "digest": NaN}', 'list': b'[]',
    'pickle': pickle.dumps({'step': 1}), 'zeros': bytes(1000), 'huge': b' ' * (2**24 + 1)}


@pytest.mark.parametrize('text', TEXTS.values(), ids=TEXTS)
def test_a_manifest_that_is_no_manifest_is_refused(run, text):
    (run/'checkpoint-10'/MANIFEST).write_bytes(text)
    with pytest.raises(DamagedCheckpoint, match=MANIFEST): check_checkpoint(run/'checkpoint-10')
    assert latest_valid(run) == run/'checkpoint-5'


def test_a_manifest_with_random_bytes_changed_is_refused(run):
    path = run/'checkpoint-10'/MANIFEST
    text = path.read_bytes()
    chance = random.Random(0)
    for _ in range(300):
        changed = bytearray(text)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(text))] = chance.randrange(256)
        path.write_bytes(changed)
        if changed != text:
            with pytest.raises(DamagedCheckpoint): check_checkpoint(run/'checkpoint-10')


class Payload:
    def __reduce__(self): return Path.touch, (Path('planted'),)


@pytest.mark.parametrize(
    'name',
    [
        'optimizer.pt', 'model/pytorch_model.bin', 'rng.pth', 'a.pkl', 'a.pickle', 'last.ckpt',
        'modeling.py', 'x.so', 'x.PT', 'a.pth.tar', 'a.npy', 'a.NPZ', 'a.dill'])
def test_programs_are_kept_out(run, name, monkeypatch):
    monkeypatch.chdir(run)
    program = {name: pickle.dumps(Payload())}
    write(run/'checkpoint-10', program)
    with pytest.raises(DamagedCheckpoint, match=f'{name}.*was not committed with it'):
        check_checkpoint(run/'checkpoint-10', deep=True)
    folder = begin_save(run, 15)
    write(folder, FILES | program)
    with pytest.raises(ValueError, match=f'{name}.*can carry a program'):
        commit_checkpoint(folder, FACTS | {'step': 15})
    commit_checkpoint(folder, FACTS | {'step': 15, 'strategy': 'zero3'})
    assert latest_valid(run, deep=True) == folder
    assert not (run/'planted').exists()


def test_links_and_devices_are_refused(run, tmp_path_factory):
    outside = tmp_path_factory.mktemp('outside')
    shutil.copytree(run/'checkpoint-10', outside/'checkpoint-10')
    (run/'checkpoint-10/state/rank-0.json').unlink()
    (run/'checkpoint-10/state/rank-0.json').symlink_to(outside/'checkpoint-10/state/rank-0.json')
    with pytest.raises(DamagedCheckpoint, match='state/rank-0.json. is a link'):
        check_checkpoint(run/'checkpoint-10')
    shutil.rmtree(run/'checkpoint-10')
    (run/'checkpoint-10').symlink_to(outside/'checkpoint-10')
    with pytest.raises(DamagedCheckpoint, match='is a link or no folder'):
        check_checkpoint(run/'checkpoint-10')
    shutil.move(run/'checkpoint-5'/MANIFEST, outside/MANIFEST)
    (run/'checkpoint-5'/MANIFEST).symlink_to(outside/MANIFEST)
    with pytest.raises(DamagedCheckpoint, match='cannot be read'):
        check_checkpoint(run/'checkpoint-5')
    (run/'checkpoint-5'/MANIFEST).unlink()
    os.mkfifo(run/'checkpoint-5'/MANIFEST)
    with pytest.raises(DamagedCheckpoint, match='is no plain file'):
        check_checkpoint(run/'checkpoint-5')
    folder = begin_save(run, 15)
    (folder/'model').symlink_to(outside)
    with pytest.raises(DamagedCheckpoint, match="'model' is a link"):
        commit_checkpoint(folder, FACTS | {'step': 15})
    begin_save(run, 15)
    assert (outside/'checkpoint-10'/MANIFEST).exists(), (
        'a link is never followed, not even to delete')


@pytest.mark.parametrize('name', ['', MANIFEST, 'model', 'model/rank-1.safetensors'])
def test_what_belongs_to_another_user_is_refused_unless_trusted(run, name, monkeypatch):
    if os.geteuid() == 0: os.chown(run/'checkpoint-10'/name, 12345, -1)
    else: monkeypatch.setattr(os, 'geteuid', lambda: 12345)
    with pytest.raises(DamagedCheckpoint, match='belongs to user.*trust=True'):
        check_checkpoint(run/'checkpoint-10')
    assert check_checkpoint(run/'checkpoint-10', trust=True).step == 10
    assert latest_valid(run, trust=True) == survey(run, trust=True).newest == run/'checkpoint-10'
    if os.geteuid() == 0: assert latest_valid(run) == run/'checkpoint-5'


def test_facts_are_checked_before_anything_is_written(run):
    folder = begin_save(run, 15)
    write(folder)
    for facts, words in (
        ({'step': 16}, 'belongs not into'),
        ({'step': 15, 'ranks': 0}, 'ranks = 0'),
        ({'step': 15, 'rank': 2}, 'unknown key'),
        ({'step': 15, 'extra': {'x': float('nan')}}, 'finite'),
        ({}, 'step: is missing')
    ):
        with pytest.raises(ValueError, match=words): commit_checkpoint(folder, FACTS | facts)
    with pytest.raises(ValueError, match=r"lacks \['model/rank-2"):
        commit_checkpoint(folder, FACTS | {'step': 15}, expected=['model/rank-2.safetensors'])
    assert not (folder/MANIFEST).exists()
    for step in (-1, True, '5', 5.0):
        with pytest.raises(ValueError, match='no number of steps'): begin_save(run, step)


def test_a_manifest_is_read_back_equal():
    manifest = Manifest(
        step=3, ranks=1, strategy='ddp', method='lora', recipe_hash='', payload='ab',
        extra={'a': [1, {'b': None}]}, files={'x/y': Seal(size_b=1, sha256='0' * 64, hashed_b=1)})
    assert Manifest.parse(manifest.dump()) == manifest
    assert {'torch', 'llm-workbook'} <= {*manifest.versions}
    error = pickle.loads(pickle.dumps(DamagedCheckpoint(Path('a'), 'why', file='x')))
    assert str(error) == "a: 'x' why"


def test_a_file_that_changes_while_it_is_committed_is_noticed(tmp_path, monkeypatch):
    folder = begin_save(tmp_path, 5)
    write(folder)

    def late(path, size_b, deep, real=commits._seal):
        seal = real(path, size_b, deep)
        if path.name == 'rank-0.json': grow(path)
        return seal
    monkeypatch.setattr(commits, '_seal', late)
    with pytest.raises(
        DamagedCheckpoint, match='rank-0.json. has 11 bytes where 10 were committed'
    ):
        commit_checkpoint(folder, FACTS | {'step': 5})
    assert not (folder/MANIFEST).exists()
    assert latest_valid(tmp_path) is None


# Retention

def test_retention_counts_only_what_is_valid(run):
    for step in (15, 20, 25): save(run, step)
    write(begin_save(run, 7))
    write(begin_save(run, 30))
    cut(run/'checkpoint-20/state/rank-0.json')
    assert prune(run, 3) == [run/'checkpoint-5', run/'checkpoint-7']
    assert prune(run, 1) == [run/'checkpoint-10', run/'checkpoint-15']
    assert prune(run, 1) == []
    assert {f.step: f.state for f in survey(run).found} == {
        30: 'interrupted', 25: 'valid', 20: 'damaged'}
    for keep in (0, -1, True, 1.0, None):
        with pytest.raises(ValueError, match='at least 1'): prune(run, keep)


def test_the_last_valid_one_is_never_deleted(run):
    for step in (15, 20): cut(save(run, step)/'state/rank-0.json')
    delete(run/'checkpoint-10/state/rank-0.json')
    assert prune(run, 1) == []
    assert latest_valid(run) == run/'checkpoint-5'


def test_retention_survives_a_deletion_that_fails(run, monkeypatch, caplog):
    for step in (15, 20): save(run, step)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, 'rmtree', lambda *args, **kwargs: None)
        assert prune(run, 2) == [run/'checkpoint-5', run/'checkpoint-10']
    assert 'not wholly deleted' in caplog.text
    assert len([*run.glob('.checkpoint-*.deleted')]) == 2
    assert [f.step for f in survey(run).found] == [20, 15]
    with monkeypatch.context() as patch:
        def refuse(*args): raise PermissionError(errno.EACCES, 'no')
        patch.setattr(os, 'rename', refuse)
        assert prune(run, 1) == []
        assert 'checkpoint-15 is not deleted' in caplog.text
    assert prune(run, 1) == [run/'checkpoint-15']
    assert [p.name for p in run.iterdir()] == ['checkpoint-20']


def test_pruning_and_looking_at_the_same_time(run):
    with subprocess.Popen(
        [sys.executable, '-c', ENDLESS.replace('directory, 2)', 'directory, 1)'), str(run)],
        stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        end, steps = time.monotonic() + 30, [10]
        try:
            while len(set(steps)) <= 5 and time.monotonic() < end:
                steps.append(int(latest_valid(run).name.split('-')[1]))
                assert prune(run, 1) is not None
                assert survey(run) is not None
        finally: process.kill()
    assert steps == sorted(steps)
    assert len(set(steps)) > 5


def test_a_commit_that_ends_while_somebody_looks_is_no_damage(run, monkeypatch):
    """The mark of a save goes between the listing and the look, or the manifest comes between the
    look for it and for the mark."""
    folder = latest_valid(run)
    def scandir(path, real=os.scandir):
        seen = list(real(path))
        (folder/'.llmw_saving').unlink(missing_ok=True)
        return seen
    def late(path, *how, real=os.open):
        if Path(path) != folder/MANIFEST or not (folder/'.llmw_saving').exists():
            return real(path, *how)
        (folder/'.llmw_saving').unlink()
        raise FileNotFoundError(path)
    (folder/'.llmw_saving').touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, 'scandir', scandir)
        assert latest_valid(run) == folder
        assert not (folder/'.llmw_saving').exists()
    (folder/'.llmw_saving').touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, 'open', late)
        assert survey(run).found[0].state == 'interrupted'
    assert latest_valid(run) == folder


# The lock

HOLD = """
import sys, time
from llm_workbook.training.run_lock import run_lock
with run_lock(sys.argv[1]):
    print('held', flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_gone_even_by_kill(tmp_path):
    directory = tmp_path/'run'
    with subprocess.Popen(
        [sys.executable, '-c', HOLD, str(directory)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b'held\n'
        with (
            pytest.raises(RunLocked, match=f"'run' is taken by process {process.pid} on"),
            run_lock(directory)
        ):
            pass
        process.kill()
    with run_lock(directory, wait_s=1): pass
    assert latest_valid(directory) is None


def test_a_lock_waits_and_belongs_to_one_process(tmp_path):
    def refused():
        try:
            with run_lock(tmp_path): return 1
        except RunLocked: return 0

    with run_lock(tmp_path) as held:
        assert held == tmp_path
        assert child(refused) == 0
        start = time.monotonic()
        with pytest.raises(RunLocked), run_lock(tmp_path, wait_s=0.2): pass
        assert 0.2 <= time.monotonic() - start < 10
    assert child(refused) == 1
    with pytest.raises(KeyError), run_lock(tmp_path): raise KeyError
    with run_lock(tmp_path):
        with pytest.raises(RunLocked, match='wait for it'): run_lock(tmp_path).__enter__()


def test_a_fork_that_leaves_the_block_keeps_its_parents_lock(tmp_path):
    def leave():
        lock.__exit__(None, None, None)

    def refused():
        handle = os.open(tmp_path/'.llmw.lock', os.O_RDWR)
        import fcntl
        try: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError: return 0
        return 1

    lock = run_lock(tmp_path)
    lock.__enter__()
    assert child(leave) == 0
    assert child(refused) == 0
    lock.__exit__(None, None, None)
    assert child(refused) == 1


def test_a_lock_of_another_user_or_behind_a_link_is_refused(tmp_path, monkeypatch):
    with run_lock(tmp_path): pass
    if os.geteuid() == 0: os.chown(tmp_path/'.llmw.lock', 12345, -1)
    else: monkeypatch.setattr(os, 'geteuid', lambda: 12345)
    with pytest.raises(PermissionError, match='trust=True'), run_lock(tmp_path): pass
    with run_lock(tmp_path, trust=True): pass
    (tmp_path/'.llmw.lock').unlink()
    (tmp_path/'.llmw.lock').symlink_to(tmp_path/'victim')
    with pytest.raises(OSError), run_lock(tmp_path): pass
    assert not (tmp_path/'victim').exists()


@pytest.mark.parametrize('entries, enough', [(0, False), (63, False), (64, True), (None, True)])
def test_a_disk_without_file_entries_is_full_and_one_that_counts_none_is_not(
    entries, enough, tmp_path, monkeypatch
):
    from llm_workbook.checkpoint import disk as claims
    monkeypatch.setattr(claims, '_free', lambda folder: (10**9, entries))
    if enough: assert claims.check_disk(tmp_path, 1) == 10**9
    else:
        with pytest.raises(OSError, match=f'makes 64 files; the disk takes {entries} more'):
            claims.check_disk(tmp_path, 1)
