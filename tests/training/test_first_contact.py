"A model, a tokenizer and rows that this project did not make, from the files to a finished run."
import math
import os
import shutil
from pathlib import Path

import pytest

from llm_workbook.config.recipe import Recipe, shrink
from llm_workbook.model.architecture import load_tokenizer
from llm_workbook.model.miniature import miniature
from llm_workbook.training.fine_tune import fine_tune

REAL = Path(os.environ.get('LLMW_DATA', Path(__file__).resolve().parents[3]/'shared/data'))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (REAL/'tokenizers').is_dir(), reason='the public data are not at hand')]


@pytest.fixture(scope='module')
def qwen3(tmp_path_factory):
    "Qwen 3 in miniature, with its published tokenizer and vocabulary."
    from transformers import AutoConfig
    folder = tmp_path_factory.mktemp('qwen3')
    shutil.copytree(REAL/'tokenizers/qwen3', folder/'published')
    AutoConfig.for_model('qwen3', vocab_size=151_936).save_pretrained(folder/'published')
    return miniature(folder/'published', folder/'small')


def held_out_losses(run): return [line['loss'] for line in run.evaluations]


def test_instructions_train_a_qwen_3_on_two_ranks(qwen3, tmp_path):
    recipe = shrink(Recipe.named('70b-2x24gb-qlora')).changed({
        'model.source': str(qwen3), 'data': {'source': str(REAL/'instructions.json')},
        'data.test_share': 0.005, 'batch.length': 1024, 'batch.micro': 1, 'batch.accumulation': 2,
        'optimizer.steps': 8, 'intervals.evaluation': 4})
    run = fine_tune(recipe, tmp_path/'run', live=False)
    first, last = held_out_losses(run)
    assert last < first < math.log(151_936) + 0.5
    published = load_tokenizer(REAL/'tokenizers/qwen3')
    assert load_tokenizer(run.saved).chat_template == published.chat_template


def test_reviews_train_a_head_on_a_qwen_3(qwen3, tmp_path):
    recipe = shrink(Recipe.named('70b-2x4-h100-zero3-qlora-classifier')).changed({
        'model.source': str(qwen3), 'data.source': str(REAL/'amazon_reviews.tsv'),
        'data.text_column': 0, 'data.label_column': 1,
        'data.labels': {0: 'negative', 1: 'positive'},
        'data.test_share': 0.02, 'batch.length': 64, 'batch.micro': 8,
        'optimizer.steps': 8, 'intervals.evaluation': 4})
    run = fine_tune(recipe, tmp_path/'run', live=False)
    first, last = held_out_losses(run)
    assert last < first
