"""An export is whole or absent, loads without this package, and reaches a Hub as it is, privately,
in one commit."""
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
from hub import Hub
from test_merge import moved_adapters
from trouble import fine_tune, small_recipe

import llm_workbook.release.export as exports
from llm_workbook.checkpoint.manifest import DamagedCheckpoint, check_checkpoint
from llm_workbook.training.data import load_rows
from llm_workbook.files import asset
from llm_workbook.release.export import export, push
from llm_workbook.release.merge import Gate, Merge, judge, merged
from llm_workbook.model.architecture import load_tokenizer
from llm_workbook.model.quantize import fingerprint, load_nf4
from llm_workbook.config.recipe import Method, Recipe
from llm_workbook.model.weight_files import Weights

RECIPE = Recipe.parse(
    '{version: 2, name: test, model: {source: tiny-base}, data: {source: sample-conversations}, '
    'method: {kind: qlora, rank: 4}}')
TOKEN = 'hf' + '_' + 'canary' * 5
NO = {'gate': False}


@pytest.fixture(scope='module')
def adapters(tmp_path_factory):
    return moved_adapters(tmp_path_factory.mktemp('run') / 'adapters', method=RECIPE.method)


@pytest.fixture(scope='module')
def published(adapters, tmp_path_factory):
    "One export; no fresh process has looked at it, as slow tests and the page let it."
    folder = tmp_path_factory.mktemp('exports') / 'published'
    return export(
        RECIPE, adapters, folder,
        facts={'gate': Gate('dequantised', 0.99, 0.001, 0.1, 500), 'metrics': {'exact match': 0.5}},
        prove=False)


# Whole, and the same

def test_an_export_is_whole(published):
    assert check_checkpoint(published.directory, deep=True).extra == {'into': 'dequantised'}
    assert sum(published.files.values()) == sum(
        p.stat().st_size for p in published.directory.iterdir())


COLD = {'temperature': 0.6, 'top_p': 0.9, 'do_sample': False, 'eos_token_id': 5}


@pytest.fixture(scope='module')
def cold_base(tmp_path_factory):
    """The tiny base with settings as old ones are published: a temperature, and no sampling.

    transformers reads them and refuses to write them.
    """
    folder = tmp_path_factory.mktemp('cold')/'base'
    shutil.copytree(asset('tiny-base'), folder)
    (folder/'generation_config.json').write_text(json.dumps(COLD))
    return folder


def settings_of(place):
    settings = json.loads((place/'generation_config.json').read_text())
    return {key: settings.get(key) for key in COLD}


def test_settings_that_transformers_does_not_write_are_exported(cold_base, tmp_path):
    recipe = RECIPE.changed({'model.source': str(cold_base)})
    moved = moved_adapters(tmp_path/'adapters', str(cold_base), recipe.method)
    place = export(recipe, moved, tmp_path/'out', facts=NO, prove=False).directory
    end = load_tokenizer('tiny-base').eos_token_id
    assert settings_of(place) == COLD | {'eos_token_id': [5, end]}


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['fsdp2', 'zero2'])
def test_a_full_fine_tune_stops_at_the_end_of_its_answers(cold_base, strategy, tmp_path):
    "It was refused after its last step, and so nothing was saved."
    changes = {'model.source': str(cold_base), 'sharding.strategy': strategy}
    if strategy == 'zero2': pytest.importorskip('deepspeed')
    run = fine_tune(small_recipe(tmp_path, **changes), tmp_path/'run')
    found, end = settings_of(run.saved), load_tokenizer('tiny-base').eos_token_id
    assert found | {'eos_token_id': None} == COLD | {'eos_token_id': None}
    assert {*found['eos_token_id']} == {5, end}


def test_the_bytes_are_those_of_the_merge(published, adapters):
    written = Weights(published.directory)
    ours = merged('tiny-base', adapters, method=RECIPE.method).state_dict()
    assert all(torch.equal(written.read(n), ours[n].flatten()) for n in written.tensors)
    assert written.tensors.keys() == ours.keys() - {'lm_head.weight'}  # tied


