"""Largest difference, in bytes, between the plan of a recipe and its run on 2 to 4 CPU ranks."""
import tempfile
from collections import Counter
from pathlib import Path

from bench.record import record
from bench.shared.real_ranks import make_base, run_recipe, run_trainer

CLASSES = 'weights', 'payload', 'absmax', 'adapters', 'gradients', 'master', 'optimizer'
# Held too: rotary tables, counts of steps, buckets of DDP and ZeRO-3
SMALL = 'buffers', 'counters', 'collective', 'zero_buckets'
# Small random models; odd ones have tensors whose rows neither 2, 3 nor 4 divides, `even` has none
_FIELDS = (
    'model_type', 'hidden_size', 'intermediate_size', 'num_attention_heads', 'num_key_value_heads',
    'head_dim', 'vocab_size')


def _config(*values, layers: int = 3, tied: bool = False, **more) -> dict:
    same = {'num_hidden_layers': layers, 'tie_word_embeddings': tied,
            'max_position_embeddings': 128}
    return dict(zip(_FIELDS, values)) | same | more


BASES = {'odd-llama': _config('llama', 60, 92, 5, 1, 12, 101),
         'odd-qwen3': _config('qwen3', 52, 100, 3, 1, 20, 107, tied=True),
         'odd-gemma2': _config('gemma2', 44, 76, 2, 1, 18, 109, layers=2, tied=True,
                               sliding_window=32),
         'odd-mixtral': _config('mixtral', 40, 56, 2, 1, 22, 103, layers=2, num_local_experts=3,
                                num_experts_per_tok=2),
         'even-llama': _config('llama', 96, 192, 4, 2, 24, 144)}
