"""Names of other trainers, against the installed packages and the fields of a recipe."""
import dataclasses
import inspect

import pytest
import yaml

from llm_workbook.__main__ import main
from llm_workbook.config.document import RecipeError
from llm_workbook.config.fields import recipe_fields
from llm_workbook.config.other_names import other_name, other_names
from llm_workbook.config.recipe import Optimizer, Recipe
from llm_workbook.files import asset

FIELDS = {note.path for note in recipe_fields()}
ROWS = other_names()


def names_of(trainer) -> set[str]:
    return {name for row in ROWS for name in row.options.get(trainer, ())}


def fields_of(*classes) -> set[str]:
    return {field.name for kind in classes for field in dataclasses.fields(kind)}


def test_a_comma_cuts_no_note_off():
    trainers = {name for row in ROWS for name in row.options}
    for row in yaml.safe_load(asset('other_names.yaml').read_text(encoding='utf-8')):
        assert row.keys() <= trainers | {'field', 'note'}


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


def test_the_names_are_those_of_accelerate():
    config = pytest.importorskip('accelerate.commands.config.config_args')
    launch = pytest.importorskip('accelerate.commands.launch')
    options = {action.dest for action in launch.launch_command_parser()._actions}
    assert names_of('accelerate') <= options | fields_of(config.ClusterConfig)


USUAL = (
    'base_model model_type tokenizer_type load_in_8bit load_in_4bit strict datasets '
    'dataset_prepared_path val_set_size output_dir adapter lora_model_dir sequence_len '
    'sample_packing eval_sample_packing pad_to_sequence_len lora_r lora_alpha lora_dropout '
    'lora_target_modules lora_target_linear lora_fan_in_fan_out wandb_project wandb_entity '
    'wandb_watch wandb_name wandb_log_model gradient_accumulation_steps micro_batch_size '
    'num_epochs lr_scheduler train_on_inputs bf16 fp16 tf32 gradient_checkpointing '
    'gradient_checkpointing_kwargs early_stopping_patience resume_from_checkpoint local_rank '
    'logging_steps xformers_attention flash_attention loss_watchdog_threshold warmup_steps '
    'warmup_ratio evals_per_epoch eval_table_size saves_per_epoch debug deepspeed fsdp '
    'fsdp_config special_tokens tokens chat_template eot_tokens plugins').split()


@pytest.mark.parametrize('option', USUAL)
def test_the_keys_of_most_files_for_axolotl_are_answered(option):
    with pytest.raises(RecipeError) as caught: Recipe.parse(f'version: 2\n{option}: 1\n')
    [reason] = [found.reason for found in caught.value.problems if found.path == option]
    assert reason.startswith(('unknown key; in a recipe it is ', 'unknown key; a recipe has no'))


def test_each_line_that_a_long_file_is_answered_with_is_in_words():
    text = 'version: 2\n' + ''.join(f'{option}: 1\n' for option in USUAL) + 'optimizer: adamw\n'
    with pytest.raises(RecipeError, match='and [0-9]+ more') as caught: Recipe.parse(text)
    assert 'Extra inputs' not in str(caught.value)


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
    assert 'in a recipe it is method.adapters' in str(other_name('adapter_name_or_path'))


@pytest.mark.parametrize('value', ['adamw_torch', ['adamw'], None, 5], ids=repr)
def test_a_word_in_the_place_of_a_part_is_a_problem_with_its_line(value):
    with pytest.raises(RecipeError, match='optimizer = .*must be a part with fields'):
        Recipe(name='a', model={'source': 'tiny-base'}, data={'source': 'a'}, optimizer=value)
    with pytest.raises(RecipeError, match='line 3: model .*must be a part with fields'):
        Recipe.parse('version: 2\nname: a\nmodel: tiny-base\noptimizer: adamw\n')
    assert Optimizer(steps=None).steps == 100
