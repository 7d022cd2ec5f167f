"""What a node allows, what is known to be wrong with it, and copies between its GPUs: each check
finds what is planted, and a real preflight shows it in its table."""
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from llm_workbook.config.recipe import Recipe
from llm_workbook.launching import known_faults, node_limits, peer_copies
from llm_workbook.launching import preflight as doctor
from llm_workbook.launching.known_faults import fault_rows, node_faults
from llm_workbook.launching.node_limits import (
    free_gpu_memory, free_memory, limit_findings, memory_needs)
from llm_workbook.launching.peer_copies import copy_findings, watch_copies
from llm_workbook.launching.preflight import preflight
from llm_workbook.parallel.ranks import free_port
from llm_workbook.plan.ledger import memory

ROOT = Path(__file__).resolve().parents[2]
ONE = Recipe.named('reviews-qlora').changed({'cluster.hardware': None})
CLASSES = ONE.changed({'model.head': 'classification', 'data.format': 'classification'})
GPUS = Recipe.named('70b-2x24gb-qlora')
GIB = 2**30
PLENTY = {
    'ram_b': 2**42, 'swap_b': 0, 'gpus_b': [2**40] * 2, 'locked_b': None, 'open_files': 2**20,
    'shared_b': 2**34, 'infiniband': False, 'machine': 'x86_64',
    'flags': ['avx2', 'avx512_bf16'], 'base_files': 1}
NEEDS = {'host_b': 100 * GIB, 'locked_b': 10 * GIB, 'gpu_b': 22 * GIB, 'gpu_least_b': 20 * GIB}


def judged(recipe, **limits) -> list[tuple]:
    "Name and weight of what is found on a node with these limits."
    report = {'host': 'node1', 'limits': PLENTY | limits, 'needs': NEEDS}
    return [(f.check, f.stops) for f in limit_findings(recipe, [report])]


# Limits

@pytest.mark.parametrize('limits, found', [
    ({}, []),
    ({'ram_b': 112 * GIB}, []),
    ({'ram_b': 110 * GIB}, [('host memory', False)]),  # More than 90 % of it
    ({'ram_b': 99 * GIB, 'swap_b': GIB}, [('host memory', False)]),
    ({'ram_b': 99 * GIB}, [('host memory', True)]),
    ({'gpus_b': [23 * GIB, 21 * GIB]}, [('GPU memory', False)]),
    ({'gpus_b': [23 * GIB, 19 * GIB]}, [('GPU memory', True)]),
    ({'gpus_b': [23 * GIB, 23 * GIB, 0]}, []),  # The third is not used
    ({'gpus_b': []}, []),  # Nobody knows
    ({'locked_b': 10 * GIB}, []),
    ({'locked_b': 10 * GIB - 1}, [('locked memory', False)]),
    ({'open_files': 265}, []),
    ({'open_files': 264}, [('open files', False)]),
    ({'open_files': 2}, [('open files', True)]),
    ({'shared_b': GIB - 1}, [('shared memory', False)]),
    ({'flags': []}, [])])  # The GPUs compute
def test_what_is_too_little_for_gpus(limits, found):
    assert judged(GPUS, **limits) == found


@pytest.mark.parametrize('recipe, limits, found', [
    (ONE, {'shared_b': 0}, []),  # Ranks on CPUs talk through sockets
    (ONE, {'flags': ['avx2', 'amx_bf16']}, []),
    (ONE, {'flags': ['bf16'], 'machine': 'aarch64'}, []),
    (ONE, {'flags': ['avx2']}, ['processor']),
    (ONE, {'flags': ['avx512_bf16']}, ['processor']),  # Without AVX2
    (ONE.changed({'precision.compute': 'float32', 'method.storage': 'float32'}),
     {'flags': ['avx2']}, [])])
def test_what_is_too_little_for_cpus(recipe, limits, found):
    assert [name for name, _ in judged(recipe, **limits)] == found


def test_infiniband_wants_more_locked_memory_than_the_plan():
    two = Recipe.named('70b-2x8-a100-80-full')
    asked = {'host': 'node1', 'needs': NEEDS | {'locked_b': 0}}
    limits = PLENTY | {'locked_b': 2**23, 'gpus_b': []}
    def found(recipe, limits): return [*limit_findings(recipe, [asked | {'limits': limits}])]
    assert not found(two, limits)
    wired = limits | {'infiniband': True}
    finding, = found(two, wired)
    assert 'may lock 8.0 MiB of memory, and NCCL registers' in finding.what
    assert not found(two.changed({'cluster.nodes': 1}), wired)


