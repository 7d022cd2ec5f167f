"""A run that was stopped and went on is the run that was not: loss, norm, learning rate and rows of
every step."""
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from trouble import slow_case, small_base, some_rows

from llm_workbook.__main__ import main as command
from llm_workbook.training import fine_tune as training
from llm_workbook.training import resume as resuming
from llm_workbook.training import run_directory
from llm_workbook.training import watchdog
from llm_workbook.training.run_lock import RunLocked, run_lock
from llm_workbook.checkpoint.manifest import survey
from llm_workbook.parallel.ranks import RankError
from llm_workbook.config.recipe import Recipe
from llm_workbook.training.resume import Preempted
from llm_workbook.training.run_directory import (
    Start, begin_run, mark_run, read_metrics, run_state, run_status, write_line)

ALONE = {'cluster.processes': 1, 'sharding.strategy': 'none'}
PLAIN = {'method.kind': 'lora', 'precision.compute': 'float32'}
WHOLE = {'method.kind': 'full', 'precision.compute': 'float32'}
ZERO = {
    'sharding.strategy': 'zero3', 'zero.persistence_threshold': 1000,
    'zero.reduce_bucket': 1_000_000, 'zero.prefetch_bucket': 1_000_000}
QUICK = {  # The page of `fine_tune` has two ranks
    'one process': (ALONE | PLAIN, 0),
    'one process, packed': (ALONE | PLAIN | {'batch.packing': True}, 0)}
SLOW = {  # tests/fault/test_resumed_runs.py runs them
    'ddp': (PLAIN | {'sharding.strategy': 'ddp'}, 1e-6),
    'zero3': (WHOLE | ZERO, 1e-6),
    'zero3, qlora': (ZERO, 1e-6),
    'zero2': (PLAIN | {'sharding.strategy': 'zero2'}, 1e-6),
    'one process, qlora': (ALONE, 0),
    'fsdp2, arriving': ({'sharding.loading': 'sharded'}, 1e-6),
    # Whole models under FSDP2 are stopped, killed and resumed in all other tests of faults
    'fsdp2, packed, dora': (PLAIN | {'batch.packing': True, 'method.dropout': 0.0,
                                     'method.dora': True, 'method.scaling': 'rslora'}, 1e-6),
}


@pytest.fixture(scope='module')
def recipe(tmp_path_factory):
    """QLoRA with dropout over two ranks: 23 rows, 8 steps of 4, of which the second pass begins
    with the seventh."""
    folder = tmp_path_factory.mktemp('small')
    some_rows(folder/'rows', 23)
    return Recipe(
        name='small', model={'source': str(small_base(folder/'base'))},
        data={'source': str(folder/'rows'), 'format': 'messages'}, method={'dropout': 0.1},
        batch={'micro': 1, 'length': 64, 'accumulation': 2},
        optimizer={'steps': 8, 'learning_rate': 3e-3})


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """Let every rank write down the rows and tokens of each forward pass, and do what `at` says
    before a step, once."""
    make, at = training.make_trainer, {}
    def make_watched(recipe, directory, *args):
        from transformers import TrainerCallback
        trainer = make(recipe, directory, *args)
        rank = int(os.environ['RANK'])
        class Act(TrainerCallback):
            def on_step_begin(self, args, state, control, **more):
                act = at.get((rank, state.global_step + 1))
                done = Path(directory, f'done-{state.global_step + 1}')
                if act and not done.exists():
                    done.touch()
                    act()
        step = trainer.training_step
        def step_that_notes(model, inputs, *more, **named):
            number = trainer.state.global_step + 1
            note = number, inputs['row'].tolist(), inputs['input_ids'].tolist()
            with open(Path(directory, f'rows-{rank}'), 'a') as file:
                file.write(json.dumps(note) + '\n')
            return step(model, inputs, *more, **named)
        trainer.training_step = step_that_notes
        trainer.add_callback(Act())
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_watched)
    return at


