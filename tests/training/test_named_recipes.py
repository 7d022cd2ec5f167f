"Every named recipe is ready to train: with its own architecture, and a tokenizer of its family."
import socket
from pathlib import Path

import pytest
from trouble import slow_case

from llm_workbook.config.recipe import Recipe, planned_only, recipe_names
from llm_workbook.files import asset
from llm_workbook.model.architecture import configuration, load_tokenizer
from llm_workbook.model.miniature import miniature
from llm_workbook.training.fine_tune import check_recipe
from llm_workbook.training.tokens import ChatFormat, answer_tokens

TRL = Path(pytest.importorskip('trl').__file__).parent/'chat_templates'
PUBLISHED = Path(__file__).parents[3]/'shared/data/tokenizers'  # Qwen's, where they are at hand

LLAMA_2_CHAT = (  # As Llama 2's: the system turn stands inside the first question
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
    "{% for turn in turns %}{% if turn['role'] == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.first and system is defined %}{{ '<<SYS>>' + system + '<</SYS>>' }}{% endif %}"
    "{{ turn['content'].strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + turn['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}")
LLAMA_2 = {'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'}
LLAMA_3 = {'bos_token': '<|begin_of_text|>', 'eos_token': '<|end_of_text|>'}
LLAMA_3_TURNS = ['<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>']
QWEN_3 = {'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>'}
QWEN_3_TURNS = ['<|im_start|>', '<think>', '</think>']
# Model -> its special tokens, those of its turns, its chat template; a base model has none
FAMILIES = {
    'meta-llama/Llama-3.1-70B': (LLAMA_3, LLAMA_3_TURNS, None),
    'meta-llama/Llama-3.1-8B': (LLAMA_3, LLAMA_3_TURNS, None),
    'meta-llama/Llama-3.3-70B-Instruct': (
        LLAMA_3 | {'eos_token': '<|eot_id|>'}, LLAMA_3_TURNS, TRL/'llama3_1.jinja'),
    'meta-llama/Llama-2-7b-hf': (LLAMA_2, [], None),
    'meta-llama/Llama-2-70b-chat-hf': (LLAMA_2, [], LLAMA_2_CHAT),
    'Qwen/Qwen3-8B': (QWEN_3, QWEN_3_TURNS, TRL/'qwen3.jinja'),
    'Qwen/Qwen3-14B': (QWEN_3, QWEN_3_TURNS, TRL/'qwen3.jinja')}
# Of each way to write a conversation, one recipe reads all rows of the sample; the others read
# the first of them
ALL_ROWS = '8b-1x24gb-qlora', '8b-2x16gb-qlora', '70b-2x8-a100-80-full'
NO_KERNELS_HERE = {'model.attention': 'sdpa'}  # flash-attn has kernels for CUDA only


@pytest.fixture(scope='module')
def small_model(tmp_path_factory):
    "Two layers of a model of the Hub, beside the packaged tokenizer in the clothes of its family."
    made = {}

    def make(source):
        if source in made: return made[source]
        special, turns, template = FAMILIES[source]
        tokenizer = load_tokenizer('tiny-base')
        tokenizer.chat_template = None
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(turns, special_tokens=True)
        if template: tokenizer.chat_template = getattr(template, 'read_text', lambda: template)()
        fields = configuration(source)[1] | {'vocab_size': len(tokenizer)}
        folder = miniature(fields, tmp_path_factory.mktemp('models')/'small')
        tokenizer.save_pretrained(folder)
        made[source] = folder
        return folder
    return make


@pytest.fixture(scope='module')
def first_rows(tmp_path_factory):
    "The packaged conversations, cut to their first 400, and 40 to test."
    folder = tmp_path_factory.mktemp('rows')
    for file, rows in ('train.jsonl', 400), ('test.jsonl', 40):
        lines = (asset('sample-conversations')/file).read_text().splitlines(keepends=True)
        (folder/file).write_text(''.join(lines[:rows]))
    return str(folder)


