"""Rendered files: their text, their real readers, and real launches of a shrunk run, on one node
and on two."""
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import yaml
from trouble import assert_commands_train, small_recipe
from warm import forked_programs

from llm_workbook import __version__
from llm_workbook.launching import render as rendering
from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Recipe, recipe_names, shrink
from llm_workbook.launching.render import check_rendered, render
from llm_workbook.launching.job_scripts import sbatch, skypilot, trainjob
from llm_workbook.parallel.backends import fsdp_env, transport_env, zero_config

PLAIN = Recipe.named('reviews-qlora')
WAYS = {
    way: PLAIN.changed(
        {'name': way, 'sharding.strategy': way, 'cluster.processes': 1 if way == 'none' else 2})
    for way in ('fsdp2', 'ddp', 'zero1', 'zero2', 'zero3', 'none')}
WAYS['hybrid'] = PLAIN.changed({'name': 'hybrid', 'cluster.processes': 4, 'sharding.group': 2})
WAYS['full'] = PLAIN.changed({'name': 'full', 'method.kind': 'full', 'cluster.nodes': 2})
WAYS['reviews-shrunk'] = shrink(PLAIN)
WAYS |= {name: Recipe.named(name) for name in recipe_names()}
HEAD = '10.0.0.1'


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(recipe, directory='runs/x', **how):
    return render(recipe, directory, HEAD if recipe.cluster.nodes > 1 else None, **how)


def sheets(rendered) -> list:
    return [path for name, path in rendered.files.items() if name.startswith('accelerate')]


# Text

GOLDEN = Path(__file__).parents[1]/'golden'
KEPT = [
    '70b-2x4-h100-zero3-qlora-classifier', '7b-zero2-offload', '7b-zero3-offload',
    '70b-2x24gb-qlora', '70b-2x8-a100-80-full', 'reviews-shrunk']


def pages(name) -> dict:
    "All texts of one recipe, by file."
    recipe = WAYS[name]
    rendered = put(recipe, f'runs/{name}')
    texts = {file: path.read_text('utf-8') for file, path in rendered.files.items()}
    texts['trainjob.yaml'] = trainjob(
        recipe, '/mnt/run', 'ghcr.io/you/llm-workbook:0.1.0', 'shared-run', secret='hub')
    if recipe.cluster.device == 'cpu': return texts
    task = skypilot(recipe, '/mnt/run', 'shared-run', 'H100')
    return texts | {'skypilot.yaml': task.replace(f'=={__version__}', '==VERSION')}


@pytest.mark.parametrize('name', KEPT)
def test_the_files_are_the_golden_ones(name):
    texts = pages(name)
    if os.environ.get('GOLDEN') == 'renew':
        (GOLDEN/name).mkdir(parents=True, exist_ok=True)
        for path in (GOLDEN/name).iterdir(): path.unlink()
        for file, text in texts.items(): (GOLDEN/name/file).write_text(text, 'utf-8')
    kept = (
        {path.name: path.read_text('utf-8') for path in (GOLDEN/name).iterdir()}
        if (GOLDEN/name).is_dir()
        else {})
    assert texts == kept, (
        'if the change is meant: GOLDEN=renew python -m pytest tests/launching/test_render.py -k '
        'golden, and read git diff')


def test_no_golden_file_is_left_over():
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(KEPT)


@pytest.mark.parametrize('name', WAYS)
def test_each_file_says_where_it_came_from(name):
    rendered = put(WAYS[name])
    for file, path in rendered.files.items():
        lines = path.read_text('utf-8').splitlines()
        if file != 'deepspeed.json': assert WAYS[name].name in lines[file == 'job.sbatch'], file
    assert rendered.to_dict()['files'].keys() == rendered.files.keys() - {'rendered.yaml'}
    assert Recipe.load(rendered.files['recipe.yaml']) == WAYS[name]


# Their readers

