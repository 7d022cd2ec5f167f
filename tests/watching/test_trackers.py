"""Real trackers, each where it is installed: its own reader finds the figures again, and nobody was
connected to."""
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from trouble import CANARY, TOKENS

from llm_workbook.watching.metrics import Tailer, sample_metrics
from llm_workbook.watching.trackers import TRACKERS, check_tracker, report_to

PROGRAM = '''
import socket, sys
reached = []
connect = socket.socket.connect
def noted(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ('127.0.0.1', '::1', 'localhost'):
        reached.append(address)
        raise OSError('no network in this test')
    return connect(self, address)
socket.socket.connect = noted
from llm_workbook.watching.trackers import report_to
reporter = report_to(sys.argv[1], sys.argv[2])
assert reporter.update() == 4
reporter.close()
assert reporter.step == 4
assert not reached, reached
'''
READERS = {
    'trackio': """
import sqlite3, pathlib, json
file = next(pathlib.Path('{place}').rglob('llm-workbook*.db'))
rows = sqlite3.connect(file).execute('select step, metrics from metrics order by step').fetchall()
for step, text in rows: print(json.dumps([step, json.loads(text)]))
""",
    'tensorboard': """
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator('{run}/tensorboard').Reload()
rows = {{}}
for key in events.Tags()['scalars']:
    for event in events.Scalars(key): rows.setdefault(event.step, {{}})[key] = event.value
for step in sorted(rows): print(json.dumps([step, rows[step]]))
""",
    'mlflow': """
import json, mlflow
mlflow.set_tracking_uri('file://{run}/mlruns')
client = mlflow.MlflowClient()
experiment = client.get_experiment_by_name('llm-workbook')
[found] = client.search_runs([experiment.experiment_id])
rows = {{}}
for key in found.data.metrics:
    for point in client.get_metric_history(found.info.run_id, key):
        rows.setdefault(point.step, {{}})[key] = point.value
for step in sorted(rows): print(json.dumps([step, rows[step]]))
"""}


@pytest.fixture
def environment(tmp_path):
    "Variables with tokens, and with a server that nobody asked to send to."
    return os.environ | dict.fromkeys(TOKENS, CANARY) | {
        'TRACKIO_DIR': str(tmp_path/'trackio'), 'TRACKIO_SPACE_ID': 'somebody/board',
        'HF_HUB_OFFLINE': '1', 'WANDB_DIR': str(tmp_path), 'MLFLOW_ALLOW_FILE_STORE': 'true',
        'PYTHONPATH': os.pathsep.join(sys.path)}


def call(program, environment, *words):
    done = subprocess.run([sys.executable, '-c', program, *words], env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def everything(folder):
    return b''.join(path.read_bytes() for path in folder.rglob('*') if path.is_file())


@pytest.mark.parametrize('tracker', READERS)
def test_the_reader_of_a_tracker_finds_the_figures_again(tracker, tmp_path, environment):
    if not find_spec(tracker): pytest.skip(f'{tracker} is not installed here')
    run = tmp_path/'run'
    files = sample_metrics(run, steps=4)
    call(PROGRAM, environment, tracker, str(run))
    program = READERS[tracker].format(place=tmp_path/'trackio', run=run)
    rows = [json.loads(line) for line in call(program, environment).splitlines()
            if line.startswith('[')]
    assert [step for step, _ in rows] == [1, 2, 3, 4]
    for (_, values), line in zip(rows, Tailer(files[1]).new()):
        assert values['loss'] == pytest.approx(line['loss'], rel=1e-6)
        assert values['rank 1/phases/forward'] == pytest.approx(line['phases']['forward'], rel=1e-6)
    assert CANARY.encode() not in everything(tmp_path)


def test_wandb_stays_offline(tmp_path, environment):
    if not find_spec('wandb'): pytest.skip('wandb is not installed here')
    sample_metrics(tmp_path/'run', steps=4)
    call(PROGRAM, environment, 'wandb', str(tmp_path/'run'))
    assert list((tmp_path/'run').rglob('offline-run-*/*.wandb'))
    assert CANARY.encode() not in everything(tmp_path)


@pytest.mark.parametrize('tracker', TRACKERS)
def test_what_is_not_installed_is_refused_before_anything_is_made(tracker, tmp_path, monkeypatch):
    monkeypatch.setattr('llm_workbook.watching.trackers.find_spec', lambda name: None)
    with pytest.raises(ImportError, match=f'{tracker} is not installed: pip install'):
        report_to(tracker, tmp_path/'run')
    assert not (tmp_path/'run').exists()
    with pytest.raises(ImportError): check_tracker(tracker)
