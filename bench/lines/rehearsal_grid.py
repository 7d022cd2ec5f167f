"""How far ledger and rehearsal are apart at the peak of a step, on a grid of recipes."""
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from bench.record import record

_KEPT = {'sharding.activation_checkpointing': 'none'}
_OFFLOADED = {'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'}
_LIGER = {'model.kernels': 'liger'}
RECIPES = {  # Name -> changes to a plain full fine-tune with checkpointing under FSDP2 on GPUs
    'full': {}, 'full, nothing recomputed': _KEPT,
    'full, whole logits': {'batch.loss_head': 'full'},
    'full, bf16 weights': {'precision.master': 'bfloat16'},
    'full, in copies of 8': {'sharding.group': 8}, 'full, in copies of 2': {'sharding.group': 2},
    'full, weights kept gathered': {'sharding.reshard_after_forward': False},
    'full, 4 micro-batches': {'batch.accumulation': 4},
    'full, 4 micro-batches, each reduced': {
        'batch.accumulation': 4, 'sharding.sync_each_batch': True},
    'full, 4 micro-batches, float32 sums': {
        'batch.accumulation': 4, 'precision.reduce': 'float32'},
    'full, packed for flash': {'batch.packing': True, 'model.attention': 'flash'},
    'full, eager attention': {'model.attention': 'eager', 'batch.length': 1024} | _KEPT,
    'full, offloaded': _OFFLOADED,
    'full, fused AdamW': {'optimizer.kind': 'adamw_fused'},
    'lora': {'method.kind': 'lora'}, 'lora, nothing recomputed': {'method.kind': 'lora'} | _KEPT,
    'lora, whole logits': {'method.kind': 'lora', 'batch.loss_head': 'full'},
    'lora, packed for flash': {
        'method.kind': 'lora', 'batch.packing': True, 'model.attention': 'flash'},
    'qlora': {'method.kind': 'qlora'},
    'qlora, nothing recomputed': {'method.kind': 'qlora'} | _KEPT,
    'qlora, whole logits': {'method.kind': 'qlora', 'batch.loss_head': 'full'},
    'qlora, 4 micro-batches': {'method.kind': 'qlora', 'batch.accumulation': 4},
    'qlora, offloaded': {'method.kind': 'qlora'} | _OFFLOADED,
    'qlora, ddp': {'method.kind': 'qlora', 'sharding.strategy': 'ddp'},
    'lora, ddp': {'method.kind': 'lora', 'sharding.strategy': 'ddp'},
    'full, ddp': {'sharding.strategy': 'ddp'},
    'full, ddp, 8-bit AdamW': {'sharding.strategy': 'ddp', 'optimizer.kind': 'adamw_8bit'},
    'full, liger': _LIGER,
    'full, liger, nothing recomputed': _LIGER | _KEPT,
    'lora, liger, nothing recomputed': {'method.kind': 'lora'} | _LIGER | _KEPT,
    'qlora, liger': {'method.kind': 'qlora'} | _LIGER,
    'full, cpu': {'cluster.device': 'cpu'},
    'qlora, cpu': {'cluster.device': 'cpu', 'method.kind': 'qlora'}}
_BOTH = (
    'full', 'full, nothing recomputed', 'lora', 'lora, nothing recomputed',
    'qlora', 'qlora, nothing recomputed')
