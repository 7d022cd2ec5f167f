"""Useful tokens/s of a full fine-tune with rows of chat-like lengths, against TRL's SFTTrainer.

Useful is what trains: no padding, no question. Ours, TRL's packing and TRL's defaults take turns,
each time in a process of its own, with the same weights, the same examples and the same loss.
Blocks of ours are compiled before the clock runs; how many seconds that takes (`compile_s`) hangs
on what torch's cache on the disk holds: 15 where it was empty.
"""
from bench.record import record
from bench.shared.training_turns import turns

GOALS = {'packed': 1.8, 'default': 5}
KINDS = 'ours', 'packed', 'default'
EXAMPLES = 24  # Three batches of TRL's default
MOST_APART = 1e-3  # Of the losses of one step


def check_losses(runs: dict) -> float:
    "The largest difference of the losses of all kinds; an error where it is too large."
    losses = [run['loss'] for seen in runs.values() for run in seen]
    apart = max(losses) - min(losses)
    if apart > MOST_APART: raise AssertionError(f'losses of one step: {losses}')
    return apart


def measure(repetitions: int = 5, examples: int = EXAMPLES) -> dict:
    "Train one step by turns; the value is the median rate of ours."
    seen = turns(KINDS * repetitions, examples)
    runs = {kind: [run for run in seen if run['kind'] == kind] for kind in KINDS}
    apart = check_losses(runs)
    rates = {kind: [round(run['useful'] / run['seconds'], 1) for run in taken]
             for kind, taken in runs.items()}
    peaks = {f'{kind}_peak_b': max(run['peak_b'] for run in taken)
             for kind, taken in runs.items()}
    first = runs['ours'][0]
    made = record('sft_throughput', rates['ours'], 'useful tokens/s', rates['packed'],
                  peer='TRL, packed', goal=GOALS['packed'], worst=min(rates['ours']),
                  spread={kind: [min(values), max(values)] for kind, values in rates.items()},
                  default=sorted(rates['default'])[repetitions // 2],
                  default_goal=GOALS['default'], losses_apart=apart, examples=examples,
                  tokens=first['tokens'], useful=first['useful'], **peaks,
                  settings={kind: taken[0]['settings'] for kind, taken in runs.items()})
    return made | {'default_ratio': round(made['value'] / made['default'], 3)}
