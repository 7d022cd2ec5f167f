"""The exporter as a program and as a library: who can ask it, what it never says, and what happens
to it when files are not as they should be."""
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from monitoring import ExporterProgram, Program, needs, pretended_driver
from trouble import CANARY, ports, wait_for

from llm_workbook.__main__ import program as command
from llm_workbook.config.recipe import Recipe
from llm_workbook.parallel.ranks import free_port
from llm_workbook.training.run_directory import RunFiles, mark_stage
from llm_workbook.watching.exporter import (
    GPU_FACTS, RUN_METRICS, RunCollector, export_metrics, exposition, gpu_facts, write_textfile)
from llm_workbook.watching.metrics import Tailer, sample_metrics


def samples(text: str) -> dict:
    "Name and labels -> value, as Prometheus' own parser for Python reads them."
    from prometheus_client.parser import text_string_to_metric_families
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples}


def of_rank(text: str, name: str, rank: int) -> float | None:
    found = [value for (metric, labels), value in samples(text).items()
             if metric == name and ('rank', str(rank)) in labels]
    return found[0] if found else None


@pytest.fixture
def run(tmp_path):
    "Lines of two ranks and 12 steps."
    sample_metrics(tmp_path/'run')
    return tmp_path/'run'


def lines_of(run, rank=0) -> list[dict]:
    return [json.loads(line) for line in RunFiles(run).rank_metrics(rank).read_text().splitlines()]


def test_every_figure_of_a_line_that_is_known_becomes_a_metric(run):
    text = exposition(RunCollector(run, gpus=False, plan=False))
    last = lines_of(run, 1)[-1]
    for metric in RUN_METRICS:
        if metric.label or last[metric.key] is None: continue
        assert of_rank(text, metric.name, 1) == pytest.approx(last[metric.key], rel=1e-12)
    phases = {dict(labels)['phase']: value for (name, labels), value in samples(text).items()
              if name == 'llmw_phase_seconds' and ('rank', '1') in labels}
    assert phases == pytest.approx(last['phases'])
    assert of_rank(text, 'llmw_mfu_ratio', 1) is None  # No recipe, so no peak: a gap, not a zero
    tokens = sum(row['tokens'] for row in lines_of(run, 1))
    assert of_rank(text, 'llmw_tokens_total', 1) == tokens


def test_a_run_that_still_imports_has_a_stage_and_the_name_of_its_recipe(tmp_path):
    mark_stage(tmp_path, 'importing')
    collector = RunCollector(tmp_path, gpus=False, plan=False)
    assert 'llmw_stage{' not in exposition(collector)  # Under which name?
    Recipe.named('reviews-qlora').save(RunFiles(tmp_path).recipe)
    known = 'llmw_stage{run="reviews-qlora",stage="importing"} 1.0'
    assert known in exposition(collector)


def test_a_stage_is_one_of_those_that_are_known(run):
    collector = RunCollector(run, gpus=False, plan=False)
    assert 'llmw_stage{' not in exposition(collector)
    mark_stage(run, 'saving')
    stages = {dict(labels)['stage']: value for (name, labels), value in
              samples(exposition(collector)).items() if name == 'llmw_stage'}
    assert [stage for stage, value in stages.items() if value] == ['saving']
    assert len(stages) == 6
    RunFiles(run).stage.write_text(json.dumps({'stage': CANARY, 'since': 1}))
    assert CANARY not in exposition(collector)


@pytest.mark.parametrize('change', [
    {'api_key': CANARY}, {'loss': CANARY}, {'phases': {CANARY: 1.0}}, {'memory_b': CANARY},
    {'phases': {'data': CANARY}}, {'step': 13, 'tokens': CANARY}], ids=str)
def test_no_secret_that_gets_into_a_line_becomes_a_metric(run, change):
    change = {'step': 13} | change
    with RunFiles(run).rank_metrics(0).open('a') as lines:
        lines.write(json.dumps(lines_of(run)[-1] | change) + '\n')
    text = exposition(RunCollector(run, gpus=False, plan=False))
    assert of_rank(text, 'llmw_step', 0) == 13
    assert CANARY not in text


def test_labels_are_escaped(run):
    odd = 'a "name"\\ with\nthree'
    with RunFiles(run).rank_metrics(0).open('a') as lines:
        lines.write(json.dumps(lines_of(run)[-1] | {'step': 13, 'host': odd}) + '\n')
    found = samples(exposition(RunCollector(run, gpus=False, plan=False)))
    assert {dict(labels).get('host') for _, labels in found} >= {odd, 'node1'}


