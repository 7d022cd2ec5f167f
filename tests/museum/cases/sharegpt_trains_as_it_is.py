"""Rows in ShareGPT's form train, with its roles `human` and `gpt`, which no chat template knows."""
from rows_that_teach_nothing import Data, load_rows, loss, write

ROWS = [{'conversations': [{'from': 'human', 'value': 'Add 2 and 3.'},
                           {'from': 'gpt', 'value': '5'}]}] * 4


def broken():
    assert loss(ROWS) > 0
    write(ROWS)
    return 'rows.jsonl'


def mended():
    write(ROWS)
    rows, _ = load_rows(Data(source='rows.jsonl', test_share=0.0))
    assert [turn['role'] for turn in rows[0]['messages']] == ['user', 'assistant']
