"""The dashboard is what its program makes, and such that Grafana can import it."""
import json
import re
import time

import pytest
from monitoring import JOB, Prometheus, needs
from trouble import wait_for

from llm_workbook.files import asset
from llm_workbook.training.run_directory import mark_stage
from llm_workbook.watching.dashboard import (
    ask_prometheus, dashboard_questions, grafana_dashboard, unanswered)
from llm_workbook.watching.exporter import GPU_FACTS, export_metrics
from llm_workbook.watching.metrics import sample_metrics

BOARD = grafana_dashboard()
PANELS = [panel for panel in BOARD['panels'] if panel['type'] != 'row']
VARIABLES = {variable['name']: variable for variable in BOARD['templating']['list']}


@pytest.fixture
def program():
    pytest.importorskip(
        'grafana_foundation_sdk', reason='no grafana-foundation-sdk here, of the dev extra: '
        'whether the dashboard is what tools/dashboard.py makes cannot be said')
    import dashboard
    return dashboard


def test_the_dashboard_is_what_its_program_makes(program):
    text = asset('grafana-dashboard.json').read_text('utf-8')
    assert text == program.text(), 'run python tools/dashboard.py'
    assert text == program.text(), 'a second time it is another'


def test_the_sdk_reads_it_back_as_it_is(program):
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard
    read = Dashboard.from_json(BOARD)
    assert json.loads(JSONEncoder().encode(read)) == BOARD


def test_source_job_and_instance_are_chosen_in_grafana():
    assert VARIABLES['datasource'] | {'type': 'datasource', 'query': 'prometheus'} == (
        VARIABLES['datasource'])
    for name in 'job', 'instance', 'run', 'gpu_job':
        variable = VARIABLES[name]
        assert variable['query'].startswith('label_values(')
        assert variable['datasource']['uid'] == '${datasource}'
        assert variable['multi'] and variable['includeAll'] and variable['allValue'] == '.+'
    for panel in PANELS:
        assert panel['datasource'] == {'type': 'prometheus', 'uid': '${datasource}'}
        assert all(target['datasource'] == panel['datasource'] for target in panel['targets'])


def test_every_question_minds_the_variables():
    for question in dashboard_questions(BOARD):
        selectors = re.findall(r'(\w+)\{([^}]*)\}', question.expression)
        assert selectors, question
        for name, conditions in selectors:
            chosen = ['job=~"$gpu_job"'] if name.startswith('DCGM_') else [
                'job=~"$job"', 'instance=~"$instance"', 'run=~"$run"']
            assert all(condition in conditions for condition in chosen), question
        names = re.findall(r'\$(\w+)', question.expression)
        assert set(names) <= {*VARIABLES, '__rate_interval'}


def test_facts_of_gpus_have_names_that_the_exporter_gives():
    asked = {name for question in dashboard_questions(BOARD)
             for name in re.findall(r'DCGM_\w+', question.expression)}
    assert asked and asked <= {fact.name for fact in GPU_FACTS}


def test_panels_are_told_apart_and_do_not_lie_on_each_other():
    numbers = [panel['id'] for panel in BOARD['panels']]
    assert len(set(numbers)) == len(numbers)
    assert all(panel['title'] and panel['description'] and panel['fieldConfig']['defaults']['unit']
               for panel in PANELS)
    taken = {}
    for panel in BOARD['panels']:
        place = panel['gridPos']
        assert place['x'] + place['w'] <= 24
        for x in range(place['x'], place['x'] + place['w']):
            for y in range(place['y'], place['y'] + place['h']):
                assert taken.setdefault((x, y), panel['id']) == panel['id']


@needs('prometheus')
def test_what_prometheus_does_not_have_is_named(tmp_path):
    "Lines of a run without a recipe, so without a plan and a peak, on a machine without a GPU."
    sample_metrics(tmp_path/'run', steps=200, begin_s=time.time() - 40)
    mark_stage(tmp_path/'run', 'training')
    with export_metrics(tmp_path/'run', port=0, gpus=False, plan=False) as exporter:
        server = Prometheus(tmp_path, exporter.port)
        def silent():
            found = unanswered(server.url, BOARD, {'job': JOB})
            return {(question.row, question.panel) for question in found}
        def rates_are_known(): return server.values('rate(llmw_tokens_total[1m])')
        try:
            assert wait_for(rates_are_known, 60), server.log.read_text()
            assert silent() == {
                ('Speed', 'MFU and HFU'), ('Memory', 'Memory by class'),
                ('Memory', 'Share of the plan'), ('GPUs', 'GPU utilisation'),
                ('GPUs', 'GPU memory'), ('GPUs', 'GPU power'), ('GPUs', 'GPU temperature')}
            assert len(unanswered(server.url, BOARD, {'job': 'another'})) == len(
                dashboard_questions(BOARD))
            with pytest.raises(ValueError, match='refuses .*parse error'):
                ask_prometheus(server.url, 'llmw_loss{')
        finally: server.end()


def test_nothing_of_the_machine_that_made_it_is_in_it():
    text = json.dumps(BOARD)
    assert 'localhost' not in text and '127.0.0.1' not in text and 'http' not in text
    assert BOARD.get('id') is None and BOARD['uid']
