"""Rows as they really are: two public files, every known kind of damage, and rows made at
random."""
import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from llm_workbook.training.data import (
    DatasetError, conversation, detect_format, load_rows, split_rows)
from llm_workbook.training.tokens import TokenView, assistant_mask, check_rows, token_view
from llm_workbook.files import asset
from llm_workbook.config.recipe import Data

REAL = Path(os.environ.get('LLMW_DATA', Path(__file__).resolve().parents[3]/'shared/data'))
real = pytest.mark.skipif(
    not (REAL/'amazon_reviews.tsv').is_file(), reason='no public data: set LLMW_DATA to its folder')
WORDS = {'format': 'classification', 'labels': {0: 'negative', 1: 'positive'}}
PAIR = {'prompt': 'Hi', 'completion': 'Ho'}
ASK, ANSWER = {'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}


@pytest.fixture(scope='module')
def tokenizer():
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(asset('tiny-base'))


def prompts(rows) -> set[str]: return {json.dumps(row['messages'][:-1]) for row in rows}


def jsonl(path, rows) -> str:
    path.write_text('\n'.join(map(json.dumps, rows)), encoding='utf-8')
    return str(path)


# Real input

@real
@pytest.mark.parametrize('seed', range(5))
def test_the_reviews_are_read_whole_and_split_apart(seed, tokenizer):
    data = Data(
        source=str(REAL/'amazon_reviews.tsv'), text_column=0, label_column=1, test_share=0.2,
        **WORDS)
    train, test = load_rows(data, seed)
    assert (len(train), len(test)) == (800, 200)
    assert not prompts(train) & prompts(test)
    assert Counter(row['messages'][1]['content'] for row in train + test) == {
        'positive': 500, 'negative': 500}
    read = Counter(row['messages'][0]['content'].partition('\n')[2] for row in train + test)
    lines = (REAL/'amazon_reviews.tsv').read_text(encoding='utf-8').splitlines()
    assert read == Counter(line.rpartition('\t')[0] for line in lines)
    assert sum('"' in text for text in read) >= 10
    assert sum(count > 1 for count in read.values()) == 10
    if seed == 0: assert check_rows(train + test, tokenizer, length=1024).rows == 1000


@real
def test_the_instructions_are_read_whole(tokenizer):
    train, test = load_rows(Data(source=str(REAL/'instructions.json')))
    assert (len(train), len(test)) == (990, 110)
    assert not prompts(train) & prompts(test)
    report = check_rows(train + test, tokenizer, length=1024)
    assert report.rows == 1100
    assert 0.1 < report.trained / report.tokens < 0.9


@real
def test_the_splits_differ_by_seed_and_repeat_by_seed():
    data = Data(source=str(REAL/'instructions.json'))
    held = [prompts(load_rows(data, seed)[1]) for seed in (0, 0, 1)]
    assert held[0] == held[1]
    assert len(held[0] & held[2]) < 50


def test_the_packaged_conversations_can_be_learned_from(tokenizer):
    train, test = load_rows(Data(source='sample-conversations'))
    assert not prompts(train) & prompts(test)
    assert len({row['family'] for row in train}) >= 6
    assert check_rows(train + test, tokenizer, length=128).cut == 0


# Formats

def test_every_format_says_the_same(tmp_path):
    wanted = {'messages': [ASK, ANSWER]}
    rows = {
        'messages': wanted,
        'sharegpt': {
            'conversations': [{'from': 'human', 'value': 'Hi'}, {'from': 'gpt', 'value': 'Ho'}],
            'id': 'x'},
        'pair': PAIR, 'lists': {'prompt': [ASK], 'completion': [ANSWER]},
        'alpaca': {'instruction': 'Hi', 'input': '', 'output': 'Ho'},
        'parts': {
            'messages': [
                {
                    'role': 'user',
                    'content': [{'type': 'text', 'text': 'H'}, {'type': 'text', 'text': 'i'}]},
                ANSWER]}}
    for name, row in rows.items():
        assert load_rows(
            Data(source=jsonl(tmp_path/f'{name}.jsonl', [row, row]), test_share=0.0)
        )[0] == [wanted, wanted]


def test_systems_and_many_turns_are_kept():
    turns = [{'role': 'system', 'content': 'Be kind.'}, ASK, ANSWER, ASK, ANSWER]
    assert conversation({'messages': turns}, Data(source='x')) == {'messages': turns}


def test_files_of_every_ending_are_read(tmp_path):
    files = {
        'a.json': json.dumps([PAIR, PAIR]),
        'a.jsonl': f'\ufeff{json.dumps(PAIR)}\r\n\r\n{json.dumps(PAIR)}\r\n',
        'a.csv': 'prompt,completion\r\n"Hi","Ho"\r\nHi,Ho\r\n',
        'a.tsv': 'prompt\tcompletion\nHi\tHo\nHi\tHo'}
    for name, text in files.items():
        (tmp_path/name).write_bytes(text.encode())
        assert (
            load_rows(Data(source=str(tmp_path/name), test_share=0.0))[0]
            == [{'messages': [ASK, ANSWER]}] * 2)
    (tmp_path/'a.csv').write_text('question,answer\n"two\nlines, one field",x\n', encoding='utf-8')
    assert (
        load_rows(Data(source=str(tmp_path/'a.csv'), test_share=0.0))[0][0]['messages'][0][
            'content']
        == 'two\nlines, one field')


def test_tabs_and_quotes_belong_to_the_text(tmp_path):
    (tmp_path/'r.tsv').write_text('a "b\tc\t1\nd\t0\n"e\t1\nf\t0\n', encoding='utf-8')
    rows, _ = load_rows(
        Data(source=str(tmp_path/'r.tsv'), text_column=0, label_column=1, test_share=0.0, **WORDS))
    assert [row['messages'][0]['content'].partition('\n')[2] for row in rows] == [
        'a "b\tc', 'd', '"e', 'f']


@pytest.mark.parametrize('quoting', ['minimal', 'all', 'nonnumeric'])
def test_a_tsv_with_the_quotes_of_a_csv_is_refused(quoting, tmp_path):
    import csv
    with open(tmp_path/'a.tsv', 'w', newline='') as file:
        writer = csv.writer(file, 'excel-tab', quoting=getattr(csv, f'QUOTE_{quoting.upper()}'))
        writer.writerows([('text', 'label'), ('He said "no".', 0), ('Fine.', 1)])
    data = Data(source=str(tmp_path/'a.tsv'), test_share=0.0, **WORDS)
    with pytest.raises(DatasetError, match='line 2: has a field in quotes as CSV writes it'):
        load_rows(data)
    (tmp_path/'a.tsv').write_text('"text"\t"label"\n"Fine."\t"1"\n')
    with pytest.raises(DatasetError, match='line 1: has a field in quotes as CSV writes it'):
        load_rows(data)


def test_quotes_of_a_text_stay_in_a_tsv(tmp_path):
    texts = ['""Great""', '"So" they say "no"', '5" or 6""', '"Fine."', '""', '"']
    lines = [f'{text}\t{number % 2}' for number, text in enumerate(texts)]
    (tmp_path/'a.tsv').write_text('\n'.join(['text\tlabel', *lines]))
    rows, _ = load_rows(Data(source=str(tmp_path/'a.tsv'), test_share=0.0, **WORDS))
    assert [row['messages'][0]['content'].partition('\n')[2] for row in rows] == texts


def test_label_words_come_from_the_recipe_and_null_drops():
    data = Data(source='x', labels={1: 'bad', 3: None, 5: 'good'}, question='Well?')
    assert conversation({'text': 'T', 'stars': 5}, data)['messages'] == [
        {'role': 'user', 'content': 'Well?\nT'},
        {'role': 'assistant', 'content': 'good'}]
    assert conversation({'text': 'T', 'stars': '3'}, data) is None
    assert (
        conversation(
            {'text': 'T', 'stars': 2}, Data(source='x', format='classification', question='Well?')
        )['messages'][1]['content'] == '2')


def test_named_test_rows_and_hub_names(tmp_path, monkeypatch):
    import datasets
    source = jsonl(tmp_path/'a.jsonl', [PAIR])
    test = jsonl(tmp_path/'b.jsonl', [{**PAIR, 'prompt': 'Hey'}])
    assert [len(part) for part in load_rows(Data(source=source, test=test))] == [1, 1]
    with pytest.raises(DatasetError, match='line 1: has a prompt that is in the training rows'):
        load_rows(Data(source=source, test=source))
    splits = {'train': [PAIR] * 3, 'validation': [{**PAIR, 'prompt': 'Hey'}]}
    monkeypatch.setattr(
        datasets, 'load_dataset', lambda name, split: datasets.Dataset.from_list(splits[split]))
    assert [len(part) for part in load_rows(Data(source='owner/name', test='validation'))] == [3, 1]
    with pytest.raises(DatasetError, match="split 'tset' cannot be loaded"):
        load_rows(Data(source='owner/name', test='tset'))


# Damage: file, content, settings, row numbers, words

DAMAGE = [
    ('a.jsonl', '', {}, [None], 'the file is empty'),
    ('a.jsonl', '\n\n', {}, [None], 'the file is empty'),
    ('a.json', '[]', {}, [None], 'no rows'),
    ('a.csv', 'prompt,completion\n', {}, [None], 'no rows'),
    ('a.jsonl', '{"text": null}', {}, [1], 'the text is missing'),
    ('a.jsonl', '{"messages": null}', {}, [1], 'not a list of turns'),
    ('a.jsonl', '{"messages": []}', {}, [1], 'not a list of turns'),
    ('a.jsonl', '{"instruction": "a", "output": ""}', {}, [1], 'empty'),
    ('a.jsonl', '{"text": "  "}\n{"text": "a"}\n{"text": ""}', {}, [1, 3], 'is empty'),
    ('a.jsonl', '{"foo": 1}', {}, [None], 'no known format has the columns foo'),
    ('a.jsonl', '{"prompt": "a", "chosen": "b", "rejected": "b"}', {}, [1], 'same answer twice'),
    ('a.jsonl', '{"messages": [{"role": "usr", "content": "a"}]}', {}, [1], "did you mean 'user'?"),
    ('a.jsonl', '{"messages": [{"role": ["user"], "content": "a"}]}', {}, [1], 'unknown role'),
    ('a.jsonl', '{"messages": [{"role": "user", "content": "a"}]}', {}, [1], 'no answer to learn'),
    ('a.jsonl', '{"messages": [{"role": "user", "content": 5}]}', {}, [1], 'is int, not text'),
    ('a.jsonl', '{"messages": ["a"]}', {}, [1], 'turn 1 is str'),
    (
        'a.jsonl', '{"messages": [{"from": "tool", "value": "a"}, {"from": "gpt", "value": "b"}]}',
        {}, [1], 'turn 1 answers a call'),
    (
        'a.jsonl', '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', {}, [1],
        'not text'),
    (
        'a.jsonl', '{"messages": [{"role": "gpt", "content": "a"}], "tools": [{}]}', {}, [1],
        'tool 1 has no name'),
    ('a.jsonl', '{"text": "\\ud800"}', {}, [1], 'half a character'),
    ('a.jsonl', '{"text": "a"}\n{"text": "b', {}, [2], 'cut off'),
    ('a.jsonl', '{"text": "a"}\n7\n"b"\nnull', {}, [2, 3, 4], 'not an object'),
    ('a.jsonl', '[' * 100000, {}, [1], 'no complete JSON'),
    ('a.jsonl', b'{"text": "a"}\n{"text": "\xe9"}\n{"text": "\xff"}', {}, [2, 3], 'not UTF-8'),
    ('a.json', b'\xff\xfe[\x00]\x00', {}, [None], 'is UTF-16, not UTF-8'),
    ('a.csv', 'text\na\n'.encode('utf-16-be'), {}, [None], 'is UTF-16, not UTF-8'),
    ('a.txt', 'one\ntwo\n'.encode('utf-16-le'), {}, [None], 'is UTF-16, not UTF-8'),
    ('a.jsonl.gz', b'{"text": "a"}', {}, [None], 'cannot be read: Not a gzipped file'),
    (
        'a.csv', 'text;label\n"a, b";1\n', {}, [1],
        "which ';' seems to separate: save it with commas"),
    ('a.csv', 'text\tlabel\na\t1\n', {}, [1], 'seems to separate: name it .tsv'),
    ('a.tsv', 'text,label\na,1\n', {}, [1], 'seems to separate: name it .csv'),
    ('a.parquet', b'PAR1 PAR1', {}, [None], 'is no Parquet file that can be read'),
    ('a.json', '{"text": "a"}\n{"text": "b"}', {}, [2], 'name the file .jsonl'),
    ('a.json', '{"data": []}', {}, [None], 'one dict'),
    ('a.json', '[{"text": "a"},\n{"text"', {}, [2], 'not JSON'),
    ('a.json', '[{"text": "a"}, {"text": 1}]', {}, [2], 'is int, not text'),
    ('a.csv', 'text,label,text \na,1,b\n', {}, [1], "has the column 'text' twice"),
    ('a.tsv', '\nlabel\ttext\tlabel\n1\ta\t2\n', {}, [2], "has the column 'label' twice"),
    ('a.csv', 'text\na,b\n', {}, [2], 'has 2 fields instead of 1'),
    ('a.csv', 'text,label\n"a,1\nb,0\n', {}, [2], 'close its quotes'),
    ('a.csv', 'Text,Score\na,1\n', {}, [None], 'text_column'),
    ('a.csv', 'text,label\na,\n', WORDS, [2], 'label \'label\' is missing'),
    ('a.tsv', 'a\t1\nb\t2\n', {'text_column': 0, 'label_column': 1, **WORDS}, [2], 'known: 0, 1'),
    (
        'a.tsv', 'a\t1\nb\n', {'text_column': 0, 'label_column': 1, **WORDS}, [2],
        'has 1 fields instead of 2'),
    (
        'a.csv', 'a,1\nb,0\n', {'text_column': 0, 'label_column': 5, **WORDS}, [1, 2],
        'has 2 fields instead of 6'),
    ('a.txt', 'one line', {}, [None], 'cannot be divided'),
    ('a.docx', 'PK', {}, [None], 'known: .jsonl, .json'),
    ('a.jsonl', '{"text": "a", "label": 3}', {'labels': {3: None}}, [None], 'no rows to train on')]


@pytest.mark.parametrize(
    'file, content, settings, numbers, words', DAMAGE, ids=lambda v: str(v)[:24])
def test_damage_is_named_by_row(tmp_path, file, content, settings, numbers, words):
    (tmp_path/file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DatasetError) as caught:
        load_rows(Data(source=str(tmp_path/file), **settings))
    assert [number for number, _ in caught.value.problems] == numbers
    assert words in str(caught.value)


def test_missing_places_are_named(tmp_path):
    with pytest.raises(DatasetError, match='no path here'): load_rows(Data(source='none.jsonl'))
    with pytest.raises(DatasetError, match=r'one file train\.\*'):
        load_rows(Data(source=str(tmp_path)))
    for ending in ('csv', 'jsonl'): jsonl(tmp_path/f'train.{ending}', [PAIR])
    with pytest.raises(DatasetError, match='found 2'): load_rows(Data(source=str(tmp_path)))


def test_a_row_of_a_megabyte_is_a_row(tmp_path):
    source = jsonl(tmp_path/'a.jsonl', [{'text': 'word ' * 200_000}, {'text': 'b'}])
    assert len(load_rows(Data(source=source, test_share=0.0))[0]) == 2


def anything(chance, depth=0):
    "A random JSON value, with the words that the formats know in unusual places."
    words = [
        'messages', 'role', 'content', 'user', 'assistant', 'from', 'value', 'human', 'gpt', 'text',
        'label', 'prompt', 'completion', 'tools', 'instruction', 'output', 'input', 'conversations',
        'type', 'tool_calls', 'chosen', 'rejected', 'family', '', '\ud800', '\u2028']
    kind = chance.randrange(8 if depth < 4 else 5)
    if kind < 2: return chance.choice(words)
    if kind == 2: return chance.choice([0, -1, 1.5, 10**30, True])
    if kind in (3, 4): return chance.choice([None, '', ' ', 'word'])
    if kind == 5: return [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(words): anything(chance, depth + 1) for _ in range(chance.randrange(6))}


def test_random_rows_raise_nothing_but_dataset_errors(tmp_path):
    chance, accepted = random.Random(0), 0
    for round in range(1500):
        settings = {
            'format': chance.choice(
                [
                    'auto', 'auto', 'messages', 'prompt_completion', 'alpaca', 'classification',
                    'text'])}
        rows = [
            anything(chance, depth=0 if chance.random() < 0.3 else 1)
            for _ in range(chance.randrange(1, 4))]
        source = jsonl(tmp_path/f'{round % 2}.jsonl', rows)
        try: accepted += bool(load_rows(Data(source=source, test_share=0.0, **settings))[0])
        except DatasetError as error: assert error.problems
    assert accepted


# Splitting and tokens

def test_splits_conserve_rows_and_keep_copies_together():
    chance = random.Random(2)
    for _ in range(100):
        rows = [
            {'text': str(chance.randrange(30)), 'family': str(n)}
            for n in range(chance.randrange(20, 80))]
        train, test = split_rows(rows, chance.uniform(0.2, 0.8), chance.randrange(9))
        assert sorted(row['family'] for row in train + test) == sorted(
            row['family'] for row in rows)
        assert not {row['text'] for row in train} & {row['text'] for row in test}


def test_the_mask_covers_every_answer_and_its_stop_token(tokenizer):
    row = {
        'messages': [
            {'role': 'system', 'content': 'Be kind.'}, ASK, ANSWER, ASK,
            {'role': 'assistant', 'content': 'No'}]}
    ids, mask = assistant_mask(row, tokenizer)
    assert (
        tokenizer.decode([i for i, on in zip(ids, mask) if on])
        == ' Ho<|endoftext|> No<|endoftext|>')
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(row['messages'], tokenize=False)
    assert isinstance(token_view(row, tokenizer), TokenView)
    assert '<script>' not in token_view(
        {'messages': [{'role': 'user', 'content': '<script>'}, ANSWER]}, tokenizer)._repr_html_()


def test_the_mask_is_the_one_that_trl_trains_on(tokenizer, tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer
    rows = load_rows(Data(source='sample-conversations'))[1][:8]
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(asset('tiny-base')), processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        args=SFTConfig(
            str(tmp_path), assistant_only_loss=True, use_cpu=True, bf16=False, report_to='none'))
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(len(rows))])
    for row, ids, labels in zip(rows, batch['input_ids'].tolist(), batch['labels'].tolist()):
        ours, mask = assistant_mask(row, tokenizer)
        assert ids[:len(ours)] == ours
        assert [label != -100 for label in labels] == [
            *map(bool, mask), *[False] * (len(ids) - len(ours))]