def test_a_node_is_judged_once_and_without_a_plan_by_what_needs_none():
    little = {'host': 'node1', 'limits': PLENTY | {'ram_b': 0, 'open_files': 9}, 'needs': None}
    other = little | {'limits': little['limits'] | {'open_files': 8}}
    assert [f.check for f in limit_findings(GPUS, [little, other])] == ['open files']


def test_what_a_node_takes_is_what_the_ledger_counts():
    recipe = Recipe.named('7b-zero2-offload')
    ledger, needs = memory(recipe), memory_needs(memory(recipe))
    assert needs['host_b'] == max(ledger.on_node(x, 'host') for x in ('load', 'step', 'save'))
    assert needs['locked_b'] == ledger.peak('pinned') > GIB
    assert ledger.band[0] == needs['gpu_least_b'] < needs['gpu_b'] == ledger.peak()
    on_cpus = memory_needs(memory(ONE))
    assert on_cpus['host_b'] >= ONE.cluster.processes * memory(ONE).peak()


# What Linux says

def group(root, files):
    for name, text in files.items():
        (root/name).parent.mkdir(parents=True, exist_ok=True)
        (root/name).write_text(f'{text}\n')


MACHINE = {'proc/meminfo': 'MemFree: 1 kB\nMemAvailable: 8192 kB\nSwapFree: 16 kB'}
FIRST = {  # Version 1 of control groups, with another controller beside it
    'proc/self/cgroup': '5:cpu:/a\n4:memory:/job/step\n0::/b',
    'sys/fs/cgroup/memory/memory.limit_in_bytes': 2**62,
    'sys/fs/cgroup/memory/memory.usage_in_bytes': 9,
    'sys/fs/cgroup/memory/memory.stat': 'total_inactive_file 0',
    'sys/fs/cgroup/memory/job/memory.limit_in_bytes': 2**22,
    'sys/fs/cgroup/memory/job/memory.usage_in_bytes': 2**21,
    'sys/fs/cgroup/memory/job/memory.stat': f'inactive_file 7\ntotal_inactive_file {2**20}'}
SECOND = {
    'proc/self/cgroup': '0::/job',
    'sys/fs/cgroup/job/memory.max': 2**22,
    'sys/fs/cgroup/job/memory.current': 2**21,
    'sys/fs/cgroup/job/memory.stat': f'inactive_file {2**20}'}


@pytest.mark.parametrize('files, ram_b, swap_b', [
    ({}, 2**23, 2**14), (FIRST, 3 * 2**20, 0), (SECOND, 3 * 2**20, 0),
    (SECOND | {'sys/fs/cgroup/job/memory.max': 'max'}, 2**23, 2**14),
    (SECOND | {'sys/fs/cgroup/job/memory.max': 2**20}, 0, 0)])
def test_free_memory_is_that_of_the_machine_or_of_the_control_group(
    tmp_path, files, ram_b, swap_b
):
    group(tmp_path, MACHINE | files)
    assert free_memory(tmp_path) == {'ram_b': ram_b, 'swap_b': swap_b}


@pytest.mark.parametrize('script', ['exit 9', 'echo No devices were found', 'echo 0, GPU-a, [N/A]'])
def test_a_driver_that_does_not_answer_leaves_the_memory_of_gpus_open(tmp_path, script):
    assert free_gpu_memory({'PATH': str(tmp_path)}) == []
    (tmp_path/'nvidia-smi').write_text(f'#!/bin/sh\n{script}\n')
    (tmp_path/'nvidia-smi').chmod(0o755)
    assert free_gpu_memory({'PATH': f'{tmp_path}:{os.environ["PATH"]}'}) == []


# Known faults

HARMFUL = '1', '0', 'DETAIL', 'true', 'cpu', 'cuda:0', 'xpu'


def meeting(row) -> Recipe:
    "A recipe that a row is about."
    changes = {field: values[0] for field, values in row.get('when', {}).items()}
    base = ONE
    if changes.get('precision.compute') == 'float32': changes['method.storage'] = 'float32'
    if changes.get('cluster.device') == 'cuda': base = ONE.changed({'cluster.device': 'cuda'})
    return base.changed(changes)


