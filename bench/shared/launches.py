"""Launch the shrunk published recipes in every way, and set a run beside that of one process.

Every run is on real processes: two steps of eight rows. The first eight rows are the same whoever
divides them, so their loss is too. One process takes them in as many micro-batches as there are
ranks, one after the other.
"""
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

RECIPES = {'A': '70b-2x4-h100-zero3-qlora-classifier', 'B2': '7b-zero2-offload',
           'B3': '7b-zero3-offload',
           'C': '70b-2x24gb-qlora', 'D': '70b-2x8-a100-80-full'}
LAUNCHERS = 'notebook', 'torchrun', 'accelerate', 'slurm'
# Nodes and processes on each where commands start it; SLURM gives all of them two nodes
TWO = {'A': (2, 2), 'D': (2, 1)}
# Nats. float32 adds in another order: some 1e-6 of a loss near 5. bfloat16 keeps 8 bits, and rows
# that are padded to another length are rounded in another way: 5e-4 has been seen. The next eight
# rows are off by more, and each cell says by how much.
TOLERANCE = {'float32': 1e-5, 'bfloat16': 2e-3}
PATIENCE_S = 300  # For what takes seconds on two quiet cores


def toy(letter: str, nodes: int = 1, processes: int = 2):
    "Shrink a recipe to two steps of eight rows over so many processes; the last step is saved."
    from llm_workbook.config.recipe import Recipe, shrink
    return shrink(Recipe.named(RECIPES[letter])).changed({
        'cluster.nodes': nodes, 'cluster.processes': processes,
        'batch.micro': 8 // (nodes * processes), 'batch.length': 64,
        'optimizer.steps': 2, 'intervals.saving': 2, 'intervals.logging': 1,
        'intervals.evaluation': 0})


def single(recipe, autocast: bool = False):
    """The same first step for one process.

    FSDP computes in bfloat16 throughout; without it there is autocast, which does not.
    """
    plain = {'sharding.strategy': 'none', 'sharding.loading': 'every_rank',
             'sharding.activation_checkpointing': 'none',
             'sharding.reentrant': False, 'sharding.offload_optimizer': 'none',
             'sharding.offload_parameters': 'none'}
    fsdp = recipe.method.kind == 'full' and recipe.precision.compute == 'bfloat16' and not autocast
    return recipe.changed(({} if fsdp else plain) | {
        'cluster.nodes': 1, 'cluster.processes': 1, 'batch.accumulation': recipe.cluster.ranks,
        'optimizer.steps': 1,
        'intervals.saving': 0})


def seen(directory: Path) -> dict:
    "What a run says of itself: losses, and each rank's host and its bytes of parameters."
    from llm_workbook.training.run_directory import read_metrics
    told = json.loads((directory/'effective.json').read_text())
    strategy = next(row['found'] for row in told['settings'] if row['name'] == 'sharding.strategy')
    return {'losses': [row['loss'] for row in read_metrics(directory/'metrics.jsonl')],
            'strategy': strategy,
            'hosts': [rank['host'] for rank in told['ranks']],
            'held_b': [rank['held'] for rank in told['ranks']]}


def share(directory: Path, whole_b: int) -> float:
    """The largest part that one rank held of what one process has.

    ZeRO-2 leaves the weights whole; there it is the part that one rank saved.
    """
    found = seen(directory)
    if found['strategy'] != 'zero2': return max(found['held_b']) / whole_b
    # Float32 weights and two moments
    states = [path.stat().st_size for path in directory.rglob('*_optim_states.pt')]
    return max(states) / (3 * whole_b) if len(states) == len(found['held_b']) else 1.0


def compare(recipe, directory: Path, alone: Path) -> dict:
    "Set a run beside that of one process, with the limits of `difference` and `share`."
    run, one = seen(directory), seen(alone)
    ranks, loss, wanted = recipe.cluster.ranks, run['losses'][0], one['losses'][0]
    return {'recipe': recipe.name.removesuffix('-shrunk'), 'strategy': run['strategy'],
            'compute': recipe.precision.compute,
            'nodes': recipe.cluster.nodes, 'ranks': len(run['held_b']), 'loss': loss,
            'alone': wanted, 'next': run['losses'][-1],
            'difference': abs(loss - wanted), 'tolerance': TOLERANCE[recipe.precision.compute],
            'share': round(share(directory, one['held_b'][0]), 4),
            'share_limit': round(1.02 / ranks, 4)}