@contextmanager
def accelerates(sheet):
    "The arguments of accelerate launch, and the environment that it makes of a file."
    from accelerate.commands import launch
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env)

    with pytest.MonkeyPatch.context() as patch:
        for name in [
            n for n in os.environ if n.startswith(('ACCELERATE_', 'FSDP_', 'PARALLELISM_'))
        ]:
            patch.delenv(name)
        patch.setattr(sys, 'argv', ['launch'])
        # Nothing is started, and another test holds the default port on purpose
        patch.setattr('accelerate.utils.launch.is_port_in_use', lambda port: False)
        args = launch.launch_command_parser().parse_args(['--config_file', str(sheet), '-m', 'a'])
        args, defaults, _ = launch._validate_launch_command(args)
        args.deepspeed_fields_from_accelerate_config = ','.join(defaults.deepspeed_config)
        if args.use_deepspeed: env = prepare_deepspeed_cmd_env(args)[1]
        elif args.use_fsdp or args.multi_gpu: env = prepare_multi_gpu_env(args)
        else: env = prepare_simple_launcher_cmd_env(args)[1]
        yield args, env


@pytest.mark.parametrize('name', WAYS)
def test_accelerate_launch_sets_what_the_recipe_says(name, monkeypatch):
    from llm_workbook.training.effective import check_launcher
    recipe = WAYS[name]
    # As the commands do, by env
    for name, value in transport_env(recipe).items(): monkeypatch.setenv(name, value)
    for node, sheet in enumerate(sheets(put(recipe))):
        with accelerates(sheet) as (args, env):
            wanted = {
                n: v for n, v in fsdp_env(recipe).items() if n.startswith(('FSDP_', 'PARALLELISM_'))
            }
            assert {n: env[n] for n in wanted} == wanted
            assert (args.use_deepspeed, args.use_fsdp) == (
                recipe.sharding.strategy[:4] == 'zero', recipe.sharding.strategy == 'fsdp2')
            assert (args.num_processes, args.num_machines, int(args.machine_rank)) == (
                recipe.cluster.ranks, recipe.cluster.nodes, node)
            check_launcher(recipe, env)


@pytest.mark.parametrize('changes, says', [
    ({}, 'ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4'),
    ({'sharding.sync_each_batch': True}, 'sync_each_batch=True')])
def test_what_the_file_cannot_say_to_another_program_is_written_beside_it(
    changes, says, monkeypatch
):
    "What the line says is done to accelerate, and the passes come into force."
    import re
    from accelerate import Accelerator  # noqa: F401  In the line
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import GradientAccumulationPlugin  # noqa: F401  Likewise
    recipe = WAYS['fsdp2'].changed({'batch.accumulation': 4} | changes)
    text = put(recipe, replace=True).files['accelerate.yaml'].read_text()
    said = re.search('program of your own needs (.*)[.]$', text, re.MULTILINE)[1]
    assert says in said
    call = said if said.startswith('Accelerator') else 'Accelerator()'
    if call != said: monkeypatch.setenv(*said.split(' ')[0].split('='))
    states = AcceleratorState, GradientState, PartialState
    for state in states: state._reset_state()
    try:
        made = eval(call.removesuffix(')') + (', ' if call == said else '') + 'cpu=True)')
        found = dict(made.gradient_state.plugin_kwargs)
    finally:
        for state in states: state._reset_state()
    assert found['num_steps'] == 4
    assert found.get('sync_each_batch', False) is bool(changes)


def test_one_pass_and_zero_need_no_such_line():
    for name, passes in (('fsdp2', 1), ('zero3', 4)):
        recipe = WAYS[name].changed({'batch.accumulation': passes})
        text = put(recipe, f'runs/{name}').files['accelerate.yaml'].read_text()
        assert 'passes' not in text
    written = json.loads(Path('runs/zero3/deepspeed.json').read_text())
    assert written['gradient_accumulation_steps'] == 4


