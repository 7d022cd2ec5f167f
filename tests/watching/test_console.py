"""The console: what it says of a run, of a job and of trouble, and how its widget follows; no
browser, and no real run."""
import base64
import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from trouble import wait_for

from llm_workbook.config.recipe import Recipe
from llm_workbook.training.run_directory import RunFiles, mark_run, mark_stage, run_status
from llm_workbook.training.run_lock import run_lock
from llm_workbook.watching.console import Console
from llm_workbook.watching.metrics import sample_metrics
from llm_workbook.watching.moment import ConsoleState, log_html
from llm_workbook.watching.sources import console_state, run_source

METRICS = [{'step': n, 'loss': 3 / n, 'seconds': 2. * n} for n in range(1, 5)]


NUMBERS = count()  # A console follows one run of a directory


class Beside:
    "What `Launched` shows to a console."
    error, saved_step = '', None

    def __init__(self, ranks=2):
        self.directory = Path(f'nowhere-{next(NUMBERS)}')
        self.recipe = SimpleNamespace(
            name='small', cluster=SimpleNamespace(ranks=ranks), optimizer=SimpleNamespace(steps=8))
        self.state = 'running'
        self.metrics = []
        self.stopped = 0
        self.texts = ['' for _ in range(ranks)]

    def log(self, rank=0, most_b=2**16): return self.texts[rank][-most_b:]

    def stop(self):
        self.stopped += 1
        self.state = 'stopping'


class Job:
    "What a job shows to a console."
    name, steps, metrics, directory = 'big', 100, METRICS, Path('nowhere-job')
    # Of SLURM: state, reason, whether it has ended; or an error
    answer = 'PENDING', 'Priority', False
    stopped = 0

    def status(self):
        if isinstance(self.answer, Exception): raise self.answer
        state, reason, ended = self.answer
        return SimpleNamespace(
            state=state, reason=reason, ended=ended, step=4,
            run='preempted' if ended else 'running')

    def logs(self, lines=40): return 'from all ranks\n'

    def cancel(self):
        self.stopped = 1
        self.answer = 'CANCELLED', '', True


@pytest.fixture
def run():
    made = Beside()
    yield made
    made.state = 'finished'
    assert wait_for(lambda: not [t for t in threading.enumerate() if t.name == 'console'], 10)


# Without a widget

def test_a_moment_of_a_run_says_how_it_stands(run):
    assert console_state(run).line == 'small: starts, step 0 of 8'
    assert not console_state(run).ended
    run.metrics = METRICS
    state = console_state(run)
    assert state.line == 'small: running, step 4 of 8, loss 0.750, trained for 8 s, about 8 s left'
    run.state = 'preempted'
    assert console_state(run).line == 'small: preempted, step 4 of 8, loss 0.750, trained for 8 s'
    assert console_state(run).ended
    assert json.loads(json.dumps(state.to_dict()))['line'] == state.line == repr(state)
    run.metrics = [{'step': 2}]  # A line without a loss
    assert console_state(run).line == 'small: preempted, step 2 of 8'


def test_a_moment_of_a_job():
    job = Job()
    state = console_state(job)
    assert (state.state, state.ended, state.steps, [*state.logs]) == (
        'pending Priority', False, 100, ['all ranks'])
    job.answer = RuntimeError('squeue has not answered for 60 s')
    state = console_state(job)
    assert state.state == 'out of sight'
    assert not state.ended
    assert 'squeue has not answered' in state._repr_html_()


def test_what_ranks_print_cannot_become_part_of_the_page(run):
    run.texts = [
        '<script>alert(1)</script>\n\x1b[31mred\x1b[0m\n 10%|#  |\r100%|###|\n',
        'x' * 10**6 + '\nlast\n/opt/env/lib/python3.11/site-packages/trl/x.py:1: Warning',
    ]
    html = console_state(run)._repr_html_()
    assert '<script' not in html
    assert '&lt;script&gt;' in html
    assert '\x1b' not in html
    assert ' 10%' not in html
    assert '100%' in html
    assert '\ntrl/x.py:1: Warning' in html
    assert len(html) < 100_000
    assert html.count('<details>') == 2
    run.recipe.name = '<img src=x>'
    assert '<img' not in console_state(run)._repr_html_()


