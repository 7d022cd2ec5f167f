"""Seconds from the start of a notebook cell to the first finished optimizer step on two ranks."""
import statistics
import tempfile
from pathlib import Path

from bench.record import record
from tools.page import execute

# Of `workers`: from `launch` to the first step, where the workers have imported everything
GOAL_S = 4.0
# One cell of a fresh kernel, imports included. A run of one step writes metrics.jsonl once: when
# that step is finished.
START = '''import time; start = time.time()
from pathlib import Path
from llm_workbook import Recipe, fine_tune, fsdp_env, load_rows, train_rank
recipe = Recipe.named('reviews-qlora').changed({'optimizer.steps': 1, 'optimizer.warmup': 0.0})
'''
OURS = "fine_tune(recipe, '%s')\n"
PEER = '''import os
from accelerate import notebook_launcher
os.environ |= fsdp_env(recipe)
Path('%s').mkdir()
notebook_launcher(train_rank, (recipe, Path('%s'), load_rows(recipe.data)[0]), num_processes=2)
'''
WORKERS = '''from llm_workbook import WorkerProcess, check_recipe, launch
if 'workers' not in globals(): check_recipe(recipe), (workers := WorkerProcess()).ready()
start = time.time()
launch(recipe, '%s', workers).wait()
'''
END = "print('seconds', Path('%s/metrics.jsonl').stat().st_mtime - start)\n"
PEER_NAME = "accelerate's notebook_launcher with the same rank function, no checks before it"


def kernel(launch: str) -> tuple[float, float]:
    "Run the launching cell twice in one fresh kernel; seconds of the first and of the second time."
    import nbformat
    cells = [nbformat.v4.new_code_cell((START + launch + END).replace('%s', run))
             for run in ('first', 'second')]
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder)/'page.ipynb'
        nbformat.write(nbformat.v4.new_notebook(cells=cells), page)
        done = execute(page, page.parent)
    said = [''.join(o.text for o in c.outputs if o.output_type == 'stream' and o.name == 'stdout')
            for c in done.cells]
    first, second = (float(text.rpartition('seconds ')[2]) for text in said)
    return first, second


def measure(repetitions: int = 5) -> dict:
    "Interleave our launch, the plain one and persistent workers, each in fresh kernels."
    ours, peers, workers = zip(*[(kernel(OURS), kernel(PEER), kernel(WORKERS))
                                 for _ in range(repetitions)])
    again = {'again': ours, 'peer_again': peers}
    # Both launches of a kernel found the libraries imported
    launched = [seconds for pair in workers for seconds in pair]
    return record('launch_latency', [first for first, _ in ours], 's',
                  [first for first, _ in peers], peer=PEER_NAME,
                  **{name: round(statistics.median(second for _, second in runs), 4) for name,
                     runs in again.items()},
                  workers=round(statistics.median(launched), 4),
                  workers_worst=round(max(launched), 4), workers_goal=GOAL_S)