@pytest.mark.parametrize('name', WAYS)
def test_the_readers_know_every_key(name):
    from accelerate.commands.config.config_args import load_config_from_file
    rendered = put(WAYS[name])
    assert check_rendered('runs/x').commands == rendered.commands
    assert [load_config_from_file(str(sheet)).machine_rank for sheet in sheets(rendered)] == [
        *range(WAYS[name].cluster.nodes)]
    for sheet in sheets(rendered):
        with accelerates(sheet) as (args, _): known = vars(args)
        settings = yaml.safe_load(sheet.read_text())
        for part in [part for part in settings.values() if isinstance(part, dict)]:
            assert part.keys() <= known.keys()


@pytest.mark.parametrize(
    'name', [name for name, recipe in WAYS.items() if recipe.sharding.strategy.startswith('zero')])
def test_deepspeed_reads_every_key(name):
    from deepspeed.runtime.config import DeepSpeedConfig
    recipe = WAYS[name]
    file = put(recipe).files['deepspeed.json']
    read = DeepSpeedConfig(str(file))
    asked = set()

    class Watched(dict):
        def get(self, key, *default): return asked.add(key) or super().get(key, *default)
        def __getitem__(self, key): return asked.add(key) or super().__getitem__(key)

    settings = json.loads(file.read_text())
    DeepSpeedConfig(Watched(settings))
    assert settings == zero_config(recipe)
    assert settings.keys() <= asked
    assert read.zero_optimization_stage == int(recipe.sharding.strategy[-1])
    assert read.float16_config.enabled == (recipe.precision.compute == 'float16')
    for part in 'offload_param', 'offload_optimizer':
        wanted = getattr(recipe.sharding, {'offload_param': 'offload_parameters'}.get(part, part))
        assert getattr(getattr(read.zero_config, part), 'device', 'none') == wanted


def edit(file, old, new):
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new))


EDITS = {  # Recipe, file, text, new text, and what is said of it
    'accelerate, at the top': (
        'fsdp2', 'accelerate.yaml', 'mixed_precision', 'mixed_precison',
        "did you mean 'mixed_precision'"),
    'fsdp_config': (
        'fsdp2', 'accelerate.yaml', 'fsdp_reshard_after_forward', 'fsdp_reshard_after_foward',
        "accelerate knows no such key; did you mean 'fsdp_reshard_after_forward'"),
    'deepspeed_config': (
        'zero2', 'accelerate.yaml', 'zero3_init_flag', 'zero3_init_flags',
        "did you mean 'zero3_init_flag'"),
    'parallelism_config': (
        'hybrid', 'accelerate.yaml', 'dp_shard_size', 'dp_shards_size',
        "did you mean 'parallelism_config_dp_shard_size'"),
    'DeepSpeed, at the top': (
        'zero3', 'deepspeed.json', 'zero_optimization', 'zero_optimizaton',
        "DeepSpeed knows no such key; did you mean 'zero_optimization'"),
    'DeepSpeed, inside': (
        'zero3', 'deepspeed.json', 'overlap_comm', 'overlap_com', "did you mean 'overlap_comm'"),
    'another stage': ('zero3', 'deepspeed.json', '"stage": 3', '"stage": 2', 'the recipe says 3'),
    'another key': (
        'zero3', 'deepspeed.json', '"stage": 3', '"stage": 3, "round_robin_gradients": true',
        'does not say so'),
    'another precision': ('fsdp2', 'accelerate.yaml', "'no'", 'bf16', "the recipe says 'no'"),
    'both nodes rank 0': (
        'full', 'accelerate-node1.yaml', 'machine_rank: 1', 'machine_rank: 0', 'the recipe says 1'),
    'no mapping': (
        'fsdp2', 'accelerate.yaml', 'compute_environment', '- compute_environment',
        'cannot be read'),
    'half a file': ('zero3', 'deepspeed.json', '}\n}', '', 'cannot be read'),
    'another recipe': ('fsdp2', 'recipe.yaml', 'steps: 150', 'steps: 151', 'has changed'),
    'the script': (
        'fsdp2', 'job.sbatch', 'trap forward USR1', 'trap forward USR2',
        "'trap forward USR1': is missing"),
}
OWNED = {
    '--job-name=full': ['--job-name=other', '-J x'],
    '--nodes=2': ['--nodes=4', '-N4', '--nodes 2', '--node=3'], '--gpus-per-node=2': [],
    '--ntasks-per-node=1': ['--ntasks-per-node=2', '--ntasks=8'], '--requeue': ['--no-requeue'],
    '--open-mode=append': ['--open-mode=truncate'],
    '--signal=B:USR1@300': ['--signal=USR1@300', '--time=9 --signal=B:USR1@1']}