def named(name, small_model, **changes):
    "A named recipe as it is, but for its model, the interface of its nodes, and `changes`."
    recipe = Recipe.named(name)
    if recipe.model.source != 'tiny-base':
        changes |= {'model.source': str(small_model(recipe.model.source))}
    if recipe.cluster.interface:  # Nodes have it, and the machine of this test may not
        changes |= {'cluster.interface': socket.if_nameindex()[0][1]}
    return recipe.changed(changes)


def test_every_named_model_has_its_family_here():
    sources = {Recipe.named(name).model.source for name in recipe_names()}
    assert sources - {'tiny-base'} == set(FAMILIES)


@pytest.mark.parametrize('name', recipe_names())
def test_a_named_recipe_plans_nothing_that_it_does_not_run(name):
    assert planned_only(Recipe.named(name)) == []


ALIKE = '8b-2x16gb-qlora', '8b-1x24gb-qlora'  # But for what only a plan reads


@pytest.mark.parametrize('name', [
    slow_case(name) if name in ALIKE else name for name in recipe_names()])
def test_a_named_recipe_is_ready_to_train(name, small_model, first_rows):
    changes = NO_KERNELS_HERE if Recipe.named(name).model.attention == 'flash' else {}
    has_conversations = Recipe.named(name).data.source == 'sample-conversations'
    if has_conversations and name not in ALL_ROWS:
        changes = changes | {'data.source': first_rows}
    recipe = named(name, small_model, **changes)
    train, held = check_recipe(recipe)
    assert len(train) >= recipe.global_batch
    if recipe.model.head == 'classification':
        assert {row['label'] for row in train} == {0, 1}
        return
    for row in train[:50]:
        trained = [token for token, label in zip(row['input_ids'], row['labels']) if label != -100]
        assert 0 < len(trained) < len(row['input_ids']) <= recipe.batch.length


@pytest.mark.parametrize('name', [
    name for name in recipe_names() if Recipe.named(name).data.template])
def test_a_base_model_is_told_to_set_a_template(name, small_model, first_rows):
    assert FAMILIES[Recipe.named(name).model.source][2] is None
    without = {'data.template': None, 'data.source': first_rows}
    with pytest.raises(ValueError, match="no chat template: set data.template to 'chatml'"):
        check_recipe(named(name, small_model, **without))
    with pytest.raises(ValueError, match="needs the token <|im_start|>".replace('|', r'\|')):
        check_recipe(named(name, small_model, **without | {'data.template': 'chatml'}))


@pytest.mark.parametrize('source', [source for source in FAMILIES if FAMILIES[source][2]])
def test_answers_of_a_chat_model_end_with_the_token_of_its_family(source, small_model):
    tokenizer = load_tokenizer(small_model(source))
    turns = [{'role': 'user', 'content': 'Add 1 and 2.'}, {'role': 'assistant', 'content': '3'}]
    [tokens] = answer_tokens({'messages': turns}, ChatFormat(tokenizer))
    ids = [number for number, trains in zip(tokens.ids, tokens.mask) if trains]
    thought = '<think></think>' if source.startswith('Qwen/Qwen3') else ''  # As Qwen 3 answers
    end = FAMILIES[source][0]['eos_token']
    assert ''.join(tokenizer.decode(ids).split()) == f'{thought}3{end}'


@pytest.mark.parametrize('family', ['qwen2.5', slow_case('qwen3')])
@pytest.mark.slow
def test_the_same_recipe_takes_a_published_tokenizer_with_a_template(family, tmp_path, first_rows):
    if not (PUBLISHED/family).is_dir(): pytest.skip('the published tokenizers are not at hand')
    model = {'qwen2.5': 'Qwen/Qwen2.5-72B-Instruct', 'qwen3': 'Qwen/Qwen3-14B'}[family]
    folder = miniature(configuration(model)[1], tmp_path/'model')
    load_tokenizer(PUBLISHED/family).save_pretrained(folder)
    changes = {'model.source': str(folder), 'data.source': first_rows}
    recipe = Recipe.named('8b-1x24gb-qlora').changed(changes)
    for template in ('plain', None):
        train, _ = check_recipe(recipe.changed({'data.template': template}))
        assert len(train) >= recipe.global_batch
