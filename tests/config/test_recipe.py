"""The recipe under careless and hostile text: what the chapter has no room for."""
import pickle
import random
import re
import time

import pytest
import yaml
from llm_workbook.config.document import RecipeError
from llm_workbook.files import asset, resolve
from llm_workbook.display import nearest
from llm_workbook.config.recipe import (
    Data, Method, Model, Recipe, differences, planned_only, recipe_names, shrink, shrinkage)
from llm_workbook.config.rules import broken, rules

GOOD = Recipe(
    name='good', model=Model(source='tiny-base'), data=Data(source='sample-conversations'))


def plain(**changes) -> dict:
    "The good recipe as plain values, with some dotted fields replaced."
    values = yaml.safe_load(GOOD.dump())
    for path, value in changes.items():
        *parents, leaf = path.split('.')
        place = values
        for parent in parents: place = place[parent]
        place[leaf] = value
    return values


def refused(values: dict) -> RecipeError:
    "The one error for these values, from text and from Python alike."
    with pytest.raises(RecipeError) as caught: Recipe.parse(yaml.safe_dump(values))
    return caught.value


WRONG = [  # dotted field, value, words in the message
    ('name', 'two words', 'letters, digits'),
    ('name', '', 'letters, digits'),
    ('name', '../x', 'letters, digits'),
    ('name', 7, 'valid string'),
    ('name', 'x' * 65, '1 to 64'),
    ('seed', -1, 'greater than or equal to 0'),
    ('seed', 1.5, 'valid integer'),
    ('seed', True, 'valid integer'),
    ('seed', 2**32, 'less than'),
    ('model', 'tiny-base', 'must be a part with fields'),
    ('model.source', None, 'valid string'),
    ('model.source', '', 'at least 1 character'),
    ('model.sorce', 'x', "did you mean 'source'?"),
    ('data.format', 'chat', 'must be one of auto'),
    ('data.test_share', 1.0, 'less than 1'),
    ('data.test_share', -0.1, 'greater than or equal to 0'),
    ('data.text_column', -1, 'position from 0'),
    ('data.text_column', 1.5, 'position from 0'),
    ('data.labels', ['a'], 'give each label its word'),
    ('data.labels', {'1': 2}, 'give each label its word'),
    ('method.kind', 'qlra', "did you mean 'qlora'?"),
    ('method.kind', None, 'must be one of'),
    ('method.rank', 0, 'greater than or equal to 1'),
    ('method.rank', '16', 'valid integer: write 16 without quotes'),
    ('method.rank', 16.0, 'valid integer: write 16'),
    ('optimizer.steps', '1e3', 'valid integer: write 1000'),
    ('optimizer.learning_rate', '0.0002', 'valid number: write 0.0002 without quotes'),
    ('optimizer.learning_rate', '.2e4', 'valid number: write 2000.0'),
    ('method.dropout', 1, 'less than 1'),
    ('method.targets', [], 'list of module names'),
    ('method.targets', 'q_proj', 'list of module names'),
    ('method.targets', [1], 'list of module names'),
    ('method.double_quant', 'yes', 'valid boolean'),
    ('method.storage', 'bf16', "did you mean 'bfloat16'?"),
    ('cluster.processes', 0, 'greater than'),
    ('cluster.devise', 'cpu', "did you mean 'device'?"),
    ('cluster.device', 'gpu', 'must be one of cpu, cuda'),
    ('sharding.strategy', 'fsdp', "did you mean 'fsdp2'?"),
    ('sharding.reshard_after_foward', False, "did you mean 'reshard_after_forward'?"),
    ('zero_optimizaton', {'stage': 3}, 'unknown key'),
    ('precision.compute', 'int4', 'must be one of bfloat16, float16, float32, fp8'),
    ('batch.length', 4, 'greater than or equal to 8'),
    ('batch.micro', None, 'valid integer'),
    ('optimizer.learning_rate', float('nan'), 'finite'),
    ('optimizer.learning_rate', float('inf'), 'finite'),
    ('optimizer.learning_rate', -1e-4, 'greater than or equal to 0'),
    ('optimizer.learning_rate', 'fast', 'valid number'),
    ('optimizer.warmup', 3, 'divide yours by all steps'),
    ('optimizer.warmup', '1e1', 'divide yours by all steps'),
    ('optimizer.warmup', True, 'valid number'),
    ('optimizer.steps', 0, 'greater than or equal to 1'),
    ('rank', 8, "did you mean 'method.rank'?"),
    ('version', 3, 'newer than 2'),
    ('version', 1, 'none, selective or full'),
    ('version', '2', 'start with `version: 2`'),
    ('version', True, 'start with'),
    ('sharding.activation_checkpointing', True, 'must be one of none, selective, full'),
    ('model.classes', 1, 'greater than or equal to 2'),
    ('cluster.interface', 'eth0; rm', 'name of a network interface'),
    ('cluster.variables', {'HF_TOKEN': 'x'}, 'HF_TOKEN is no transport'),
    ('cluster.variables', {'ACCELERATE_MIXED_PRECISION': 'bf16'}, 'has a field for'),
    ('cluster.variables', {'NCCL_DEBUG': 1}, 'names to text'),
    ('cluster.variables', {'NCCL_DEBUG': 'a b'}, 'plain value'),
    ('cluster.variables', {'NCCL_NET_PLUGIN': '/shared/evil.so'}, 'names a file or code'),
    ('cluster.variables', {'NCCL_TUNER_PLUGIN': 'x'}, 'names a file or code'),
    ('cluster.variables', {'NCCL_DEBUG_FILE': '/etc/profile'}, 'names a file or code'),
    ('cluster.variables', {'NCCL_CONF_FILE': 'x'}, 'names a file or code'),
    ('cluster.variables', {'FI_PROVIDER_PATH': '/shared'}, 'names a file or code'),
    ('cluster.variables', {'UCX_MODULE_DIR': '/shared'}, 'names a file or code'),
    ('cluster.variables', {'OMP_TOOL_LIBRARIES': 'x.so'}, 'names a file or code'),
    ('cluster.variables', {'TORCH_NCCL_DEBUG_INFO_TEMP_FILE': 'x'}, 'names a file or code'),
    ('optimizer.steps', 10**400, 'less than'),
    ('optimizer.steps', 2**63, 'less than'),
    ('optimizer.learning_rate', 1e300, 'less than or equal to'),
    ('optimizer.weight_decay', 1e300, 'less than or equal to'),
    ('batch.length', 10**30, 'less than'),
    ('batch.micro', '1:30', 'valid integer'),
    ('model.classes', 2**64, 'less than'),
    ('intervals.saving', 2**64, 'less than'),
    ('zero.reduce_bucket', 0, 'greater than or equal to 1'),
    ('zero.persistence_threshold', -1, 'greater than or equal to 0'),
    ('intervals.logging', 0, 'greater than or equal to 1'),
    ('intervals.saving', -1, 'greater than or equal to 0'),
    ('sharding.group', 0, 'greater than or equal to 1'),
    ('optimizer.kind', 'adam', "did you mean 'adamw'?"),
]


