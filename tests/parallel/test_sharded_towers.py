"""A model with a tower on two ranks: every way to share it trains what one process trains, and what
is saved has the tower of the base."""
import json

import pytest
import torch

from llm_workbook.checkpoint.manifest import check_checkpoint
from llm_workbook.checkpoint.save_load import load_checkpoint, save_checkpoint
from llm_workbook.config.recipe import Method, Model, Precision, Recipe
from llm_workbook.files import asset
from llm_workbook.model.miniature import miniature
from llm_workbook.model.quantize import load_base
from llm_workbook.model.weight_files import Weights
from llm_workbook.parallel.load import load_sharded
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.training.fine_tune import fine_tune
from llm_workbook.training.run_directory import read_metrics

pytestmark = pytest.mark.slow
ROWS = torch.arange(1, 41).view(2, 20)
FULL, FLOAT32 = Method(kind='full'), Precision(compute='float32')


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    "A miniature of Qwen 3 VL with the tokenizer of the tiny base."
    from transformers import AutoConfig
    place = tmp_path_factory.mktemp('bases')/'qwen3_vl'
    fields = AutoConfig.for_model('qwen3_vl').to_dict()
    tiny = json.loads((asset('tiny-base')/'config.json').read_text())
    fields['text_config'] |= {
        key: tiny[key] for key in tiny if key == 'vocab_size' or key.endswith('token_id')}
    miniature(fields, place)
    for name in 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja':
        (place/name).write_bytes((asset('tiny-base')/name).read_bytes())
    return str(place)


@pytest.fixture(scope='module')
def recipe(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp('rows')
    lines = (asset('sample-conversations')/'train.jsonl').read_text().splitlines(keepends=True)
    (folder/'train.jsonl').write_text(''.join(lines[:12]))
    return Recipe(
        name='tower', model={'source': base}, method={'kind': 'full', 'storage': 'float32'},
        data={'source': str(folder), 'format': 'messages', 'test_share': 0.0},
        precision={'compute': 'float32'}, batch={'micro': 1, 'length': 48},
        optimizer={'steps': 4, 'learning_rate': 1e-2})


def losses(directory): return [line['loss'] for line in read_metrics(directory/'metrics.jsonl')]


@pytest.fixture(scope='module')
def alone(recipe, tmp_path_factory):
    "The losses of one process."
    directory = tmp_path_factory.mktemp('alone')/'run'
    fine_tune(recipe.changed({
        'cluster.processes': 1, 'sharding.strategy': 'none', 'batch.accumulation': 2}), directory)
    return losses(directory)


def towers_in(directory):
    with Weights(directory) as weights:
        return {name: weights.read(name) for name in weights.tensors if 'visual' in name}


WAYS = [{'sharding.strategy': strategy} for strategy in ('fsdp2', 'ddp', 'zero3')]
WAYS.append({'sharding.loading': 'sharded', 'sharding.activation_checkpointing': 'full'})


@pytest.mark.parametrize('way', WAYS, ids=lambda way: ' '.join(way.values()))
def test_every_way_trains_what_one_process_trains_and_keeps_the_tower(
        way, recipe, alone, base, tmp_path):
    run = fine_tune(recipe.changed({'cluster.processes': 2} | way), tmp_path/'run')
    assert losses(tmp_path/'run') == pytest.approx(alone, abs=1e-4)
    before, after = towers_in(base), towers_in(run.saved)
    assert before.keys() == after.keys() and before
    assert all(before[name].float().equal(after[name].float()) for name in before)


def saved_and_loaded(base, folder):
    "Save on this rank of two, spoil every parameter, load: the names that are not as they were."
    model = load_sharded(Model(source=base), FULL, FLOAT32, device='cpu')
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(input_ids=ROWS, labels=ROWS).loss.backward()
    optimizer.step()
    before = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    save_checkpoint(folder, model, optimizer)
    for p in model.parameters(): p.data.to_local().fill_(7)
    load_checkpoint(folder, model, optimizer)
    return [name for name, p in model.named_parameters() if not p.to_local().equal(before[name])]


def test_a_checkpoint_of_a_full_fine_tune_brings_the_tower_back(base, tmp_path):
    assert run_ranks(saved_and_loaded, 2, (base, tmp_path/'checkpoint-1'), 120) == [[], []]
    manifest = check_checkpoint(tmp_path/'checkpoint-1')
    assert manifest.method == 'full' and manifest.payload is None


def loss_of_ranks(base):
    model = load_sharded(Model(source=base), FULL, FLOAT32, device='cpu')
    loss = model(input_ids=ROWS, labels=ROWS).loss
    loss.backward()
    dry = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    return loss.item(), dry


def test_ranks_that_load_their_shares_compute_what_one_process_computes(base):
    model = load_base(base, FULL, FLOAT32, 'cpu')
    loss = model(input_ids=ROWS, labels=ROWS).loss.item()
    assert run_ranks(loss_of_ranks, 2, (base,), 120) == [(loss, []), (loss, [])]
