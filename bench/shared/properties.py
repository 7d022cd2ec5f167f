"""What must hold of the memory of every recipe: each property is a function of `PROPERTIES`."""
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from bench.shared.random_recipes import neighbour
from llm_workbook.config.document import RecipeError
from llm_workbook.model.spec import spec_of
from llm_workbook.plan.ledger import memory
from llm_workbook.plan.padding import padding_note

HELD = ('weights', 'payload', 'absmax', 'adapters', 'padding', 'buffers', 'master', 'optimizer',
        'counters')


class Property(NamedTuple):
    "One thing that holds of every recipe."
    name: str  # In words
    broken: Callable  # Recipe -> what is wrong, or ''


@lru_cache(64)
def ledger(recipe): return memory(recipe, spec_of(recipe))


def planned(recipe, changes: dict):
    "Plan a neighbour; None where a rule or the model refuses it."
    other = neighbour(recipe, changes)
    try: return other and ledger(other)
    except RecipeError: return None


def held_b(found, kinds: tuple = HELD) -> int:
    "Bytes that outlive a step, wherever they lie."
    return sum(line.size_b for line in found.lines
               if line.phase == 'step' and not line.instant and line.kind in kinds)


def kept_b(found) -> int:
    "Activations and logits at the instant that has most of them."
    sums = {}
    for line in found.lines:
        if line.phase == 'step' and line.kind in ('activations', 'logits'):
            sums[line.instant] = sums.get(line.instant, 0) + line.size_b
    return max(sums.values())


def slack_b(found) -> int:
    "What padding to equal parts may add: a number of 8 bytes for each rank and tensor."
    tensors = sum(unit.count * len(unit.weights) for unit in found.spec.units)
    return 8 * 2 * found.recipe.cluster.ranks * tensors


def is_small(recipe) -> bool: return ledger(recipe).spec.parameters < 10**8


def ordered(*rows: tuple) -> str:
    "Say which of (name, bytes) is more than the next one; those that are None do not count."
    there = [row for row in rows if row[1] is not None]
    for (name, size_b), (after, after_b) in zip(there, there[1:]):
        if size_b > after_b: return f'{name}: {size_b:,} bytes, {after}: {after_b:,} bytes'
    return ''


def is_planned(recipe) -> str:
    "Every line has 0 bytes or more, and nothing but a RecipeError ends a plan."
    wrong = [line for line in ledger(recipe).lines
             if type(line.size_b) is not int or line.size_b < 0]
    return ', '.join(f'{line.name}: {line.size_b} bytes' for line in wrong)


def offload_frees(recipe) -> str:
    """Offload does not raise the bytes of a GPU.

    DeepSpeed's buffers are apart: with `contiguous` unset, and where a rank has so little of the
    weights that the largest gradient is more than all that it offloads.
    """
    away, deepspeed = 'sharding.offload_optimizer', recipe.sharding.strategy in ('zero1', 'zero2')
    if deepspeed: recipe = recipe.changed({'zero.contiguous': True})
    here = planned(recipe, {away: 'none', 'sharding.offload_parameters': 'none'})
    states = 'cpu' if recipe.sharding.strategy.startswith('zero') else 'none'
    second = planned(recipe, {away: states, 'sharding.offload_parameters': 'none'})
    both = planned(recipe, {away: 'cpu', 'sharding.offload_parameters': 'cpu'})
    if here is None: return ''
    for other in filter(None, (second, both)):
        buffers_b = sum(line.size_b for line in other.lines
                        if line.name == 'largest gradient, on the GPU')
        moved_b = sum(line.size_b for line in here.lines if line.phase == 'step' and line.kind in
                      ('master', 'optimizer'))
        if buffers_b > moved_b: continue
        for level in ('allocated', 'device'):
            there = other.total('step', level=level), here.total('step', level=level)
            said = ordered(('offloaded', there[0]), ('not offloaded', there[1]))
            if said: return f'{level}: {said}'
    return ''


def ranks_share(recipe) -> str:
    "With twice the ranks, each holds no more between steps."
    if recipe.sharding.strategy == 'none': return ''
    more = planned(recipe, {'cluster.nodes': 2 * recipe.cluster.nodes})
    return ordered(('twice the ranks', held_b(more)),
                   ('the ranks', held_b(ledger(recipe)) + slack_b(more)))


