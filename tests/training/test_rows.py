"Rows that mean something else than they seem to: each is trained as meant, or named."
import json
import os
import warnings
from pathlib import Path

import pytest

from llm_workbook.config.recipe import Data, Recipe, shrink
from llm_workbook.model.architecture import load_tokenizer
from llm_workbook.training import tokens
from llm_workbook.training.data import DatasetError, load_rows
from llm_workbook.training.fine_tune import check_recipe
from llm_workbook.training.tokens import ChatFormat, answer_tokens, check_rows

ASK, ANSWER = {'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}
SYSTEM = {'role': 'system', 'content': 'Be kind.'}
PAIR = {'prompt': 'Hi', 'completion': 'Ho'}


def write(path, rows):
    path.write_text('\n'.join(map(json.dumps, rows)), encoding='utf-8')
    return Data(source=str(path), test_share=0.0)


def read(path, rows, **settings):
    return load_rows(write(path, rows).model_copy(update=settings))[0]


@pytest.fixture(scope='module')
def tokenizer(): return load_tokenizer('tiny-base')


@pytest.fixture
def recipe(tmp_path):
    base = shrink(Recipe.named('70b-2x24gb-qlora'))
    def of(name, **changes):
        data = {'source': str(tmp_path/name), 'test_share': 0.0}
        return base.changed({'data': data, 'batch.micro': 2, 'batch.length': 32, **changes})
    return of


# Rows that are longer than batch.length

def test_an_answer_that_would_lose_its_end_is_refused_by_file_and_line(recipe, tmp_path):
    long = PAIR | {'completion': 'word ' * 40}
    write(tmp_path/'a.jsonl', [PAIR, PAIR, long, PAIR, PAIR, PAIR])
    with pytest.raises(DatasetError, match='a.jsonl: line 3: has an answer that ends at token'):
        check_recipe(recipe('a.jsonl'))
    with pytest.warns(UserWarning, match='1 of 6 rows are longer than batch.length') as said:
        rows, _ = check_recipe(recipe('a.jsonl', **{'data.too_long': 'drop'}))
    assert len(rows) == 5
    assert 'answers that do not train: 1' in ''.join(str(warning.message) for warning in said)


def test_answers_that_fit_train_and_the_next_is_dropped(tokenizer):
    long = {'role': 'assistant', 'content': 'word ' * 40}
    row = {'messages': [ASK, ANSWER, ASK, long]}
    report = check_rows([row], tokenizer, 32, too_long='drop')
    [tokens] = report.tokenised[0]
    assert (report.cut, report.dropped, report.sequences) == (1, 1, 1)
    assert tokens.ids[-1] == tokenizer.eos_token_id and tokens.mask[-1]
    assert len(tokens.ids) < 32


def test_a_row_that_exactly_fits_is_whole(tokenizer):
    row = {'messages': [ASK, ANSWER]}
    size = len(answer_tokens(row, ChatFormat(tokenizer))[0].ids)
    assert check_rows([row], tokenizer, size).cut == 0
    with pytest.raises(DatasetError, match=f'ends at token {size}, past batch.length {size - 1}'):
        check_rows([row], tokenizer, size - 1)


# Tables that look like texts

def test_a_labelled_table_named_txt_is_refused(tmp_path):
    (tmp_path/'a.txt').write_text('Loved it.\t1\nHated it.\t0\nFine.\t1\n')
    data = Data(source=str(tmp_path/'a.txt'), test_share=0.0)
    with pytest.raises(DatasetError, match='3 of 3 lines end in a tab and a short field'):
        load_rows(data)
    with pytest.raises(DatasetError, match='a .txt file, which has no columns'):
        load_rows(data.model_copy(update={'text_column': 0, 'label_column': 1}))
    assert len(load_rows(data.model_copy(update={'format': 'text'}))[0]) == 3


def test_lines_of_windows_train_no_carriage_return(tmp_path):
    (tmp_path/'a.txt').write_bytes(b'One.\r\nTwo.\r\n')
    rows, _ = load_rows(Data(source=str(tmp_path/'a.txt'), test_share=0.0))
    assert [row['text'] for row in rows] == ['One.', 'Two.']


@pytest.mark.parametrize('label', [None, [1], {'a': 1}])
def test_a_label_that_is_no_class_is_refused(label, tmp_path):
    rows = [{'text': 'Fine.', 'label': 1}, {'text': 'Bad.', 'label': label}]
    with pytest.raises(DatasetError, match="line 2: the label 'label' is .*, not one class"):
        read(tmp_path/'a.jsonl', rows, format='classification')


# What the recipe names

WORDS = {'0': 'bad', '1': 'good'}
TOPIC = {'text': 'Stocks fell.', 'label': 1}


def asked(path, row, **settings):
    write(path, [row])
    return load_rows(Data(source=str(path), test_share=0.0, **settings))[0][0]


ABSENT = {
    'label': ({'text': 'Fine.', 'lable': 1}, {'label_column': 'label', 'labels': WORDS},
              "no column 'label', which data.label_column names; did you mean 'lable'"),
    'label, with a format': (
        {'text': 'Fine.', 'lable': 1},
        {'label_column': 'label', 'labels': WORDS, 'format': 'classification'},
        "no column 'label', which data.label_column names; did you mean 'lable'"),
    'labels alone': ({'text': 'Fine.', 'Label': 1}, {'labels': WORDS},
                     "no column for the label: .*data.label_column.* did you mean 'Label'"),
    'labels beside messages': (
        {'messages': [ASK, ANSWER]}, {'labels': WORDS}, 'no column for the text.*data.text_column'),
    'text': ({'review': 'Fine.'}, {'text_column': 'Review'}, 'which data.text_column names'),
    'a position': ({'text': 'Fine.'}, {'text_column': 0}, 'no column 0, which data.text_column'),
    'completion': (PAIR, {'completion_column': 'compl'}, "did you mean 'completion'"),
    'prompt': ({'q': 'Hi', 'chosen': 'Ho'}, {'completion_column': 'chosen'},
               'no column for the prompt.*data.prompt_column'),
    'answer': ({'q': 'Hi', 'a': 'Ho'}, {'prompt_column': 'q'}, 'name it with data.completion_col'),
    'of two formats': (
        PAIR | TOPIC, {'prompt_column': 'prompt', 'labels': WORDS},
        'data.prompt_column and data.labels belong to different formats')}


@pytest.mark.parametrize('row, settings, words', ABSENT.values(), ids=ABSENT)
def test_a_named_column_that_is_not_there_is_an_error(row, settings, words, tmp_path):
    with pytest.raises(DatasetError, match=words): asked(tmp_path/'a.jsonl', row, **settings)


def test_what_the_recipe_names_decides_the_format(tmp_path):
    classified = {'text_column': 'text', 'label_column': 'label', 'labels': WORDS}
    others = PAIR, {'messages': [ASK, ANSWER]}, {'chosen': 'Ho', 'rejected': 'Hm'}
    for row in others:
        for settings in classified, {'labels': WORDS}, {'text_column': 'text', 'labels': WORDS}:
            made = asked(tmp_path/'a.jsonl', row | TOPIC, **settings)
            assert made['messages'][1]['content'] == 'good'
        assert 'Ho' not in str(made)
    named = {'prompt_column': 'q', 'completion_column': 'a'}
    row = {'messages': [ASK, ASK], 'q': 'Hi', 'a': 'Ho'}
    assert asked(tmp_path/'a.jsonl', row, **named) == {'messages': [ASK, ANSWER]}
    alpaca = {'instruction': 'Hi', 'input': '', 'output': 'Old', 'output_2': 'Ho'}
    for settings in {}, {'format': 'alpaca'}:
        made = asked(tmp_path/'a.jsonl', alpaca, completion_column='output_2', **settings)
        assert made == {'messages': [ASK, ANSWER]}
    pair = {'q': 'Hi', 'chosen': 'Ho', 'rejected': 'Hm'}
    assert asked(tmp_path/'a.jsonl', pair, prompt_column='q')['rejected']


@pytest.mark.parametrize('label', ['label', 'rating', 'stars', 'sentiment'])
def test_a_text_with_a_label_is_not_classified_unasked(label, tmp_path):
    row = {'text': 'Stocks fell.', label: 1}
    for settings in {}, {'label_column': label}, {'text_column': 'text'}:
        with pytest.raises(DatasetError, match=f"a text and '{label}': set data.labels, .*: text"):
            asked(tmp_path/'a.jsonl', row, **settings)
    assert asked(tmp_path/'a.jsonl', row, format='text') == {'text': 'Stocks fell.'}
    for settings in {'labels': WORDS}, {'question': 'Which?'}:
        made = asked(tmp_path/'a.jsonl', row, **settings)
        assert made['messages'][1]['content'] == ('good' if 'labels' in settings else '1')
    with pytest.raises(DatasetError, match="the label 1 does not answer 'Is this review positive"):
        asked(tmp_path/'a.jsonl', row, format='classification')


def test_words_that_answer_the_usual_question_need_no_other(tmp_path):
    row = {'text': 'Good.', 'label': 'Positive'}
    made = asked(tmp_path/'a.jsonl', row, format='classification')
    assert [turn['content'] for turn in made['messages']] == [
        'Is this review positive or negative?\nGood.', 'Positive']


def test_spaces_around_the_names_of_columns_are_no_part_of_them(tmp_path):
    (tmp_path/'a.csv').write_text('text, label\ngood,1\n')
    rows, _ = load_rows(Data(source=str(tmp_path/'a.csv'), test_share=0.0, labels=WORDS))
    assert rows[0]['messages'][1]['content'] == 'good'


UNREAD = {
    'labels': ({'labels': WORDS, 'format': 'messages'}, 'labels: take it out, .* classification'),
    'question': ({'question': 'Which?'}, 'question: take it out, or .* to classification'),
    'label': ({'label_column': 'label', 'format': 'text'}, 'label_column: take it out'),
    'text': ({'text_column': 'text', 'format': 'prompt_completion'}, 'classification or text'),
    'prompt': ({'prompt_column': 'prompt', 'format': 'classification'}, 'prompt_column: take'),
    'completion': ({'completion_column': 'completion', 'format': 'text'}, 'completion_column:')}


@pytest.mark.parametrize('settings, words', UNREAD.values(), ids=UNREAD)
def test_a_field_that_the_format_does_not_read_is_refused(settings, words, tmp_path):
    row = PAIR | TOPIC | {'messages': [ASK, ANSWER]}
    form = settings.get('format', 'messages')
    with pytest.raises(DatasetError, match=f"a.jsonl: is read as '{form}', .* data.*{words}"):
        asked(tmp_path/'a.jsonl', row, **settings)


def mix_of(folder, *parts, **shared):
    write(folder/'chats.jsonl', [{'messages': [ASK, ANSWER]}])
    write(folder/'topics.jsonl', [TOPIC])
    sources = [{'source': str(folder/f'{name}.jsonl')} | own
               for name, own in zip(('chats', 'topics'), parts)]
    return load_rows(Data(mix=sources, test_share=0.0, **shared))[0]


def test_what_stands_beside_a_mix_is_for_the_sources_that_read_it(tmp_path):
    chats, topics = {'format': 'messages'}, {'format': 'classification'}
    rows = mix_of(tmp_path, chats, topics, labels=WORDS, question='Which?')
    assert [row['messages'][0]['content'] for row in rows] == ['Hi', 'Which?\nStocks fell.']
    assert mix_of(tmp_path, chats, topics | {'labels': WORDS, 'label_column': 'label'})
    with pytest.raises(DatasetError, match='data.mix: no source reads data.labels: take it out'):
        mix_of(tmp_path, chats, {'format': 'text'}, labels=WORDS)
    with pytest.raises(DatasetError, match='chats.jsonl: .* does not use data.labels: take it out'):
        mix_of(tmp_path, chats | {'labels': WORDS}, topics)


def heard(source):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        rows = load_rows(source)[0]
    return rows, [str(warning.message) for warning in caught]


def test_a_share_beside_held_out_rows_is_a_warning(tmp_path):
    held = write(tmp_path/'held.jsonl', [TOPIC | {'text': 'Rain.'}]).source
    data = write(tmp_path/'a.jsonl', [TOPIC]).model_copy(update={'test': held, 'format': 'text'})
    for share in 0.0, 0.1, 0.3:
        _, said = heard(data.model_copy(update={'test_share': share}))
        asks = ['a.jsonl: data.test_share 0.3 is not used, since there are held-out rows: '
                'take it out']
        assert [text for text in said if 'share' in text] == (asks if share == 0.3 else [])


def test_a_markdown_file_is_one_text(tmp_path):
    (tmp_path/'a.md').write_bytes(b'# Bees\r\n\r\nThey *dance*.\r\n')
    (tmp_path/'b.MD').write_text('# Ants\nThey walk.\tOn\t1\n')
    [row], said = heard(Data(source=str(tmp_path/'a.md'), test_share=0.0))
    assert (row['text'], said) == ('# Bees\n\nThey *dance*.\n', [])
    both, said = heard(Data(source=str(tmp_path/'*.[mM][dD]'), test_share=0.0))
    assert ([row['text'][:6] for row in both], said) == (['# Bees', '# Ants'], [])
    with pytest.raises(DatasetError, match='a.md: is a .md file, which has no columns'):
        load_rows(Data(source=str(tmp_path/'a.md'), text_column='text'))
    (tmp_path/'c.md').write_text(' \n')
    with pytest.raises(DatasetError, match='c.md: the file is empty'):
        load_rows(Data(source=str(tmp_path/'c.md')))


def test_a_folder_of_texts_is_named_as_a_pattern(tmp_path):
    for name in 'README.md', 'notes.md', 'rows.jsonl': (tmp_path/name).write_text('{"text": "a"}')
    pattern = "to train on its 1 .jsonl, set data.source to '.*/[*].jsonl'"  # Not its README
    with pytest.raises(DatasetError, match=pattern): load_rows(Data(source=str(tmp_path)))
    (tmp_path/'rows.jsonl').unlink()
    with pytest.raises(DatasetError, match='to train on its 2 .md, set .*/[*].md'):
        load_rows(Data(source=str(tmp_path)))


def test_a_file_of_markdown_that_is_not_there_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetError, match="'docs/a.md' is no path here"):
        load_rows(Data(source='docs/a.md'))


