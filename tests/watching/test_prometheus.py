"""A real Prometheus asks the exporter of a real run of two ranks; then each of the three is killed,
and the others go on.

The tests share one run, one exporter and one server, and leave them as they found them.
"""
from urllib.parse import quote
from urllib.request import urlopen

import psutil
import pytest
from monitoring import JOB, ExporterProgram, Prometheus, grows, needs, pretended_driver
from trouble import CANARY, exit_code, ports, small_recipe, torchrun, wait_for

from llm_workbook.training.run_directory import run_stage
from llm_workbook.watching.dashboard import grafana_dashboard, unanswered

pytestmark = [pytest.mark.slow, needs('prometheus')]

BOARD = grafana_dashboard()
ALL = '{job=~".+"}'
# What a run on a CPU cannot answer, as (panel, legend): its memory has no allocator that counts
OF_A_GPU = {('Memory by class', '{{run}}: measured peak')}


class Ranks:
    "Two ranks under torchrun that train until they are killed; started again, they go on."

    def __init__(self, folder):
        self.folder, self.directory = folder, folder/'ranks'/'run'
        self.recipe = small_recipe(
            folder, **{'optimizer.steps': 100_000, 'intervals.saving': 50,
                       'cluster.hardware': 'cpu'})
        self.start()

    def start(self): self.process = torchrun(self.recipe, self.directory)

    def kill(self):
        root = psutil.Process(self.process.pid)
        for process in [*root.children(recursive=True), root]: process.kill()
        exit_code(self.process)

    def log(self) -> str: return (self.directory.parent/'log').read_text()[-3000:]


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('OMP_NUM_THREADS', '1')
        ranks = Ranks(tmp_path_factory.mktemp('run'))
        yield ranks
        if ranks.process.poll() is None: ranks.kill()


@pytest.fixture(scope='module')
def exporter(ranks, tmp_path_factory):
    "It is there before the run is; the driver of its GPU is pretended, the rest is real."
    folder = tmp_path_factory.mktemp('exporter')
    exporter = ExporterProgram(
        folder, ranks.directory, variables=pretended_driver(folder))
    yield exporter
    exporter.end()


@pytest.fixture(scope='module')
def server(ranks, exporter, tmp_path_factory):
    "It has seen both ranks train."
    server = Prometheus(tmp_path_factory.mktemp('server'), exporter.port)
    try:
        both_train = wait_for(lambda: len(server.values('llmw_step > 3')) == 2, 240)
        assert both_train, ranks.log()
        yield server
    finally: server.end()


def last_step(server): return server.value('max(llmw_step)')


def is_asked(server): return server.value(f'up{{job="{JOB}"}}') == 1


def test_every_question_of_the_dashboard_has_an_answer(server, ranks):
    def silent():
        found = unanswered(server.url, BOARD, {'job': JOB, '__rate_interval': '20s'})
        return {(question.panel, question.legend) for question in found}
    wait_for(lambda: silent() == OF_A_GPU, 120)
    assert silent() == OF_A_GPU


def test_answers_are_those_of_the_run(server, ranks):
    assert server.value('max(llmw_steps)') == 100_000
    parts = 'sum by (rank) (llmw_phase_seconds) / on (rank) llmw_step_seconds'
    assert server.value(f'max(abs({parts} - 1))') < 0.03
    assert server.value('sum(llmw_stage{stage=~"training|evaluating|saving"})') == 1
    assert server.value('sum(llmw_stage)') == 1
    assert 0 < server.value('llmw_mfu_ratio') < 1
    assert 0 < server.value('rate(llmw_tokens_total[20s])')
    assert server.value('count(llmw_loss) by (run)') == 2
    at_one_step = 'max(llmw_step) == min(llmw_step)'
    assert server.value(f'max(llmw_loss) - min(llmw_loss) and on () ({at_one_step})') == 0


def test_all_three_listen_on_this_machine_alone(server, exporter):
    for program in server, exporter:
        addresses = ports(psutil.Process(program.process.pid))
        assert addresses and {host for host, _ in addresses} == {'127.0.0.1'}


def test_no_token_is_in_a_metric_a_label_or_a_log(server, exporter, ranks):
    "All three have one in their environment."
    pages = [exporter.text(), exporter.log.read_text(), server.log.read_text()]
    for path in 'labels', 'label/__name__/values', f'series?match[]={quote(ALL)}', 'metadata':
        pages.append(urlopen(f'{server.url}/api/v1/{path}', timeout=20).read().decode())
    assert all('llmw_loss' in page for page in (pages[0], *pages[4:6]))
    for file in ranks.directory.joinpath('metrics').iterdir(): pages.append(file.read_text())
    assert not [page[:300] for page in pages if CANARY in page]


def test_a_killed_exporter_is_missed_by_nobody_else(server, exporter, ranks):
    step, tokens = last_step(server), server.value('sum(llmw_tokens_total)')
    exporter.end()
    try:
        assert wait_for(lambda: server.value(f'up{{job="{JOB}"}}') == 0, 30)
        lines = ranks.directory/'metrics'/'rank-00000.jsonl'
        assert grows(lambda: lines.stat().st_size)  # The run trains on
    finally: exporter.start()
    assert wait_for(lambda: is_asked(server), 60)
    assert wait_for(lambda: (last_step(server) or 0) > step, 60)
    assert server.value('sum(llmw_tokens_total)') > tokens
    assert server.value('max(resets(llmw_tokens_total[5m]))') == 0


def test_a_killed_prometheus_is_missed_by_nobody_else(server, exporter, ranks):
    step = last_step(server)
    server.end()
    assert grows(lambda: (ranks.directory/'metrics'/'rank-00001.jsonl').stat().st_size)
    assert 'rank="1"' in exporter.text()
    server.start()
    assert wait_for(lambda: (last_step(server) or 0) > step, 60)
    before = 'min_over_time(max(llmw_step)[10m:1s])'
    assert wait_for(lambda: server.value(before) <= step, 20)  # It still has what it had


def test_a_killed_run_is_seen_by_its_age_and_goes_on(server, exporter, ranks):
    def age(): return server.value('time() - max(llmw_last_step_timestamp_seconds)')
    ranks.kill()
    try:
        assert wait_for(lambda: (age() or 0) > 5, 60)
        step, tokens = last_step(server), server.value('sum(llmw_tokens_total)')
        assert is_asked(server)
        assert 'rank="1"' in exporter.text()
        assert run_stage(ranks.directory)['stage'] != 'ended'  # It could not say so
    finally: ranks.start()
    assert wait_for(lambda: (last_step(server) or 0) > step, 240), ranks.log()
    assert wait_for(lambda: 0 < (age() or 0) < 5, 60)
    assert server.value('sum(llmw_tokens_total)') > tokens
    # Steps that are done again are not counted again, and no counter falls
    assert server.value('max(resets(llmw_tokens_total[10m]))') == 0