@pytest.mark.parametrize(
    'old, new, words',
    [
        ('<|endoftext|>', '[END]', 'which is no special token of this tokenizer'),
        (
            '{%- for m in messages -%}',
            "{{ raise_exception('roles must alternate') }}{%- for m in messages -%}",
            'roles must alternate')])
def test_templates_that_cannot_train_are_refused(old, new, words):
    from transformers import AutoTokenizer
    broken = AutoTokenizer.from_pretrained(asset('tiny-base'))
    assert old in broken.chat_template
    broken.chat_template = broken.chat_template.replace(old, new)
    with pytest.raises(DatasetError, match=words): check_rows([{'messages': [ASK, ANSWER]}], broken)


def test_rows_that_teach_nothing_are_named(tokenizer):
    long = {'messages': [{'role': 'user', 'content': 'word ' * 300}, ANSWER]}
    with pytest.raises(DatasetError, match='row 2: has an answer that ends at token'):
        check_rows([{'messages': [ASK, ANSWER]}, long], tokenizer, 64)
    marked = {'messages': [{'role': 'user', 'content': 'Say <|assistant|>'}, ANSWER]}
    with pytest.raises(DatasetError, match='row 1: has'): check_rows([marked], tokenizer)


def test_every_answer_ends_with_the_stop_token(tokenizer):
    "Where a template ends the last answer alone, or none, each answer is a row with an end."
    import copy
    twice = {'messages': [ASK, ANSWER, ASK, {'role': 'assistant', 'content': 'Two'}]}
    whole = check_rows([twice], tokenizer)
    assert (whole.rows, whole.sequences) == (1, 1)
    end = " + '<|endoftext|>'"
    assert end in tokenizer.chat_template
    for changed in '', " + ('<|endoftext|>' if loop.last else '')":
        other = copy.deepcopy(tokenizer)
        other.chat_template = tokenizer.chat_template.replace(end, changed)
        report = check_rows([twice], other)
        assert (report.rows, report.sequences) == (1, 2)
        for ids, mask, ends, _ in report.tokenised[0]:
            assert ends == [len(ids) - 1]
            assert (ids[-1], mask[-1]) == (tokenizer.eos_token_id, 1)