def test_lines_of_a_text_file_are_counted(tmp_path):
    (tmp_path/'book.txt').write_text('It was a dark\nnight.\n\nIt rained.\n')
    rows, [said] = heard(Data(source=str(tmp_path/'book.txt'), test_share=0.0))
    assert len(rows) == 3 and 'book.txt: each of its 3 lines is a text of its own' in said
    assert said.endswith('a file that is one text may end in .md')
    whole = write(tmp_path/'book.jsonl', [{'text': (tmp_path/'book.txt').read_text()}])
    [row], said = heard(whole)
    assert said == [] and 'dark\nnight' in row['text']
    (tmp_path/'line.txt').write_text('One line.\n')
    assert heard(Data(source=str(tmp_path/'line.txt'), test_share=0.0))[1] == []


def test_one_text_trains_without_a_share(tmp_path, tokenizer):
    book = write(tmp_path/'book.jsonl', [{'text': 'It rained. ' * 100}])
    with pytest.raises(DatasetError, match='1 rows .* share of 0.1: set data.test_share to 0 to'):
        load_rows(book.model_copy(update={'test_share': 0.1}))
    assert check_rows(load_rows(book)[0], tokenizer, 64).sequences > 3


def test_rows_of_one_file_may_have_their_turns_in_either_column(tmp_path):
    shared = [{'from': 'human', 'value': 'Hi'}, {'from': 'gpt', 'value': 'Ho'}]
    rows = [{'messages': [ASK, ANSWER]}, {'conversations': shared},
            {'messages': None, 'conversations': shared}]
    for some in rows, rows[::-1]:
        made, said = heard(write(tmp_path/'a.jsonl', some))
        assert said == [] and [row['messages'] for row in made] == [[ASK, ANSWER]] * 3
    _, said = heard(write(tmp_path/'a.jsonl', [rows[0] | rows[1], rows[1]]))
    assert said == ['a.jsonl: these columns are not read: conversations']