def run(recipe, directory, **how):
    return training.fine_tune(recipe, directory, 300, live=False, **how)


def send_signal(number=signal.SIGTERM): os.kill(os.getpid(), number)


def rows_taken(directory, ranks):
    return [(directory/f'rows-{rank}').read_text() for rank in range(ranks)]


def assert_same_metrics(a, b, tolerance):
    "Compare two lists of metrics, line by line."
    assert [m['step'] for m in a] == [m['step'] for m in b]
    largest = {
        key: max(abs(x[key] - y[key]) for x, y in zip(a, b))
        for key in ('loss', 'grad_norm', 'learning_rate')}
    assert [m['num_tokens'] for m in a] == [m['num_tokens'] for m in b]
    print(largest)
    assert max(largest.values()) <= tolerance
    assert [m['seconds'] for m in b] == sorted(m['seconds'] for m in b)


def stopped_and_resumed(recipe, at, folder, tolerance, act=send_signal):
    """Stop the last rank before step 4, in the middle of a pass over the rows, go on, and compare
    with a run that was left alone."""
    whole, ranks = run(recipe, folder/'whole'), recipe.cluster.ranks
    at[ranks - 1, 4] = act
    with pytest.raises(Preempted) as preempted: run(recipe, folder/'two')
    assert preempted.value.step == 4
    assert run_state(folder/'two') == {'state': 'preempted', 'step': 4}
    assert [found.step for found in survey(folder/'two').valid] == [4]
    resumed = run(recipe, folder/'two', resume=True)
    assert_same_metrics(whole.metrics, resumed.metrics, tolerance)
    assert rows_taken(folder/'whole', ranks) == rows_taken(folder/'two', ranks)
    assert resumed.ranks[0]['payload'] == whole.ranks[0]['payload']
    return resumed


@pytest.mark.parametrize('changes, tolerance', QUICK.values(), ids=QUICK)
def test_a_resumed_run_is_the_run_that_was_not_stopped(
    recipe, watched, tmp_path, changes, tolerance
):
    resumed = stopped_and_resumed(recipe.changed(changes), watched, tmp_path, tolerance)
    # It is finished: nothing happens, and nothing is refused
    again = run(resumed.recipe, resumed.directory, resume=True)
    assert again.metrics == resumed.metrics
    assert again.ranks == []
    assert run_state(again.directory)['state'] == 'finished'
    assert again.saved.is_dir()
    assert '8 steps' in repr(again)
    assert again._repr_html_()


@pytest.mark.slow
def test_killed_ranks_go_on_from_the_last_commit_and_nothing_is_there_twice(
    recipe, watched, tmp_path
):
    saving = recipe.changed({'intervals.saving': 2})
    whole = run(saving, tmp_path/'whole')
    assert [found.step for found in survey(tmp_path/'whole').valid] == [8, 6]
    watched[1, 6] = partial(send_signal, signal.SIGKILL)
    with pytest.raises(RankError, match='SIGKILL'): run(saving, tmp_path/'two')
    assert run_state(tmp_path/'two')['state'] == 'running'
    assert len(read_metrics(tmp_path/'two'/'metrics.jsonl')) == 5
    committed = survey(tmp_path/'two').valid[0].step
    assert committed in (2, 4)  # The save of step 4 may have been under way
    resumed = run(saving, tmp_path/'two', resume=True)
    assert_same_metrics(whole.metrics, resumed.metrics, 1e-6)
    assert weights(resumed) == weights(whole)


def weights(run): return (run.saved/'adapter_model.safetensors').read_bytes()


def test_a_run_killed_between_its_last_save_and_its_end_trains_no_step_more(recipe, tmp_path):
    saving = recipe.changed(ALONE | PLAIN | {'intervals.saving': 2, 'optimizer.steps': 4})
    whole = run(saving, tmp_path/'run')
    metrics, before = whole.metrics, weights(whole)
    shutil.rmtree(whole.saved)
    mark_run(whole.directory, 'running', 0)
    resumed = run(saving, tmp_path/'run', resume=True)
    assert resumed.metrics == metrics
    assert weights(resumed) == before


