"""Each check of the doctor fails where it should and says so, on real processes; who does not come
is named in time."""
import json
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from warm import ForkedProgram

from llm_workbook.launching import preflight as doctor

from llm_workbook.launching import node_limits
from llm_workbook.launching import rendezvous as talks

from llm_workbook.launching import node_report as witness
from llm_workbook.launching.preflight import assess, preflight
from llm_workbook.parallel.ranks import free_port, run_ranks
from llm_workbook.config.recipe import Recipe, shrink
from llm_workbook.launching.rendezvous import PreflightFinding, Place, Rendezvous, process_place
from llm_workbook.launching.node_report import (
    check_shared_directory, describe_compiler, describe_source)
from llm_workbook.training.fine_tune import check_recipe

ROOT = Path(__file__).resolve().parents[2]
ONE = Recipe.named('reviews-qlora').changed({'cluster.hardware': None})
TWO = ONE.changed({'cluster.nodes': 2, 'cluster.processes': 1, 'cluster.interface': 'lo'})


@pytest.fixture(scope='module', autouse=True)
def plan_known():
    "What the plan and the check of rows need is read and imported once here, not in every rank."
    doctor.memory(ONE)
    check_recipe(ONE)


@pytest.fixture
def forked(monkeypatch):
    "Programs of this test are forks of this process, which has imported what they import."
    monkeypatch.setattr(subprocess, 'Popen', ForkedProgram)


@pytest.fixture(autouse=True)
def processor_known(monkeypatch):
    "Two nodes that are well are so on every machine, also on one that knows no bfloat16."
    monkeypatch.setattr(node_limits, '_cpu_flags', lambda root: ['avx2', 'avx512_bf16'])


def attend(recipe, directory, port, disturb=None, late=()):
    "Be one of two nodes, node1 or node2, of which `disturb` spoils one."
    rank = int(os.environ['RANK'])
    if rank in late: return None
    # A name that leads to another address, without any DNS
    socket.getfqdn = lambda: f'10.83.0.{rank + 1}'
    variables = {
        'SLURM_PROCID': rank, 'SLURM_NTASKS': 2, 'SLURM_JOB_NODELIST': 'node[1-2]',
        'SLURMD_NODENAME': f'node{rank + 1}'}
    own = disturb(rank) if disturb else {}
    variables |= own.get('env', {})
    env = {name: str(value) for name, value in variables.items()}
    recipe = own.get('recipe', recipe)
    directory = own.get('directory', directory)
    return preflight(recipe, directory, env, 'localhost', port).to_dict()


def report_late(seconds, rank):
    "Let rank 1 wait so long before it reports what it sees."
    report_node = doctor.report_node
    def wait_and_report(*args):
        time.sleep(seconds * rank)
        return report_node(*args)
    doctor.report_node = wait_and_report
    return {}


def two(tmp_path, disturb=None, recipe=TWO) -> tuple[list[PreflightFinding], dict]:
    """Run the doctor on two processes that say they are two nodes; both must come to the same
    verdict."""
    start = time.monotonic()
    arguments = recipe, tmp_path/'run', free_port(), disturb
    first, second = run_ranks(attend, 2, arguments, timeout_s=50)
    assert time.monotonic() - start < 30
    assert first == second
    return [PreflightFinding(**f) for f in first['findings']], first


def only(found: list[PreflightFinding], check: str) -> PreflightFinding:
    "The one finding there is."
    assert [f.check for f in found] == [check], found
    return found[0]


def say(name, value):
    "Make one rank see something else."
    def disturb(rank):
        if rank: talks.__dict__[name] = value
        return {}
    return disturb


# Two nodes that are well

def test_two_nodes_that_are_alike_may_go(tmp_path):
    found, made = two(tmp_path)
    assert found == []
    assert [m['host'] for m in made['members']] == ['node1', 'node2']
    assert made['members'][0]['free_b'] > 2**20
    assert abs(made['members'][1]['clock_s']) <= made['members'][1]['error_s'] + 0.001 < 0.5
    link, = made['links']
    assert link['hosts'] == ['node1', 'node2']
    assert link['bps'] > 1e6
    assert not link['wrong']
    assert not list((tmp_path/'run').iterdir())  # No token stays


def test_one_machine_from_a_cell(tmp_path):
    made = preflight(ONE, tmp_path/'run')
    assert not made.problems
    assert len(made.members) == 2
    assert ': go' in repr(made)
    assert 'all-reduce' in made._repr_html_()
    assert json.dumps(made.to_dict())


def test_three_ranks_are_joined_in_a_ring(tmp_path):
    made = preflight(ONE.changed({'cluster.processes': 3}), tmp_path/'run')
    assert not made.problems
    assert len(made.links) == 3
    assert talks._rounds([0, 1, 2, 3]) == [[(0, 1), (2, 3)], [(1, 2), (0, 3)], [(0, 2)]]
    assert talks._rounds([0, 1]) == [[(0, 1)]]
    assert talks._rounds([0]) == []


# What is wrong between two nodes

def test_a_clock_that_is_off(tmp_path):
    found, made = two(tmp_path, say('_now', lambda: time.time() + 90))
    finding = only(found, 'clock')
    assert finding.host == 'node2'
    assert 'its clock is +90.' in finding.what
    assert '1 s is allowed' in finding.what
    assert finding.stops


