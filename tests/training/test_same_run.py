"""A run goes on with the same recipe and the same rows, or says what has changed."""
import json
import logging
import resource
import shutil
from pathlib import Path

import pytest
from trouble import fine_tune, losses, small_base, small_recipe

from llm_workbook.checkpoint.manifest import begin_save, commit_checkpoint, survey
from llm_workbook.config.recipe import Recipe
from llm_workbook.files import asset
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.training import fine_tune as training
from llm_workbook.training.run_directory import (
    CHANGEABLE, RunFiles, Start, begin_run, mark_run, read_metrics, recipe_facts, rows_facts,
    run_state, run_status, write_line)
from llm_workbook.training.run_lock import run_lock

ROWS = rows_facts([{'input_ids': [5, 6, 7], 'labels': [-100, 6, 7]}])


def write_rows(folder: Path, change=None, files=('train', 'test')):
    "Write 24 rows to train on and 24 held-out ones; `change` makes other lines of those of a file."
    folder.mkdir(exist_ok=True)
    for split in files:
        lines = (asset('sample-conversations')/f'{split}.jsonl').read_text().splitlines()[:24]
        lines = change(lines) if change else lines
        (folder/f'{split}.jsonl').write_text('\n'.join(lines) + '\n')


@pytest.fixture
def recipe(tmp_path):
    write_rows(tmp_path/'rows')
    return Recipe(
        name='same', model={'source': 'tiny-base'},
        data={'source': str(tmp_path/'rows'), 'format': 'messages'},
        batch={'length': 64}, optimizer={'steps': 8})


def commit(directory, step, recipe, facts):
    "Commit a checkpoint that holds what a run says of itself, and no weights."
    folder = begin_save(directory, step)
    (folder/'facts.json').write_text(json.dumps(facts))
    commit_checkpoint(folder, recipe_facts(recipe) | {
        'step': step, 'ranks': recipe.cluster.ranks, 'strategy': recipe.sharding.strategy})
    return folder


def stopped_run(recipe, directory, step=4, rows=None):
    "Begin a run as `fine_tune` does, and stop it after a step."
    if rows is None: rows = training._rows_facts(recipe, *training.check_recipe(recipe))
    start = begin_run(recipe, directory, rows=rows)
    commit(directory, step, recipe, start.facts)
    mark_run(directory, 'preempted', step)
    return directory


def go_on(recipe, directory): return fine_tune(recipe, directory, resume=True)


def contents(directory):
    paths = [path for path in directory.rglob('*') if path.is_file()]
    return {path: path.read_bytes() for path in paths if path.name != '.llmw.lock'}


def no_rank(*args, **how): raise AssertionError('ranks were started')


@pytest.fixture
def no_ranks(monkeypatch): monkeypatch.setattr(training, 'notebook_ranks', no_rank)


# The recipe of the checkpoint

EDITS = {
    'seed': 1, 'data.source': 'others', 'batch.length': 48, 'optimizer.clip': 0.5,
    'optimizer.steps': 12, 'optimizer.learning_rate': 1e-3, 'optimizer.weight_decay': 0.1,
    'method.kind': 'lora'}


@pytest.mark.parametrize('field', EDITS)
def test_an_edit_of_recipe_yaml_is_refused_with_the_field(field, recipe, tmp_path, no_ranks):
    """`render` writes commands that read the file in the run's directory: the file is both what is
    asked and what stands there."""
    directory = stopped_run(recipe, tmp_path/'run')
    write_rows(tmp_path/'others', lambda lines: lines[::-1])
    value = EDITS[field] if field != 'data.source' else str(tmp_path/'others')
    before = recipe.facts()[field]
    recipe.changed({field: value}).save(directory/'recipe.yaml')
    saved = contents(directory)
    words = (
        f'since checkpoint-4 was saved .*{field} was {before!r} and is {value!r}.*Put it back'
        '.* another directory, where .* begins anew. Here may change: name, .*intervals.session_h$')
    with pytest.raises(ValueError, match=words):
        go_on(Recipe.load(directory/'recipe.yaml'), directory)
    assert contents(directory) == saved
    recipe.save(directory/'recipe.yaml')
    with pytest.raises(AssertionError, match='ranks were started'): go_on(recipe, directory)


