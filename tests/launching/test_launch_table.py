"""Each published recipe under each launcher of this machine: the first loss is that of one process,
and each rank holds its part.

Each command starts recipes of one node and of two, and one of the two stages of recipe B. SLURM has
its row in tests/cluster; the committed record of `make bench LINE=launch_table` has them all.
"""
from functools import cache
from itertools import product

import pytest
from bench.shared import launches as table

from llm_workbook.launching.background import WorkerProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def workers():
    with WorkerProcess() as made: yield made


@pytest.fixture(scope='module')
def alone(workers, tmp_path_factory):
    "The directory of the one process that a recipe is compared with."
    @cache
    def run(letter):
        directory = tmp_path_factory.mktemp(letter)/'run'
        recipe = table.single(table.toy(letter))
        table.by_cell(recipe, directory, workers)
        return directory
    return run


ONLY_IN_THE_RECORD = [('A', 'accelerate'), ('B2', 'torchrun'), ('B3', 'accelerate'),
                      ('C', 'torchrun'), ('D', 'torchrun')]
PAIRS = [pair for pair in product(table.RECIPES, table.LAUNCHERS[:3])
         if pair not in ONLY_IN_THE_RECORD]


@pytest.mark.parametrize('letter, launcher', PAIRS)
def test_the_first_loss_is_that_of_one_process(letter, launcher, alone, workers, tmp_path):
    recipe, directory = table.run(letter, launcher, tmp_path, workers)
    cell = table.compare(recipe, directory, alone(letter))
    assert table.well(cell), cell
    nodes, processes = (1, 2) if launcher == 'notebook' else table.TWO.get(letter, (1, 2))
    assert (cell['nodes'], cell['ranks']) == (nodes, nodes * processes)