@pytest.mark.parametrize('path, value, words', WRONG, ids=lambda v: str(v)[:30])
def test_one_wrong_field_is_named_with_its_value_and_line(path, value, words):
    error = refused(plain(**{path: value}))
    assert len(error.problems) == 1
    problem = error.problems[0]
    assert problem.path.startswith(path)
    assert words in problem.reason
    assert (
        yaml.safe_dump(plain(**{path: value}))
        .splitlines()[problem.line - 1]
        .strip()
        .startswith(path.split('.')[-1]))


def test_every_required_field_is_asked_for():
    assert {p.path for p in refused({'version': 2}).problems} == {'name', 'model', 'data'}
    assert 'start with `version: 2`' in str(
        refused({k: v for k, v in plain().items() if k != 'version'}))


def test_python_and_text_are_refused_alike():
    with pytest.raises(RecipeError, match='method.rnk = 8'): Recipe(**plain(**{'method.rnk': 8}))
    with pytest.raises(RecipeError, match="did you mean 'rank'"): Method(rnk=8)
    with pytest.raises(RecipeError): GOOD.changed(nothing=1)
    with pytest.raises(RecipeError, match='has no such part'): GOOD.changed({'seed.low': 1})


@pytest.mark.parametrize(
    'text',
    [
        '', ' \n', 'null', '7', '[1]', 'version 1', 'version: 1\nversion: 1', 'a: &x [1]\nb: *x',
        '!!python/object/apply:os.system ["true"]', 'x: !!python/name:os.system',
        '[' * 500 + ']' * 500, '{' * 1000, '---\na: 1\n---\nb: 2', 'a: 2024-13-45', '\x00',
        '? [a]\n: b', 'a: "\\ud800"',
        '\t a: 1', 'a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]', '1: 2', 'true: 1', 'model: {1: 2}',
        'data: {labels: {1: a, 1: b}}', 'a: !!bool foo', 'a: !!int ""', 'a: !!float ""',
        'a: !!timestamp foo', '!!int foo', 'version: 2\nbatch: {<<: {micro: 7}, micro: 3}',
        'version: 2\n<<: {seed: 3}', '~' * 10_000, 'k' * 10_000 + '\n: 1'],
    ids=lambda t: repr(t)[:30])
