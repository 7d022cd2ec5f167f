"""The command in a terminal: what a user did wrong is one line, and Ctrl-C ends it."""
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trouble import some_rows, wait_for

from llm_workbook import __main__ as entry
from llm_workbook.checkpoint import manifest
from llm_workbook.checkpoint.sharded_files import CheckpointError
from llm_workbook.config.recipe import Recipe, shrink
from llm_workbook.files import asset
from llm_workbook.training import fine_tune
from llm_workbook.training.run_directory import begin_run, read_metrics, run_state
from llm_workbook.training.run_lock import lock_holder, run_lock
from llm_workbook.watching.diagnose import diagnose

PROGRAM = sys.executable, '-m', 'llm_workbook'


@pytest.fixture
def recipe(tmp_path):
    return Recipe(
        name='alone', model={'source': 'tiny-base'}, data={'source': 'sample-conversations'},
        cluster={'processes': 1}, sharding={'strategy': 'none'},
        batch={'micro': 1, 'length': 64}, optimizer={'steps': 400})


def environment():
    names = 'WORLD_SIZE', 'RANK', 'LOCAL_RANK', 'TORCHELASTIC_RUN_ID'
    return {name: value for name, value in os.environ.items() if name not in names}


def refused(folder, recipe, *words) -> tuple:
    "Exit code and errors of `train`."
    file = recipe.save(folder/'recipe.yaml')
    done = subprocess.run(
        [*PROGRAM, 'train', file, '--directory', folder/'run', *words],
        capture_output=True, text=True, timeout=120, env=environment())
    return done.returncode, done.stderr


def test_a_time_limit_that_cannot_be_is_refused_before_anything_is_read(recipe, tmp_path):
    start = time.monotonic()
    code, error = refused(tmp_path, recipe, '--step-timeout', '-1')
    assert code == 2
    assert "--step-timeout: '-1' must be more than 0 seconds" in error
    assert 'Traceback' not in error
    assert not (tmp_path/'run').exists()
    assert time.monotonic() - start < 30


@pytest.mark.parametrize('limit_s', [-1, 0, float('nan')])
def test_functions_refuse_it_too_before_the_rows_are_read(recipe, tmp_path, limit_s):
    lost = recipe.changed({'data.source': str(tmp_path/'none.jsonl')})
    for call in fine_tune.fine_tune, fine_tune.train_here:
        with pytest.raises(ValueError, match='step_timeout_s must be more than 0 seconds'):
            call(lost, tmp_path/'run', step_timeout_s=limit_s)
    assert not (tmp_path/'run').exists()


def test_rows_longer_than_the_base_has_positions_are_refused(recipe, tmp_path):
    lines = (asset('sample-conversations')/'train.jsonl').read_text().splitlines(keepends=True)
    (tmp_path/'rows.jsonl').write_text(''.join(lines[:20]))
    recipe = recipe.changed({'data.source': str(tmp_path/'rows.jsonl')})
    with pytest.raises(ValueError, match='batch.length is 513.*has 512 positions: set'):
        fine_tune.check_recipe(recipe.changed({'batch.length': 513}))
    assert fine_tune.check_recipe(recipe.changed({'batch.length': 512}))


@pytest.mark.slow
def test_what_a_user_did_wrong_is_one_line(recipe, tmp_path):
    lost = recipe.changed({'data.source': str(tmp_path/'none.jsonl')})
    code, error = refused(tmp_path, lost)
    assert (code, error.count('\n')) == (2, 1), error
    assert error.startswith('llm-workbook: ')
    with run_lock(tmp_path/'run'):
        code, error = refused(tmp_path, recipe)
    lines = [line for line in error.splitlines() if line.startswith('llm-workbook:')]
    assert code == 1, error
    assert 'is taken by process' in lines[-1]
    assert 'Traceback' not in error


def test_what_ascii_cannot_write_does_not_fail_a_command(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), 'ascii', write_through=True)
    monkeypatch.setattr('sys.stdout', output)
    monkeypatch.setattr(entry, 'main', lambda is_program: print('ok clocks ± 2 ms') or 0)
    monkeypatch.setattr('gc.disable', lambda: None)
    assert entry.program() == 0
    assert output.buffer.getvalue() == b'ok clocks ? 2 ms\n'


