"""A run begins with trained adapters, however it is sharded: what learns nothing saves what it
began with, and what learns goes on from there."""
import json
import os
import signal

import pytest

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from trouble import disturb, slow_case, some_rows

from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Data, Method, Precision, Recipe, shrink, shrinkage
from llm_workbook.model.first_adapters import begin_adapters, check_first_adapters
from llm_workbook.model.quantize import load_base
from llm_workbook.rehearsal.step import rehearse
from llm_workbook.training.fine_tune import check_recipe, fine_tune
from llm_workbook.training.resume import Preempted
from llm_workbook.training.run_directory import RunFiles

STILL = {'optimizer.kind': 'sgd', 'optimizer.learning_rate': 1e-30, 'optimizer.steps': 1}
ALONE = {'cluster.processes': 1, 'sharding.strategy': 'none'}
LORA = {'method.kind': 'lora', 'precision.compute': 'float32'}
ZERO = {'sharding.strategy': 'zero3', 'zero.persistence_threshold': 1000,
        'zero.reduce_bucket': 1_000_000, 'zero.prefetch_bucket': 1_000_000}
WAYS = {
    'qlora, arriving': {'sharding.loading': 'sharded'},
    'qlora': {},
    'alone': LORA | ALONE,
    'ddp': LORA | {'sharding.strategy': 'ddp'},
    'zero3': LORA | ZERO,
    'dora, arriving': LORA | {'sharding.loading': 'sharded', 'method.dora': True},
    'dora, qlora': {'method.dora': True}}
FAST = 'qlora, arriving', 'alone'
ways = pytest.mark.parametrize(
    'how', [how if how in FAST else slow_case(how) for how in WAYS])


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    folder = some_rows(tmp_path_factory.mktemp('rows'), 8)
    return Recipe(
        name='first', model={'source': 'tiny-base'},
        data={'source': str(folder), 'format': 'messages'}, method={'rank': 4, 'alpha': 8},
        batch={'micro': 2, 'length': 64}, optimizer={'steps': 4, 'learning_rate': 5e-3})


def tensors(folder): return load_file(folder/'adapter_model.safetensors')


def somebody(folder, recipe, targets='all-linear', dtype=torch.float32):
    "Adapters that plain peft has written, with numbers that nobody has trained."
    method = Method(kind='lora')
    base = load_base('tiny-base', method, Precision(compute='float32'), 'cpu')
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(
        r=recipe.method.rank, lora_alpha=recipe.method.alpha, use_dora=recipe.method.dora,
        target_modules=targets, task_type='CAUSAL_LM'))
    for name, parameter in model.named_parameters():
        if 'lora_' not in name: continue
        parameter.data.normal_(1.0 if 'magnitude' in name else 0.0, 0.05)
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope='module')
def theirs(plain, tmp_path_factory):
    return somebody(tmp_path_factory.mktemp('theirs')/'somebody', plain)


@ways
def test_what_learns_nothing_saves_what_it_began_with(plain, tmp_path, how):
    recipe = plain.changed(WAYS[how] | STILL)
    dtype = torch.bfloat16 if how == 'alone' else torch.float32
    folder = somebody(tmp_path/'somebody', recipe, dtype=dtype)
    run = fine_tune(recipe.changed({'method.adapters': str(folder)}), tmp_path/'run', 300,
                    live=False)
    before, after = tensors(folder), tensors(run.saved)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == torch.float32
        assert tensor.equal(before[name].float()), name


def test_a_second_run_goes_on_where_the_first_ended(plain, tmp_path):
    "With a rate that is constant, two runs of four steps begin and end as one of eight would."
    recipe = plain.changed(LORA | ALONE | {
        'optimizer.kind': 'sgd', 'optimizer.learning_rate': 0.05, 'optimizer.schedule': 'constant',
        'optimizer.warmup': 0.0, 'batch.micro': 8})
    first = fine_tune(recipe, tmp_path/'first', 300, live=False)
    begun = recipe.changed({'method.adapters': str(first.saved)})
    second = fine_tune(begun, tmp_path/'second', 300, live=False)
    whole = fine_tune(recipe.changed({'optimizer.steps': 8}), tmp_path/'whole', 300, live=False)
    losses = [row['loss'] for row in (*first.metrics, *second.metrics)]
    assert losses == pytest.approx([row['loss'] for row in whole.metrics], rel=1e-5)
    for name, tensor in tensors(whole.saved).items():
        assert torch.allclose(tensors(second.saved)[name], tensor, atol=1e-6)


