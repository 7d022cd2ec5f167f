"""Parameters/s that NF4 packing takes in one thread, against bitsandbytes by turns.

Both must give the same bytes.
"""
import time

from bench.record import record

SHAPE = (4096, 4096)
GOAL = 2.5


def rate(work) -> float:
    "Parameters/s of one call."
    start = time.perf_counter()
    work()
    return SHAPE[0] * SHAPE[1] / (time.perf_counter() - start)


def measure(repetitions: int = 9) -> dict:
    "Pack a bfloat16 weight by turns; the first calls, which also prove the bytes, do not count."
    import torch
    from bitsandbytes.functional import quantize_4bit

    from llm_workbook.model.nf4 import pack
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    ours, peer = lambda: pack(weight), lambda: quantize_4bit(weight, quant_type='nf4')
    (payload, absmax), (theirs, state) = ours(), peer()
    assert torch.equal(payload, theirs.flatten()) and torch.equal(absmax, state.absmax)
    turns = [(rate(ours), rate(peer)) for _ in range(repetitions)]
    torch.set_num_threads(threads)
    values, peers = ([round(x) for x in column] for column in zip(*turns))
    return record('nf4_quantise', values, 'parameters/s', peers, peer='bitsandbytes', goal=GOAL,
                  worst=min(values), threads=1,
                  weight=f'{SHAPE[0]} x {SHAPE[1]}, bfloat16')
