"""Faults 6, 7, 8, 16, 19 and 24: full and broken disks, damaged checkpoints, parts that are
missing, two runs in one directory."""
import errno
import logging
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import namedtuple
from itertools import count

import pytest
import torch
from test_security import TEMPLATES, YAML
from trouble import disturb, files, fine_tune, losses, wait_for

from llm_workbook.training import fine_tune as training
from llm_workbook.checkpoint.save_load import CheckpointError, load_checkpoint, save_checkpoint
from llm_workbook.checkpoint.disk import check_disk
from llm_workbook.training.run_lock import RunLocked, run_lock
from llm_workbook.checkpoint.manifest import MANIFEST, DamagedCheckpoint, latest_valid, survey
from llm_workbook.parallel.ranks import RankError, run_ranks
from llm_workbook.config.recipe import Recipe
from llm_workbook.training.run_directory import mark_run


@pytest.fixture
def copy(kept, tmp_path):
    "A copy of a finished run with two checkpoints, as if it had been killed after its last save."
    shutil.copytree(kept.directory, tmp_path/'run')
    shutil.rmtree(tmp_path/'run/model')
    mark_run(tmp_path/'run', 'running', 6)
    return tmp_path/'run'


# 6: the disk is full

@pytest.mark.slow
def test_06_a_disk_that_fills_while_saving_says_so_and_the_run_goes_on_from_the_checkpoint_before(
    recipe, kept, tmp_path, monkeypatch
):
    def fill_the_disk():
        committed = tmp_path/'run'/'checkpoint-2'/MANIFEST  # By a thread, beside the third step
        assert wait_for(committed.exists)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    saving = recipe.changed({'intervals.saving': 2})
    with monkeypatch.context() as patch:
        disturb(patch, fill_the_disk)
        with pytest.raises(
            RankError, match=r'is not saved: it needs [\d,]+ bytes and the disk has [\d,]+ free'
        ):
            fine_tune(saving, tmp_path/'run')
    checkpoints = [(found.step, found.state) for found in survey(tmp_path/'run').found]
    assert checkpoints == [(4, 'interrupted'), (2, 'valid')]
    fine_tune(saving, tmp_path/'run', resume=True)
    assert losses(tmp_path/'run') == pytest.approx(losses(kept.directory), abs=1e-6)


Disk = namedtuple('Disk', 'f_bavail f_frsize f_favail f_files')


@pytest.mark.parametrize(
    'disk, words',
    [
        (Disk(10, 4096, 1000, 1000), 'takes 1,000,000 bytes; 40,960 are free'),
        (Disk(10**6, 4096, 3, 1000), 'makes 64 files; the disk takes 3 more')],
    ids=['06', '24'])
def test_06_and_24_no_room_and_no_entries_are_refused_before_anything_is_written(
    disk, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, 'statvfs', lambda path: disk)
    with pytest.raises(OSError, match=words) as caught: check_disk(tmp_path, 1_000_000)
    assert caught.value.errno == errno.ENOSPC
    assert files(tmp_path) == set()
    model = torch.nn.Linear(500, 500)
    with pytest.raises(OSError, match='checkpoint'): save_checkpoint(tmp_path/'checkpoint-1', model)
    assert latest_valid(tmp_path) is None


# 7: the newest checkpoint is damaged

