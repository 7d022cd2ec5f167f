"""A file of JSON lines was cut in the middle of a line; `datasets` does not say which."""
from pathlib import Path

from datasets import load_dataset

from llm_workbook.config.recipe import Data
from llm_workbook.training.conversation import DatasetError
from llm_workbook.training.data import load_rows

TEXT = '{"text": "one"}\n{"text": "two"}\n{"text": "th'


def broken():
    Path('rows.jsonl').write_text(TEXT)
    load_dataset('json', data_files='rows.jsonl', cache_dir='cache')


def mended():
    Path('rows.jsonl').write_text(TEXT)
    try: load_rows(Data(source='rows.jsonl', format='text'))
    except DatasetError as error: assert 'line 3' in str(error), error