@pytest.mark.parametrize('row', fault_rows()['variables'], ids=lambda row: row['name'])
def test_each_known_variable_is_found_and_its_value_is_not_said(row):
    recipe = meeting(row)
    value = next(x for x in HARMFUL if node_faults(recipe, {row['name']: x}, []))
    (check, what, fix, stops), = node_faults(recipe, {row['name']: value}, [])
    assert (check, stops) == ('environment', row['stops'])
    assert what == f'{row["name"]} is set here: {row["what"]}'
    assert fix and row['source']
    assert node_faults(recipe, {}, []) == []
    harmless = {'CUDA_LAUNCH_BLOCKING': '0', 'NVIDIA_TF32_OVERRIDE': '1', 'DS_ACCELERATOR': 'cuda',
                'TORCH_DISTRIBUTED_DEBUG': 'INFO', 'ACCELERATE_DEBUG_MODE': 'false',
                'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE': '0',
                'ACCELERATE_TORCH_DEVICE': recipe.cluster.device}
    assert node_faults(recipe, {row['name']: harmless[row['name']]}, []) == []


BAD = {'ddp-dies-under-detail': '2.13.1', 'code-from-a-config': '5.2.0', 'unpickler': '2.9.1+cu128',
       'kernels-from-the-hub': '0.12.0'}
GOOD = {'ddp-dies-under-detail': '2.12.0', 'code-from-a-config': '5.3.0', 'unpickler': '2.10.0'}


@pytest.mark.parametrize('row', fault_rows()['versions'], ids=lambda row: row['id'])
def test_each_known_version_is_found(monkeypatch, row):
    def found(installed, recipe, env, flags):
        def version_of(package):
            if package == row['package']: return installed
            return None
        monkeypatch.setattr(known_faults, '_installed', version_of)
        return [fault for fault in node_faults(recipe, env, flags) if row['what'] in fault[1]]
    recipe, env, flags = meeting(row), row.get('env', {}), row.get('flags', [])
    (check, what, _, stops), = found(BAD[row['id']], recipe, env, flags)
    assert (check, stops) == ('versions', row['stops'])
    assert what.startswith(f'{row["package"]} {BAD[row["id"]]}: ')
    assert not found(GOOD.get(row['id']), recipe, env, flags)
    if env: assert not found(BAD[row['id']], recipe, {}, flags)
    if flags: assert not found(BAD[row['id']], recipe, env, [])
    if 'when' in row: assert not found(BAD[row['id']], GPUS, env, flags)


def test_a_package_that_is_older_than_asked_for_is_named(monkeypatch):
    def version_of(package): return {'peft': '0.1', 'trl': '99'}.get(package)
    monkeypatch.setattr(known_faults, '_installed', version_of)
    (_, what, fix, stops), = node_faults(ONE, {}, [])
    assert what.startswith('peft is 0.1, and llm-workbook asks for >=')
    assert 'pip install "peft>=' in fix
    assert not stops


THREADS = {'cluster.variables': {'OMP_NUM_THREADS': '4'}}


@pytest.mark.parametrize('changes, env, words', [
    ({}, {'ACCELERATE_MIXED_PRECISION': 'fp8'}, "ACCELERATE_MIXED_PRECISION is 'fp8'"),
    ({}, {'FSDP_VERSION': '1'}, "FSDP_VERSION is '1'"),
    ({}, {'ACCELERATE_DYNAMO_BACKEND': 'inductor'}, 'ACCELERATE_DYNAMO_BACKEND'),
    (THREADS, {}, 'OMP_NUM_THREADS=4'),
    (THREADS, {'OMP_NUM_THREADS': '2'}, 'OMP_NUM_THREADS=4'),
    ({}, {'RANK': '0', 'SLURM_PROCID': '1'}, 'RANK is set here'),
    ({}, {'WORLD_SIZE': '1', 'SLURM_NTASKS': '2'}, 'WORLD_SIZE is set here')])
def test_a_contradiction_stops_the_run_before_it_starts(changes, env, words):
    fault, = node_faults(ONE.changed(changes), env, [])
    assert words in fault[1]
    assert fault[3]