def test_another_base_under_a_checkpoint_is_one_line(monkeypatch, capfd):
    monkeypatch.setattr('sys.stdout', io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr('gc.disable', lambda: None)
    for name in ('WORLD_SIZE', 'RANK'): monkeypatch.delenv(name, raising=False)
    def fail(is_program): raise CheckpointError('checkpoint-2 was trained on a base with digest a')
    monkeypatch.setattr(entry, 'main', fail)
    assert entry.program() == 1
    expected = 'llm-workbook: checkpoint-2 was trained on a base with digest a\n'
    assert capfd.readouterr().err == expected


def test_an_option_without_a_value_and_the_commands_that_were_written(recipe, tmp_path, capsys):
    file = str(recipe.changed({'cluster.nodes': 2, 'sharding.strategy': 'ddp'}).save(
        tmp_path/'recipe.yaml'))
    words = ['render', file, str(tmp_path/'run')]
    with pytest.raises(ValueError, match='write --option time=VALUE'):
        entry.main([*words, '--option', 'time'])
    assert entry.main(words) == 0
    said = capsys.readouterr().out
    assert 'node 0 has no address' in said and 'sbatch: sbatch' in said
    assert entry.main([*words, '--head', 'node1']) == 0
    said = capsys.readouterr().out
    assert 'torchrun on node 1: ' in said and '--node-rank=1' in said


# What a terminal shows

STEP = r'step {} of 3: loss [\d.]+, gradient norm [\d.]+, [\d.]+ s a step, [\d,]+ s in all'


def terminal(folder, recipe, *launcher) -> list[str]:
    "Lines that `train` prints, without what libraries warn of."
    file = recipe.save(folder/'recipe.yaml')
    words = [sys.executable, '-m', *launcher, *PROGRAM[1:]] if launcher else PROGRAM
    done = subprocess.run(
        [*words, 'train', file, '--directory', folder/'run'], capture_output=True, text=True,
        timeout=300, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'gradient_checkpointing' not in done.stderr  # TRL sets it, and transformers warns
    return done.stdout.splitlines()


def matches(patterns, lines):
    return len(patterns) == len(lines) and all(
        re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines))


def test_a_terminal_shows_that_a_run_is_alive_and_where_its_result_is(recipe, tmp_path, warm):
    recipe = recipe.changed({
        'data.source': str(some_rows(tmp_path/'rows', 1200, 8)), 'data.format': 'messages',
        'optimizer.steps': 3, 'intervals.evaluation': 3})
    lines = terminal(tmp_path, recipe)
    expected = [
        r'alone begins: 1,200 rows, 8 held out, 1 a step, 1 rank; loading tiny-base',
        r'base loaded and checked; step 1 begins', STEP.format(1), STEP.format(2),
        r'held-out rows after step 3: loss [\d.]+, perplexity [\d.]+', STEP.format(3),
        rf'finished: {tmp_path}/run/adapters']
    assert matches(expected, lines), lines
    assert terminal(tmp_path, recipe) == [f'finished: {tmp_path}/run/adapters']
    assert [row['step'] for row in read_metrics(tmp_path/'run'/'metrics.jsonl')] == [1, 2, 3]
    assert run_state(tmp_path/'run') == {'state': 'finished', 'step': 3}


@pytest.mark.slow
def test_rank_0_alone_speaks_under_torchrun_and_in_the_loop(tmp_path, warm):
    recipe = shrink(Recipe.named('70b-2x4-h100-zero3-qlora-classifier')).changed({
        'optimizer.steps': 3, 'intervals.saving': 0, 'intervals.evaluation': 0,
        'intervals.logging': 1, 'sharding': {'strategy': 'ddp'}, 'zero': {}})
    lines = terminal(
        tmp_path, recipe, 'torch.distributed.run', '--standalone', '--nproc-per-node=2')
    said = [line for line in lines if re.match('step|base loaded|finished|.* begins: ', line)]
    assert [line.split(':')[0].split(' of')[0] for line in said] == [
        f'{recipe.name} begins', 'base loaded and checked; step 1 begins', 'step 1', 'step 2',
        'step 3', 'finished'], lines


def test_a_run_that_fails_in_a_terminal_leaves_its_error_for_the_doctor(recipe, tmp_path, warm):
    wild = recipe.changed({
        'optimizer.learning_rate': 1e30, 'optimizer.schedule': 'constant',
        'optimizer.warmup': 0.0})
    code, error = refused(tmp_path, wild)
    assert code == 1, error
    found = diagnose(tmp_path/'run')
    assert 'failed or killed after step' in found.read
    assert 'errors/rank-00000.txt of rank 0' in found.read
    assert 'The last error in it: FloatingPointError: loss nan at step' in found.read
    assert begin_run(wild, tmp_path/'run', resume=True).step == 0  # As the next start does
    assert 'no error that a rank has left' in diagnose(tmp_path/'run').read


# Ctrl-C

def started(folder, recipe):
    file = recipe.save(folder/'recipe.yaml')
    with open(folder/'log', 'w') as log:
        return subprocess.Popen(
            [*PROGRAM, 'train', file, '--directory', folder/'run'], stdout=log, stderr=log,
            env=environment())


def has_loaded(process, name) -> bool:
    try: return name in Path(f'/proc/{process.pid}/maps').read_text()
    except OSError: return False


def test_ctrl_c_during_imports_ends_at_once_and_says_so(recipe, tmp_path):
    process = started(tmp_path, recipe)
    try:
        assert wait_for(lambda: has_loaded(process, 'libtorch_python'), 60)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        assert process.wait(60) == -signal.SIGINT
        assert time.monotonic() - start < 15  # Under 1 s on a quiet machine
    finally: process.kill()
    log = (tmp_path/'log').read_text()
    assert 'interrupted while no step was under way' in log
    assert 'Traceback' not in log
    assert 'Error' not in log
    assert run_state(tmp_path/'run')['state'] == 'none'
    assert lock_holder(tmp_path/'run') == ''


@pytest.mark.slow
def test_ctrl_c_in_a_step_saves_it(recipe, tmp_path, warm):
    process = started(tmp_path, recipe)
    metrics = tmp_path/'run/metrics.jsonl'
    try:
        assert wait_for(lambda: metrics.exists() and metrics.read_text().count('\n') > 2, 90)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # A second one changes nothing
        assert process.wait(60) == 75, (tmp_path/'log').read_text()[-3000:]
    finally: process.kill()
    state = run_state(tmp_path/'run')
    assert (state['state'], state['step'] > 2) == ('preempted', True)
    assert manifest.latest_valid(tmp_path/'run', deep=True).name == f'checkpoint-{state["step"]}'
    log = (tmp_path/'log').read_text()
    assert 'interrupted: the run saves its next step' in log
    assert 'Traceback' not in log


# A rank without its agent

AGENT = """
import os, subprocess, sys
os.environ['TORCHELASTIC_RUN_ID'] = 'x'
rank = subprocess.Popen([sys.executable, '-c', sys.argv[1]])
print(rank.pid, flush=True)
rank.wait()
"""
RANK = """
import time
from llm_workbook.training.fine_tune import _end_with_agent
_end_with_agent()
open('ready', 'w').close()
time.sleep(60)
"""


def test_a_rank_ends_with_the_agent_that_started_it(tmp_path):
    agent = subprocess.Popen(
        [sys.executable, '-c', AGENT, RANK], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env=environment())
    rank = Path('/proc', agent.stdout.readline().strip())
    def is_alive():
        try: return (rank/'stat').read_text().rpartition(') ')[2][0] != 'Z'
        except OSError: return False
    assert wait_for((tmp_path/'ready').exists, 30)
    assert is_alive()
    agent.kill()
    agent.wait()
    assert wait_for(lambda: not is_alive(), 10)


def test_a_stop_under_torchrun_says_that_its_traceback_is_no_failure(
    recipe, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv('TORCHELASTIC_RUN_ID', raising=False)
    assert fine_tune._end(recipe, tmp_path, 0, {'preempted': 4}) == 75
    assert capsys.readouterr().out.endswith('goes on after step 4\n')
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'x')
    assert fine_tune._end(recipe, tmp_path, 0, {'preempted': 4}) == 75
    assert 'What torchrun prints below is no failure' in capsys.readouterr().out
    assert fine_tune._end(recipe, tmp_path, 1, {'preempted': 4}) == 75
    assert fine_tune._end(recipe, tmp_path, 0, {}) == 0
    assert 'torchrun prints' not in capsys.readouterr().out


# A plan of passes

@pytest.fixture
def passes(recipe):
    return recipe.changed({'optimizer.epochs': 2.0, 'optimizer.steps': None})


def test_a_plan_of_passes_counts_rows_that_are_here(passes, tmp_path, capsys):
    rows = some_rows(tmp_path/'rows', 10)
    asked = passes.changed({'data.source': str(rows), 'data.test_share': 0.0})
    file = str(asked.save(tmp_path/'mine.yaml'))
    assert entry.main(['plan', file, '--json']) == 0
    counted = capsys.readouterr()
    assert json.loads(counted.out)['recipe']['optimizer']['steps'] == 20
    assert '10 rows train' in counted.err and '`plan --rows 10`' in counted.err
    assert entry.main(['plan', file, '--json', '--rows', '30']) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)['recipe']['optimizer']['steps'] == 60
    assert 'rows train' not in told.err