@pytest.mark.parametrize(
    'clock_s, error_s, wrong',
    [
        (-90, 0.01, True),
        (90, 0.01, True),
        (-1.2, 0.1, True),
        (1.2, 0.1, True),
        (-1.2, 0.3, False),
        (1.2, 0.3, False)])
def test_a_clock_that_is_behind_is_as_wrong_as_one_ahead(clock_s, error_s, wrong):
    found = assess(TWO, [FACT, OTHER | {'clock_s': clock_s, 'error_s': error_s}])
    assert bool(found) is wrong
    if wrong:
        assert only(found, 'clock').host == 'node2'
        assert f'its clock is {clock_s:+.2f} s off' in found[0].what


def test_a_clock_is_not_blamed_for_slow_messages(tmp_path):
    def slow():
        time.sleep(1)
        return time.time() + 0.7
    def disturb(rank):
        talks._TRIPS = 1
        return say('_now', slow)(rank)
    found, made = two(tmp_path, disturb)
    assert found == []
    assert made['members'][1]['clock_s'] > 1


def test_sums_that_are_wrong(tmp_path):
    import torch
    def numbers():
        made = torch.arange(talks.NUMBERS, dtype=torch.float32) % 1021
        made[7] += 1
        return made
    finding = only(two(tmp_path, say('_numbers', numbers))[0], 'links')
    assert finding.host == 'node1 - node2'
    assert 'gave 1 wrong sums of 4,194,304' in finding.what


def test_other_software(tmp_path):
    software_version = witness.version
    def older_torch(package):
        return '2.12.0' if package == 'torch' else software_version(package)
    def disturb(rank):
        if rank: witness.version = older_torch
        return {}
    finding = only(two(tmp_path, disturb)[0], 'software')
    assert finding.host == 'node1, node2'
    assert finding.what.startswith('torch is ')
    assert '2.12.0 on node2' in finding.what


def test_another_recipe(tmp_path):
    finding = only(
        two(tmp_path, lambda rank: {'recipe': TWO.changed({'batch.micro': 1 + rank})})[0], 'recipe')
    assert finding.host == 'node1 and node2'
    assert 'batch.micro is 1 and 2' in finding.what


def test_a_directory_of_its_own_is_not_the_shared_one(tmp_path, monkeypatch):
    monkeypatch.setattr(witness, '_SHOWN_S', 0.1)
    (tmp_path/'own').mkdir()
    assert check_shared_directory(tmp_path/'shared', 'ab', write=True)['error'] == ''
    assert check_shared_directory(tmp_path/'shared', 'ab')['error'] == ''
    error = check_shared_directory(tmp_path/'own', 'ab')['error']
    assert error == 'is not the one that rank 0 writes to'


@pytest.mark.slow
def test_a_directory_that_is_another(tmp_path):
    (tmp_path/'alone').mkdir()
    finding = only(
        two(tmp_path, lambda rank: {'directory': tmp_path/'alone'} if rank else {})[0], 'directory')
    assert finding.host == 'node2'
    assert finding.what == 'the directory of the run is not the one that rank 0 writes to'


def test_files_that_only_one_node_has_and_files_that_differ(tmp_path):
    def disturb(rank):
        folder = tmp_path/str(rank)
        folder.mkdir()
        (folder/'a.txt').write_text('same words' if not rank else 'some words')
        if not rank: (folder/'b.txt').write_text('alone')
        os.chdir(folder)
        return {}

    recipe = TWO.changed(
        {
            'data.source': 'a.txt', 'data.test': 'b.txt', 'data.format': 'text',
            'data.text_column': 'text'})
    differ, absent = sorted(two(tmp_path, disturb, recipe)[0], key=lambda f: f.host)
    assert (absent.host, absent.what) == ('node2', 'data.test b.txt is not there')
    assert differ.host == 'node1, node2'
    assert differ.what.startswith('data.source a.txt is 1 file, 10 bytes, digest ')


def test_rows_are_checked_as_the_run_will_check_them(tmp_path):
    rows = [{'prompt': 'Hi', 'completion': 'Ho', 'id': 1}] * 30
    rows[4] = rows[4] | {'completion': ' '}
    file = tmp_path/'rows.jsonl'
    chat = shrink(Recipe.named('70b-2x24gb-qlora')).changed(
        {'data': {'source': str(file)}, 'batch.micro': 6})
    file.write_text('\n'.join(map(json.dumps, rows)))
    stopped = preflight(chat, tmp_path/'run')
    assert [f.check for f in stopped.problems] == ['rows']
    assert 'rows.jsonl: line 5: the completion is empty' in stopped.problems[0].what
    assert not stopped.first_row
    rows[4] = rows[0]
    file.write_text('\n'.join(map(json.dumps, rows)))
    found = preflight(chat.changed({'data.test_share': 0.0}), tmp_path/'run')
    assert not found.problems
    assert found.first_row == '<|user|>Hi<|assistant|>[ ][H][o][<|endoftext|>]'
    assert found.first_row in repr(found)
    assert any('rows.jsonl: these columns are not read: id' in f.what for f in found.findings)


