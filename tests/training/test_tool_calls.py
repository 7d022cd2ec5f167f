"""Rows that call tools: read from every usual form, refused where they are wrong, and trained under
templates that this project did not write: the calls and their ends, and nothing else."""
import copy
import json
import random
import re
from pathlib import Path

import pytest
from trouble import fine_tune, losses

from llm_workbook.config.recipe import Data, Recipe
from llm_workbook.files import asset
from llm_workbook.model.architecture import load_tokenizer
from llm_workbook.training.conversation import DatasetError, conversation
from llm_workbook.training.data import load_rows
from llm_workbook.training.fine_tune import check_recipe
from llm_workbook.training.preferences import tokenise_pairs
from llm_workbook.training.tokens import ChatFormat, answer_tokens, check_rows, end_tokens

TRL = Path(pytest.importorskip('trl').__file__).parent/'chat_templates'
PUBLISHED = Path(__file__).parents[3]/'shared/data/tokenizers'  # Qwen's, where they are at hand
PLAIN = Data(source='mine.jsonl')
MARK = re.compile(
    r'<\|[^|\s<>]+\|?>|<｜[^｜]+｜>|</?s>|\[/?(?:INST|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS)\]'
    r'|\[gMASK\]|<sop>|<[a-z_]+\|>|<(?:start_of_turn|end_of_turn)>')
# Templates of TRL that write tools; all others are refused
WRITE = (
    'gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5 glm4moe gptoss lfm2_2_5 lfm2_2_5_v2 '
    'lfm2_2_5_vl lfm2_v2 llama3_1 llama3_2 muse_glimmer nemotron_3_5_lightning nemotron_3_nano '
    'nemotron_3_super nemotron_3_ultra qwen2_5 qwen3 qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8 '
    'qwen3_instruct_2507 qwen3_vl').split()
LEAVE_OUT = (
    'cohere cohere2 deepseek_r1_distill gemma gemma3 idefics3 llama3 llava_next phi3 phi3_5 '
    'qwen2_5_vl smolvlm').split()


# Rows

def tool(name, key):
    return {'type': 'function', 'function': {
        'name': name, 'description': f'Schema of {name}.', 'parameters': {
            'type': 'object', 'required': [key],
            'properties': {key: {'type': 'string', 'description': 'Schema of it.'},
                           'days': {'type': 'integer', 'description': 'Schema of days.'}}}}}


TOOLS = [tool('weather_of', 'town'), tool('clock', 'zone')]
ASK, MORE = ({'role': 'user', 'content': text} for text in ('Hi?', 'More?'))


def call(name, number, **arguments):
    function = {'name': name, 'arguments': arguments}
    return {'id': f'call0000{number}', 'type': 'function', 'function': function}


def calls(*made, say=''): return {'role': 'assistant', 'content': say, 'tool_calls': list(made)}


def gives(number, name, text):
    return {'role': 'tool', 'tool_call_id': f'call0000{number}', 'content': text, 'name': name}


def says(text): return {'role': 'assistant', 'content': text}


WEATHER = calls(call('weather_of', 1, town='Bremen', days=2)), gives(1, 'weather_of', 'given rain')
CLOCK = calls(call('clock', 2, zone='Pacific')), gives(2, 'clock', 'given noon')
CONVERSATIONS = {
    'one call': [ASK, *WEATHER, says('Wet.')],
    'the call alone': [ASK, WEATHER[0]],
    'a call after a call': [ASK, *WEATHER, *CLOCK, says('Wet.')],
    'two questions': [ASK, *WEATHER, says('Wet.'), MORE, *CLOCK, says('Noon.')],
    'a system turn': [{'role': 'system', 'content': 'Be kind.'}, ASK, *WEATHER, says('Wet.')],
    'no call': [ASK, says('Wet.')]}
TOGETHER = [ASK, calls(*WEATHER[0]['tool_calls'], *CLOCK[0]['tool_calls']), WEATHER[1], CLOCK[1],
            says('Wet.')]
BESIDE = [ASK, WEATHER[0] | {'content': 'Let me look.'}, WEATHER[1], says('Wet.')]


def row_of(turns, tools=TOOLS): return conversation({'messages': turns, 'tools': tools}, PLAIN)


def with_changed(turns, place, **fields):
    return [turn | fields if number == place else turn for number, turn in enumerate(turns)]


@pytest.fixture(scope='module')
def tokenizer_of_qwen(): return of_trl('qwen3')


def as_sharegpt():
    "The first conversation as LLaMA-Factory has it, whose calls have no ids."
    function = WEATHER[0]['tool_calls'][0]['function']
    turns = [('human', 'Hi?'), ('function_call', json.dumps(function)),
             ('observation', 'given rain'), ('gpt', 'Wet.')]
    return {'conversations': [{'from': speaker, 'value': value} for speaker, value in turns],
            'tools': json.dumps([tool['function'] for tool in TOOLS])}


def without_ids(row):
    turns = [{key: value for key, value in turn.items() if key != 'tool_call_id'}
             for turn in row['messages']]
    for turn in turns:
        if 'tool_calls' not in turn: continue
        turn['tool_calls'] = [{key: value for key, value in one.items() if key != 'id'}
                              for one in turn['tool_calls']]
    return row | {'messages': turns}


