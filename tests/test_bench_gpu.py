"""`python -m bench.gpu` in toy form on the CPU: its parts, what it says of figures that only a GPU
has, and that it goes on where it was cut off. No GPU has run it while these tests were written."""
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from bench.gpu import __main__ as program
from bench.gpu import ceilings, checks, lines, memory, part
from bench.gpu.parts import PARTS, Part
from bench.gpu.place import Missing, Place, plain, recipe_folder
from bench.record import ROOT
from bench.shared import gpu_configurations, gpu_rows
from bench.shared.heap import COUNTING
from bench.shared.models import build, fill, one_block
from bench.shared.small_rehearsals import SHAPES
from trouble import slow_case

TOY = Place('cpu', toy=True)
NAMED = {made.name: made for made in PARTS}
ON_BOTH = 'nccl_probe', 'float16_scaler', 'nf4_bytes', 'packed_product', 'tf32', 'segments'
FACTS = {'gpu': None, 'versions': {}, 'code': 'a', 'commit': None, 'toy': True}


def found(name: str) -> dict: return part.outcome(NAMED[name], TOY)


def on_cpu(*more, results):
    return subprocess.run(
        [sys.executable, '-m', 'bench.gpu', '--device', 'cpu', '--results', str(results), *more],
        cwd=ROOT, capture_output=True, text=True)


# The list

def test_every_part_has_a_name_and_ends_in_eight_minutes():
    assert len(NAMED) == len(PARTS)
    assert all(0 < made.limit_s <= 480 for made in PARTS)
    groups = [made.group for made in PARTS]
    assert (groups.count('memory'), groups.count('large')) == (32, 16)
    assert len(memory.large_recipes()) == 16
    asked = {
        'device_setup', 'nccl_probe', 'device_run', 'cpu_ranks', 'opened_kernel', 'watchdog',
        'float16_scaler', 'nf4_bytes', 'packed_product', 'tf32', 'loss_head', 'one_pass_head',
        'segments', 'matmul', 'bandwidth', 'host_copies', 'launches', 'dequantise', 'attention',
        'allocator', 'nccl'}
    assert asked <= {made.name for made in program.chosen([], quick=True)}
    assert len(program.chosen([], quick=True)) == len(asked) + len(memory.QUICK)


def test_the_configurations_cover_what_was_promised():
    rows, told = memory.CONFIGURATIONS, gpu_configurations
    methods = {(preset, method['method.kind']) for preset, method, *_ in rows}
    assert methods == {(told.SMALL, 'full'), (told.SMALL, 'lora'), (told.SMALL, 'qlora'),
                       (told.MID, 'lora'), (told.MID, 'qlora')}
    assert {row[4] for row in rows} == {1, 2}
    for part_of in (told.AGAIN, told.WHOLE, told.HALF, told.EXACT, told.ONE_PASS, told.SEGMENTS,
                    told.AWAY):
        has = [part_of.items() <= row[5].items() for row in rows]
        assert any(has) and not all(has)


def test_the_parent_opens_neither_torch_nor_a_gpu():
    program = 'import bench.gpu.__main__, sys; print(*{"torch", "transformers"} & set(sys.modules))'
    done = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ''


# Parts

@pytest.fixture
def kept_precision():
    "Products are in float32 as before."
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize('name', ON_BOTH)
def test_a_check_passes_on_the_cpu(name, kept_precision):
    made = found(name)
    assert made['status'] == 'passed', made
    assert made['figures']


def test_a_check_that_is_not_met_fails(monkeypatch):
    monkeypatch.setattr(checks, 'relative', lambda ours, truth: 0.5)
    assert found('packed_product')['status'] == 'failed'
    monkeypatch.setattr(checks, 'differences', lambda ours, theirs: 1)
    assert found('nf4_bytes')['status'] == 'failed'


def test_codes_that_differ_are_counted():
    ours = torch.tensor([0x12, 0x34, 0x56], dtype=torch.uint8)
    assert checks.differences(ours, torch.tensor([0x12, 0x35, 0x65], dtype=torch.uint8)) == 3
    assert checks.differences(ours, ours) == 0


@pytest.mark.parametrize('call', [ceilings.matmul, ceilings.bandwidth, ceilings.dequantise,
                                  ceilings.attention])