_FLOAT32 = {'precision.compute': 'float32'}
_TRAIN = {'batch.length': 128, 'optimizer.steps': 3, 'batch.loss_head': 'chunked'}
# name: strategy, ranks, method, base, further changes to a recipe
CASES = {
    'fsdp2-full-fp32': ('fsdp2', 2, 'full', 'odd-llama', _FLOAT32),
    'fsdp2-full-bf16': ('fsdp2', 4, 'full', 'odd-qwen3', {}),
    'fsdp2-full-even': ('fsdp2', 3, 'full', 'even-llama', _FLOAT32),
    'fsdp2-full-accumulated': ('fsdp2', 3, 'full', 'odd-llama', {'batch.accumulation': 2}),
    'fsdp2-full-each-reduced': ('fsdp2', 3, 'full', 'odd-llama', {
        'batch.accumulation': 2, 'sharding.sync_each_batch': True}),
    'fsdp2-full-checkpointed': ('fsdp2', 2, 'full', 'odd-gemma2',
                                {'sharding.activation_checkpointing': 'full'}),
    'fsdp2-full-hybrid': ('fsdp2', 4, 'full', 'odd-llama', _FLOAT32 | {'sharding.group': 2}),
    'fsdp2-full-sgd': ('fsdp2', 3, 'full', 'odd-llama',
                       {'optimizer.kind': 'sgd', 'optimizer.clip': 0.0}),
    'fsdp2-lora': ('fsdp2', 3, 'lora', 'odd-llama', {}),
    'fsdp2-lora-kept': ('fsdp2', 2, 'lora', 'odd-qwen3', {'sharding.reshard_after_forward': False}),
    'fsdp2-qlora': ('fsdp2', 3, 'qlora', 'odd-llama', {}),
    'fsdp2-qlora-single': ('fsdp2', 2, 'qlora', 'odd-gemma2', {'method.double_quant': False}),
    'fsdp2-lora-dora': ('fsdp2', 3, 'lora', 'odd-qwen3', {'method.dora': True}),
    'fsdp2-qlora-dora': ('fsdp2', 2, 'qlora', 'odd-llama', {'method.dora': True}),
    'fsdp2-qlora-tiny': ('fsdp2', 2, 'qlora', 'tiny-base', {}),
    'fsdp2-qlora-experts': ('fsdp2', 4, 'qlora', 'odd-mixtral', {}),
    # The library's trainer: accelerate cuts other units
    'trainer-full': ('fsdp2', 3, 'full', 'tiny-base', _TRAIN),
    'trainer-qlora': ('fsdp2', 3, 'qlora', 'tiny-base', _TRAIN),
    'ddp-full': ('ddp', 2, 'full', 'odd-llama', {}),
    'ddp-lora': ('ddp', 3, 'lora', 'odd-llama', {}),
    'ddp-qlora-uint8': ('ddp', 2, 'qlora', 'odd-qwen3', {'method.storage': 'uint8'}),
    'ddp-full-adafactor': ('ddp', 2, 'full', 'odd-llama', {'optimizer.kind': 'adafactor'}),
    'ddp-full-8bit': ('ddp', 2, 'full', 'even-llama', {'optimizer.kind': 'adamw_8bit'}),
    'zero1-full-bf16': ('zero1', 4, 'full', 'odd-qwen3', {}),
    'zero1-full-accumulated': ('zero1', 2, 'full', 'odd-llama', {'batch.accumulation': 2}),
    'ddp-lora-dora': ('ddp', 2, 'lora', 'odd-llama',
                      {'method.dora': True, 'method.scaling': 'rslora'}),
    'zero1-lora': ('zero1', 2, 'lora', 'odd-llama', {}),
    'zero2-full-fp32': ('zero2', 3, 'full', 'odd-llama', _FLOAT32),
    'zero2-full-accumulated': ('zero2', 3, 'full', 'odd-llama', {'batch.accumulation': 2}),
    'zero2-qlora': ('zero2', 4, 'qlora', 'odd-llama', {}),
    'zero3-full-bf16': ('zero3', 3, 'full', 'odd-llama', {}),
    'zero3-full-fp32': ('zero3', 2, 'full', 'odd-qwen3', _FLOAT32),
    'zero3-lora': ('zero3', 3, 'lora', 'odd-gemma2', {}),
    'zero2-qlora-dora': ('zero2', 3, 'qlora', 'odd-llama', {'method.dora': True}),
    'zero3-lora-dora': ('zero3', 2, 'lora', 'odd-llama', {'method.dora': True}),
    'zero3-qlora': ('zero3', 4, 'qlora', 'odd-llama', {'zero.persistence_threshold': 1000}),
}
_BUCKETS = {'zero.reduce_bucket': 20_000, 'zero.allgather_bucket': 20_000,
            'zero.prefetch_bucket': 20_000,
            # DeepSpeed's own are larger than the whole of these models
            'zero.persistence_threshold': 100}


def case(name: str, folder: Path) -> tuple:
    "Make the recipe of one case; give it with the directory or name of its base."
    from llm_workbook.config.recipe import Data, Model, Recipe
    strategy, ranks, method, base, changes = CASES[name]
    source = str(make_base(BASES[base], folder/base)) if base in BASES else base
    # Its code caps the scores, which torch's own attention cannot
    attention = 'eager' if base == 'odd-gemma2' else 'sdpa'
    plain = Recipe(name=name, model=Model(source=source, attention=attention),
                   data=Data(source='sample-conversations'))
    buckets = _BUCKETS if strategy.startswith('zero') else {}
    return plain.changed({'sharding.strategy': strategy, 'cluster.processes': ranks,
                          'method.kind': method, 'method.rank': 4,
                          'batch.micro': 2, 'batch.length': 16, 'batch.loss_head': 'full',
                          **buckets, **changes}), source


# The plan against the ranks

# When a rank's memory was read -> the ledger's instant
INSTANTS = {'between': 'forward', 'backward': 'optimizer', 'step': 'optimizer'}


def planned(ledger, read: str) -> Counter:
    """Sum by class what `ledger` says is held when a rank is `read`.

    Padding counts to the class that it fills up. Only gradients come and go within a step.
    """
    sums = Counter()
    for line in ledger.lines:
        kind = line.pads or line.kind
        instants = ('', INSTANTS[read]) if kind == 'gradients' else ('',)
        held = line.phase == 'step' and line.instant in instants
        if held and kind in CLASSES + SMALL: sums[kind] += line.size_b
    return sums