def test_every_usual_form_becomes_the_same_row():
    turns = CONVERSATIONS['one call']
    row = row_of(turns)
    assert row == {'messages': turns, 'tools': TOOLS}
    function = WEATHER[0]['tool_calls'][0]['function']
    text = [WEATHER[0]['tool_calls'][0] | {
        'function': function | {'arguments': json.dumps(function['arguments'])}}]
    for made in (
            row_of(turns, json.dumps(TOOLS)), row_of(turns, [json.dumps(one) for one in TOOLS]),
            row_of(turns, [one['function'] for one in TOOLS]),
            row_of(turns, [{'type': 'function'} | one['function'] for one in TOOLS]),
            row_of(with_changed(turns, 1, tool_calls=text)),
            row_of(with_changed(turns, 1, tool_calls=json.dumps(text), content=None)),
            row_of(with_changed(turns, 2, name=None)),
            conversation({'prompt': turns[:1], 'completion': turns[1:], 'tools': TOOLS}, PLAIN)):
        assert made == row
    assert conversation(as_sharegpt(), PLAIN) == without_ids(row)
    old = [ASK, {'role': 'assistant', 'content': None, 'function_call': function},
           {'role': 'function', 'name': 'weather_of', 'content': 'given rain'}, says('Wet.')]
    assert row_of(old) == without_ids(row)
    assert 'tools' not in row_of(turns, None) and 'tools' not in row_of(turns, '')


@pytest.mark.parametrize('turns, tools, why', [
    ([ASK, calls({})], TOOLS, 'turn 2: call 1 has no name of a function'),
    ([ASK, calls('weather_of')], TOOLS, "turn 2: call 1 'weather_of' must be an object"),
    ([ASK, calls({'name': 'clock'})], TOOLS, r'\(clock\) has no arguments: write {} where'),
    ([ASK, calls({'name': 'clock', 'arguments': '{"zone": '})], TOOLS, 'cannot be read as JSON'),
    ([ASK, calls({'name': 'clock', 'arguments': '"{}"'})], TOOLS, 'written as JSON again'),
    ([ASK, calls({'name': 'clock', 'arguments': ['CET']})], TOOLS, 'must be a JSON object'),
    ([ASK, calls({'name': 'clok', 'arguments': {}})], TOOLS, "not offer; did you mean 'clock'"),
    ([ASK, {'role': 'function_call', 'content': ''}], TOOLS, 'turn 2: the call cannot be read'),
    ([ASK, {'role': 'assistant', 'tool_calls': 5}], TOOLS, 'turn 2: 5 is no list of calls'),
    ([ASK, {'role': 'assistant', 'tool_calls': '[' * 10**5}], TOOLS, 'cannot be read as JSON'),
    ([ASK, '{"role": "user"'], TOOLS, 'turn 2 is str, not role and content'),
    (['[' * 10**5], TOOLS, 'turn 1 is str, not role and content'),
    ([ASK | {'tool_calls': [call('clock', 1)]}, says('a')], TOOLS, 'turn 1 of the user calls'),
    ([ASK, WEATHER[1], says('a')], TOOLS, "turn 2 answers a call 'call00001' that no turn before"),
    ([ASK, WEATHER[0], CLOCK[1], says('a')], TOOLS, "turn 3 answers a call 'call00002' that no"),
    ([ASK, *WEATHER, WEATHER[1], says('a')], TOOLS, 'turn 4 answers a call'),
    ([ASK, WEATHER[0], WEATHER[1] | {'name': 'clock'}, says('a')], TOOLS, 'turn 3 answers a call'),
    ([ASK, *WEATHER], TOOLS, 'ends with a turn of the tool, so there is no answer'),
    ([ASK, calls(say=' ')], TOOLS, r'turn 2 \(assistant\) is empty'),
    ([ASK, says('a')], '[{"name": ', "'tools' cannot be read as JSON"),
    ([ASK, says('a')], {'name': 'clock'}, "'tools' is dict, not a list of tools"),
    ([ASK, says('a')], [{}], 'tool 1 has no name of a function'),
    ([ASK, says('a')], [{'name': 'clock', 'parameters': 'a zone'}], 'tool 1: parameters cannot be'),
    ([ASK, says('a')], ['clock'], 'tool 1 cannot be read as JSON'),
    ([ASK, says('a')], [{'name': 'clock', 'since': PLAIN}], 'cannot be written as JSON')])
def test_what_is_surely_wrong_is_refused(turns, tools, why):
    with pytest.raises(ValueError, match=why): row_of(turns, tools)


@pytest.mark.parametrize('name', ['input_schema', 'inputSchema'])
def test_schemas_of_anthropic_and_mcp_are_written_as_parameters(name):
    "A template that looks for `parameters` would write none of them."
    turns = CONVERSATIONS['one call']
    theirs = [{name if key == 'parameters' else key: value
               for key, value in one['function'].items()} for one in TOOLS]
    assert row_of(turns, theirs) == row_of(turns, json.dumps(theirs)) == row_of(turns)
    assert row_of(turns, [one | {'parameters': None} for one in theirs]) == row_of(turns)
    with pytest.raises(ValueError, match='tool 1 has its schema as parameters and as input_schema'):
        row_of(turns, [TOOLS[0]['function'] | {'input_schema': {}}])


