"""Launch the shrunk published recipes in every way, and compare each run with one process.

Every run is on real processes: two steps of eight rows. The first eight rows are the same whoever
divides them, so their loss is the same too. One process takes them in as many micro-batches as
there are ranks, one after the other.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPES = {'A': '70b-2x4-h100-zero3-qlora-classifier', 'B2': '7b-zero2-offload',
           'B3': '7b-zero3-offload',
           'C': '70b-2x24gb-qlora', 'D': '70b-2x8-a100-80-full'}
LAUNCHERS = 'notebook', 'torchrun', 'accelerate', 'slurm'
# Nodes, and processes on each, where commands start a recipe; SLURM gives every recipe two nodes
TWO = {'A': (2, 2), 'D': (2, 1)}
# Nats. Ranks add float32 in another order: that changes about 1e-6 of a loss near 5. bfloat16 has
# 8 bits, and rounds rows otherwise when they are padded to another length: 5e-4 has been seen. The
# next eight rows differ by more, and each cell of the table has that difference.
TOLERANCE = {'float32': 1e-5, 'bfloat16': 2e-3}
PATIENCE_S = 300  # For what takes seconds on two quiet cores


# Recipes

def toy(letter: str, nodes: int = 1, processes: int = 2):
    "Shrink a recipe to two steps of eight rows over these processes; the last step is saved."
    from llm_workbook.config.recipe import Recipe, shrink
    return shrink(Recipe.named(RECIPES[letter])).changed({
        'cluster.nodes': nodes, 'cluster.processes': processes,
        'batch.micro': 8 // (nodes * processes), 'batch.length': 64,
        'optimizer.steps': 2, 'intervals.saving': 2, 'intervals.logging': 1,
        'intervals.evaluation': 0})


def single(recipe, autocast: bool = False):
    """Change a recipe to the same first step on one process.

    FSDP computes in bfloat16 everywhere. One process without FSDP uses autocast, which does not.
    """
    one_process = {'cluster.nodes': 1, 'cluster.processes': 1,
                   'batch.accumulation': recipe.cluster.ranks, 'sharding.group': None,
                   'optimizer.steps': 1,
                   'intervals.saving': 0}
    is_bfloat16 = recipe.method.kind == 'full' and recipe.precision.compute == 'bfloat16'
    if is_bfloat16 and not autocast: return recipe.changed(one_process)  # It keeps FSDP
    unsharded = {'sharding.strategy': 'none', 'sharding.loading': 'every_rank',
                 'sharding.activation_checkpointing': 'none',
                 'sharding.reentrant': False, 'sharding.offload_optimizer': 'none',
                 'sharding.offload_parameters': 'none'}
    return recipe.changed(unsharded | one_process)


# Runs beside that of one process

def seen(directory: Path) -> dict:
    "Read what a run recorded: losses, strategy, and each rank's host and bytes of parameters."
    from llm_workbook.training.run_directory import read_metrics
    effective = json.loads((directory/'effective.json').read_text())
    strategies = [row['found'] for row in effective['settings']
                  if row['name'] == 'sharding.strategy']
    ranks = effective['ranks']
    return {'losses': [row['loss'] for row in read_metrics(directory/'metrics.jsonl')],
            'strategy': strategies[0],
            'hosts': [rank['host'] for rank in ranks],
            'held_b': [rank['held'] for rank in ranks]}


def share(directory: Path, whole_b: int) -> float:
    """Give the largest part that one rank held of the bytes of one process.

    ZeRO-2 does not divide the weights; for it this is the largest part that one rank saved.
    """
    run = seen(directory)
    if run['strategy'] != 'zero2': return max(run['held_b']) / whole_b
    saved_b = [path.stat().st_size for path in directory.rglob('*_optim_states.pt')]
    if len(saved_b) != len(run['held_b']): return 1.0
    return max(saved_b) / (3 * whole_b)  # Float32 weights and two moments


def compare(recipe, directory: Path, alone: Path) -> dict:
    "Compare a run with that of one process; add the limits of `difference` and `share`."
    run = seen(directory)
    one_process = seen(alone)
    loss = run['losses'][0]
    wanted = one_process['losses'][0]
    return {'recipe': recipe.name.removesuffix('-shrunk'), 'strategy': run['strategy'],
            'compute': recipe.precision.compute,
            'nodes': recipe.cluster.nodes, 'ranks': len(run['held_b']), 'loss': loss,
            'alone': wanted, 'next': run['losses'][-1],
            'difference': abs(loss - wanted), 'tolerance': TOLERANCE[recipe.precision.compute],
            'share': round(share(directory, one_process['held_b'][0]), 4),
            'share_limit': round(1.02 / recipe.cluster.ranks, 4)}


def well(cell: dict) -> bool:
    "Say whether a cell of the table is as it should be."
    same_loss = cell['difference'] <= cell['tolerance']
    return same_loss and cell['share'] <= cell['share_limit'] and cell['ranks'] >= 2


# Launchers

def by_cell(recipe, directory: Path, workers=None) -> None:
    "Run a recipe as a cell of a notebook does."
    from llm_workbook.launching.background import launch
    launch(recipe, directory, workers).wait(PATIENCE_S)


def by_command(recipe, directory: Path, kind: str) -> None:
    "Write the launch files, and run the commands of one kind at once, one for each node."
    from llm_workbook.parallel.ranks import free_port
    from llm_workbook.launching.render import check_rendered, render
    nodes = recipe.cluster.nodes
    head = f'127.0.0.1:{free_port()}' if nodes > 1 else None
    render(recipe, directory, head, python=sys.executable)
    commands = check_rendered(directory).commands[kind]
    assert len(commands) == nodes, f'{len(commands)} commands for {nodes} nodes'
    with tempfile.TemporaryDirectory() as temp:  # Launchers leave folders in it
        exit_codes, logs = run_at_once(commands, Path(temp))
    if any(exit_codes): raise RuntimeError('\n'.join(logs)[-4000:])


def run_at_once(commands: list, temp: Path) -> tuple[list[int], list[str]]:
    "Run commands beside each other; give their exit codes and what they printed."
    logs = [temp/f'{node}.log' for node in range(len(commands))]
    launchers = [start_launcher(command, log) for command, log in zip(commands, logs)]
    try: exit_codes = [launcher.wait(PATIENCE_S) for launcher in launchers]
    finally:
        for launcher in launchers: end(launcher)
    return exit_codes, [log.read_text() for log in logs]


def start_launcher(command: list, log: Path) -> subprocess.Popen:
    "Start a command that prints into a file; a full pipe that nobody reads would stop it."
    environment = os.environ | {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1',
                                'TMPDIR': str(log.parent)}
    with log.open('w') as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def end(launcher: subprocess.Popen) -> None:
    "Kill a launcher that still runs, and its ranks, which would not end with it."
    import psutil
    if launcher.poll() is None:
        for child in psutil.Process(launcher.pid).children(recursive=True): child.kill()
    launcher.kill()
    launcher.wait()


def by_slurm(recipe, directory: Path) -> None:
    "Submit a recipe to SLURM, and wait for the end."
    from llm_workbook.launching.slurm import submit
    job = submit(recipe, directory, options={'time': '30'}, python=sys.executable)
    status = job.wait(PATIENCE_S)
    if status.state != 'COMPLETED': raise RuntimeError(f'{status}\n{job.logs(60)}')


# The table

def size(letter: str, launcher: str) -> tuple[int, int]:
    "Give the number of nodes, and of processes on each, for one cell of the table."
    nodes, processes = TWO.get(letter, (1, 2))
    if launcher == 'notebook': return 1, 2
    if launcher == 'slurm' and nodes == 1: return 2, 1
    return nodes, processes


def run(letter: str, launcher: str, folder: Path, workers=None) -> tuple:
    "Run one cell of the table in a new folder; give the recipe as it ran, and the directory."
    recipe = toy(letter, *size(letter, launcher))
    directory = folder/f'{letter}-{launcher}'
    if launcher == 'notebook': by_cell(recipe, directory, workers)
    elif launcher == 'slurm': by_slurm(recipe, directory)
    else: by_command(recipe, directory, launcher)
    return recipe, directory


def matrix(made: dict) -> tuple:
    "Give the heads and rows of a record: the difference of a recipe under every launcher."
    heads = ('recipe', 'sharding', 'one process', *LAUNCHERS, 'allowed', 'the next rows')
    return heads, [matrix_row(name, made['cells']) for name in RECIPES.values()]


def matrix_row(name: str, cells: list) -> tuple:
    "Make the row of one recipe."
    by_launcher = {cell['launcher']: cell for cell in cells if cell['recipe'] == name}
    differences = [difference_text(by_launcher.get(launcher)) for launcher in LAUNCHERS]
    one = by_launcher['notebook']
    next_rows = abs(one['next'] - one['loss'])
    return (name, f'{one["strategy"]}, {one["compute"]}', f'{one["alone"]:.6f}', *differences,
            f'{one["tolerance"]:g}', f'{next_rows:.1g}')


def difference_text(cell: dict | None) -> str:
    "Write the difference of a cell, with its nodes x processes on each."
    if cell is None: return 'not run'
    processes = cell['ranks'] // cell['nodes']
    return f'{cell["difference"]:.1g} ({cell["nodes"]} x {processes})'
