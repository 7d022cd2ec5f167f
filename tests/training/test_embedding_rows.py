"Tokens that the embedding of a base does not have are refused before a weight is loaded."
import json

import pytest
from trouble import small_base

from llm_workbook.config.recipe import Recipe
from llm_workbook.model.architecture import load_tokenizer
from llm_workbook.training.fine_tune import check_recipe, fine_tune

EXTRA = '<extra>'
WORDS = 1280  # Of the tiny base, and of its tokenizer
REFUSED = f"the token '{EXTRA}' with the id {WORDS}, and the embedding of the base ends at 1279"


@pytest.fixture
def base(tmp_path):
    "A base whose tokenizer has one token more than its embedding has rows."
    folder = small_base(tmp_path/'base')
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens([EXTRA])
    tokenizer.save_pretrained(folder)
    return folder


def recipe_of(base, rows, **changes):
    file = base.parent/'train.jsonl'
    file.write_text('\n'.join(map(json.dumps, rows)))
    recipe = Recipe(
        name='extra', model={'source': str(base)}, data={'source': str(file), 'test_share': 0.0},
        method={'kind': 'lora', 'rank': 4}, precision={'compute': 'float32'},
        batch={'micro': 2, 'length': 64}, optimizer={'steps': 1})
    return recipe.changed(changes)


def answers(word): return [{'prompt': f'Q {n}', 'completion': f'A {word} {n}'} for n in range(4)]


def pairs(word):
    return [{'prompt': f'Q {n}', 'chosen': f'A {n}', 'rejected': f'B {word}'} for n in range(4)]


def labelled(word): return [{'text': f'T {word} {n}', 'label': n % 2} for n in range(4)]


DPO = {'method.objective': 'dpo', 'data.format': 'preference'}
CLASSES = {
    'model.head': 'classification', 'data.format': 'classification', 'data.text_column': 'text',
    'data.label_column': 'label', 'data.labels': {0: 'bad', 1: 'good'}}


@pytest.mark.parametrize('rows,changes,side', [
    (answers, {}, ''), (pairs, DPO, 'rejected: '), (labelled, CLASSES, '')])
def test_a_token_of_a_row_is_named_with_its_line(base, rows, changes, side):
    check_recipe(recipe_of(base, rows('more'), **changes))
    mixed = [*rows('more')[:3], rows(EXTRA)[3]]
    with pytest.raises(ValueError) as error: check_recipe(recipe_of(base, mixed, **changes))
    assert f'train.jsonl: line 4: {side}has {REFUSED}' in str(error.value)
    assert f'resize_token_embeddings({WORDS + 1})' in str(error.value)


def test_a_token_of_the_template_is_named(base):
    tokenizer = load_tokenizer(str(base))
    tokenizer.chat_template = EXTRA + tokenizer.chat_template
    tokenizer.save_pretrained(base)
    with pytest.raises(ValueError, match='4 problems') as error:
        check_recipe(recipe_of(base, answers('more')))
    assert REFUSED in str(error.value)


@pytest.mark.parametrize('rows,changes', [
    (answers, {}), (pairs, DPO | {'batch.micro': 1}), (labelled, CLASSES)])
def test_a_pad_token_is_refused_where_it_fills_up_rows(base, rows, changes):
    tokenizer = load_tokenizer(str(base))
    tokenizer.pad_token = EXTRA
    tokenizer.save_pretrained(base)
    with pytest.raises(ValueError, match=f"the pad token '{EXTRA}' has the id {WORDS}"):
        check_recipe(recipe_of(base, rows('more'), **changes))
    check_recipe(recipe_of(base, answers('more'), **{'batch.micro': 1}))


def test_the_base_that_the_error_asks_for_trains(base, tmp_path):
    from transformers import AutoModelForCausalLM
    recipe = recipe_of(base, answers(EXTRA))
    with pytest.raises(ValueError, match='resize_token_embeddings'): check_recipe(recipe)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(WORDS + 1)
    model.save_pretrained(base)
    run = fine_tune(recipe, tmp_path/'run', timeout_s=120, live=False)
    assert [row['step'] for row in run.metrics] == [1]