def test_dpo_compares_with_the_model_that_has_the_adapters(plain, theirs, tmp_path):
    pairs = Data(source='sample-preferences', format='preference')
    recipe = plain.changed(LORA | ALONE | {
        'optimizer.steps': 1, 'optimizer.warmup': 0.0, 'data': pairs, 'method.objective': 'dpo',
        'batch.length': 128})
    references = []
    for adapters in None, str(theirs):
        run = fine_tune(
            recipe.changed({'method.adapters': adapters}), tmp_path/str(bool(adapters)), 300,
            live=False)
        assert run.metrics[0]['reward_margin'] == pytest.approx(0, abs=1e-5)
        references.append(load_file(RunFiles(run.directory).reference)['train'])
    seen = ~references[0].isnan()
    assert seen.any() and torch.equal(seen, ~references[1].isnan())
    assert (references[0] - references[1])[seen].abs().min() > 0.1


@pytest.mark.slow
def test_a_classifier_goes_on_with_its_head(plain, tmp_path):
    reviews = shrink(Recipe.named('reviews-qlora')).data
    recipe = plain.changed(LORA | {
        'model.head': 'classification', 'data': reviews, 'batch.length': 128,
        'optimizer.steps': 2})
    first = fine_tune(recipe, tmp_path/'first', 300, live=False)
    begun = recipe.changed(STILL | {'method.adapters': str(first.saved)})
    second = fine_tune(begun, tmp_path/'second', 300, live=False)
    before, after = tensors(first.saved), tensors(second.saved)
    assert any('score' in name for name in before) and before.keys() == after.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_from_its_checkpoint(plain, theirs, tmp_path, monkeypatch):
    "A start after the first step that took the adapters again would lose what it had learned."
    recipe = plain.changed(LORA | ALONE | {'method.adapters': str(theirs)})
    whole = fine_tune(recipe, tmp_path/'whole', 300, live=False)
    with monkeypatch.context() as stopping:
        disturb(stopping, lambda: os.kill(os.getpid(), signal.SIGTERM), rank=0)
        with pytest.raises(Preempted): fine_tune(recipe, tmp_path/'cut', 300, live=False)
    run = fine_tune(recipe, tmp_path/'cut', 300, resume=True, live=False)
    assert [row['step'] for row in run.metrics] == [1, 2, 3, 4]
    assert all(tensors(run.saved)[name].equal(tensor)
               for name, tensor in tensors(whole.saved).items())


# Refused, before anything is loaded

def test_targets_that_are_not_theirs_are_refused(plain, tmp_path):
    folder = somebody(tmp_path/'queries', plain, ['q_proj'])
    with pytest.raises(RecipeError, match=r'are on \[q_proj\], and this means \[down_proj'):
        check_recipe(plain.changed({'method.adapters': str(folder)}))


def test_a_base_of_another_name_is_told(plain, tmp_path):
    folder = somebody(tmp_path/'somebody', plain)
    file = folder/'adapter_config.json'
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {'base_model_name_or_path': 'org/other'}))
    with pytest.warns(UserWarning, match="were trained on 'org/other', and model.source is 'tiny"):
        check_first_adapters(plain.changed({'method.adapters': str(folder)}))


@pytest.mark.parametrize('key, value', [
    ('lora_bias', True), ('trainable_token_indices', [3]), ('bias', 'lora_only'),
    ('init_lora_weights', 'pissa'), ('alpha_pattern', {'q_proj': 1})])
def test_more_than_plain_lora_is_refused(plain, tmp_path, key, value):
    folder = somebody(tmp_path/'somebody', plain)
    file = folder/'adapter_config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(RecipeError, match=f'is more than plain LoRA .*{key}'):
        check_first_adapters(plain.changed({'method.adapters': str(folder)}))


def test_a_file_that_is_cut_off_is_refused(plain, tmp_path):
    folder = somebody(tmp_path/'somebody', plain)
    file = folder/'adapter_model.safetensors'
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match='is broken'):
        check_first_adapters(plain.changed({'method.adapters': str(folder)}))


def test_a_number_that_is_not_finite_ends_the_run_before_its_first_step(plain, tmp_path):
    folder = somebody(tmp_path/'somebody', plain)
    broken = tensors(folder)
    name = next(iter(broken))
    broken[name][0] = torch.inf
    save_file(broken, folder/'adapter_model.safetensors')
    method = plain.method.model_copy(update={'adapters': str(folder), 'kind': 'lora'})
    base = load_base('tiny-base', Method(kind='lora'), Precision(), 'cpu')
    with pytest.raises(ValueError, match=f'1 tensors are not finite, first {name}'):
        begin_adapters(base, method)


# What stands for it elsewhere

def test_a_shrunk_recipe_begins_anew_and_says_so(plain, theirs):
    recipe = plain.changed({'method.adapters': str(theirs)})
    assert shrink(recipe).method.adapters is None
    assert 'method.adapters' in [field for field, *_ in shrinkage(recipe)]
    assert shrink(recipe, model='own').method.adapters == str(theirs)


def test_a_rehearsal_is_that_of_new_adapters(plain, theirs):
    peaks = [rehearse(plain.changed({'method.adapters': adapters})).peak_b
             for adapters in (None, str(theirs))]
    assert peaks[0] == peaks[1] > 0
