"A trial passes for what is right, and names what is wrong: six mistakes, planted one by one."
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from llm_workbook.config.recipe import Recipe
from llm_workbook.files import asset
from llm_workbook.release import try_out as page
from llm_workbook.release.try_out import try_out

REAL = Path(os.environ.get('LLMW_DATA', Path(__file__).resolve().parents[3]/'shared/data'))
TOKENIZER = 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'


def recipe_for(source, **changes):
    rows = {'data.source': 'sample-conversations', 'batch.length': 512}
    named = Recipe.named('70b-2x24gb-qlora')
    return named.changed({'model.source': str(source)} | rows | changes)


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    "A directory with the configuration of a family at its own size, and the packaged tokenizer."
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    def made(kind, **changes):
        folder = tmp_path_factory.mktemp(kind)
        tiny = json.loads((asset('tiny-base')/'config.json').read_text())
        tokens = {key: tiny[key] for key in tiny if key == 'vocab_size' or key.endswith('token_id')}
        config = AutoConfig.for_model(kind, **tokens | changes)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        config.save_pretrained(folder)
        for name in TOKENIZER: shutil.copy(asset('tiny-base')/name, folder/name)
        return folder
    return made


def failed(trial):
    "The stations that failed, with what they say."
    return {station.name: station.what for station in trial.problems}


# The whole way

@pytest.mark.slow
def test_a_qwen_3_with_its_published_tokenizer_and_real_rows_passes(tmp_path):
    "What hangs on a tokenizer or on rows; the families below come to all stations."
    if not (REAL/'tokenizers').is_dir(): pytest.skip('the public data are not at hand')
    from transformers import AutoConfig
    shutil.copytree(REAL/'tokenizers/qwen3', tmp_path/'qwen3')
    AutoConfig.for_model('qwen3', vocab_size=151_936, architectures=['Qwen3ForCausalLM']
                         ).save_pretrained(tmp_path/'qwen3')
    asked = recipe_for(tmp_path/'qwen3', **{
        'data': {'source': str(REAL/'instructions.json')}, 'batch.length': 1024})
    trial = try_out(asked, stations=['mask', 'cache', 'reload', 'export'])
    assert not failed(trial), trial
    assert [station.passed for station in trial.stations] == [True] * 7


@pytest.mark.slow
@pytest.mark.parametrize('kind, changes, left_out', [
    ('llama', {'method.kind': 'full'}, {'adapters', 'merge', 'export'}),
    ('gemma2', {'model.attention': 'eager'}, set())])
def test_a_family_passes(kind, changes, left_out, source):
    trial = try_out(recipe_for(source(kind), **changes))
    assert not failed(trial), trial
    assert {one.name for one in trial.stations if one.passed is None} == left_out


@pytest.mark.slow
def test_a_head_of_classes_under_zero_3_passes():
    named = Recipe.named('70b-2x4-h100-zero3-qlora-classifier')
    trial = try_out(named.changed({
        'model.source': 'tiny-base', 'batch.length': 256, 'data.source': 'sample-reviews',
        'data.text_column': 'text', 'data.label_column': 'stars',
        'data.labels': {1: 'bad', 2: 'bad', 3: None, 4: 'good', 5: 'good'}}))
    assert not failed(trial), trial
    assert {one.name for one in trial.stations if one.passed is None} == {
        'mask', 'reload', 'merge', 'export'}


# Six mistakes

def test_a_mask_that_trains_the_user_is_found(monkeypatch):
    import llm_workbook.training.tokens as tokens_page
    right = tokens_page._tokenise

    def all_train(*args):
        return [tokens._replace(mask=[1] * len(tokens.ids)) for tokens in right(*args)]

    monkeypatch.setattr(tokens_page, '_tokenise', all_train)
    trial = try_out(recipe_for('tiny-base'), stations=['mask'])
    assert 'what trains depends on what the user says' in failed(trial)['mask']


@pytest.mark.slow
def test_an_adapter_that_peft_alone_does_not_find_is_found(monkeypatch):
    from safetensors.torch import load_file, save_file
    import llm_workbook.release.try_out as page
    right = page._plain_losses

    def plain_losses(way, *args):
        file = f'{way.run.saved}/adapter_model.safetensors'
        tensors = load_file(file)
        name = next(name for name in tensors if 'o_proj' in name)
        save_file({key.replace('o_proj', 'oo_proj') if key == name else key: tensor
                   for key, tensor in tensors.items()}, file, {'format': 'pt'})
        return right(way, *args)

    monkeypatch.setattr(page, '_plain_losses', plain_losses)
    trial = try_out(recipe_for('tiny-base'), stations=['reload'])
    assert 'missing adapter keys' in failed(trial)['reload']


