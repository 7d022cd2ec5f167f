"A text that is longer than a row trains in pieces, every token of it once."
import json
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_workbook.config.recipe import Data, Recipe, shrink
from llm_workbook.files import asset
from llm_workbook.model.architecture import load_tokenizer
from llm_workbook.release.invariants import check_invariants
from llm_workbook.training.data import DatasetError, load_rows
from llm_workbook.training.fine_tune import check_recipe, fine_tune
from llm_workbook.training.long_texts import text_pieces
from llm_workbook.training.mix import mixture
from llm_workbook.training.run_directory import RunFiles, read_metrics
from llm_workbook.training.tokens import check_rows

PUBLISHED = Path(__file__).parents[3]/'shared/data/tokenizers'  # Qwen's, where they are at hand
TEXTS = [{'text': text} for text in list(topics.values())[:12]]


@pytest.fixture
def tokenizer(): return load_tokenizer('tiny-base')


@pytest.fixture
def recipe(tmp_path):
    base = shrink(Recipe.named('70b-2x24gb-qlora'))
    def of(rows, **changes):
        (tmp_path/'texts.jsonl').write_text('\n'.join(map(json.dumps, rows)))
        data = {'source': str(tmp_path/'texts.jsonl'), 'test_share': 0.25}
        return base.changed({'data': data, 'batch.micro': 2, 'batch.length': 64, **changes})
    return of


def trained(pieces):
    return [token for ids, mask, *_ in pieces for token, trains in zip(ids, mask) if trains]


def marked(tokenizer, marks):
    "Let a tokenizer begin every text with marks, as those of Llama and Gemma do."
    numbers = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in marks]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*marks, '$A'], pair=[*marks, '$A', '$B'], special_tokens=numbers)
    return tokenizer


@pytest.mark.parametrize('opening', [0, 1, 2])
@pytest.mark.parametrize('size', [3, 4, 9, 10, 11, 64])
def test_pieces_say_the_text_and_each_begins_as_it_does(size, opening):
    ids = list(range(size))
    for length in range(opening + 2, size + 2):
        pieces = text_pieces(ids, length, opening)
        assert trained(pieces) == ids[max(opening, 1):]
        assert all(len(piece) == length for piece, _ in pieces[:-1])
        for (before, _), (piece, mask) in zip(pieces, pieces[1:]):
            assert piece[:opening] == ids[:opening]
            assert piece[opening] == before[-1]
            assert mask == [0] * (opening + 1) + [1] * (len(piece) - opening - 1)
            assert any(mask)


def test_nothing_trains_on_what_it_does_not_see(tokenizer):
    "The losses of all pieces are those of each token behind those of its piece."
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'), dtype=torch.float32).eval()
    [pieces] = check_rows([{'text': TEXTS[0]['text'][:400]}], tokenizer, 64).tokenised
    ids = [pieces[0].ids[0], *trained(pieces)]
    found = []
    for piece in pieces:
        labels = [token if trains else -100 for token, trains in zip(piece.ids, piece.mask)]
        with torch.no_grad():
            loss = model(torch.tensor([piece.ids]), labels=torch.tensor([labels])).loss
        found.append(loss.item() * sum(piece.mask))
    asked = []
    for place in range(1, len(ids)):
        first = (place - 1) // 63 * 63  # A piece adds 63 tokens to the one that it repeats
        with torch.no_grad(): logits = model(torch.tensor([ids[first:place]])).logits[0, -1]
        asked.append(-logits.log_softmax(-1)[ids[place]].item())
    assert len(pieces) > 2
    assert sum(found) == pytest.approx(sum(asked), rel=1e-5)


@pytest.mark.parametrize('marks', [['<|user|>'], ['<|user|>', '<|assistant|>']])
def test_what_a_tokenizer_writes_before_a_text_stands_before_each_piece(tokenizer, marks):
    numbers = tokenizer.convert_tokens_to_ids(marks)
    plain = check_rows(TEXTS, tokenizer, 10**6)
    report = check_rows(TEXTS, marked(tokenizer, marks), 100)
    assert report.split == sum(len(found[0].ids) > 100 - len(marks) for found in plain.tokenised)
    for found, [whole] in zip(report.tokenised, plain.tokenised):
        assert all(piece.ids[:len(marks)] == numbers for piece in found)
        assert trained(found) == whole.ids


