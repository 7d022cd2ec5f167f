"""Bytes that torch's allocator reserves in a step, played on a CPU, beside what GPUs reserved.

The rows that no GPU has measured give the shares of the plan (`_GROWING` in `plan.ledger`): what
is wasted of the bytes that come and go.
"""
import json
import math
from functools import partial

from bench.record import RESULTS, record
from bench.shared.gpu_configurations import CONFIGURATIONS, title
from bench.shared.gpu_rows import plain_recipe
from bench.shared.small_rehearsals import percent


def measured() -> list[dict]:
    "The lines that GPUs have left of recipes of one rank, with what they reserved."
    found = []
    for file in sorted((RESULTS/'gpu').glob('*.jsonl')):
        lines = [json.loads(text) for text in file.read_text(encoding='utf-8').splitlines()]
        found += [line for line in lines
                  if line['group'] == 'memory' and line['status'] == 'measured'
                  and 'reserved_b' in line['figures']]
    return found


def played(number: int) -> dict:
    "Both modes of the allocator on one configuration of `bench.gpu.memory`, every layer of it."
    from llm_workbook.config.workspaces import workspace_b
    from llm_workbook.rehearsal.caching_allocator import CachingAllocator, replayed
    from llm_workbook.rehearsal.program import record_step, rehearsable
    from llm_workbook.training.packed_rows import joins_rows
    made = recipe(number)
    joined = made.batch.packing and joins_rows(made.model.attention)
    step = record_step(rehearsable(made)[0], gpu=True, joined=joined)
    span = step.recorder, step.begin, step.end
    modes = {name: replayed(*span, CachingAllocator(grows), workspace_b(made))
             for name, grows in (('played', True), ('fixed', False))}
    return {'allocated_b': modes['played'].allocated_b,
            **{f'{name}_b': said.reserved_b for name, said in modes.items()}}


def recipe(number: int):
    "The recipe of a configuration at full size; no GPU is opened for it."
    preset, method, length, micro, ranks, more = CONFIGURATIONS[number]
    changes = method | more | {'batch.length': length, 'batch.micro': micro}
    return plain_recipe(preset, ranks, changes)


def planned(made) -> dict:
    "Bytes of tensors in a plan: at the peak, at the peak before the update, and what passes then."
    from llm_workbook.plan import ledger as plan
    ledger = plan.memory(made)
    stays_b, passing_b, _ = ledger.pools('step')
    before_b = stays_b + plan._passing_b(ledger._sums.at('step', 'gpu'))
    return {'planned_b': ledger.total('step', 'gpu', 'allocated'), 'before_b': before_b,
            'passing_b': passing_b}


def row(number: int, seen: dict) -> dict:
    """One configuration: bytes of the plan, both modes played, and what a GPU reserved.

    That GPU had segments that grow, as this library sets them.
    """
    made = recipe(number)
    said = {'part': title(*CONFIGURATIONS[number]), **planned(made), **played(number),
            'again': made.sharding.activation_checkpointing == 'full',
            'away': made.sharding.offload_activations != 'none'}
    figures = seen.get(said['part'])
    if figures is None: return said
    said |= {'peak_b': figures['peak_b'], 'reserved_b': figures['reserved_b']}
    return said | {'allocated_error': percent(said['allocated_b'], said['peak_b']),
                   'error': percent(said['played_b'], said['reserved_b']),
                   'fixed_error': percent(said['fixed_b'], said['reserved_b'])}


def off(rows: list[dict], share: float) -> float:
    "Add up how far a plan with such a share is from what was played, as logarithms."
    total = 0
    for one in rows:
        reserved_b = max(one['planned_b'], one['before_b'] + share * one['passing_b'])
        total += abs(math.log(reserved_b / one['played_b']))
    return total


def fitted(rows: list[dict]) -> dict:
    """The share with and without checkpointing, in steps of .01.

    From rows that no GPU has measured, and whose activations do not wait on the host: those come
    back on a stream of their own.
    """
    free = [one for one in rows if 'reserved_b' not in one and not one['away']]
    shares = [hundredths / 100 for hundredths in range(51)]
    found = {}
    for name, again in ('once', False), ('again', True):
        own = [one for one in free if one['again'] == again]
        found[name] = min(shares, key=partial(off, own))
    return found


def measure() -> dict:
    "Play every recipe of one rank; the value is the median error where a GPU has measured it."
    seen = {line['part']: line['figures'] for line in measured()}
    rows = [row(number, seen) for number, (*_, ranks, _) in enumerate(CONFIGURATIONS)
            if ranks == 1]
    told = [one for one in rows if 'error' in one]
    return record('caching_allocator', [abs(one['error']) for one in told],
                  '% of the bytes reserved', [abs(one['fixed_error']) for one in told],
                  peer='the same with segments of fixed size', goal=3, shares=fitted(rows),
                  rows=rows)
