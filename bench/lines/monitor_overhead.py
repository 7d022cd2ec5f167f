"""How much longer a step takes because every rank writes its metrics.

A model of 100 M parameters trains on two ranks, on rows of equal length. Its steps alternate: in
one the ranks watch and write, in the next they do not, and then the other way round. So each pair
of neighbours is a measurement, and what slows the machine for longer slows both.
"""
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

from bench.record import record
from bench.shared.real_ranks import make_base

GOAL_PCT = 1.0
PAIRS, WARM = 60, 2  # Pairs of steps that count, and pairs before them
MODEL = {
    'model_type': 'llama', 'hidden_size': 768, 'intermediate_size': 2560, 'num_hidden_layers': 12,
    'num_attention_heads': 12, 'num_key_value_heads': 12, 'vocab_size': 1264}
WORDS = 'Write one sentence about the weather. ' * 5


def is_watched(step: int) -> bool:
    "Say whether the ranks watch a step: of each pair one, the first and the second in turn."
    return step % 4 in (1, 0)


class Alternating:
    "Watches every second step of a run, and takes down how long each step was."
    def __init__(self, directory: Path):
        self.directory, self.rows, self.patches = directory, [], ExitStack()
        self.watching = self.idle = None

    def note_step(self, run, recipe, step: int, values: dict) -> None:
        "End a step as `RankRun.note_step` does, and prepare the next."
        from llm_workbook.training.rank_metrics import RankMetrics
        if self.watching is None:
            self.watching, self.idle = run.metrics, RankMetrics(run.files, run.rank)
        run.log.note_step(recipe, step, values)
        run.metrics.end_step(step, values)
        if self.rows: self.rows[-1] |= self.taken()
        self.prepare(run, step + 1)
        self.rows.append({'step': step + 1, 'begin': (time.perf_counter(), time.process_time())})
        if step == recipe.optimizer.steps: self.write(run.rank)

    def taken(self) -> dict:
        "Say how long the step was: by the clock, and by the processor time of this rank."
        wall_s, cpu_s = self.rows[-1].pop('begin')
        return {'wall_s': time.perf_counter() - wall_s, 'cpu_s': time.process_time() - cpu_s}

    def prepare(self, run, step: int) -> None:
        "Let the next step be watched, or not."
        from llm_workbook.training.step_phases import timed_waits
        self.patches.close()
        run.metrics = self.watching if is_watched(step) else self.idle
        if not is_watched(step): return
        self.watching.clock.end()  # What was not watched
        self.patches.enter_context(timed_waits(self.watching.clock))

    def write(self, rank: int) -> None:
        "Leave the steps where the parent reads them."
        text = json.dumps(self.rows[:-1])
        (self.directory/f'rank-{rank}.json').write_text(text)


def small_run(folder: Path):
    "Write a base of 100 M parameters and equal rows; give the recipe of the run."
    from llm_workbook import Recipe, asset
    from transformers import AutoTokenizer
    base = make_base(MODEL, folder/'base')
    AutoTokenizer.from_pretrained(asset('tiny-base')).save_pretrained(base)
    messages = [{'role': 'user', 'content': WORDS}, {'role': 'assistant', 'content': 'It rains.'}]
    (folder/'rows.jsonl').write_text(f'{json.dumps({"messages": messages})}\n' * 64)
    return Recipe(
        name='monitor-overhead', model={'source': str(base)},
        data={'source': str(folder/'rows.jsonl'), 'format': 'messages', 'test_share': 0},
        method={'kind': 'full'}, batch={'micro': 2, 'length': 128},
        optimizer={'steps': 2 * (PAIRS + WARM) + 2})


def train(recipe, folder: Path) -> list[list[dict]]:
    "Run the recipe with alternating steps; the steps of each rank, from the second on."
    from llm_workbook import fine_tune
    from llm_workbook.training import rank_run
    alternating = Alternating(folder)
    def note_step(run, *step): alternating.note_step(run, *step)
    with (patch.object(rank_run.RankRun, 'note_step', note_step),
          patch.object(rank_run, 'timed_waits', nullcontext)):
        fine_tune(recipe, folder/'run', live=False)
    ranks = range(recipe.cluster.ranks)
    return [json.loads((folder/f'rank-{rank}.json').read_text()) for rank in ranks]


def overheads(ranks: list[list[dict]], key: str) -> list[float]:
    "Give the overhead of each pair of steps, of all ranks together, %."
    sums = {row['step']: sum(rank[i][key] for rank in ranks) for i, row in enumerate(ranks[0])}
    found = []
    for first in range(3 + 2 * WARM, 3 + 2 * (WARM + PAIRS), 2):
        pair = {is_watched(step): sums[step] for step in (first, first + 1)}
        found.append(100 * (pair[True] / pair[False] - 1))
    return found


def calls_s(recipe, folder: Path, waits: int) -> float:
    "Time what watching adds to a step, without a model: its marks, waits and line; median."
    import torch
    from llm_workbook.training.rank_metrics import RankMetrics
    from llm_workbook.training.run_directory import RunFiles
    metrics, layer = RankMetrics(RunFiles(folder), 0), torch.nn.Linear(1, 1)
    metrics.begin(recipe, layer, torch.optim.SGD(layer.parameters()))
    batch = {name: torch.ones(2, 64, dtype=torch.int64) for name in ('input_ids', 'attention_mask')}
    clock, seconds = metrics.clock, []
    for step in range(200):
        begin = time.perf_counter()
        metrics.note_batch(batch)
        for phase in ('data', 'other', 'data', 'forward', 'backward', 'optimizer', 'other'):
            clock.mark(phase)
        for _ in range(waits): clock._waits.append(('forward', clock._stamp(), clock._stamp()))
        metrics.end_step(step, {'loss': 1.0, 'learning_rate': 1e-3, 'grad_norm': 1.0})
        seconds.append(time.perf_counter() - begin)
    metrics.close()
    return statistics.median(seconds)


def measure() -> dict:
    "Train once with alternating steps; the median overhead of a pair."
    from llm_workbook import read_metrics
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        recipe = small_run(folder)
        ranks = train(recipe, folder)
        lines = read_metrics(folder/'run/metrics/rank-00000.jsonl')
        calls = calls_s(recipe, folder, waits=60)
    wall, cpu = overheads(ranks, 'wall_s'), overheads(ranks, 'cpu_s')
    step_s = statistics.median(row['wall_s'] for rank in ranks for row in rank)
    quarters = statistics.quantiles(wall, n=4)
    return record(
        'monitor_overhead', wall, '% of step time', goal=GOAL_PCT,
        by_processor_time=round(statistics.median(cpu), 4),
        quartiles=[round(quarters[0], 4), round(quarters[2], 4)],
        step_s=round(step_s, 4), calls_ms=round(1000 * calls, 4),
        calls_share=round(100 * calls / step_s, 4), lines=len(lines),
        load=round(os.getloadavg()[0], 2))
