"""The lock of a run: of starts at the same moment one is the run, and none leaves a lock behind."""
import multiprocessing
import os
import subprocess
import sys

import pytest

from llm_workbook.config.recipe import Recipe
from llm_workbook.training import fine_tune as training
from llm_workbook.training import run_lock as locks
from llm_workbook.training.run_directory import RunFiles, begin_run, run_state
from llm_workbook.training.run_lock import (
    LOCK, Hold, RunLocked, adopt_hold, lock_holder, run_lock, take_hold)

FORK = multiprocessing.get_context('fork')


def come_together(directory, answers, gate, end):
    gate.wait()
    try: hold = take_hold(directory)
    except RunLocked as error: answers.put(str(error))
    else: answers.put(os.getpid())
    end.wait()
    os._exit(0)  # Without a word, as after a kill


@pytest.mark.parametrize('is_there', [False, True], ids=['new', 'there'])
def test_of_starts_at_the_same_moment_exactly_one_is_the_run(is_there, tmp_path):
    directory = tmp_path/'deep'/'run'
    if is_there: directory.mkdir(parents=True)
    for _ in range(5):
        answers, gate, end = FORK.SimpleQueue(), FORK.Event(), FORK.Event()
        starts = [
            FORK.Process(target=come_together, args=(directory, answers, gate, end))
            for _ in range(6)]
        for start in starts: start.start()
        gate.set()
        said = [answers.get() for _ in starts]
        end.set()
        for start in starts: start.join()
        assert sum(isinstance(answer, int) for answer in said) == 1, said
        assert lock_holder(directory) == ''


def test_a_file_that_was_removed_before_it_was_locked_is_no_lock(tmp_path, monkeypatch):
    "As if the holder had gone, with its file, between the opening and the locking of it."
    opened, plain = [], locks._open_lock
    def open_late(lock):
        handle = plain(lock)
        opened.append(handle)
        if len(opened) == 1: lock.unlink()
        return handle
    monkeypatch.setattr(locks, '_open_lock', open_late)
    with run_lock(tmp_path/'run'):
        assert len(opened) == 2
        monkeypatch.undo()
        with pytest.raises(RunLocked): take_hold(tmp_path/'run')


def test_what_was_begun_or_was_there_is_not_removed(tmp_path):
    with run_lock(tmp_path/'new'): pass
    assert not (tmp_path/'new').exists()
    (tmp_path/'there').mkdir()
    with run_lock(tmp_path/'there'): pass
    assert [path.name for path in (tmp_path/'there').iterdir()] == [LOCK]
    with run_lock(tmp_path/'begun'): begin_run(Recipe.named('reviews-qlora'), tmp_path/'begun')
    assert run_state(tmp_path/'begun')['state'] == 'running'


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path/'run').write_text('mine')
    with pytest.raises(FileExistsError): take_hold(tmp_path/'run')
    assert (tmp_path/'run').read_text() == 'mine'


def test_a_lock_that_was_handed_over_is_used_once_and_for_its_directory_alone(tmp_path):
    (tmp_path/'run').mkdir()
    adopt_hold(take_hold(tmp_path/'run'))
    with run_lock(tmp_path/'other'): pass
    with run_lock(tmp_path/'run'):
        with pytest.raises(RunLocked): take_hold(tmp_path/'run')
    with run_lock(tmp_path/'run'): pass
    with open(tmp_path/'other-file', 'w') as file, pytest.raises(ValueError, match='not the lock'):
        adopt_hold(Hold(tmp_path/'run', file.fileno()))


# Starts

SECOND = """
import sys
from pathlib import Path
from llm_workbook.config.recipe import Recipe
from llm_workbook.training import fine_tune
def too_late(*words): raise SystemExit('libraries were imported first')
fine_tune._import_libraries = fine_tune.check_recipe = too_late
one = Recipe.load(sys.argv[1])
for call in fine_tune.fine_tune, fine_tune.train_here:
    try: call(one, Path(sys.argv[2]))
    except Exception as error: print(type(error).__name__, error)
"""


def test_a_second_start_is_refused_before_it_imports_reads_or_writes(tmp_path, warm):
    one = Recipe.named('reviews-qlora').changed(
        {'cluster.processes': 1, 'sharding.strategy': 'none'})
    file, run = one.save(tmp_path/'recipe.yaml'), tmp_path/'run'
    with run_lock(run):
        before = {path: path.read_bytes() for path in run.rglob('*')}
        done = subprocess.run(
            [sys.executable, '-c', SECOND, file, run], capture_output=True, text=True, timeout=60)
        assert {path: path.read_bytes() for path in run.rglob('*')} == before
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stderr
    assert all(line.startswith("RunLocked 'run' is taken by process") for line in said), said


def test_a_rank_that_was_told_to_stop_before_it_met_the_others_ends(tmp_path):
    start = training.Start(4)
    assert training._stop_early(tmp_path, 1, start) == {'preempted': 4}
    assert run_state(tmp_path)['state'] == 'none'
    training._stop_early(tmp_path, 0, start)
    assert run_state(tmp_path) == {'state': 'preempted', 'step': 4}
    assert RunFiles(tmp_path).stage.exists()