def train_under_torchrun(recipe, directory):
    try: return training.train_here(recipe, directory)
    except ValueError as error: return str(error)


def test_a_launcher_that_reads_an_edited_file_is_refused_too(recipe, tmp_path):
    alone = recipe.changed({'cluster.processes': 1, 'sharding.strategy': 'none'})
    directory = stopped_run(alone, tmp_path/'run')
    alone.changed({'optimizer.clip': 0.5}).save(directory/'recipe.yaml')
    asked = Recipe.load(directory/'recipe.yaml')
    [said] = run_ranks(train_under_torchrun, 1, (asked, directory))
    assert 'since checkpoint-4 was saved (optimizer.clip was 1.0 and is 0.5)' in said
    write_rows(tmp_path/'rows', lambda lines: lines[:20], ['train'])
    alone.save(directory/'recipe.yaml')
    [said] = run_ranks(train_under_torchrun, 1, (alone, directory))
    assert 'rows have changed since step 4 (training rows: 24 then and 20 now)' in said


@pytest.mark.parametrize('own, other', [('a', 'b'), ('b', 'a')])
@pytest.mark.parametrize('change', [{'optimizer.clip': 0.5}, {'optimizer.learning_rate': 1e-3}])
def test_a_checkpoint_of_another_recipe_is_refused_and_not_passed_over(
    change, own, other, recipe, tmp_path
):
    recipes = {'a': recipe, 'b': recipe.changed(change)}
    for name, asked in recipes.items(): stopped_run(asked, tmp_path/name, rows=ROWS)
    start = begin_run(recipes[other], tmp_path/other, True, ROWS)
    commit(tmp_path/other, 6, recipes[other], start.facts)
    shutil.copytree(tmp_path/other/'checkpoint-6', tmp_path/own/'checkpoint-6')
    [field] = change
    words = f'since checkpoint-6 was saved .{field} was .*move checkpoint-6 away if it is of'
    with pytest.raises(ValueError, match=words): begin_run(recipes[own], tmp_path/own, True, ROWS)
    assert run_state(tmp_path/own) == {'state': 'preempted', 'step': 4}
    shutil.rmtree(tmp_path/own/'checkpoint-6')
    assert begin_run(recipes[own], tmp_path/own, True, ROWS).step == 4


def test_facts_that_were_edited_are_damage(recipe, tmp_path, caplog):
    directory = stopped_run(recipe, tmp_path/'run', rows=ROWS)
    other = recipe.changed({'seed': 1})
    facts = directory/'checkpoint-4'/'facts.json'
    facts.write_text(facts.read_text().replace('"seed": 0', '"seed": 1'))
    other.save(directory/'recipe.yaml')
    with pytest.raises(ValueError, match='facts.json.* is not what was committed'):
        begin_run(other, directory, True, ROWS)


# What may change

FREE = {
    'name': {'name': 'other'},
    'cluster.hardware': {'cluster.hardware': '2x-rtx-3090'},
    'cluster.interface': {'cluster.interface': 'eth0'},
    'cluster.variables': {'cluster.variables': {'NCCL_DEBUG': 'INFO'}},
    'cluster.nodes': {'cluster.nodes': 2, 'cluster.processes': 1},
    'cluster.processes': {'cluster.processes': 1, 'batch.micro': 2},
    'batch.micro': {'batch.micro': 2, 'batch.accumulation': 1},
    'batch.accumulation': {'batch.accumulation': 4, 'cluster.processes': 1},
    'batch.padded': {'batch.padded': True},
    'sharding.group': {'sharding.group': 2},
    'sharding.sync_each_batch': {'sharding.sync_each_batch': True},
    'sharding.loading': {'sharding.loading': 'sharded'},
    'intervals.logging': {'intervals.logging': 2},
    'intervals.evaluation': {'intervals.evaluation': 2},
    'intervals.patience': {'intervals.patience': 2, 'intervals.evaluation': 2},
    'intervals.saving': {'intervals.saving': 2},
    'intervals.session_h': {'intervals.session_h': 11.0},
    'optimizer.steps': {'optimizer.steps': 16, 'optimizer.warmup': 0.125},
    'optimizer.warmup': {'optimizer.warmup': 0.2}}


