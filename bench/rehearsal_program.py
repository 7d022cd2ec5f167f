"""The library's own trainer for four steps on real ranks, in processes whose allocator is counted by glibc itself.

The caller starts this program with GLIBC_TUNABLES=glibc.malloc.mmap_threshold=16384, so that every tensor is an mmapped block,
and gives a recipe as JSON; its `model.source` is a folder with a config.json. Nothing watches the first three steps, whose most
bytes count; the fourth tells its collectives and its FLOP. Prints one JSON line: what each rank saw.
"""
import json
import mmap
import sys
import tempfile
import time
import warnings

from bench.real_ranks import recorded
from bench.step_peak_program import held_b, highest_b, mapped_b, pack

QUIET, STEPS = 3, 4  # Steps that nothing watches, and all


def outside(shape, dtype):
    "A tensor in memory that malloc does not count, and that takes pages only where it is written: a model waits there."
    import torch
    size = torch.Size(shape).numel()
    memory = mmap.mmap(-1, max(1, size * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=size).view(shape)


def build(recipe, device: str = 'cpu', blank: bool = False):
    "A random model, or one of zeros, packed as `recipe` wants it; it waits outside where it will be sharded."
    import torch
    from llm_workbook.model.architecture import configuration, skeleton
    full, make = recipe.method.kind == 'full', outside if recipe.sharding.strategy == 'fsdp2' else torch.empty
    dtype = getattr(torch, recipe.precision.master if full else recipe.precision.compute)
    name, raw = configuration(recipe.model.source, recipe.model.revision)
    model, made = skeleton(raw, name), {}
    model.set_attn_implementation(recipe.model.attention)
    model.config.dtype = dtype
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None: continue
            if id(p) not in made: made[id(p)] = torch.nn.Parameter(make(p.shape, dtype=dtype), p.requires_grad)
            module._parameters[name] = made[id(p)]
        for name, b in module._buffers.items(): module._buffers[name] = torch.zeros(b.shape, dtype=b.dtype)
    torch.manual_seed(0)
    if not blank:
        with torch.no_grad(): model.apply(model._init_weights)
    if recipe.method.kind == 'qlora': pack(model, recipe, device)
    for p in model.parameters() if recipe.method.kind == 'qlora' and make is outside and device == 'cpu' else ():
        p.data = make(p.shape, dtype=p.dtype).copy_(p.data)
    return model.train()


def multiply(A, B, shape, *args, out_shape=None, **kwargs) -> int:
    "FLOP of bitsandbytes' product with a packed matrix, 2 M N K, which torch's counter does not know."
    return 2 * A[:-1].numel() * shape[0] * shape[1]


class Moment:
    "What torch is at when a collective runs, as `recorded` asks for it."
    def __getitem__(self, _) -> str:
        import torch
        return 'backward' if torch._C._current_graph_task_id() != -1 else ''


def watch(seen: dict, trainer):
    "A callback that reads the heap after each quiet step and watches the last, from one line of the log to the next."
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import TrainerCallback
    flops = FlopCounterMode(display=False, custom_mapping={torch.ops.bitsandbytes.gemm_4bit: multiply})
    messages = recorded(seen['collectives'], Moment())

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **more):
            if state.global_step <= QUIET: seen['highest'].append(highest_b())
            if state.global_step == QUIET:
                seen['held_b'] = held_b(trainer.model_wrapped, getattr(optimizer, 'optimizer', optimizer))  # DDP's buckets too
                seen['other_b'] = mapped_b() - seen['held_b']

        def on_log(self, args, state, control, logs=None, **more):
            if 'loss' not in logs: return
            if state.global_step == QUIET: messages.__enter__(), flops.__enter__()
            if state.global_step == STEPS: flops.__exit__(None, None, None), messages.__exit__(None, None, None)
            seen['flops'] = flops.get_total_flops()
    return Watch()


def rows(recipe, vocab: int, steps: int = STEPS) -> list[dict]:
    "As many rows of exactly `batch.length` tokens as the steps take."
    import torch
    shape = recipe.global_batch * steps, recipe.batch.length
    ids = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(0)).tolist()
    return [{'input_ids': row, 'labels': row} for row in ids]


def rank(job: dict) -> dict:
    "What this process saw: bytes held between steps, the most held, the collectives of one step and its FLOP."
    import torch
    from llm_workbook.config.document import resolve
    from llm_workbook.config.recipe import Recipe
    from llm_workbook.parallel.backends import cpu_fsdp
    from llm_workbook.training.fine_tune import make_trainer
    from transformers import AutoTokenizer
    torch.set_num_threads(1)
    recipe, began = Recipe.model_validate(job), time.monotonic()
    seen = {'collectives': [], 'highest': []}
    with cpu_fsdp(), tempfile.TemporaryDirectory() as folder:
        model = build(recipe)
        tokenizer = AutoTokenizer.from_pretrained(resolve('tiny-base'))
        trainer = make_trainer(recipe, folder, rows(recipe, model.config.vocab_size), model, tokenizer)
        del model
        trainer.add_callback(watch(seen, trainer))
        built, trainer.began = highest_b(), time.monotonic()
        ready = trainer.began - began
        trainer.train()
    names, sizes = ('built_b', 'first_b', 'second_b', 'peak_b'), (built, *seen.pop('highest'))
    return seen | {name: size - seen['other_b'] for name, size in zip(names, sizes)} | {
        'ready_s': round(ready, 1), 'seconds': round(time.monotonic() - began, 1), 'strategy': trainer.shards.strategy}


def main() -> None:
    "Run the recipe on its ranks and print what each saw."
    warnings.filterwarnings('ignore')
    job = json.loads(sys.stdin.read())
    import llm_workbook.model.quantize, peft, torch, torch.distributed.fsdp, transformers, trl  # noqa: E401, F401  once, before the fork
    from llm_workbook import Recipe, fsdp_env
    from llm_workbook.parallel.ranks import notebook_ranks
    transformers.logging.set_verbosity_error()
    recipe = Recipe.model_validate(job)
    print(json.dumps(notebook_ranks(rank, recipe.cluster.ranks, (job,), 300, fsdp_env(recipe))))


if __name__ == '__main__':
    main()
