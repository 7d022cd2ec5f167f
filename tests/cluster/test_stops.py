"""Jobs that are stopped, sent away or cut off, and lose nothing."""
import subprocess
import time

import cluster
import pytest
from conftest import finished, losses, places, start, training, until

from llm_workbook.commits import survey
from llm_workbook.jobs import submit


def committed(directory) -> list: return [commit.step for commit in survey(directory).valid]


def undisturbed(job, whole): assert losses(job.directory) == pytest.approx(losses(whole[0].directory), abs=1e-6)


def came_back_once(job, whole):
    "One save, one requeue, and the losses of a run that nobody disturbed."
    saved = until(job, lambda status: status.restarts == 1)
    assert committed(job.directory) == [saved.step] and 4 <= saved.step < 24
    assert finished(job).restarts == 1
    assert job.file.read_text().count('back into the queue') == 1
    assert committed(job.directory) == [saved.step]
    undisturbed(job, whole)


def test_the_signal_before_the_time_limit_saves_once_and_comes_back(full, whole, tmp_path):
    job = start(full, tmp_path/'run')
    training(job)
    subprocess.run(['scancel', '--batch', '--signal=USR1', job.id], check=True)
    came_back_once(job, whole)
    assert 'exitcode  : 75' in job.file.read_text()  # As torchrun sees its ranks; where it is told to stop itself it says less


def test_a_job_that_must_make_room_saves_once_and_comes_back(full, whole, tmp_path):
    job = start(full, tmp_path/'run')
    training(job)
    subprocess.run(['sbatch', '--partition=urgent', '--nodes=2', '--exclusive', '--output=/dev/null', '--wrap=sleep 1'], check=True)
    came_back_once(job, whole)


def test_a_cancelled_job_saves_and_stays_away(full, whole, tmp_path):
    job = start(full, tmp_path/'run')
    training(job)
    with pytest.raises(ValueError, match=f'job {job.id} is RUNNING'): start(full, tmp_path/'run')
    subprocess.run(['scancel', job.id], check=True)
    status = until(job, lambda status: status.state == 'CANCELLED' and not places())
    assert (status.restarts, status.run) == (0, 'preempted') and committed(job.directory) == [status.step]
    again = start(full, tmp_path/'run')
    assert again.id != job.id
    finished(again)
    undisturbed(again, whole)


def test_cancel_saves_without_a_limit_of_time(full, tmp_path):
    job = start(full, tmp_path/'run')
    training(job)
    job.cancel()
    status = job.wait(120)
    assert (status.state, status.exit_code, status.restarts, status.run) == ('FAILED', 75, 0, 'preempted')
    assert committed(job.directory) == [status.step]


def test_a_node_that_is_cut_off_is_named_and_the_next_start_goes_on(full, whole, tmp_path, monkeypatch):
    monkeypatch.setenv('STEP_TIMEOUT_S', '15')
    job = start(full.changed({'intervals.saving': 6}), tmp_path/'run')
    training(job, 8)
    before = len(job.file.read_text())
    cluster.link('node2', 'down')
    try:
        began = time.monotonic()
        until(job, lambda status: status.state != 'RUNNING', 60)
        took_s = time.monotonic() - began
    finally: cluster.link('node2', 'up')
    said = job.file.read_text()[before:]
    assert took_s < 60 and 'node2' in said, said
    finished(job)
    undisturbed(job, whole)