def test_tokens_of_a_step_that_is_done_again_are_counted_once(run):
    "A counter that falls looks to Prometheus like a new one, and gives a wrong throughput."
    collector, rows = RunCollector(run, gpus=False, plan=False), lines_of(run)
    file = RunFiles(run).rank_metrics(0)
    def tokens(): return of_rank(exposition(collector), 'llmw_tokens_total', 0)
    def rewrite(rows): file.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    before = tokens()
    later = [row | {'time': row['time'] + 1000} for row in rows]
    rewrite(rows[:8])  # As a resume cuts it back
    assert tokens() == before
    rewrite(rows[:8] + later[8:])
    assert tokens() == before
    rewrite(rows[:8] + later[8:] + [later[-1] | {'step': 13, 'tokens': 50}])
    assert tokens() == before + 50
    fresh = RunCollector(run, gpus=False, plan=False)  # An exporter that was started again agrees
    assert of_rank(exposition(fresh), 'llmw_tokens_total', 0) == before + 50
    rewrite([row | {'time': row['time'] + 9000} for row in rows[:2]])  # Another run
    assert tokens() == sum(row['tokens'] for row in rows[:2])


def test_ranks_that_a_resume_does_without_are_given_no_more(tmp_path):
    sample_metrics(tmp_path, ranks=4)
    collector = RunCollector(tmp_path, gpus=False, plan=False)
    def ranks():
        return {dict(labels)['rank'] for (name, labels) in samples(exposition(collector))
                if name == 'llmw_step'}
    assert ranks() == {'0', '1', '2', '3'}
    for rank in 0, 1:
        last = lines_of(tmp_path, rank)[-1]
        again = last | {'step': 13, 'ranks': 2, 'time': last['time'] + 100}
        with RunFiles(tmp_path).rank_metrics(rank).open('a') as lines:
            lines.write(json.dumps(again) + '\n')
        assert ranks() == {'0', '1'}


def test_it_outlives_whatever_happens_to_the_directory(tmp_path):
    run = tmp_path/'run'
    with export_metrics(run, port=0, gpus=False, plan=False) as exporter:
        def asked(): return urlopen(exporter.url, timeout=10).read().decode()
        assert of_rank(asked(), 'llmw_step', 0) is None
        sample_metrics(run)
        assert of_rank(asked(), 'llmw_step', 1) == 12
        file = RunFiles(run).rank_metrics(1)
        with file.open('a') as lines: lines.write('{"step": 13, "lo')
        assert of_rank(asked(), 'llmw_step', 1) == 12
        with file.open('a') as lines: lines.write('\nno JSON\n[1]\n{"step": "many"}\n')
        RunFiles(run).recipe.write_text('name: [')
        RunFiles(run).stage.write_text('{')
        assert of_rank(asked(), 'llmw_step', 1) == 12
        file.unlink()
        assert of_rank(asked(), 'llmw_step', 1) is None
        assert of_rank(asked(), 'llmw_step', 0) == 12
        run.rename(tmp_path/'gone')
        assert of_rank(asked(), 'llmw_step', 0) is None


def test_a_recipe_that_cannot_be_planned_is_no_end_and_is_said(run, caplog):
    "A model that is not on this machine, and then one that is."
    recipe = Recipe.named('reviews-qlora')
    file = recipe.changed({'model.source': 'nobody/nothing'}).save(RunFiles(run).recipe)
    collector = RunCollector(run, gpus=False)
    for _ in range(2):
        text = exposition(collector)
        assert of_rank(text, 'llmw_step', 1) == 12
        assert 'llmw_planned_memory_bytes{' not in text and 'llmw_mfu_ratio{' not in text
    assert caplog.text.count('no plan: ') == 1 and 'nobody/nothing' in caplog.text
    recipe.save(file)
    text = exposition(collector)
    assert 'llmw_planned_memory_bytes{' in text and of_rank(text, 'llmw_mfu_ratio', 1) > 0
    assert caplog.text.count('no plan: ') == 1


def test_without_a_plan_no_torch_is_loaded(run):
    Recipe.named('reviews-qlora').save(RunFiles(run).recipe)
    program = (
        'import sys\n'
        'from llm_workbook.watching.exporter import RunCollector, exposition\n'
        f'text = exposition(RunCollector({str(run)!r}, plan=False))\n'
        'print("torch" in sys.modules, "llmw_step{" in text, "llmw_mfu_ratio{" in text)')
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True,
                          timeout=120, check=True)
    assert done.stdout.split() == ['False', 'True', 'False']


