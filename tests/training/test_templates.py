"Trained tokens under chat templates that this project did not write."
import re
from pathlib import Path

import pytest

from llm_workbook.files import asset
from llm_workbook.model.architecture import load_tokenizer
from llm_workbook.training.tokens import ChatFormat, answer_tokens, check_rows, end_tokens

TRL = Path(pytest.importorskip('trl').__file__).parent/'chat_templates'
TEMPLATES = sorted(TRL.glob('*.jinja'))
PUBLISHED = Path(__file__).parents[3]/'shared/data/tokenizers'  # Qwen's, where they are at hand
MARK = re.compile(
    r'<\|[^|\s<>]+\|?>|<｜[^｜]+｜>|</?s>|\[/?INST\]|\[gMASK\]|<sop>'
    r'|<(?:start_of_turn|end_of_turn|end_of_utterance|turn\||\|turn)>')
THOUGHT = re.compile(
    r'\s*(?:<think>\s*)?</think>\s*|<\|channel\|>final<\|message\|>| to=user<\|message\|>')
REFUSES_SYSTEM = 'gemma', 'gemma_training'


def turn(role, content): return {'role': role, 'content': content}


def conversations():
    system, ask, more = turn('system', 'Be kind.'), turn('user', 'Hi?'), turn('user', 'More?')
    first, last = turn('assistant', 'Ho.\nand so on'), turn('assistant', 'a')
    return {
        'one turn': [ask, last], 'two turns': [ask, first, more, last],
        'with a system turn': [system, ask, first],
        'two turns with a system turn': [system, ask, first, more, last]}


@pytest.fixture(scope='module')
def tokenizer_of():
    "The packaged tokenizer with the marks of a template as special tokens."
    def make(path):
        template = path.read_text()
        tokenizer = load_tokenizer('tiny-base')
        tokenizer.add_special_tokens({'bos_token': '<bos_>', 'eos_token': '<eos_>'})
        tokenizer.add_tokens(sorted(set(MARK.findall(template))), special_tokens=True)
        tokenizer.chat_template = template
        return tokenizer
    return make


def trained(tokens, tokenizer):
    ids = [number for number, trains in zip(tokens.ids, tokens.mask) if trains]
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def check_answers(turns, tokenizer):
    "Every answer trains once, with one end token, and nothing else does."
    sequences = answer_tokens({'messages': turns}, ChatFormat(tokenizer))
    answers = [one['content'] for one in turns if one['role'] == 'assistant']
    text = ''.join(trained(tokens, tokenizer) for tokens in sequences)
    for answer in answers:
        assert answer in text
    assert 'Hi?' not in text and 'More?' not in text and 'Be kind.' not in text
    ends = [tokens.ids[end] for tokens in sequences for end in tokens.ends]
    assert len(ends) == len(answers)
    assert all(tokens.mask[end] for tokens in sequences for end in tokens.ends)
    assert set(ends) <= set(end_tokens(tokenizer))
    left = THOUGHT.sub('', text)
    for number in set(ends): left = left.replace(tokenizer.decode([number]), '')
    assert ''.join(left.split()) == ''.join(''.join(answers).split())
    return sequences


def test_there_are_templates_to_test(): assert len(TEMPLATES) > 50


@pytest.mark.parametrize('path', TEMPLATES, ids=lambda path: path.stem)
def test_answers_and_their_ends_train_under_every_template_of_trl(path, tokenizer_of):
    tokenizer = tokenizer_of(path)
    for name, turns in conversations().items():
        if 'system' in name and path.stem in REFUSES_SYSTEM:
            with pytest.raises(ValueError, match='refuses this conversation: System role'):
                answer_tokens({'messages': turns}, ChatFormat(tokenizer))
            continue
        check_answers(turns, tokenizer)


def test_the_line_break_that_trl_marks_for_qwen_does_not_train(tokenizer_of):
    tokenizer = tokenizer_of(TRL/'qwen2_5_training.jinja')
    turns = conversations()['two turns']
    marked = tokenizer.apply_chat_template(
        turns, return_dict=True, return_assistant_tokens_mask=True)['assistant_masks']
    [tokens] = answer_tokens({'messages': turns}, ChatFormat(tokenizer))
    behind = [end + 1 for end in tokens.ends]
    assert [marked[place] for place in behind] == [1, 1]
    assert [tokens.mask[place] for place in behind] == [0, 0]


