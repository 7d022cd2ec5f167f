"""Rendered jobs that train over two nodes, and what SLURM may not be told."""
import os

import pytest
from conftest import alone, finished, losses, places, shrunk, start, training, until

from llm_workbook.commits import survey
from llm_workbook.document import RecipeError
from llm_workbook.jobs import Job, SlurmError, submit

CLASSIFIER = '70b-2x4-h100-zero3-qlora-classifier'


def test_the_full_recipe_trains_over_two_nodes(full, whole, tmp_path):
    job, where = whole
    assert where == {0: 'node1', 1: 'node2'}
    assert losses(job.directory)[0] == pytest.approx(alone(full, tmp_path/'alone')[0], abs=1e-5)
    assert job.status().to_dict() == {'state': 'COMPLETED', 'reason': '', 'nodes': ['node1', 'node2'], 'restarts': 0,
                                      'exit_code': 0, 'run': 'finished', 'step': 24, 'steps': 24}
    assert Job.of(job.directory) == job


def test_each_node_saves_half(whole):
    "The trainer refuses to start unless what each rank holds is its share; here is what each wrote."
    job, _ = whole
    for found in survey(job.directory).valid:
        sizes = {path.name: path.stat().st_size for path in found.folder.rglob('rank-*-of-00002.safetensors')}
        assert len(sizes) == 2 and max(sizes.values()) < 0.6 * sum(sizes.values())


def test_the_classifier_trains_on_two_nodes_of_two_processes(tmp_path):
    recipe = shrunk(CLASSIFIER, processes=2, **{'optimizer.steps': 2})
    job = start(recipe, tmp_path/'run')
    training(job, 1)
    assert places() == {0: 'node1', 1: 'node1', 2: 'node2', 3: 'node2'}
    finished(job)
    assert losses(job.directory)[0] == pytest.approx(alone(recipe, tmp_path/'alone')[0], abs=2e-3)  # bfloat16


HOSTILE = ['x"; touch here; "', "x'; touch here; '", 'x\n#SBATCH --wrap="touch here"', 'x\ntouch here', '$(touch here)', '`touch here`']


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
    with pytest.raises(SlurmError, match='invalid partition'): start(full, tmp_path/'run', partition='nowhere')
    with pytest.raises(ValueError, match='nothing was submitted'): Job.of(tmp_path/'run')