def test_a_cache_flag_that_changes_the_forward_pass_is_found(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaModel
    right = LlamaModel.forward

    def forward(self, input_ids=None, use_cache=None, **options):
        if use_cache is False: input_ids = input_ids.flip(-1)
        return right(self, input_ids, use_cache=use_cache, **options)

    monkeypatch.setattr(LlamaModel, 'forward', forward)
    trial = try_out(recipe_for('tiny-base'), stations=['cache'])
    assert 'use_cache=False changes the logits' in failed(trial)['cache']


@pytest.mark.slow
def test_an_adapter_that_is_bypassed_is_found(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self, x):
        down = getattr(self.down_proj, 'base_layer', self.down_proj)  # As a fused kernel takes it
        return down(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    monkeypatch.setattr(LlamaMLP, 'forward', forward)
    trial = try_out(recipe_for('tiny-base'), stations=['adapters'])
    assert 'down_proj' in failed(trial)['steps']
    assert trial.stations[-1].what == 'not reached: it needs steps'


@pytest.mark.slow
def test_experts_that_are_left_whole_are_found(monkeypatch, source):
    import torch.distributed.fsdp as fsdp
    right = fsdp.fully_shard

    def all_but_experts(module, **options):
        modules = module if isinstance(module, list) else [module]
        named = [pair for part in modules for pair in part.named_parameters()]
        experts = {parameter for name, parameter in named if 'experts' in name}
        return right(module, **options | {'ignored_params': experts})

    monkeypatch.setattr(fsdp, 'fully_shard', all_but_experts)
    asked = recipe_for(source('qwen3_moe'), **{'method.kind': 'lora'})
    trial = try_out(asked, stations=['shares'])
    assert 'experts' in failed(trial)['steps'], trial


def test_a_weight_that_is_whole_on_both_ranks_is_named():
    name, shape = 'model.layers.0.mlp.experts.down_proj', (4, 64, 64)
    shards = SimpleNamespace(
        rows=[('norm', 'float32', (64,), (32,), 256, 128),
              (name, 'bfloat16', shape, shape, 32768, 32768)], here_b=32896, total_b=33024)
    ranks = [{'shards': shards}, {'shards': shards}]
    sharding = SimpleNamespace(strategy='fsdp2')
    recipe = SimpleNamespace(sharding=sharding)
    way = SimpleNamespace(run=SimpleNamespace(ranks=ranks), recipe=recipe)
    with pytest.raises(ValueError, match=f'1 of 2 weights are whole on every rank, first {name}'):
        page._check_shares(way)


@pytest.mark.slow
def test_a_tied_head_that_is_stored_twice_is_found(monkeypatch, source):
    from llm_workbook.release.merge import Merge
    right = Merge.parts

    def parts(self, name):
        made = right(self, name)
        if name == 'model.embed_tokens.weight': made['lm_head.weight'] = made[name].clone()
        return made

    monkeypatch.setattr(Merge, 'parts', parts)
    asked = recipe_for(source('qwen3', tie_word_embeddings=True))
    trial = try_out(asked, stations=['export'])
    assert 'lm_head.weight' in failed(trial)['export'], trial


@pytest.mark.slow
def test_a_resume_that_passes_over_a_batch_is_found(monkeypatch):
    import accelerate
    import transformers.trainer as trainer_page
    right = accelerate.skip_first_batches

    def one_too_many(loader, num_batches=0): return right(loader, num_batches + 1)

    monkeypatch.setattr(trainer_page, 'skip_first_batches', one_too_many)
    trial = try_out(recipe_for('tiny-base'), stations=['resume'])
    assert 'and after the resume' in failed(trial)['resume'], trial


# What it refuses

def test_too_few_rows_are_refused_with_what_is_needed(tmp_path):
    row = {'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}]}
    (tmp_path/'rows.jsonl').write_text('\n'.join([json.dumps(row)] * 40))
    asked = recipe_for('tiny-base', **{
        'data.source': str(tmp_path/'rows.jsonl'), 'data.test_share': 0.0,
        'intervals.evaluation': 0})
    trial = try_out(asked, stations=['mask'])
    assert failed(trial) == {'rows': '1 of the first 40 rows differ, and 16 are needed: '
                                     'bring more rows'}


def test_a_row_that_cannot_train_is_named_by_its_file_and_line(tmp_path):
    rows = []
    for number in range(40):
        text = 'Say <|endoftext|>' if number == 2 else f'Say {number}'
        rows.append({'prompt': text, 'completion': 'No'})
    (tmp_path/'mine.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    asked = recipe_for('tiny-base', **{
        'data.source': str(tmp_path/'mine.jsonl'), 'data.format': 'auto', 'data.test_share': 0.0})
    trial = try_out(asked, stations=['mask'])
    assert 'mine.jsonl: line 3: has <|endoftext|> in its text' in failed(trial)['rows']
