"""Names of other trainers, against the installed packages and the fields of a recipe."""
import dataclasses
import inspect

import pytest

from llm_workbook.__main__ import main
from llm_workbook.config.document import RecipeError
from llm_workbook.config.fields import recipe_fields
from llm_workbook.config.other_names import other_name, other_names
from llm_workbook.config.recipe import Optimizer, Recipe

FIELDS = {note.path for note in recipe_fields()}
ROWS = other_names()


def names_of(trainer) -> set[str]:
    return {name for row in ROWS for name in row.options.get(trainer, ())}


def fields_of(*classes) -> set[str]:
    return {field.name for kind in classes for field in dataclasses.fields(kind)}


@pytest.mark.parametrize('row', ROWS, ids=lambda row: str(row)[:60])
def test_every_row_names_a_field_or_says_what_holds_instead(row):
    assert row.options and all(row.options.values())
    assert row.field in FIELDS | {'data.mix'} if row.field else len(row.note) > 15


def test_no_name_stands_in_two_rows_or_hides_the_nearest_field():
    every = [name for row in ROWS for name in {n for names in row.options.values() for n in names}]
    assert len(every) == len(set(every)) > 100
    paths = {path.rpartition('.')[2]: path for path in FIELDS if not path.startswith('data.mix.')}
    paths |= {path.partition('.')[0]: path.partition('.')[0] for path in FIELDS}
    for name in paths.keys() & set(every):
        assert other_name(name).field == paths[name], f'a recipe has the field {paths[name]}'


def test_the_names_are_those_of_the_installed_packages():
    peft, trl = pytest.importorskip('peft'), pytest.importorskip('trl')
    transformers = pytest.importorskip('transformers')
    packed = set(inspect.signature(transformers.BitsAndBytesConfig.__init__).parameters)
    trainer = fields_of(transformers.TrainingArguments)
    assert names_of('transformers') <= trainer | packed
    assert names_of('peft') <= fields_of(peft.LoraConfig)
    own = fields_of(trl.SFTConfig, trl.DPOConfig, trl.ModelConfig, trl.ScriptArguments)
    assert names_of('TRL') <= own


def test_the_names_are_those_of_deepspeed():
    config = pytest.importorskip('deepspeed.runtime.zero.config').DeepSpeedZeroConfig
    known = {name for key, field in config.model_fields.items() for name in (key, field.alias)}
    assert names_of('DeepSpeed') <= known


def test_a_file_of_another_trainer_is_answered_line_by_line():
    text = ('base_model: a\nadapter: qlora\nlora_r: 8\neval_steps: 5\ndeepspeed: z3.json\n'
            'optim: adamw\n')
    with pytest.raises(RecipeError) as caught: Recipe.parse(text)
    reasons = {problem.path: problem.reason for problem in caught.value.problems}
    fields = {'base_model': 'model.source', 'adapter': 'method.kind', 'lora_r': 'method.rank',
              'eval_steps': 'intervals.evaluation', 'deepspeed': 'sharding.strategy',
              'optim': 'optimizer.kind'}
    for option, field in fields.items():
        assert reasons[option].startswith(f'unknown key; in a recipe it is {field}')
    with pytest.raises(ValueError, match='a share of the steps'): main(['fields', 'warmup_steps'])
    assert 'source' in str(other_name('adapter_name_or_path'))


@pytest.mark.parametrize('value', ['adamw_torch', ['adamw'], None, 5], ids=repr)
def test_a_word_in_the_place_of_a_part_is_a_problem_with_its_line(value):
    with pytest.raises(RecipeError, match='optimizer = .*must be a part with fields'):
        Recipe(name='a', model={'source': 'tiny-base'}, data={'source': 'a'}, optimizer=value)
    with pytest.raises(RecipeError, match='line 3: model .*must be a part with fields'):
        Recipe.parse('version: 2\nname: a\nmodel: tiny-base\noptimizer: adamw\n')
    assert Optimizer(steps=None).steps == 100