# Fields that change the meaning

def turns(*contents, **last):
    roles = ['user', 'assistant'] * len(contents)
    made = [{'role': role, 'content': text} for role, text in zip(roles, contents)]
    made[-1] |= last
    return {'messages': made}


@pytest.mark.parametrize('field', [{'weight': 0}, {'train': False}, {'loss_weight': 0.0}])
def test_answers_that_are_only_context_do_not_train(field, tmp_path, tokenizer):
    row = turns('Hi', 'Ha', 'Hi', 'Ho')
    row['messages'][1] |= field
    [made] = read(tmp_path/'a.jsonl', [row])
    [tokens] = answer_tokens(made, ChatFormat(tokenizer))
    trained = [number for number, trains in zip(tokens.ids, tokens.mask) if trains]
    assert tokenizer.decode(trained) == ' Ho<|endoftext|>'


@pytest.mark.parametrize('template', [None, 'plain'])
def test_an_answer_that_comes_first_trains_whole(template):
    tokenizer = load_tokenizer('tiny-base', None, template)
    row = {'messages': [ANSWER, ASK, ANSWER]}
    [tokens] = answer_tokens(row, ChatFormat(tokenizer))
    trained = [number for number, trains in zip(tokens.ids, tokens.mask) if trains]
    half = len(trained) // 2
    assert 'Ho' in tokenizer.decode(trained[:half])
    assert trained[:half] == trained[half:]