def test_hostile_text_ends_in_a_recipe_error(text):
    with pytest.raises(RecipeError) as caught: Recipe.parse(text)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize('text', ['[' * 20_000, '{a: ' * 3_000, '- ' * 5_000])
def test_deep_text_is_refused_at_once(text):
    start = time.process_time()
    with pytest.raises(RecipeError, match='more than 20 levels'): Recipe.parse(text)
    assert time.process_time() - start < 4  # 0.5 s on a quiet machine; was 40 s


def test_many_mistakes_make_a_short_message():
    text = 'version: 2\n' + ''.join(f'key{number}: 1\n' for number in range(3_000))
    with pytest.raises(RecipeError, match=r'and 2,953 more$') as caught: Recipe.parse(text)
    assert len(caught.value.problems) == 3_003  # Three fields are missing
    assert len(str(caught.value)) < 10_000
    with pytest.raises(RecipeError) as caught: Recipe(**plain() | {'k' * 10**6: 1})
    assert len(str(caught.value)) < 1_000


def test_a_time_of_day_is_text_and_numbers_are_still_numbers():
    text = GOOD.changed({'data.question': '1:30'}).dump()
    assert Recipe.parse(text.replace("'1:30'", '1:30')).data.question == '1:30'
    assert Recipe.parse(text.replace('micro: 1', 'micro: 1_000')).batch.micro == 1_000
    assert Recipe.parse(text.replace('micro: 1', 'micro: !!int 7')).batch.micro == 7
    assert Recipe.parse(text.replace('question:', 'question: !!str')).data.question == '1:30'


VARIABLES = [
    {'NCCL_DEBUG': 'INFO', 'NCCL_IB_DISABLE': '1', 'NCCL_ALGO': 'Ring', 'NCCL_IB_HCA': '=mlx5_0:1'},
    {'OMP_NUM_THREADS': '8', 'OMP_WAIT_POLICY': 'PASSIVE', 'KMP_AFFINITY': 'compact'},
    {'CUDA_DEVICE_MAX_CONNECTIONS': '1', 'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:128'},
    {'FI_PROVIDER': 'efa', 'UCX_TLS': 'rc,cuda', 'TORCH_NCCL_BLOCKING_WAIT': '1'}]


@pytest.mark.parametrize('variables', VARIABLES, ids=lambda v: next(iter(v)))
def test_switches_and_numbers_may_be_set(variables):
    recipe = GOOD.changed({'cluster.variables': variables})
    assert dict(Recipe.parse(recipe.dump()).cluster.variables) == variables


def test_no_variable_of_the_list_names_code_or_a_file():
    names = [
        name
        for group in yaml.safe_load(asset('variables.yaml').read_text()).values()
        for name in group]
    assert len(set(names)) == len(names) > 100
    words = 'PLUGIN|PATH|_DIR(_|$)|FILE|LIB|MODULE|CONFIG|TOKEN|TOOL|PRELOAD|SERVER|COMM_ID'
    harmless = {'CUBLAS_WORKSPACE_CONFIG'}  # Sizes, as in :4096:8
    assert {name for name in names if re.search(words, name)} == harmless
    assert all(re.fullmatch('[A-Z][A-Z0-9_]+', name) for name in names)


