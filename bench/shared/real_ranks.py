"""Run optimizer steps of a recipe on real CPU ranks.

Every rank says to the byte what it holds, by class, and what it sends.
"""
import gc
import os
import re
import time
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

# Batches and small tables, which no class of the plan names
SMALL_REST_B = 5_000
# torch's names of its operations -> ours
KINDS = {'_allgather_base_': 'all_gather', '_reduce_scatter_base_': 'reduce_scatter',
         'allreduce_': 'all_reduce',
         'all_reduce': 'all_reduce', 'broadcast_': 'broadcast', 'reduce_': 'reduce',
         'allgather_': 'all_gather',
         'reduce_scatter_': 'reduce_scatter', 'all_gather_into_tensor': 'all_gather',
         'reduce_scatter_tensor': 'reduce_scatter',
         'allgather_into_tensor_coalesced_': 'all_gather',
         'reduce_scatter_tensor_coalesced_': 'reduce_scatter'}


@cache
def warm_up() -> None:
    "Import once, before ranks are forked, what every rank needs."
    os.environ.setdefault('DS_ACCELERATOR', 'cpu')
    import llm_workbook.model.quantize  # First: it silences bitsandbytes
    import deepspeed
    import peft
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import transformers
    from deepspeed.ops import __compatible_ops__
    assert llm_workbook.model.quantize and peft
    transformers.utils.logging.disable_progress_bar()
    deepspeed.utils.logger.setLevel('ERROR')
    # Else its first use compiles an all-reduce through shared memory
    __compatible_ops__['deepspeed_shm_comm'] = False


def make_base(config: dict, folder: Path) -> Path:
    "Write a random model of `config` into `folder`, in bfloat16, unless it is there."
    warm_up()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    if not (folder/'config.json').exists():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config),
                                                     dtype=torch.bfloat16)
        model.save_pretrained(folder)
    return folder


# What a rank holds: (class, tensor), wherever torch, FSDP2, bitsandbytes and DeepSpeed keep one

def parameters(model):
    "Yield parameters, with ZeRO-3's parts of them, the statistics of packed ones, and buffers."
    from bitsandbytes.nn import Linear4bit
    layers = [m for m in model.modules() if isinstance(m, Linear4bit)]
    packed = {id(layer.weight) for layer in layers}
    for name, p in model.named_parameters():
        kind = 'payload' if id(p) in packed else 'adapters' if '.lora_' in name else 'weights'
        yield from ((kind, part) for part in (p.data, getattr(p, 'ds_tensor', None)))
    for state in (layer.quant_state for layer in layers):
        yield from (('absmax', part) for part in (state.absmax, state.code))
        if state.nested: yield from (('absmax', part)
                                     for part in (state.offset, state.state2.absmax,
                                                  state.state2.code))
    yield from (('buffers', buffer) for buffer in model.buffers())


def gradients(model, optimizer):
    "Yield gradients."
    from torch.distributed.fsdp import FSDPModule
    for p in model.parameters(): yield from (('gradients', part)
                                             for part in (p.grad, getattr(p, 'grad_accum', None)))
    for module in model.modules():
        group = isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group
        for p in group.fsdp_params if group else ():  # Whole, between the micro-batches of a step
            yield 'gradients', p.unsharded_accumulated_grad
            yield 'gradients', getattr(getattr(p, '_unsharded_param', None), 'grad', None)
    yield 'gradients', getattr(optimizer, 'grad_partitions_flat_buffer', None)
    for kept in ('averaged_gradients', 'all_grad_tensors'):
        for parts in (getattr(optimizer, kept, None)
                      or {}).values(): yield from (('gradients', part) for part in parts or ())


def optimizer_tensors(optimizer):
    "Yield what an optimizer keeps: states, counters apart, and ZeRO's fp32 partitions and buckets."
    for kept in ('single_partition_of_fp32_groups', 'fp32_partitioned_groups_flat'):
        for part in getattr(optimizer, kept, ()): yield from (('master', part),
                                                              ('gradients', part.grad))
    for kept in ('bit16_groups_flat', 'lp_param_buffer'):  # What the parameters are views of
        flat = getattr(optimizer, kept, None)
        yield from (('weights', part) for part in (flat if isinstance(flat, list) else [flat]))
    for bucket in getattr(optimizer, 'ipg_buckets', {}).values():
        yield from (('zero_buckets', part) for part in (bucket.buffer
                                                        if isinstance(bucket.buffer, list)
                                                        else [bucket.buffer]))
    for state in getattr(optimizer, 'optimizer', optimizer).state.values():
        yield from (('optimizer' if getattr(value, 'ndim', 0) else 'counters', value)
                    for value in state.values())