def test_a_ceiling_is_measured_on_the_cpu(call, kept_precision):
    made = found(call.__name__)
    assert made['status'] == 'measured'
    measured = {key: value for key, value in made['figures'].items() if key not in made['missing']}
    assert measured and all(value > 0 for value in measured.values())


@pytest.mark.parametrize('name', ['host_copies', 'launches', 'allocator', 'nccl', 'watchdog'])
def test_what_a_cpu_cannot_show_is_null_with_its_reason(name):
    made = found(name)
    assert made['status'] == 'skipped'
    assert 'CPU' in made['reason']
    assert all(value is None for value in made.get('figures', {}).values())
    assert made.get('missing', {}).keys() == made.get('figures', {}).keys()


def test_tf32_of_a_cpu_is_no_number(kept_precision):
    made = found('matmul')
    assert {value for key, value in made['figures'].items() if key.startswith('tf32')} == {None}
    assert set(made['missing'].values()) == {'a CPU has no TF32'}


def test_a_package_that_is_missing_is_named():
    def never(place): raise AssertionError('it ran')
    made = part.outcome(Part('check', 'x', never, ('json', 'no_such_package')), TOY)
    assert made == {'status': 'skipped', 'reason': 'not installed: no_such_package'}


def test_an_error_is_a_line_without_folders():
    def fail(place): raise OSError(f'no {ROOT}/bench/x.json  here')
    made = part.outcome(Part('check', 'x', fail), TOY)
    assert made == {'status': 'failed', 'reason': 'OSError: no x.json here'}
    assert len(plain(ValueError('x' * 1000))) == 400


def test_too_little_memory_is_a_result(monkeypatch):
    def measured(made, real): raise RuntimeError('x: torch.OutOfMemoryError: CUDA out of memory')
    monkeypatch.setattr(memory, 'measured', measured)
    made = part.outcome(NAMED['llama-3.2-1b-full-1x2048'], TOY)
    assert made['status'] == 'out of memory'
    assert made['figures']['planned_allocated_b'] > 0
    with pytest.raises(RuntimeError, match='other'):
        memory.tried(lambda: (_ for _ in ()).throw(RuntimeError('another, other error')))


def test_a_configuration_is_set_beside_its_plan(monkeypatch):
    seen = {'steps_s': [9.0, 2.0, 3.0], 'peak_b': 10**8, 'built_b': 1}
    monkeypatch.setattr(memory, 'measured', lambda made, real: dict(seen))
    made = part.outcome(NAMED['llama-3.2-1b-full-1x2048'], TOY)
    figures = made['figures']
    assert (made['status'], figures['step_s']) == ('measured', 2.0)
    error = 100 * (figures['planned_allocated_b'] / 10**8 - 1)
    assert abs(figures['allocated_error'] - error) < 1e-3
    assert figures['driver_b'] is figures['reserved_b'] is None
    assert 'device_error' not in figures
    assert made['missing']['driver_b'] == 'a CPU has no driver'


def test_two_gpus_are_not_taken_for_granted(monkeypatch):
    monkeypatch.setattr(memory, 'cards', lambda: 1)
    number = next(i for i, row in enumerate(memory.CONFIGURATIONS) if row[4] == 2)
    with pytest.raises(Missing, match='it takes 2 GPUs'):
        memory.configuration(Place('cuda'), number)


def test_what_others_hold_of_a_gpu_is_not_ours(monkeypatch):
    made = SimpleNamespace(
        name='x', cluster=SimpleNamespace(device='cuda'), model_dump_json=lambda: '{}')
    said = json.dumps({'driver_b': 700, 'context_b': 500})
    done = SimpleNamespace(returncode=0, stdout=f'noise\n{said}\n')
    monkeypatch.setattr(gpu_rows.subprocess, 'run', lambda *args, **how: done)
    for others, ours in ((100, (600, 400)), (None, (None, None))):
        monkeypatch.setattr(gpu_rows, 'used_b', lambda others=others: others)
        seen = gpu_rows.measured(made)
        assert (seen['driver_b'], seen['context_b'], seen['others_b']) == (*ours, others)