def truncate(path): os.truncate(path, path.stat().st_size//2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data)//2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize('damage', [truncate, os.remove, flip])
def test_07_any_damaged_file_of_the_newest_is_named_and_the_one_before_is_used(
    damage, copy, caplog
):
    for name in sorted(files(copy/'checkpoint-6')):
        shutil.copytree(copy/'checkpoint-6', copy/'spare')
        damage(copy/'checkpoint-6'/name)
        caplog.clear()
        with caplog.at_level(logging.WARNING, 'llm_workbook.checkpoint.manifest'):
            found = latest_valid(copy, deep=True)
        assert found == copy/'checkpoint-4', name
        assert 'checkpoint-6' in caplog.text, caplog.text
        assert name in caplog.text or name == MANIFEST, caplog.text
        assert (copy/'checkpoint-6').is_dir()  # Nothing is deleted
        shutil.rmtree(copy/'checkpoint-6')
        (copy/'spare').rename(copy/'checkpoint-6')
    assert latest_valid(copy, deep=True) == copy/'checkpoint-6'


def test_07_when_none_is_left_the_error_lists_all(copy):
    truncate(copy/'checkpoint-6/facts.json')
    os.remove(copy/'checkpoint-4/facts.json')
    both = 'checkpoint-6.*facts.json.*checkpoint-4.*facts.json'
    words = f'(?s)none of its checkpoints can be used.*{both}'
    with pytest.raises(DamagedCheckpoint, match=words): latest_valid(copy)


@pytest.mark.slow
@pytest.mark.parametrize('damage', [truncate, flip])
def test_07_a_run_goes_on_from_the_checkpoint_before_to_the_same_end(damage, copy, kept, caplog):
    broken = next((copy/'checkpoint-6/model').glob('*.safetensors'))
    damage(broken)
    fine_tune(kept.recipe, copy, resume=True)
    assert 'skipped checkpoint-6' in caplog.text
    assert broken.name in caplog.text
    assert (copy/'checkpoint-6.aside-0').is_dir()
    assert losses(copy) == pytest.approx(losses(kept.directory), abs=1e-6)
    assert 'model/model.safetensors' in files(copy)


# 8: a part is missing

def save_without_and_load_with(folder, left_out):
    """Save without some parts and see that loading with them is refused; give back the step that is
    loaded where weights are all that is wanted."""
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    parts = {'optimizer': optimizer, 'scheduler': scheduler}
    saved = {name: part for name, part in parts.items() if name not in left_out}
    save_checkpoint(folder, model, **saved)
    with pytest.raises(CheckpointError, match=f'holds no {left_out[0]}.*weights_only=True'):
        load_checkpoint(folder, model, **parts)
    return load_checkpoint(folder, model, **parts, weights_only=True)['step']


@pytest.mark.parametrize(
    'left_out', [('optimizer', 'scheduler'), ('scheduler',)], ids=['optimizer', 'scheduler'])
def test_08_a_checkpoint_without_a_part_is_refused_unless_weights_are_all_that_is_wanted(
    left_out, tmp_path
):
    arguments = tmp_path/'checkpoint-3', left_out
    assert run_ranks(save_without_and_load_with, 2, arguments) == [3, 3]


@pytest.mark.parametrize(
    'part',
    [
        'optimizer/groups.json', 'optimizer/rank-00001-of-00002.safetensors', 'scheduler.json',
        'rng/rank-00001.json'])
def test_08_a_part_that_was_deleted_is_damage(part, copy, caplog):
    os.remove(copy/'checkpoint-6'/part)
    with caplog.at_level(logging.WARNING): assert latest_valid(copy) == copy/'checkpoint-4'
    assert part in caplog.text
    assert 'is missing' in caplog.text


# 16: two runs in one directory

HOLD_THE_LOCK = '''
import sys, time
from llm_workbook.training.run_lock import run_lock
with run_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(100)
'''


def test_16_a_second_run_is_refused_and_a_killed_one_leaves_no_lock(recipe, tmp_path):
    first = subprocess.Popen(
        [sys.executable, '-c', HOLD_THE_LOCK, str(tmp_path/'run')],
        stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == 'held\n'
        start = time.monotonic()
        holder = f"'run' is taken by process {first.pid} on .*"
        advice = 'wait for it, stop it, or name another'
        with pytest.raises(RunLocked, match=f'{holder}: {advice}'):
            fine_tune(recipe, tmp_path/'run')
        assert time.monotonic() - start < 30
        assert files(tmp_path/'run') == {'.llmw.lock'}
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
        first.stdout.close()
    with run_lock(tmp_path/'run'): pass


# 19: text and files that want to run

class Payload:
    "Whoever unpickles it makes a file."
    def __init__(self, trace): self.trace = trace
    def __reduce__(self): return os.system, (f'touch {self.trace}',)


@pytest.mark.parametrize('text', YAML.values(), ids=YAML)
def test_19_a_recipe_cannot_run_anything(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match='not plain YAML|unknown key|mapping'): Recipe.parse(text)
    assert files(tmp_path) == set()


@pytest.mark.parametrize('template', TEMPLATES.values(), ids=TEMPLATES)
def test_19_a_chat_template_cannot_run_anything(template, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(recipe.model.source, tmp_path/'base')
    (tmp_path/'base/chat_template.jinja').write_text(
        '{% generation %}x{% endgeneration %}' + template)
    with pytest.raises(ValueError, match='the chat template refuses this conversation'):
        training.check_recipe(recipe.changed({'model.source': str(tmp_path/'base')}))
    assert not [name for name in files(tmp_path) if 'planted' in name]


@pytest.mark.parametrize(
    'name', ['optimizer.pt', 'rng_state_0.pth', 'training_args.bin', 'model/pytorch_model.bin'])
def test_19_a_pickle_in_a_checkpoint_is_refused_unread(name, copy, tmp_path, caplog):
    payload = pickle.dumps(Payload(tmp_path/'planted'))
    (copy/'checkpoint-6'/name).write_bytes(payload)
    with caplog.at_level(logging.WARNING): assert latest_valid(copy) == copy/'checkpoint-4'
    assert name in caplog.text
    assert not (tmp_path/'planted').exists()


@pytest.mark.parametrize(
    'words, lie',
    [
        ('facts.json', '../../secret'),
        ('facts.json', '/etc/passwd'),
        ('"step":', '"evil": 1, "step":')])
def test_19_a_manifest_that_lies_is_refused(words, lie, copy):
    manifest = copy/'checkpoint-6'/MANIFEST
    truth = manifest.read_text()
    assert words in truth
    manifest.write_text(truth.replace(words, lie))
    assert latest_valid(copy) == copy/'checkpoint-4'


def test_19_an_archive_is_no_data_and_no_base(recipe, tmp_path):
    with tarfile.open(tmp_path/'rows.tar', 'w') as archive: archive.add(__file__, '../planted')
    with pytest.raises(ValueError, match='rows.tar: cannot be read'):
        training.check_recipe(recipe.changed({'data.source': str(tmp_path/'rows.tar')}))
    with pytest.raises((ValueError, OSError)):
        training.check_recipe(recipe.changed({'model.source': str(tmp_path/'rows.tar')}))
    assert files(tmp_path) == {'rows.tar'}


# 24: directories that cannot be written, or go away; a clock that jumps

def as_nobody(function):
    "Call a function as a user without rights, in a process of its own; give back its error."
    def work():
        root = os.geteuid() == 0
        if root: os.seteuid(65534)
        try: function()
        except Exception as error: return type(error).__name__, str(error)
        finally:
            if root: os.seteuid(0)
    return run_ranks(work, 1)[0]


def test_24_a_directory_without_the_right_to_write_is_an_early_clear_error(tmp_path):
    for folder in [tmp_path, *tmp_path.parents]:  # Those that pytest has made
        if 'pytest-of-' in folder.as_posix(): folder.chmod(0o755)
    (tmp_path/'run').mkdir()
    (tmp_path/'run').chmod(0o555)
    def take_the_lock():
        with run_lock(tmp_path/'run'): pass
    kind, message = as_nobody(take_the_lock)
    assert kind == 'PermissionError'
    assert "'run' cannot be written to" in message


def let_the_clock_go_back(monkeypatch):
    "Let the clock go back an hour whenever somebody looks at it."
    looks = count()
    def time_of_day(): return 1.7e9 - 3600 * next(looks)
    monkeypatch.setattr(time, 'time', time_of_day)


@pytest.mark.slow
def test_24_a_directory_that_vanishes_is_a_clear_error_and_the_clock_may_jump(
    recipe, tmp_path, monkeypatch
):
    """Rank 1 takes the directory away in the third step; on both ranks the clock goes back an hour
    at every look."""
    def take_the_directory_away():  # At once, also while the other rank is saving
        (tmp_path/'run').rename(tmp_path/'gone')
    let_the_clock_go_back(monkeypatch)
    disturb(monkeypatch, take_the_directory_away)
    with pytest.raises(RankError, match="(?s)run.*(removed|No such file)") as caught:
        fine_tune(recipe.changed({'intervals.saving': 2}), tmp_path/'run')
    assert 'FileNotFoundError' in str(caught.value)


@pytest.mark.slow
def test_24_a_clock_that_goes_back_changes_nothing(recipe, kept, tmp_path, monkeypatch):
    let_the_clock_go_back(monkeypatch)
    run = fine_tune(recipe.changed({'intervals.saving': 2}), tmp_path/'run')
    seconds = [row['seconds'] for row in run.metrics]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0
    assert losses(run.directory) == losses(kept.directory)
    assert [found.step for found in survey(run.directory).valid] == [6, 4]
    assert all(rank['seconds'] > 0 for rank in run.ranks)