@pytest.mark.parametrize('what', EDITS)
def test_an_edit_that_would_be_ignored_is_refused(what):
    name, file, old, new, words = EDITS[what]
    put(WAYS[name])
    edit(f'runs/x/{file}', old, new)
    with pytest.raises(RecipeError) as caught: check_rendered('runs/x')
    assert words in str(caught.value)
    assert file in str(caught.value)


@pytest.mark.parametrize('order', OWNED)
def test_a_directive_of_the_recipe_stands_once_and_where_slurm_reads_it(order):
    recipe = WAYS['full'].changed({'cluster.device': 'cuda', 'cluster.hardware': '2x-rtx-3090'})
    text = put(recipe).files['job.sbatch'].read_text()
    script, line = Path('runs/x/job.sbatch'), f'#SBATCH {order}\n'
    check_rendered('runs/x')
    assert text.count(line) == 1
    wrong = [
        text.replace(line, ''), text.replace(line, 2 * line),
        text.replace(line, '').replace('set -u\n', f'set -u\n{line}')]
    for new in OWNED[order]:
        wrong += [
            text.replace(line, f'{line}#SBATCH {new}\n'),
            text.replace(line, f'#SBATCH {new}\n'),
        ]
    for edited in wrong:
        script.write_text(edited)
        with pytest.raises(RecipeError, match='job.sbatch'): check_rendered('runs/x')


def test_an_option_after_the_first_command_is_refused():
    put(PLAIN)
    edit('runs/x/job.sbatch', 'set -u', 'set -u\n#SBATCH --partition=gpu')
    with pytest.raises(RecipeError, match='stands after the first command'):
        check_rendered('runs/x')


def test_what_this_version_does_not_run_is_rendered_with_a_warning():
    assert put(WAYS['70b-2x8-a100-80-full'], 'runs/z').warnings == []
    rendered = put(WAYS['70b-2x8-a100-80-full'].changed({'intervals.checkpoint': 'full'}))
    assert len(rendered.warnings) == 1
    assert rendered.warnings[0].startswith('intervals.checkpoint')
    assert 'intervals.checkpoint' in rendered._repr_html_()
    assert 'intervals.checkpoint' in repr(rendered)
    assert check_rendered('runs/x').warnings == rendered.warnings
    assert put(PLAIN, 'runs/y').warnings == []


@pytest.mark.parametrize(
    'name', ['..', '', 'notes.txt', 'accelerate-nodex.yaml', '../job.sbatch', 3])
def test_an_index_names_nothing_but_rendered_files(name):
    index = put(PLAIN).files['rendered.yaml']
    contents = yaml.safe_load(index.read_text())
    contents['files'][name] = {}
    index.write_text(yaml.safe_dump(contents))
    with pytest.raises(ValueError, match='rendered.yaml is not as it was rendered'): put(PLAIN)


def test_the_preflight_is_one_process_on_each_node():
    first, second = put(WAYS['full']).commands['preflight']
    assert ' '.join(second) == (
        'python3 -m torch.distributed.run --nnodes=2 --node-rank=1 --master-addr=10.0.0.1 '
        '--master-port=29500 --nproc-per-node=1 '
        '-m llm_workbook preflight runs/x/recipe.yaml --directory runs/x')
    assert first == [word.replace('rank=1', 'rank=0') for word in second]
    assert put(PLAIN, 'runs/y').commands['preflight'][0][3:5] == [
        '--standalone', '--nproc-per-node=1']