def ranks_lighten(recipe) -> str:
    "With twice the ranks, a step takes no more, unless the plan says so."
    if recipe.sharding.strategy == 'none': return ''
    more = planned(recipe, {'cluster.nodes': 2 * recipe.cluster.nodes})
    if padding_note(more): return ''
    few_b = int(1.0101 * ledger(recipe).total('step', level='allocated'))  # Less is no note
    return ordered(('twice the ranks', more.total('step', level='allocated')),
                   ('the ranks and 1 %', few_b + slack_b(more)))


def first_rank_is_fullest(recipe) -> str:
    "No rank takes more than the first; under ZeRO-1 and ZeRO-2, no more than 2 % more."
    last = recipe.cluster.ranks - 1
    margin = 1.02 if recipe.sharding.strategy in ('zero1', 'zero2') else 1
    first_b = margin * ledger(recipe).total('step')
    for rank in {last, last // 2}:
        there = memory(recipe, spec_of(recipe), rank=rank).total('step')
        if there > first_b: return ordered((f'rank {rank}', there), ('rank 0', int(first_b)))
    return ''


def rows_add(recipe) -> str:
    "Longer rows, and more of them, keep no fewer activations."
    few_b = kept_b(ledger(recipe))
    for path, value in ('batch.length', recipe.batch.length), ('batch.micro', recipe.batch.micro):
        more = planned(recipe, {path: 2 * value})
        said = ordered((path, few_b), (f'{path} doubled', kept_b(more)))
        if said: return said
    return ''


def checkpointing_frees(recipe) -> str:
    """Selective checkpointing keeps no more than none, and full no more than selective.

    Activations on the host are apart: five tensors are on their way there, whatever their size.
    """
    if recipe.sharding.offload_activations != 'none': return ''
    rows = []
    for how in ('full', 'selective', 'none'):
        found = planned(recipe, {'sharding.activation_checkpointing': how,
                                 'sharding.reentrant': False})
        waiting_b = found and sum(line.size_b for line in found.lines
                                  if line.instant == 'loss' and line.name == 'kept by the layers')
        rows.append((how, waiting_b))
    return ordered(*rows)


def methods_are_ordered(recipe) -> str:
    """QLoRA holds no more than LoRA, and LoRA no more than a full fine-tune with AdamW.

    The scales of packed weights are apart where ranks share the weights: every rank holds all. So
    are models so small that adapters are a tenth of them.
    """
    if is_small(recipe): return ''
    changes = {'optimizer.kind': 'adamw', 'method.rank': 8, 'precision.compute': 'bfloat16',
               'precision.loss_scale': 'none', 'method.storage': 'bfloat16'}
    plans = [(kind, planned(recipe, changes | {'method.kind': kind}))
             for kind in ('qlora', 'lora', 'full')]
    shared = recipe.sharding.strategy in ('fsdp1', 'fsdp2', 'zero3')
    kinds = tuple(kind for kind in HELD if kind != 'absmax' or not shared)
    return ordered(*((kind, found and held_b(found, kinds)) for kind, found in plans))


def loading_is_ordered(recipe) -> str:
    """Loading by parts takes no more of a GPU than by rank 0, and that no more than by every rank.

    A model so small that one tensor is more than a rank's part is apart.
    """
    if is_small(recipe): return ''
    plans = [(how, planned(recipe, {'sharding.loading': how}))
             for how in ('sharded', 'rank0', 'every_rank')]
    return ordered(*((how, found and found.total('load')) for how, found in plans))


PROPERTIES = (
    Property('a recipe gives a number or a RecipeError, and no line is negative', is_planned),
    Property('offload does not raise the bytes of a GPU', offload_frees),
    Property('more ranks hold no more between steps', ranks_share),
    Property('more ranks take no more in a step', ranks_lighten),
    Property('rank 0 takes the most', first_rank_is_fullest),
    Property('more tokens keep no fewer activations', rows_add),
    Property('checkpointing keeps less', checkpointing_frees),
    Property('QLoRA holds no more than LoRA, LoRA no more than a full fine-tune',
             methods_are_ordered),
    Property('loading by parts takes the least', loading_is_ordered))


def judged(recipe, broken: Callable) -> str:
    "Judge one property; a model that refuses the recipe has none, and any other error breaks it."
    try:
        ledger(recipe)
        return broken(recipe)
    except RecipeError: return ''
    except Exception as error: return f'{type(error).__name__}: {error}'
