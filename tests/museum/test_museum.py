"""The museum: every bug of the doctor's rules is broken here, diagnosed, and mended; and what is no
bug is not taken for one."""
import ast
import re

import pytest
from bench.shared.museum import (
    CASES, CLEAN, RECORDED, bring_libraries, clean_texts, diagnosed_clean, examine, in_fork,
    load_case, names, text_of)

from llm_workbook.config.recipe import Recipe
from llm_workbook.watching.diagnose import diagnose
from llm_workbook.watching.troubles import troubles


@pytest.fixture(scope='module', autouse=True)
def libraries(): bring_libraries()


def is_slow(name: str) -> bool:
    "Whether a case says that it takes long."
    source = (CASES/f'{name.replace("-", "_")}.py').read_text('utf-8')
    return re.search(r'^SLOW = True', source, re.MULTILINE) is not None


QUICK = names()[::5]  # The page of the museum has them all, and `make test-slow` runs both
MARKED = [
    pytest.param(name, marks=pytest.mark.slow if is_slow(name) or name not in QUICK else ())
    for name in names()]


@pytest.mark.parametrize('name', MARKED)
def test_a_bug_is_alive_and_diagnosed_and_its_fix_cures_it(name):
    found = examine(name)
    assert found['alive'], found.get('why_not')
    assert found['rule'] == name and len(found['evidence']) > 20, found
    assert found['mended'] is not False, found['mended_error']


def test_every_rule_has_a_case_and_every_case_a_rule():
    known = {one.id for one in troubles()}
    helpers = {name for name in names() if name not in known}
    assert known == set(names()), (sorted(known - set(names())), sorted(helpers))


@pytest.mark.parametrize('name', names())
def test_a_case_is_short_and_says_what_happens(name):
    file = CASES/f'{name.replace("-", "_")}.py'
    source = file.read_text('utf-8')
    tree = ast.parse(source)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert ast.get_docstring(tree)
    assert len(source.splitlines()) <= 85
    recorded = re.search(r"^ *recorded = '(.+)'", source, re.MULTILINE)
    if recorded: assert text_of(RECORDED/recorded[1].rpartition('/')[2])
    else: assert {'broken', 'mended'} <= functions | set(re.findall(r'import.*\bmended\b', source)
                                                         and ['mended'])


# What is no bug

@pytest.mark.parametrize('file', clean_texts(), ids=lambda file: file.stem)
def test_what_is_no_bug_is_not_taken_for_one(file):
    assert diagnosed_clean(file) is None
    assert file.read_text('utf-8').startswith('# Source: produce.py, ')


def test_there_are_fifty_such_texts_and_half_of_them_are_near_misses():
    near = [file for file in clean_texts() if file.stem.startswith('near')]
    assert len(clean_texts()) >= 50 and len(near) >= 25
    made = (CLEAN/'produce.py').read_text('utf-8')
    assert all(f'def {file.stem}(' in made for file in clean_texts())


@pytest.mark.parametrize('name', sorted(
    file.stem for file in (CASES.parents[2]/'llm_workbook/assets/recipes').glob('*.yaml')))
def test_a_recipe_of_this_package_is_in_good_health(name):
    assert diagnose(Recipe.named(name)).rule is None


def good_trainer_run(_) -> dict:
    "What the doctor says of a run of the Trainer that went well, and was resumed."
    trainer = load_case('resume-from-partial-checkpoint').trainer
    trainer(logging_steps=1).train()
    trainer(logging_steps=1, max_steps=3).train(resume_from_checkpoint=True)
    return {'rules': [diagnose('run').rule, diagnose('run/checkpoint-3').rule]}


def good_library_run(_) -> dict:
    "The same of a run of this library: QLoRA on two ranks."
    from llm_workbook import fine_tune, shrink
    recipe = shrink(Recipe.named('reviews-qlora')).changed({'optimizer.steps': 2})
    run = fine_tune(recipe, 'run', live=False)
    return {'rules': [diagnose(what).rule for what in (run, 'run', 'run/adapters')]}


@pytest.mark.parametrize('work', [
    good_trainer_run, pytest.param(good_library_run, marks=pytest.mark.slow)])
def test_the_folder_of_a_good_run_is_in_good_health(work):
    found = in_fork(work, '')
    assert set(found['rules']) == {None}, found