def bytes_apart(recipe, results: list) -> dict:
    "Compare every rank with its ledger; give class -> largest difference in bytes, if any."
    from llm_workbook.plan.ledger import memory
    apart = Counter()
    for rank, result in enumerate(results):
        ledger = memory(recipe, rank=rank)
        for read, found in result['held'].items():
            plan = planned(ledger, read)
            # Dropped with the step
            if read == 'step' and 'gradients' not in found: del plan['gradients']
            kinds = CLASSES + SMALL * (read == 'backward')
            for kind in kinds: apart[kind] = max(apart[kind], abs(plan[kind] - found.get(kind, 0)))
    return dict(+apart)


def sent_apart(recipe, results: list, trainer: bool = False) -> dict:
    """Compare the collectives of every rank with the plan's.

    Give what one side alone has: (kind, bytes) -> how often.
    """
    from llm_workbook.plan.collectives import step_messages
    plan, found = Counter(), [messages(result['collectives']) for result in results]
    large, small = step_messages(recipe, units='trainer' if trainer else 'shard_model')
    layers = [c for x in large for c in (*x.forward_gathers, *x.backward_gathers, *x.reductions)]
    for c in [*layers, *small]:
        # A bare loop gathers nothing for a log
        if trainer or c.instant != 'trainer': plan[c.kind, c.tensor_b] += c.count
    # Votes: is a value not finite, was a rank told to stop; on a group of their own
    if trainer: plan['all_reduce', 8] += 2
    more, less = max((f - plan for f in found), key=Counter.total), max((plan - f for f in found),
                                                                        key=Counter.total)
    return {side: dict(extra) for side, extra in (('only run', more), ('only planned', less))
            if extra}


def messages(collectives: list) -> Counter:
    "Count what a rank sent in a step: (kind, bytes of the whole tensor) -> how often."
    return Counter((kind, size) for _, kind, size in collectives)


def run(name: str, folder: Path) -> tuple:
    """Run one case.

    Give its recipe, the result of every rank, and what differs: bytes by class, and messages.
    """
    recipe, base = case(name, folder)
    trainer = name.startswith('trainer')
    results = run_trainer(recipe, folder/name) if trainer else run_recipe(recipe, base)
    sent = sent_apart(recipe, results,
                      trainer) if recipe.sharding.strategy in ('fsdp2', 'ddp') else {}
    return recipe, results, bytes_apart(recipe, results), sent


def row(name: str, folder: Path) -> dict:
    "Run one case and make its row of the record."
    recipe, results, apart, sent = run(name, folder)
    found = messages(results[0]['collectives'])
    return {'recipe': name, 'model': CASES[name][3], 'strategy': recipe.sharding.strategy,
            'method': recipe.method.kind,
            'ranks': len(results), 'differences_b': apart,
            'held_b': [sum(r['held']['backward'].get(kind, 0) for kind in CLASSES)
                       for r in results],
            'collectives': found.total(), 'collectives_b': sum(size * n for (_, size),
                                                               n in found.items()),
            'collectives_differ': {side: [[*message, n] for message, n in extra.items()] for side,
                                   extra in sent.items()}}


def measure() -> dict:
    """Run every case.

    The value is the largest difference of a class on any rank, and the bytes of collectives that
    one side lacks.
    """
    with tempfile.TemporaryDirectory() as folder: rows = [row(name, Path(folder)) for name in CASES]
    missed = [sum(size * n for extra in r['collectives_differ'].values() for _, size, n in extra)
              for r in rows]
    largest = max(max(r['differences_b'].values(), default=0) + b for r, b in zip(rows, missed))
    return record('ledger_bytes', [largest], 'bytes', goal=0, recipes=rows, packages=['deepspeed'])