def test_of_the_first_pair_both_answers_are_shown(tmp_path):
    from llm_workbook.launching.preflight import _row_text
    file = tmp_path/'rows.jsonl'
    file.write_text('{"prompt": "Hi", "chosen": "Ho", "rejected": "No"}\n' * 2)
    recipe = Recipe(
        name='pairs', model={'source': 'tiny-base'}, batch={'length': 64},
        method={'kind': 'lora', 'objective': 'dpo'},
        data={'source': str(file), 'format': 'preference', 'test_share': 0.0})
    assert _row_text(recipe, check_recipe(recipe)[0][0]) == (
        '<|user|>Hi<|assistant|>[ ][H][o][<|endoftext|>]\n'
        '  rejected: <|user|>Hi<|assistant|>[ No][<|endoftext|>]')


def test_the_price_of_answers_that_are_rows_is_said(tmp_path):
    template, file = tmp_path/'rewrites.jinja', tmp_path/'rows.jsonl'
    template.write_text(
        "{% for turn in messages %}{{ '<|' + turn.role + '|>' }}"
        "{% if turn.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
        "{{ turn.content }}{% if turn.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
    turns = [{'role': role, 'content': text} for role, text in (
        ('user', 'Hi'), ('assistant', 'Ho'), ('user', 'And'), ('assistant', 'So'))]
    file.write_text('\n'.join([json.dumps({'messages': turns})] * 20))
    chat = shrink(Recipe.named('70b-2x24gb-qlora')).changed({
        'data': {'source': str(file), 'template': str(template), 'test_share': 0.0},
        'batch.micro': 4})
    def said(recipe):
        found = preflight(recipe, tmp_path/'run')
        assert not found.problems
        return [f.what for f in found.findings if 'each answer is a row' in f.what]
    price, = said(chat)
    assert '40 rows of' in price and 'for 20 conversations' in price
    assert said(chat.changed({'data.answers': 'last'})) == []


def test_an_interface_that_is_not_there(tmp_path):
    recipe = TWO.changed({'cluster.interface': 'ib9'})
    found, _ = two(tmp_path, recipe=recipe)
    assert [f.host for f in found if f.check == 'interface'] == ['node1', 'node2']
    assert 'ib9 is not there, but lo' in found[0].what


# Who is late, and who is not there

def test_a_node_that_began_earlier_hears_the_verdict(tmp_path):
    class Earlier(Rendezvous):  # By 12 of its 14 seconds
        def __init__(self, place, face, limit_s):
            super().__init__(place, face, 15)
            self.began, self.until = self.began - 12, self.until - 12
    class Slow(doctor._PlannedSave):
        def run(self):
            time.sleep(3)
            super().run()
    def disturb(rank):
        if rank: doctor.Rendezvous = Earlier
        doctor._PlannedSave = Slow
        return {}
    found, made = two(tmp_path, disturb)
    assert found == []
    assert made['seconds'] > 3


@pytest.mark.slow
@pytest.mark.parametrize('wait_s, known', [(20, True), (0.1, False)])
def test_links_are_timed_when_the_plan_is_known_or_takes_too_long(
    tmp_path, monkeypatch, wait_s, known
):
    class Late(doctor._PlannedSave):
        def __init__(self, recipe):
            super().__init__(recipe)
            made.append(self)
        def run(self):
            if known: time.sleep(2)
            else: assert links_begun.wait(60)
            super().run()
    made = []
    known_in_time = []
    links_begun = threading.Event()
    time_links = doctor.time_links
    def note_and_time_links(*args):
        known_in_time.append(made[0].size_b is not None)
        links_begun.set()
        return time_links(*args)
    monkeypatch.setattr(doctor, '_PLAN_S', wait_s)
    monkeypatch.setattr(doctor, '_PlannedSave', Late)
    monkeypatch.setattr(doctor, 'time_links', note_and_time_links)
    env = {'RANK': '0', 'WORLD_SIZE': '1'}
    found = preflight(
        ONE.changed({'cluster.processes': 1}), tmp_path/'run', env, 'localhost', free_port())
    assert not found.findings
    assert known_in_time == [known]
    assert made[0].size_b is not None  # It counts in the end
    assert found.seconds < 20


@pytest.mark.slow
def test_a_call_that_hangs_after_the_meeting_ends_with_the_time_of_rank_0(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], 'preflight', partial(preflight, limit_s=9))
    hung = partial(report_late, 60)
    first, second = run_ranks(attend, 2, (TWO, tmp_path/'run', free_port(), hung), 50)
    finding, other = (
        only([PreflightFinding(**f) for f in one['findings']], 'meeting')
        for one in (first, second))
    assert finding.host == 'node2'
    assert 'looking at files' in finding.what
    assert other.what.startswith('still waiting for localhost')
    assert second['seconds'] < 15


# Who is not there

def test_a_node_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(talks, '_MEET_S', 2)
    start = time.monotonic()
    port = free_port()
    made, nothing = run_ranks(attend, 2, (TWO, tmp_path/'run', port, None, (1,)), 50)
    finding, = made['findings']
    assert nothing is None
    assert time.monotonic() - start < 25
    assert finding['host'] == 'node2'
    assert finding['what'] == f'did not come to localhost, port {port}, within 2 s; node1 did'


def test_a_head_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(talks, '_MEET_S', 2)
    port = free_port()
    nothing, made = run_ranks(attend, 2, (TWO, tmp_path/'run', port, None, (0,)), 50)
    finding, = made['findings']
    assert finding['host'] == 'localhost'
    assert f'the head localhost does not answer on port {port} for 2 s' in finding['what']


