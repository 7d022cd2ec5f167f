"""Random recipes that no rule refuses, for the properties of the plan."""
from functools import lru_cache

from hypothesis import strategies as st
from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Recipe

PLAIN = Recipe(
    name='random', model={'source': 'llama-3.2-1b'}, data={'source': 'sample-conversations'},
    method={'kind': 'full'}, cluster={'processes': 1, 'device': 'cuda'},
    sharding={'strategy': 'none'})
MODELS = (
    'llama-3.2-1b', 'llama-3.1-8b', 'llama-3.1-70b', 'qwen2.5-7b', 'qwen3-8b', 'gemma-2-9b',
    'gemma-3-4b-text', 'mixtral-8x7b', 'gpt-oss-20b', 'tiny-base')
SHARDED, ZERO = ('fsdp2', 'fsdp1', 'zero3'), ('zero1', 'zero2', 'zero3')


@lru_cache(None, typed=True)  # Made anew for each draw, it takes as long as to draw
def one_of(*values): return st.sampled_from(values)


def _method(draw, strategy: str) -> dict:
    quants = ('nf4',) if strategy.startswith('fsdp') else ('nf4', 'int8')
    return {
        'method.kind': draw(one_of('full', 'lora', 'qlora')),
        'method.rank': draw(one_of(16, 8)),
        'method.dropout': draw(one_of(0., .1)),
        'method.targets': draw(one_of('all-linear', ('q_proj', 'v_proj'))),
        'method.quant': draw(one_of(*quants))}


def _precision(draw, strategy: str, kind: str, device: str) -> dict:
    one_type = strategy == 'fsdp1' and kind != 'full'
    types = ['bfloat16', 'float32'] if one_type else ['bfloat16', 'float32', 'float16']
    if device == 'cuda' and kind != 'qlora' and not one_type: types.append('fp8')
    compute = draw(one_of(*types))
    masters = ('float32',) if strategy in ZERO else ('float32', 'bfloat16')
    storages = (compute, 'uint8') if not strategy.startswith('fsdp') else (compute,)
    return {
        'precision.compute': compute,
        'precision.master': compute if one_type else draw(one_of(*masters)),
        'precision.reduce': draw(one_of(None, 'float32')),
        'precision.loss_scale': 'dynamic' if compute == 'float16' else 'none',
        'method.storage': draw(one_of(*storages)) if kind == 'qlora' else 'bfloat16'}


def _cluster(draw, strategy: str) -> dict:
    alone = strategy == 'none'
    return {
        'cluster.device': draw(one_of('cuda', 'cpu')),
        'cluster.processes': 1 if alone else draw(one_of(2, 1, 4, 8, 3)),
        'cluster.nodes': 1 if alone else draw(one_of(1, 2, 4, 16))}


def _offload(draw, strategy: str) -> dict:
    parameters = optimizer = 'none'
    if strategy in ('zero1', 'zero2'): optimizer = draw(one_of('none', 'cpu'))
    if strategy == 'zero3':
        parameters = draw(one_of('none', 'cpu', 'nvme'))
        optimizer = draw(one_of('none', 'cpu', 'nvme'))
    if strategy.startswith('fsdp'): parameters = optimizer = draw(one_of('none', 'cpu'))
    return {
        'sharding.offload_parameters': parameters, 'sharding.offload_optimizer': optimizer,
        'sharding.pin_memory': draw(one_of(True, False))}


def _sharding(draw, strategy: str, kind: str, ranks: int) -> dict:
    checkpointing = draw(one_of('none', 'selective', 'full'))
    groups = [None]
    if strategy == 'fsdp2' and ranks % 2 == 0: groups.append(2)
    every_rank = strategy not in SHARDED or strategy == 'zero3' and kind == 'qlora'
    loadings = ('every_rank',) if every_rank else ('every_rank', 'rank0', 'sharded')
    once = checkpointing == 'full' and strategy not in ('fsdp2', 'ddp')
    resharding = (True, False) if strategy.startswith('fsdp') else (True,)
    return _offload(draw, strategy) | {
        'sharding.strategy': strategy,
        'sharding.activation_checkpointing': checkpointing,
        'sharding.group': draw(one_of(*groups)),
        'sharding.loading': draw(one_of(*loadings)),
        'sharding.reentrant': draw(one_of(False, True)) if once else False,
        'sharding.reshard_after_forward': draw(one_of(*resharding))}


