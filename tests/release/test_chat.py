"""Base and tuned model side by side: who speaks, what is refused, and the panel without a
browser."""
import json
import sys
import warnings

import pytest
import torch
from llm_workbook import __main__ as entry
from llm_workbook import (
    Chat, ChatComparison, ChatPair, ChatPanel, Method, Recipe, add_adapters, answers, asset,
    compare_chat, load_base, load_chat, save_adapters, shrink)
from llm_workbook.__main__ import main
from llm_workbook.release import chat as chat_module

ASK = [{'role': 'user', 'content': 'How many letters are there in the word table?'}]
RECIPE = shrink(Recipe.named('70b-2x24gb-qlora'))


def disturbed(model, seed=0):
    "Adapters that say something else than the base, without training."
    model = add_adapters(model, RECIPE.method)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if 'lora_B' in name: p.data.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope='module')
def tokenizer():
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(asset('tiny-base'))


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp('run')/'adapters'
    save_adapters(
        disturbed(load_base(RECIPE.model, RECIPE.method, RECIPE.precision, 'cpu')), folder)
    return folder


@pytest.fixture(scope='module')
def chat(saved): return load_chat(RECIPE, saved, longest=12)


@pytest.fixture(scope='module')
def alone(): return load_base(RECIPE.model, RECIPE.method, RECIPE.precision, 'cpu')


@pytest.fixture
def panel(chat):
    pytest.importorskip('ipywidgets')
    return ChatPanel(chat)


def rows(*prompts):
    return [
        {'messages': [{'role': 'user', 'content': p}, {'role': 'assistant', 'content': ''}]}
        for p in prompts]


# Who speaks

def test_the_first_voice_is_the_base_alone_to_the_last_digit(chat, alone, tokenizer):
    ids = tokenizer('A table has', return_tensors='pt')['input_ids']
    with torch.inference_mode(), chat.model.disable_adapter(): off = chat.model(ids).logits
    with torch.inference_mode():
        assert torch.equal(off, alone(ids).logits)
        assert not torch.equal(off, chat.model(ids).logits)
    assert [chat.reply(ASK, False)] == answers(alone, tokenizer, rows(ASK[0]['content']), 12, 1)


def test_the_adapters_are_on_again_afterwards_also_after_an_error(chat, monkeypatch):
    first = chat.reply(ASK)
    assert chat.reply(ASK, False) != first
    assert chat.reply(ASK) == first
    def broken(**kwargs): raise RuntimeError('no memory')
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match='no memory'):
        patch.setattr(chat.model, 'generate', broken)
        chat.reply(ASK, False)
    assert chat.reply(ASK) == first


def test_a_model_in_training_goes_on_in_training(chat):
    modules = list(chat.model.modules())
    quiet, (odd, *_) = (
        chat.reply(ASK), [m for m in modules if 'Dropout' in type(m).__name__] or modules[-1:])
    try:
        chat.model.train()
        odd.eval()
        before = [m.training for m in modules]
        assert chat.reply(ASK) == quiet
        assert [m.training for m in modules] == before
        assert True in before
        assert False in before
    finally: chat.model.eval()


def test_a_full_fine_tune_has_its_base_beside_it(tokenizer, tmp_path):
    recipe = RECIPE.changed({'method': {'kind': 'full'}})
    model = load_base(recipe.model, recipe.method, recipe.precision, 'cpu')
    with torch.no_grad(): model.model.layers[0].mlp.down_proj.weight.mul_(-3)
    model.save_pretrained(tmp_path/'model')
    pair = load_chat(recipe, tmp_path/'model', 12)
    assert pair.base is not None
    assert pair.reply(ASK) != pair.reply(ASK, False)
    whole = load_base(recipe.model, recipe.method, recipe.precision, 'cpu')
    assert [pair.reply(ASK, False)] == answers(whole, tokenizer, rows(ASK[0]['content']), 12, 1)
    with pytest.raises(ValueError, match='LlamaForCausalLM has no adapters to switch off'):
        Chat(model, tokenizer)


@pytest.mark.parametrize('kind', ['qlora', 'full'])
def test_without_a_run_both_voices_are_the_base(kind, tokenizer):
    recipe = RECIPE.changed({'method': {'kind': kind}})
    whole = load_base(recipe.model, recipe.method, recipe.precision, 'cpu')
    wanted = answers(whole, tokenizer, rows(ASK[0]['content']), 12, 1)
    untrained = load_chat(recipe, longest=12)
    assert [untrained.reply(ASK)] == [untrained.reply(ASK, False)] == wanted


def score(capsys, *words):
    assert main(['score', *words, '--longest', '12', '--json']) == 0
    return json.loads(capsys.readouterr().out)  # Nothing else is printed there


