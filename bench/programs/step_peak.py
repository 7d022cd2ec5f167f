"""One training step, or one evaluation, in a process whose allocator is counted by glibc itself.

The caller starts this program with the variables of `heap.COUNTING`, so that every tensor is an
mmapped block, and gives a job as JSON: a transformers config, a recipe, and what a recipe does not
say. Prints one JSON line.
"""
import json
import os
import sys
import time
import warnings

from bench.shared.heap import held_b, highest_b, mapped_b
from bench.shared.models import fuse, judge, pack, step


def build(job: dict, recipe):
    "A random model, packed and adapted as `recipe` wants it."
    import torch
    from llm_workbook.model.adapters import add_adapters
    from llm_workbook.model.segments import register_segments
    from transformers import AutoConfig, AutoModelForCausalLM
    register_segments()
    made = dict(job['config'])
    config = AutoConfig.for_model(made.pop('model_type'), **made)
    full = recipe.method.kind == 'full'
    torch.manual_seed(0)
    dtype = getattr(torch, recipe.precision.master if full else recipe.precision.compute)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype,
                                             attn_implementation=recipe.model.attention)
    if recipe.method.kind == 'qlora': pack(model, recipe)
    if recipe.batch.loss_head != 'full': fuse(model, recipe.batch.loss_head)
    if recipe.sharding.activation_checkpointing == 'full' and recipe.sharding.strategy != 'fsdp2':
        model.gradient_checkpointing_enable({'use_reentrant': recipe.sharding.reentrant})
    if not full: model = add_adapters(model, recipe.method, dtype=recipe.precision.master)
    if not full and recipe.sharding.activation_checkpointing == 'full':
        model.enable_input_require_grads()
    return model.train()


def rank(job: dict) -> dict:
    "What this process saw: bytes held between steps, and the most in one step and in two."
    import torch
    from accelerate import Accelerator
    from llm_workbook.config.recipe import Recipe
    from llm_workbook.model.compiled_blocks import compile_blocks
    from llm_workbook.parallel.backends import cpu_fsdp
    torch.set_num_threads(1)
    recipe = Recipe.model_validate(job['recipe'])
    began = time.monotonic()
    with cpu_fsdp():
        accelerator = Accelerator()
        model = build(job, recipe)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad],
                                      foreach=job.get('foreach'))
        model, optimizer = accelerator.prepare(model, optimizer)
        if recipe.model.kernels == 'compile': compile_blocks(model)
        built, highest, ready = highest_b(), [], time.monotonic() - began
        for _ in range(2):
            if recipe.intervals.evaluation: judge(model, job['config']['vocab_size'], recipe)
            else: step(model, optimizer, accelerator, job['config']['vocab_size'], recipe)
            highest.append(highest_b())
        held = held_b(model, optimizer)
        other = mapped_b() - held
        return {'held_b': held, 'other_b': other, 'built_b': built - other,
                'first_b': highest[0] - other,
                'peak_b': highest[1] - other, 'ready_s': round(ready, 1),
                'seconds': round(time.monotonic() - began, 1),
                'wrapped': type(model).__name__,
                'sharded': any(hasattr(p, '_local_tensor') for p in model.parameters())}


def main() -> None:
    "Run the job on its ranks and print what each saw."
    warnings.filterwarnings('ignore')
    job = json.loads(sys.stdin.read())
    os.environ |= job['env']
    # noqa: E401, F401  once, before the fork
    import llm_workbook.model.quantize, peft, torch, torch.distributed.fsdp, transformers
    from llm_workbook.parallel.ranks import notebook_ranks
    transformers.logging.set_verbosity_error()
    ranks = job['recipe']['cluster']['processes']
    print(json.dumps(notebook_ranks(rank, ranks, (job,), 300) if ranks > 1 else [rank(job)]))


if __name__ == '__main__':
    main()