@pytest.mark.parametrize('field', CHANGEABLE)
def test_a_field_of_the_list_may_change_and_the_run_says_so(field, recipe, tmp_path, caplog):
    constant = {'optimizer.schedule': 'constant', 'optimizer.warmup': 0.25}
    if field == 'optimizer.warmup': constant['optimizer.warmup'] = 0.22  # Also 2 steps of 8
    asked = recipe.changed(constant | {'batch.accumulation': 2})
    if field == 'cluster.processes': asked = asked.changed({'batch.accumulation': 1})
    directory = stopped_run(asked, tmp_path/'run', rows=ROWS)
    changes = FREE[field]
    with caplog.at_level(logging.WARNING, 'llm_workbook.training.run_directory'):
        start = begin_run(asked.changed(changes), directory, True, ROWS)
    assert start.step == 4
    noted = {change['field'] for change in start.facts['changes']}
    assert noted == set(changes) and field in noted
    assert 'goes on from step 4 with changes' in caplog.text
    assert all(f'{name} was ' in caplog.text for name in changes)
    assert CHANGEABLE[field] in caplog.text
    later = commit(directory, 6, asked, start.facts)
    asked_again = asked.changed(changes | {'name': 'third'})
    noted = begin_run(asked_again, directory, True, ROWS).facts['changes']
    assert noted[:-1] == json.loads((later/'facts.json').read_text())['changes']
    assert (noted[-1]['step'], noted[-1]['is']) == (6, 'third')


def test_a_run_that_goes_on_unchanged_says_nothing(recipe, tmp_path, caplog):
    directory = stopped_run(recipe, tmp_path/'run', rows=ROWS)
    assert begin_run(recipe, directory, True, ROWS).facts['changes'] == []
    assert caplog.text == ''


def test_steps_end_not_before_the_committed_one(recipe, tmp_path):
    asked = recipe.changed({'optimizer.schedule': 'constant', 'optimizer.warmup': 0.0})
    directory = stopped_run(asked, tmp_path/'run', rows=ROWS)
    with pytest.raises(ValueError, match='optimizer.steps is 3, and checkpoint-4 is there already'):
        begin_run(asked.changed({'optimizer.steps': 3}), directory, True, ROWS)
    assert begin_run(asked.changed({'optimizer.steps': 4}), directory, True, ROWS).step == 4


def test_a_recipe_is_read_back_from_a_checkpoint_as_it_was(recipe, tmp_path):
    labels = {'1': 'bad', '3': None, '5': 'good'}
    asked = recipe.changed({
        'method.targets': ['q_proj'], 'data.labels': labels, 'data.question': 'Good or bad?',
        'cluster.variables': {'NCCL_DEBUG': 'INFO'},
        'data.text_column': 3})
    directory = stopped_run(asked, tmp_path/'run', rows=ROWS)
    facts = json.loads((directory/'checkpoint-4'/'facts.json').read_text())
    assert Recipe(**facts['recipe']) == asked


# The rows of the checkpoint

def with_other_answers(lines):
    rows = [json.loads(line) for line in lines]
    rows[7]['messages'][-1]['content'] = 'No.'
    return [json.dumps(row) for row in rows]


ROW_CHANGES = {
    'answers': (with_other_answers, '24, not the same'),
    'fewer': (lambda lines: lines[:20], '24 then and 20 now'),
    'order': (lambda lines: lines[::-1], 'the same 24 in another order')}


@pytest.mark.parametrize('change, words', ROW_CHANGES.values(), ids=ROW_CHANGES)
def test_rows_that_have_changed_are_refused(change, words, recipe, tmp_path, no_ranks):
    directory = stopped_run(recipe, tmp_path/'run')
    write_rows(tmp_path/'rows', change, ['train'])
    saved = contents(directory)
    with pytest.raises(ValueError, match=rf'since step 4 \(training rows: {words}\): put the old'):
        go_on(recipe, directory)
    assert contents(directory) == saved
    write_rows(tmp_path/'rows')
    with pytest.raises(AssertionError, match='ranks were started'): go_on(recipe, directory)