def test_random_damage_never_raises_anything_else():
    chance = random.Random(0)
    text = GOOD.dump()
    for _ in range(400):
        at = chance.randrange(len(text))
        size = chance.randrange(12)
        damaged = (
            text[:at]
            + ''.join(chance.choice('{}[]:*&!%-#\'" \n\t09az') for _ in range(size))
            + text[at + chance.randrange(12) :]
        )
        try: assert Recipe.parse(damaged).dump()
        except RecipeError as error: assert error.problems


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path/'latin.yaml').write_bytes('name: é'.encode('latin-1'))
    for path, words in [
        ('none.yaml', 'No such file'),
        ('latin.yaml', 'UTF-8'),
        ('.', 'cannot be read'),
        ('a\0b', 'cannot be read'),
        ('~nobody-here/x', 'cannot be read')
    ]:
        with pytest.raises(RecipeError, match=words): Recipe.load(tmp_path/path)


def test_the_round_trip_is_exact():
    chance = random.Random(1)
    for _ in range(50):
        recipe = GOOD.changed(
            {
                'optimizer.learning_rate': chance.uniform(1e-9, 1),
                'method.dropout': chance.random(),
                'seed': chance.randrange(2**32),
                'method.targets': chance.choice(['all-linear', ['q_proj', 'v_proj']]),
                'data.question': chance.choice(['yes', '1e-4', 'é: "#\n']),
                'data.labels': chance.choice([{}, {1: 'no', '2': None, 'true': '3'}]),
                'data.text_column': chance.choice([None, 0, 'text']),
            }
        )
        assert Recipe.parse(recipe.dump()) == recipe
        assert hash(Recipe.parse(recipe.dump())) == hash(recipe)
        assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize('rate', ['2e-4', '2E-4', '2.0e-4', '0.0002', '20e-5'])
def test_learning_rates_as_people_write_them(rate):
    text = GOOD.dump().replace('learning_rate: 0.0002', f'learning_rate: {rate}')
    assert rate in text
    assert Recipe.parse(text).optimizer.learning_rate == pytest.approx(2e-4, rel=1e-12)


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(refused(plain(seed=-1))))
    assert error.problems[0].path == 'seed'
    assert 'seed = -1' in str(error)


@pytest.mark.parametrize('storage', ['bfloat16', 'float16', 'float32', 'uint8', 'int8'])
@pytest.mark.parametrize('strategy', ['fsdp2', 'zero3', 'ddp'])
@pytest.mark.parametrize('compute', ['bfloat16', 'float32'])
@pytest.mark.parametrize('kind', ['qlora', 'lora', 'full'])
def test_the_storage_rules_bite_exactly_where_they_should(storage, strategy, compute, kind):
    changes = {
        'method.storage': storage, 'sharding.strategy': strategy, 'precision.compute': compute,
        'method.kind': kind}
    wrong = {
        'fsdp2': storage != compute, 'zero3': storage not in (compute, 'uint8', 'int8'),
        'ddp': False}[strategy]
    if kind == 'qlora' and wrong:
        with pytest.raises(RecipeError, match='qlora-storage-shards|zero-casts-the-payload'):
            GOOD.changed(changes)
    else: assert GOOD.changed(changes).method.storage == storage


# Rules: each row of rules.yaml is tested by what it says about itself

def bites(*changes) -> set[str]:
    """Ids of the rules of either level that the good recipe breaks after these changes; plan.* are
    facts of a plan."""
    fields = {key: value for change in changes for key, value in change.items()}
    planned = {key: fields.pop(key) for key in list(fields) if key.startswith('plan.')}
    try: facts = GOOD.changed(fields).facts() | planned
    except RecipeError as error:
        return {p.reason.rpartition('[')[2].rstrip(']') for p in error.problems}
    return {rule.id for level in ('refuse', 'warn', 'run') for rule in broken(facts, level)}


def not_run(changes):
    "What is planned only of the good recipe after these changes; plan.* are facts of a plan."
    planned = {key: value for key, value in changes.items() if key.startswith('plan.')}
    recipe = GOOD.changed({key: changes[key] for key in changes if key not in planned})
    return planned_only(recipe, recipe.facts() | planned)


