"""Rank 0 of N: real tensors on one device, all other ranks pretended.

Takes a recipe as JSON and is that rank: the collectives have shapes and sizes and move nothing, so
its numbers mean nothing and its memory is that of a real run. Without CUDA it runs small recipes
on the CPU, where glibc counts.
"""
import json
import os
import sys
import tempfile
import warnings

from bench.shared.heap import held_b, highest_b, mapped_b
from bench.shared.models import build, rows

STEPS = 3


# One rank

def meter(seen: dict, device: str):
    "A callback that counts from the sharding of the model on, until the last step."
    import torch
    from transformers import TrainerCallback

    class Meter(TrainerCallback):
        def on_train_begin(self, args, state, control, **more):
            if device == 'cuda': torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()
            else: seen['built_b'] = highest_b()

        def on_step_end(self, args, state, control, model=None, optimizer=None, **more):
            if state.global_step < STEPS: return
            if device == 'cuda':
                free, total = torch.cuda.mem_get_info()
                seen.update(peak_b=torch.cuda.max_memory_allocated(),
                            reserved_b=torch.cuda.max_memory_reserved(),
                            driver_b=total - free,
                            context_b=total - free - torch.cuda.memory_reserved())
            else:
                other = mapped_b() - held_b(model, getattr(optimizer, 'optimizer', optimizer))
                seen.update(peak_b=highest_b() - other, built_b=seen['built_b'] - other)
    return Meter()


def alone(recipe) -> dict:
    "Be rank 0 of `recipe`; what the allocator saw of three steps, and the driver."
    from contextlib import nullcontext
    from unittest.mock import patch
    from llm_workbook import cpu_fsdp, fake_ranks, fsdp_env, resolve
    from llm_workbook.training.fine_tune import make_trainer
    from transformers import AutoTokenizer
    device, seen = recipe.cluster.device, {}
    words = fsdp_env(recipe) | {'ACCELERATE_USE_CPU': str(device == 'cpu').lower()}
    with (fake_ranks(recipe.cluster.ranks), patch.dict(os.environ, words),
          cpu_fsdp() if device == 'cpu' else nullcontext(),
          tempfile.TemporaryDirectory() as folder):
        model = build(recipe, device, blank=True)
        tokenizer = AutoTokenizer.from_pretrained(resolve('tiny-base'))
        trainer = make_trainer(recipe, folder, rows(recipe, 8, STEPS), model, tokenizer)
        del model
        # What was not gathered may be no number at all, which a log refuses
        trainer.args.logging_strategy = 'no'
        trainer.add_callback(meter(seen, device))
        trainer.train()
        assert all(hasattr(p, '_local_tensor')
                   for p in trainer.model.parameters()) == (recipe.sharding.strategy == 'fsdp2')
    return seen


def main() -> None:
    "Be the rank whose recipe comes on standard input, and print what was seen."
    warnings.filterwarnings('ignore')
    job = json.loads(sys.stdin.read())
    # noqa: E401, F401
    import llm_workbook.model.quantize, peft, torch, torch.distributed.fsdp, transformers, trl
    from llm_workbook import Recipe
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1 if job['cluster']['device'] == 'cpu' else torch.get_num_threads())
    print(json.dumps(alone(Recipe.model_validate(job))))


if __name__ == '__main__':
    main()