def storage(tensor) -> tuple[int, int]:
    "Give address and bytes of the storage behind a tensor, or behind this rank's part of it."
    raw = getattr(tensor, '_local_tensor', tensor).untyped_storage()
    return raw.data_ptr(), raw.nbytes()


def unnamed_b(seen: set) -> int:
    "Sum the storages of the tensors that Python knows and `seen` does not list, bytes."
    import torch
    gc.collect()
    seen, total_b = set(seen), 0
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or thing.is_meta: continue
        where, size = storage(thing)
        total_b += size * (where not in seen)
        seen.add(where)
    return total_b


def buckets_b(model) -> int:
    "Sum DDP's buckets, whose size C++ tells and no class of tensors names; 0 for other models."
    if not hasattr(model, '_get_ddp_logging_data'): return 0
    return sum(map(int, re.findall(r'\d+', model._get_ddp_logging_data()['bucket_sizes'])))


def inventory(model, optimizer) -> tuple[dict, int]:
    """Sum the storages by the class that names each first; sum those that no class names.

    A thread of gloo lets go of a collective's buffers only after the rank has gone on. On a busy
    machine they are still there when the rank counts; so it counts again, for at most 2 seconds.
    """
    import torch
    seen, held = set(), {}
    gc.collect()
    for kind, tensor in (*parameters(model), *optimizer_tensors(optimizer),
                         *gradients(model, optimizer)):
        where, size = storage(tensor) if torch.is_tensor(tensor) else (0, 0)
        if size and where not in seen: held[kind] = held.get(kind, 0) + size
        seen.add(where)
    buckets = buckets_b(model)
    if buckets: held['collective'] = buckets
    end = time.monotonic() + 2
    while (rest := unnamed_b(seen) - buckets) > SMALL_REST_B and time.monotonic() < end:
        time.sleep(0.02)
    return held, rest


# What a rank sends