@pytest.mark.parametrize('changes, env, is_cell', [
    ({}, {'ACCELERATE_MIXED_PRECISION': 'fp8', 'FSDP_VERSION': '1'}, True),  # Set over them
    ({}, {'ACCELERATE_GRADIENT_ACCUMULATION_STEPS': '4'}, True),  # The trainer takes its own
    ({}, {'ACCELERATE_USE_DEEPSPEED': 'true', 'ACCELERATE_DEEPSPEED_ZERO_STAGE': '2'}, True),
    ({}, {'RANK': '0', 'SLURM_PROCID': '1'}, True),
    (THREADS, {'OMP_NUM_THREADS': '4'}, False),
    ({}, {'OMP_NUM_THREADS': '1', 'NCCL_IB_HCA': 'x', 'CUDA_VISIBLE_DEVICES': '0'}, False),
    ({'cluster.interface': 'lo'}, {'GLOO_SOCKET_IFNAME': 'lo'}, False),
    ({}, {'RANK': '3', 'SLURM_PROCID': '1', 'TORCHELASTIC_RUN_ID': '7'}, False)])  # By torchrun
def test_what_the_library_sets_itself_is_no_alarm(changes, env, is_cell):
    assert node_faults(ONE.changed(changes), env, [], is_cell) == []


def test_the_loop_of_a_classifier_takes_the_accumulation_of_the_environment():
    fault, = node_faults(CLASSES, {'ACCELERATE_GRADIENT_ACCUMULATION_STEPS': '4'}, [], True)
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is '4'" in fault[1]


def test_transport_settings_of_a_shell_belong_into_the_recipe():
    env = {
        'NCCL_IB_HCA': 'mlx5', 'NCCL_DEBUG': 'INFO', 'NCCL_VERSION': '2', 'FI_PROVIDER': 'efa'}
    (_, what, fix, stops), = node_faults(GPUS, env, [])
    assert what == 'FI_PROVIDER, NCCL_IB_HCA are set here and not in the recipe'
    assert 'cluster.variables' in fix
    assert not stops
    ours = GPUS.changed({'cluster.variables': {'NCCL_IB_HCA': 'mlx5', 'FI_PROVIDER': 'efa'}})
    assert node_faults(ours, env, []) == []


DDP = '''
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group('gloo')
DistributedDataParallel(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()
print('trained')
'''


@pytest.mark.slow
@pytest.mark.parametrize('level', ['DETAIL', 'INFO'])
def test_ddp_really_dies_under_detail_with_the_versions_that_the_row_names(
    tmp_path, level, warm
):
    from packaging.specifiers import SpecifierSet
    row = fault_rows()['versions'][0]
    known = version('torch') in SpecifierSet(row['versions'])
    (tmp_path/'ddp.py').write_text(DDP)
    words = '-m torch.distributed.run --standalone --nproc-per-node=2'.split()
    env = os.environ | {'TORCH_DISTRIBUTED_DEBUG': level, 'GLOO_SOCKET_IFNAME': 'lo'}
    done = subprocess.run([sys.executable, *words, tmp_path/'ddp.py'], env=env, timeout=90,
                          capture_output=True, text=True)
    dies = level == 'DETAIL' and known
    assert ('SIGSEGV' in done.stderr) is dies
    assert ('trained' in done.stdout) is not dies


# Copies

COPIES = {  # What a copy between two GPUs may do, and how many numbers are wrong then
    'target.copy_(source)': 0,
    'target.copy_(source); target[7] += 1': 1,
    'target.copy_(source.roll(1))': peer_copies._COPIED}
PLANTED = ('from llm_workbook.launching.peer_copies import copy_pairs, _write_line\n'
           'import sys\n'
           'for code in sys.argv[1:]:\n'
           '    def copy(target, source): exec(code)\n'
           '    for line in copy_pairs(["cpu", "cpu"], copy): _write_line(line)')


@pytest.mark.slow
def test_copies_in_another_process_are_compared():
    pairs = watch_copies([sys.executable, '-c', PLANTED, *COPIES], 100)
    assert [pair['wrong'] for pair in pairs] == [wrong for wrong in COPIES.values() for _ in '12']
    found = [*copy_findings(GPUS, [{'host': 'node1', 'copies': pairs}])]
    assert all(f.stops for f in found)
    for wrong, finding in zip((1, 1, peer_copies._COPIED, peer_copies._COPIED), found, strict=True):
        assert f'{wrong:,} of 8,388,608 numbers' in finding.what


def test_a_copy_that_hangs_is_ended_and_named(monkeypatch):
    monkeypatch.setattr(peer_copies, '_HANGS_S', 0.2)
    begun = '{"from": 1, "to": 0, "at_s": %r}'
    code = f'import time; print({begun!r} % time.monotonic(), flush=True); time.sleep(99)'
    start = time.monotonic()
    pairs = watch_copies([sys.executable, '-c', code], 3)
    assert time.monotonic() - start < 20
    finding, = copy_findings(GPUS, [{'host': 'node1', 'copies': pairs}])
    assert finding.what == 'copies from GPU 1 to GPU 0: the copy did not end'
    assert finding.stops
    assert 'NCCL_P2P_DISABLE' in finding.fix