def well(cell: dict) -> bool:
    "Say whether a cell of the table is as it should be."
    same_loss = cell['difference'] <= cell['tolerance']
    return same_loss and cell['share'] <= cell['share_limit'] and cell['ranks'] >= 2


def by_cell(recipe, directory: Path, workers=None) -> None:
    "Run as a notebook does."
    from llm_workbook.launching.background import launch
    launch(recipe, directory, workers).wait(PATIENCE_S)


def end(node: subprocess.Popen) -> None:
    "Kill a launcher that still runs, and its ranks, which would outlive it."
    import psutil
    if node.poll() is None:
        for child in psutil.Process(node.pid).children(recursive=True): child.kill()
    node.kill(), node.wait()


def by_command(recipe, directory: Path, kind: str) -> None:
    "Render, and run the commands of one kind at once, one for each node."
    from llm_workbook.parallel.ranks import free_port
    from llm_workbook.launching.render import check_rendered, render
    render(recipe, directory, f'127.0.0.1:{free_port()}' if recipe.cluster.nodes > 1 else None,
           python=sys.executable)
    with tempfile.TemporaryDirectory() as temp:  # Launchers leave folders there
        env = os.environ | {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1', 'TMPDIR': temp}
        # A pipe that nobody reads stops who writes
        logs = [open(f'{temp}/{i}.log', 'w+') for i in range(recipe.cluster.nodes)]
        nodes = [subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
                 for words, log in zip(check_rendered(directory).commands[kind], logs, strict=True)]
        try: failed = [node.wait(PATIENCE_S) for node in nodes]
        finally:
            for node in nodes: end(node)
        said = [log.seek(0) or log.read() for log in logs]
        for log in logs: log.close()
    if any(failed): raise RuntimeError('\n'.join(said)[-4000:])


def by_slurm(recipe, directory: Path) -> None:
    "Submit, and wait for the end."
    from llm_workbook.launching.slurm import submit
    job = submit(recipe, directory, options={'time': '30'}, python=sys.executable)
    status = job.wait(PATIENCE_S)
    if status.state != 'COMPLETED': raise RuntimeError(f'{status}\n{job.logs(60)}')


def run(letter: str, launcher: str, folder: Path, workers=None) -> tuple:
    "Run one cell of the table in a new folder: the recipe as it ran, and where."
    nodes, processes = TWO.get(letter, (1, 2))
    if launcher == 'notebook': nodes, processes = 1, 2
    if launcher == 'slurm' and nodes == 1: nodes, processes = 2, 1
    recipe, directory = toy(letter, nodes, processes), folder/f'{letter}-{launcher}'
    how = {'notebook': partial(by_cell, workers=workers), 'slurm': by_slurm}
    how.get(launcher, partial(by_command, kind=launcher))(recipe, directory)
    return recipe, directory


def matrix(made: dict) -> tuple:
    "Heads and rows of a record: a recipe's difference under every launcher, nodes x processes."
    heads, rows = ('recipe', 'sharding', 'one process', *LAUNCHERS, 'allowed', 'the next rows'), []
    for name in RECIPES.values():
        cells = {cell['launcher']: cell for cell in made['cells'] if cell['recipe'] == name}
        spread = lambda cell: f"{cell['nodes']} x {cell['ranks'] // cell['nodes']}"
        said = lambda cell: f"{cell['difference']:.1g} ({spread(cell)})" if cell else 'not run'
        one = cells['notebook']
        rows.append((name, f"{one['strategy']}, {one['compute']}", f"{one['alone']:.6f}",
                     *(said(cells.get(way)) for way in LAUNCHERS),
                     f"{one['tolerance']:g}", f"{abs(one['next'] - one['loss']):.1g}"))
    return heads, rows
