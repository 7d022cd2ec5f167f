"""Rows with Alpaca's columns go to TRL as they are, and it asks them for `text`."""
from rows_that_teach_nothing import Data, load_rows, loss, write

ROWS = [{'instruction': 'Add 2 and 3.', 'output': '5'}] * 4


def broken():
    loss(ROWS)


def mended():
    write(ROWS)
    rows, _ = load_rows(Data(source='rows.jsonl', test_share=0.0))
    assert len(rows) == 4
