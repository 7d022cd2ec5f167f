"""Jobs without a SLURM: small programs answer as the real commands did; tests/cluster has the real
ones."""
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from llm_workbook.launching import slurm as jobs
from llm_workbook.config.document import RecipeError
from llm_workbook.launching.slurm import Job, SlurmError, submit
from llm_workbook.config.recipe import Recipe, shrink

RECIPE = shrink(Recipe.named('reviews-qlora'))
LINE = (
    'JobId={id} JobName=reviews-qlora-shrunk UserId=me(1000) GroupId=me(1000) MCS_label=N/A '
    'Priority=4294901759 Nice=0 Account=(null) QOS=(null) JobState={state} Reason={reason} '
    'Dependency=(null) Requeue={requeue} Restarts={restarts} BatchFlag=1 Reboot=0 '
    'ExitCode={code} RunTime=00:00:03 TimeLimit=01:00:00 ReqNodeList=(null) '
    'ExcNodeList=(null) NodeList={nodes} BatchHost=node1 NumNodes=2 NumCPUs=2 '
    'Command={script} WorkDir=/x JobState=COMPLETED Reason=y StdErr=/z StdOut=/z Power='
)
PROGRAMS = {
    'sbatch': """printf "%s\\n" "$@" > "$SEEN/submitted"
env > "$SEEN/environment"
echo "${NUMBER:-17}\"""",
    'scontrol': """case "$*" in
*"show job"*)
    [ -e "$SEEN/job" ] && exec cat "$SEEN/job"
    echo 'slurm_load_jobs error: Invalid job id specified' >&2
    exit 1;;
*) echo "scontrol $*" >> "$SEEN/asked";;
esac""",
    'scancel': 'echo "scancel $*" >> "$SEEN/asked"',
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Programs with the names of SLURM's on PATH; what they see and say lies in the folder that is
    given back."""
    seen = tmp_path/'seen'
    for folder in seen, tmp_path/'bin': folder.mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path/'bin'/name).write_text(f'#!/bin/bash\n{text}\n')
        (tmp_path/'bin'/name).chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}/bin:{os.environ["PATH"]}')
    monkeypatch.setenv('SEEN', str(seen))
    return seen


def say(seen, job, state='RUNNING', **changes):
    usual = dict(
        id=job.id, state=state, reason='None', code='0:0', nodes='node[1-2]', restarts=0, requeue=1,
        script=job.script)
    (seen/'job').write_text(LINE.format(**usual | changes) + '\n')


def asked(seen) -> list:
    return (seen/'asked').read_text().splitlines() if (seen/'asked').exists() else []


def test_without_slurm_the_command_is_named_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(SlurmError, match='sbatch is not found'): submit(RECIPE, tmp_path/'run')
    assert not (tmp_path/'run').exists()
    with pytest.raises(SlurmError, match='scontrol is not found'):
        Job(tmp_path, '17', 'name', 1, '').status()


def test_a_job_is_found_again(slurm, tmp_path):
    job = submit(RECIPE, tmp_path/'run', options={'partition': 'gpu'})
    assert (job.id, job.name, job.steps) == ('17', RECIPE.name, RECIPE.optimizer.steps)
    assert Job.of(tmp_path/'run') == job
    assert json.loads((tmp_path/'run/job.json').read_text())['id'] == '17'
    assert (slurm/'submitted').read_text().splitlines() == [
        '--parsable', f'--output={tmp_path}/run/%x-%j.log', str(job.script)]
    assert '#SBATCH --partition=gpu\n' in job.script.read_text()


def test_a_job_inside_a_job_inherits_nothing_of_it(slurm, tmp_path, monkeypatch):
    for name in 'SLURM_JOB_ID', 'SLURM_MEM_PER_CPU', 'SBATCH_PARTITION', 'SLURM_CONF':
        monkeypatch.setenv(name, 'outer')
    submit(RECIPE, tmp_path/'run')
    handed_on = (slurm/'environment').read_text().splitlines()
    assert [line for line in handed_on if line.startswith(('SLURM', 'SBATCH'))] == [
        'SLURM_CONF=outer']


def test_states_are_read_before_the_paths(slurm, tmp_path):
    job = submit(RECIPE, tmp_path/'a directory JobState=FAILED')
    say(slurm, job, 'PENDING', reason='Resources', nodes='')
    assert job.status().to_dict() == {
        'state': 'PENDING', 'reason': 'Resources', 'nodes': [], 'restarts': 0, 'exit_code': None,
        'run': 'none', 'step': 0, 'steps': RECIPE.optimizer.steps}
    say(slurm, job, restarts=2)
    (job.directory/'metrics.jsonl').write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    status = job.status()
    assert (status.nodes, status.restarts, status.step, status.ended) == (
        ('node1', 'node2'), 2, 1, False)
    assert 'node1, node2' in status._repr_html_()
    for code, number in {'75:0': 75, '0:9': -9}.items():
        say(slurm, job, 'FAILED', reason='NonZeroExitCode', code=code)
        assert (job.status().exit_code, job.status().ended) == (number, True)


def test_a_number_that_was_given_away_is_forgotten(slurm, tmp_path):
    job = submit(RECIPE, tmp_path/'run')
    say(slurm, job, script='/elsewhere/job.sbatch')
    assert (job.status().state, job.status().exit_code) == ('FORGOTTEN', None)
    (slurm/'job').unlink()
    assert job.status().state == 'FORGOTTEN'
    assert job.wait(1).ended
    assert job.cancel().state == 'FORGOTTEN'
    assert asked(slurm) == []


def test_a_cluster_among_several_is_named_to_every_command(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv('NUMBER', '18;east')
    job = submit(RECIPE, tmp_path/'run')
    say(slurm, job, nodes='')
    job.cancel()
    assert job.cluster == 'east'
    assert asked(slurm) == [
        'scontrol --clusters=east update JobId=18 Requeue=0',
        'scancel --clusters=east --batch --signal=USR1 18']


@pytest.mark.parametrize(('state', 'save', 'commands'), [
    ('RUNNING', True, ['scontrol update JobId=17 Requeue=0', 'scancel --batch --signal=USR1 17']),
    ('PENDING', True, ['scancel 17']), ('RUNNING', False, ['scancel --signal=KILL 17']),
    ('COMPLETED', True, []), ('NODE_FAIL', False, [])])
def test_cancel_says_what_the_state_calls_for(slurm, tmp_path, state, save, commands):
    job = submit(RECIPE, tmp_path/'run')
    say(slurm, job, state)
    assert job.cancel(save).state == state
    assert asked(slurm) == commands


def test_one_directory_has_one_job(slurm, tmp_path):
    job = submit(RECIPE, tmp_path/'run')
    say(slurm, job, 'PENDING', reason='Priority')
    with pytest.raises(ValueError, match="job 17 is PENDING in 'run'"):
        submit(RECIPE, tmp_path/'run')
    with pytest.raises(TimeoutError, match='job 17 is PENDING after 0.1 s'): job.wait(0.1)
    say(slurm, job, 'CANCELLED')
    assert submit(RECIPE, tmp_path/'run') == replace(
        job, submitted=Job.of(tmp_path/'run').submitted)


def test_of_two_kernels_that_submit_at_once_one_gets_the_job(slurm, tmp_path):
    """sbatch takes half a second here; the later kernel has looked before, and looks again when it
    has the lock."""
    program = tmp_path/'bin/sbatch'
    program.write_text(f'#!/bin/bash\nsleep 0.5; echo x >> "$SEEN/count"\n{PROGRAMS["sbatch"]}\n')
    say(slurm, Job(tmp_path/'run', '17', RECIPE.name, 1, ''), 'PENDING')
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(submit, RECIPE, tmp_path/'run') for _ in range(2)]
    (error,) = [str(one.exception()) for one in made if one.exception()]
    assert 'job 17 is PENDING' in error
    assert (slurm/'count').read_text() == 'x\n'


def test_a_job_that_cannot_be_recorded_is_taken_back(slurm, tmp_path, monkeypatch):
    def full(*words): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(jobs, 'publish', full)
    with pytest.raises(OSError, match='No space left'): submit(RECIPE, tmp_path/'run')
    assert asked(slurm) == ['scancel 17']


def test_what_this_version_does_not_run_is_not_submitted(slurm, tmp_path):
    with pytest.raises(
        RecipeError, match=r'nothing was submitted\n  precision.reduce.*can be planned, not run'
    ):
        submit(RECIPE.changed({'precision.reduce': 'bfloat16'}), tmp_path/'run')
    assert not (tmp_path/'run').exists()
    assert not (slurm/'submitted').exists()


@pytest.mark.parametrize(
    ('requeue', 'looks', 'state'),
    [
        (1, 'PREEMPTED PREEMPTED', 'PREEMPTED'),
        (0, 'PREEMPTED', 'PREEMPTED'),
        (1, 'PREEMPTED PENDING', 'PENDING'),
        (1, 'LAUNCH_FAILED', 'LAUNCH_FAILED')])
def test_a_preempted_job_is_over_if_it_stays_so(
    slurm, tmp_path, monkeypatch, requeue, looks, state
):
    job = submit(RECIPE, tmp_path/'run')
    looks = looks.split()
    say(slurm, job, looks.pop(0), requeue=requeue)
    monkeypatch.setattr(
        jobs, 'time',
        SimpleNamespace(sleep=lambda s: say(slurm, job, looks.pop(0), requeue=requeue)))
    status = job.status()
    assert (status.state, status.ended, looks) == (state, state != 'PENDING', [])
    assert (status.exit_code == 0) == status.ended


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('{"id": "1; touch x", "name": "n", "steps": 1, "submitted": ""}', "id '1; touch x'"),
        ('{"id": "-1"', 'broken'),
        ('[]', 'no record of a job'),
        ('{"id": "--all", "name": "n", "steps": 1, "submitted": ""}', "id '--all'"),
        ('{"id": "17"}', 'no record of a job'),
        ('{"id": "17", "name": "../../x", "steps": 1, "submitted": ""}', 'name'),
        ('{"id": "17", "name": "n", "steps": 1, "submitted": "", "cluster": "a b"}', 'cluster'),
        ('{"id": "17", "name": "n", "steps": 1, "submitted": "", "more": 1}', 'no record of a job'),
    ],
)
def test_a_record_that_is_none_reaches_no_command(slurm, tmp_path, text, words):
    (tmp_path/'job.json').write_text(text)
    with pytest.raises(ValueError, match=words): Job.of(tmp_path)
    assert asked(slurm) == []


def test_logs_are_the_end_of_the_file(tmp_path):
    job = Job(tmp_path, '17', 'name', 1, '')
    assert job.logs() == ''
    job.file.write_bytes(b'first\n' * 400_000 + b'\xff second\nlast')
    assert job.logs(2) == '\ufffd second\nlast'
    assert len(job.logs(10**6)) < 2**20 + 1
    with pytest.raises(ValueError, match='lines must be a whole number'): job.logs(0)


def test_a_controller_that_is_silent_is_an_error(slurm, tmp_path, monkeypatch):
    def silent(command, **how): raise subprocess.TimeoutExpired(command, how['timeout'])
    monkeypatch.setattr(jobs.subprocess, 'run', silent)
    with pytest.raises(SlurmError, match='scontrol has not answered for 60 s'):
        Job(tmp_path, '17', 'name', 1, '').status()


def test_the_log_is_where_the_run_is(slurm, tmp_path):
    with pytest.raises(ValueError, match='output is not yours'):
        submit(RECIPE, tmp_path/'run', options={'output': 'x'})
    assert not (tmp_path/'run').exists()
