"""Jobs that are stopped, sent away or cut off, and lose nothing."""
import subprocess
import time

import cluster
import pytest
from conftest import finished, losses, places, start, training, until

from llm_workbook.checkpoint.manifest import survey


def committed(directory) -> list: return [commit.step for commit in survey(directory).valid]


def as_undisturbed(job, whole, steps=24):
    assert losses(job.directory) == pytest.approx(losses(whole[0].directory)[:steps], abs=1e-6)
    assert steps > 0


def sent_back_once(job):
    "One save, one requeue, and a word of it in the log."
    saved = until(job, lambda status: status.restarts == 1)
    assert committed(job.directory) == [saved.step]
    assert saved.step >= 1
    assert job.file.read_text().count('back into the queue') == 1
    return saved


def test_the_signal_before_the_time_limit_saves_once_and_sends_back(full, tmp_path):
    """SLURM itself sends it, 300 s before the end of a job of 30 minutes: its limit is made as
    short as that."""
    job = start(full.changed({'optimizer.steps': 2000}), tmp_path/'run')
    assert '#SBATCH --signal=B:USR1@300\n' in job.script.read_text()
    training(job, 1)
    subprocess.run(['scontrol', 'update', f'JobId={job.id}', 'TimeLimit=5'], check=True)
    sent_back_once(job)
    # As torchrun sees its ranks; where it is told to stop itself it says less
    assert 'exitcode  : 75' in job.file.read_text()
    job.cancel(save=False)
    assert job.wait(60).state == 'CANCELLED'


def test_a_job_that_must_make_room_saves_once_comes_back_and_is_as_if_undisturbed(
    full, whole, tmp_path
):
    job = start(full, tmp_path/'run')
    training(job)
    subprocess.run(
        [
            'sbatch', '--partition=urgent', '--nodes=2', '--exclusive', '--output=/dev/null',
            '--wrap=sleep 1'],
        check=True)
    assert 4 <= sent_back_once(job).step < 24
    finished(job)
    as_undisturbed(job, whole)


def test_a_cancelled_job_saves_and_stays_away(full, whole, tmp_path):
    """First by `scancel`, with the time that SLURM gives; then by `cancel`, which waits for the
    checkpoint."""
    job = start(full, tmp_path/'run')
    training(job)
    with pytest.raises(ValueError, match=f'job {job.id} is RUNNING'): start(full, tmp_path/'run')
    subprocess.run(['scancel', job.id], check=True)
    first = until(job, lambda status: status.state == 'CANCELLED' and not places())
    assert (first.restarts, first.run) == (0, 'preempted')
    assert committed(job.directory) == [first.step]
    again = start(full, tmp_path/'run')
    assert again.id != job.id
    training(again, first.step + 1)
    again.cancel()
    status = again.wait(120)
    assert (status.state, status.exit_code, status.restarts, status.run) == (
        'FAILED', 75, 0, 'preempted')
    assert committed(job.directory) == [status.step, first.step]  # The newest is first
    as_undisturbed(again, whole, status.step)


def test_a_node_that_is_cut_off_is_named_and_the_next_start_goes_on(
    full, whole, tmp_path, monkeypatch
):
    """SLURM misses the node after 15 s here, and ends the job; the ranks would miss it after the 30
    s of a step."""
    monkeypatch.setenv('STEP_TIMEOUT_S', '30')
    job = start(full.changed({'intervals.saving': 6}), tmp_path/'run')
    training(job, 8)
    before = len(job.file.read_text())
    cluster.link('node2', 'down')
    try:
        began = time.monotonic()
        until(job, lambda status: status.state != 'RUNNING', 60)
        took_s = time.monotonic() - began
    finally: cluster.link('node2', 'up')
    log = job.file.read_text()[before:]
    assert took_s < 60, log
    assert 'node2' in log, log
    finished(job)
    as_undisturbed(job, whole)
