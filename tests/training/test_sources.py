"Where rows come from: every ending, shards, saved sets, and the file that is held out."
import gzip
import json
import warnings
from pathlib import Path

import pytest

from llm_workbook.config.recipe import Data
from llm_workbook.training.data import DatasetError, load_rows

PAIRS = [{'prompt': f'Hi {number}', 'completion': 'Ho'} for number in range(6)]
LINES = '\n'.join(map(json.dumps, PAIRS))
TABLE = '\n'.join(['prompt,completion', *(f'{row["prompt"]},Ho' for row in PAIRS)])
WANTED = [row['prompt'] for row in PAIRS]


def questions(rows): return [row['messages'][0]['content'] for row in rows]


def read(source, share=0.0, **settings):
    return load_rows(Data(source=str(source), test_share=share, **settings))


def parquet(path, rows):
    import pyarrow
    from pyarrow.parquet import write_table
    write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def lines(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text('\n'.join(map(json.dumps, rows)))
    return path


def saved(path, **splits):
    from datasets import Dataset, DatasetDict
    made = DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
    made.save_to_disk(path)
    return path


@pytest.mark.parametrize('name, text', [
    ('a.ndjson', LINES), ('a.JSONL', LINES), ('a.Csv', TABLE), ('a.jsonl.gz', LINES),
    ('a.CSV.GZ', TABLE), ('a.tsv.gz', TABLE.replace(',', '\t')), ('a.json.gz', json.dumps(PAIRS))])
def test_endings_in_capitals_and_packed_files_are_read(name, text, tmp_path):
    content = text.encode()
    (tmp_path/name).write_bytes(gzip.compress(content) if name.lower().endswith('gz') else content)
    assert questions(read(tmp_path/name)[0]) == WANTED


def test_lines_of_a_packed_text_are_its_rows(tmp_path):
    (tmp_path/'a.txt.gz').write_bytes(gzip.compress(b'One.\n\nTwo.\n'))
    rows, _ = read(tmp_path/'a.txt.gz')
    assert [(row['text'], row.place.number) for row in rows] == [('One.', 1), ('Two.', 3)]
    whole = (tmp_path/'a.txt.gz').read_bytes()
    (tmp_path/'a.txt.gz').write_bytes(whole[:-9])
    with pytest.raises(DatasetError, match='a.txt.gz: cannot be read: Compressed file ended'):
        read(tmp_path/'a.txt.gz')


# Parquet

def test_parquet_gives_turns_and_names_its_rows(tmp_path):
    turns = [{'role': 'user', 'content': 'Hi', 'weight': None},
             {'role': 'assistant', 'content': 'Ho', 'weight': 1}]
    parquet(tmp_path/'a.parquet', [{'messages': turns}])
    [row], _ = read(tmp_path/'a.parquet')
    assert [turn['content'] for turn in row['messages']] == ['Hi', 'Ho']
    assert str(row.place) == 'a.parquet row 1'
    parquet(tmp_path/'a.parquet', [*PAIRS, {'prompt': 'Hi', 'completion': None}])
    with pytest.raises(DatasetError, match='a.parquet: row 7: the completion is missing'):
        read(tmp_path/'a.parquet')


def test_parquet_is_asked_as_other_tables_are(tmp_path):
    stars = {'text_column': 'text', 'label_column': 'stars', 'labels': {'1': 'bad', '5': 'good'}}
    parquet(tmp_path/'a.parquet', [{'text': 'Fine.', 'stars': 5.0}, {'text': 'Bad.', 'stars': 1.0}])
    rows, _ = read(tmp_path/'a.parquet', **stars)
    assert [row['messages'][1]['content'] for row in rows] == ['good', 'bad']
    parquet(tmp_path/'b.parquet', [{'text': 'Fine.', 'rating': 5}])
    with pytest.raises(DatasetError, match='b.parquet: row 1: has the columns rating, text, and a'):
        read(tmp_path/'*.parquet', **stars)
    parquet(tmp_path/'a.parquet', [{'text': 'Fine.', 'stars': float('nan')}])
    with pytest.raises(DatasetError, match="row 1: the label 'stars' is float, not one class"):
        read(tmp_path/'a.parquet', **stars)


def test_a_parquet_column_that_stands_twice_is_refused(tmp_path):
    import pyarrow
    from pyarrow.parquet import write_table
    table = pyarrow.Table.from_arrays([['a'], ['b']], names=['text', 'text'])
    write_table(table, tmp_path/'a.parquet')
    with pytest.raises(DatasetError, match="a.parquet: has the column 'text' twice"):
        read(tmp_path/'a.parquet')


# Shards

@pytest.mark.parametrize('names', [
    ['train-00000-of-00002.parquet', 'train-00001-of-00002.parquet'],
    ['train1.parquet', 'train2.parquet'], ['train_a.parquet', 'train_b.parquet']])
def test_shards_are_read_in_the_order_of_their_names(names, tmp_path):
    for number, name in enumerate(names): parquet(tmp_path/name, PAIRS[3 * number:][:3])
    assert questions(read(tmp_path/'train*.parquet')[0]) == WANTED
    if '_a' in names[0]:
        with pytest.raises(DatasetError, match=r"2 \.parquet, set data.source to '.*/\*\.parquet'"):
            read(tmp_path)
    else: assert questions(read(tmp_path)[0]) == WANTED


def test_shards_that_are_not_all_there_are_refused(tmp_path):
    lines(tmp_path/'train-00000-of-00002.jsonl', PAIRS)
    with pytest.raises(DatasetError, match='has 1 shards .*names say 2: bring all'): read(tmp_path)
    lines(tmp_path/'train-00001-of-00002.ndjson', PAIRS)
    with pytest.raises(DatasetError, match='shards of one ending; found 2: train-00000'):
        read(tmp_path)
    (tmp_path/'train-00001-of-00002.ndjson').unlink()
    lines(tmp_path/'train.jsonl', PAIRS)
    with pytest.raises(DatasetError, match='found 2: train.jsonl, train-00000'): read(tmp_path)


def test_other_names_are_not_guessed_at(tmp_path):
    for name in 'part-0.jsonl.gz', 'part-1.jsonl.gz', 'notes.txt': (tmp_path/name).write_text('')
    with pytest.raises(DatasetError, match=r"2 \.jsonl\.gz, set .*/\*\.jsonl\.gz'"): read(tmp_path)


    lines(tmp_path/'data'/'train.jsonl', PAIRS)
    for file in tmp_path.glob('*.*'): file.unlink()
    with pytest.raises(DatasetError, match="name a folder below, as '.*/data'"): read(tmp_path)


# Saved sets

def test_saved_sets_are_read_with_their_splits(tmp_path):
    both = saved(tmp_path/'both', train=PAIRS[:4], test=PAIRS[4:])
    train, held = read(both, share=0.5)
    assert (questions(train), questions(held)) == (WANTED[:4], WANTED[4:])
    assert str(held[1].place) == 'both/test row 2'
    assert questions(read(both/'train')[0]) == WANTED[:4]
    assert questions(read(both/'train', test=str(both/'test'))[1]) == WANTED[4:]
    with pytest.raises(DatasetError, match='both/test: row 1: has a prompt that is in the'):
        read(saved(tmp_path/'both', train=PAIRS, test=PAIRS[:1]))
    with pytest.raises(DatasetError, match='needs one file train'):
        read(saved(tmp_path/'other', sft=PAIRS))
    for file in (both/'train').glob('*.arrow'): file.write_bytes(b'')
    with pytest.raises(DatasetError, match='both/train: cannot be read as a saved set'): read(both)


# Held-out files

@pytest.mark.parametrize('name', [
    'test.jsonl', 'validation.jsonl', 'valid.jsonl', 'val.jsonl', 'dev.jsonl.gz', 'eval.jsonl',
    'validation-00000-of-00001.jsonl'])
def test_the_file_of_held_out_rows_is_used(name, tmp_path):
    lines(tmp_path/'train.jsonl', PAIRS[:5])
    content = json.dumps(PAIRS[5]).encode()
    (tmp_path/name).write_bytes(gzip.compress(content) if name.endswith('gz') else content)
    train, held = read(tmp_path, share=0.2)
    assert (questions(train), questions(held)) == (WANTED[:5], WANTED[5:])
    assert held[0].place.file == name


def test_test_rows_win_over_validation_rows_and_that_is_said(tmp_path):
    for name, rows in ('train', PAIRS[:4]), ('validation', PAIRS[4:5]), ('test', PAIRS[5:]):
        lines(tmp_path/f'{name}.jsonl', rows)
    with pytest.warns(UserWarning, match='validation is not read, since test holds the held-out'):
        _, held = read(tmp_path)
    assert questions(held) == WANTED[5:]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        _, held = read(tmp_path, test=str(tmp_path/'validation.jsonl'))
        assert questions(held) == WANTED[4:5]
        assert read(tmp_path/'train.jsonl') == (read(tmp_path/'train*')[0], [])


def test_a_name_that_is_no_file_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('data').mkdir()
    for name in 'a.ndjson', 'a.jsonl.gz', 'a.CSV':
        with pytest.raises(DatasetError, match='no path here'): read(f'data/{name}')
