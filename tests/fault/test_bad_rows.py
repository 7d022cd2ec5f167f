"""Fault 13: rows that train on nothing, train on the wrong thing, or stop a run without saying
where."""
import json
import random
import warnings

import pytest
from test_data import anything

from llm_workbook.training.data import DatasetError, load_rows
from llm_workbook.training.tokens import check_rows
from llm_workbook.files import asset
from llm_workbook.config.recipe import Data

GOOD = {'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}]}
TEXT = {'text': 'A line.'}


def with_answer(**changes):
    "The good row with another answer."
    question, answer = GOOD['messages']
    return {'messages': [question, answer | changes]}


# Good rows, the bad one, and words of the error. What TRL 1.16 does with it: an error without a row
# number, or (last four) nothing at all.
BAD = {
    'no text': (TEXT, {'text': None}, 'the text is missing'),
    'no messages': (GOOD, {'messages': None}, 'not a list of turns'),
    'no turns': (GOOD, {'messages': []}, 'not a list of turns'),
    'other columns': (
        GOOD, {'instruction': 'Hi', 'output': 'Ho'}, "neither 'messages' nor 'conversations'"),
    'cut off': (GOOD, None, 'cut off'),
    'no answer': (GOOD, {'messages': GOOD['messages'][:1]}, 'no answer to learn'),
    'raw ShareGPT with an unknown speaker': (
        GOOD, {'conversations': [{'from': 'bing', 'value': 'Hi'}]}, "unknown role 'bing'"),
    'unknown role': (GOOD, with_answer(role='asistant'), "did you mean 'assistant'?"),
    'empty text': (TEXT, {'text': '  '}, 'the text is empty'),
    'empty answer': (GOOD, with_answer(content=''), 'turn 2 (assistant) is empty'),
}


def write(path, rows) -> Data:
    lines = [json.dumps(GOOD)[:-9] if row is None else json.dumps(row) for row in rows]
    path.write_text('\n'.join(lines), encoding='utf-8')
    return Data(source=str(path), test_share=0.0)


@pytest.mark.parametrize('good, bad, words', BAD.values(), ids=BAD)
def test_13_a_bad_row_is_named_with_its_number_and_reason(good, bad, words, tmp_path):
    data = write(tmp_path/'rows.jsonl', [good, bad, good, good, bad])
    with pytest.raises(DatasetError) as caught: load_rows(data)
    assert [number for number, _ in caught.value.problems] == [2, 5]
    assert words in str(caught.value)
    assert all(f'line {number}: ' in str(caught.value) for number in (2, 5))


def test_13_one_row_of_each_kind_is_shown_however_many_there_are(tmp_path):
    kinds = [bad for good, bad, _ in BAD.values() if good is GOOD]
    rows = [GOOD, *[with_answer(content='')] * 30]
    for bad in kinds: rows += [bad, bad]
    with pytest.raises(DatasetError) as caught: load_rows(write(tmp_path/'rows.jsonl', rows))
    said = str(caught.value)
    assert len(caught.value.problems) == len(rows) - 1
    heading = f'rows.jsonl: {len(rows) - 1} problems'
    assert said.startswith(f'{heading}\n  line 2: turn 2 (assistant) is ')
    for words in {words for good, _, words in BAD.values() if good is GOOD}: assert words in said
    assert said.endswith(f'and {len(rows) - 11} more')


def test_13_lines_that_cannot_be_read_do_not_hide_the_rows_at_fault(tmp_path):
    (tmp_path/'rows.csv').write_text('prompt,completion\nHi,Ho\nHi\nHi,\nHi,"Ho"\nHi,Ho,Ha\n')
    with pytest.raises(DatasetError) as caught: load_rows(Data(source=str(tmp_path/'rows.csv')))
    assert [number for number, _ in caught.value.problems] == [3, 4, 6]
    with pytest.raises(DatasetError, match='has 1 fields instead of 2'):
        load_rows(Data(source=str(tmp_path/'rows.csv')), on_bad='skip')


# A line that is cut off (None) may have been a good row, and is never left out
LEFT_OUT = {name: case for name, case in BAD.items() if case[1]}


@pytest.mark.parametrize('good, bad, words', LEFT_OUT.values(), ids=LEFT_OUT)
def test_13_bad_rows_are_left_out_on_demand_and_counted(good, bad, words, tmp_path):
    data = write(tmp_path/'rows.jsonl', [good, bad, good, good, bad])
    with pytest.warns(UserWarning, match='2 of 5 rows are left out') as warned:
        rows, _ = load_rows(data, on_bad='skip')
    assert len(rows) == 3
    said = ' '.join(str(warning.message) for warning in warned)
    assert words in said
    assert 'line 5' in said
    with pytest.raises(ValueError, match="must be 'error' or 'skip'"):
        load_rows(data, on_bad='ignore')


def test_13_rows_at_fault_in_every_place_leave_no_rows(tmp_path):
    data = write(tmp_path/'rows.jsonl', [TEXT | {'text': ''}] * 3)
    with (
        pytest.warns(UserWarning, match='3 of 3'),
        pytest.raises(DatasetError, match='no rows to train on')
    ):
        load_rows(data.model_copy(update={'format': 'text'}), on_bad='skip')


def test_13_known_columns_of_others_are_read_and_not_passed_over(tmp_path):
    alpaca = {'instruction': 'Hi', 'output': 'Ho'}
    sharegpt = {'conversations': [{'from': 'human', 'value': 'Hi'}, {'from': 'gpt', 'value': 'Ho'}]}
    for row in alpaca, sharegpt:
        assert load_rows(write(tmp_path/'rows.jsonl', [row, row]))[0] == [GOOD, GOOD]


@pytest.mark.parametrize('on_bad', ['error', 'skip'])
def test_13_bytes_that_are_no_text_are_named_by_line(on_bad, tmp_path):
    (tmp_path/'rows.jsonl').write_bytes(
        b'{"text": "a"}\n{"text": "\xe9"}\n{"text": "b"}\n{"text": "\xff"}')
    with pytest.raises(DatasetError, match='not UTF-8') as caught:
        load_rows(Data(source=str(tmp_path/'rows.jsonl')), on_bad=on_bad)
    assert [number for number, _ in caught.value.problems] == [2, 4]


def test_13_long_rows_are_counted_or_named_and_a_megabyte_is_a_row(tmp_path):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    megabyte = with_answer(content='word ' * 200_000)
    long = with_answer(content='word ' * 40)
    question, answer = GOOD['messages']
    long_question = {'messages': [question | {'content': 'word ' * 300}, answer]}
    rows, _ = load_rows(write(tmp_path/'rows.jsonl', [megabyte, long, GOOD]))
    assert len(json.dumps(megabyte)) > 1_000_000
    assert rows[0] == megabyte
    with pytest.raises(DatasetError, match='line 1: has an answer that ends at token') as caught:
        check_rows(rows, tokenizer, 32)
    assert [number for number, _ in caught.value.problems] == [1, 2]
    report = check_rows(rows, tokenizer, 32, too_long='drop')
    assert (report.rows, report.cut, report.dropped, report.sequences) == (3, 2, 2, 1)
    assert report.longest > 200_000
    with pytest.raises(DatasetError, match='row 2: has an answer that ends at token'):
        check_rows([GOOD, long_question], tokenizer, 32)


def questions(rows) -> set: return {row['messages'][0]['content'] for row in rows}


def test_13_copies_stay_on_one_side_and_test_rows_are_not_training_rows(tmp_path):
    question, answer = GOOD['messages']
    same_question = [with_answer(content=f'Answer {n}') for n in range(5)]
    others = [{'messages': [question | {'content': str(n)}, answer]} for n in range(15)]
    data = write(tmp_path/'rows.jsonl', same_question + others)
    train, test = load_rows(data.model_copy(update={'test_share': 0.5}))
    train_questions, test_questions = questions(train), questions(test)
    assert len(train) + len(test) == 20
    assert not train_questions & test_questions
    same_file_twice = data.model_copy(update={'test': str(tmp_path/'rows.jsonl')})
    with pytest.raises(DatasetError, match='line 1: has a prompt that is in the training rows too'):
        load_rows(same_file_twice)


@pytest.mark.parametrize('on_bad', ['error', 'skip'])
def test_13_rows_made_at_random_raise_nothing_but_dataset_errors(on_bad, tmp_path):
    path = tmp_path/'rows.jsonl'
    data = Data(source=str(path), test_share=0.0)
    chance = random.Random(13)
    files_accepted = 0
    for _ in range(400):
        rows = [TEXT] * chance.randrange(2)
        for _ in range(chance.randrange(4)):
            rows.append(anything(chance, depth=chance.randrange(2)))
        path.write_text('\n'.join(map(json.dumps, rows)), encoding='utf-8')
        try:
            with warnings.catch_warnings(action='ignore'):
                train, _ = load_rows(data, on_bad=on_bad)
        except DatasetError as error:
            assert error.problems
        else:
            files_accepted += bool(train)
    assert files_accepted
