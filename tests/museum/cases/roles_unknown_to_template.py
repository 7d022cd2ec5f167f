"""Roles are spelled in another way than the template knows: no answer is marked as one."""
import json

from rows_that_teach_nothing import Data, DatasetError, load_rows, loss, write

ROWS = [{'messages': [{'role': 'Human', 'content': 'Add 2 and 3.'},
                      {'role': 'Bot', 'content': '5'}]}] * 4


def broken():
    assert loss(ROWS) > 0
    write(ROWS)
    return 'rows.jsonl'


def mended():
    write(ROWS)
    try: load_rows(Data(source='rows.jsonl', format='messages'))
    except DatasetError: return
    raise AssertionError('unknown roles were taken')