def test_what_works_is_not_refused():
    "Schemas in the text of the system, an answer for two calls, an empty answer, no arguments."
    assert row_of([ASK, *WEATHER, says('a')], [])['messages'][2]['name'] == 'weather_of'
    first_alone = [ASK, TOGETHER[1], WEATHER[1], says('a')]
    assert len(row_of(first_alone)['messages']) == 4
    assert row_of([ASK, WEATHER[0], WEATHER[1] | {'content': ''}, says('a')])
    for nothing in (None, '', {}, '{}'):
        bare = [ASK, calls({'function': {'name': 'clock', 'arguments': nothing}})]
        assert row_of(bare)['messages'][1]['tool_calls'][0]['function']['arguments'] == {}
    turned = [ASK, TOGETHER[1], CLOCK[1], WEATHER[1], says('a')]
    assert [turn.get('name') for turn in row_of(turned)['messages']][2:4] == ['clock', 'weather_of']


def test_answers_without_ids_belong_to_the_calls_of_the_last_turn():
    both = without_ids({'messages': TOGETHER[:3] + [*CLOCK, says('a')]})['messages']
    bare = [{key: value for key, value in turn.items() if key != 'name'} for turn in both]
    names = [turn['name'] for turn in row_of(bare)['messages'] if turn['role'] == 'tool']
    assert names == ['weather_of', 'clock']


def places(value, path=()):
    "Every place in a row."
    yield path
    if not isinstance(value, (dict, list)): return
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inside: yield from places(part, (*path, key))


def test_random_damage_raises_nothing_but_value_errors(tokenizer_of_qwen):
    chance, row = random.Random(0), row_of(CONVERSATIONS['two questions'])
    every, accepted = [*places(row)][1:], 0
    for _ in range(400):
        damaged = copy.deepcopy(row)
        *path, last = chance.choice(every)
        inside = damaged
        for key in path: inside = inside[key]
        inside[last] = chance.choice([None, '', 'x', 0, 1.5, True, [], ['x'], [None], {}, {'x': 1}])
        try: check_rows([conversation(damaged, PLAIN)], tokenizer_of_qwen, length=9999)
        except ValueError: continue
        accepted += 1
    assert 80 < accepted < 320


def test_a_text_that_offers_tools_is_refused():
    with pytest.raises(ValueError, match="which a text cannot call: take 'tools' out"):
        conversation({'text': 'Once.', 'tools': TOOLS}, PLAIN)
    assert conversation({'text': 'Once.', 'tools': []}, PLAIN) == {'text': 'Once.'}


# Files

def unequal_rows():
    "Rows whose calls have unequal arguments, and rows without calls or tools."
    maybe = tool('clock', 'zone')
    maybe['function']['parameters']['required'] = ['zone', 'day']
    return [
        {'messages': CONVERSATIONS['one call'], 'tools': TOOLS},
        {'messages': [ASK, calls(call('clock', 1, zone='CET', day=None))], 'tools': [maybe]},
        {'messages': [MORE, says('Yes.')], 'tools': None}]


def write_rows(rows, folder, kind):
    import datasets
    import pyarrow
    import pyarrow.parquet
    file = folder/f'rows.{"parquet" if kind == "texts" else kind}'
    if kind == 'texts':  # As `datasets` writes its type Json
        rows = [{'messages': [json.dumps(turn) for turn in row['messages']],
                 'tools': json.dumps(row['tools'])} for row in rows]
    if kind == 'jsonl': file.write_text('\n'.join(map(json.dumps, rows)))
    elif kind == 'json': file.write_text(json.dumps(rows))
    elif kind != 'saved': pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else: datasets.Dataset.from_list(rows).save_to_disk(file)
    return Data(source=str(file), test_share=0.0, format='messages')


@pytest.mark.parametrize('kind', ['jsonl', 'parquet', 'saved', 'texts'])
def test_what_arrow_fills_in_is_no_argument_and_no_schema(kind, tmp_path):
    """A null stays where the tool requires its argument: nothing else can have been meant. All
    others are those of Arrow, which gives every struct the fields of all rows."""
    [first, second, third] = load_rows(write_rows(unequal_rows(), tmp_path, kind))[0]
    assert first['messages'][1] == WEATHER[0]
    assert second['messages'][1]['tool_calls'][0]['function']['arguments'] == {
        'zone': 'CET', 'day': None}
    assert third == {'messages': [MORE, says('Yes.')]}
    assert first['tools'] == TOOLS
    assert {*second['tools'][0]['function']['parameters']['properties']} == {'zone', 'days'}


def test_arguments_as_json_are_taken_as_they_are(tmp_path):
    text = '{"town": "Bremen", "days": null}'
    turns = with_changed(CONVERSATIONS['one call'], 1, tool_calls=[
        {'id': 'call00001', 'function': {'name': 'weather_of', 'arguments': text}}])
    for kind in ('jsonl', 'parquet'):
        source = write_rows([{'messages': turns, 'tools': json.dumps(TOOLS)}], tmp_path, kind)
        [row] = load_rows(source)[0]
        found = row['messages'][1]['tool_calls'][0]['function']['arguments']
        assert found == {'town': 'Bremen', 'days': None}


def test_a_date_of_parquet_is_no_argument(tmp_path):
    from datetime import date
    turns = [ASK, calls(call('clock', 1, zone=date(2026, 1, 1)))]
    with pytest.raises(DatasetError, match='row 1: turn 2: call 1 .* cannot be written as JSON'):
        load_rows(write_rows([{'messages': turns}], tmp_path, 'parquet'))