@pytest.mark.slow
def test_a_node_that_falls_silent_is_named(tmp_path, monkeypatch):
    wait_for = Rendezvous.wait_for
    def take_facts_within_2_s(self, key, host, doing, seconds=60., pause_s=0.005):
        limit_s = 2 if key == 'facts/1' else seconds
        return wait_for(self, key, host, doing, limit_s, pause_s)
    monkeypatch.setattr(Rendezvous, 'wait_for', take_facts_within_2_s)
    silent = partial(report_late, 6)
    first, second = run_ranks(attend, 2, (TWO, tmp_path/'run', free_port(), silent), 50)
    finding, other = (
        only([PreflightFinding(**f) for f in one['findings']], 'meeting')
        for one in (first, second))
    assert other.host in ('node2', 'localhost')
    assert other.stops  # It wakes when all is over
    assert (finding.host, finding.what) == ('node2', 'no answer for 2 s, looking at files')


def test_two_that_are_both_rank_0(tmp_path):
    finding = only(two(tmp_path, lambda rank: {'env': {'SLURM_PROCID': 0}})[0], 'hosts')
    assert sorted(finding.host.split(', ')) == ['node1', 'node2']
    assert 'both say that they are rank 0' in finding.what
    assert 'srun' in finding.fix


def test_two_nodes_that_are_one_host(tmp_path):
    finding = only(two(tmp_path, lambda rank: {'env': {'SLURMD_NODENAME': 'node1'}})[0], 'hosts')
    assert (finding.host, finding.what) == (
        'node1', 'ranks 0, 1 are all on this node, and the recipe is for 2 nodes')


def test_two_worlds_of_one_node(tmp_path):
    env = {'SLURM_PROCID': '0', 'SLURM_NTASKS': '1', 'SLURMD_NODENAME': 'node1'}
    made = preflight(TWO, tmp_path/'run', env, 'localhost', free_port())
    finding = only(made.problems, 'world')
    assert finding.what == 'tasks that run: 1; the recipe is for 2 nodes with 1 process each'
    assert '--nodes=2' in finding.fix


