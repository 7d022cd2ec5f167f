"""Faults 1 to 4, 10, 17 and 20: signals, kills and numbers that are none, in runs as torchrun and a
cell start them."""
import json
import os
import re
import signal
import subprocess

import psutil
import pytest
from test_job_scripts import install_programs, job_environment, requeues
from trouble import CANARY, TOKENS, files, fine_tune, losses
from trouble import exit_code, steps_done, torchrun, wait_for
from warm import rank_of, warm_interpreter

from llm_workbook.checkpoint import save_load as checkpoint
from llm_workbook.training import fine_tune as training
from llm_workbook.checkpoint.manifest import check_checkpoint, latest_valid, survey
from llm_workbook.launching.job_scripts import sbatch
from llm_workbook.parallel.ranks import RankError
from llm_workbook.training.resume import Preempted
from llm_workbook.training.run_directory import run_state

STEPS = 40


@pytest.fixture(scope='session')
def long(recipe, tmp_path_factory):
    "Forty steps, undisturbed, in forked ranks: the losses that every broken run must come to."
    asked = recipe.changed({'optimizer.steps': STEPS, 'intervals.saving': 10})
    return fine_tune(asked, tmp_path_factory.mktemp('long')/'run')


def ranks(process) -> dict:
    "The ranks of a torchrun, as RANK -> process."
    by_rank = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try: by_rank[rank_of(child)] = child
        except (psutil.Error, KeyError): pass  # It has ended, or is no rank
    return by_rank


def checkpoints(directory) -> list:
    return [(found.step, found.state) for found in survey(directory).found]


def log_of_signalled_run(long, directory, number, rank=None) -> str:
    """Start a run, send a signal to torchrun or to a rank in the middle, and see that all ranks
    have saved one step; give back the log."""
    before = steps_done(directory)
    job = torchrun(long.recipe, directory)
    def under_way(): return steps_done(directory) >= before + 3 or job.poll() is not None
    assert wait_for(under_way, 80), (directory.parent/'log').read_text()
    target = job if rank is None else ranks(job)[rank]
    target.send_signal(number)
    sent = steps_done(directory)
    code = exit_code(job)
    log = (directory.parent/'log').read_text()
    state = run_state(directory)
    assert code not in (0, -signal.SIGKILL), (code, state, log[-3000:])
    assert state['state'] == 'preempted', (code, state, log[-3000:])
    assert sent <= state['step'] < STEPS, (
        'the run was over before the signal: more steps are needed here')
    assert check_checkpoint(directory/f'checkpoint-{state["step"]}', deep=True).ranks == 2
    undisturbed = losses(long.directory)[:state['step']]
    assert losses(directory) == pytest.approx(undisturbed, abs=1e-6)  # And no odd one
    return log


@pytest.mark.slow
def test_01_sigterm_to_torchrun_saves_one_step_on_all_ranks(long, tmp_path, warm):
    log = log_of_signalled_run(long, tmp_path/'run', signal.SIGTERM)
    said, _, traceback = log.partition('What torchrun prints below is no failure')
    assert 'stopped on request; the same command goes on after step' in said, log[-3000:]
    assert 'SignalException' in traceback and 'Traceback' not in said, log[-3000:]
    assert_resumed_as_undisturbed(tmp_path/'run', long)


@pytest.mark.slow
def test_02_a_signal_to_one_rank_saves_one_step_on_all_ranks(long, tmp_path, warm):
    log = log_of_signalled_run(long, tmp_path/'run', signal.SIGUSR1, rank=1)
    assert 'exitcode  : 75' in log.partition('below is no failure')[2], log[-3000:]


@pytest.mark.slow
def test_02_ctrl_c_to_torchrun_saves_one_step_on_all_ranks(long, tmp_path, warm):
    log = log_of_signalled_run(long, tmp_path/'run', signal.SIGINT)
    assert 'interrupted: the run saves its next step' in log, log[-3000:]
    assert 'KeyboardInterrupt' not in log.partition('SignalException')[0], log[-3000:]


@pytest.mark.slow
def test_02_ranks_whose_agent_was_killed_save_and_end(long, tmp_path, warm):
    run = tmp_path/'run'
    job = torchrun(long.recipe, run)
    assert wait_for(lambda: steps_done(run) >= 3 or job.poll() is not None, 80)
    orphans = list(ranks(job).values())
    assert len(orphans) == 2
    job.kill()
    job.wait()
    gone, alive = psutil.wait_procs(orphans, 60)
    for orphan in alive: orphan.kill()
    assert not alive
    log = (tmp_path/'log').read_text()
    assert run_state(run)['state'] == 'preempted', log[-3000:]
    step = run_state(run)['step']
    assert step < STEPS, 'the run was over before: more steps are needed here'
    assert check_checkpoint(run/f'checkpoint-{step}', deep=True).ranks == 2


def act_inside_a_save(monkeypatch, act):
    "Let rank 1 call `act` when the second checkpoint has one of its files."
    write = checkpoint._write
    saves = []
    def write_and_act(folder, files, *rest):
        saves.append(folder)
        if os.environ['RANK'] == '1' and len(saves) == 2:
            first = next(iter(files))
            write(folder, {first: files[first]}, *rest)
            act()
        return write(folder, files, *rest)
    monkeypatch.setattr(checkpoint, '_write', write_and_act)


def assert_resumed_as_undisturbed(run, undisturbed):
    resumed = fine_tune(undisturbed.recipe, run, resume=True)
    assert losses(resumed.directory) == pytest.approx(losses(undisturbed.directory), abs=1e-6)


