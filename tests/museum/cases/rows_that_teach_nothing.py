"""Rows whose texts are all empty: the run goes to its end, with a loss of 0."""
import json
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from llm_workbook.config.recipe import Data
from llm_workbook.files import asset
from llm_workbook.training.conversation import DatasetError
from llm_workbook.training.data import load_rows

ROWS = [{'text': ''}] * 4


def loss(rows):
    arguments = SFTConfig('run', max_steps=2, report_to='none', use_cpu=True, bf16=False,
                          disable_tqdm=True, save_strategy='no')
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows),
                         processing_class=tokenizer)
    return trainer.train().training_loss


def write(rows):
    Path('rows.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')


def broken():
    assert loss(ROWS) == 0
    write(ROWS)
    return 'rows.jsonl'


def mended():
    write(ROWS)
    try: load_rows(Data(source='rows.jsonl', format='text'))
    except DatasetError: return
    raise AssertionError('empty rows were taken')