@pytest.mark.skipif(not PUBLISHED.exists(), reason='the published tokenizers are not here')
@pytest.mark.parametrize('name', ['qwen3', 'qwen2.5'])
def test_a_published_tokenizer_says_the_texts_again(name):
    published = AutoTokenizer.from_pretrained(PUBLISHED/name)
    report = check_rows(TEXTS, published, 128)
    assert report.split > 6 and report.lost == 0
    for row, found in zip(TEXTS, report.tokenised):
        assert published.decode([found[0].ids[0], *trained(found)[:-1]]) == row['text']


def test_nothing_is_lost_and_nothing_is_said(recipe, tmp_path):
    asked = recipe(TEXTS, **{'intervals.evaluation': 1})
    texts, held_texts = load_rows(asked.data, asked.seed)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        rows, held = check_recipe(asked)
    tokenizer = load_tokenizer('tiny-base')
    for read, pieces in (texts, rows), (held_texts, held):
        ends = [label for row in pieces for label in row['labels']].count(tokenizer.eos_token_id)
        labels = [label for row in pieces for label in row['labels'] if label != -100]
        whole = [tokenizer(row['text'])['input_ids'] for row in read]
        assert ends == len(whole)
        assert labels == [token for ids in whole for token in [*ids[1:], tokenizer.eos_token_id]]
        assert max(len(row['input_ids']) for row in pieces) == 64


def test_a_text_that_is_to_be_judged_is_cut(tokenizer):
    rows = [row | {'label': 1} for row in TEXTS]
    report = check_rows(rows, tokenizer, 64)
    assert (report.cut, report.split, report.sequences) == (12, 0, 12)
    assert f'{report.lost:,} of {report.tokens:,} tokens are cut off' in report.losses()


def test_no_room_for_a_new_token_is_an_error(tokenizer):
    with pytest.raises(ValueError, match='batch.length 2 has no room.*set it to 3 or more'):
        check_rows(TEXTS, marked(tokenizer, ['<|user|>']), 2)


def test_a_mix_counts_the_pieces_that_a_run_draws_from(recipe, tmp_path):
    asked = recipe(TEXTS)
    other = tmp_path/'other.jsonl'
    other.write_text('\n'.join(json.dumps({'text': 'Short.'}) for _ in range(50)))
    parts = [{'source': asked.data.source, 'weight': 1}, {'source': str(other), 'weight': 1}]
    data = {'mix': parts, 'test_share': 0.0}
    mixed = asked.changed({'data': data, 'optimizer.steps': 4, 'intervals.evaluation': 0})
    counted = mixture(mixed).parts[0].rows
    assert counted == check_rows(TEXTS, load_tokenizer('tiny-base'), 64).sequences
    assert counted > len(TEXTS)


@pytest.mark.slow
def test_no_relation_is_broken_by_texts(recipe):
    "The first token of a text is no label: a filling before it would predict it."
    found = check_invariants(recipe(TEXTS))
    assert found.passed, str(found)
    assert {'padding', 'accumulation', 'ranks', 'resume'} <= {
        entry.name for entry in found.relations if entry.passed}


@pytest.mark.slow
def test_texts_train_in_packed_pieces_over_two_ranks(recipe, tmp_path):
    asked = recipe(TEXTS, **{'batch.packing': True, 'batch.length': 128, 'optimizer.steps': 12,
                             'optimizer.learning_rate': 5e-3, 'intervals.evaluation': 6})
    run = fine_tune(asked, tmp_path/'run')
    first, *_, last = read_metrics(RunFiles(run.directory).evaluations)
    assert last['step'] == 12 and last['loss'] < first['loss']


def test_a_text_that_nothing_can_end_is_named(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(DatasetError, match='2 problems(.|\n)*row 1: is a text, and this tokenizer'):
        check_rows(TEXTS[:2], tokenizer, 64)