@pytest.mark.parametrize('every', [0, 2])
def test_held_out_rows_count_where_they_are_judged(every, recipe, tmp_path, no_ranks):
    asked = recipe.changed({'intervals.evaluation': every})
    directory = stopped_run(asked, tmp_path/'run')
    write_rows(tmp_path/'rows', lambda lines: lines[1:], ['test'])
    words = r'since step 4 \(held-out rows: 24 then and 23 now\)' if every else 'were started'
    with pytest.raises((ValueError, AssertionError), match=words): go_on(asked, directory)


def test_rows_of_a_classifier_are_compared(tmp_path):
    lines = (asset('sample-reviews')/'train.jsonl').read_text().splitlines()[:40]
    lines = [line for line in lines if json.loads(line)['stars'] != 3]  # Those are left out
    (tmp_path/'rows').mkdir()
    (tmp_path/'rows'/'train.jsonl').write_text('\n'.join(lines) + '\n')
    asked = Recipe.named('reviews-qlora').changed({
        'model.source': str(small_base(tmp_path/'base')), 'model.head': 'classification',
        'data.source': str(tmp_path/'rows'), 'data.test': None, 'intervals.evaluation': 0,
        'intervals.saving': 1, 'cluster.processes': 1, 'sharding.strategy': 'none',
        'batch.micro': 2, 'batch.length': 32, 'optimizer.steps': 1})
    directory = fine_tune(asked, tmp_path/'run').directory
    (directory/'run.json').unlink()
    (tmp_path/'rows'/'train.jsonl').write_text('\n'.join(lines[:-1]) + '\n')
    with pytest.raises(ValueError, match='rows have changed since step 1 .training rows: '):
        go_on(asked, directory)
    (tmp_path/'rows'/'train.jsonl').write_text('\n'.join(lines) + '\n')
    assert len(go_on(asked, directory).ranks) == 1


def test_rows_that_cannot_be_compared_are_not_passed_over_in_silence(recipe, tmp_path, caplog):
    directory = stopped_run(recipe, tmp_path/'run', rows=ROWS)
    assert begin_run(recipe, directory, True).step == 4
    assert 'no rows were given: whether checkpoint-4 was trained on the rows' in caplog.text


# Checkpoints of earlier versions

def old_run(recipe, directory):
    "A run whose checkpoint holds the facts of an earlier version."
    begin_run(recipe, directory)
    commit(directory, 4, recipe, recipe_facts(recipe) | {'tokens': 12})
    return directory


def test_a_checkpoint_of_an_earlier_version_needs_the_hash_of_the_recipe(recipe, tmp_path, caplog):
    directory = old_run(recipe, tmp_path/'run')
    assert begin_run(recipe, directory, True, ROWS).step == 4
    assert 'checkpoint-4 says nothing of its rows' in caplog.text
    saving = recipe.changed({'intervals.saving': 2})
    assert begin_run(saving, directory, True, ROWS).facts['changes'][0]['is'] == 2
    other = recipe.changed({'seed': 1})
    other.save(directory/'recipe.yaml')
    words = 'checkpoint-4 is of an earlier version.* and neither the recipe nor recipe.yaml has'
    with pytest.raises(ValueError, match=words): begin_run(other, directory, True, ROWS)


def test_a_recipe_that_this_version_cannot_read_is_said_so(recipe, tmp_path):
    begin_run(recipe, tmp_path/'run')
    facts = recipe_facts(recipe) | {'recipe': recipe.model_dump(mode='json') | {'version': 99}}
    commit(tmp_path/'run', 4, recipe, facts)
    with pytest.raises(ValueError, match='checkpoint-4 holds a recipe that this'):
        begin_run(recipe, tmp_path/'run', True, ROWS)


# What a run says of itself

def test_a_run_that_says_finished_needs_its_result(recipe, tmp_path, no_ranks):
    directory = stopped_run(recipe, tmp_path/'run')
    (directory/'run.json').write_text('{"state": "finished", "step": 8}')
    words = 'run.json says finished at step 8, and adapters holds no weights: .* delete run.json'
    with pytest.raises(ValueError, match=words): go_on(recipe, directory)
    assert run_status(directory)[0] == 1
    assert 'finished at step 8, but no result is there' in run_status(directory)[1]
    (directory/'run.json').unlink()
    with pytest.raises(AssertionError, match='ranks were started'): go_on(recipe, directory)
    mark_run(directory, 'finished', 8)
    (directory/'adapters').mkdir()
    (directory/'adapters'/'adapter_model.safetensors').touch()
    assert go_on(recipe, directory).ranks == []
    assert run_status(directory)[0] == 0
    full = recipe.changed({'seed': 1})
    full.save(directory/'recipe.yaml')
    with pytest.raises(ValueError, match='checkpoint-4 was saved .seed was 0 and is 1'):
        go_on(full, directory)


