"""Packed rows: every example once, in few bins, and none that sees another.

The bins are compared with the rule taken row by row; the losses and gradients with those of the
same rows alone. Leaks that are planted must be seen.
"""
import json
import random
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm_workbook.files import asset
from llm_workbook.model.architecture import load_tokenizer
from llm_workbook.training.packed_rows import (
    PackedCollator, fewest_bins, fill_bins, pack_rows)
from llm_workbook.training.tokens import check_rows

REAL = Path(__file__).parents[3]/'shared/data/instructions.json'


def one_by_one(lengths, capacity):
    "Best fit, row by row: the rooms that are left, in ascending order."
    rooms = []
    for length in sorted(lengths, reverse=True):
        enough = [room for room in rooms if room >= length]
        room = min(enough, default=capacity)
        if enough: rooms.remove(room)
        rooms.append(room - length)
    return sorted(rooms)


@pytest.mark.parametrize('seed', range(20))
def test_bins_are_those_of_best_fit_row_by_row(seed):
    draw = random.Random(seed)
    capacity = draw.choice([1, 7, 32, 100])
    lengths = [draw.randint(1, capacity) for _ in range(draw.randint(0, 300))]
    bins = fill_bins(lengths, capacity)
    assert sorted(number for rows in bins for number in rows) == list(range(len(lengths)))
    rooms = sorted(capacity - sum(lengths[number] for number in rows) for rows in bins)
    assert rooms == one_by_one(lengths, capacity)
    assert len(bins) >= fewest_bins(lengths, capacity)


def chat_lengths(count, seed=1):
    draw = random.Random(seed)
    return [min(2048, max(8, round(draw.lognormvariate(5.6, .9)))) for _ in range(count)]


def test_200_000_rows_take_hardly_more_bins_than_any_packing_needs():
    lengths = chat_lengths(200_000)
    bins = fill_bins(lengths, 2048)
    assert len(bins) <= 1.001 * fewest_bins(lengths, 2048)
    assert sorted(number for rows in bins for number in rows) == list(range(len(lengths)))
    assert max(sum(lengths[number] for number in rows) for rows in bins) <= 2048


def test_it_is_several_times_as_fast_as_trl():
    "By the processor's clock, so that others on this machine do not count."
    pyarrow = pytest.importorskip('pyarrow')
    from trl.data_utils import _pack_bfd
    lengths = chat_lengths(20_000)
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).numpy()
    tokens = pyarrow.array(torch.zeros(sum(lengths), dtype=torch.int8).numpy())
    table = pyarrow.table({'input_ids': pyarrow.ListArray.from_arrays(borders, tokens)})
    began = time.process_time()
    theirs = _pack_bfd(table, 2048, 'split')
    middle = time.process_time()
    ours = fill_bins(lengths, 2048)
    ended = time.process_time()
    assert len(ours) == len(theirs)
    assert (middle - began) / (ended - middle) > 8


def real_rows():
    if not REAL.is_file(): pytest.skip('the public rows are not beside this repository')
    rows = [{'messages': [
        {'role': 'user', 'content': row['instruction'] + row['input']},
        {'role': 'assistant', 'content': row['output']}]}
        for row in json.loads(REAL.read_text('utf-8')) if row['output'].strip()]
    found = check_rows(rows, load_tokenizer('tiny-base')).tokenised
    return [
        {'row': number, 'input_ids': tokens.ids,
         'labels': [token if trains else -100 for token, trains in zip(tokens.ids, tokens.mask)]}
        for number, parts in enumerate(found) for tokens in parts]


def examples_of(packed):
    "The examples of packed rows, as (number, tokens, labels)."
    for row in packed:
        starts = [place for place, position in enumerate(row['position_ids']) if position == 0]
        for number, first, last in zip(row['rows'], starts, [*starts[1:], None], strict=True):
            positions = row['position_ids'][first:last]
            assert positions == list(range(len(positions)))
            yield number, row['input_ids'][first:last], row['labels'][first:last]


def test_rows_of_real_lengths_come_out_as_they_went_in():
    rows = real_rows()
    assert len(rows) > 1000
    packed = pack_rows(rows, 1024)
    assert len(packed) <= 1.02 * fewest_bins([len(row['input_ids']) for row in rows], 1024) + 1
    found = sorted(examples_of(packed))
    assert found == [(row['row'], row['input_ids'], [-100, *row['labels'][1:]]) for row in rows]
    assert packed == pack_rows(rows, 1024)


# Losses and gradients

def small_rows(count=5):
    draw = random.Random(0)
    rows = []
    for number in range(count):
        ids = [draw.randrange(5, 1000) for _ in range(draw.randint(6, 20))]
        rows.append({'row': number, 'input_ids': ids, 'labels': ids})
    return rows


@pytest.fixture(scope='module', params=['sdpa', 'eager'])
def model(request):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(
        asset('tiny-base'), dtype=torch.float32, attn_implementation=request.param).train()


def learned(model, batches):
    "The sum of the losses of all tokens of `batches`, and the gradient of every weight."
    model.zero_grad()
    total = 0.0
    for batch in batches:
        labels = batch['labels'][:, 1:]
        given = {name: value for name, value in batch.items()
                 if name not in ('labels', 'row', 'segments')}
        logits = model(**given, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction='sum')
        loss.backward()
        total += float(loss)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return total, gradient


def alone(rows):
    return [{'input_ids': torch.tensor([row['input_ids']]), 'labels': torch.tensor([row['labels']])}
            for row in rows]


# In float32 sums of some hundred products round to 1e-6 of their size; a leak moves them by 1e-2
EQUAL = 1e-5


def distance(found, wanted):
    "Relative, of the loss and of the gradient."
    (loss, gradient), (true_loss, true_gradient) = found, wanted
    return max(abs(loss / true_loss - 1),
               float((gradient - true_gradient).norm() / true_gradient.norm()))


@pytest.mark.parametrize('width', [1, 16], ids=['as they come', 'filled up to 16'])
def test_a_packed_batch_learns_what_its_rows_learn_alone(model, width):
    rows = small_rows()
    batch = PackedCollator(pad=0, multiple=width)(pack_rows(rows, 40))
    assert batch['input_ids'].shape[0] > 1
    assert width == 1 or (batch['labels'] == -100).sum() > len(rows)
    assert distance(learned(model, [batch]), learned(model, alone(rows))) < EQUAL


def test_all_rows_in_one_learn_the_same(model):
    rows = small_rows()
    batch = PackedCollator(pad=0, joins=True)(pack_rows(rows, 40))
    assert batch['input_ids'].shape[0] == 1
    assert distance(learned(model, [batch]), learned(model, alone(rows))) < EQUAL


def counted_on(batch):
    width = batch['position_ids'].shape[1]
    return {'position_ids': torch.arange(width).expand_as(batch['position_ids'])}


LEAKS = {
    'positions that run on': counted_on,
    'a mask of ones': lambda batch: {'attention_mask': torch.ones_like(batch['input_ids'])},
    'a first label that trains': lambda batch: {
        'labels': torch.where(batch['position_ids'] == 0, batch['input_ids'], batch['labels'])}}


@pytest.mark.parametrize('plant', LEAKS.values(), ids=LEAKS)
def test_a_leak_is_seen(model, plant):
    rows = small_rows()
    batch = PackedCollator(pad=0)(pack_rows(rows, 40))
    leaky = batch | plant(batch)
    assert distance(learned(model, [leaky]), learned(model, alone(rows))) > 1000 * EQUAL