def test_a_model_that_is_sharded_is_built_in_one_block():
    from llm_workbook import fake_ranks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    with torch.device('meta'): model = torch.nn.Sequential(
        torch.nn.Linear(8, 4), torch.nn.Linear(4, 16))
    fill(model, one_block(model, torch.float32, 'cpu'), torch.float32)
    block = model[1].weight.detach().flatten().clone()
    assert block.numel() == 64 and block.std() > 0
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    with fake_ranks(2):
        mesh = init_device_mesh('cpu', (2,))
        for layer in model: fully_shard(layer, mesh=mesh)
        first, second = (layer.weight._local_tensor for layer in model)
        assert first.data_ptr() != second.data_ptr()
        assert torch.equal(first.flatten(), block[:16])
        assert torch.equal(second.flatten(), block[:32])


@pytest.mark.parametrize('method', ['full', 'lora', 'qlora'])
def test_a_model_is_built_on_its_device(method, tmp_path):
    "The device is the processor by another name, so that it is treated as a GPU is."
    config = SHAPES['quick'] | {
        'hidden_size': 64, 'intermediate_size': 128, 'num_hidden_layers': 2,
        'num_attention_heads': 4, 'vocab_size': 512}
    made = gpu_rows.plain_recipe(
        recipe_folder(str(tmp_path), config), 1,
        {'method.kind': method, 'cluster.device': 'cpu'})
    model = build(made, 'cpu:0')
    parameters = list(model.parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters)
    packed = [p for p in parameters if p.dtype == torch.bfloat16 and p.shape[-1] == 1]
    assert len(packed) == (14 if method == 'qlora' else 0)
    ids = torch.arange(16)[None]
    loss = model(input_ids=ids, labels=ids).loss
    assert 4 < loss.item() < 10


# Lines

def test_lines_are_added_and_a_cut_one_is_left_out(tmp_path):
    file = tmp_path/'deep'/'x.jsonl'
    lines.write(file, {'part': 'a'})
    with file.open('a') as out: out.write('{"part": "b", "fig')
    lines.write(file, {'part': 'c'})
    assert [line['part'] for line in lines.read(file)] == ['a', 'c']
    assert lines.read(tmp_path/'none.jsonl') == []


def test_the_code_has_a_digest(tmp_path):
    for folder in lines.CODE: (tmp_path/folder).mkdir(parents=True)
    file = tmp_path/'llm_workbook/a.py'
    file.write_text('1')
    before = lines.code_digest(tmp_path)
    assert before == lines.code_digest(tmp_path)
    file.write_text('2')
    assert lines.code_digest(tmp_path) != before
    assert lines.commit(tmp_path) is None


@pytest.fixture
def children(monkeypatch):
    "Parts that are not started; the names of those that would have been."
    asked = []

    def child(name, how, limit_s):
        if name == 'facts': return {'name': '1x-toy', 'gpu': None, 'versions': {}, 'machine': {}}
        asked.append(name)
        return {'status': 'measured', 'reason': None, 'figures': {'x_b': 1.23456789}, 'missing': {}}
    monkeypatch.setattr(program, 'child', child)
    monkeypatch.setattr(program, 'code_digest', lambda: 'a')
    return asked


def test_a_part_with_a_line_is_left_out_until_the_code_changes(children, tmp_path, monkeypatch):
    words = ['--device', 'cpu', '--results', str(tmp_path)]
    program.main([*words, 'tf32', 'matmul'])
    assert children == ['tf32', 'matmul']
    line = lines.read(tmp_path/'1x-toy.jsonl')[0]
    assert line['figures'] == {'x_b': 1.2346}
    assert {'gpu', 'machine', 'versions', 'code', 'commit', 'date', 'seconds'} <= line.keys()
    children.clear()
    program.main([*words, '--quick'])
    quick = len(program.chosen([], quick=True))
    assert len(children) == quick - 2 and not {'tf32', 'matmul'} & set(children)
    children.clear()
    program.main([*words, '--quick'])
    assert children == []
    program.main([*words, 'tf32'])
    assert children == ['tf32']
    monkeypatch.setattr(program, 'code_digest', lambda: 'b')
    children.clear()
    program.main([*words, '--quick'])
    assert len(children) == quick


def test_a_part_for_which_no_time_is_left_has_no_line(children, tmp_path, capsys):
    program.run([NAMED['tf32']], tmp_path/'x.jsonl', FACTS, [], 0)
    assert 'no time for 1 parts: call again' in capsys.readouterr().out
    assert not (tmp_path/'x.jsonl').exists()


