"""The console: what it says of a run, of a job and of trouble, and how its widget follows; no
browser, and no real run."""
import gc
import json
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from trouble import wait_for

from llm_workbook.launching.console import Console, ConsoleState, console_state

METRICS = [{'step': n, 'loss': 3 / n, 'seconds': 2. * n} for n in range(1, 5)]


class Beside:
    "What `Launched` shows to a console."
    error, saved_step = '', None

    def __init__(self, ranks=2):
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
    name, steps, metrics = 'big', 100, METRICS
    # Of SLURM: state, reason, whether it has ended; or an error
    answer = 'PENDING', 'Priority', False
    stopped = 0

    def status(self):
        if isinstance(self.answer, Exception): raise self.answer
        state, reason, ended = self.answer
        return SimpleNamespace(state=state, reason=reason, ended=ended)

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
    assert console_state(run).line == 'small: running, step 0 of 8'
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


@pytest.mark.parametrize('wrong', [None, 'run', object()])
def test_what_is_no_run_is_refused(wrong):
    with pytest.raises(ValueError, match='no run that can be watched'): console_state(wrong)
    with pytest.raises(ValueError, match='no run that can be watched'): Console(wrong)


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
    assert '2.71828,' in html
    assert '1.5,' in html
    assert '3e-05,' in html
    assert '1.23456789.4' in html


# The widget

def test_a_run_that_is_refused_shows_the_reason_in_the_widget(run):
    pytest.importorskip('ipywidgets')
    console = Console(run)
    run.state, run.error = 'failed', 'ValueError: it holds a run already'
    assert wait_for(lambda: console._done.is_set())
    assert 'it holds a run already' in console.line.value


def test_the_console_follows_by_itself_until_the_end(run):
    pytest.importorskip('ipywidgets')
    console = Console(run)
    assert console.tabs.titles == ('rank 0', 'rank 1')
    assert console.curve.value == ''
    run.metrics, run.texts = METRICS, ['one', 'two']
    assert wait_for(
        lambda: (
            'step 4 of 8' in console.line.value
            and 'png' in console.curve.value
            and 'one' in console.logs[0].value))
    assert 'two' not in console.logs[1].value  # Hidden, so it is not read
    console.tabs.selected_index = 1
    assert wait_for(lambda: 'two' in console.logs[1].value)
    run.texts, run.state = ['one, the end', 'two, the end'], 'finished'
    assert wait_for(lambda: console._done.is_set())
    assert console.button.disabled
    assert 'finished' in console.line.value
    assert 'one, the end' in console.logs[0].value
    assert 'two, the end' in console.logs[1].value


def test_stop_is_pressed_once_and_the_button_says_so(run):
    pytest.importorskip('ipywidgets')
    console = Console(run)
    console.button.click()
    assert (run.stopped, console.button.disabled, console.button.description) == (
        1, True, 'Stopping')
    assert 'stopping' in console.line.value
    run.state = 'preempted'
    assert wait_for(lambda: console.button.description == 'Ended')


def test_a_stop_that_fails_is_told_and_can_be_repeated(run):
    pytest.importorskip('ipywidgets')
    def fail(): raise RuntimeError('scancel is not found')
    run.stop = fail
    console = Console(run)
    console.button.click()
    assert 'scancel is not found' in console.line.value
    assert not console.button.disabled


def test_the_button_of_a_job_cancels_it():
    pytest.importorskip('ipywidgets')
    job = Job()
    console = Console(job)
    console.button.click()
    assert job.stopped == 1
    assert console.button.description == 'Ended'
    assert 'cancelled' in console.line.value


def test_a_cell_that_runs_again_leaves_one_thread(run):
    pytest.importorskip('ipywidgets')
    first = Console(run)
    second = Console(run)
    assert wait_for(lambda: len([t for t in threading.enumerate() if t.name == 'console']) == 1)
    run.metrics = METRICS
    assert wait_for(lambda: 'step 4' in second.line.value)
    assert 'step 4' not in first.line.value


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
    assert wait_for(lambda: 'TypeError' in console.line.value)
    run.metrics = METRICS
    assert wait_for(lambda: 'step 4 of 8' in console.line.value)


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
