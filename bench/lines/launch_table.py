"""The first loss of each published recipe under each launcher, beside that of one process."""
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

from bench.record import record
from bench.shared.launches import LAUNCHERS, RECIPES, by_cell, compare, run, seen, single, toy
from tools import cluster


@contextmanager
def slurm():
    "A SLURM of two nodes, taken down again unless it was up; yields why there is none, or nothing."
    if why := cluster.obstacle():
        yield why
        return
    was, path = cluster.nodes(), os.environ['PATH']
    cluster.up()
    os.environ['PATH'] = f'{cluster.HOME}/bin:{path}'
    try: yield ''
    finally:
        os.environ['PATH'] = path
        if not was: cluster.down()


def measure() -> dict:
    "Run the whole table; without a SLURM the record says why its row is missing."
    from llm_workbook.launching.background import WorkerProcess
    with tempfile.TemporaryDirectory() as name, WorkerProcess() as workers, slurm() as missing:
        folder, cells = Path(name), []
        for letter in RECIPES:
            by_cell(single(toy(letter)), folder/letter, workers)
            for launcher in LAUNCHERS[:3 if missing else 4]:
                cells.append({'launcher': launcher}
                             | compare(*run(letter, launcher, folder, workers), folder/letter))
                print(json.dumps(cells[-1]), flush=True)
        by_cell(single(toy('D'), autocast=True), folder/'autocast', workers)
        autocast = seen(folder/'autocast')['losses'][0]
    return record('launch_table', [cell['difference'] / cell['tolerance'] for cell in cells],
                  'of the tolerance', goal=1.0,
                  cells=cells, autocast=autocast, slurm=missing or 'ran', packages=['deepspeed'])