GRID = {  # Preset -> nodes, processes on each, rows of a forward pass, recipes
    'llama-3.2-1b': (1, 2, 2, (
        *_BOTH, 'full, whole logits', 'full, ddp', 'lora, ddp', 'qlora, ddp',
        'full, liger, nothing recomputed', 'qlora, liger', 'full, cpu', 'qlora, cpu')),
    'llama-3.1-8b': (1, 8, 2, (
        *_BOTH, 'full, whole logits', 'full, weights kept gathered', 'full, 4 micro-batches',
        'full, 4 micro-batches, each reduced', 'full, 4 micro-batches, float32 sums',
        'full, in copies of 2',
        'full, bf16 weights', 'full, packed for flash', 'full, offloaded',
        'full, eager attention', 'lora, whole logits', 'qlora, whole logits',
        'full, liger', 'lora, liger, nothing recomputed',
        'qlora, 4 micro-batches', 'qlora, offloaded')),
    'llama-3.1-70b': (2, 8, 1, (
        *_BOTH, 'full, in copies of 8', 'full, fused AdamW', 'lora, packed for flash')),
    'llama-3.1-405b': (128, 8, 1, ('full', 'lora', 'qlora')),
    'qwen2.5-0.5b': (1, 4, 4, (
        'full', 'full, nothing recomputed', 'full, ddp, 8-bit AdamW', 'qlora, ddp', 'full, cpu')),
    'qwen2.5-72b': (4, 8, 1, ('full', 'qlora')),
    'qwen3-8b': (1, 4, 2, (*_BOTH, 'full, fused AdamW', 'lora, liger, nothing recomputed')),
    'mistral-7b-v0.3': (1, 8, 2, (*_BOTH, 'full, in copies of 8')),
    'yi-34b': (2, 8, 1, ('full', 'qlora')),
    'gemma-2-2b': (1, 4, 1, (
        'full', 'lora', 'qlora', 'qlora, nothing recomputed', 'full, liger, nothing recomputed')),
    'gemma-2-9b': (1, 8, 1, ('full', 'qlora')),
    'gemma-3-1b': (1, 2, 2, ('full', 'full, nothing recomputed', 'qlora')),
    'phi-4': (1, 8, 1, (
        'full', 'full, nothing recomputed', 'lora', 'qlora', 'lora, liger, nothing recomputed')),
    'mixtral-8x7b': (2, 8, 1, ('full', 'lora', 'qlora')),
    'qwen3-30b-a3b': (1, 8, 1, (
        'full', 'full, nothing recomputed', 'lora', 'lora, nothing recomputed', 'qlora'))}
GOAL = 3  # Per cent
PAIRS = tuple((preset, name) for preset, (*_, names) in GRID.items() for name in names)
WHY = {}  # (preset, recipe) -> reason of a difference beyond the goal; there is none at present


def recipe(preset: str, name: str):
    "One recipe of the grid."
    from llm_workbook import Recipe, spec
    nodes, processes, micro, _ = GRID[preset]
    capped = spec(preset).softcap  # torch's own attention cannot cap the scores
    attention = 'eager' if capped else 'sdpa'
    plain = Recipe(
        name='grid',
        model={'source': preset, 'attention': attention},
        data={'source': 'sample-conversations'},
        method={'kind': 'full'},
        cluster={'nodes': nodes, 'processes': processes, 'device': 'cuda'},
        sharding={'activation_checkpointing': 'full'},
        batch={'micro': micro, 'length': 2048},
    )
    return plain.changed(RECIPES[name])


def fullest_instant(ledger) -> str:
    "When the tensors of a step are the most, by the ledger."
    sums = Counter()
    for line in ledger.lines:
        if (line.phase, line.place) == ('step', 'gpu'): sums[line.instant] += line.size_b
    return max(filter(None, sums), key=sums.get)


def row(preset: str, name: str) -> dict:
    "Plan one recipe and rehearse it."
    from llm_workbook.plan.ledger import memory
    from llm_workbook.rehearsal.step import rehearse
    planned = recipe(preset, name)
    ledger, rehearsal = memory(planned), rehearse(planned)
    ledger_b, peak = ledger.total('step', level='allocated'), rehearsal.timeline.peak
    return {
        'preset': preset,
        'recipe': name,
        'ranks': planned.cluster.ranks,
        'ledger_b': ledger_b,
        'rehearsal_b': rehearsal.peak_b,
        'difference': round(100 * (ledger_b / rehearsal.peak_b - 1), 3),
        'ledger_instant': fullest_instant(ledger),
        'rehearsal_instant': ', '.join(filter(None, (peak.phase, peak.where, peak.op))),
        'seconds': round(rehearsal.seconds, 1),
    }


def rows(pairs: Iterable[tuple[str, str]]) -> list[dict]:
    "Two at a time, each in a process that has rehearsed before."
    with ProcessPoolExecutor(2, get_context('spawn')) as pool:
        return list(pool.map(row, *zip(*pairs)))


def measure() -> dict:
    "Go through the grid; the value is the median difference; what is beyond the goal has a reason."
    compared = rows(PAIRS)
    for pair in compared:
        if abs(pair['difference']) <= GOAL: continue
        pair['why'] = WHY.get((pair['preset'], pair['recipe']), 'not known yet')
    differences = [abs(pair['difference']) for pair in compared]
    return record('rehearsal_grid', differences, '%', goal=GOAL, rows=compared)