@pytest.mark.parametrize(
    'ended, colour', [('finished', '009E73'), ('failed', 'D55E00'), ('preempted', 'E69F00')])
def test_the_state_is_a_word_and_a_colour(ended, colour):
    html = ConsoleState('small', ended, True, 8, (), {})._repr_html_()
    assert ended in html
    assert colour in html
    assert 'role="status"' in html


@pytest.mark.parametrize('wrong', [None, 7, object()])
def test_what_is_no_run_is_refused(wrong):
    with pytest.raises(ValueError, match='no run that can be watched'): console_state(wrong)
    with pytest.raises(ValueError, match='no run that can be watched'): Console(wrong)


def test_a_directory_without_a_run_is_refused(tmp_path):
    for directory in (tmp_path, tmp_path/'absent', str(tmp_path)):
        with pytest.raises(ValueError, match='no run has begun there'): console_state(directory)


def test_a_run_that_failed_says_why(run):
    run.state, run.error, run.metrics = 'failed', "ValueError: 'a' <holds> a run already", METRICS
    state = console_state(run)
    html = console_state(run)._repr_html_()
    assert state.line == 'small: failed, step 4 of 8, loss 0.750, trained for 8 s'
    assert 'a&#x27; &lt;holds&gt; a run already' in html
    assert html.index('failed, step 4') < html.index('&lt;holds&gt;')
    assert json.loads(json.dumps(state.to_dict()))['error'] == run.error
    run.error = 'x' * 10**6
    assert len(console_state(run)._repr_html_()) < 100_000


def test_a_run_that_was_stopped_says_what_is_saved_and_how_to_go_on(run):
    run.state, run.saved_step, run.metrics = 'preempted', 3, METRICS
    assert console_state(run).line == (
        'small: stopped and saved at step 3 of 8, loss 0.750, trained for 8 s; '
        'launch(..., resume=True) goes on')
    run.saved_step, run.metrics = 0, []
    assert console_state(run).line == 'small: stopped before its first step was saved, at step 0'


def test_long_decimals_of_a_log_are_shortened(run):
    run.texts = [
        '{"loss": 2.7182818284590452, "seconds": 1.5, "rate": 3.0000000000000001e-05, "version": '
        '"1.23456789.4"}',
        '']
    html = console_state(run)._repr_html_()
    assert 'loss 2.71828, seconds 1.5, rate 3e-05, version' in html
    assert '1.23456789.4' in html
    assert '{' not in log_html(run.texts[0])
    nested = '{"recipe": {"steps": 3}}'
    assert '{&quot;recipe&quot;: steps 3}' in log_html(nested)


# The picture

def state_of(losses, **more):
    rows = tuple({'step': n, 'loss': loss} for n, loss in enumerate(losses, 1))
    return ConsoleState('small', 'running', False, 1000, rows, **more)


def drawn_svg(html):
    "The picture that the first image of `html` carries."
    data = re.search(r'src="data:image/svg\+xml;base64,([^"]*)"', html)[1]
    return ElementTree.fromstring(base64.b64decode(data))


@pytest.mark.parametrize('losses', [
    [1.], [0.], [-1., 2.], [float('nan'), 3.], [float('inf'), 2.], [1., 1.], [1e-9, 1e9],
    [2 + .0001 * n for n in range(5)], [3 / n for n in range(1, 20_001)]])
def test_a_curve_stays_in_its_picture_whatever_the_loss_does(losses):
    html = state_of(losses).picture_html
    drawn = [loss for loss in losses if 0 < loss < float('inf')]
    assert html.count('<img') == (1 if drawn else 0)
    assert len(html) < 30_000
    if not drawn: return
    svg = drawn_svg(html)
    curves = [path.get('d') for path in svg if path.get('fill') == 'none']
    assert len(curves) == 2
    for x, y in re.findall(r'([\d.-]+) ([\d.-]+)', ' '.join(curves)):
        assert 44 <= float(x) <= 324.1
        assert 20 <= float(y) <= 140.1
    assert len([part for part in svg if part.tag.endswith('text')]) >= 4