@pytest.mark.parametrize('source, words', [
    ('gone.jsonl', "cannot be counted here: 'gone.jsonl' is no path here.*by --rows"),
    ('owner/rows', 'the number of rows that train decides .*--rows')])
def test_rows_that_are_not_here_are_asked_for(source, words, passes, tmp_path, monkeypatch):
    def fetched(*args): raise AssertionError('something was fetched')
    monkeypatch.setattr('datasets.load_dataset', fetched)
    file = passes.changed({'data.source': source}).save(tmp_path/'mine.yaml')
    with pytest.raises(ValueError, match=words): entry.main(['plan', str(file)])


def test_a_plan_of_steps_reads_no_rows(recipe, tmp_path, capsys):
    file = recipe.changed({'data.source': 'gone.jsonl'}).save(tmp_path/'mine.yaml')
    assert entry.main(['plan', str(file)]) == 0
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('rank', ['0', '1'])
def test_a_wrong_recipe_under_a_launcher_is_one_sentence_from_each_rank(tmp_path, rank):
    file = tmp_path/'mine.yaml'
    file.write_text(asset('recipes').joinpath('reviews-qlora.yaml').read_text() + 'warmup: 10\n')
    ranks = environment() | {'WORLD_SIZE': '2', 'RANK': rank, 'LOCAL_RANK': rank}
    ended = subprocess.run([*PROGRAM, 'train', str(file), '--directory', str(tmp_path/'run')],
                           env=ranks, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and ended.stderr.startswith('llm-workbook: 1 problem in ')
    assert 'Traceback' not in ended.stderr and not (tmp_path/'run').exists()
