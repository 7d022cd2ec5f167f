"""One training step for real, in a process whose allocator is counted by glibc itself.

The caller starts this program with GLIBC_TUNABLES=glibc.malloc.mmap_threshold=16384, so that every tensor is an mmapped block,
and gives a job as JSON: a transformers config, a recipe, and what a recipe does not say. Prints one JSON line.
"""
import ctypes
import json
import os
import re
import sys
import tempfile
import time
import warnings


class Heap(ctypes.Structure):
    "What `mallinfo2` returns."
    _fields_ = [(name, ctypes.c_size_t) for name in
                'arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost'.split()]


LIBC = ctypes.CDLL(None)
LIBC.mallinfo2.restype = Heap


def mapped_b() -> int:
    "Bytes in mmapped blocks now."
    return LIBC.mallinfo2().hblkhd


def highest_b() -> int:
    "The most bytes that were in mmapped blocks at once since the process began: only `malloc_stats` tells, on stderr."
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        LIBC.malloc_stats()
        os.dup2(kept, 2)
        os.close(kept)
        file.seek(0)
        return int(re.search(rb'max mmap bytes\s*=\s*(\d+)', file.read())[1])


def build(job: dict, recipe):
    "A random model, packed and adapted as `recipe` wants it."
    import torch
    from llm_workbook.model.adapters import add_adapters
    from transformers import AutoConfig, AutoModelForCausalLM
    made = dict(job['config'])
    config = AutoConfig.for_model(made.pop('model_type'), **made)
    full = recipe.method.kind == 'full'
    torch.manual_seed(0)
    dtype = getattr(torch, recipe.precision.master if full else recipe.precision.compute)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=recipe.model.attention)
    if recipe.method.kind == 'qlora': pack(model, recipe)
    if recipe.batch.loss_head == 'chunked': fuse(model)
    if recipe.sharding.activation_checkpointing == 'full' and recipe.sharding.strategy != 'fsdp2':
        model.gradient_checkpointing_enable({'use_reentrant': recipe.sharding.reentrant})
    if not full: model = add_adapters(model, recipe.method, dtype=recipe.precision.master)
    if not full and recipe.sharding.activation_checkpointing == 'full': model.enable_input_require_grads()
    return model.train()


def fuse(model) -> None:
    "Give `model` the head and loss that TRL's SFTTrainer uses."
    from trl.trainer.utils import add_fused_lm_head
    add_fused_lm_head(model, outputs=('log_probs', 'entropy', 'is_top1'))
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, fused_lm_head=True, **kwargs)


def pack(model, recipe, device: str = 'cpu') -> None:
    "Put an NF4 layer in the place of every linear layer but the head, one after the other, on `device`."
    import bitsandbytes as bnb
    import torch
    from llm_workbook.model.quantize import keep_payload
    method, compute = recipe.method, getattr(torch, recipe.precision.compute)
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not model.get_output_embeddings()]
    for name in names:
        old = model.get_submodule(name)
        new = bnb.nn.Linear4bit(old.in_features, old.out_features, bias=False, compute_dtype=compute, quant_type='nf4',
                                compress_statistics=method.double_quant, quant_storage=getattr(torch, method.storage))
        new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type='nf4', module=new,
                                       compress_statistics=method.double_quant, quant_storage=getattr(torch, method.storage))
        model.set_submodule(name, new.to(device))
        del old, new
    keep_payload(model)
    model.is_loaded_in_4bit = True  # As a load from disk says it: PEFT chooses its layer by this


def held_b(model, optimizer) -> int:
    "Bytes of parameters, buffers, 4-bit statistics, optimizer states and DDP's buckets on this rank, each storage once."
    import torch
    from llm_workbook.model.quantize import payload_bytes
    made = model._get_ddp_logging_data() if hasattr(model, '_get_ddp_logging_data') else {}
    buckets = made.get('rebuilt_bucket_sizes') or made.get('bucket_sizes', '')
    local = lambda t: getattr(t, '_local_tensor', t)
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    stores = {local(t).untyped_storage()._cdata: local(t).untyped_storage().nbytes()
              for t in [*model.parameters(), *model.buffers(), *states]}
    return sum(stores.values()) + payload_bytes(model)['absmax'] + sum(map(int, re.findall(r'\d+', buckets)))


def step(model, optimizer, accelerator, job, recipe) -> None:
    "Forward and backward as often as the recipe accumulates, clip, update."
    import contextlib
    import torch
    batch, vocab = recipe.batch, job['config']['vocab_size']
    for i in range(batch.accumulation):
        ids = torch.randint(0, vocab, (batch.micro, batch.length))
        count = torch.tensor(ids.numel() * batch.accumulation)
        last = i == batch.accumulation - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=count, use_cache=False).loss
            accelerator.backward(loss)
        del loss
    if recipe.optimizer.clip: accelerator.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
    optimizer.step()
    optimizer.zero_grad()


def rank(job: dict) -> dict:
    "What this process saw: bytes held between steps, and the most held in the first step and in the first two."
    import torch
    from accelerate import Accelerator
    from llm_workbook.config.recipe import Recipe
    from llm_workbook.parallel.backends import cpu_fsdp
    torch.set_num_threads(1)
    recipe = Recipe.model_validate(job['recipe'])
    began = time.monotonic()
    with cpu_fsdp():
        accelerator = Accelerator()
        model = build(job, recipe)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=job.get('foreach'))
        model, optimizer = accelerator.prepare(model, optimizer)
        built, highest, ready = highest_b(), [], time.monotonic() - began
        for _ in range(2):
            step(model, optimizer, accelerator, job, recipe)
            highest.append(highest_b())
        held = held_b(model, optimizer)
        other = mapped_b() - held
        return {'held_b': held, 'other_b': other, 'built_b': built - other, 'first_b': highest[0] - other,
                'peak_b': highest[1] - other, 'ready_s': round(ready, 1), 'seconds': round(time.monotonic() - began, 1),
                'wrapped': type(model).__name__,
                'sharded': any(hasattr(p, '_local_tensor') for p in model.parameters())}


def main() -> None:
    "Run the job on its ranks and print what each saw."
    warnings.filterwarnings('ignore')
    job = json.loads(sys.stdin.read())
    os.environ |= job['env']
    import llm_workbook.model.quantize, peft, torch, torch.distributed.fsdp, transformers  # noqa: E401, F401  once, before the fork
    from llm_workbook.parallel.ranks import notebook_ranks
    transformers.logging.set_verbosity_error()
    ranks = job['recipe']['cluster']['processes']
    print(json.dumps(notebook_ranks(rank, ranks, (job,), 300) if ranks > 1 else [rank(job)]))


if __name__ == '__main__':
    main()
