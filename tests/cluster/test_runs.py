"""Rendered jobs that train over two nodes, and what SLURM may not be told."""
import os

import pytest
from bench.shared.launches import seen
from conftest import as_alone, finished, start, toy, until

from llm_workbook.checkpoint.manifest import survey
from llm_workbook.config.document import RecipeError
from llm_workbook.launching.slurm import Job, SlurmError, submit


def test_the_full_recipe_trains_over_two_nodes(full, whole, tmp_path):
    job, where = whole
    assert where == {0: 'node1', 1: 'node2'}
    as_alone(full, job, tmp_path/'alone')
    assert job.status().to_dict() == {
        'state': 'COMPLETED', 'reason': '', 'nodes': ['node1', 'node2'], 'restarts': 0,
        'exit_code': 0, 'run': 'finished', 'step': 24, 'steps': 24}
    assert Job.of(job.directory) == job


def test_each_node_saves_half(whole):
    """The trainer refuses to start unless what each rank holds is its share; here is what each
    wrote."""
    job, _ = whole
    kept = survey(job.directory).valid
    assert [found.step for found in kept] == [24, 12]
    for found in kept:
        sizes = {
            path.name: path.stat().st_size
            for path in found.folder.rglob('rank-*-of-00002.safetensors')}
        assert len(sizes) == 2
        assert max(sizes.values()) < 0.6 * sum(sizes.values())


@pytest.mark.parametrize('letter, processes', [('A', 2), ('B2', 1), ('B3', 1), ('C', 1)])
def test_the_other_recipes_train_over_two_nodes(letter, processes, tmp_path):
    "A on two processes of each, so that the rank on a node is not the rank among all."
    recipe = toy(letter, processes)
    job = start(recipe, tmp_path/'run')
    finished(job)
    assert seen(job.directory)['hosts'] == ['node1'] * processes + ['node2'] * processes
    as_alone(recipe, job, tmp_path/'alone')


HOSTILE = [
    'x"; touch here; "',
    "x'; touch here; '",
    'x\n#SBATCH --wrap="touch here"',
    'x\ntouch here',
    '$(touch here)',
    '`touch here`',
]


@pytest.mark.parametrize('text', HOSTILE)
def test_what_wants_to_be_a_command_never_reaches_slurm(text, full, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unchecked = full.model_copy(update={'name': text})
    with pytest.raises(RecipeError): submit(unchecked, tmp_path/'run')
    with pytest.raises(ValueError): submit(full, tmp_path/'run', options={'partition': text})
    with pytest.raises(ValueError): Job(tmp_path, text, 'name', 1, '')
    assert os.listdir(tmp_path) == []


def test_a_directory_with_a_strange_name_is_one_word(full, tmp_path, monkeypatch):
    "The shell would read one part of it, and SLURM another."
    monkeypatch.chdir(tmp_path)
    job = start(full, tmp_path/"$(touch here) %j 'x'")
    until(job, lambda status: job.logs())
    job.cancel(save=False)
    assert job.wait(60).state == 'CANCELLED'
    assert [path.name for path in tmp_path.iterdir()] == [job.directory.name]


def test_slurm_says_why_it_refuses(full, tmp_path):
    with pytest.raises(SlurmError, match='invalid partition'):
        start(full, tmp_path/'run', partition='nowhere')
    with pytest.raises(ValueError, match='nothing was submitted'): Job.of(tmp_path/'run')
