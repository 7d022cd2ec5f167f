"""The recipe under careless and hostile text: what the chapter has no room for."""
import pickle
import random

import pytest
import yaml
from llm_workbook.recipe import (RULES, Data, Method, Model, Recipe, RecipeError, asset, differences, nearest, recipes,
                                 resolve, shrink)

GOOD = Recipe(name='good', model=Model(source='tiny-base'), data=Data(source='sample-conversations'))


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
    ('name', 'two words', 'letters, digits'), ('name', '', 'letters, digits'), ('name', '../x', 'letters, digits'),
    ('name', 7, 'valid string'), ('name', 'x' * 65, '1 to 64'), ('seed', -1, 'greater than or equal to 0'), ('seed', 1.5, 'valid integer'),
    ('seed', True, 'valid integer'), ('seed', 2**32, 'less than'), ('model', 'tiny-base', 'valid dictionary'), ('model.source', None, 'valid string'),
    ('model.source', '', 'at least 1 character'), ('model.sorce', 'x', "did you mean 'source'?"), ('data.format', 'chat', 'must be one of auto'),
    ('data.test_share', 1.0, 'less than 1'), ('data.test_share', -0.1, 'greater than or equal to 0'),
    ('data.text_column', -1, 'position from 0'), ('data.text_column', 1.5, 'position from 0'), ('data.labels', ['a'], 'give each label its word'),
    ('data.labels', {'1': 2}, 'give each label its word'), ('method.kind', 'qlra', "did you mean 'qlora'?"), ('method.kind', None, 'must be one of'),
    ('method.rank', 0, 'greater than or equal to 1'), ('method.rank', '16', 'valid integer'), ('method.rank', 16.0, 'valid integer'),
    ('method.dropout', 1, 'less than 1'), ('method.targets', [], 'list of module names'), ('method.targets', 'q_proj', 'list of module names'),
    ('method.targets', [1], 'list of module names'), ('method.double_quant', 'yes', 'valid boolean'),
    ('method.storage', 'bf16', "did you mean 'bfloat16'?"), ('cluster.processes', 0, 'greater than'), ('cluster.devise', 'cpu', "did you mean 'device'?"),
    ('cluster.device', 'gpu', 'must be one of cpu, cuda'), ('sharding.strategy', 'fsdp', "did you mean 'fsdp2'?"),
    ('sharding.reshard_after_foward', False, "did you mean 'reshard_after_forward'?"), ('zero_optimizaton', {'stage': 3}, 'unknown key'),
    ('precision.compute', 'fp8', 'must be one of bfloat16, float32'), ('batch.length', 4, 'greater than or equal to 8'),
    ('batch.micro', None, 'valid integer'), ('optimizer.learning_rate', float('nan'), 'finite'), ('optimizer.learning_rate', float('inf'), 'finite'),
    ('optimizer.learning_rate', -1e-4, 'greater than or equal to 0'), ('optimizer.learning_rate', 'fast', 'valid number'),
    ('optimizer.warmup', 3, 'less than 1'), ('optimizer.steps', 0, 'greater than or equal to 1'), ('rank', 8, "did you mean 'method.rank'?"),
    ('version', 2, 'newer than 1'), ('version', 0, 'older than 1'), ('version', '1', 'start with `version: 1`'), ('version', True, 'start with')]


@pytest.mark.parametrize('path, value, words', WRONG, ids=lambda v: str(v)[:30])
def test_one_wrong_field_is_named_with_its_value_and_line(path, value, words):
    error = refused(plain(**{path: value}))
    assert len(error.problems) == 1
    problem = error.problems[0]
    assert problem.path.startswith(path) and words in problem.reason
    assert yaml.safe_dump(plain(**{path: value})).splitlines()[problem.line - 1].strip().startswith(path.split('.')[-1])


def test_every_required_field_is_asked_for():
    assert {p.path for p in refused({'version': 1}).problems} == {'name', 'model', 'data'}
    assert 'start with `version: 1`' in str(refused({k: v for k, v in plain().items() if k != 'version'}))


def test_python_and_text_are_refused_alike():
    with pytest.raises(RecipeError, match='method.rnk = 8'): Recipe(**plain(**{'method.rnk': 8}))
    with pytest.raises(RecipeError, match="did you mean 'rank'"): Method(rnk=8)
    with pytest.raises(RecipeError): GOOD.changed(nothing=1)
    with pytest.raises(RecipeError, match='has no such part'): GOOD.changed({'seed.low': 1})


@pytest.mark.parametrize('text', [
    '', ' \n', 'null', '7', '[1]', 'version 1', 'version: 1\nversion: 1', 'a: &x [1]\nb: *x', '!!python/object/apply:os.system ["true"]',
    'x: !!python/name:os.system', '[' * 3000, '{' * 3000, '---\na: 1\n---\nb: 2', 'a: 2024-13-45', '\x00', '? [a]\n: b', 'a: "\\ud800"', '\t a: 1',
    'a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]', '1: 2', 'true: 1', 'model: {1: 2}', 'data: {labels: {1: a, 1: b}}'], ids=lambda t: repr(t)[:30])