@pytest.mark.parametrize('rule', rules(), ids=lambda rule: rule.id)
def test_a_rule_bites_where_it_says_and_nowhere_else(rule):
    found = bites(rule.breaks)
    assert rule.id in found
    assert rule.id not in bites({}) | bites(rule.breaks, rule.fixes)
    others = [r for r in rules() if r.id in found - {rule.id} and r.level == 'refuse']
    assert not others, 'another rule would hide this one'
    planned = any(name.startswith('plan.') for name in rule.breaks)
    if rule.level == 'run':
        (problem,) = not_run(rule.breaks)
        assert problem.path == rule.path
        assert problem.reason.endswith(f'[{rule.id}]')
        assert not not_run(rule.breaks | rule.fixes)
    elif rule.level == 'warn' or planned:
        assert GOOD.changed({k: v for k, v in rule.breaks.items() if not k.startswith('plan.')})
    else:
        with pytest.raises(RecipeError, match=f'{rule.path} = .*{rule.id}'):
            GOOD.changed(rule.breaks)


def test_rules_are_complete():
    facts = GOOD.facts()
    rows = rules()
    assert len({rule.id for rule in rows}) == len(rows) >= 30
    assert {pain for rule in rows for pain in rule.pains} >= {
        'P1', 'P2', 'P4', 'P13', 'P14', 'P15', 'P16', 'P20'}
    for rule in rows:
        assert rule.path in facts
        assert all(name in facts or name.startswith('plan.') for name in rule.when), rule.id
        named = [
            str(t)[1:]
            for test in rule.when.values()
            if isinstance(test, dict)
            for t in test.values()
            if str(t).startswith('=')]
        assert all(name in facts or name in rule.when for name in named), rule.id
        assert not rule.reason.endswith('.')
        assert not rule.fix.endswith('.')


def test_rules_wait_for_facts_and_broken_rules_come_together():
    assert broken({}) == broken({}, 'warn') == broken({}, 'run') == []
    with pytest.raises(RecipeError) as caught:
        GOOD.changed({'method.storage': 'uint8', 'sharding.offload_parameters': 'cpu'})
    assert [p.path for p in caught.value.problems] == [
        'method.storage', 'sharding.offload_parameters']
    html = rules()._repr_html_()
    assert html.count('<tr>') == len(rules()) + 1
    assert '<td style=text-align:left>not =precision.compute' not in html


def test_a_recipe_with_all_its_rules_is_cheap():
    parts = {key: getattr(GOOD, key) for key in Recipe.model_fields}
    start = time.process_time()
    for _ in range(200): Recipe(**parts)
    assert (time.process_time() - start) / 200 < 1e-3  # 0.1 ms on a quiet machine


# Named recipes, and what of them this version can run

@pytest.mark.parametrize('name', recipe_names())
def test_named_recipes_are_named_after_themselves_and_shrink(name):
    recipe = Recipe.named(name)
    small = shrink(Recipe.named(name))
    assert recipe.name == name
    assert small.cluster.model_dump(exclude={'processes'}) == {
        'nodes': 1, 'device': 'cpu', 'hardware': None, 'interface': None, 'variables': {}}
    assert (small.model.source, small.model.head) == ('tiny-base', recipe.model.head)
    assert (small.method.kind, small.method.double_quant) == (
        recipe.method.kind, recipe.method.double_quant)
    for field in (
        'strategy', 'reshard_after_forward', 'activation_checkpointing', 'reentrant', 'pin_memory'
    ):
        assert getattr(small.sharding, field) == getattr(recipe.sharding, field)
    offloads = [
        (r.sharding.offload_parameters, r.sharding.offload_optimizer) for r in (recipe, small)]
    assert offloads[1] == (
        offloads[0] if recipe.sharding.strategy.startswith('zero') else ('none', 'none'))
    assert small.batch.packing == recipe.batch.packing
    assert small.batch.loss_head == recipe.batch.loss_head
    impossible = {'hardware', 'flash'}
    if recipe.sharding.strategy.startswith('zero'): impossible.add('float16')
    assert not impossible & set(small.dump().split())
    assert planned_only(small) == []
    assert shrink(small) == small
    assert {field for field, _, _ in differences(recipe, small)} >= {'name'}
    assert not {rule.id for rule in broken(small.facts(), 'warn')} - {
        'packing-by-a-mask', 'zero3-load-peak'}
    two = shrink(recipe, nodes=2) if small.cluster.ranks > 1 else None
    assert two is None or two == small.changed({'cluster.nodes': 2}) and planned_only(two) == []


