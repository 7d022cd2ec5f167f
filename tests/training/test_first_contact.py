"""A model, a tokenizer and rows that this project did not make, from the files to a finished run.

The recipes are those of the benchmark line `first_contact`, with fewer steps.
"""
from math import log

import pytest

from bench.lines.first_contact import (
    VOCABULARY, instruction_recipe, published, review_recipe, small_qwen3)
from bench.record import Skip
from bench.shared.public_data import folder

from llm_workbook.model.architecture import load_tokenizer
from llm_workbook.training.fine_tune import fine_tune

pytestmark = pytest.mark.slow
FEWER = {'optimizer.steps': 8, 'intervals.evaluation': 4}


@pytest.fixture(scope='module')
def rows():
    try: published(folder())
    except Skip as reason: pytest.skip(str(reason))
    return folder()


@pytest.fixture(scope='module')
def qwen3(rows, tmp_path_factory):
    return small_qwen3(published(rows), tmp_path_factory.mktemp('qwen3'))


def held_out_losses(run): return [line['loss'] for line in run.evaluations]


def test_instructions_train_a_qwen_3_on_two_ranks(qwen3, rows, tmp_path):
    asked = instruction_recipe(qwen3, rows/'instructions.json')
    changes = FEWER | {'data.test_share': 0.005, 'batch.accumulation': 2}
    run = fine_tune(asked.changed(changes), tmp_path/'run', live=False)
    first, last = held_out_losses(run)
    assert last < first < log(VOCABULARY) + 0.5
    template = load_tokenizer(published(rows)).chat_template
    assert load_tokenizer(run.saved).chat_template == template


def test_reviews_train_a_head_on_a_qwen_3(qwen3, rows, tmp_path):
    asked = review_recipe(qwen3, rows/'amazon_reviews.tsv')
    changes = FEWER | {'data.test_share': 0.02}
    run = fine_tune(asked.changed(changes), tmp_path/'run', live=False)
    first, last = held_out_losses(run)
    assert last < first