def test_what_is_of_this_machine_may_be_edited():
    put(WAYS['full'])
    edit('runs/x/accelerate-node1.yaml', '10.0.0.1', '10.0.0.7')
    edit(
        'runs/x/accelerate-node1.yaml', 'main_process_port: 29500',
        'main_process_port: 29511\ndebug: true')
    edit('runs/x/job.sbatch', 'set -u', 'set -u\nmodule load cuda')
    edit('runs/x/job.sbatch', '--time=1-00:00:00', '--time=2:00:00')
    check_rendered('runs/x')


def test_a_missing_file_or_index_is_named():
    put(PLAIN)
    Path('runs/x/accelerate.yaml').unlink()
    with pytest.raises(RecipeError, match='accelerate.yaml: cannot be read'):
        check_rendered('runs/x')
    Path('runs/x/rendered.yaml').write_text('files: 3')
    with pytest.raises(ValueError, match='rendered.yaml is not as it was rendered'):
        check_rendered('runs/x')
    with pytest.raises(ValueError, match='rendered.yaml is not as it was rendered'): put(PLAIN)


def test_several_nodes_without_an_address_are_refused_by_accelerate_itself():
    from accelerate.commands.config.config_args import load_config_from_file
    rendered = render(WAYS['full'], 'runs/x')
    assert set(rendered.commands) == {'sbatch'}
    assert 'node 0 has no address' in repr(rendered) and rendered.missing in repr(rendered)
    assert 'node 0 has no address' in rendered._repr_html_()
    assert render(WAYS['full'], 'runs/y', head='node1').missing == ''
    with pytest.raises(ValueError, match='main_process_ip_IS_NOT_SET'):
        load_config_from_file('runs/x/accelerate-node0.yaml')
    with pytest.raises(RecipeError, match='node 0 has no address'): check_rendered('runs/x')


# Again, and over something else

def stats():
    return {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in Path('runs/x').iterdir()}


def test_rendering_again_touches_nothing():
    put(WAYS['zero3'])
    before = stats()
    put(WAYS['zero3'])
    assert stats() == before


def test_another_recipe_is_refused_unless_asked_and_leaves_nothing_behind():
    put(WAYS['zero3'])
    before = stats()
    with pytest.raises(RecipeError, match='is another recipe than fsdp2'): put(WAYS['fsdp2'])
    assert stats() == before
    put(WAYS['fsdp2'], replace=True)
    assert set(stats()) == {'recipe.yaml', 'accelerate.yaml', 'job.sbatch', 'rendered.yaml'}
    Path('runs/x/run.json').write_text('{"state": "preempted", "step": 4}')
    with pytest.raises(ValueError, match='a run of the recipe fsdp2 began'):
        put(WAYS['zero3'], replace=True)
    assert check_rendered('runs/x').recipe == WAYS['fsdp2']


@pytest.mark.parametrize('file', ['recipe.yaml', 'accelerate.yaml', 'job.sbatch'])
def test_a_change_by_hand_is_not_overwritten_in_silence(file):
    put(PLAIN)
    path = Path('runs/x')/file
    path.write_text(path.read_text() + '# mine\n')
    with pytest.raises(RecipeError, match=f'{file}: was changed by hand'):
        put(PLAIN, options={'time': '60'})
    assert path.read_text().endswith('# mine\n')
    put(PLAIN, options={'time': '60'}, replace=True)
    assert 'mine' not in path.read_text()
    assert '--time=60' in Path('runs/x/job.sbatch').read_text()


def test_files_that_are_not_ours_are_kept_and_those_of_a_run_are_known():
    Path('runs/x').mkdir(parents=True)
    Path('runs/x/job.sbatch').write_text('echo mine')
    with pytest.raises(RecipeError, match='none of ours'): put(PLAIN)
    Path('runs/x/job.sbatch').unlink()
    PLAIN.save('runs/x/recipe.yaml')  # As a run that began in a notebook leaves it
    assert put(PLAIN).files['recipe.yaml'].read_text().startswith('# The recipe reviews-qlora')


# Hostile values