HEADS = {
    name: (asset('recipes')/f'{name}.yaml').read_text().split('version:')[0]
    for name in recipe_names()}


@pytest.mark.parametrize(
    'name', [n for n in recipe_names() if Recipe.named(n).cluster.device == 'cuda'])
def test_a_head_says_what_was_published_and_what_is_only_planned(name):
    from llm_workbook.config.hardware import node
    from llm_workbook.plan.estimate import estimate
    head = HEADS[name]
    plan = estimate(Recipe.named(name))
    assert plan.fits
    assert 'Not yet run at full size' in head
    if 'Corrected:' in head: return
    peak = plan.ledger.peak() / 2**30
    memory = node(plan.recipe.cluster.hardware).gpu.memory_b / 2**30
    assert 'Not published: made for this workbook' in head
    assert f'Planned: {peak:.1f} GiB of {memory:.1f} at the peak' in head
    assert planned_only(plan.recipe) == []


def test_whatever_shrinks_says_why():
    why = yaml.safe_load(asset('shrunk.yaml').read_text())
    for field in GOOD.facts().keys() - {
        'cluster.ranks', 'batch.global', 'data.classes', 'zero.set', 'version', 'seed'
    }:
        assert why.get(field) or why.get(field.split('.')[0]), field
    assert set(why) <= GOOD.facts().keys() | {field.split('.')[0] for field in GOOD.facts()}
    for name in recipe_names():
        recipe = Recipe.named(name)
        rows = shrinkage(Recipe.named(name))
        assert [row[:3] for row in rows] == differences(recipe, shrink(recipe))
        assert all(row[3] for row in rows)
        assert rows._repr_html_().count('<tr>') == len(rows) + 1
    kept = {row[0]: row for row in shrinkage(Recipe.named('7b-zero3-offload'))}
    assert not {'sharding.offload_parameters', 'sharding.offload_optimizer'} & kept.keys()
    assert kept['precision.compute'][1:3] == ('float16', 'float32')
    assert kept['precision.loss_scale'][1:3] == ('dynamic', 'none')


def test_reductions_in_every_pass_are_not_asked_of_one_pass():
    passes = GOOD.changed({'batch.accumulation': 2, 'sharding.sync_each_batch': True})
    assert ('sharding.sync_each_batch', True, False) in [row[:3] for row in shrinkage(passes)]
    assert shrink(passes, model='own').sharding.sync_each_batch
    alone = passes.changed({'batch.accumulation': 1})
    told = [rule.id for rule in broken(alone.facts(), 'warn')]
    assert 'sync-each-batch-needs-passes' in told
    assert 'sync-each-batch-needs-passes' not in [
        rule.id for rule in broken(passes.facts(), 'warn')]