def test_many_may_ask_while_a_rank_writes(run, monkeypatch):
    """No answer is half of one, no counter falls, and no line is lost or read twice.

    Reading a file is made slow, so that those who ask would meet in it.
    """
    file, last, seen, errors = RunFiles(run).rank_metrics(0), lines_of(run)[-1], [], []
    inside, met, look = [], [], Tailer.new
    def slow_look(tailer):
        inside.append(tailer)
        met.append(len(inside))
        time.sleep(0.002)
        rows = look(tailer)
        inside.pop()
        return rows
    monkeypatch.setattr(Tailer, 'new', slow_look)
    with export_metrics(run, port=0, gpus=False, plan=False) as exporter:
        def ask():
            try:
                for _ in range(12):
                    text = urlopen(exporter.url, timeout=30).read().decode()
                    seen.append(of_rank(text, 'llmw_tokens_total', 0))
            except Exception as error: errors.append(error)
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads: thread.start()
        for step in range(13, 213):
            with file.open('a') as lines: lines.write(json.dumps(last | {'step': step}) + '\n')
        for thread in threads: thread.join()
        text = urlopen(exporter.url, timeout=30).read().decode()
    assert not errors and len(seen) == 48 and None not in seen
    assert of_rank(text, 'llmw_tokens_total', 0) == sum(row['tokens'] for row in lines_of(run))
    assert max(met) == 1 and len(met) > 90


# Programs

def test_the_command_listens_on_this_machine_alone_and_ends_when_told(tmp_path, run):
    exporter = ExporterProgram(tmp_path, run, '--no-plan')
    try:
        text = wait_for(exporter.text, 60)
        assert of_rank(text, 'llmw_step', 0) == 12
        assert ports(psutil.Process(exporter.process.pid)) == {('127.0.0.1', exporter.port)}
        exporter.process.send_signal(signal.SIGTERM)
        assert exporter.process.wait(30) == 0
    finally: exporter.end()


def other_address() -> str | None:
    "An address of this machine that is not loopback."
    import socket
    addresses = [found.address for each in psutil.net_if_addrs().values() for found in each
                 if found.family == socket.AF_INET]
    return next((address for address in addresses if not address.startswith('127.')), None)


def test_another_address_is_taken_only_by_name_and_then_it_says_what_that_opens(tmp_path, run):
    address = other_address()
    if not address: pytest.skip('this machine has no address but loopback')
    port = free_port()
    exporter = Program(tmp_path, sys.executable, '-m', 'llm_workbook', 'metrics', run, '--port',
                       port, '--address', address, '--no-plan')
    try:
        def said(): return wait_for(lambda: exporter.log.read_text(), 60)
        assert wait_for(lambda: 'without a password' in said(), 10), said()
        assert f'whoever reaches {address} on port {port}' in said()
        assert ports(psutil.Process(exporter.process.pid)) == {(address, port)}
    finally: exporter.end()


def test_a_port_that_is_taken_is_an_error_that_names_it(run, monkeypatch, capsys):
    with export_metrics(run, port=0, gpus=False, plan=False) as exporter:
        words = ['llm-workbook', 'metrics', str(run), '--port', str(exporter.port)]
        monkeypatch.setattr(sys, 'argv', words)
        try: code = command()
        finally: gc.enable()  # The program works without it
    stderr = capsys.readouterr().err
    assert code == 2
    assert f'port {exporter.port} of 127.0.0.1' in stderr and 'Traceback' not in stderr


@pytest.mark.parametrize('package', ['prometheus_client', 'pynvml'])
def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch, tmp_path, package):
    for name in (package, 'prometheus_client.core'): monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install '.\[monitor\]'"):
        export_metrics(tmp_path, port=0)


# GPUs

def test_a_machine_without_a_driver_has_no_facts_of_gpus():
    if Path('/proc/driver/nvidia/version').exists(): pytest.skip('this machine has a driver')
    assert gpu_facts() == []


@pytest.mark.slow
def test_a_driver_is_asked_through_nvidias_own_package(tmp_path):
    """The driver is pretended; nvidia-ml-py is real, and with it structures, units and errors.

    A card that is lost is no end of the exporter, not even where it imports what plans need.
    """
    exporter = ExporterProgram(
        tmp_path, tmp_path/'no run', variables=pretended_driver(tmp_path))
    try: found = samples(wait_for(exporter.text, 60))
    finally: exporter.end()
    facts = {name.removeprefix('DCGM_FI_DEV_'): value for (name, _), value in found.items()}
    assert facts == {  # The energy is not known, and the second card is lost
        'SM_CLOCK': 1410, 'MEM_CLOCK': 1593, 'GPU_TEMP': 61, 'POWER_USAGE': 287.5, 'GPU_UTIL': 97,
        'MEM_COPY_UTIL': 41, 'FB_FREE': 10320, 'FB_USED': 71000, 'FB_RESERVED': 600}
    labels = dict(next(iter(found))[1])
    assert labels.pop('hostname')
    assert labels == {'gpu': '0', 'UUID': 'GPU-pretended', 'pci_bus_id': '00000000:65:00.0',
                      'device': 'nvidia0', 'modelName': 'A pretended card'}