def test_rows_with_the_same_question_stay_together(tmp_path):
    rows = [{'messages': [{'role': 'user', 'content': str(number // 2)},
                          calls(call('clock', 1, zone=str(number)))], 'tools': TOOLS}
            for number in range(20)]
    train, held = load_rows(write_rows(rows, tmp_path, 'jsonl').model_copy(
        update={'test_share': 0.3}))
    asked = [{row['messages'][0]['content'] for row in side} for side in (train, held)]
    assert len(held) == 6 and not asked[0] & asked[1]


def test_ids_of_calls_make_no_question_of_their_own(tmp_path):
    made = [call('clock', number % 9, zone=str(number // 2)) for number in range(20)]
    rows = [{'messages': [ASK, calls(one), gives(one['id'][-1], 'clock', 'given'), says('Yes.')]}
            for one in made]
    train, held = load_rows(write_rows(rows, tmp_path, 'jsonl').model_copy(
        update={'test_share': 0.3}))
    zones = [{row['messages'][1]['tool_calls'][0]['function']['arguments']['zone'] for row in side}
             for side in (train, held)]
    assert len(held) == 6 and not zones[0] & zones[1]


# Templates

def tokenizer_of(template):
    "The packaged tokenizer with a template, whose marks are special tokens."
    tokenizer = load_tokenizer('tiny-base')
    tokenizer.add_special_tokens({'bos_token': '<bos_>', 'eos_token': '<eos_>'})
    tokenizer.add_tokens(sorted(set(MARK.findall(template))), special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.model_max_length = 100_000
    return tokenizer


def of_trl(name): return tokenizer_of((TRL/f'{name}.jinja').read_text())


def stretches(ids, mask, tokenizer):
    "What trains, stretch by stretch, as text."
    found, before = [], 0
    for number, trains in zip(ids, mask):
        if trains and not before: found.append([])
        if trains: found[-1].append(number)
        before = trains
    return [tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in found]


def trained(row, tokenizer):
    "What trains of a row, and the tokens at which answers end."
    texts, ends = [], []
    for tokens in answer_tokens(row, ChatFormat(tokenizer)):
        texts += stretches(tokens.ids, tokens.mask, tokenizer)
        assert all(tokens.mask[end] for end in tokens.ends)
        ends += [tokens.ids[end] for end in tokens.ends]
    return texts, ends


def check_calls(turns, tokenizer, tools=TOOLS):
    "Calls train once with their arguments and their ends; schemas and given answers do not."
    texts, ends = trained(row_of(turns, tools), tokenizer)
    answers = [turn for turn in turns if turn['role'] == 'assistant']
    assert len(ends) == len(answers) == len(texts)
    assert set(ends) <= set(end_tokens(tokenizer))
    for turn, text in zip(answers, texts):
        assert turn['content'] in text
        for one in turn.get('tool_calls', ()):
            assert one['function']['name'] in text
            words = map(str, one['function']['arguments'].values())
            assert all(text.count(word) == 1 for word in words)
            assert '\\"' not in text and "{'" not in text
    everything = ''.join(texts)
    silent = 'Hi?', 'More?', 'Be kind', 'Schema', 'given'
    assert not [word for word in silent if word in everything]


def test_the_lists_name_every_template():
    names = {path.stem for path in TRL.glob('*.jinja') if not path.stem.endswith('_training')}
    others = {'deepseekv3', 'lfm2', 'diffusion_gemma'}  # Write calls, or schemas, alone; no words
    assert names == {*WRITE, *LEAVE_OUT, *others}


@pytest.mark.parametrize('name', WRITE)
def test_calls_and_their_ends_train_under_every_template_of_trl(name):
    tokenizer = of_trl(name)
    for turns in CONVERSATIONS.values(): check_calls(turns, tokenizer)


@pytest.mark.parametrize('name', LEAVE_OUT)
def test_a_template_that_leaves_tools_out_is_refused(name):
    tokenizer = of_trl(name)
    why = "offers tools, which the chat template leaves out: set data.template to 'chatml'"
    with pytest.raises(DatasetError, match=why):
        check_rows([row_of(CONVERSATIONS['no call'])], tokenizer)
    with pytest.raises(DatasetError, match='calls tools, which the chat template does not write'):
        check_rows([row_of(CONVERSATIONS['one call'], None)], tokenizer)


def test_what_the_errors_of_a_base_without_tools_say_leads_to_a_template_that_works():
    rows = [{'messages': [ASK, says('Ho')]}, row_of(CONVERSATIONS['one call'])]
    with pytest.raises(DatasetError, match="row 2: offers tools, .* to 'chatml', to 'plain' where"):
        check_rows(rows, load_tokenizer('tiny-base'))
    with pytest.raises(ValueError, match=r"'chatml' needs the token .*: set it to 'plain'"):
        load_tokenizer('tiny-base', template='chatml')
    assert check_rows(rows, load_tokenizer('tiny-base', template='plain')).trained > 0


@pytest.mark.parametrize('source', ['tiny-base', 'qwen2.5'])
def test_the_packaged_plain_template_writes_tools(source):
    place = source if source == 'tiny-base' else PUBLISHED/source
    if source != 'tiny-base' and not place.is_dir():
        pytest.skip('the published tokenizers are not at hand')
    tokenizer = load_tokenizer(place, template='plain')
    for turns in (*CONVERSATIONS.values(), TOGETHER, BESIDE):
        for tools in TOOLS, None: check_calls(turns, tokenizer, tools)


@pytest.mark.parametrize(
    'name', [name for name in WRITE if (TRL/f'{name}_training.jinja').exists()])
def test_the_marks_of_trl_are_the_same_tokens(name):
    """TRL's template with `{% generation %}` as the oracle. It also marks the line break behind an
    end, and the assistant's mark or an empty thought before an answer where those are written.
    An answer of gpt-oss that another question follows ends in `<|end|>`; to write, it is
    `<|return|>`."""
    tokenizer = of_trl(f'{name}_training')
    head = re.compile(r'^(?:<\|start\|>assistant)?(?:\n?<think>\s*</think>)?\s*')

    def bare(texts):
        texts = [text.replace('.<|end|>', '.<|return|>') for text in texts]
        return [head.sub('', text).removeprefix('</think>').strip() for text in texts]

    for name, turns in CONVERSATIONS.items():
        row = row_of(turns)
        marked = tokenizer.apply_chat_template(
            row['messages'], tools=row['tools'], return_dict=True,
            return_assistant_tokens_mask=True)
        theirs = stretches(marked['input_ids'], marked['assistant_masks'], tokenizer)
        unmarked = re.sub(r'{%-?\s*(?:end)?generation\s*-?%}', '', tokenizer.chat_template)
        ours = [trained(row, one)[0] for one in (tokenizer_of(unmarked), tokenizer)]
        assert bare(ours[0]) == bare(ours[1]) == bare(theirs), name


@pytest.mark.parametrize('family', ['qwen2.5', 'qwen3'])
def test_published_tokenizers_write_calls_as_they_are(family):
    if not (PUBLISHED/family).is_dir(): pytest.skip('the published tokenizers are not at hand')
    tokenizer = load_tokenizer(PUBLISHED/family)
    for turns in CONVERSATIONS.values(): check_calls(turns, tokenizer)
    [text], [end] = trained(row_of(CONVERSATIONS['the call alone']), tokenizer)
    assert text.removeprefix('<think>\n\n</think>\n\n') == (
        '<tool_call>\n{"name": "weather_of", "arguments": {"town": "Bremen", "days": 2}}\n'
        '</tool_call><|im_end|>')
    assert tokenizer.decode([end]) == '<|im_end|>'


# Calls that stand as text, as in the sets of Hermes

def in_marks(kind, values, write):
    return '\n'.join(f'<{kind}>\n{write(value)}\n</{kind}>' for value in values)


def as_hermes(turns, write=json.dumps):
    "Write calls and answers as text; several answers to the calls of a turn come in one."
    speakers = {'system': 'system', 'user': 'human', 'assistant': 'gpt', 'tool': 'tool'}
    written = []
    for turn in turns:
        text = turn['content']
        made = [one['function'] for one in turn.get('tool_calls', ())]
        if made: text = f'{text}\n{in_marks("tool_call", made, write)}'.strip()
        if turn['role'] == 'tool':
            text = in_marks('tool_response', [text], str)
            if written[-1]['from'] == 'tool': text = written.pop()['value'] + text
        written.append({'from': speakers[turn['role']], 'value': text})
    return written


def of_hermes(turns, write=json.dumps, **columns):
    return conversation({'conversations': as_hermes(turns, write)} | columns, PLAIN)


ANSWERED = {name: turns for name, turns in CONVERSATIONS.items()
            if any(turn['role'] == 'tool' for turn in turns)} | {
    'calls at once': TOGETHER, 'a text beside a call': BESIDE}


@pytest.mark.parametrize('write', [json.dumps, str], ids=['json', 'python'])
@pytest.mark.parametrize('name', ANSWERED)
def test_calls_as_text_are_those_that_were_parsed(name, write):
    row = without_ids(row_of(ANSWERED[name]))
    assert of_hermes(ANSWERED[name], write, tools=json.dumps(TOOLS)) == row


@pytest.mark.parametrize('family', ['qwen2.5', 'qwen3'])
def test_calls_as_text_have_the_masks_of_parsed_calls(family):
    "And of these the tokens are those of the text as it stands, where nothing parses it."
    if not (PUBLISHED/family).is_dir(): pytest.skip('the published tokenizers are not at hand')
    tokenizer = load_tokenizer(PUBLISHED/family)
    chat = ChatFormat(tokenizer)
    for name, turns in ANSWERED.items():
        spoken = of_hermes(turns)
        assert answer_tokens(spoken, chat) == answer_tokens(row_of(turns, None), chat), name
        for turn in spoken['messages']:  # As a reader does that knows no calls
            for one in turn.pop('tool_calls', ()):
                text = in_marks('tool_call', [one['function']], json.dumps)
                turn['content'] = f'{turn["content"]}\n{text}'.strip()
        plain = [tokens.ids for tokens in answer_tokens(spoken, chat)]
        assert plain == [tokens.ids for tokens in answer_tokens(row_of(turns, None), chat)], name


def test_schemas_that_the_system_lists_are_not_offered_twice():
    listed = [{'role': 'system', 'content': f'Call <tools> </tools>: <tools>{TOOLS}</tools>'},
              *CONVERSATIONS['one call']]
    for turns in listed, [*listed[:2], says('Wet.')]:
        assert 'tools' not in of_hermes(turns, tools=json.dumps(TOOLS))
        assert 'tools' not in row_of(turns)
    more = [*TOOLS, tool('hour', 'zone')]
    assert row_of(listed, more)['tools'] == more
    with pytest.raises(ValueError, match="turn 3 calls 'weather_of', which 'tools' does not offer"):
        of_hermes(listed, tools=TOOLS[1:])


def test_a_call_as_text_that_no_tool_answers_stays_text():
    turns = CONVERSATIONS['the call alone']
    [_, answer] = of_hermes(turns)['messages']
    function = turns[1]['tool_calls'][0]['function']
    assert answer == says(in_marks('tool_call', [function], json.dumps))


@pytest.mark.parametrize('text, why', [
    ('<tool_call>{"name": "clock", "arguments": {}}</tool_call> Wait.', "'Wait.' behind a call"),
    ('<tool_call>{"name": "clock", "arguments": {}}', 'close each call with </tool_call>'),
    ('<tool_call>clock(CET)</tool_call>', r'call 1 cannot be read as JSON .*clock\(CET\)'),
    ('<tool_call>{"arguments": {}}</tool_call>', 'turn 2: call 1 has no name of a function'),
    ('<tool_call>{"name": "clock"}</tool_call>', r'turn 2: call 1 \(clock\) has no arguments'),
    ('<tool_call>[1]</tool_call>', r'turn 2: call 1 \[1\] must be a JSON object'),
    ("<tool_call>{'name': 'clock', 'arguments': {1, 2}}</tool_call>", 'cannot be written as JSON')])
def test_a_call_as_text_that_cannot_be_read_is_refused(text, why):
    turns = [ASK, says(text), gives(1, 'clock', 'noon'), says('Noon.')]
    with pytest.raises(ValueError, match=why): row_of(turns, None)


def test_nulls_of_a_call_as_text_are_no_nulls_of_arrow(tmp_path):
    turns = [ASK, calls(call('clock', 1, zone=None)), CLOCK[1], says('Noon.')]
    rows = [{'conversations': as_hermes(turns)}]
    [row] = load_rows(write_rows(rows, tmp_path, 'parquet'))[0]
    assert row['messages'][1]['tool_calls'][0]['function']['arguments'] == {'zone': None}


# Forms of published templates, in short: Mistral puts the tools before the last question and asks
# for ids of nine letters; Hermes drops a text beside a call, and writes a space before the end; Phi
# prints arguments as they come; DeepSeek joins them to a text
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}
{%- if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}
{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content }}
{{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""
CHATML = """{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}
{%- endif %}{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.tool_calls is defined %}{% for c in m.tool_calls %}{% set f = c.function %}CALL{% endfor %}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
HERMES = CHATML.replace('CALL', (
    "{{ '<tool_call>\n{\"arguments\": ' + (f.arguments | tojson) }}"
    "{{ ', \"name\": \"' + f.name + '\"}\n</tool_call> ' }}"))
PHI = CHATML.replace('CALL', '{"name": "{{ f.name }}", "arguments": {{ f.arguments }}}')
DEEPSEEK = CHATML.replace(
    'CALL', "{{ '<|call|>' + f.name + '<|sep|>' + f.arguments + '<|end_of_call|>' }}")


@pytest.mark.parametrize('template, form', [
    (MISTRAL, 'object'), (HERMES, 'object'), (PHI, 'text'), (DEEPSEEK, 'text')],
    ids=['mistral', 'hermes', 'phi', 'deepseek'])
def test_arguments_are_an_object_in_whichever_form_a_template_reads_them(template, form):
    tokenizer = tokenizer_of(template)
    assert ChatFormat(tokenizer).tool_form == (True, form, '')
    for name, turns in CONVERSATIONS.items():
        if template == MISTRAL and 'system' in name: continue
        check_calls(turns, tokenizer)
    check = check_rows([row_of(CONVERSATIONS['one call'])], tokenizer, length=4000)
    [[tokens]] = check.tokenised
    assert '{"town": "Bremen", "days": 2}' in tokenizer.decode(tokens.ids)


def test_a_template_that_loses_a_part_of_a_row_is_refused():
    beside = row_of(BESIDE)
    with pytest.raises(DatasetError, match="leaves out 'Let me look.', which stands beside a call"):
        check_rows([beside], tokenizer_of(HERMES))
    thought = row_of(with_changed(BESIDE, 1, content='<think>\nHm.\n</think>\n\n'))
    with pytest.raises(DatasetError, match="leaves out 'Hm.', which stands beside a call"):
        check_rows([thought], of_trl('llama3_1'))
    with pytest.raises(DatasetError, match="leaves out 'clock', which is called or offered"):
        check_rows([row_of(TOGETHER)], of_trl('gptoss'))
    first = HERMES.replace('tools | tojson', 'tools[:1] | tojson')
    with pytest.raises(DatasetError, match="leaves out 'clock', which is called or offered"):
        check_rows([row_of(CONVERSATIONS['one call'])], tokenizer_of(first))
    with pytest.raises(DatasetError, match='Mistral|nine letters'):
        long = WEATHER[0]['tool_calls'][0] | {'id': 'call_0123456789'}
        check_rows([row_of([ASK, calls(long)])], tokenizer_of(MISTRAL))


@pytest.mark.parametrize('name', ['qwen2_5', 'qwen3', 'glm4moe', 'lfm2_v2', 'qwen3_8'])
def test_calls_at_once_and_texts_beside_calls_train(name):
    tokenizer = of_trl(name)
    for turns in (TOGETHER, BESIDE): check_calls(turns, tokenizer)


def test_thoughts_before_a_call_train_as_the_template_writes_them():
    turns = with_changed(BESIDE, 1, content='<think>\nHm.\n</think>\n\n')
    row = row_of([*turns[:3], says('<think>\nSo.\n</think>\n\nWet.')])
    [first, _], _ = trained(row, of_trl('qwen3'))
    assert first.startswith('<think>\nHm.\n</think>\n\n<tool_call>')


def test_of_several_templates_that_for_tools_is_tried(tmp_path):
    "Hermes has one for conversations with tools, and Command R too."
    tokenizer = tokenizer_of(HERMES)
    tokenizer.chat_template = {
        'default': CHATML.replace('CALL', ''), 'tool_use': tokenizer.chat_template}
    check_calls(CONVERSATIONS['one call'], tokenizer)
    with pytest.raises(DatasetError, match="leaves out 'weather_of', which is called or offered"):
        check_rows([row_of(CONVERSATIONS['one call'], None)], tokenizer)


def test_the_end_of_a_call_is_a_token_of_its_own_where_the_template_has_one():
    ends = {'gptoss': '<|call|>', 'glm4moe': '<|observation|>', 'gemma4_v5': '<|tool_response>',
            'llama3_1': '<|eot_id|>', 'qwen3': '<|im_end|>'}
    for name, mark in ends.items():
        tokenizer = of_trl(name)
        _, [end] = trained(row_of(CONVERSATIONS['the call alone']), tokenizer)
        assert tokenizer.decode([end]) == mark
        assert end in end_tokens(tokenizer)


def test_a_mark_in_arguments_or_schemas_is_refused():
    tokenizer = of_trl('qwen3')
    inside = row_of([ASK, calls(call('clock', 1, zone='<|im_end|>'))])
    schema = tool('clock', 'zone')
    schema['function']['description'] = 'Ends in <|im_end|>'
    for row in (inside, row_of([ASK, says('Ho')], [schema])):
        with pytest.raises(DatasetError, match=r'has <\|im_end\|> in its text'):
            check_rows([row], tokenizer)


def test_the_packaged_chatml_writes_tools_as_qwen_does():
    ours = of_trl('qwen3_instruct_2507')
    theirs = ours.chat_template
    ours.bos_token = None
    written = {}
    for template in (theirs, (asset('templates')/'chatml.jinja').read_text()):
        ours.chat_template = template
        written[template] = [
            ours.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=asked)
            for turns in (*CONVERSATIONS.values(), TOGETHER, BESIDE) for tools in (TOOLS, None)
            for asked in (False, True)]
    assert len({*map(tuple, written.values())}) == 1
    for turns in (*CONVERSATIONS.values(), TOGETHER, BESIDE): check_calls(turns, ours)


# Runs

SHORT = (  # Few tokens for the small base, which reads 512
    "{% for t in tools or [] %}{{ '<|system|>' + t.function.name + '=' }}"
    "{{ t.function.parameters.properties | list | join(',') }}{% endfor %}"
    "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}"
    "{{ m.content }}{% for c in m.tool_calls %}"
    "{{ '!' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


def short_rows(count):
    zone = {'name': 'clock', 'parameters': {'type': 'object', 'properties': {'zone': {}}}}
    return [{'messages': [{'role': 'user', 'content': f'Time {number}?'},
                          calls(call('clock', 1, zone=str(number))),
                          gives(1, 'clock', f'noon {number}'), says(f'Noon {number}.')],
             'tools': [zone]} for number in range(count)]


@pytest.fixture
def recipe(tmp_path):
    (tmp_path/'tools.jinja').write_text(SHORT)
    (tmp_path/'rows.jsonl').write_text('\n'.join(map(json.dumps, short_rows(24))))
    return Recipe(
        name='tools', model={'source': 'tiny-base'}, method={'kind': 'lora'},
        data={'source': str(tmp_path/'rows.jsonl'), 'template': str(tmp_path/'tools.jinja')},
        precision={'compute': 'float32'}, batch={'micro': 1, 'length': 128},
        optimizer={'steps': 3, 'learning_rate': 3e-3, 'warmup': 0.0},
        cluster={'processes': 1}, sharding={'strategy': 'none'})


def label_texts(row, recipe):
    tokenizer = load_tokenizer('tiny-base', template=recipe.data.template)
    return stretches(row['input_ids'], [label != -100 for label in row['labels']], tokenizer)


def test_a_recipe_reads_rows_with_calls(recipe):
    rows, held = check_recipe(recipe)
    assert (len(rows), len(held)) == (22, 2)
    number = rows[0]['messages'][0]['content'][5:-1]
    assert label_texts(rows[0], recipe) == [
        f'!clock{{"zone": "{number}"}}<|endoftext|>', f'Noon {number}.<|endoftext|>']
    with pytest.raises(DatasetError, match=r'rows.jsonl: 22 problems\n  line \d+: offers tools'):
        check_recipe(recipe.changed({'data.template': None}))


def test_a_mix_keeps_the_tools_of_each_source(recipe, tmp_path):
    write_rows([{'messages': [{'role': 'user', 'content': f'Is it {number}?'}, says('Yes.')]}
                for number in range(24)], tmp_path, 'json')
    mixed = recipe.changed({'data.source': None, 'data.mix': [
        {'source': recipe.data.source}, {'source': str(tmp_path/'rows.json')}],
        'optimizer.steps': 20})
    rows = check_recipe(mixed)[0]
    assert {(row['source'], 'tools' in row) for row in rows} == {
        ('rows.jsonl', True), ('rows.json', False)}


def test_pairs_of_calls_are_compared(tmp_path):
    (tmp_path/'tools.jinja').write_text(SHORT)
    tokenizer = load_tokenizer('tiny-base', template=str(tmp_path/'tools.jinja'))
    better, worse = (calls(call('clock', 1, zone=zone)) for zone in ('CET', 'PST'))
    tools = short_rows(1)[0]['tools']
    row = conversation({'prompt': [ASK], 'chosen': [better], 'rejected': [worse], 'tools': tools},
                       PLAIN)
    [pair] = tokenise_pairs([row], tokenizer)
    sides = []
    for side in ('', 'rejected_'):
        mask = [label != -100 for label in pair[f'{side}labels']]
        sides.append(stretches(pair[f'{side}input_ids'], mask, tokenizer))
    assert sides == [['!clock{"zone": "CET"}<|endoftext|>'], ['!clock{"zone": "PST"}<|endoftext|>']]
    with pytest.raises(ValueError, match="turn 2 calls 'cloc'"):
        conversation({'prompt': [ASK], 'chosen': [better], 'tools': tools,
                      'rejected': [calls(call('cloc', 1))]}, PLAIN)
    with pytest.raises(ValueError, match='same answer twice'):
        conversation({'prompt': [ASK], 'chosen': [better], 'rejected': [better]}, PLAIN)


@pytest.mark.parametrize('changes', [{}, {'batch.packing': True}], ids=['rows', 'packed'])
def test_rows_with_calls_train(changes, recipe, tmp_path):
    fine_tune(recipe.changed(changes | {'optimizer.steps': 12}), tmp_path/'run')
    found = losses(tmp_path/'run')
    assert found[-1] < found[0]


@pytest.mark.slow
def test_the_miniature_checks_rows_with_calls(recipe):
    from llm_workbook.release.invariants import check_invariants
    from llm_workbook.release.try_out import try_out
    relations = 'whole answers', 'no question', 'padding', 'merge'
    checked = check_invariants(recipe, relations=[*relations])
    assert checked.passed, checked
    tried = try_out(recipe, stations=['mask', 'export'])
    assert tried.passed, tried


def test_the_miniature_reads_pairs_with_the_tools_that_they_offer(recipe, tmp_path):
    from llm_workbook.release.small_case import first_rows, small_recipe
    rows = [{'prompt': row['messages'][:1], 'chosen': [row['messages'][1]],
             'rejected': [calls(call('clock', 1, zone='PST'))], 'tools': row['tools']}
            for row in short_rows(8)]
    pairs = recipe.changed({
        'data.source': write_rows(rows, tmp_path, 'jsonl').source, 'data.format': 'preference',
        'method.objective': 'dpo', 'data.test_share': 0.0, 'intervals.evaluation': 0})
    first = first_rows(pairs, asset('tiny-base'))
    written = small_recipe(pairs, tmp_path/'base', first)
    assert load_rows(written.data)[0] == first
    assert all(row['tools'] == first[0]['tools'] for row in first) and len(first) == 8


def test_nulls_that_a_file_has_are_taken_as_they_are(tmp_path):
    "Those of a struct in Parquet are Arrow's; in JSON somebody has written them."
    arguments = {'town': 'Bremen', 'days': None}
    tool = {'name': 'weather_of', 'parameters': {'type': 'object', 'properties': {
        'town': {'type': 'string'}, 'days': {'type': ['integer', 'null'], 'default': None}}}}
    spoken = json.dumps({'name': 'weather_of', 'arguments': arguments})
    for turns in (
        [ASK, calls({'name': 'weather_of', 'arguments': arguments})],
        [{'from': 'human', 'value': 'Hi'}, {'from': 'function_call', 'value': spoken}]):
        for tools in [tool], json.dumps([tool]):
            row = row_of(turns, tools)
            found = row['messages'][1]['tool_calls'][0]['function']
            assert found['arguments'] == arguments
            assert row['tools'][0]['function'] == tool


def test_calls_in_turns_of_their_own_are_answered_in_their_order():
    turns = [ASK, *({'from': 'function_call', 'value': json.dumps({'name': name, 'arguments': {}})}
                    for name in ('clock', 'weather_of')),
             *({'from': 'observation', 'value': text} for text in ('12:05', 'sunny')),
             {'from': 'gpt', 'value': 'Noon.'}]
    named = [turn['name'] for turn in row_of(turns, None)['messages'] if turn['role'] == 'tool']
    assert named == ['clock', 'weather_of']


@pytest.mark.parametrize('arguments, said', [
    ('{"zone": NaN}', 'cannot be written as JSON'), ('{"zone": 1e999}', 'cannot be written'),
    ('{"zone": "CET", "zone": "UTC"}', "the key 'zone' stands there twice")])
def test_arguments_that_no_json_has_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        row_of([ASK, calls({'name': 'clock', 'arguments': arguments})])