@pytest.mark.parametrize('code, words', [
    ('import time; time.sleep(99)', 'torch did not open the GPUs in time'),
    ('import sys; sys.exit(3)', 'the process ended with exit code 3')])
def test_a_process_that_never_copied_is_a_warning(code, words):
    pair, = watch_copies([sys.executable, '-c', code], 2)
    finding, = copy_findings(GPUS, [{'host': 'node1', 'copies': [pair]}])
    assert finding.what == f'copies: {words}'
    assert not finding.stops


# Real preflights

def rows(made) -> dict:
    return {row.check: row for row in made.checks}


def test_a_real_preflight_has_a_row_for_every_check(tmp_path):
    made = preflight(ONE, tmp_path/'run')
    assert not made.problems
    table = rows(made)
    assert table.keys() >= {
        'world', 'software', 'recipe', 'clock', 'directory', 'files', 'disk', 'links', 'open files',
        'processor', 'host memory', 'versions', 'environment', 'rows'}
    assert all(row.seen for row in made.checks)
    assert 'wanted' in table['open files'].seen
    assert table['rows'].seen.startswith('491 to train on')
    shown = made._repr_html_()
    assert all(f'>{row.check}<' in shown for row in made.checks)
    assert made == doctor.Preflight(**vars(made))


def test_little_memory_of_this_machine_stops_a_real_preflight(tmp_path, monkeypatch):
    monkeypatch.setattr(node_limits, 'free_memory', lambda root: {'ram_b': 2**28, 'swap_b': 0})
    row = rows(preflight(ONE, tmp_path/'run'))['host memory']
    assert row.level == 'fail'
    assert row.seen.startswith('0.25 GiB of host memory are free, and the plan takes ')


def test_a_real_preflight_in_a_cell_sees_what_the_kernel_exports(tmp_path, monkeypatch):
    monkeypatch.setenv('FSDP_TRANSFORMER_CLS_TO_WRAP', 'Foo')
    monkeypatch.setenv('ACCELERATE_USE_FSDP', 'false')  # The ranks get the right one
    row = rows(preflight(ONE, tmp_path/'run'))['environment']
    assert row.level == 'fail'
    assert 'FSDP_TRANSFORMER_CLS_TO_WRAP' in row.seen
    assert 'ACCELERATE_USE_FSDP' not in row.seen


def test_no_value_of_the_environment_is_in_a_preflight(tmp_path, monkeypatch):
    canary = 'canary-4711'
    names = 'HF_TOKEN', 'WANDB_API_KEY', 'ACCELERATE_TORCH_DEVICE', 'NCCL_IB_HCA'
    for name in names: monkeypatch.setenv(name, canary)
    assert canary not in f'{node_faults(GPUS, os.environ, [])}'
    made = preflight(ONE, tmp_path/'run')
    assert rows(made)['environment'].level == 'fail'
    assert canary not in json.dumps(made.to_dict())
    assert canary not in repr(made) + made._repr_html_()


@pytest.mark.slow
def test_a_real_preflight_for_gpus_copies_in_another_process(tmp_path, monkeypatch):
    "Torch says that there are two GPUs; the process that copies finds that there are none."
    import torch
    if torch.cuda.is_available(): pytest.skip('there are GPUs here')
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    (tmp_path/'nvidia-smi').write_text('#!/bin/sh\necho 0, GPU-a, 9; echo 1, GPU-b, 99999\n')
    (tmp_path/'nvidia-smi').chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    monkeypatch.setenv('RANK', '0')
    recipe = ONE.changed({'cluster.device': 'cuda'})
    env = {'RANK': '0', 'WORLD_SIZE': '1'}
    made = preflight(recipe, tmp_path/'run', env, 'localhost', free_port())
    table = rows(made)
    assert made.seconds < 28
    assert table['GPU copies'].level == 'warn'
    assert 'copies from GPU 0 to GPU 1: ' in table['GPU copies'].seen
    assert table['GPU memory'].level == 'fail'
    assert table['GPU memory'].seen.startswith('0.01 GiB of GPU 0 are free')