@pytest.mark.slow
def test_03_a_kill_inside_a_save_leaves_the_checkpoint_before(recipe, kept, tmp_path, monkeypatch):
    def kill(): os.kill(os.getpid(), signal.SIGKILL)
    with monkeypatch.context() as patch:
        act_inside_a_save(patch, kill)
        with pytest.raises(RankError, match='rank 1 was killed by SIGKILL'):
            fine_tune(kept.recipe, tmp_path/'run')
    assert checkpoints(tmp_path/'run') == [(4, 'interrupted'), (2, 'valid')]
    assert_resumed_as_undisturbed(tmp_path/'run', kept)


@pytest.mark.slow
def test_03_a_second_signal_inside_a_save_changes_nothing(recipe, kept, tmp_path, monkeypatch):
    def send_two_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
    with monkeypatch.context() as patch:
        act_inside_a_save(patch, send_two_signals)
        with pytest.raises(Preempted) as preempted: fine_tune(kept.recipe, tmp_path/'run')
    assert preempted.value.step in (4, 5)
    assert check_checkpoint(latest_valid(tmp_path/'run'), deep=True).step == preempted.value.step
    assert_resumed_as_undisturbed(tmp_path/'run', kept)


@pytest.mark.slow
def test_04_a_killed_rank_is_started_again_and_goes_on_from_the_last_commit(
    long, tmp_path, monkeypatch, warm
):
    # Else started ranks may find the addresses of killed ones
    monkeypatch.setenv('TORCH_DISABLE_SHARE_RDZV_TCP_STORE', '1')
    job = torchrun(long.recipe, tmp_path/'run', '--max-restarts=1')
    assert wait_for(lambda: steps_done(tmp_path/'run') >= 14 or job.poll() is not None, 80)
    ranks(job)[1].kill()
    code = exit_code(job)
    log = (tmp_path/'log').read_text()
    assert code == 0, log[-3000:]
    assert re.search(r'exitcode: -9\)', log), log[-3000:]
    assert run_state(tmp_path/'run') == {'state': 'finished', 'step': STEPS}, log[-3000:]
    assert losses(tmp_path/'run') == pytest.approx(losses(long.directory), abs=1e-6)


# 10: a loss that is no number, on one rank

@pytest.mark.slow
def test_10_no_number_on_one_rank_stops_all_before_the_update(recipe, kept, tmp_path, monkeypatch):
    make_trainer = training.make_trainer
    passes = []
    def spoil_the_third_pass(layer, inputs, output):
        passes.append(1)
        return output * float('nan') if len(passes) == 3 else output
    def make_spoilt_trainer(*args, **how):
        trainer = make_trainer(*args, **how)
        layer = trainer.model.model.layers[1]
        if os.environ['RANK'] == '1': layer.register_forward_hook(spoil_the_third_pass)
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_spoilt_trainer)
    words = 'loss nan at step 3: nothing is saved, and no weight was updated'
    where = r'\(rank 1, rows \S+ line \d+\)'
    with pytest.raises(RankError, match=f'FloatingPointError: {words} {where}'):
        fine_tune(kept.recipe, tmp_path/'run')
    assert losses(tmp_path/'run') == losses(kept.directory)[:2]
    assert [found.step for found in survey(tmp_path/'run').found] == [2]
    assert not (tmp_path/'run/model').exists()


# 17 and 18: the job script, three times

@pytest.fixture
def interpreter(tmp_path):
    with warm_interpreter(tmp_path) as file: yield file


@pytest.mark.slow
def test_17_the_same_job_starts_resumes_and_has_nothing_left_to_do(long, tmp_path, interpreter):
    install_programs(tmp_path, ['srun', 'scontrol'])
    long.recipe.save(tmp_path/'recipe.yaml')
    script = sbatch(long.recipe, tmp_path/'run', tmp_path/'recipe.yaml', python=interpreter)
    run = tmp_path/'run'
    environment = job_environment(tmp_path) | {'TMPDIR': str(tmp_path)}
    environment |= {name: CANARY for name in TOKENS}
    def submit():
        return subprocess.Popen(
            ['bash', '-c', script], env=environment, cwd=tmp_path, stdout=log, stderr=log)
    def times():
        paths = [path for path in run.rglob('*') if path.is_file() and path.name != '.llmw.lock']
        return {path: path.stat().st_mtime_ns for path in paths}
    with open(tmp_path/'log', 'w') as log:
        job = submit()
        assert wait_for(lambda: steps_done(run) >= 3 or job.poll() is not None, 80)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(80) == 75, (tmp_path/'log').read_text()[-3000:]
        assert requeues(tmp_path) == ['4711'], (tmp_path/'log').read_text()[-3000:]
        assert run_state(run)['state'] == 'preempted'
        assert submit().wait(80) == 0
        assert run_state(run) == {'state': 'finished', 'step': STEPS}
        assert steps_done(run) == STEPS
        before = times()
        assert submit().wait(80) == 0
        assert times().items() >= before.items()
        assert requeues(tmp_path) == ['4711']
    assert losses(run) == pytest.approx(losses(long.directory), abs=1e-6)
    assert CANARY not in script
    assert not files_with_the_token(tmp_path)


# 20: a token stays where it is

def files_with_the_token(folder) -> list:
    "The files below `folder` that hold the token."
    paths = [path for path in folder.rglob('*') if path.is_file()]
    return [path for path in paths if CANARY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_20_a_token_in_the_environment_is_in_no_file_of_a_run(kept, capfd):
    assert len(files(kept.directory)) > 15
    assert files_with_the_token(kept.directory.parent) == []
    shown = repr(kept) + kept._repr_html_() + json.dumps(kept.to_dict())
    written = sbatch(kept.recipe, 'run') + kept.recipe.dump()
    assert CANARY not in shown + written
    assert not re.search('[Cc]anary', shown + written)
