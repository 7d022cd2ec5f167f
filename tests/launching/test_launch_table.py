"""Each published recipe under each launcher of this machine: the first loss is that of one process,
and each rank holds its part.

Each command starts recipes of one node and of two; a cell starts the others, as other tests do.
SLURM has its row in tests/cluster; the committed record of `make bench LINE=launch_table` has them
all.
"""
from functools import cache

import pytest
from bench.shared import launches as table
from trouble import some_rows
from warm import forked_programs

from llm_workbook.launching.background import WorkerProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module', autouse=True)
def few_rows(tmp_path_factory):
    "Let recipes read 64 conversations, for each rank makes the tokens of all; eight are a step."
    folder, toy = some_rows(tmp_path_factory.mktemp('rows'), 64, 8), table.toy
    def toy_of_few(*how):
        recipe = toy(*how)
        if recipe.data.source != 'sample-conversations': return recipe
        return recipe.changed({'data.source': str(folder), 'data.format': 'messages'})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, 'toy', toy_of_few)
        yield


@pytest.fixture(scope='module')
def workers():
    "With them, programs are forks; tests/launching/test_render.py starts launchers as they are."
    with forked_programs(), WorkerProcess() as made: yield made


@pytest.fixture(scope='module')
def alone(workers, tmp_path_factory):
    """The directory of the one process that a recipe is compared with; B2 and B3 differ in nothing
    but sharding, and share it."""
    @cache
    def run(recipe):
        directory = tmp_path_factory.mktemp('alone')/'run'
        table.by_cell(recipe, directory, workers)
        return directory
    def alone(letter): return run(table.single(table.toy(letter)).changed({'name': 'alone'}))
    return alone


PAIRS = [('A', 'notebook'), ('A', 'torchrun'), ('B2', 'accelerate'), ('B3', 'torchrun'),
         ('C', 'notebook'), ('D', 'accelerate')]


@pytest.mark.parametrize('letter, launcher', PAIRS)
def test_the_first_loss_is_that_of_one_process(letter, launcher, alone, workers, tmp_path):
    recipe, directory = table.run(letter, launcher, tmp_path, workers)
    cell = table.compare(recipe, directory, alone(letter))
    assert table.well(cell), cell
    nodes, processes = (1, 2) if launcher == 'notebook' else table.TWO.get(letter, (1, 2))
    assert (cell['nodes'], cell['ranks']) == (nodes, nodes * processes)