def other_ranks_take_the_same_rows_and_nearly_the_same_steps(recipe, watched, tmp_path):
    # That ranks divide: else one fills up the end of a pass and the other does not
    rows = some_rows(tmp_path/'rows', 24)
    plain = recipe.changed(WHOLE | {'method.dropout': 0.0, 'data.source': str(rows)})
    whole = run(plain, tmp_path/'whole')
    watched[0, 4] = send_signal
    with pytest.raises(Preempted): run(plain, tmp_path/'two')
    alone = plain.changed(ALONE | {'batch.accumulation': 4})
    with pytest.raises(ValueError, match="sharding.strategy was 'fsdp2' and is 'none'"):
        run(alone, tmp_path/'two', resume=True)
    alone = plain.changed({'cluster.processes': 1, 'batch.accumulation': 4})
    assert_same_metrics(whole.metrics, run(alone, tmp_path/'two', resume=True).metrics, 1e-4)


# Refused, or nothing to do

def test_a_changed_recipe_is_refused_with_the_fields(recipe, tmp_path):
    begin_run(recipe, tmp_path/'run')
    before = {path: path.read_bytes() for path in (tmp_path/'run').rglob('*') if path.is_file()}
    for changes, words in (
        ({'optimizer.learning_rate': 1e-3}, r'optimizer.learning_rate was 0.003 and is 0.001'),
        ({'method.rank': 8, 'seed': 1}, r'method.rank was 16 and is 8; seed was 0 and is 1'),
        ({'batch.micro': 2}, r'rows per step were 4 and are 8'),
        ({'optimizer.steps': 9}, r'optimizer.steps was 8 and is 9')
    ):
        with pytest.raises(ValueError, match=words):
            run(recipe.changed(changes), tmp_path/'run', resume=True)
    paths = [path for path in (tmp_path/'run').rglob('*')
             if path.is_file() and path.name != '.llmw.lock']
    assert {path: path.read_bytes() for path in paths} == before
    allowed = recipe.changed(
        {'intervals.saving': 3, 'cluster.processes': 1, 'batch.accumulation': 4})
    assert begin_run(allowed, tmp_path/'run', resume=True) == Start()