def test_a_loss_that_falls_tenfold_falls_as_far_on_the_axis_each_time():
    "On a linear axis the second fall would be a tenth of the first."
    svg = drawn_svg(state_of([10., 1., .1]).picture_html)
    thin = next(path.get('d') for path in svg if path.get('fill') == 'none')
    high = [float(y) for y in re.findall(r'[ML][\d.]+ ([\d.]+)', thin)]
    assert high[1] - high[0] == pytest.approx(high[2] - high[1], abs=.2)
    assert high[1] - high[0] > 20


def test_a_picture_has_no_ground_and_words_that_read_on_light_and_dark():
    html = state_of([2., 1.]).picture_html
    assert drawn_svg(html).get('fill') == '#767676'
    assert 'background' not in html
    assert '<svg' not in html  # JupyterLab takes it out of a notebook that is not trusted


@pytest.fixture
def sampled(tmp_path):
    "A run that never was, in a directory."
    directory = tmp_path/'sample'
    sample_metrics(directory, ranks=2, steps=30)
    recipe = Recipe.named('reviews-qlora').changed({'optimizer.steps': 40})
    recipe.save(RunFiles(directory).recipe)
    rows = [{'step': n, 'loss': 3 / n, 'seconds': .5 * n} for n in range(1, 31)]
    RunFiles(directory).metrics.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    mark_run(directory, 'running', 0)
    return directory


def test_every_rank_has_a_row_and_memory_stands_beside_the_plan(sampled):
    state = console_state(sampled)
    html = state._repr_html_()
    assert sorted(state.ranks) == [0, 1]
    assert [step for step, _ in state.speed] == list(range(1, 31))
    line = state.ranks[1]
    assert f'{line["tokens_per_s"]:,.0f}</td>' in html
    share = line['memory_b']['optimizer'] / state.planned['optimizer']
    assert f'{share:.0%}</td>' in html
    assert 'GPU peak' not in html  # Nobody can fill it on a CPU
    assert 'communication' in html


def test_a_plan_waits_until_the_run_has_written_its_recipe(sampled):
    source = run_source(sampled)
    text = RunFiles(sampled).recipe.read_text()
    RunFiles(sampled).recipe.unlink()
    source.count()
    assert source.look().planned == {}
    RunFiles(sampled).recipe.write_text(text)
    source.count()
    assert source.look().planned['optimizer'] > 0


def test_lines_half_written_and_ranks_that_come_later_are_no_trouble(sampled):
    source = run_source(sampled)
    with RunFiles(sampled).rank_metrics(1).open('a') as lines: lines.write('{"step": 31, "lo')
    assert source.look().ranks[1]['step'] == 30
    text = RunFiles(sampled).rank_metrics(1).read_text().splitlines()[0]
    RunFiles(sampled).rank_metrics(2).write_text(text + '\n')
    state = source.look()
    assert sorted(state.ranks) == [0, 1, 2]
    assert [step for step, _ in state.speed] == [1]  # What all have done


def test_while_it_imports_and_loads_it_says_so(sampled):
    RunFiles(sampled).metrics.unlink()
    with run_lock(sampled):
        for stage, words in (
            ('importing', 'imports its libraries'), ('loading', 'loads the model and the rows'),
            ('training', 'running'), ('evaluating', 'evaluates'), ('saving', 'saves'),
        ):
            mark_stage(sampled, stage)
            line = re.sub(r' for \d+ s', '', console_state(sampled).line)  # On a busy machine
            assert line == f'reviews-qlora: {words}, step 0 of 40'
    file = RunFiles(sampled).stage
    file.write_text(json.dumps({'stage': 'loading', 'since': time.time() - 75}))
    with run_lock(sampled):
        assert 'loads the model and the rows for 75 s' in console_state(sampled).line


# A run of another process

