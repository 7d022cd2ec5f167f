"""A step as `rehearse` has it, against the same trainer on real CPU ranks.

Torch's own tracker of memory stands beside it, as far as it runs.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.record import ROOT, record
from bench.shared.heap import COUNTING
from bench.shared.small_rehearsals import (
    AGAIN, DORA, FULL, LORA, PAIRS, QLORA, SHAPES, counted, percent, recipe)
from bench.shared.tracker import plain_program, tracked, trainer_program

ONE_PASS = {'batch.loss_head': 'one_pass'}
SHORT = {'batch.length': 128}  # Where the length is not what a row is about
JOBS = [  # Shape, changes to a plain recipe
    ('small', FULL),
    ('large', FULL | AGAIN),
    ('large', LORA),
    ('small', LORA | AGAIN),
    ('small', QLORA),
    ('large', QLORA | AGAIN),
    ('small', QLORA | SHORT | {'cluster.processes': 4}),
    ('small', FULL | SHORT | {'batch.accumulation': 2}),
    ('small', FULL | SHORT | {'batch.accumulation': 2, 'sharding.sync_each_batch': True}),
    ('small', LORA | {'sharding.strategy': 'ddp'}),
    ('small', LORA | {'batch.packing': True, 'batch.length': 512}),
    ('small', FULL | {'batch.packing': True, 'batch.micro': 2}),
    ('large', FULL | {'model.attention': 'segments'}),
    ('small', LORA | DORA | SHORT),
    ('small', QLORA | DORA | AGAIN | SHORT),
    ('small', FULL | ONE_PASS),
    ('large', LORA | AGAIN | ONE_PASS),
    ('small', LORA | PAIRS),
    ('large', QLORA | AGAIN | PAIRS),
    ('small', FULL | PAIRS),
]
PLAIN = 'method.kind', 'sharding.activation_checkpointing'  # What rows change that are tracked


class RealRanks:
    """Measure recipes, one after another, in the trainer of the library on ranks.

    The ranks are forks of one process, which imports once and ends with the block.
    """
    def __enter__(self) -> 'RealRanks':
        self.said = tempfile.TemporaryFile('w+')
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'bench.programs.rehearsal'], env=os.environ | COUNTING,
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True)
        return self

    def __exit__(self, *error) -> None:
        self.process.communicate()  # Its input ends, so it ends
        self.said.close()

    def measured(self, recipe) -> dict:
        "Run the trainer of a recipe; what rank 0 measured."
        self.process.stdin.write(recipe.model_dump_json() + '\n')
        self.process.stdin.flush()
        answer = self._answer()
        if 'error' in answer: raise RuntimeError(f'{recipe.facts()}: {answer["error"][-2000:]}')
        seen = answer['ranks'][0]
        if seen['built_b'] >= seen['peak_b']:
            raise RuntimeError('building the model took more than a step')
        return seen

    def _answer(self) -> dict:
        "The next line that is one; what ranks print comes before it."
        for line in self.process.stdout:
            if line.startswith(('{"ranks":', '{"error":')): return json.loads(line)
        self.said.seek(0)
        return {'error': self.said.read()}


def why(error: Exception) -> str:
    "An error on one short line, the same in every run."
    text = ' '.join(str(error).split())
    return re.sub(r' at 0x\w+', '', f'{type(error).__name__}: {text}')[:240]


def peers(recipe) -> dict:
    """What the tracker says of both programs, or why it says nothing.

    A full fine-tune is also tracked with AdamW as on GPUs, kept and cleared.
    """
    pairs = recipe.method.objective == 'dpo'
    if recipe.sharding.strategy != 'fsdp2' or recipe.batch.accumulation > 1 or pairs:
        return {}  # It tracks FSDP2, and one pass in a step; its programs train answers
    ways = {'tracker_trainer': (trainer_program,), 'tracker': (plain_program,)}
    if recipe.method.kind == 'full':
        ways['tracker_foreach'] = plain_program, True
        ways['tracker_cleared'] = plain_program, True, True
    results = {}
    for name, way in ways.items():
        try:
            results[f'{name}_b'] = tracked(recipe, *way)
        except Exception as error:
            results[f'{name}_fails'] = why(error)
    return results


def rehearsed(changes: dict, job) -> tuple:
    "What the rehearsal says, and torch's tracker of plain recipes."
    from llm_workbook import rehearse
    ours = rehearse(job, exact=True)
    return ours, peers(job) if changes.keys() <= {*PLAIN} else {}


def row(shape: str, changes: dict, folder: Path, ranks: RealRanks) -> dict:
    "One row of the record: what ranks measured, while this process rehearsed the same recipe."
    from llm_workbook import spec
    job = recipe(shape, changes, folder)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(ranks.measured, job)
        ours, tracker = rehearsed(changes, job)
        measured = waiting.result()
    sent = [(kind, size_b) for _, kind, size_b in measured['collectives']]
    planned = [(kind, size_b) for _, kind, size_b, _ in ours.messages]
    errors = {}
    for key, size_b in tracker.items():
        if not key.endswith('_b'): continue
        errors[key.replace('_b', '_error')] = percent(size_b, measured['peak_b'])
    return {
        'shape': shape,
        'changes': changes,
        'parameters': spec(SHAPES[shape]).parameters,
        'held_b': measured['held_b'],
        'first_b': measured['first_b'],
        'peak_b': measured['peak_b'],
        'flops': measured['flops'],
        'seconds': measured['seconds'],
        'rehearsed_b': ours.peak_b,
        'error': percent(ours.peak_b, measured['peak_b']),
        'at': f'{ours.timeline.peak.op} in {ours.timeline.peak.phase}',
        'collectives': counted(sent),
        'collectives_equal': counted(sent) == counted(planned),
        'in_order': sent == planned,
        'flops_equal': ours.flops == measured['flops'],
        **tracker,
        **errors,
    }


def measure() -> dict:
    "Run every job; the value is the median error of the peak, the peer's that of torch's tracker."
    with tempfile.TemporaryDirectory() as folder, RealRanks() as ranks:
        rows = [row(shape, changes, Path(folder), ranks) for shape, changes in JOBS]
    wrong = [r['changes'] for r in rows if not (r['collectives_equal'] and r['flops_equal'])]
    if wrong: raise RuntimeError(f'collectives or FLOP differ: {wrong}')
    ours = [abs(r['error']) for r in rows]
    peers_off = [abs(r['tracker_error']) for r in rows if 'tracker_error' in r]
    return record('rehearsal_error', ours, '%', peers_off, peer='torch FSDPMemTracker',
                  goal=1, rows=rows)
