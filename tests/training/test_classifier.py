"""The head: what the recipe says of classes and rows, where it reads, and scores that count every
row once."""
import json

import pytest
from trouble import small_base

from llm_workbook.training.classifier import (
    class_rows, class_tokenizer, count_classes, judge_rows, load_classifier, make_loader,
    reload_classifier, set_pad, token_rows)
from llm_workbook.training.conversation import DatasetError
from llm_workbook.training.data import load_rows
from llm_workbook.training.fine_tune import check_recipe
from llm_workbook.config.document import RecipeError
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.config.recipe import Recipe

STARS = {1: 'bad', 2: 'bad', 3: None, 4: 'good', 5: 'good'}


@pytest.fixture(scope='module')
def recipe(tmp_path_factory):
    "Eleven reviews in two files, judged by a base of two layers; 23 words each at most."
    folder = tmp_path_factory.mktemp('judge')
    for name, stars in (('a', [1, 5, 3, 4, 2, 5]), ('b', [4, 1, 3, 5, 2])):
        lines = [f'{"It works well. " * (i + 1)} {name},{star}' for i, star in enumerate(stars)]
        (folder/f'{name}.csv').write_text('\n'.join(['text,stars', *lines]) + '\n')
    return Recipe(
        name='judge', model={'source': str(small_base(folder/'base')), 'head': 'classification'},
        cluster={'processes': 1},
        data={
            'source': str(folder/'*.csv'), 'format': 'classification', 'text_column': 'text',
            'label_column': 'stars', 'labels': STARS, 'test_share': 0.0},
        batch={'length': 64}, sharding={'strategy': 'none'})


def test_rows_come_from_all_files_with_classes_in_the_order_of_the_labels(recipe):
    rows, held = class_rows(recipe)
    assert [row['label'] for row in rows] == [0, 1, 1, 0, 1, 1, 0, 1, 0]
    assert held == []
    assert rows[0]['text'] == 'It works well.  a'


def test_a_text_with_a_special_token_is_refused(recipe, tmp_path):
    (tmp_path/'a.csv').write_text('text,stars\nFine.,5\nBad <|pad|>,1\n')
    with pytest.raises(DatasetError, match=r'a.csv: line 3: has <\|pad\|> in its text'):
        class_rows(recipe.changed({'data.source': str(tmp_path/'*.csv')}))