HOLDER = """
import signal, sys
from llm_workbook.training.run_directory import mark_run
from llm_workbook.training.run_lock import run_lock
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
with run_lock(sys.argv[1]):
    print('held', flush=True)
    signal.sigwait({signal.SIGTERM})
    mark_run(sys.argv[1], 'preempted', 30)
"""


def test_a_run_of_another_process_is_watched_stopped_and_seen_again(sampled):
    pytest.importorskip('ipywidgets')
    other = subprocess.Popen(
        [sys.executable, '-c', HOLDER, sampled], stdout=subprocess.PIPE, text=True)
    try:
        other.stdout.readline()
        console = Console(str(sampled))
        assert console.state.state == 'running'
        assert 'step 30 of 40' in console.head.value
        console.button.click()
        assert wait_for(lambda: console.button.description == 'Ended')
        assert 'stopped and saved at step 30 of 40' in console.head.value
        assert 'resume=True) goes on' in console.head.value or 'resume=True goes on' in (
            console.head.value)
        assert other.wait(10) == 0
    finally:
        other.kill()
        other.wait()
    again = Console(sampled)
    assert again.button.disabled
    assert again.picture.value.count('<img') == console.picture.value.count('<img') == 2


def test_a_run_that_ends_while_it_is_looked_at_is_not_called_failed(sampled, monkeypatch):
    def holder_that_ends(directory):
        mark_run(directory, 'preempted', 30)
        return run_status(directory)
    mark_run(sampled, 'running', 30)
    source = run_source(sampled)
    monkeypatch.setattr('llm_workbook.watching.sources.run_status', holder_that_ends)
    assert source.standing().state == 'preempted'


def test_a_run_of_another_process_that_was_killed_says_what_its_log_says(sampled):
    state = console_state(sampled)
    assert (state.state, state.ended) == ('failed', True)
    assert 'no process holds the run any more: its logs name no error' in state.error
    (sampled/'logs').mkdir()
    (sampled/'logs/rank-1.log').write_text(
        'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: first\n'
        'torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\nbye\n')
    assert 'torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB' in console_state(sampled).error


def test_only_a_process_of_this_machine_that_trains_is_asked_to_stop(sampled, monkeypatch):
    told = []
    monkeypatch.setattr(os, 'kill', lambda *words: told.append(words))
    source = run_source(sampled)
    with pytest.raises(RuntimeError, match='nothing to stop'): source.stop()
    with run_lock(sampled):
        name = socket.gethostname()
        monkeypatch.setattr(socket, 'gethostname', lambda: 'elsewhere')
        with pytest.raises(RuntimeError, match=f'process {os.getpid()} on {name}: stop it there'):
            source.stop()
        monkeypatch.setattr(socket, 'gethostname', lambda: name)
        rows = RunFiles(sampled).metrics.read_text()
        RunFiles(sampled).metrics.write_text('')
        with pytest.raises(RuntimeError, match='no step yet'): source.stop()
        assert told == []
        RunFiles(sampled).metrics.write_text(rows)
        source.stop()
    assert [pid for pid, _ in told] == [os.getpid()]


def test_a_job_is_found_by_its_directory(sampled):
    record = {'id': '7', 'name': 'big', 'steps': 40, 'submitted': '2026-01-01'}
    (sampled/'job.json').write_text(json.dumps(record))
    source = run_source(sampled)
    found = type(source).__name__, source.name, source.tabs
    assert found == ('_JobSource', 'big', ('all ranks',))


# The widget

def test_the_button_keeps_its_place_whatever_the_line_says(run):
    pytest.importorskip('ipywidgets')
    console = Console(run)
    top = console.box.children[0]
    assert top.children == (console.button, console.head)  # What grows stands behind
    assert top.layout.align_items == 'flex-start'
    assert (console.button.layout.flex, console.button.layout.width) == ('0 0 auto', '140px')
    assert (console.head.layout.flex, console.head.layout.min_width) == ('1 1 0', '0')


def test_a_run_that_is_refused_shows_the_reason_in_the_widget(run):
    pytest.importorskip('ipywidgets')
    console = Console(run)
    run.state, run.error = 'failed', 'ValueError: it holds a run already'
    assert wait_for(lambda: console._done.is_set())
    assert 'it holds a run already' in console.head.value