def test_hostile_text_ends_in_a_recipe_error(text):
    with pytest.raises(RecipeError) as caught: Recipe.parse(text)
    assert len(str(caught.value)) < 5000


def test_random_damage_never_raises_anything_else():
    chance, text = random.Random(0), GOOD.dump()
    for _ in range(400):
        at, size = chance.randrange(len(text)), chance.randrange(12)
        damaged = text[:at] + ''.join(chance.choice('{}[]:*&!%-#\'" \n\t09az') for _ in range(size)) + text[at + chance.randrange(12):]
        try: assert Recipe.parse(damaged).dump()
        except RecipeError as error: assert error.problems


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path/'latin.yaml').write_bytes('name: é'.encode('latin-1'))
    for path, words in [('none.yaml', 'No such file'), ('latin.yaml', 'UTF-8'), ('.', 'cannot be read')]:
        with pytest.raises(RecipeError, match=words): Recipe.load(tmp_path/path)


def test_the_round_trip_is_exact():
    chance = random.Random(1)
    for _ in range(50):
        recipe = GOOD.changed({
            'optimizer.learning_rate': chance.uniform(1e-9, 1), 'method.dropout': chance.random(), 'seed': chance.randrange(2**32),
            'method.targets': chance.choice(['all-linear', ['q_proj', 'v_proj']]), 'data.question': chance.choice(['yes', '1e-4', 'é: "#\n']),
            'data.labels': chance.choice([{}, {1: 'no', '2': None, 'true': '3'}]), 'data.text_column': chance.choice([None, 0, 'text'])})
        assert Recipe.parse(recipe.dump()) == recipe
        assert hash(Recipe.parse(recipe.dump())) == hash(recipe)
        assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize('rate', ['2e-4', '2E-4', '2.0e-4', '0.0002', '20e-5'])
def test_learning_rates_as_people_write_them(rate):
    text = GOOD.dump().replace('learning_rate: 0.0002', f'learning_rate: {rate}')
    assert rate in text and Recipe.parse(text).optimizer.learning_rate == pytest.approx(2e-4, rel=1e-12)


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(refused(plain(seed=-1))))
    assert error.problems[0].path == 'seed' and 'seed = -1' in str(error)


@pytest.mark.parametrize('storage', ['bfloat16', 'float16', 'float32', 'uint8', 'int8'])
@pytest.mark.parametrize('strategy', ['fsdp2', 'ddp'])
@pytest.mark.parametrize('compute', ['bfloat16', 'float32'])
@pytest.mark.parametrize('kind', ['qlora', 'lora', 'full'])
def test_the_storage_rule_bites_exactly_where_it_should(storage, strategy, compute, kind):
    changes = {'method.storage': storage, 'sharding.strategy': strategy, 'precision.compute': compute, 'method.kind': kind}
    if kind == 'qlora' and strategy == 'fsdp2' and storage != compute:
        with pytest.raises(RecipeError, match='qlora-storage-shards'): GOOD.changed(changes)
    else: assert GOOD.changed(changes).method.storage == storage


def test_every_rule_is_complete_and_broken_rules_come_together():
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert not any(rule.breaks(GOOD) for rule in RULES)
    with pytest.raises(RecipeError, match='none-is-one-process'): GOOD.changed({'sharding.strategy': 'none'})


@pytest.mark.parametrize('name', recipes())
def test_named_recipes_are_named_after_themselves_and_shrink(name):
    recipe, small = Recipe.named(name), shrink(Recipe.named(name))
    assert recipe.name == name
    assert (small.cluster.device, small.cluster.nodes, small.model.source) == ('cpu', 1, 'tiny-base')
    assert (small.method.kind, small.method.storage, small.method.double_quant) == (
        recipe.method.kind, recipe.method.storage, recipe.method.double_quant)
    assert (small.sharding, small.precision) == (recipe.sharding, recipe.precision)
    assert shrink(small) == small
    assert {field for field, _, _ in differences(recipe, small)} >= {'name'}


def test_a_long_name_still_shrinks():
    assert len(shrink(GOOD.changed(name='x' * 64)).name) == 64
    assert shrink(GOOD.changed({'sharding.strategy': 'none', 'cluster.processes': 1})).cluster.ranks == 1


def test_a_source_means_package_then_disk_then_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'tiny-base').mkdir()
    assert resolve('tiny-base') == asset('tiny-base')
    assert resolve('./tiny-base').is_dir() and resolve('./tiny-base') != asset('tiny-base')
    assert resolve('owner/name') == 'owner/name'
    (tmp_path/'owner/name').mkdir(parents=True)
    assert resolve('owner/name').is_dir()
    for source in ['', 'gpt2', 'rows/train.jsonl', '../none', '/none', 'a/b/c', 'nobody/']:
        with pytest.raises(ValueError, match='no path here'): resolve(source)


def test_nearest_and_asset_name_what_there_is():
    assert nearest('tinybase', ['tiny-base']) == "did you mean 'tiny-base'?"
    for name in ['..', '../recipe.py', 'tiny-base/config.json', '']:
        with pytest.raises(ValueError, match='no packaged'): asset(name)