def test_the_text_is_judged_and_no_column_beside_it(recipe, tmp_path):
    rows = [{'text': f'Fine {star}.', 'stars': star, 'system': f'S{star}', 'history': [['A', 'B']]}
            for star in (1, 5)]
    (tmp_path/'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    asked = recipe.changed({'data.source': str(tmp_path/'a.jsonl')})
    with pytest.warns(UserWarning, match='these columns are not read: system, history'):
        made, _ = class_rows(asked)
    assert [row['text'] for row in made] == ['Fine 1.', 'Fine 5.']
    with pytest.warns(UserWarning, match='not read: system, history'):
        talked, _ = load_rows(asked.data)
    assert [turn['role'] for turn in talked[0]['messages']] == ['user', 'assistant']


def test_a_head_that_is_on_no_disk_is_not_read_in_parts(recipe):
    with pytest.raises(RecipeError, match='a new head is on no disk.*every_rank'):
        recipe.changed({'sharding.loading': 'sharded', 'sharding.strategy': 'fsdp2'})


def test_a_base_that_lacks_more_than_a_head_is_refused(recipe, tmp_path):
    from safetensors.torch import load_file, save_file
    from shutil import copytree
    copytree(recipe.model.source, tmp_path/'base')
    tensors = load_file(tmp_path/'base'/'model.safetensors')
    del tensors['model.norm.weight']
    save_file(tensors, tmp_path/'base'/'model.safetensors', {'format': 'pt'})
    with pytest.raises(ValueError, match='has no model.norm.weight: only a head may be new'):
        load_classifier(recipe.changed({'model.source': str(tmp_path/'base')}))


@pytest.mark.parametrize(
    'kind, dtype', [('qlora', 'bfloat16'), ('lora', 'bfloat16'), ('full', 'float32')])
def test_the_head_is_never_packed(recipe, kind, dtype):
    import torch
    model = load_classifier(recipe.changed({'method.kind': kind}))
    assert type(model.score) is torch.nn.Linear
    assert model.score.weight.dtype == getattr(torch, dtype)
    assert model.config.pad_token_id == class_tokenizer(recipe).pad_token_id
    assert model.config.architectures == ['LlamaForSequenceClassification']


def test_a_head_over_classes_needs_no_kernels_for_words(recipe, monkeypatch):
    "Without Liger's kernels a language model is refused, and a classifier is not."
    from llm_workbook.model import fused_head
    monkeypatch.setattr(fused_head, 'find_spec', lambda package: None)
    on_gpu = recipe.changed({'cluster.device': 'cuda', 'batch.loss_head': 'fused'})
    rows, _ = check_recipe(on_gpu)
    assert rows
    words = {'model.head': 'causal_lm', 'data': {
        'source': 'sample-conversations', 'format': 'messages'}}
    with pytest.raises(ImportError, match=r"'fused' needs Liger's kernels"):
        check_recipe(on_gpu.changed(words))


@pytest.mark.parametrize('pad', ['own', 'end'])
def test_padding_does_not_change_a_row(recipe, pad):
    import torch
    tokenizer = class_tokenizer(recipe)
    if pad == 'end': tokenizer.pad_token = None
    model = load_classifier(
        recipe.changed({'method.kind': 'full', 'precision.compute': 'float32'})).eval()
    model.config.pad_token_id = set_pad(tokenizer)
    rows = token_rows(recipe, class_rows(recipe)[0], tokenizer)
    def logits(micro):
        with torch.no_grad():
            return torch.cat(
                [
                    model(input_ids=b['input_ids'], attention_mask=b['attention_mask']).logits
                    for b in make_loader(rows, tokenizer.pad_token_id, micro)])

    assert torch.allclose(logits(1), logits(9), atol=1e-5)


@pytest.mark.parametrize('ranks', [2, 3])
def test_every_row_is_counted_once_on_any_number_of_ranks(recipe, ranks):
    plain = recipe.changed({'method.kind': 'full', 'precision.compute': 'float32'})
    rows = token_rows(plain, class_rows(plain)[0], class_tokenizer(plain))[:7]
    def judge(sizes):
        from accelerate import Accelerator
        accelerator, pad = Accelerator(cpu=True), class_tokenizer(plain).pad_token_id
        model = load_classifier(plain)
        loaders = [
            accelerator.prepare_data_loader(make_loader(rows, pad, size)) for size in sizes]
        return [judge_rows(accelerator, model, loader, ('bad', 'good')) for loader in loaders]
    [one] = run_ranks(judge, 1, ([7],), 120)[0]
    for found in run_ranks(judge, ranks, ([1, 2, 4],), 120):
        assert [scores.counts for scores in found] == [one.counts] * 3
        assert [scores.rows for scores in found] == [7] * 3
        assert all(abs(scores.loss - one.loss) < 1e-5 for scores in found)


def test_head_and_adapters_come_back_each_in_its_own_type(recipe, tmp_path):
    import torch
    from llm_workbook.model.adapters import add_adapters, save_adapters
    tuned = add_adapters(load_classifier(recipe), recipe.method, recipe.seed)
    for name, p in tuned.named_parameters():
        if p.requires_grad:
            p.data = torch.randn_like(p).to(torch.float32 if 'score' in name else torch.bfloat16)
    save_adapters(tuned, tmp_path/'adapters')
    again = reload_classifier(recipe, tmp_path)
    tuned_parameters = dict(tuned.named_parameters())
    kept = {name: p for name, p in again.named_parameters() if tuned_parameters[name].requires_grad}
    assert {p.dtype for p in kept.values()} == {torch.float32, torch.bfloat16}
    assert all(
        p.dtype == tuned_parameters[name].dtype and p.equal(tuned_parameters[name])
        for name, p in kept.items())


def test_f1_is_that_of_the_textbook():
    scores = count_classes([0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 0, 2], [1.0] * 6, ('a', 'b', 'c', 'd'))
    assert scores.counts == ((1, 1, 0, 0), (1, 2, 0, 0), (0, 0, 1, 0), (0, 0, 0, 0))
    assert scores.accuracy == 4 / 6
    assert scores.f1 == {'a': 0.5, 'b': 2 / 3, 'c': 1.0, 'd': None}
    assert abs(scores.macro_f1 - (0.5 + 2 / 3 + 1) / 3) < 1e-12