@pytest.mark.slow
def test_a_port_that_another_program_holds(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as server:
        start = time.monotonic()
        made = preflight(
            ONE.changed({'cluster.processes': 1}), tmp_path/'run', {'RANK': '0', 'WORLD_SIZE': '1'},
            'localhost', server.getsockname()[1], limit_s=5)
        assert time.monotonic() - start < 7
    finding = only(made.problems, 'meeting')
    assert (
        'cannot listen there itself: Address already in use' in finding.what
        or 'still looking for localhost' in finding.what)


def test_a_call_that_never_comes_back_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(talks, '_connect', lambda *args: threading.Event().wait(60))
    made = preflight(ONE, tmp_path/'run', {'RANK': '1', 'WORLD_SIZE': '2'}, 'node1', 1, limit_s=1)
    finding = only(made.problems, 'meeting')
    assert finding.what == 'still looking for node1, after 1 s'


# What one node says, judged by itself

PLENTY = {
    'ram_b': 2**40, 'swap_b': 0, 'gpus_b': [], 'locked_b': None, 'open_files': 2**20,
    'shared_b': 2**34, 'infiniband': False, 'machine': 'x86_64',
    'flags': ['avx2', 'avx512_bf16'], 'base_files': 1}
FACT = {
    'rank': 0, 'host': 'node1', 'gpus': 0, 'software': {'torch': '2'}, 'recipe': TWO.dump(),
    'compiler': {'content': '/usr/bin/gcc'}, 'allocator': {'content': ''},
    'builder': {'content': '/usr/bin/c++, /usr/bin/ninja'},
    'interfaces': {'lo': '127.0.0.1'}, 'own_address': '10.0.0.1', 'others': {}, 'sources': {},
    'error': '', 'free_b': 10**9, 'clock_s': 0, 'error_s': 0, 'planned_b': 10**8,
    'limits': PLENTY, 'faults': [], 'copies': [], 'needs': None}
OTHER = FACT | {'rank': 1, 'host': 'node2'}


@pytest.mark.parametrize(
    'free_b, stops', [(0, True), (10**8 - 1, True), (10**8, False), (2 * 10**8 - 1, False)])
def test_little_room(free_b, stops):
    finding = only(assess(TWO, [FACT, OTHER | {'free_b': free_b}]), 'disk')
    assert finding.host == 'node2'
    assert finding.stops is stops
    assert f'{free_b:,} bytes are free' in finding.what
    assert 'checkpoints and result take 100,000,000' in finding.what
    assert assess(TWO, [FACT, OTHER | {'free_b': 2 * 10**8}]) == []


def test_what_is_saved_is_what_the_ledger_plans():
    recipe = ONE.changed({'intervals.saving': 10})
    saved = doctor._PlannedSave(recipe)
    saved.join()
    lines = [x for x in doctor.memory(recipe).lines if (x.phase, x.place) == ('save', 'disk')]
    assert saved.size_b == sum(x.size_b * (2 if x.every_rank else 1) for x in lines) > 10**6
    assert not only(assess(TWO, [FACT | {'planned_b': None}, OTHER]), 'disk').stops


@pytest.mark.parametrize(
    'own, face, words',
    [('127.0.1.1', None, 'its own name leads to 127.0.1.1'), ('127.0.1.1', 'lo', None)])
def test_a_name_that_leads_home(own, face, words):
    found = assess(TWO.changed({'cluster.interface': face}), [FACT, OTHER | {'own_address': own}])
    assert (
        words is None
        and not found
        or only(found, 'names').host == 'node2'
        and words in found[0].what)


@pytest.mark.parametrize(
    'address, words', [('127.0.0.1', 'node1 leads to 127.0.0.1'), ('', 'node1 leads to no address')]
)
def test_a_neighbour_whose_name_leads_nowhere(address, words):
    finding = only(assess(TWO, [FACT, OTHER | {'others': {'node1': address}}]), 'names')
    assert (finding.host, finding.what) == ('node2', words)


def test_too_few_gpus():
    recipe = TWO.changed({'cluster.device': 'cuda', 'cluster.processes': 4})
    finding = only(assess(recipe, [FACT | {'gpus': 4}, OTHER | {'gpus': 3}]), 'GPUs')
    assert (finding.host, finding.what) == ('node2', 'torch sees 3 GPUs for 4 processes')


@pytest.mark.parametrize('changes, stops', [
    ({'cluster.device': 'cuda'}, True),
    ({}, False),  # Triton has no part in a run on CPUs, and none in a classifier
    (
        {'cluster.device': 'cuda', 'model.head': 'classification',
         'data.format': 'classification'},
        False)])
def test_a_node_without_a_compiler_may_not_train_on_gpus(changes, stops):
    recipe = TWO.changed(changes)
    bare = OTHER | {'gpus': 1, 'compiler': {'error': 'there is no gcc, no clang and no CC'}}
    found = assess(recipe, [FACT | {'gpus': 1}, bare])
    assert [(f.check, f.host) for f in found] == ([('compiler', 'node2')] if stops else [])
    for finding in found:
        assert finding.stops
        assert 'there is no gcc, no clang and no CC' in finding.what
        assert 'apt install gcc' in finding.fix


def test_a_compiler_is_looked_for_as_triton_does(tmp_path, monkeypatch):
    monkeypatch.setattr(witness.sysconfig, 'get_path', lambda name: str(tmp_path))
    path = str(tmp_path)
    (tmp_path/'cc').touch(0o755)
    assert 'no gcc, no clang' in describe_compiler({'PATH': path})['error']  # Triton takes no cc
    (tmp_path/'clang').touch(0o755)
    assert describe_compiler({'PATH': path}) == {'error': f'there is no {tmp_path/"Python.h"}'}
    (tmp_path/'Python.h').touch()
    assert describe_compiler({'PATH': path}) == {'content': f'{tmp_path/"clang"}'}
    (tmp_path/'gcc').touch(0o755)
    assert describe_compiler({'PATH': path}) == {'content': f'{tmp_path/"gcc"}'}
    assert describe_compiler({'PATH': path, 'CC': 'cc'}) == {'content': f'{tmp_path/"cc"}'}
    for named in '', 'gcc-99':
        assert f'CC is {named!r}' in describe_compiler({'PATH': path, 'CC': named})['error']


def test_a_real_preflight_for_gpus_stops_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr('llm_workbook.launching.preflight.why_no_gpu_fork', lambda: None)
    monkeypatch.setenv('CC', 'no-such-compiler')
    recipe = ONE.changed({'cluster.device': 'cuda', 'cluster.processes': 1})
    found = {f.check: f for f in preflight(recipe, tmp_path/'run').problems}
    assert "CC is 'no-such-compiler', which is no program here" in found['compiler'].what
    monkeypatch.setenv('CC', sys.executable)  # Any program will do for a look
    assert 'no program here' not in f'{preflight(recipe, tmp_path/"run")}'


OFFLOAD = {
    'cluster.device': 'cuda', 'sharding.strategy': 'zero2', 'sharding.offload_optimizer': 'cpu'}


@pytest.mark.parametrize('changes, stops', [
    (OFFLOAD, True),
    (OFFLOAD | {'sharding.offload_optimizer': 'none'}, False),
    (OFFLOAD | {'optimizer.kind': 'sgd'}, False),
    (OFFLOAD | {'cluster.device': 'cpu'}, False)])  # torch's own optimizer steps there
def test_a_node_that_cannot_compile_an_offloaded_optimizer_is_named(changes, stops):
    bare = OTHER | {'gpus': 1, 'builder': {'error': 'there is no c++ and no ninja'}}
    found = assess(TWO.changed(changes), [FACT | {'gpus': 1}, bare])
    assert [(f.check, f.host) for f in found] == ([('builder', 'node2')] if stops else [])
    for finding in found:
        assert finding.stops
        assert 'no c++ and no ninja' in finding.what
        assert 'pip install ninja' in finding.fix


@pytest.mark.parametrize('facts, built', [
    ("installed_ops={'cpu_adam': True}\naccelerator_name='cuda'\n", True),
    ("installed_ops={'cpu_adam': True}\naccelerator_name='cpu'\n", False),  # Compiled again
    ("installed_ops={'cpu_adam': False}\naccelerator_name='cuda'\n", False)])
def test_an_optimizer_that_came_compiled_needs_no_compiler(tmp_path, monkeypatch, facts, built):
    (tmp_path/'git_version_info_installed.py').write_text(facts)
    place = SimpleNamespace(origin=str(tmp_path/'__init__.py'))
    monkeypatch.setattr(witness, 'find_spec', lambda name: place)
    found = witness.describe_builder({'PATH': '/nowhere'})
    without = {'error': 'there is no c++ and no ninja'}
    assert found == ({'content': 'compiled already'} if built else without)


def test_a_shell_that_sets_torchs_allocator_is_found_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr('llm_workbook.launching.preflight.why_no_gpu_fork', lambda: None)
    monkeypatch.setenv('PYTORCH_CUDA_ALLOC_CONF', 'max_split_size_mb:128')
    recipe = ONE.changed({'cluster.device': 'cuda', 'cluster.processes': 1})
    found = {f.check: f for f in preflight(recipe, tmp_path/'run').problems}
    assert 'PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 is set here' in found['allocator'].what
    assert 'put it into cluster.variables' in found['allocator'].fix
    given = {'cluster.variables': {'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:128'}}
    found = preflight(recipe.changed(given), tmp_path/'run').problems
    assert 'allocator' not in {finding.check for finding in found}


LINK = {
    'hosts': ['node1', 'node2'], 'backend': 'gloo', 'bps': 1e9, 'wrong': 0, 'error': '',
    'planned': None}


@pytest.mark.parametrize('change, words, stops', [
    ({'planned': 3e9}, 'runs at 1.00 GB/s, and the plan counts with 3.00', False),
    ({'error': 'timed out'}, 'failed: timed out', True),
    ({'wrong': 5}, 'gave 5 wrong sums', True), ({'bps': None}, 'not timed', False)])
def test_links_that_are_bad(change, words, stops):
    finding = only(assess(TWO, [FACT, OTHER], [LINK | change]), 'links')
    assert finding.host == 'node1 - node2'
    assert words in finding.what
    assert finding.stops is stops
    assert assess(TWO, [FACT, OTHER], [LINK | {'planned': 1.9e9}]) == []


def test_a_planned_speed_is_that_of_the_network_for_the_backend_of_the_plan():
    recipe = TWO.changed({'cluster.hardware': '8x-h100@infiniband-400', 'cluster.device': 'cuda'})
    assert doctor._planned_bps(recipe, LINK) is None  # gloo: the plan counts with NCCL
    assert doctor._planned_bps(recipe, LINK | {'backend': 'nccl'}) == pytest.approx(40e9)
    eight = recipe.changed({'cluster.processes': 8})  # Of which one is timed
    assert doctor._planned_bps(eight, LINK | {'backend': 'nccl'}) == pytest.approx(5e9)
    assert doctor._planned_bps(recipe, LINK | {'backend': 'nccl', 'hosts': ['a', 'a']}) > 1e11
    assert doctor._planned_bps(TWO, LINK) is None


def test_a_driver_may_differ():
    finding = only(
        assess(TWO, [FACT, OTHER | {'software': {'torch': '2', 'driver': '550'}}]), 'software')
    assert not finding.stops
    assert finding.what == 'driver is absent on node1 and 550 on node2'


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_a_directory_without_the_right_to_write(tmp_path):
    (tmp_path/'run').mkdir(mode=0o500)
    assert 'cannot be used' in check_shared_directory(tmp_path/'run', 'ab', True)['error']


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path/'file').write_text('')
    assert check_shared_directory(tmp_path/'file'/'run', 'ab', True) == {
        'error': 'cannot be used: Not a directory', 'free_b': None}
    made = preflight(ONE.changed({'cluster.processes': 1}), tmp_path/'file'/'run')
    finding = only([f for f in made.problems if f.check == 'directory'], 'directory')
    assert finding.what == 'the directory of the run cannot be used: Not a directory'