NASTY = [
    'a b',
    "it's",
    '$(touch x)',
    '`touch x`',
    '; touch x',
    '"',
    '*',
    '!!',
    '~',
    'a\\',
    '{directory}',
    '#',
    '%s',
    "'; touch x; '",
    'é',
]


@pytest.mark.parametrize('name', NASTY)
def test_a_nasty_directory_reaches_the_program_as_it_is(name, place):
    (place/'bin').mkdir()
    (place/'bin/python3').write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN"\n')
    (place/'bin/python3').chmod(0o755)
    rendered = render(PLAIN, f'runs/{name}')
    assert check_rendered(f'runs/{name}').files == rendered.files
    for kind in 'torchrun', 'accelerate':
        line = rendered.to_dict()['commands'][kind][0]
        words = rendered.commands[kind][0]
        env = os.environ | {'PATH': f'{place}/bin:{os.environ["PATH"]}', 'SEEN': str(place/'seen')}
        subprocess.run(['bash', '-c', line], env=env, check=True, timeout=20)
        assert (place/'seen').read_text().split('\0')[:-1] == words[1:]
        assert words[words.index('--directory') + 1] == f'runs/{name}'
    assert not list(place.rglob('x'))
    assert subprocess.run(['bash', '-n', rendered.files['job.sbatch']]).returncode == 0


def test_what_is_shown_is_escaped():
    rendered = render(PLAIN, 'runs/<b>&')
    shown = rendered._repr_html_()
    assert '<b>' not in shown
    assert 'runs/&lt;b&gt;&amp;' in shown
    assert shown.count('<details>') == len(rendered.files)
    assert 'Not run by this version' not in shown
    later = Recipe.named('7b-zero2-offload').changed({'intervals.checkpoint': 'full'})
    assert 'Not run by this version' in put(later, 'y')._repr_html_()


@pytest.mark.parametrize('path', ['a\nb', '-x', '', 'a\x00b', 'a\x1b[0m', 'a\u2028b'])
def test_a_path_that_nothing_quotes_is_refused(path, place):
    with pytest.raises(ValueError, match='printable characters'): render(PLAIN, path)
    with pytest.raises(ValueError, match='printable characters'):
        render(PLAIN, 'runs/x', python=path)
    assert not list(place.iterdir())


@pytest.mark.parametrize(
    'head',
    [
        'a b', '$(touch x)', '10.0.0.1:0', '10.0.0.1:70000', 'a:b', '-x', 'a\nmachine_rank: 0',
        '[::1]:2', ''])
def test_a_head_that_is_no_address_is_refused(head):
    with pytest.raises(ValueError, match='name or address of node 0'):
        render(WAYS['full'], 'runs/x', head)


@pytest.mark.filterwarnings('ignore:Pydantic serializer')
@pytest.mark.parametrize(
    'changes', [{'name': 'a\n#SBATCH --uid=0'}, {'name': '$(touch x)'}, {'name': '../x'}]
)
def test_a_recipe_that_was_never_checked_is_checked(changes, place):
    wrong = PLAIN.model_copy(update=changes)
    for write in (
        lambda r: render(r, 'runs/x'), lambda r: sbatch(r, 'x'),
        lambda r: trainjob(r, '/x', 'i', 'c'), lambda r: skypilot(r, '/x', 'v', 'H100')
    ):
        with pytest.raises(RecipeError): write(wrong)
    assert not list(place.iterdir())


BAD = ['$(HOME)', 'a b', "a'b", 'a\nb', '-x', '', 'a: b', '{a}', '&a', '!x', 'A' * 600]