def test_checkpoints_without_a_recipe_are_no_run(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(
        run_directory, 'latest_valid', lambda directory, deep: directory/'checkpoint-3')
    monkeypatch.setattr(run_directory, '_for_ranks', lambda checkpoint, recipe: checkpoint)
    with pytest.raises(ValueError, match='holds checkpoint-3 and no recipe.yaml: it is no run'):
        begin_run(recipe, tmp_path, resume=True)
    assert list(tmp_path.iterdir()) == []


def test_the_first_start_may_ask_to_resume(recipe, tmp_path, caplog):
    assert begin_run(recipe, tmp_path/'new', resume=True) == Start()
    assert run_state(tmp_path/'new')['state'] == 'running'
    # Killed before its first save
    (tmp_path/'new'/'metrics.jsonl').write_text('{"step": 1, "loss": 3.5}\n{"step": 2, "lo')
    assert begin_run(recipe, tmp_path/'new', resume=True) == Start()
    assert (tmp_path/'new'/'metrics.jsonl').read_text() == ''
    assert (
        'no checkpoint was committed: starting again at step 0, 1 lines of metrics dropped'
        in caplog.text)


def test_a_flipped_bit_in_the_newest_checkpoint_is_named_and_the_one_before_is_used(
    recipe, tmp_path, caplog
):
    saving = recipe.changed(ALONE | PLAIN | {'intervals.saving': 2, 'optimizer.steps': 4})
    whole = run(saving, tmp_path/'run')
    metrics, before = whole.metrics, weights(whole)
    flipped = next((tmp_path/'run/checkpoint-4/optimizer').glob('*.safetensors'))
    data = bytearray(flipped.read_bytes())
    data[-100] ^= 1
    flipped.write_bytes(data)
    shutil.rmtree(whole.saved)
    mark_run(whole.directory, 'running', 4)
    resumed = run(saving, tmp_path/'run', resume=True)
    assert 'skipped checkpoint-4' in caplog.text
    assert flipped.name in caplog.text
    assert 'is not what was committed' in caplog.text
    assert_same_metrics(metrics, resumed.metrics, 0)
    assert weights(resumed) == before
    assert (tmp_path/'run/checkpoint-4.aside-0').is_dir()


@pytest.mark.parametrize(
    'text', ['', '{"state": ', '[]', '{"state": "running"}', '{"state": "running", "step": "far"}'])
def test_a_broken_run_json_says_what_to_do(recipe, tmp_path, text):
    (tmp_path/'run').mkdir()
    (tmp_path/'run/run.json').write_text(text)
    for act in run_state, run_status, partial(begin_run, recipe):
        with pytest.raises(
            ValueError, match='run/run.json is broken .*: delete it; the checkpoints say'
        ):
            act(tmp_path/'run')


@pytest.mark.parametrize('asked', ['x.yaml', Path('x.yaml'), {'name': 'x'}, None], ids=repr)
def test_what_is_no_recipe_is_told_how_to_become_one(asked, tmp_path):
    with pytest.raises(ValueError, match=r'is no Recipe: Recipe.load\(path\) reads one'):
        run(asked, tmp_path/'run')
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_without_a_method_that_is_replaced_is_refused():
    for missing in resuming._HOOKS:
        later = type(
            'LaterTrainer', (), {name: None for name in resuming._HOOKS if name != missing})
        with pytest.raises(
            ValueError, match=f'is no trainer of transformers .*: it has no {missing}$'
        ):
            resuming.resumable(later)


# Sessions that end

def leave_session():
    "Let the clock of this rank be a quarter of an hour further; the hang watch allows 20 minutes."
    clock = vars(time) | {'monotonic': lambda: time.monotonic() + 900}
    watchdog.time = SimpleNamespace(**clock)


@pytest.mark.slow
def test_a_session_ends_as_a_signal_does_and_the_next_one_goes_on(recipe, watched, tmp_path):
    limited = recipe.changed({'intervals.session_h': 0.2, 'sharding.strategy': 'ddp'})
    stopped_and_resumed(limited, watched, tmp_path, 1e-6, leave_session)


def test_the_seconds_of_loading_are_seconds_of_the_session(recipe, tmp_path):
    short = recipe.changed(ALONE | PLAIN | {'intervals.session_h': 1e-6})
    with pytest.raises(Preempted, match='preempted before its first step'):
        run(short, tmp_path/'run')
    endless = short.changed({'intervals.session_h': 0})
    assert len(run(endless, tmp_path/'run', resume=True).metrics) == 8


# Signals before the first step, and after the last

@pytest.mark.slow
def test_a_signal_while_weights_are_loaded_ends_the_run_before_its_first_step(
    recipe, tmp_path, monkeypatch, capsys
):
    make = training.make_trainer
    def signal_and_make(*args):
        if os.environ['RANK'] == '1': send_signal()
        return make(*args)
    with monkeypatch.context() as patch:
        patch.setattr(training, 'make_trainer', signal_and_make)
        with pytest.raises(Preempted, match='preempted before its first step') as preempted:
            run(recipe, tmp_path/'run')
    assert preempted.value.step == 0
    assert run_state(tmp_path/'run') == {'state': 'preempted', 'step': 0}
    assert read_metrics(tmp_path/'run/metrics.jsonl') == []
    assert survey(tmp_path/'run').found == ()
    assert command(['train', 'no.yaml', '--directory', str(tmp_path/'run'), '--status']) == 75
    assert 'preempted at step 0; no step is committed; no run holds it' in capsys.readouterr().out
    assert len(run(recipe, tmp_path/'run', resume=True).metrics) == 8


def test_a_signal_while_the_result_is_saved_changes_nothing(recipe, tmp_path, monkeypatch):
    save = resuming.save_adapters
    def save_under_signals(*args):
        send_signal()
        send_signal(signal.SIGUSR1)
        return save(*args)
    monkeypatch.setattr(resuming, 'save_adapters', save_under_signals)
    two = recipe.changed({'optimizer.steps': 2})
    assert len(run(two, tmp_path/'run').metrics) == 2
    assert run_state(tmp_path/'run') == {'state': 'finished', 'step': 2}


def test_a_disk_that_is_full_at_the_end_is_said_in_words(recipe, tmp_path, monkeypatch):
    save = resuming.save_adapters
    def save_without_room(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # Of a file: as on a full disk
        return save(*args)
    monkeypatch.setattr(resuming, 'save_adapters', save_without_room)
    words = r"'adapters' is not saved: it needs more and the disk has [\d,]+ free .*make room"
    with pytest.raises(RankError, match=words):
        run(recipe.changed({'optimizer.steps': 2}), tmp_path/'run')
    assert run_state(tmp_path/'run')['state'] == 'running'


def test_the_status_says_who_holds_the_run(tmp_path):
    mark_run(tmp_path, 'running', 0)
    write_line(tmp_path/'metrics.jsonl', {'step': 16})
    with run_lock(tmp_path): code, words = run_status(tmp_path)
    assert (code, words.partition(';')[0]) == (4, 'running at step 16')
    assert f'held by process {os.getpid()}' in words
    code, words = run_status(tmp_path)  # As after a kill: the file still says that it runs
    dead = 'failed or killed after step 16, goes on from step 0'
    assert (code, words.partition(';')[0]) == (1, dead)
    (tmp_path/'run.json').unlink()
    assert run_status(tmp_path) == (1, 'none at step 0; no step is committed; no run holds it')


def test_a_start_waits_for_whoever_only_asks_for_the_status(tmp_path):
    with run_lock(tmp_path): pass
    with open(tmp_path/'.llmw.lock') as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, fcntl.flock, (asking, fcntl.LOCK_UN))
        timer.start()
        with run_lock(tmp_path): assert not timer.is_alive()
        timer.join()
        fcntl.flock(asking, fcntl.LOCK_EX)
        begin = time.monotonic()
        with pytest.raises(RunLocked), run_lock(tmp_path): pass
        assert time.monotonic() - begin < 0.5


def test_a_run_that_ends_while_it_is_asked_for_stands_as_it_ended(tmp_path, monkeypatch):
    def holder_that_ends(directory):
        mark_run(directory, 'preempted', 0)
        return ''
    mark_run(tmp_path, 'running', 0)
    monkeypatch.setattr('llm_workbook.training.run_directory.lock_holder', holder_that_ends)
    code, words = run_status(tmp_path)
    assert (code, words.partition(';')[0]) == (75, 'preempted at step 0')


# A full fine-tune

@pytest.mark.parametrize(
    'changes', [{}, slow_case({'sharding.strategy': 'ddp'}), slow_case({'intervals.saving': 2})],
    ids=['fsdp2', 'ddp', 'saved'])
def test_a_whole_model_is_written_without_gathering_it(recipe, tmp_path, monkeypatch, changes):
    from torch.distributed.checkpoint import state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer
    def gathered(*args, **how): raise AssertionError('the model was gathered')
    for name in 'get_model_state_dict', 'get_state_dict':
        monkeypatch.setattr(state_dict, name, gathered)
    asked = recipe.changed(WHOLE | {'optimizer.steps': 2} | changes)
    done = run(asked, tmp_path/'run')
    assert sorted(p.name for p in done.saved.iterdir() if p.suffix == '.safetensors') == [
        'model.safetensors']
    model = AutoModelForCausalLM.from_pretrained(done.saved)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == done.ranks[0]['saved']
    assert AutoTokenizer.from_pretrained(done.saved).chat_template
    assert not (tmp_path/'run/.whole').exists()
    assert [f.step for f in survey(tmp_path/'run').valid] == (
        [2] if 'intervals.saving' in changes else [])


# The program

def program(recipe, directory, *words, ranks=1, **how):
    file = directory.parent/'asked.yaml'
    recipe.save(file)
    launch = (
        ['-m', 'torch.distributed.run', '--standalone', f'--nproc-per-node={ranks}']
        if ranks > 1
        else [])
    command = [
        sys.executable, *launch, '-m', 'llm_workbook', 'train', str(file), '--directory',
        str(directory), *words]
    env = os.environ | {
        'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false',
        'GLOO_SOCKET_IFNAME': 'lo'}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, **how)


