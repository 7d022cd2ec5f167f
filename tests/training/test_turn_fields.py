"""Fields of a turn that other trainers write: obeyed, refused, or named in a warning."""
import json

import pytest

from llm_workbook.config.recipe import Data
from llm_workbook.training.data import DatasetError, load_rows
from llm_workbook.training.turn_fields import unread_turn_fields

ASK = {'role': 'user', 'content': 'Hi'}
BAD, GOOD = ({'role': 'assistant', 'content': word} for word in ('Bad.', 'Good.'))


def written(tmp_path, row) -> Data:
    path = tmp_path/'rows.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for _ in range(3)))
    return Data(source=str(path), test_share=0.0)


@pytest.mark.parametrize('field', ['training', 'loss', 'mask', 'time'])
def test_a_field_that_nothing_reads_is_named(tmp_path, field):
    row = {'messages': [ASK, BAD | {field: False}, ASK, GOOD | {'refusal': None}]}
    with pytest.warns(UserWarning, match=f'rows.jsonl: .*not read: messages.{field}$'):
        load_rows(written(tmp_path, row))


@pytest.mark.parametrize('column', ['messages', 'conversations'])
def test_fields_that_are_read_or_say_nothing_are_not_named(tmp_path, column, recwarn):
    row = {column: [ASK | {'name': 'Bo'}, BAD | {'weight': 0}, ASK, GOOD | {'audio': None}]}
    train, _ = load_rows(written(tmp_path, row))
    assert not recwarn.list
    assert [turn.get('train', True) for turn in train[0]['messages']] == [True, False, True, True]


def test_fields_of_pairs_are_named_too(tmp_path):
    row = {'chosen': [ASK, GOOD | {'score': 5}], 'rejected': [ASK, BAD]}
    with pytest.warns(UserWarning, match='not read: chosen.score$'):
        load_rows(written(tmp_path, row))


@pytest.mark.parametrize('field, value, words', [
    ('train_detail', [{'begin_offset': 0, 'end_offset': 2, 'train': False}], 'trains as a whole'),
    ('images', ['a.png'], 'only text is trained'), ('thinking', 'Hm.', 'marks thoughts')])
def test_a_field_that_changes_what_is_learned_is_refused(tmp_path, field, value, words):
    with pytest.raises(DatasetError, match=f'turn 2 has {field}, .*{words}'):
        load_rows(written(tmp_path, {'messages': [ASK, GOOD | {field: value}]}))


def test_turns_as_text_are_looked_into():
    text = json.dumps([ASK, GOOD | {'mask': 1}])
    assert unread_turn_fields([{'messages': text}], {'messages'}) == ['messages.mask']
    assert unread_turn_fields([{'messages': '[{broken'}], {'messages'}) == []


def test_the_column_of_openorca_is_a_turn_of_the_system(tmp_path, recwarn):
    row = {'system_prompt': 'Be brief.', 'question': 'Why?', 'response': 'So.'}
    train, _ = load_rows(written(tmp_path, row))
    assert [turn['content'] for turn in train[0]['messages']] == ['Be brief.', 'Why?', 'So.']
    assert not recwarn.list
    assert len(load_rows(written(tmp_path, row | {'system_prompt': ''}))[0][0]['messages']) == 2


def test_pairs_of_llama_factory_have_their_question_in_instruction_and_input(tmp_path, recwarn):
    row = {'instruction': 'Add.', 'input': '2, 3', 'chosen': '5', 'rejected': '6', 'system': 'Hm.'}
    [pair, *_], _ = load_rows(written(tmp_path, row))
    assert [turn['content'] for turn in pair['messages']] == ['Hm.', 'Add.\n\n2, 3', '5']
    assert [turn['content'] for turn in pair['rejected']] == ['Hm.', 'Add.\n\n2, 3', '6']
    assert not recwarn.list
    with pytest.warns(UserWarning, match='not read: instruction, input$'):  # A prompt leads
        load_rows(written(tmp_path, {'prompt': 'Why?', **row}))