@pytest.mark.parametrize('text', BAD)
def test_what_kubernetes_or_skypilot_would_read_otherwise_is_refused(text):
    big = Recipe.named('70b-2x8-a100-80-full')
    for how in (
        (f'/mnt/{text}/a', 'i', 'c'),
        ('/m', text, 'c'),
        ('/m', 'i', text),
        ('/m', 'i', 'c', text or ' '),
        ('/m', 'i', 'c', None, text)
    ):
        if (
            how[0] == '/mnt//a'
            or len(text) == 600
            and how[0] != '/m'
            or text == '-x'
            and how[0] != '/m'
        ):
            continue
        with pytest.raises(ValueError, match='must match'): trainjob(big, *how)
    for how in ((f'/mnt/{text} ', 'v', 'H100'), ('/m', text, 'H100'), ('/m', 'v', text)):
        with pytest.raises(ValueError, match='must match'): skypilot(big, *how)


# Fields that no reader on this machine checks: Kubeflow Trainer 2.2 (trainjob_types.go), SkyPilot's
# documentation

FIELDS = {
    '': {'apiVersion', 'kind', 'metadata', 'spec'},
    'spec': {'runtimeRef', 'trainer', 'runtimePatches', 'initializer', 'suspend'},
    'spec.trainer': {
        'image', 'command', 'args', 'env', 'numNodes', 'resourcesPerNode', 'numProcPerNode'},
    'spec.runtimePatches': {'manager', 'trainingRuntimeSpec', 'time'}}
TASK = {
    'name', 'workdir', 'num_nodes', 'resources', 'envs', 'secrets', 'file_mounts', 'volumes',
    'setup', 'run', 'config'}


@pytest.mark.parametrize('name', [*recipe_names(), 'fsdp2'])
def test_a_trainjob_has_the_fields_of_its_schema(name):
    import re
    job = yaml.safe_load(trainjob(WAYS[name], '/mnt/run', 'i', 'c', 'hub'))
    spec, cluster = job['spec'], WAYS[name].cluster
    for path, value in {
        '': job, 'spec': spec, 'spec.trainer': spec['trainer'],
        'spec.runtimePatches': spec['runtimePatches'][0]
    }.items():
        assert value.keys() <= FIELDS[path]
    assert re.fullmatch(r'[a-z]([-a-z0-9]*[a-z0-9])?', job['metadata']['name'])
    assert len(job['metadata']['name']) <= 63
    assert (spec['trainer']['numNodes'], spec['trainer']['numProcPerNode']) == (
        cluster.nodes, cluster.processes)
    assert spec['trainer']['env'][-1] == {
        'name': 'HF_TOKEN', 'valueFrom': {'secretKeyRef': {'name': 'hub', 'key': 'HF_TOKEN'}}}
    assert ('resourcesPerNode' in spec['trainer']) == (cluster.device == 'cuda')


def test_a_task_of_skypilot_has_the_fields_of_its_schema_and_its_commands_run(place):
    recipe = Recipe.named('70b-2x4-h100-zero3-qlora-classifier')
    task = yaml.safe_load(skypilot(recipe, '/mnt/run', 'shared-run', 'H100'))
    assert task.keys() <= TASK
    assert task['secrets'] == {'HF_TOKEN': None}
    assert task['envs'] == transport_env(recipe)
    (place/'python3').write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN"\n')
    (place/'python3').chmod(0o755)
    env = {
        'PATH': f'{place}:{os.environ["PATH"]}', 'SEEN': str(place/'seen'), 'HOME': '/home of mine',
        'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2', 'SKYPILOT_NUM_NODES': '2',
        'SKYPILOT_NUM_GPUS_PER_NODE': '4'}  # All that its manual has
    for rank in '0', '1':
        subprocess.run(
            ['bash', '-c', task['run']], env=env | {'SKYPILOT_NODE_RANK': rank}, check=True,
            timeout=20)
        seen = (place/'seen').read_text().split('\0')
        assert {
            '--nnodes=2', f'--node-rank={rank}', '--nproc-per-node=4', '--master-addr=10.0.0.1',
            '/home of mine/recipe.yaml'} <= set(seen)
    with pytest.raises(ValueError, match='is for CPUs'): skypilot(PLAIN, '/m', 'v', 'H100')


WHEEL = 'llm_workbook-0.1.0+mine-py3-none-any.whl'
COMMIT = 'git+https://github.com/llm-workbook/llm-workbook@0123abcd'