def test_every_question_is_one_that_nvidias_package_has():
    import pynvml
    for fact in GPU_FACTS:
        assert callable(getattr(pynvml, fact.question))
        assert not fact.about or isinstance(getattr(pynvml, fact.about), int)


@pytest.mark.cuda
def test_facts_of_a_real_gpu_are_those_of_nvidia_smi():
    facts = {fact.name: value for fact, labels, value in gpu_facts() if labels[0] == '0'}
    assert set(facts) >= {'DCGM_FI_DEV_FB_USED', 'DCGM_FI_DEV_GPU_UTIL', 'DCGM_FI_DEV_GPU_TEMP'}
    asked = subprocess.run(
        ['nvidia-smi', '--id=0', '--query-gpu=memory.used,memory.free,temperature.gpu',
         '--format=csv,noheader,nounits'], capture_output=True, text=True, check=True).stdout
    used, free, celsius = map(float, asked.split(','))
    assert facts['DCGM_FI_DEV_FB_USED'] == pytest.approx(used, abs=64)
    assert facts['DCGM_FI_DEV_FB_FREE'] == pytest.approx(free, abs=64)
    assert facts['DCGM_FI_DEV_GPU_TEMP'] == pytest.approx(celsius, abs=5)


# The text file

def test_nobody_reads_half_a_text_file(run, tmp_path):
    "While the file is written 200 times, each reading is one whole writing."
    collector, file = RunCollector(run, gpus=False, plan=False), tmp_path/'run.prom'
    ended, readings = [], []
    write_textfile(collector, file)
    def read():
        while not ended: readings.append(file.read_text())
    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200): write_textfile(collector, file)
    ended.append(True)
    reader.join()
    whole = exposition(collector)
    assert len(readings) > 20 and set(readings) == {whole}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ['run.prom']


def test_a_killed_writer_leaves_a_whole_file_and_the_next_one_goes_on(run, tmp_path):
    file = tmp_path/'text'/'run.prom'
    file.parent.mkdir()
    writer = Program(tmp_path, sys.executable, '-m', 'llm_workbook', 'metrics', run,
                     '--no-plan', '--every', '0.01', '--textfile', file)
    try:
        assert wait_for(file.exists, 60), writer.log.read_text()
        assert not ports(psutil.Process(writer.process.pid))
        writer.end()
        assert of_rank(file.read_text(), 'llmw_step', 1) == 12
        with RunFiles(run).rank_metrics(1).open('a') as lines:
            lines.write(json.dumps(lines_of(run, 1)[-1] | {'step': 13}) + '\n')
        writer.start()
        assert wait_for(lambda: of_rank(file.read_text(), 'llmw_step', 1) == 13, 60)
        os.kill(writer.process.pid, signal.SIGINT)
        assert writer.process.wait(30) == 0
        assert CANARY not in file.read_text() + writer.log.read_text()
    finally: writer.end()


@needs('prometheus-node-exporter')
def test_node_exporter_takes_the_text_file(run, tmp_path):
    folder, port = tmp_path/'text', free_port()
    folder.mkdir()
    write_textfile(RunCollector(run, gpus=False, plan=False), folder/'run.prom')
    (folder/'.run.prom.1.2.part').write_text('llmw_step{')  # As a killed writer leaves it
    node = Program(
        tmp_path, 'prometheus-node-exporter', '--collector.disable-defaults',
        '--collector.textfile', f'--collector.textfile.directory={folder}',
        f'--web.listen-address=127.0.0.1:{port}')
    def asked():
        try: return urlopen(f'http://127.0.0.1:{port}/metrics', timeout=10).read().decode()
        except OSError: return ''
    try:
        text = wait_for(asked, 20)
        assert of_rank(text, 'llmw_step', 1) == 12
        assert ('node_textfile_scrape_error', ()) in samples(text)
        assert samples(text)['node_textfile_scrape_error', ()] == 0
    finally: node.end()


@needs('promtool')
def test_prometheus_finds_no_fault_with_the_names(run):
    mark_stage(run, 'training')
    text = exposition(RunCollector(run, gpus=False, plan=False))
    done = subprocess.run(['promtool', 'check', 'metrics'], input=text, capture_output=True,
                          text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