def test_a_terminal_scores_the_base_and_then_the_run(chat, saved, tmp_path, capsys):
    questions = [f'How many letters are there in the word {word}?' for word in ('table', 'pear')]
    lines = []
    for text in questions:
        answer = chat.reply([{'role': 'user', 'content': text}])
        assert answer != chat.reply([{'role': 'user', 'content': text}], False)
        lines.append(json.dumps({'prompt': text, 'completion': answer}))
    (tmp_path/'test.jsonl').write_text('\n'.join(lines))
    (tmp_path/'train.jsonl').write_text('{"prompt": "a", "completion": "b"}')
    own = {'data.source': str(tmp_path), 'data.format': 'auto'}
    file = RECIPE.changed(own).save(saved.parent/'recipe.yaml')
    assert score(capsys, str(file))['exact_match'] == 0
    after = score(capsys, str(file), '--directory', str(saved.parent))
    assert (after['exact_match'], after['rows']) == (1, 2)


def test_a_score_of_a_full_fine_tune_loads_no_base(
    tokenizer, tmp_path, monkeypatch, capsys
):
    recipe = RECIPE.changed({'method': {'kind': 'full'}})
    saved = tmp_path/'run/model'
    model = load_base(recipe.model, recipe.method, recipe.precision, 'cpu')
    with torch.no_grad(): model.model.layers[0].mlp.down_proj.weight.mul_(-3)
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    wanted = answers(model, tokenizer, rows(ASK[0]['content']), 12)
    turns = {'prompt': ASK[0]['content'], 'completion': wanted[0]}
    (tmp_path/'test.jsonl').write_text(json.dumps(turns))
    (tmp_path/'train.jsonl').write_text('{"prompt": "a", "completion": "b"}')
    own = {'data.source': str(tmp_path), 'data.format': 'auto'}
    file = recipe.changed(own).save(saved.parent/'recipe.yaml')
    loaded, load = [], chat_module.load_base

    def noted(model, *options):
        loaded.append(model.source)
        return load(model, *options)
    monkeypatch.setattr(chat_module, 'load_base', noted)
    assert score(capsys, str(file), '--directory', str(saved.parent))['exact_match'] == 1
    assert loaded == [str(saved)]

@pytest.mark.parametrize('rows, words', [
    ([{'text': f'A table has {n} legs.'} for n in range(4)], 'plain texts, which ask nothing'),
    ([{'prompt': 'a', 'completion': 'b'}], 'set data.test_share or data.test')])
def test_a_score_without_questions_is_refused_before_weights_load(
    rows, words, tmp_path, monkeypatch
):
    (tmp_path/'rows.jsonl').write_text('\n'.join(json.dumps(row) for row in rows))
    share = 0.5 if 'text' in rows[0] else 0
    data = {
        'data.source': str(tmp_path/'rows.jsonl'), 'data.test_share': share,
        'data.format': 'auto'}
    file = RECIPE.changed(data).save(tmp_path/'mine.yaml')
    def loaded(*args): raise AssertionError('the base was loaded')
    monkeypatch.setattr(entry, 'load_chat', loaded)
    with pytest.raises(ValueError, match=words): main(['score', str(file)])


def test_a_score_is_asked_with_a_length(capsys):
    with pytest.raises(SystemExit): main(['score', 'mine.yaml', '--longest', '0'])
    assert "'0' must be a whole number of tokens from 1" in capsys.readouterr().err


def test_a_classifier_has_no_voice(tokenizer):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    small = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0)
    model = LlamaForSequenceClassification(small)
    with pytest.raises(ValueError, match='gives labels, not words'): Chat(model, tokenizer)
    with pytest.raises(ValueError, match='gives labels, not words'):
        Chat(add_adapters(model, Method(kind='lora')), tokenizer)
    with pytest.raises(ValueError, match="model.head 'classification'"):
        load_chat(Recipe.named('70b-2x4-h100-zero3-qlora-classifier'), 'adapters')


# How an answer is made

def test_what_a_model_brings_along_changes_nothing(chat, monkeypatch):
    first, own = chat.reply(ASK), chat.model.generation_config
    for name, value in {
        'do_sample': True, 'temperature': 0.6, 'top_p': 0.9, 'max_length': 7
    }.items():
        monkeypatch.setattr(own, name, value)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert [chat.reply(ASK) for _ in range(3)] == [first] * 3


def test_every_token_that_ends_an_answer_ends_it(chat, tokenizer, monkeypatch):
    answer = chat.reply(ASK)
    ids = chat.model.generate(
        **tokenizer(
            tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True),
            return_tensors='pt', return_token_type_ids=False),
        max_new_tokens=12, do_sample=False)[0]
    third = ids[-10].item()
    monkeypatch.setattr(chat.model.generation_config, 'eos_token_id', [third])
    cut = chat.reply(ASK)
    assert answer.endswith(' …')
    assert not cut.endswith('…')
    assert answer.startswith(cut)
    assert len(cut) < len(answer)