@pytest.mark.parametrize('package, installed, mounted', [
    (None, f'llm-workbook[deepspeed]=={__version__}', {}),
    (f'../dist/{WHEEL}', f'{{home}}/{WHEEL}[deepspeed]', {f'~/{WHEEL}': f'../dist/{WHEEL}'}),
    (Path(f'/far/{WHEEL}'), f'{{home}}/{WHEEL}[deepspeed]', {f'~/{WHEEL}': f'/far/{WHEEL}'}),
    (COMMIT, f'llm-workbook[deepspeed] @ {COMMIT}', {})], ids=['PyPI', 'wheel', 'far', 'commit'])
def test_a_task_of_skypilot_installs_what_it_was_rendered_with(
    package, installed, mounted, place
):
    recipe = Recipe.named('70b-2x4-h100-zero3-qlora-classifier')
    task = yaml.safe_load(skypilot(recipe, '/mnt/run', 'shared-run', 'H100', package))
    assert task['file_mounts'] == {'~/recipe.yaml': 'recipe.yaml'} | mounted
    (place/'pip').write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN"\n')
    (place/'pip').chmod(0o755)
    env = {'PATH': f'{place}:{os.environ["PATH"]}', 'SEEN': str(place/'seen'), 'HOME': '/my home'}
    subprocess.run(['bash', '-c', task['setup']], env=env, check=True, timeout=20)
    words = (place/'seen').read_text().split('\0')[:-1]
    assert words == ['install', installed.format(home='/my home')]


@pytest.mark.parametrize('package', [
    '.', 'llm-workbook', 'dist/other-0.1.0-py3-none-any.whl', "dist/llm_workbook-$(x)'.whl",
    'git+https://github.com/llm-workbook/llm-workbook', "git+https://a@b'; rm -rf ~; '", ''])
def test_what_is_no_wheel_and_no_commit_is_not_installed(package):
    big = Recipe.named('70b-2x8-a100-80-full')
    with pytest.raises(ValueError, match='is no wheel .* `make dist` builds the wheel'):
        skypilot(big, '/mnt/run', 'shared-run', 'H100', package)


# Real launches

@pytest.fixture(scope='session')
def small(tmp_path_factory):
    return small_recipe(tmp_path_factory.mktemp('small'), **{'optimizer.steps': 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    'changes',
    [
        {'cluster.processes': 2, 'sharding.strategy': 'ddp'},
        {'cluster.processes': 4, 'sharding.group': 2}],
    ids=['ddp', 'in pairs'])
def test_accelerate_starts_what_no_published_recipe_has(small, changes):
    """Strategies that none of the recipes of tests/launching/test_launch_table.py has; one is
    started as a user does, by fresh interpreters."""
    with forked_programs() if 'sharding.group' in changes else nullcontext():
        assert_commands_train(small.changed({'cluster.nodes': 1} | changes), 'accelerate')


@pytest.mark.slow
def test_a_forked_program_knows_nothing_of_a_run_with_zero3():
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
    held = HfDeepSpeedConfig({'zero_optimization': {'stage': 3}})
    asked = 'from transformers.integrations import deepspeed as d; ' \
            'print(d.is_deepspeed_zero3_enabled())'
    with forked_programs():
        done = subprocess.run([sys.executable, '-c', asked], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, 'False\n'), done.stderr
    assert is_deepspeed_zero3_enabled() and held.is_zero3()


def test_two_that_render_at_once_both_succeed(tmp_path, monkeypatch):
    "Each has written its part of a file before either gives it its name."
    together = threading.Barrier(2, timeout=20)
    def replace(part, file, real=os.replace):
        together.wait()
        real(part, file)
    monkeypatch.setattr(os, 'replace', replace)
    with ThreadPoolExecutor(2) as pool:
        arguments = rendering._write_if_changed, tmp_path/'a.yaml', 'a: 1\n'
        both = [pool.submit(*arguments) for _ in range(2)]
        for one in both: one.result()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [('a.yaml', 'a: 1\n')]