@pytest.mark.parametrize('family', ['qwen2.5', 'qwen3'])
def test_published_tokenizers_pass_as_they_are(family):
    if not (PUBLISHED/family).is_dir(): pytest.skip('the published tokenizers are not at hand')
    tokenizer = load_tokenizer(PUBLISHED/family)
    for name, turns in conversations().items():
        sequences = check_answers(turns, tokenizer)
        rewrites = family == 'qwen3' and 'two' in name
        assert len(sequences) == (2 if rewrites else 1)
        for tokens in sequences:
            assert tokenizer.decode([tokens.ids[tokens.ends[-1]]]) == '<|im_end|>'


def test_an_answer_whose_end_is_not_marked_is_refused():
    "The template marks the end of the first answer, and not that of the second."
    tokenizer = load_tokenizer('tiny-base')
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ ' ' + m.content }}{% if loop.index < 3 %}{{ eos_token }}{% endif %}"
        "{% endgeneration %}{% if loop.index > 2 %}{{ eos_token }}{% endif %}"
        "{% else %}{{ '<|user|>' + m.content + '<|assistant|>' }}{% endif %}{% endfor %}")
    rows = [{'messages': conversations()[name]} for name in ('one turn', 'two turns')]
    assert check_rows(rows[:1], tokenizer).sequences == 1
    with pytest.raises(ValueError, match='row 2: has an answer whose end is not marked'):
        check_rows(rows, tokenizer)


def test_a_rewriting_template_costs_rows_or_answers(tokenizer_of):
    tokenizer = tokenizer_of(TRL/'qwen3.jinja')
    rows = [{'messages': turns} for turns in conversations().values()]
    every, last = [check_rows(rows, tokenizer, answers=answers) for answers in ('all', 'last')]
    assert (every.sequences, last.sequences) == (6, 4)
    assert every.tokens > last.tokens


@pytest.fixture(scope='module')
def sentencepiece_like(tmp_path_factory):
    "A tokenizer as Llama 2's: a mark for each space, and one before the text."
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast
    core = Tokenizer(models.BPE(unk_token='<unk>', byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    core.decoder = decoders.Sequence(
        [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()])
    marks = ['<unk>', '<s>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256))]
    texts = [one['content'] for turns in conversations().values() for one in turns]
    core.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=marks[:3], vocab_size=300))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token='<s>', eos_token='</s>', unk_token='<unk>')
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
        "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
        "{% for m in turns %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' }}"
        "{% if loop.first and system is defined %}{{ '<<SYS>>' + system + '<</SYS>>' }}{% endif %}"
        "{{ m['content'].strip() + ' [/INST]' }}{% else %}"
        "{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}")
    return tokenizer


def test_spaces_that_belong_to_a_token_train_with_it(sentencepiece_like):
    for turns in conversations().values():
        sequences = check_answers(turns, sentencepiece_like)
        assert len(sequences) == 1


@pytest.mark.parametrize('name', ['plain', 'chatml'])
def test_packaged_templates_mark_answers(name, tmp_path):
    tokenizer = load_tokenizer('tiny-base')
    if name == 'chatml':
        tokenizer.add_tokens(['<|im_start|>', '<|im_end|>'], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, template=name)
    for turns in conversations().values():
        assert len(check_answers(turns, tokenizer)) == 1
    tokenizer.save_pretrained(tmp_path/'saved')
    assert load_tokenizer(tmp_path/'saved').chat_template == tokenizer.chat_template


def test_a_template_may_come_from_a_file(tmp_path):
    file = tmp_path/'mine.jinja'
    file.write_text((asset('templates')/'plain.jinja').read_text())
    assert load_tokenizer('tiny-base', template=str(file)).chat_template == file.read_text()
    with pytest.raises(ValueError, match='is no file here and no packaged template'):
        load_tokenizer('tiny-base', template=str(tmp_path))