def test_a_long_merge_shows_how_many_weights_are_done(adapters, tmp_path, monkeypatch):
    import tqdm.auto
    bars, right = [], tqdm.auto.tqdm
    def note(things=None, *values, **named):
        if named.get('desc') == 'merging': bars.append((named['unit'], len(things)))
        return right(things, *values, **named)
    monkeypatch.setattr(tqdm.auto, 'tqdm', note)
    out = export(RECIPE, adapters, tmp_path / 'out', facts=NO, prove=False)
    written = len(Weights(out.directory).tensors)
    changed = len(Merge('tiny-base', adapters, method=RECIPE.method).changed)
    merged('tiny-base', adapters, method=RECIPE.method)
    assert bars == [('weight', written), ('weight', changed)]
    assert 0 < changed < written


def test_the_tensors_are_aligned(published, adapters, tmp_path):
    from safetensors import safe_open
    small = export(RECIPE, adapters, tmp_path / 'small', 'nf4', NO, False)
    for folder in (published.directory, small.directory):
        entries = Weights(folder).tensors.values()
        assert all(e.begin_b % getattr(torch, e.dtype).itemsize == 0 for e in entries)
        assert safe_open(folder / 'model.safetensors', 'pt').metadata() == {'format': 'pt'}


@pytest.mark.parametrize('double, storage', [(True, 'bfloat16'), (False, 'uint8')])
def test_nf4_is_what_transformers_saves_and_loads(double, storage, adapters, tmp_path):
    from transformers import AutoModelForCausalLM
    method = RECIPE.method.model_copy(update={'double_quant': double, 'storage': storage})
    recipe = RECIPE.changed(
        {'method.double_quant': double, 'method.storage': storage, 'sharding.strategy': 'ddp'})
    out = export(recipe, adapters, tmp_path / 'out', 'nf4', NO, False)
    load_nf4('tiny-base', method, device='cpu').save_pretrained(tmp_path / 'theirs')
    ours, theirs = Weights(out.directory).tensors, Weights(tmp_path / 'theirs').tensors
    def kind(found):
        return {n: (e.dtype, e.shape) for n, e in found.items() if 'quant_state' not in n}
    assert ours.keys() == theirs.keys()
    assert kind(ours) == kind(theirs)
    loaded = AutoModelForCausalLM.from_pretrained(out.directory)
    assert fingerprint(loaded) == fingerprint(merged('tiny-base', adapters, 'nf4', method))


