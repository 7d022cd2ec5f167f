"""Useful tokens/s of one pass over rows of chat-like lengths: as they come, grouped and packed.

The same trainer, a small Llama and the same rows, in batches of eight; packed, four full rows are
joined. Useful is what trains: no padding, no question. The three take turns, each in a process of
its own. Rows are few for groups: of a block of 50 steps, as long data sets have it, nothing is left
here but a quarter of all rows.
"""
from bench.lines.sft_throughput import turns
from bench.programs.throughput import DEFAULT_ROWS, drawn
from bench.record import record

KINDS = 'padded', 'grouped', 'filled'
ROWS = 192


def padding() -> dict:
    "Share of the positions of a pass that is padding, as rows come and grouped."
    from llm_workbook.training.grouped_rows import grouped_order, padding_share, row_lengths
    lengths = row_lengths(drawn(ROWS))
    orders = {'padded': range(ROWS), 'grouped': grouped_order(lengths, DEFAULT_ROWS)}
    return {kind: round(padding_share(lengths, order, DEFAULT_ROWS), 4)
            for kind, order in orders.items()}


def measure(repetitions: int = 3) -> dict:
    "Train one pass by turns; the value is the median rate of grouped rows."
    seen = turns(KINDS * repetitions, ROWS)
    rates = {kind: [round(run['useful'] / run['seconds'], 1)
                    for run in seen if run['kind'] == kind] for kind in KINDS}
    peaks = {f'{kind}_peak_b': max(run['peak_b'] for run in seen if run['kind'] == kind)
             for kind in KINDS}
    return record(
        'length_grouping', rates['grouped'], 'useful tokens/s', rates['padded'],
        peer='the same rows as they come', worst=min(rates['grouped']),
        spread={kind: [min(values), max(values)] for kind, values in rates.items()},
        packed=sorted(rates['filled'])[repetitions // 2], padding=padding(), rows=ROWS, **peaks)