# What a name leads to

def test_what_the_hub_has_cached(tmp_path, monkeypatch):
    import huggingface_hub.constants as hub
    monkeypatch.setattr(hub, 'HF_HUB_CACHE', str(tmp_path))
    monkeypatch.setattr(hub, 'HF_HUB_OFFLINE', True)
    assert describe_source('owner/name') == {'error': 'is not in the cache of the Hub'}
    place = tmp_path/'models--owner--name'
    (place/'snapshots/0123456789abcdef').mkdir(parents=True)
    (place/'refs').mkdir()
    (place/'refs/main').write_text('0123456789abcdef')
    assert (
        describe_source('owner/name')
        == describe_source('owner/name', '0123456789abcdef')
        == {'content': 'commit 0123456789ab'})
    monkeypatch.setattr(hub, 'HF_HUB_OFFLINE', False)
    assert describe_source('owner/name', kind='datasets')['later']
    cached, absent = (
        {'sources': {'data': one}}
        for one in ({'content': 'commit 0'}, describe_source('owner/name', kind='datasets')))
    finding = only(assess(TWO, [FACT | cached, OTHER | absent]), 'files')
    assert (finding.host, finding.stops) == ('node2', False)
    assert 'hf download' in finding.fix


def test_files_are_told_apart_by_names_sizes_and_both_ends(tmp_path):
    file = tmp_path/'a.bin'
    file.write_bytes(bytes(300_000))
    before = describe_source(str(tmp_path))
    assert before == describe_source(str(tmp_path))
    assert before['content'].startswith('1 file, 300,000 bytes')
    for place, byte in ((0, b'x'), (299_999, b'y')):
        with open(file, 'r+b') as out:
            out.seek(place)
            out.write(byte)
        before, was = describe_source(str(tmp_path)), before
        assert before != was
    assert describe_source(str(tmp_path/'*.bin'))['content'].startswith('1 file,')
    assert describe_source(str(tmp_path/'*.csv')) == {'error': 'leads to no file'}
    assert describe_source(str(tmp_path/'no.csv')) == {'error': 'is not there'}