def test_what_a_cpu_cannot_do_shrinks_to_what_it_can():
    hard = GOOD.changed(
        {
            'cluster': {
                'nodes': 2, 'processes': 4, 'device': 'cuda', 'hardware': '4x-h100',
                'interface': 'eth0', 'variables': {'NCCL_DEBUG': 'INFO'}},
            'model.attention': 'flash', 'precision.compute': 'float16',
            'precision.loss_scale': 'dynamic', 'method.storage': 'float16',
            'sharding.strategy': 'zero3', 'sharding.offload_parameters': 'nvme',
            'sharding.offload_optimizer': 'nvme', 'precision.reduce': 'float16'})
    small = shrink(hard)
    assert (
        small.precision.compute, small.precision.loss_scale, small.precision.reduce,
        small.method.storage) == ('float32', 'none', None, 'float32')
    assert (
        small.model.attention, small.sharding.offload_parameters,
        small.sharding.offload_optimizer) == ('sdpa', 'cpu', 'cpu')
    assert small.sharding.strategy == 'zero3'
    assert planned_only(small) == []
    assert (small.zero.reduce_bucket, small.zero.persistence_threshold, small.zero.overlap) == (
        1_000_000, 1000, True)
    paged = GOOD.changed(
        {'cluster.device': 'cuda', 'sharding.strategy': 'ddp', 'optimizer.kind': 'paged_adamw_8bit'}
    )
    assert shrink(paged).optimizer.kind == 'adamw_8bit'
    eight = GOOD.changed(
        {
            'cluster.device': 'cuda', 'method.kind': 'lora', 'precision.compute': 'fp8',
            'sharding.group': 2, 'cluster.nodes': 2})
    assert (shrink(eight).precision.compute, shrink(eight).sharding.group) == ('float32', None)
    for changes in (
        {'sharding.strategy': 'fsdp1', 'precision.master': 'bfloat16'},
        {'optimizer.kind': 'adamw_bf16'},
        {'batch.loss_head': 'full'},
        {'intervals.checkpoint': 'full'},
        {'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'},
        {'sharding.strategy': 'zero3', 'sharding.activation_checkpointing': 'full'},
        {'method.quant': 'int8', 'sharding.strategy': 'ddp'},
        {'precision.reduce': 'bfloat16'}
    ):
        assert planned_only(GOOD.changed(changes)), changes
        assert planned_only(shrink(GOOD.changed(changes))) == [], changes


def test_every_setting_of_the_published_recipes_has_its_place():
    facts = GOOD.facts()
    published = yaml.safe_load(asset('settings.yaml').read_text())
    assert len(published) == 4
    for of, settings in published.items():
        for setting, place in settings.items():
            assert place in facts or re.match('dropped: .{20}', place), f'{of}: {setting}: {place}'


def test_what_is_planned_only_is_said_with_a_way_out():
    assert planned_only(GOOD) == []
    runs = yaml.safe_load(asset('runs.yaml').read_text())
    assert all(GOOD.facts()[field] in values for field, values in runs.items())
    ahead = GOOD.changed(
        {
            'precision.reduce': 'bfloat16', 'intervals.checkpoint': 'full',
            'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'})
    reduce, whole, offload = planned_only(ahead)
    assert [p.path for p in (reduce, whole, offload)] == [
        'precision.reduce', 'intervals.checkpoint', 'sharding.offload_parameters']
    assert reduce.reason == (
        'can be planned, not run by this version; set it to nothing or float32')
    assert whole.reason.endswith('set it to sharded')
    assert offload.reason.startswith('can be planned, not run: ')
    assert 'set both offloads to none' in offload.reason
    remarks = GOOD.changed(
        {
            'cluster.interface': 'eth0', 'cluster.variables': {'NCCL_DEBUG': 'INFO'},
            'sharding.strategy': 'zero3', 'sharding.offload_parameters': 'cpu',
            'sharding.offload_optimizer': 'cpu'})
    assert (
        planned_only(remarks)
        == planned_only(
            GOOD.changed(
                {
                    'cluster.device': 'cuda', 'sharding.offload_parameters': 'cpu',
                    'sharding.offload_optimizer': 'cpu'}))
        == [])


def test_a_long_name_still_shrinks():
    assert len(shrink(GOOD.changed(name='x' * 64)).name) == 64
    assert (
        shrink(GOOD.changed({'sharding.strategy': 'none', 'cluster.processes': 1})).cluster.ranks
        == 1)


def test_a_source_means_package_then_disk_then_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'tiny-base').mkdir()
    assert resolve('tiny-base') == asset('tiny-base')
    assert resolve('./tiny-base').is_dir()
    assert resolve('./tiny-base') != asset('tiny-base')
    assert resolve('owner/name') == 'owner/name'
    (tmp_path/'owner/name').mkdir(parents=True)
    assert resolve('owner/name').is_dir()
    for source in ['', 'gpt2', 'rows/train.jsonl', '../none', '/none', 'a/b/c', 'nobody/']:
        with pytest.raises(ValueError, match='no path here'): resolve(source)


def test_nearest_and_asset_name_what_there_is():
    assert nearest('tinybase', ['tiny-base']) == "did you mean 'tiny-base'?"
    for name in ['..', '../recipe.py', 'tiny-base/config.json', '']:
        with pytest.raises(ValueError, match='no packaged'): asset(name)
