"""Lengths/s that are put into bins, TRL by turns, and how near the bins are to the fewest.

The peer is the function behind TRL's `bfd_split`, on one table of all rows: `pack_dataset` would
call it for 1,000 rows at a time, and need more bins. Its tokens are bytes, so that copying them
costs it little.
"""
import random
import time
from collections import Counter

from bench.record import record

ROWS, CAPACITY, ROUNDS = 200_000, 2048, 5


def lengths() -> list[int]:
    "Tokens of rows as chat data has them: the logarithm is spread normally."
    draw = random.Random(0)
    return [min(CAPACITY, max(8, round(draw.lognormvariate(5.6, .9)))) for _ in range(ROWS)]


def table(sizes: list[int]):
    "Rows of zeros of these sizes, as TRL packs them."
    import pyarrow
    import torch
    borders = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).numpy()
    tokens = pyarrow.array(torch.zeros(sum(sizes), dtype=torch.int8).numpy())
    return pyarrow.table({'input_ids': pyarrow.ListArray.from_arrays(borders, tokens)})


def seconds(function, *arguments) -> tuple[float, object]:
    "How long a call takes, and what it gives."
    began = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - began, result


def measure() -> dict:
    "Pack by turns; the value is the median of our rates."
    from llm_workbook.training.packed_rows import fewest_bins, fill_bins
    from trl.data_utils import _pack_bfd
    sizes = lengths()
    rows, ours_s, theirs_s = table(sizes), [], []
    for _ in range(ROUNDS):
        ours, bins = seconds(fill_bins, sizes, CAPACITY)
        theirs, packed = seconds(_pack_bfd, rows, CAPACITY, 'split')
        ours_s.append(round(ours, 4))
        theirs_s.append(round(theirs, 4))
    bound = fewest_bins(sizes, CAPACITY)
    asked = Counter(sizes)
    found = Counter(sizes[number] for places in bins for number in places)
    if found != asked: raise RuntimeError(f'lost: {asked - found}, too many: {found - asked}')
    values, peers = ([round(ROWS / time_s) for time_s in times] for times in (ours_s, theirs_s))
    return record(
        'packing', values, 'lengths/s', peers, peer='TRL, bfd_split', goal=ROWS * 10,
        worst=min(values), rows=ROWS, capacity=CAPACITY, bound=bound, bins=len(bins),
        bins_over_bound=round(len(bins) / bound, 6), dropped=ROWS - found.total(),
        seconds=ours_s, peer_seconds=theirs_s, peer_bins=len(packed))