# Where a process stands

@pytest.mark.parametrize(
    'text, names',
    [
        ('node1', ['node1']),
        ('node[1-3]', ['node1', 'node2', 'node3']),
        ('a[01-02,10],b', ['a01', 'a02', 'a10', 'b']),
        ('r[1-2]n[1-2]', ['r1n1', 'r1n2', 'r2n1', 'r2n2']),
        ('', [])])
def test_names_of_nodes_are_read_as_slurm_writes_them(text, names):
    assert talks.node_names(text) == names


def test_the_place_of_a_process():
    slurm = {
        'SLURM_PROCID': '1', 'SLURM_NTASKS': '2', 'SLURM_JOB_NODELIST': 'n[1-2]',
        'SLURM_JOB_ID': '20007'}
    assert process_place(slurm | {'SLURMD_NODENAME': 'n2'}) == Place(
        1, 2, ('n1', 'n2'), 'n2', 'n1', 28007, False)
    torchrun = {
        'RANK': '3', 'WORLD_SIZE': '4', 'MASTER_ADDR': 'm', 'MASTER_PORT': '7',
        'TORCHELASTIC_USE_AGENT_STORE': 'True'}
    assert process_place(torchrun)[:2] == (3, 4)
    assert process_place(torchrun)[4:] == ('m', 7, True)
    assert process_place(torchrun, 'x', 9)[4:] == ('x', 9, False)


def test_the_head_listens_on_one_address_alone(tmp_path):
    port = free_port()
    talk = Rendezvous(Place(0, 1, (), 'node1', 'localhost', port))
    talk.join()
    listening = {
        line.split()[1]
        for line in Path('/proc/net/tcp').read_text().splitlines()[1:]
        if line.split()[3] == '0A'}
    assert f'0100007F:{port:04X}' in listening
    assert f'{0:08X}:{port:04X}' not in listening


# GPUs

@pytest.mark.parametrize(
    'env, gpus, card',
    [
        ({'LOCAL_RANK': '3'}, 4, 3),
        ({'SLURM_LOCALID': '2'}, 4, 2),
        ({}, 4, 0),
        ({'SLURM_LOCALID': '2'}, 1, 0),
        ({'LOCAL_RANK': '1', 'SLURM_LOCALID': '0'}, 2, 1)])
def test_every_process_of_a_node_takes_its_own_card(monkeypatch, env, gpus, card):
    import torch
    taken = []
    for key in ('LOCAL_RANK', 'SLURM_LOCALID'): monkeypatch.delenv(key, raising=False)
    for key, value in env.items(): monkeypatch.setenv(key, value)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus)
    def take_and_fail(number):
        taken.append(number)
        raise ZeroDivisionError
    monkeypatch.setattr(torch.cuda, 'set_device', take_and_fail)
    assert talks._probe(None, 'nccl', (0, 1), 0, 12)['error'] == 'ZeroDivisionError'
    assert taken == [card]


def test_a_torch_without_cuda_is_a_finding_of_the_link(monkeypatch):
    import torch
    def refuse(card): raise AssertionError('Torch not compiled with CUDA enabled')
    monkeypatch.setattr(torch.cuda, 'set_device', refuse)
    assert talks._probe(None, 'nccl', (0, 1), 0, 12) == {
        'bps': None, 'wrong': 0, 'error': 'Torch not compiled with CUDA enabled'}


class FakeNccl:
    "The only constructor that torch's stubs list: store, rank, size, options."
    class Options:
        _timeout = None

    def __init__(self, store, rank, size, options):
        if not isinstance(options, self.Options):
            raise TypeError('__init__(): incompatible constructor arguments')
        self.made = rank, size, options._timeout, os.environ.get('TORCH_NCCL_BLOCKING_WAIT')


def test_nccl_gets_options_and_raises_at_its_limit_in_place_of_ending_the_process(monkeypatch):
    import torch.distributed as dist
    monkeypatch.setattr(dist, 'ProcessGroupNCCL', FakeNccl, raising=False)
    monkeypatch.delenv('TORCH_NCCL_BLOCKING_WAIT', raising=False)
    group = talks._pair_group(dist.HashStore(), 'nccl', (3, 5), 5, 12)
    assert group.made == (1, 2, timedelta(seconds=12), '1')
    assert 'TORCH_NCCL_BLOCKING_WAIT' not in os.environ  # The run that follows is not changed


@pytest.mark.parametrize('error, words', [
    (TypeError('__init__(): bad arguments\n 1. another'), '__init__(): bad arguments'),
    (ValueError(), 'ValueError')])
def test_any_error_of_a_probe_is_a_finding_of_that_link(monkeypatch, error, words):
    def refuse(*args): raise error
    monkeypatch.setattr(talks, '_pair_group', refuse)
    report = talks._probe(None, 'gloo', (0, 1), 0, 4)
    assert report == {'bps': None, 'wrong': 0, 'error': words}
    finding = only(assess(TWO, [FACT, OTHER], [LINK | report]), 'links')
    assert f'failed: {words}' in finding.what


@pytest.mark.parametrize('left_s, gloo_s, nccl_s', [
    (25, 4, 12), (13, 4, 9), (8.5, 4, 4.5), (8, 0, 0), (-3, 0, 0)])