def test_drawing_has_its_own_random_numbers(chat):
    hot = [
        Chat(chat.model, chat.tokenizer, longest=12, temperature=2.0, seed=seed)
        for seed in (3, 3, 4)]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    a, b, c = (one.reply(ASK) for one in hot)
    assert a == b != c
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize('messages, words', [
    ([], 'the question is empty'), ([{'role': 'user', 'content': ' \n'}], 'the question is empty'),
    ([{'role': 'user', 'content': 'x <|endoftext|>'}], 'is a mark of the chat template'),
    ([{'role': 'user', 'content': 'no ' * 700}], 'are more than the 512 of this model')])
def test_questions_that_cannot_be_asked(chat, messages, words):
    with pytest.raises(ValueError, match=words): chat.reply(messages)


@pytest.mark.parametrize(
    'settings, words', [({'longest': 0}, 'longest 0'), ({'temperature': -0.5}, 'temperature -0.5')])
def test_settings_that_cannot_be_meant(chat, settings, words):
    with pytest.raises(ValueError, match=words): Chat(chat.model, chat.tokenizer, **settings)


def test_a_tokenizer_without_a_template(chat, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, 'chat_template', None)
    with pytest.raises(ValueError, match='no chat template'): Chat(chat.model, tokenizer)


# The static twin

def test_a_table_has_both_answers_to_every_question(chat):
    found = compare_chat(chat, [ASK[0]['content'], 'Sort 3 1 2.'])
    assert [row.prompt for row in found.rows] == [ASK[0]['content'], 'Sort 3 1 2.']
    assert found.rows[0][1:] == (chat.reply(ASK, False), chat.reply(ASK))
    assert json.loads(json.dumps(found.to_dict()))['rows'][0]['tuned'] == found.rows[0].tuned
    with pytest.raises(ValueError, match='pass a list'): compare_chat(chat, 'Sort 3 1 2.')


def test_what_anybody_says_is_escaped():
    bad = '<img src=x onerror=alert(1)>"\'&'
    html = ChatComparison((ChatPair(bad, bad, bad),))._repr_html_()
    assert '<img' not in html
    assert html.count('&lt;img') == 3
    assert 'white-space:pre-wrap' in html


# The panel

def test_a_click_asks_both_and_empties_the_field(panel, chat):
    panel.prompt.value = ASK[0]['content']
    panel.send.click()
    assert panel.shown == compare_chat(chat, [ASK[0]['content']])
    assert panel.prompt.value == ''
    assert not panel.send.disabled
    assert panel.answers.value == panel.shown._repr_html_()


def test_each_voice_remembers_its_own_answers(panel):
    first = panel.ask('Sort 3 1 2.')
    panel.ask('And 9 8 7?')
    for turns, answer in zip(panel.turns, first[1:]):
        assert [turn['role'] for turn in turns] == ['user', 'assistant'] * 2
        assert turns[1]['content'] == answer
    panel.clear.click()
    assert panel.shown.rows == ()
    assert panel.turns == ([], [])
    assert panel.answers.value == ''


def test_an_error_is_shown_escaped_and_the_panel_goes_on(panel):
    panel.prompt.value = 'a <|assistant|> b'
    panel.send.click()
    assert 'ValueError: &lt;|assistant|&gt; is a mark' in panel.answers.value
    assert not panel.send.disabled
    assert panel.prompt.value == 'a <|assistant|> b'
    assert panel.turns == ([], [])


def test_the_settings_of_the_panel_are_those_of_the_answer(panel):
    panel.longest.value, panel.temperature.value = 3, 1.5
    assert (panel.chat.longest, panel.chat.temperature) == (3, 1.5)
    assert len(panel.ask('Sort 3 1 2.').tuned.split()) <= 4


def test_two_panels_do_not_share_a_conversation(chat):
    pytest.importorskip('ipywidgets')
    one = ChatPanel(chat)
    other = ChatPanel(chat)
    one.ask('Sort 3 1 2.')
    assert other.turns == ([], [])
    assert other.shown.rows == ()


def test_the_bundle_has_its_static_twin(panel):
    bundle = panel._repr_mimebundle_()
    assert 'application/vnd.jupyter.widget-view+json' in bundle
    assert bundle['text/html'] == panel.shown._repr_html_()


def test_without_ipywidgets_the_error_names_the_extra(chat, monkeypatch):
    monkeypatch.setitem(sys.modules, 'ipywidgets', None)
    with pytest.raises(ImportError, match=r"pip install '.\[lab\]'"): ChatPanel(chat)


def test_the_answer_must_have_room_beside_the_question(chat):
    from dataclasses import replace
    from llm_workbook.release.chat import _prompt
    asked = [{'role': 'user', 'content': 'Add 2 and 3.'}]
    limit = chat.model.config.max_position_embeddings
    used = _prompt(replace(chat, longest=1), asked)['input_ids'].shape[1]
    assert _prompt(replace(chat, longest=limit - used), asked)['input_ids'].shape[1] == used
    with pytest.raises(ValueError, match=f'more than the {limit} of this model'):
        _prompt(replace(chat, longest=limit - used + 1), asked)