def make_result(directory):
    "Put a file where a finished run has its adapters."
    (directory/'adapters').mkdir()
    (directory/'adapters'/'adapter_model.safetensors').touch()


def test_the_status_says_by_its_code_what_to_do(recipe, tmp_path):
    for state, code in (None, 1), ('running', 1), ('preempted', 1), ('finished', 0):
        if state:
            begin_run(recipe, tmp_path/'run', resume=True)
            mark_run(tmp_path/'run', state, 3)
        if state == 'finished': make_result(tmp_path/'run')
        assert command(['train', 'no.yaml', '--directory', str(tmp_path/'run'), '--status']) == code


def test_a_program_with_the_wrong_number_of_ranks_says_how_to_start_it(
    recipe, tmp_path, monkeypatch
):
    asked = recipe.changed({'cluster.processes': 8})
    asked.save(tmp_path/'asked.yaml')
    with pytest.raises(
        ValueError,
        match='asks for 8 ranks, and this start has 1: start it with '
              'torchrun --nproc-per-node 8 -m llm_workbook train RECIPE --directory .*/run, or'
    ):
        command(['train', str(tmp_path/'asked.yaml'), '--directory', str(tmp_path/'run')])
    typed = ['train', str(tmp_path/'asked.yaml'), '--directory', 'run one']
    monkeypatch.setattr('sys.argv', ['llm-workbook', *typed])
    words = r"-m llm_workbook train \S+/asked.yaml --directory 'run one', or change"
    with pytest.raises(ValueError, match=words): command(typed)
    assert not (tmp_path/'run').exists()


