"""Useful tokens/s of one pass over rows of chat-like lengths: as they come, grouped and packed.

The same trainer, a small Llama and the same rows, in batches of eight; packed, four full rows are
joined. Useful is what trains: no padding, no question. The three take turns, each in a process of
its own. Rows are few for groups: of a block of 50 steps, as long data sets have it, nothing is left
here but a quarter of all rows.
"""
from bench.record import record
from bench.shared.training_turns import turns

KINDS = 'padded', 'grouped', 'filled'
ROWS = 192


def padding(run: dict) -> float:
    "Share of the positions of a pass that is padding."
    return round(1 - run['tokens'] / run['positions'], 4)


def measure(repetitions: int = 3) -> dict:
    "Train one pass by turns; the value is the median rate of grouped rows."
    seen = turns(KINDS * repetitions, ROWS)
    runs = {kind: [run for run in seen if run['kind'] == kind] for kind in KINDS}
    rates = {kind: [round(run['useful'] / run['seconds'], 1) for run in taken]
             for kind, taken in runs.items()}
    peaks = {f'{kind}_peak_b': max(run['peak_b'] for run in taken)
             for kind, taken in runs.items()}
    return record(
        'length_grouping', rates['grouped'], 'useful tokens/s', rates['padded'],
        peer='the same rows as they come', worst=min(rates['grouped']),
        spread={kind: [min(values), max(values)] for kind, values in rates.items()},
        packed=sorted(rates['filled'])[repetitions // 2],
        padding={kind: padding(taken[0]) for kind, taken in runs.items()}, rows=ROWS, **peaks)
