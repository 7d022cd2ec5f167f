"""Useful tokens/s of a full fine-tune with rows of chat-like lengths, against TRL's SFTTrainer.

Useful is what trains: no padding, no question. Ours, TRL's packing and TRL's padded batches take
turns, each time in a fresh process, with the same weights, the same examples and the same loss.
"""
import json
import subprocess
import sys

from bench.record import ROOT, record

GOALS = {'packed': 1.8, 'padded': 5}
EXAMPLES = 12
MOST_APART = 1e-3  # Of the losses of one step


def turn(kind: str, examples: int) -> dict:
    "What a process with this trainer has seen."
    program = [sys.executable, '-m', 'bench.programs.throughput', kind, str(examples)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f'{kind}: {done.stderr[-2000:]}')
    return json.loads(done.stdout.splitlines()[-1])


def check_losses(runs: dict) -> float:
    "The largest difference of the losses of all kinds; an error where it is too large."
    losses = [run['loss'] for seen in runs.values() for run in seen]
    apart = max(losses) - min(losses)
    if apart > MOST_APART: raise AssertionError(f'losses of one step: {losses}')
    return apart


def measure(repetitions: int = 5, examples: int = EXAMPLES) -> dict:
    "Train one step by turns; the value is the median rate of ours."
    runs = {'ours': [], 'packed': [], 'padded': []}
    for _ in range(repetitions):
        for kind, seen in runs.items(): seen.append(turn(kind, examples))
    apart = check_losses(runs)
    rates = {kind: [round(run['useful'] / run['seconds'], 1) for run in seen]
             for kind, seen in runs.items()}
    peaks = {f'{kind}_peak_b': max(run['peak_b'] for run in seen) for kind, seen in runs.items()}
    made = record('sft_throughput', rates['ours'], 'useful tokens/s', rates['packed'],
                  peer='TRL, packed', goal=GOALS['packed'], worst=min(rates['ours']),
                  spread={kind: [min(values), max(values)] for kind, values in rates.items()},
                  padded=sorted(rates['padded'])[repetitions // 2], padded_goal=GOALS['padded'],
                  losses_apart=apart, examples=examples, tokens=runs['ours'][0]['tokens'],
                  useful=runs['ours'][0]['useful'], **peaks)
    return made | {'padded_ratio': round(made['value'] / made['padded'], 3)}