def test_formats_are_told_apart_by_their_columns():
    assert detect_format({'messages': [], 'prompt': ''}, Data(source='x')) == 'messages'
    labelled = Data(source='x', labels={0: 'bad'})
    assert detect_format({'text': '', 'label': 0}, labelled) == 'classification'
    assert (
        detect_format(
            {'chosen': '', 'rejected': '', 'prompt': ''},
            Data(source='x', completion_column='chosen'))
        == 'prompt_completion')


# Several files

STARS = {
    'format': 'classification', 'text_column': 'text', 'label_column': 'stars', 'test_share': 0.0,
    'labels': {1: 'bad', 2: 'bad', 3: None, 4: 'good', 5: 'good'}}


def test_a_pattern_reads_its_files_in_the_order_of_their_names(tmp_path, monkeypatch):
    (tmp_path/'reviews').mkdir()
    for name, text in (
        ('b.csv', 'stars,text\n1,Four\n3,Nothing\n'),
        ('a.csv', 'text,stars\nOne,5\nTwo,4.0\n"Three, or",  2\n'),
        ('c.csv', 'text,stars\nHm,3\n')
    ):
        (tmp_path/'reviews'/name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for source in 'reviews/*.csv', str(tmp_path/'reviews'/'?.csv'), 'reviews/[abc].csv':
        rows, test = load_rows(Data(source=source, **STARS))
        assert [row['messages'][1]['content'] for row in rows] == ['good', 'good', 'bad', 'bad']
        assert test == []
        assert [row['messages'][0]['content'].partition('\n')[2] for row in rows] == [
            'One', 'Two', 'Three, or', 'Four']
    (tmp_path/'a*').mkdir()  # A name that looks like a pattern and is there
    (tmp_path/'a*'/'train.csv').write_text('text,stars\nOne,5\n')
    assert len(load_rows(Data(source='a*', **STARS))[0]) == 1


@pytest.mark.parametrize(
    'second, words',
    [
        (
            'text,rating\nx,5\n',
            r'b\.csv: line 1: has the columns rating, text, and a\.csv has stars, text'),
        ('text,stars,more\nx,5,1\n', r'b\.csv: line 1: has the columns more, stars, text'),
        ('text,stars\nx,\n', r"b\.csv: line 2: the label 'stars' is missing"),
        ('text,stars\nx,4\ny,4.5\n', r'b\.csv: line 3: the label 4\.5 is not in data\.labels'),
        ('text,stars\n"x,4\n', r'b\.csv: line 2: starts a row that is not CSV'),
        ('text,stars\nx,nan\n', r'b\.csv: line 2: the label nan is not in data\.labels'),
        ('', r'b\.csv: the file is empty')])
def test_a_pattern_names_the_file_and_the_line_at_fault(tmp_path, second, words):
    (tmp_path/'a.csv').write_text('text,stars\nx,5\n')
    (tmp_path/'b.csv').write_text(second)
    with pytest.raises(DatasetError, match=words):
        load_rows(Data(source=str(tmp_path/'*.csv'), **STARS))
    with pytest.raises(DatasetError, match='no file has a name like this'):
        load_rows(Data(source=str(tmp_path/'*.tsv'), **STARS))


@pytest.mark.parametrize('prompts, words', [
    (1, '40 rows share one prompt'), (2, '40 rows share 2 prompts')])
def test_rows_that_share_their_prompts_cannot_be_divided_and_say_so(prompts, words):
    rows = [
        {'messages': [
            {'role': 'user', 'content': f'Question {number % prompts}'},
            {'role': 'assistant', 'content': f'Answer {number}'}]}
        for number in range(40)]
    with pytest.raises(ValueError, match=f'{words}.*set data.test_share to 0'):
        split_rows(rows, 0.1)
    assert split_rows(rows, 0.0) == (rows, [])


def test_a_table_without_labels_is_one_sentence(tmp_path):
    (tmp_path/'a.csv').write_text('text,team\n' + 'Fine.,red\n' * 150)
    data = Data(
        source=str(tmp_path/'a.csv'), format='classification', labels={'red': 'r'},
        question='Team?')
    words = "has no column for the label: name it with data.label_column.*known: text, team"
    with pytest.raises(DatasetError, match=words) as refused: load_rows(data)
    assert str(refused.value).count('for the label') == 1