def test_a_part_that_takes_too_long_is_ended():
    found = program.child('tf32', ['cpu', 'toy'], 0.05)
    assert found == {'status': 'failed', 'reason': 'cut off after 0 s'}


def test_the_table_shows_the_last_line_of_a_part():
    first = {'group': 'check', 'part': 'tf32', 'status': 'failed', 'seconds': 3,
             'reason': 'why', 'figures': {}}
    last = first | {'status': 'passed', 'reason': None, 'figures': {'off': 0.25, 'passed': True}}
    assert lines.table([first, last]) == 'check  tf32  passed  3 s  off 0.25'
    assert lines.table([]) == ''


@pytest.mark.slow
def test_it_runs_from_the_command_line(tmp_path):
    done = on_cpu('tf32', results=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'check  tf32  passed' in done.stdout
    line, = lines.read(tmp_path/'cpu.jsonl')
    assert (line['status'], line['toy'], line['gpu']) == ('passed', True, None)
    assert not any(word in json.dumps(line) for word in (str(ROOT), os.path.expanduser('~/')))


@pytest.mark.parametrize(
    'words, said',
    [(['--device', 'cpu'], 'a CPU gives no record of a GPU'),
     (['--device', 'cpu', '--results', 'x', 'no_part'], 'no part no_part; known: device_setup')])
def test_a_wrong_call_is_refused(words, said, children, capsys):
    with pytest.raises(SystemExit) as ended: program.main(words)
    assert said in f'{ended.value} {capsys.readouterr().err}'


def test_without_a_gpu_there_is_no_record(monkeypatch, tmp_path):
    monkeypatch.setattr(program, 'child', lambda *how: {'name': None})
    with pytest.raises(SystemExit, match='no GPU: torch sees none here'):
        program.main(['--results', str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_committed_lines_are_of_gpus():
    for file in lines.FOLDER.glob('*.jsonl'):
        for line in lines.read(file):
            assert line['gpu'] and not line['toy']
            assert line['part'] and line['status'] and line['date'] and line['code']


# Whole runs, which take long

WARM = """
import os, sys
import bitsandbytes, datasets, peft, transformers.trainer, trl
from bench.gpu import part, parts
from llm_workbook.model import loss_head
from warm import forked_programs
# Without AVX-512 the head holds copies in float32, which a plan of a GPU does not count
loss_head.slow_half_dtypes = lambda: ()
with forked_programs():
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.argv[1:] = line.split()
            try: part.main()
            finally: os._exit(0)
        os.waitpid(child, 0)
        print('ended', flush=True)
"""


@pytest.fixture(scope='module')
def in_a_fork():
    """A function that runs a part in a fork of one process, which has imported what parts import;
    programs that a part starts are forks too, and their memory is counted."""
    warm = subprocess.Popen(
        [sys.executable, '-c', WARM], cwd=ROOT,
        env=os.environ | program.ENVIRONMENT | COUNTING | {'PYTHONPATH': os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    def run(name):
        warm.stdin.write(f'{name} cpu toy\n')
        warm.stdin.flush()
        said = []
        while (line := warm.stdout.readline()) not in ('ended\n', ''): said.append(line)
        return json.loads(next(line for line in reversed(said) if line.startswith('{')))
    yield run
    warm.communicate()


@pytest.mark.slow
def test_a_part_passes_in_a_process_of_its_own():
    assert program.child('device_setup', ['cpu', 'toy'], 300)['status'] == 'passed'


@pytest.mark.slow
@pytest.mark.parametrize('name', ['device_run', 'cpu_ranks', 'opened_kernel', 'loss_head',
                                  'one_pass_head', 'float16_run', 'resumed'])
def test_a_run_passes_in_toy_form(name, in_a_fork):
    made = in_a_fork(name)
    assert made['status'] == 'passed', made


@pytest.mark.parametrize('name', [
    slow_case('llama-3.2-1b-lora-4x2048-again'), slow_case('llama-3.2-1b-full-1x2048-whole-logits'),
    slow_case('llama-3.1-8b-qlora-1x2048-again-2-ranks'),
    slow_case('llama-3.1-8b-lora-1x4096-again-one-pass-segments')])
def test_a_configuration_is_measured_in_toy_form(name, in_a_fork):
    made = in_a_fork(name)
    assert made['status'] == 'measured', made
    assert abs(made['figures']['allocated_error']) < 10
    assert made['figures']['step_s'] > 0