@pytest.mark.slow
def test_a_signal_to_a_script_reaches_the_ranks_which_save(recipe, tmp_path, warm):
    long = recipe.changed(PLAIN | {'optimizer.steps': 2000, 'optimizer.warmup': 0.0})
    long.save(tmp_path/'recipe.yaml')
    script = (
        'from llm_workbook import Recipe, fine_tune\n'
        'from llm_workbook.training.resume import Preempted\n'
        f'try: fine_tune(Recipe.load({str(tmp_path/"recipe.yaml")!r}), {str(tmp_path/"run")!r}, '
        f'live=False)\n'
        'except Preempted as told: print("step", told.step)\n')
    env = os.environ | {'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1'}
    with subprocess.Popen(
        [sys.executable, '-c', script], stdout=subprocess.PIPE, text=True, env=env
    ) as job:
        try:
            end = time.monotonic() + 120
            while (
                len(read_metrics(tmp_path/'run/metrics.jsonl')) < 3
                and time.monotonic() < end
                and job.poll() is None
            ):
                time.sleep(0.1)
            # As `timeout` does: once to the child, once to its group
            job.send_signal(signal.SIGTERM)
            job.send_signal(signal.SIGTERM)
            printed = job.communicate(timeout=100)[0]
        finally: job.kill()
    step = run_state(tmp_path/'run')['step']
    assert job.returncode == 0
    assert printed == f'step {step}\n'
    assert step >= 3
    assert survey(tmp_path/'run').valid[0].step == step