@pytest.mark.parametrize('line', ['{"step": 2, "lo', '5', '{"loss": 3.5}', 'x' * 5000], ids=len)
@pytest.mark.parametrize('name', ['metrics.jsonl', 'evaluation.jsonl'])
def test_a_bad_line_is_named_and_half_a_line_at_the_end_is_not_bad(name, line, recipe, tmp_path):
    directory = stopped_run(recipe, tmp_path/'run', rows=ROWS)
    good = '{"step": 1, "loss": 3.5}\n'
    (directory/name).write_text(f'{good}{line}\n{good}')
    with pytest.raises(ValueError, match=rf'run/{name}, line 2 is .*Mend or delete') as caught:
        begin_run(recipe, directory, True, ROWS)
    assert len(str(caught.value)) < 300
    (directory/name).write_text(good + line)
    assert begin_run(recipe, directory, True, ROWS).step == 4
    assert (directory/name).read_text() == good
    assert len(read_metrics(directory/name)) == 1


# A disk that is full

FULL = r'is not saved: it needs \d+ bytes and the disk has [\d,]+ free'


def test_a_full_disk_is_named_where_a_line_of_metrics_is_written():
    with pytest.raises(OSError, match="'full' " + FULL): write_line(Path('/dev/full'), {'step': 1})


def test_a_full_disk_is_named_where_a_run_is_marked_or_locked(tmp_path):
    def full_disk():
        said = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        for act in (lambda: mark_run(tmp_path, 'running', 1), run_lock(tmp_path).__enter__):
            try: act()
            except OSError as error: said.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        return said
    [[marked, locked]] = run_ranks(full_disk, 1)
    assert "'run.json' is not saved: it needs" in marked
    assert "'.llmw.lock' is not saved: it needs" in locked
    mark_run(tmp_path, 'running', 1)
    with run_lock(tmp_path): pass


# Two ranks

@pytest.mark.slow
def test_two_ranks_go_on_with_more_steps_not_with_other_rows_and_then_one_does(tmp_path, caplog):
    short = small_recipe(tmp_path, **{
        'optimizer.steps': 2, 'optimizer.schedule': 'constant', 'optimizer.warmup': 0.0,
        'intervals.saving': 2})
    directory = fine_tune(short, tmp_path/'run').directory
    first = losses(directory)
    assert go_on(short, directory).ranks == []
    shutil.rmtree(directory/'model')  # As if it had been killed before its end
    mark_run(directory, 'running', 2)
    more = short.changed({'optimizer.steps': 3, 'intervals.saving': 1})
    write_rows(tmp_path/'rows', lambda lines: lines[:-1], ['train'])
    with pytest.raises(ValueError, match='rows: 24 then and 23 now'): go_on(more, directory)
    write_rows(tmp_path/'rows')
    assert len(go_on(more, directory).ranks) == 2
    assert losses(directory)[:2] == first and len(losses(directory)) == 3
    assert 'optimizer.steps was 2 and is 3' in caplog.text
    facts = json.loads((survey(directory).newest/'facts.json').read_text())
    assert (facts['step'], facts['rows']['train']['count']) == (3, 24)
    assert [(change['field'], change['is']) for change in facts['changes']] == [
        ('optimizer.steps', 3), ('intervals.saving', 1)]
    assert Recipe(**facts['recipe']) == more
    shutil.rmtree(directory/'model')
    mark_run(directory, 'running', 3)
    alone = more.changed({
        'cluster.processes': 1, 'batch.accumulation': 2, 'optimizer.steps': 4})
    assert len(go_on(alone, directory).ranks) == 1
    assert len(losses(directory)) == 4
    facts = json.loads((survey(directory).newest/'facts.json').read_text())
    assert [change['field'] for change in facts['changes'][2:]] == [
        'cluster.processes', 'batch.accumulation', 'optimizer.steps']
    assert Start(2) == Start(2, facts=facts)
    assert RunFiles(directory).results == [directory/'model']