@contextmanager
def recorded(log: list, instant: list):
    """Append (instant, kind, bytes of the whole tensor) to `log` for every collective of the block.

    They are read from its arguments.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            # It comes back as plain tensors and their collectives
            if DTensor in types: return NotImplemented
            out = function(*args, **(kwargs or {}))
            space, _, operation = function._schema.name.partition('::')
            if space in ('c10d', '_c10d_functional') and operation in KINDS:
                sides = [[t for t in tree_leaves(side) if torch.is_tensor(t)]
                         for side in (*args, out)]
                log.append((instant[0], KINDS[operation],
                            max(sum(t.nbytes for t in side) for side in sides)))
            return out
    with Recorder(): yield


class Untracked:
    """Stand in for the tracker of modules in `CommDebugMode`.

    It fails in the second forward pass, and counts do not need it.
    """
    name, is_bw, activation_checkpointing = '', False, False
    module_parents_dict = {'': ()}

    def __enter__(self): return self

    def __exit__(self, *what): return None


# How a rank steps

def shard_fsdp2(model, recipe, policy):
    """Shard with `shard_model`, or as it does: it takes no mixed-precision policy."""
    from llm_workbook.model.recompute import recompute_selectively
    from llm_workbook.parallel.shard import shard_model
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    ranks, group = recipe.cluster.ranks, recipe.sharding.group or recipe.cluster.ranks
    if policy is None: return shard_model(model, recipe.sharding)
    mesh = init_device_mesh('cpu', (ranks // group, group), mesh_dim_names=('replicas', 'shards'))
    how = {'mesh': mesh if group < ranks else mesh['shards'], 'mp_policy': policy}
    if recipe.sharding.activation_checkpointing == 'selective': recompute_selectively(model)
    for name, layer in [(name, m) for name, m in model.named_modules()
                        if type(m).__name__ in model._no_split_modules]:
        if recipe.sharding.activation_checkpointing == 'full':
            layer = checkpoint_wrapper(layer)
            model.set_submodule(name, layer)
        fully_shard(layer, reshard_after_forward=recipe.sharding.reshard_after_forward, **how)
    return fully_shard(model, **how)


def make_optimizer(recipe, model):
    "Make the optimizer that transformers' trainer makes for `recipe.optimizer.kind`."
    import torch
    from bitsandbytes.optim import AdamW8bit, GlobalOptimManager
    from transformers.optimization import Adafactor
    kinds = {'adamw': torch.optim.AdamW, 'sgd': torch.optim.SGD, 'adamw_8bit': AdamW8bit,
             'adafactor': Adafactor}
    kind, more = recipe.optimizer.kind, {}
    if kind not in kinds:
        raise ValueError(f'optimizer.kind {kind} is not run here: take one of {", ".join(kinds)}')
    if kind == 'adafactor': more = {'scale_parameter': False, 'relative_step': False}
    for module in model.modules() if kind == 'adamw_8bit' else ():
        if isinstance(module, torch.nn.Embedding):
            GlobalOptimManager.get_instance().register_module_override(module, 'weight',
                                                                       {'optim_bits': 32})
    return kinds[kind]([p for p in model.parameters() if p.requires_grad],
                       lr=recipe.optimizer.learning_rate, **more)


class Torch:
    "FSDP2 or DDP, stepped as the trainer does."
    def __init__(self, model, recipe):
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy
        self.recipe, self.fsdp = recipe, recipe.sharding.strategy == 'fsdp2'
        half = torch.bfloat16
        mixed = recipe.method.kind == 'full' and recipe.precision.compute == 'bfloat16'
        self.cast = torch.autocast('cpu', half) if mixed and not self.fsdp else nullcontext()
        policy = MixedPrecisionPolicy(half, getattr(torch, recipe.precision.reduce or 'bfloat16'),
                                      half) if mixed else None
        if self.fsdp: self.model = shard_fsdp2(model, recipe, policy)
        else: self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = make_optimizer(recipe, self.model)

    def micro(self, ids, last: bool, instant: list) -> None:
        "Run one forward and backward pass; ranks exchange gradients in the last."
        instant[0] = 'forward'
        syncs = last or self.recipe.sharding.sync_each_batch
        if self.fsdp: self.model.set_requires_gradient_sync(syncs)
        with nullcontext() if self.fsdp or last else self.model.no_sync():
            with self.cast: loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            instant[0] = 'backward'
            (loss / self.recipe.batch.accumulation).backward()

    def step(self, instant: list) -> None:
        "Clip, step and drop the gradients."
        import torch
        instant[0] = 'clip'
        if self.recipe.optimizer.clip: torch.nn.utils.clip_grad_norm_(self.model.parameters(),
                                                                      self.recipe.optimizer.clip)
        instant[0] = 'optimizer'
        self.optimizer.step()
        self.optimizer.zero_grad()


def engine_config(recipe) -> dict:
    "Say `recipe` in DeepSpeed's words, with torch's AdamW, so that nothing is compiled."
    from llm_workbook.parallel.backends import zero_config
    how = recipe.optimizer
    adamw = {'type': 'AdamW', 'params': {'lr': how.learning_rate, 'weight_decay': how.weight_decay,
                                         'torch_adam': True}}
    return zero_config(recipe) | {'optimizer': adamw}


def decay_groups(model) -> list[dict]:
    "Group what trains as transformers' trainer does: what decays, and what does not."
    from transformers import Trainer
    decays = {*Trainer.get_decay_parameter_names(None, model)}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [{'params': [p for name, p in trained if name in decays]},
              {'params': [p for name, p in trained if name not in decays], 'weight_decay': 0.0}]
    return [group for group in groups if group['params']]


class DeepSpeed:
    "ZeRO, stepped by DeepSpeed's engine; groups of parameters as a trainer has them."
    def __init__(self, model, recipe):
        import deepspeed
        said = engine_config(recipe)
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=model, model_parameters=decay_groups(model), config=said)
        self.model = self.engine.module

    def micro(self, ids, last: bool, instant: list) -> None:
        "Run one forward and backward pass, and the engine's step after all but the last."
        instant[0] = 'forward'
        loss = self.engine(input_ids=ids, labels=ids, use_cache=False).loss
        instant[0] = 'backward'
        self.engine.backward(loss)
        if not last: self.engine.step()

    def step(self, instant: list) -> None:
        "Clip, step and drop the gradients."
        instant[0] = 'optimizer'
        self.engine.step()


# One rank

@contextmanager
def counted(sent: list, instant: list, counts: dict):
    "Record every collective of a block in `sent`, and torch's own counts of them in `counts`."
    from torch.distributed.tensor.debug import CommDebugMode
    counter = CommDebugMode()
    counter.advanced_module_tracker = Untracked()
    with counter, recorded(sent, instant): yield
    counts |= {str(operation).rpartition('.')[2]: n for operation,
               n in counter.get_comm_counts().items()}


def result(seen: dict, sent: list, counts: dict) -> dict:
    """Make the result of a rank.

    Bytes held and bytes no class names at each instant, collectives, and torch's counts of them.
    """
    return {'held': {when: held for when, (held, _) in seen.items()},
            'rest': {when: rest for when, (_, rest) in seen.items()},
            'collectives': sent, 'comm_debug_mode': counts}


def watched(run, batches) -> dict:
    "Run one optimizer step and watch it."
    seen, sent, instant, counts = {}, [], [''], {}
    with counted(sent, instant, counts):
        for i, ids in enumerate(batches, 1):
            run.micro(ids, i == len(batches), instant)
            seen['between' if i < len(batches)
                 else 'backward'] = inventory(run.model, run.optimizer)
        run.step(instant)
        seen['step'] = inventory(run.model, run.optimizer)
    return result(seen, sent, counts)


def loop_rank(recipe, base: str) -> dict:
    """Run `recipe` on this rank in a bare loop, and watch a step.

    It is step 2, or 3 where step 2 looks back at the first, as DDP and ZeRO-3 do.
    """
    import warnings
    import torch
    import torch.distributed as dist
    from llm_workbook.model.adapters import add_adapters
    from llm_workbook.model.quantize import load_base
    warnings.simplefilter('ignore')
    strategy = recipe.sharding.strategy
    model = load_base(base, recipe.method, recipe.precision, 'cpu',
                      attention=recipe.model.attention)
    if recipe.method.kind != 'full': model = add_adapters(model, recipe.method, recipe.seed)
    shape = recipe.batch.accumulation, recipe.batch.micro, recipe.batch.length
    batches = torch.randint(model.config.vocab_size, shape,
                            generator=torch.Generator().manual_seed(dist.get_rank()))
    run = (DeepSpeed if strategy.startswith('zero') else Torch)(model.train(), recipe)
    del model
    for _ in range(1 if strategy == 'fsdp2' else 2):
        for i, ids in enumerate(batches, 1): run.micro(ids, i == len(batches), [''])
        run.step([''])
    return watched(run, batches)


def trainer_rank(recipe, folder: Path, rows: list) -> dict:
    """Run `recipe` on this rank with the library's own `train_rank`.

    Its second step is watched, up to the start of the third.
    """
    import transformers.trainer
    from llm_workbook.training.fine_tune import train_rank
    seen, sent, counts, step = {}, [], {}, []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, optimizer=None, **more):
            if state.global_step == 1:
                step.append(counted(sent, ['step'], counts))
                step[0].__enter__()
            if state.global_step == 2:
                step[0].__exit__(None, None, None)
                seen['step'] = inventory(model, getattr(optimizer, 'optimizer', optimizer))

        def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **more):
            if state.global_step != 1: return
            seen['backward'] = inventory(model, getattr(optimizer, 'optimizer', optimizer))
    transformers.trainer.DEFAULT_CALLBACKS.append(Watch)
    train_rank(recipe, folder, rows)
    return result(seen, sent, counts)


# The only values with which the bare loop does what a recipe says
RUN = {'sharding.offload_parameters': 'none', 'sharding.offload_optimizer': 'none',
       'method.quant': 'nf4', 'batch.packing': False,
       'batch.loss_head': 'full', 'precision.loss_scale': 'none', 'precision.master': 'float32',
       'model.head': 'causal_lm'}
RUN_DDP = {'sharding.activation_checkpointing': 'none'}
RUN_ZERO = RUN_DDP | {'optimizer.kind': 'adamw', 'precision.reduce': None}


def run_recipe(recipe, base: str) -> list:
    "Run `recipe` over `base` in a bare loop on as many ranks as it names; one result per rank."
    from llm_workbook.parallel.ranks import run_ranks
    facts, strategy = recipe.facts(), recipe.sharding.strategy
    needed = RUN | {'fsdp2': {}, 'ddp': RUN_DDP}.get(strategy, RUN_ZERO)
    wrong = [f'{field} = {facts[field]!r}' for field,
             value in needed.items() if facts[field] != value]
    if wrong:
        said = ', '.join(wrong)
        raise ValueError(f'the bare loop does not do {said} with {strategy}: leave the default')
    warm_up()
    return run_ranks(loop_rank, recipe.cluster.ranks, (recipe, base), 120)


def run_trainer(recipe, folder: Path) -> list:
    "Run `recipe` with the library's trainer, which may write into `folder`; one result per rank."
    import trl
    from llm_workbook.parallel.ranks import run_ranks
    from llm_workbook.parallel.backends import fsdp_env
    from llm_workbook.training.fine_tune import check_recipe
    warm_up()
    assert trl
    rows = check_recipe(recipe)[0][:recipe.global_batch * recipe.optimizer.steps]
    return run_ranks(trainer_rank, recipe.cluster.ranks, (recipe, folder, rows), 120,
                     fsdp_env(recipe))