def _optimizer(draw, strategy: str, on_cpu: bool) -> str:
    if strategy in ZERO: kinds = ('adamw', 'adamw_fused', 'sgd', 'adamw_8bit')
    elif strategy == 'fsdp2': return draw(one_of('adamw', 'adamw_fused', 'sgd', 'adamw_bf16'))
    else: kinds = ('adamw', 'sgd', 'adamw_bf16', 'adafactor', 'adamw_8bit')
    return draw(one_of(*(kinds[:-1] if on_cpu else kinds)))


def _batch(draw) -> dict:
    return {
        'batch.micro': draw(one_of(1, 4)),
        'batch.accumulation': draw(one_of(1, 4)),
        'batch.length': draw(one_of(1024, 128, 8192)),
        'batch.packing': draw(one_of(False, True))}


def _zero(draw, strategy: str) -> dict:
    if strategy not in ZERO: return {}
    return {
        'zero.reduce_bucket': draw(one_of(500_000_000, 10_000_000)),
        'zero.persistence_threshold': draw(one_of(100_000, 0)),
        'zero.max_live': draw(one_of(1_000_000_000, 1_000_000)),
        'zero.overlap': draw(one_of(True, False)),
        'zero.contiguous': draw(one_of(True, False))}


@st.composite
def recipes(draw) -> Recipe:
    "Draw a recipe that no rule refuses; one that a rule does refuse shows that this file is old."
    strategy = draw(one_of('none', 'ddp', 'fsdp2', 'fsdp2', 'fsdp1', 'zero1', 'zero2', 'zero3'))
    changes = _method(draw, strategy) | _cluster(draw, strategy)
    kind, device = changes['method.kind'], changes['cluster.device']
    changes |= _precision(draw, strategy, kind, device)
    attentions = ['sdpa', 'eager']
    if device == 'cuda' and changes['precision.compute'] != 'float32': attentions.append('flash')
    ranks = changes['cluster.processes'] * changes['cluster.nodes']
    changes |= _sharding(draw, strategy, kind, ranks) | _batch(draw) | _zero(draw, strategy)
    offloads = changes['sharding.offload_optimizer'] != 'none'
    changes |= {
        'model.source': draw(one_of(*MODELS)), 'model.attention': draw(one_of(*attentions)),
        'optimizer.kind': _optimizer(draw, strategy, offloads),
        'intervals.saving': draw(one_of(0, 50)),
        'intervals.checkpoint': draw(one_of('sharded', 'full'))}
    return _rarer(draw, PLAIN.changed(changes))


# Fields that many rules keep apart from others: a value that a rule refuses is left at its default
RARER = {
    'model.kernels': ('plain', 'compile', 'liger'), 'batch.loss_head': ('chunked', 'full', 'fused'),
    'batch.padded': (False, True), 'precision.frozen': (None, 'norms', 'float32'),
    'method.keep_inputs': (False, True), 'optimizer.in_backward': (False, True),
    'sharding.offload_activations': ('none', 'cpu')}


def _rarer(draw, recipe: Recipe) -> Recipe:
    for field, values in RARER.items():
        value = draw(one_of(*values))
        if value != values[0]: recipe = neighbour(recipe, {field: value}) or recipe
    return recipe


def neighbour(recipe: Recipe, changes: dict) -> Recipe | None:
    "Change a recipe; None where a rule refuses that."
    try: return recipe.changed(changes)
    except RecipeError: return None


def minimal(recipe: Recipe) -> dict:
    "Give what differs from the plain recipe, for a message."
    plain = PLAIN.facts()
    return {field: value for field, value in recipe.facts().items()
            if value != plain[field] and field not in ('cluster.ranks', 'batch.global', 'zero.set')}