def test_a_link_gets_what_it_needs_or_what_is_left(monkeypatch, left_s, gloo_s, nccl_s):
    monkeypatch.setattr(talks.time, 'monotonic', lambda: 100.0)
    talk = Rendezvous(Place(0, 1, (), 'node1', 'localhost', 1))
    talk.until = 100 + left_s
    assert talks._link_limit_s(talk, 'gloo') == gloo_s
    assert talks._link_limit_s(talk, 'nccl') == nccl_s


def test_a_kernel_that_has_opened_the_gpus_is_told_what_to_run(tmp_path, monkeypatch):
    import torch
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    with pytest.raises(
        RuntimeError,
        match='CUDA is initialised in this kernel.*python -m llm_workbook preflight recipe.yaml'
    ):
        preflight(ONE.changed({'cluster.device': 'cuda'}), tmp_path/'run')
    assert not preflight(ONE.changed({'cluster.processes': 1}), tmp_path/'run').problems


def test_a_kernel_that_has_asked_for_gpus_is_told_what_to_run(tmp_path, monkeypatch):
    "`torch.cuda.is_available()` marks later forks, and `torch.cuda.is_initialized()` stays false."
    import torch
    kernel = os.getpid()
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: False)
    monkeypatch.setattr(torch.cuda, '_is_in_bad_fork', lambda: os.getpid() != kernel)
    with pytest.raises(
        RuntimeError, match='CUDA was asked for its devices in this kernel.*python -m llm_workbook'
    ):
        preflight(ONE.changed({'cluster.device': 'cuda'}), tmp_path/'run')
    assert not preflight(ONE.changed({'cluster.processes': 1}), tmp_path/'run').problems


# The program

def program(recipe, tmp_path, *words, **env):
    recipe.save(tmp_path/'recipe.yaml')
    clean = {k: v for k, v in os.environ.items() if k not in ('RANK', 'WORLD_SIZE')} | {
        'OMP_NUM_THREADS': '1'}
    asked = 'llm_workbook', 'preflight', tmp_path/'recipe.yaml', '--directory', tmp_path/'run'
    return subprocess.run(
        [sys.executable, *words, '-m', *asked], cwd=ROOT, env=clean | env, capture_output=True,
        text=True, timeout=60)


@pytest.mark.slow
def test_the_program_on_the_ranks_of_torchrun(tmp_path, warm):
    words = (
        '-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint'.split())
    done = program(ONE, tmp_path, *words, f'127.0.0.1:{free_port()}', GLOO_SOCKET_IFNAME='lo')
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('preflight of reviews-qlora, ')
    assert ': go\n' in done.stdout
    assert done.stdout.count('preflight') == 1


def test_the_program_says_stop_by_its_exit_code(tmp_path, forked):
    env = {
        'SLURM_PROCID': '0', 'SLURM_NTASKS': '1', 'SLURM_JOB_NODELIST': 'localhost',
        'SLURM_JOB_ID': str(free_port())}
    done = program(TWO, tmp_path, **env)
    assert done.returncode == 1
    assert '  fail  world ' in done.stdout
    assert 'Traceback' not in done.stderr


def test_torch_is_whole_before_two_threads_ask_for_it(tmp_path):
    "Else one of them may find `torch.distributed` half imported, which ended a process in CI."
    code = (
        'import sys\n'
        'from llm_workbook.launching import preflight as doctor\n'
        'from llm_workbook.config.recipe import Recipe\n'
        'def look(*args):\n'
        '    print("torch._C._distributed_c10d" in sys.modules)\n'
        '    raise ValueError("seen")\n'
        'doctor._PlannedSave = look\n'
        'env = {"RANK": "0", "WORLD_SIZE": "1"}\n'
        'recipe = Recipe.named("reviews-qlora")\n'
        'print(doctor.preflight(recipe, "run", env, "localhost", 1))\n')
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=tmp_path, env=os.environ | {'PYTHONPATH': str(ROOT)},
        capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith('True\n'), done.stderr
    assert 'seen' in done.stdout


def test_the_program_goes_on_with_few_open_files_and_a_thread_that_never_ends(tmp_path, forked):
    "It warns of the files. A call into a dead network may never come back; the verdict must."
    ONE.changed({'cluster.processes': 1}).save(tmp_path/'recipe.yaml')
    code = (
        'import resource, runpy, sys, threading; '
        'resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)); '
        'threading.Thread(target=threading.Event().wait).start(); '
        'sys.argv[1:] = ["preflight", "recipe.yaml", "--directory", "run"]; '
        'runpy.run_module("llm_workbook", run_name="__main__")')
    env = {
        k: v for k, v in os.environ.items() if k not in ('RANK', 'WORLD_SIZE', 'SLURM_PROCID')
    } | {'PYTHONPATH': str(ROOT)}
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=tmp_path, env=env, capture_output=True, text=True,
        timeout=60)
    assert done.returncode == 0, done.stderr
    assert ': go' in done.stdout, done.stderr
    assert 'a process may open 200 files, and 261 are wanted. Lift it: ulimit -n 261' in done.stdout


def test_a_word_that_is_no_command_is_refused(forked):
    done = subprocess.run(
        [sys.executable, '-m', 'llm_workbook', 'prefligth'], cwd=ROOT, capture_output=True,
        text=True, timeout=60)
    assert done.returncode == 2
    assert "did you mean 'preflight'" in done.stderr
