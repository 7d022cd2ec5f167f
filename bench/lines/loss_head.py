"""Tokens/s of the loss head that scores once, forward and backward, against TRL's tiles.

Each turn is a fresh process, ours and TRL's in turn; their peaks are compared too, and the
gradients of both with those of float32.
"""
import json
import subprocess
import sys

from bench.record import ROOT, record

SIZES = {'tokens': 4096, 'words': 128_256, 'width': 1024}
GOAL, PEAK_GOAL = 4, 0.2


def turn(head: str, sizes: dict) -> dict:
    "What a process with this head has seen."
    program = [sys.executable, '-m', 'bench.programs.loss_head', head, *map(str, sizes.values())]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f'{head}: {done.stderr[-2000:]}')
    return json.loads(done.stdout.splitlines()[-1])


def measure(repetitions: int = 5, sizes: dict = SIZES) -> dict:
    "Score the same tokens by turns; the value is the median rate."
    runs = {'ours': [], 'trl': []}
    for _ in range(repetitions):
        for head, seen in runs.items(): seen.append(turn(head, sizes))
    ours, peers = ([round(sizes['tokens'] / run['seconds'], 1) for run in seen]
                   for seen in runs.values())
    highest = {head: max(run['peak_b'] for run in seen) for head, seen in runs.items()}
    return record('loss_head', ours, 'tokens/s', peers, peer='TRL, tiles', goal=GOAL,
                  worst=min(ours),
                  peak_ratio=round(highest['ours'] / highest['trl'], 3), peak_goal=PEAK_GOAL,
                  ours_peak_b=highest['ours'], trl_peak_b=highest['trl'],
                  **turn('errors', sizes), **sizes, dtype='bfloat16')