def test_a_template_that_leaves_the_system_out_is_reported():
    tokenizer = load_tokenizer('tiny-base')
    rows = [{'messages': [SYSTEM, ASK, ANSWER]}, {'messages': [ASK, ANSWER]}, {'text': 'Once.'}]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        check_rows(rows, tokenizer)
        tokenizer.chat_template = (
            "{% for m in messages if m.role != 'system' %}{% if loop.first and messages[0].role == "
            "'system' %}" + '{{ messages[0].content }} {% endif %}{{ m.content }}<|endoftext|>'
            '{% endfor %}')
        check_rows(rows, tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace('{{ messages[0].content }} ', '')
    with pytest.warns(UserWarning, match='1 of 3 rows have a turn of the system, which the chat'):
        check_rows(rows, tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        check_rows(rows[1:], tokenizer)


REFUSED = {
    'weight of a half': (turns('Hi', 'Ho', weight=0.5), 'only 0 and 1 are obeyed'),
    'no answer trains': (turns('Hi', 'Ho', train=False), 'no answer that is to be trained'),
    'thoughts apart': (turns('Hi', 'Ho', reasoning_content='Hm'), 'has reasoning_content'),
    'a row without weight': (PAIR | {'weight': 0}, 'not obeyed for a whole row'),
    'a bad answer': (PAIR | {'label': False}, 'marks a bad answer'),
    'an image': (PAIR | {'images': ['a.png']}, 'only text is trained'),
    'two systems': (
        {'messages': [{'role': 'system', 'content': 'A'}, ASK, ANSWER], 'system': 'B'},
        'take one out'),
    'history that is a text': (PAIR | {'history': ['Hi']}, 'not a list of pairs'),
    'a user that trains': (
        {'messages': [ASK | {'train': True}, ANSWER]}, 'only answers train here')}


@pytest.mark.parametrize('row, words', REFUSED.values(), ids=REFUSED)
def test_what_is_not_obeyed_is_refused(row, words, tmp_path):
    with pytest.raises(DatasetError, match=words): read(tmp_path/'a.jsonl', [row])


@pytest.mark.parametrize(
    'row', [PAIR, {'instruction': 'Hi', 'output': 'Ho'},
            {'conversations': [{'from': 'human', 'value': 'Hi'}, {'from': 'gpt', 'value': 'Ho'}]}],
    ids=['pair', 'alpaca', 'sharegpt'])
def test_system_and_history_are_read(row, tmp_path):
    extra = {'system': 'Be kind.', 'history': [['A?', 'B.']]}
    [made] = read(tmp_path/'a.jsonl', [row | extra])
    assert [turn['content'] for turn in made['messages']] == ['Be kind.', 'A?', 'B.', 'Hi', 'Ho']
    assert read(tmp_path/'a.jsonl', [row | {'system': '', 'history': []}]) == [
        {'messages': [ASK, ANSWER]}]


def test_columns_that_are_not_read_are_listed_once(tmp_path):
    with pytest.warns(UserWarning, match='a.jsonl: these columns are not read: id, mood') as said:
        read(tmp_path/'a.jsonl', [PAIR | {'id': 1}, PAIR | {'mood': 'x'}])
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        read(tmp_path/'a.jsonl', [PAIR | {'system': 'A', 'images': None, 'weight': 1}])


@pytest.mark.parametrize('label', [0, 0.0, -1, '0', '0.0', 'False', 'false ', 'NO'])
def test_an_answer_that_its_label_calls_bad_is_refused(label, tmp_path):
    rows = [PAIR | {'label': True}, PAIR | {'label': label}, PAIR | {'label': 1}]
    with pytest.raises(DatasetError, match='line 2: has label .* which marks a bad answer'):
        read(tmp_path/'a.jsonl', rows)
    (tmp_path/'a.csv').write_text(f'prompt,completion,label\nHi,Ho,{label}\n')
    with pytest.raises(DatasetError, match='line 2: has label .* which marks a bad answer'):
        load_rows(Data(source=str(tmp_path/'a.csv'), test_share=0.0))


def test_a_label_that_judges_no_answer_is_not_read(tmp_path):
    rows = [PAIR | {'label': label} for label in (1, 'true', None, 'physics')]
    with pytest.warns(UserWarning, match='these columns are not read: label'):
        assert len(read(tmp_path/'a.jsonl', rows)) == 4
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert len(read(tmp_path/'a.jsonl', rows[:3])) == 3


def test_a_label_of_a_class_is_no_judgement(tmp_path):
    rows = [{'review': 'Bad.', 'label': False}, {'review': 'Fine.', 'label': True}]
    made = read(tmp_path/'a.jsonl', rows, format='classification', question='Is it good?')
    assert [row['messages'][1]['content'] for row in made] == ['False', 'True']


def test_of_two_conversations_the_one_that_is_not_read_is_listed(tmp_path):
    turns = {'messages': [ASK, ANSWER]}
    with pytest.warns(UserWarning, match='columns are not read: conversations'):
        made = read(tmp_path/'a.jsonl', [turns | {'conversations': [ASK, MORE[1]]}])
    assert made == [turns]


def test_pairs_of_preferences_train_both_answers_or_the_chosen_one(tmp_path):
    row = {
        'conversations': [{'from': 'human', 'value': 'Hi'}],
        'chosen': {'from': 'gpt', 'value': 'Ho'}, 'rejected': {'from': 'gpt', 'value': 'Hm'}}
    [pair] = read(tmp_path/'a.jsonl', [row])
    assert pair['rejected'] == [ASK, ANSWER | {'content': 'Hm'}]
    assert read(tmp_path/'a.jsonl', [row], completion_column='chosen') == [
        {'messages': [ASK, ANSWER]}]


MORE = [ASK | {'content': 'A?'}, ANSWER | {'content': 'B.'}]


BEFORE = [SYSTEM], [SYSTEM, *MORE], MORE, []
INSIDE = [(prompt, before) for prompt in ('Hi', 'Hi ', [ASK], None) for before in BEFORE]


@pytest.mark.parametrize(
    'prompt, before', [*INSIDE, ([SYSTEM, ASK], [SYSTEM]), ([SYSTEM, MORE[0]], [SYSTEM, *MORE])])
def test_a_prompt_inside_of_a_whole_conversation_is_written_once(prompt, before, tmp_path):
    good, bad = [[*before, ASK, answer] for answer in (ANSWER, ANSWER | {'content': 'Hm'})]
    row = {'chosen': good, 'rejected': bad} | ({'prompt': prompt} if prompt else {})
    assert read(tmp_path/'a.jsonl', [row]) == [{'messages': good, 'rejected': bad}]
    assert read(tmp_path/'a.jsonl', [row], completion_column='chosen') == [{'messages': good}]
    written = {'prompt': prompt, 'completion': good}
    assert read(tmp_path/'a.jsonl', [written], completion_column='completion') == [
        {'messages': good}]


def test_a_prompt_that_a_whole_conversation_does_not_hold_is_refused(tmp_path):
    other = {'prompt': 'Hello', 'completion': [ASK, ANSWER]}
    with pytest.raises(DatasetError, match="line 1: .* 'completion', in which the prompt does not"):
        read(tmp_path/'a.jsonl', [other])
    pair = {'prompt': [SYSTEM, ASK], 'chosen': [ASK, ANSWER], 'rejected': [ASK, MORE[1]]}
    with pytest.raises(DatasetError, match="line 1: .* 'chosen', in which the prompt does not"):
        read(tmp_path/'a.jsonl', [pair])


def test_an_answer_of_several_turns_follows_its_prompt(tmp_path):
    row = {'prompt': 'Hi', 'completion': [ANSWER, *MORE]}
    assert read(tmp_path/'a.jsonl', [row]) == [{'messages': [ASK, ANSWER, *MORE]}]


def test_a_history_comes_behind_the_turn_of_the_system(tmp_path):
    row = {'messages': [SYSTEM, ASK, ANSWER], 'history': [['A?', 'B.']]}
    assert read(tmp_path/'a.jsonl', [row]) == [{'messages': [SYSTEM, *MORE, ASK, ANSWER]}]


def test_parts_of_a_turn_may_call_their_text_value(tmp_path):
    row = {'messages': [ASK | {'content': [{'type': 'text', 'value': 'Hi'}]}, ANSWER]}
    assert read(tmp_path/'a.jsonl', [row]) == [{'messages': [ASK, ANSWER]}]


# Places

def test_faults_that_tokens_show_are_named_by_file_and_line(recipe, tmp_path):
    rows = [{'prompt': f'Hi {n}', 'completion': 'Ho'} for n in range(100)]
    rows[40]['prompt'] += ' <|endoftext|>'
    write(tmp_path/'a.jsonl', rows)
    with pytest.raises(DatasetError, match='a.jsonl: line 41: has <.endoftext.> in its text'):
        check_recipe(recipe('a.jsonl', **{'data.test_share': 0.3}))


def test_faults_in_several_files_name_each(tokenizer, tmp_path):
    marked = PAIR | {'prompt': '<|user|>'}
    for name in 'ab': write(tmp_path/f'{name}.jsonl', [PAIR, marked])
    rows, _ = load_rows(Data(source=f'{tmp_path}/*.jsonl', test_share=0.0))
    with pytest.raises(DatasetError) as caught: check_rows(rows, tokenizer)
    assert 'a.jsonl line 2: has' in str(caught.value)
    assert 'b.jsonl line 2: has' in str(caught.value)


# Files that are none

@pytest.mark.parametrize('source', ['train.jsonl', '.', '*.jsonl'])
def test_a_pipe_or_a_device_is_not_read(source, tmp_path):
    for make in (os.mkfifo, lambda path: os.symlink('/dev/zero', path), os.mkdir,
                 lambda path: os.symlink('nowhere', path)):
        path = tmp_path/'train.jsonl'
        make(path)
        with pytest.raises(DatasetError): load_rows(Data(source=str(tmp_path/source)))
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize('source', ['x' * 5000, '~nobody-is-here/x.jsonl', 'a\0b.jsonl'])
def test_names_that_no_system_takes_are_data_errors(source):
    with pytest.raises(DatasetError): load_rows(Data(source=source))


def test_a_field_of_a_megabyte_and_a_long_number(tmp_path):
    (tmp_path/'a.csv').write_text('prompt,completion\nHi,"' + 'word ' * 200_000 + '"\n')
    rows, _ = load_rows(Data(source=str(tmp_path/'a.csv'), test_share=0.0))
    assert len(rows[0]['messages'][1]['content']) > 900_000
    (tmp_path/'a.jsonl').write_text('{"prompt": ' + '1' * 5000 + ', "completion": "Ho"}')
    with pytest.raises(DatasetError, match='line 1: cannot be read as JSON .*digits'):
        load_rows(Data(source=str(tmp_path/'a.jsonl'), test_share=0.0))


def test_a_key_that_stands_twice_is_refused(tmp_path):
    (tmp_path/'a.jsonl').write_text('{"prompt": "Hi", "completion": "Ho", "completion": "Hm"}')
    with pytest.raises(DatasetError, match="line 1: .* has the key 'completion' twice"):
        load_rows(Data(source=str(tmp_path/'a.jsonl'), test_share=0.0))


# How long it takes

@pytest.mark.parametrize('rank, shown', [(None, True), ('0', True), ('1', False)])
def test_a_bar_shows_how_many_rows_are_tokenised(tokenizer, monkeypatch, capsys, rank, shown):
    "Of ranks that torchrun has started, each tokenises all rows and the first one says so."
    monkeypatch.setattr(tokens, '_SILENT_S', 0)
    monkeypatch.setattr(tokens, '_TOGETHER', 2)
    monkeypatch.delenv('RANK', raising=False)
    if rank: monkeypatch.setenv('RANK', rank)
    turns = [ASK, ANSWER]
    rows = [{'messages': turns}, {'text': 'Once.'}, {'messages': turns * 2}]
    one_by_one = [answer_tokens(row, ChatFormat(tokenizer)) for row in rows]
    assert check_rows(rows, tokenizer).tokenised == one_by_one
    assert ('tokenising' in capsys.readouterr().err) is shown


def test_a_rank_asks_no_kernel_for_a_widget(tokenizer, monkeypatch):
    "A rank that a notebook has forked would write to the kernel's sockets."
    monkeypatch.setattr('tqdm.auto.tqdm', None)
    monkeypatch.setenv('RANK', '0')
    check_rows([{'messages': [ASK, ANSWER]}], tokenizer)


def test_few_rows_have_no_bar(tokenizer, tmp_path, capsys):
    check_rows(read(tmp_path/'a.jsonl', [PAIR] * 10), tokenizer)
    shown = capsys.readouterr().err
    assert 'tokenising' not in shown and 'reading' not in shown


def test_a_bar_shows_how_many_rows_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokens, '_SILENT_S', 0)
    monkeypatch.delenv('RANK', raising=False)
    assert len(read(tmp_path/'a.jsonl', [PAIR] * 3)) == 3
    assert 'reading a.jsonl' in capsys.readouterr().err
    monkeypatch.setenv('RANK', '1')
    read(tmp_path/'a.jsonl', [PAIR] * 3)
    assert 'reading' not in capsys.readouterr().err


@pytest.mark.parametrize('enabled', [True, False])
def test_the_collector_of_garbage_is_as_it_was(tmp_path, enabled):
    import gc
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        read(tmp_path/'a.jsonl', [PAIR])
        with pytest.raises(DatasetError): read(tmp_path/'b.jsonl', [PAIR | {'completion': ''}])
        assert gc.isenabled() is enabled
    finally: (gc.enable if was else gc.disable)()


def test_a_warning_points_to_who_reads_the_rows(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        load_rows(write(tmp_path/'a.jsonl', [PAIR | {'more': 1}]))
    assert [Path(each.filename).name for each in caught] == ['test_rows.py']