def test_the_console_follows_by_itself_until_the_end(run):
    pytest.importorskip('ipywidgets')
    console = Console(run)
    assert console.tabs.titles == ('rank 0', 'rank 1')
    assert console.picture.value == ''
    run.metrics, run.texts = METRICS, ['one', 'two']
    assert wait_for(
        lambda: (
            'step 4 of 8' in console.head.value
            and '<img' in console.picture.value
            and 'one' in console.logs[0].value))
    assert 'two' not in console.logs[1].value  # Hidden, so it is not read
    console.tabs.selected_index = 1
    assert wait_for(lambda: 'two' in console.logs[1].value)
    run.texts, run.state = ['one, the end', 'two, the end'], 'finished'
    assert wait_for(lambda: console._done.is_set())
    assert console.button.disabled
    assert 'finished' in console.head.value
    assert 'one, the end' in console.logs[0].value
    assert 'two, the end' in console.logs[1].value


def test_stop_is_pressed_once_and_the_button_says_so(run):
    pytest.importorskip('ipywidgets')
    console = Console(run)
    console.button.click()
    assert (run.stopped, console.button.disabled, console.button.description) == (
        1, True, 'Stopping')
    assert 'stopping' in console.head.value
    run.state = 'preempted'
    assert wait_for(lambda: console.button.description == 'Ended')


def test_a_stop_that_fails_is_told_and_can_be_repeated(run):
    pytest.importorskip('ipywidgets')
    def fail(): raise RuntimeError('scancel is not found')
    run.stop = fail
    console = Console(run)
    console.button.click()
    assert 'scancel is not found' in console.head.value
    assert not console.button.disabled


def test_the_button_of_a_job_cancels_it():
    pytest.importorskip('ipywidgets')
    job = Job()
    console = Console(job)
    console.button.click()
    assert job.stopped == 1
    assert console.button.description == 'Ended'
    assert 'big: stopped and saved at step 4 of 100' in console.head.value
    assert 'submit(...) goes on' in console.head.value
    assert 'E69F00' in console.head.value  # No alarm


def test_a_cell_that_runs_again_leaves_one_thread(run):
    pytest.importorskip('ipywidgets')
    first = Console(run)
    second = Console(run)
    assert wait_for(lambda: len([t for t in threading.enumerate() if t.name == 'console']) == 1)
    run.metrics = METRICS
    assert wait_for(lambda: 'step 4' in second.head.value)
    assert 'step 4' not in first.head.value


def test_a_run_that_nobody_holds_is_forgotten():
    pytest.importorskip('ipywidgets')
    run = Beside()
    console = Console(run)
    seen = weakref.ref(run)
    run.state = 'finished'
    assert wait_for(lambda: console._done.is_set())
    del run, console
    assert wait_for(lambda: gc.collect() < 0 or seen() is None)


def test_trouble_while_looking_is_shown_and_does_not_end_the_console(run):
    pytest.importorskip('ipywidgets')
    console = Console(run)
    run.metrics = 3
    assert wait_for(lambda: 'TypeError' in console.head.value)
    run.metrics = METRICS
    assert wait_for(lambda: 'step 4 of 8' in console.head.value)


def test_a_look_that_takes_long_is_followed_by_a_pause(run):
    pytest.importorskip('ipywidgets')
    looks, plain = [], run.log
    def slow(*words):
        looks.append(time.monotonic())
        time.sleep(0.2)
        return plain(*words)
    run.log = slow
    console = Console(run)
    assert wait_for(lambda: len(looks) >= 3, 20)
    assert looks[2] - looks[1] > 1.8
    assert console.state.state == 'running'


def test_the_console_travels_with_its_static_twin(run):
    pytest.importorskip('ipywidgets')
    run.metrics = METRICS
    bundle = Console(run)._repr_mimebundle_()
    assert 'application/vnd.jupyter.widget-view+json' in bundle
    assert 'step 4 of 8' in bundle['text/html']