def test_a_script_whose_ranks_know_no_signal_ends_of_it(tmp_path):
    script = (
        'import time\nfrom pathlib import Path\nfrom llm_workbook.parallel.ranks import run_ranks\n'
        f'run_ranks(lambda: (Path({str(tmp_path/"there")!r}).touch(), time.sleep(100)), 2, (), '
        f'90)\n'
    )
    with subprocess.Popen(
        [sys.executable, '-c', script], env=os.environ | {'TMPDIR': str(tmp_path)}
    ) as job:
        try:
            end = time.monotonic() + 60
            while not (tmp_path/'there').exists() and time.monotonic() < end: time.sleep(0.05)
            time.sleep(0.5)
            job.terminate()
            assert job.wait(30) == -signal.SIGTERM
        finally: job.kill()
    assert [path.name for path in tmp_path.iterdir()] == ['there']


@pytest.mark.slow
def test_a_program_that_is_told_before_its_first_step_ends_with_75_and_goes_on_later(
    recipe, tmp_path
):
    alone = recipe.changed(ALONE | PLAIN | {'optimizer.steps': 2})
    alone.save(tmp_path/'asked.yaml')
    command = [
        sys.executable, '-m', 'llm_workbook', 'train', str(tmp_path/'asked.yaml'), '--directory',
        str(tmp_path/'run')]
    env = {
        name: value for name, value in os.environ.items() if name not in ('RANK', 'WORLD_SIZE')
    } | {'HF_HUB_OFFLINE': '1'}
    with subprocess.Popen(command, env=env) as job:
        try:
            end = time.monotonic() + 60
            while not (tmp_path/'run/run.json').exists() and time.monotonic() < end:
                time.sleep(0.02)
            job.send_signal(signal.SIGUSR1)  # Nothing is loaded yet
            assert job.wait(90) == 75
        finally: job.kill()
    assert run_state(tmp_path/'run') == {'state': 'preempted', 'step': 0}
    assert len(run(alone, tmp_path/'run', resume=True).metrics) == 2


@pytest.mark.slow
def test_a_program_of_one_rank_needs_no_torchrun_to_shard(recipe, tmp_path, warm):
    ended = program(recipe.changed({'cluster.processes': 1, 'optimizer.steps': 2}), tmp_path/'run')
    assert ended.returncode == 0, ended.stderr
    assert run_state(tmp_path/'run') == {'state': 'finished', 'step': 2}, ended.stderr


def test_a_finished_run_takes_no_more_steps(tmp_path):
    recipe = Recipe.named('reviews-qlora').changed(
        {'optimizer.steps': 4, 'optimizer.schedule': 'constant'})
    begin_run(recipe, tmp_path)
    assert begin_run(recipe.changed({'optimizer.steps': 6}), tmp_path, resume=True) == Start(0)
    mark_run(tmp_path, 'finished', 4)
    make_result(tmp_path)
    assert begin_run(recipe, tmp_path, resume=True).finished
    with pytest.raises(ValueError, match='finished at step 4: .* takes no more steps'):
        begin_run(recipe.changed({'optimizer.steps': 6}), tmp_path, resume=True)


def test_more_steps_are_the_same_run_only_with_the_same_steps_of_warm_up(tmp_path):
    recipe = Recipe.named('reviews-qlora').changed(
        {'optimizer.steps': 100, 'optimizer.schedule': 'constant', 'optimizer.warmup': 0.1})
    begin_run(recipe, tmp_path)
    with pytest.raises(ValueError, match='optimizer.steps was 100 and is 200'):
        begin_run(recipe.changed({'optimizer.steps': 200}), tmp_path, resume=True)
    assert begin_run(
        recipe.changed({'optimizer.steps': 200, 'optimizer.warmup': 0.05}), tmp_path, resume=True
    ) == Start(0)
    with pytest.raises(ValueError, match='optimizer.warmup was 0.1 and is 0.2'):
        begin_run(recipe.changed({'optimizer.warmup': 0.2}), tmp_path, resume=True)
