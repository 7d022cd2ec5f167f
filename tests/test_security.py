"""What SECURITY.md promises: reading runs nothing, a refusal names what it refuses, and a token
stays where it was."""
import ast
import json
import os
import pickle
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
from page import ROOT
from trouble import some_rows

from llm_workbook.config.document import RecipeError
from llm_workbook.files import asset, resolve
from llm_workbook.config.recipe import Recipe
from llm_workbook.watching.hangs import read_flight_record

CALL = "os.system('touch planted')"


class Payload:
    def __reduce__(self): return os.system, ('touch planted',)


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    """In a folder of its own, with somebody at the keyboard who says yes to everything: no payload
    leaves its file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('builtins.input', lambda *asked: 'yes')
    yield
    assert not Path('planted').exists()
    assert not list(tmp_path.rglob('planted'))


@pytest.fixture
def base(tmp_path):
    "A copy of the tiny base, to poison."
    return shutil.copytree(asset('tiny-base'), tmp_path/'base')


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    "Twelve rows of each split of the sample."
    return some_rows(tmp_path_factory.mktemp('rows'), 12)


def recipe_of(base, rows, **changes):
    data = {'source': str(rows), 'format': 'messages'}
    return Recipe(
        name='poisoned', model={'source': str(base)}, data=data, batch={'micro': 1, 'length': 64},
        optimizer={'steps': 2}).changed(changes)


# Recipes

YAML = {
    'object': f'!!python/object/apply:os.system ["touch planted"]', 'module': '!!python/module:os',
    'name': '!!python/name:os.system',
    'field': 'version: 1\nname: !!python/object/apply:os.system ["touch planted"]',
    'new': '!!python/object/new:os.system ["touch planted"]',
    'eval': f'!!python/object/apply:eval ["__import__(\'os\').system(\'touch planted\')"]',
    'bomb': 'a: &a [x, x]\nb: &b [*a, *a]\nversion: *b', 'deep': '[' * 1200}


@pytest.mark.parametrize('text', YAML.values(), ids=YAML)
def test_a_recipe_is_data(text, tmp_path):
    with pytest.raises(RecipeError, match='not plain YAML'): Recipe.parse(text)
    (tmp_path/'recipe.yaml').write_text(text)
    with pytest.raises(RecipeError, match='recipe.yaml'): Recipe.load(tmp_path/'recipe.yaml')


@pytest.mark.parametrize(
    'text',
    [
        '{{ 7 * 7 }}', '${HOME}', '$(touch planted)', '`touch planted`',
        "__import__('os')." + CALL[3:]])
def test_what_stands_in_a_recipe_is_not_evaluated(text):
    with pytest.raises(RecipeError): Recipe(name=text)
    with pytest.raises(ValueError, match='is no path here'): resolve(text)


# Bases: templates, code and pickles that come with a model

TEMPLATES = {
    'class': "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    'globals': '{{ cycler.__init__.__globals__.' + CALL + ' }}',
    'import': "{{ self.__init__.__globals__.__builtins__."
              "__import__('os').system('touch planted') }}",
    'function': "{{ lipsum.__globals__['os'].popen('touch planted').read() }}",
    'file': "{% include '/etc/passwd' %}", 'change': "{{ messages.append('x') }}",
    'endless': '{% for i in range(10**9) %}x{% endfor %}'}


@pytest.mark.parametrize('where', ['chat_template.jinja', 'tokenizer_config.json'])
@pytest.mark.parametrize('template', TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_is_rendered_in_a_sandbox(base, rows, template, where):
    from llm_workbook.training.fine_tune import check_recipe
    template = '{% generation %}x{% endgeneration %}' + template
    if where == 'chat_template.jinja': (base/where).write_text(template)
    else:
        (base/'chat_template.jinja').unlink()
        config = json.loads((base/where).read_text())
        (base/where).write_text(json.dumps(config | {'chat_template': template}))
    with pytest.raises(ValueError, match='the chat template refuses this conversation'):
        check_recipe(recipe_of(base, rows))


def with_code(base, **config):
    "Let a base ask for code of its own, in `config.json` and for its tokenizer."
    (base/'evil.py').write_text(f'import os\n{CALL}\n')
    for file, more in (
        (
            'config.json',
            {'auto_map': {'AutoConfig': 'evil.C', 'AutoModelForCausalLM': 'evil.M'}} | config),
        (
            'tokenizer_config.json',
            {'auto_map': {'AutoTokenizer': ['evil.T', 'evil.T']}, 'tokenizer_class': 'Evil'})
    ):
        (base/file).write_text(json.dumps(json.loads((base/file).read_text()) | more))
    return base


def with_config(base, **fields):
    config = json.loads((base/'config.json').read_text())
    (base/'config.json').write_text(json.dumps(config | fields))
    return base


def test_a_base_does_not_choose_its_attention(base):
    from llm_workbook.config.recipe import Method, Model
    from llm_workbook.model.quantize import load_base
    with_config(base, _attn_implementation='eager')
    lora = Method(kind='lora')
    for attention in 'sdpa', 'eager':
        model = load_base(str(base), lora, device='cpu', attention=attention)
        assert model.config._attn_implementation == attention
    judge = load_base(Model(source=str(base), head='classification', classes=3), lora, device='cpu')
    assert (judge.config._attn_implementation, judge.score.out_features) == ('sdpa', 3)


def test_a_chat_has_the_attention_of_the_recipe_on_both_sides(base, rows):
    from llm_workbook.release.chat import load_chat
    with_config(base, _attn_implementation='sdpa')
    recipe = recipe_of(base, rows, **{'method.kind': 'full', 'model.attention': 'eager'})
    chat = load_chat(recipe, base)
    names = [model.config._attn_implementation for model in (chat.base, chat.model)]
    assert names == ['eager', 'eager']


@pytest.mark.parametrize(
    'fields',
    [
        {'_attn_implementation': 'owner/kernel'}, {'attn_implementation': 'owner/kernel'},
        {'_attn_implementation': {'': 'owner/kernel'}}, {'_experts_implementation': 'owner/k@main'},
        {'text_config': {'_attn_implementation': 'owner/kernel'}}],
    ids=str)
def test_a_base_that_names_a_kernel_of_the_hub_is_refused_before_it_is_loaded(
    base, rows, fields
):
    from llm_workbook.model.quantize import load_base
    from llm_workbook.model.spec import spec
    from llm_workbook.release.chat import load_chat
    from llm_workbook.training.fine_tune import check_recipe
    with_config(base, **fields)
    recipe = recipe_of(base, rows)
    for load in (
        lambda: load_base(str(base), device='cpu'), lambda: check_recipe(recipe),
        lambda: load_chat(recipe, base), lambda: spec(str(base))
    ):
        with pytest.raises(ValueError, match='is code of the Hub'): load()


def test_an_index_cannot_lead_transformers_out_of_the_directory(base):
    from llm_workbook.model.quantize import load_base
    from llm_workbook.model.weight_files import Weights
    names = list(Weights(base).tensors)
    (base/'model.safetensors').rename(base.parent/'outside.safetensors')
    index = {'metadata': {}, 'weight_map': dict.fromkeys(names, '../outside.safetensors')}
    (base/'model.safetensors.index.json').write_text(json.dumps(index))
    with pytest.raises(ValueError, match='leads out of the directory'):
        load_base(str(base), device='cpu')
    (base.parent/'outside.safetensors').rename(base/'inside.safetensors')
    index['weight_map'] = dict.fromkeys(names, 'inside.safetensors')
    (base/'model.safetensors.index.json').write_text(json.dumps(index))
    assert load_base(str(base), device='cpu')


def test_code_that_comes_with_a_model_never_runs_even_if_somebody_says_yes(base, rows):
    from llm_workbook.model.spec import spec
    from llm_workbook.model.quantize import load_base
    from llm_workbook.training.fine_tune import check_recipe
    recipe = recipe_of(with_code(base), rows)
    with pytest.raises(ValueError, match='custom code'): check_recipe(recipe)
    assert type(load_base(base, recipe.method, device='cpu')).__module__.startswith(
        'transformers.'), 'the known class, not theirs'
    with_code(base, model_type='evil')
    with pytest.raises(ValueError, match="no model_type 'evil'"):
        load_base(base, recipe.method, device='cpu')
    with pytest.raises(ValueError, match="no model_type 'evil'"): spec(str(base))


def test_a_base_of_pickles_is_refused(base, rows):
    from llm_workbook.model.quantize import load_base
    from llm_workbook.model.weight_files import Weights
    for file in base.glob('*.safetensors'): file.unlink()
    (base/'pytorch_model.bin').write_bytes(pickle.dumps(Payload()))
    with pytest.raises(OSError, match='safetensors'):
        load_base(base, recipe_of(base, rows).method, device='cpu')
    with pytest.raises(ValueError, match='holds pickles only'): Weights(base)


def test_adapters_that_are_pickles_are_refused(base, tmp_path):
    from llm_workbook.model.adapters import load_adapters
    folder = tmp_path/'adapters'
    folder.mkdir()
    (folder/'adapter_config.json').write_text(
        json.dumps(
            {
                'peft_type': 'LORA', 'r': 2, 'target_modules': ['q_proj'],
                'base_model_name_or_path': str(base)}))
    (folder/'adapter_model.bin').write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ValueError, match='adapter_model.safetensors'): load_adapters(None, folder)


# Data

def test_a_script_or_a_pickle_among_the_data_is_not_read(tmp_path):
    from llm_workbook.training.data import load_rows
    folder = tmp_path/'rows'
    folder.mkdir()
    (folder/'rows.py').write_text(f'import os\n{CALL}\n')
    for split in 'train', 'test':
        shutil.copy(asset('sample-conversations')/f'{split}.jsonl', folder)
    train, _ = load_rows(recipe_of('tiny-base', folder).data, 0)
    assert train
    (folder/'rows.pkl').write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ValueError, match='rows.pkl: cannot be read: known: .jsonl'):
        load_rows(recipe_of('tiny-base', folder/'rows.pkl').data, 0)


# Checkpoints: the manifest is tested in test_commits.py, with the kinds of files that are programs

def test_a_checkpoint_with_a_planted_pickle_is_not_resumed(tmp_path):
    from llm_workbook.checkpoint.manifest import (
        MANIFEST, DamagedCheckpoint, begin_save, commit_checkpoint, latest_valid)

    facts = dict(ranks=1, strategy='ddp', method='full', recipe_hash='', versions={})
    for step in 1, 2:
        folder = begin_save(tmp_path, step)
        (folder/'state.json').write_text('{}')
        commit_checkpoint(folder, facts | {'step': step})
    (folder/'rng_state_0.pth').write_bytes(pickle.dumps(Payload()))
    assert latest_valid(tmp_path) == tmp_path/'checkpoint-1'
    lie = (
        (tmp_path/'checkpoint-1'/MANIFEST)
        .read_text()
        .replace('"state.json"', '"../checkpoint-2/rng_state_0.pth"'))
    (tmp_path/'checkpoint-1'/MANIFEST).write_text(lie)
    with pytest.raises(DamagedCheckpoint, match='none of its checkpoints'): latest_valid(tmp_path)


# Tokens

def test_a_token_in_the_environment_is_written_nowhere(tmp_path, rows, monkeypatch, capfd):
    from llm_workbook.training.fine_tune import fine_tune
    canary = 'hf' + '_' + 'Canary' * 6  # Put together here, so that this file holds no token
    for name in 'HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'WANDB_API_KEY':
        monkeypatch.setenv(name, canary)
    monkeypatch.setenv('TMPDIR', str(tmp_path/'temp'))
    (tmp_path/'temp').mkdir()
    recipe = recipe_of('tiny-base', rows, **{'intervals.saving': 1})
    run = fine_tune(recipe, tmp_path/'run', 300, live=False)
    files = [path for path in tmp_path.rglob('*') if path.is_file()]
    assert run.saved.is_dir()
    assert {'checkpoint-1', 'checkpoint-2'} <= {
        path.relative_to(tmp_path/'run').parts[0]
        for path in files
        if path.is_relative_to(tmp_path/'run')}
    assert [path.name for path in files if canary.encode() in path.read_bytes()] == []
    printed = ''.join(capfd.readouterr())
    assert canary not in printed + repr(run) + run._repr_html_() + json.dumps(run.to_dict())


# The sources

@cache
def calls(path):
    "Calls in a module, as (what is called, source of the call)."
    nodes = ast.walk(ast.parse(path.read_text()))
    return [(ast.unparse(n.func), ast.unparse(n)) for n in nodes if isinstance(n, ast.Call)]


def called(path, function):
    "Source of the calls of `function`, a pattern, in a module."
    return [source for name, source in calls(path) if re.fullmatch(function, name)]


def test_a_flight_record_runs_nothing(tmp_path):
    for number, value in enumerate([Payload(), {'entries': [Payload()]}, {'entries': Payload}]):
        record = tmp_path/f'trace_{number}'
        record.write_bytes(pickle.dumps(value))
        with pytest.raises(ValueError, match='is no flight record: it asks for'):
            read_flight_record(record)


@pytest.mark.parametrize(
    'path', sorted((ROOT/'llm_workbook').rglob('*.py')),
    ids=lambda path: str(path.relative_to(ROOT)))
def test_the_sources_load_nothing_that_can_run(path):
    """Left out, `trust_remote_code` lets transformers ask at the keyboard; processes of one launch
    send each other pickles."""
    runs = called(path, 'eval|exec|os.system|os.popen')
    # A reader's page is run, as asked: `llm-workbook exercises check PAGE`
    assert len(runs) == (path.parts[-2:] == ('exercises', 'check.py')), runs
    assert [call for call in called(path, 'torch.load') if 'weights_only=True' not in call] == []
    pickles = called(path, r'pickle\.\w+')
    # torch's flight records are read by an unpickler that raises this at the first name
    if path.stem == 'hangs':
        pickles = [call for call in pickles if not call.startswith('pickle.UnpicklingError')]
    assert path.stem in ('ranks', 'fresh_process') or not pickles
    loads = [
        call
        for call in called(path, r'Auto\w+\.from_pretrained')
        if 'resolve(' in call and "'tiny-base'" not in call]
    assert [call for call in loads if 'trust_remote_code=False' not in call] == []