def test_large_exports_are_cut_and_indexed(adapters, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM
    monkeypatch.setattr(exports, '_SHARD_B', 10**6)
    out = export(RECIPE, adapters, tmp_path / 'out', 'nf4', NO, False)
    assert sum(name.endswith('.safetensors') for name in out.files) >= 3
    assert max(size for name, size in out.files.items() if name.endswith('.safetensors')) < 1.2e6
    index = json.loads((out.directory / 'model.safetensors.index.json').read_text())
    assert index['metadata']['total_size'] == Weights(out.directory).total_b
    loaded, info = AutoModelForCausalLM.from_pretrained(out.directory, output_loading_info=True)
    assert not any(info.values())
    assert fingerprint(loaded) == fingerprint(merged('tiny-base', adapters, 'nf4', RECIPE.method))


def test_the_card_says_what_is_known_and_no_path(published, adapters, tmp_path):
    from huggingface_hub import ModelCard
    card = ModelCard.load(published.directory / 'README.md')
    assert (card.data.license, card.data.library_name, card.data.base_model) == (
        'apache-2.0', 'transformers', None)
    for said in (
        'KL 0.001 nats', 'exact match: 0.5', 'SHA-256 `', 'rank: 4'
    ):
        assert said in card.text
    base = shutil.copytree(asset('tiny-base'), tmp_path / 'my-base')
    (base / 'README.md').unlink()
    (base / 'generation_config.json').unlink()
    data = shutil.copy(asset('sample-conversations') / 'train.jsonl', tmp_path / 'mine.jsonl')
    folder = shutil.copytree(adapters, tmp_path / 'adapters')
    said = json.loads((folder/'adapter_config.json').read_text()) | {
        'base_model_name_or_path': str(base)}
    (folder / 'adapter_config.json').write_text(json.dumps(said))
    out = export(
        RECIPE.changed({'model.source': str(base), 'data.source': str(data)}), folder,
        tmp_path/'out', facts=NO, prove=False)
    text = (out.directory / 'README.md').read_text()
    assert 'source: my-base' in text
    assert 'license not known' in text
    assert 'Gate: none was run' in text
    assert 'Proof: none' in text
    assert not [p.name for p in out.directory.iterdir() if str(tmp_path).encode() in p.read_bytes()]


@pytest.mark.slow
def test_a_fresh_process_says_the_same_of_a_relative_directory(adapters, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(adapters, tmp_path / 'run' / 'adapters').parent)
    out = export(RECIPE, 'adapters', 'out', facts=NO)
    assert out.directory == tmp_path / 'run' / 'out'
    assert out.proof['difference'] == 0
    assert out.proof['answer']
    assert 'loaded it and answered' in (out.directory / 'README.md').read_text()
    assert check_checkpoint(tmp_path / 'run' / 'out', deep=True)
    assert sorted(p.name for p in tmp_path.glob('run/*')) == ['adapters', 'out']


# The gate

def test_the_gate_runs_unless_it_is_skipped(adapters, tmp_path):
    out = export(RECIPE, adapters, tmp_path / 'out', prove=False)
    card = (out.directory / 'README.md').read_text()
    _, held_out = load_rows(RECIPE.data, RECIPE.seed)
    found = judge(RECIPE, adapters, held_out[:64])
    assert f'Gate: {found}' in card
    assert found.passed
    assert found.tokens > 100
    assert found.base == fingerprint(load_nf4('tiny-base', RECIPE.method, device='cpu')).digest
    assert f'digest `{found.base}`' in card


def test_a_merge_that_lost_the_training_is_not_exported(adapters, tmp_path, monkeypatch):
    monkeypatch.setattr(Merge, 'changed', [])  # The base of 16 bit, without adapters
    with pytest.raises(ValueError, match='refused; serve the base with its adapters beside it'):
        export(RECIPE, adapters, tmp_path / 'out', prove=False)
    assert not list(tmp_path.iterdir())


def test_without_rows_the_card_says_why_there_was_no_gate(adapters, tmp_path):
    out = export(
        RECIPE.changed({'data.source': 'someone/elsewhere'}), adapters, tmp_path/'out', prove=False)
    card = (out.directory / 'README.md').read_text()
    assert 'Gate: none was run; no held-out rows were at hand' in card
    assert 'digest' not in card


@pytest.mark.parametrize(
    'facts, words',
    [
        ({'gate': {'top1': 1.0}}, 'is no Gate: pass what'),
        ({'gate': True}, 'or False to skip it'),
        (['gate'], 'is no dict'),
        ({'metrics': 'good'}, 'is no dict')])
def test_facts_of_another_type_are_refused(facts, words, adapters, tmp_path):
    with pytest.raises(ValueError, match=words):
        export(RECIPE, adapters, tmp_path / 'out', facts=facts)
    with pytest.raises(ValueError, match=r'is no Recipe: Recipe\.load'):
        export('x.yaml', adapters, tmp_path / 'out')
    assert not list(tmp_path.iterdir())


# Whole or absent

@pytest.mark.parametrize('step', ['_verify', '_describe', '_prove', '_card'])
def test_what_fails_leaves_nothing(step, adapters, tmp_path, monkeypatch):
    def fail(*args): raise ValueError(f'{step} failed')
    monkeypatch.setattr(exports, step, fail)
    with pytest.raises(ValueError, match=step):
        export(RECIPE, adapters, tmp_path / 'out', '16-bit', NO, step == '_prove')
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_and_leaves_nothing(adapters, tmp_path, monkeypatch):
    def full(*args): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(exports._File, 'add', full)
    with pytest.raises(OSError, match=r'needs 6,\d+,\d+ bytes'):
        export(RECIPE, adapters, tmp_path / 'out', facts=NO)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_what_was_meant_is_not_published(adapters, tmp_path, monkeypatch):
    def lossy(self, name, tensor, write=exports._File.add):
        write(self, name, tensor[:-1] if 'norm' in name else tensor)
    monkeypatch.setattr(exports._File, 'add', lossy)
    with pytest.raises(
        ValueError,
        match=r'9 tensors were written wrongly; .*layernorm.*\(255,\).* should be .*\(256,\)'
    ):
        export(RECIPE, adapters, tmp_path / 'out', facts=NO, prove=False)
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_was_not_written_is_missed(adapters, tmp_path, monkeypatch):
    def forgetful(self, name, tensor, write=exports._File.add):
        if 'layers.2.input_layernorm' not in name: write(self, name, tensor)
    monkeypatch.setattr(exports._File, 'add', forgetful)
    with pytest.raises(
        ValueError,
        match='1 tensors were written wrongly; model.layers.2.input_layernorm.weight is absent'
    ):
        export(RECIPE, adapters, tmp_path / 'out', facts=NO, prove=False)
    assert not list(tmp_path.iterdir())


def test_the_proof_compares_what_the_fresh_process_says(adapters, monkeypatch):
    """What stands in for the fresh process says the truth, then something else; the process itself
    is in slow tests."""
    tokenizer = load_tokenizer(RECIPE.model.source)
    ids = tokenizer('Hello', add_special_tokens=False, return_tensors='pt')['input_ids']
    merge = Merge('tiny-base', adapters, 'dequantised', RECIPE.method)
    model = merged('tiny-base', adapters, method=RECIPE.method)
    with torch.inference_mode(): logits = model(input_ids=ids).logits[0].float()
    def proof(*found):
        monkeypatch.setattr(exports, '_fresh', lambda *asked: ({'answer': 'Hi'}, *found))
        return exports._prove(merge, RECIPE, adapters, None, 'Hello')
    assert proof(ids, logits) == {'question': 'Hello', 'answer': 'Hi', 'difference': 0}
    with pytest.raises(ValueError, match='says something else than the merged model'):
        proof(ids, logits.roll(1, -1))
    with pytest.raises(ValueError, match='tokenizer reads the question otherwise'):
        proof(ids.roll(1) + 1, logits)


@pytest.mark.slow
def test_a_wrong_value_is_found_by_the_fresh_process(adapters, tmp_path, monkeypatch):
    def wrong(self, name, tensor, write=exports._File.add):
        write(self, name, tensor * 3 if 'layers.2.mlp.up' in name else tensor)
    monkeypatch.setattr(exports._File, 'add', wrong)
    with pytest.raises(ValueError, match='says something else than the merged model'):
        export(RECIPE, adapters, tmp_path / 'out', facts=NO)
    assert not list(tmp_path.iterdir())


def test_bad_requests_are_refused_before_anything_is_written(published, adapters, tmp_path):
    out = tmp_path / 'out'
    for arguments, words in (
        ((published.directory,), 'is not written over'),
        ((out, '4-bit'), 'no way to merge'),
        ((out, 'nf4', {'licence': 'mit'}), "did you mean 'license'"),
        ((out, 'nf4', {'gate': Gate('nf4', 0.5, 1, 1, 9)}), 'the gate refused this merge'),
        ((out, 'nf4', {'gate': Gate('16-bit', 1, 0, 0, 9)}), "the gate judged '16-bit'")
    ):
        with pytest.raises(ValueError, match=words): export(RECIPE, adapters, *arguments)
    with pytest.raises(OSError): export(RECIPE, adapters, tmp_path / 'absent' / 'out')
    with pytest.raises(ValueError, match="method 'full'"):
        export(RECIPE.changed(method=Method(kind='full').model_dump()), adapters, out)
    assert not list(tmp_path.iterdir())


# The Hub

PUSH = '''
import json, os, sys
from llm_workbook.release.export import push
for case in json.loads(sys.argv[1]):
    os.environ.pop('HF_TOKEN', None)
    if case['token']: os.environ['HF_TOKEN'] = case['token']
    try:
        place = push(case['directory'], 'me/model', case['private'], case['endpoint'])
        print(json.dumps(['done', place]))
    except Exception as error: print(json.dumps([type(error).__name__, str(error)]))
'''


def pushes(home, *cases):
    """What pushes say that run one after the other in a new process which is not offline, as [kind,
    text]."""
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ('HF_HUB_OFFLINE', 'HF_TOKEN', 'HF_ENDPOINT')}
    env |= {
        'HF_HOME': str(home), 'HF_HUB_DISABLE_XET': '1', 'HF_HUB_DISABLE_PROGRESS_BARS': '1',
        'HF_HUB_DISABLE_TELEMETRY': '1'}
    filled = [
        {'private': True, 'token': TOKEN, 'directory': str(c['directory'])}
        | {k: c[k] for k in c if k != 'directory'}
        for c in cases]
    done = subprocess.run(
        [sys.executable, '-c', PUSH, json.dumps(filled)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert TOKEN not in done.stdout + done.stderr
    assert not [p for p in home.rglob('*') if p.is_file() and TOKEN.encode() in p.read_bytes()]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_pushed_is_the_export_and_private(published, tmp_path):
    with Hub(TOKEN) as hub:
        case = {'directory': published.directory, 'endpoint': hub.url}
        assert pushes(tmp_path, case, case) == [['done', f'{hub.url}/me/model']] * 2
        # one, although asked twice
        assert hub.private == {'me/model': True}
        assert hub.commits == [sorted(published.files)]
        assert hub.repos['me/model'] == {
            p.name: p.read_bytes() for p in published.directory.iterdir()}
        assert {path for _, path, with_token in hub.requests if not with_token} == {
            path for _, path, _ in hub.requests if path.startswith('/put/')}


def test_failures_are_told_and_nothing_is_lost(published, tmp_path):
    messages = {
        'denied': 'HTTP 403, the token may not write there', 'conflict': 'HTTP 409',
        'lost before': 'the connection failed', 'lost after': 'the connection failed'}
    with ExitStack() as stack:
        hubs = [stack.enter_context(Hub(TOKEN, fail=[how])) for how in messages]
        found = pushes(
            tmp_path,
            *[
                {'directory': published.directory, 'endpoint': hub.url}
                for hub in hubs
                for _ in range(2)])
        for hub, words, first, second in zip(hubs, messages.values(), found[::2], found[1::2]):
            assert first[0] == 'PushError'
            assert words in first[1]
            assert "'published' is unchanged; push it again" in first[1]
            assert second == ['done', f'{hub.url}/me/model']
            assert len(hub.commits) == 1
            assert hub.repos['me/model'].keys() == published.files.keys()
    assert check_checkpoint(published.directory, deep=True)


def test_what_may_not_be_pushed_is_refused(published, tmp_path):
    other = shutil.copytree(published.directory, tmp_path / 'other')
    with Hub(TOKEN) as hub, Hub(TOKEN) as taken, Hub(TOKEN) as public:
        taken.repos['me/model'], taken.private['me/model'] = {'README.md': b'mine'}, True
        public.repos['me/model'], public.private['me/model'] = {}, False
        (other / 'optimizer.pt').write_bytes(b'moments')
        def case(hub, **changes):
            return {'directory': published.directory, 'endpoint': hub.url} | changes
        home = tmp_path / 'home'
        home.mkdir()
        found = pushes(
            home, case(hub, token='wrong'), case(hub, token=None), case(hub, directory=other),
            case(taken), case(public), case(hub, endpoint='http://example.org'),
            {'directory': published.directory, 'endpoint': 'http://127.0.0.1:9'})
        messages = [
            'HTTP 401, the token is not accepted', 'there is no token', 'optimizer.pt',
            'holds something else (1 files)', 'is there and is public', 'is not https',
            'the connection failed']
        assert [part for part, (_, text) in zip(messages, found) if part not in text] == []
        assert not hub.repos
        assert taken.repos['me/model'] == {'README.md': b'mine'}
        assert not public.repos['me/model']


def test_a_token_inside_an_export_is_not_uploaded(adapters, tmp_path):
    out = export(
        RECIPE, adapters, tmp_path/'out', facts=NO | {'metrics': {'note': TOKEN}}, prove=False)
    with Hub(TOKEN) as hub:
        (kind, text), = pushes(tmp_path / 'home', {'directory': out.directory, 'endpoint': hub.url})
    assert kind == 'ValueError'
    assert 'README.md contains your token' in text
    assert not hub.repos


def test_an_export_that_was_changed_is_not_pushed(published, tmp_path):
    other = shutil.copytree(published.directory, tmp_path / 'other')
    data = bytearray((other / 'model.safetensors').read_bytes())
    data[-1] ^= 1
    (other / 'model.safetensors').write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match='model.safetensors'): push(other, 'me/model')
