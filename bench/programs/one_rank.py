"""One rank of a recipe, with real tensors on one device: its memory, and seconds of a step.

Takes a recipe as JSON, on standard input or as a file. Of several ranks it is rank 0 and pretends
the others: collectives have shapes and sizes and move nothing, so its numbers mean nothing and its
memory is that of a real run. Started by torchrun it is one of the real ranks. Logits in tiles and
in one pass are trained by the library's trainer; whole logits, which that refuses, by a plain loop.
Without CUDA it runs small recipes on the CPU, where glibc counts.
"""
import json
import os
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

from bench.shared.gpu_rows import STEPS
from bench.shared.heap import held_b, highest_b, mapped_b
from bench.shared.models import build, rows, step


# What is read

class Meter:
    "Counts from the sharding of the model on, until the last step."
    def __init__(self, device: str):
        self.device, self.seen, self.seconds = device, {}, []

    def begin(self) -> None:
        "Forget what building took."
        import torch
        if self.device == 'cuda': torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()
        else: self.seen['built_b'] = highest_b()

    def before(self) -> None:
        "Start the clock of a step."
        self._wait()
        self.began_s = time.perf_counter()

    def after(self, model, optimizer) -> None:
        "Stop the clock; after the last step read the allocator, and the driver or the heap."
        self._wait()
        self.seconds.append(round(time.perf_counter() - self.began_s, 4))
        if len(self.seconds) < STEPS: return
        self.seen['steps_s'] = self.seconds
        if self.device == 'cuda': return self.seen.update(on_gpu())
        other = mapped_b() - held_b(model, getattr(optimizer, 'optimizer', optimizer))
        self.seen.update(peak_b=highest_b() - other, built_b=self.seen['built_b'] - other)

    def _wait(self):
        import torch
        if self.device == 'cuda': torch.cuda.synchronize()


def on_gpu() -> dict:
    "What torch's allocator held at most, and what the driver has given away by now."
    import torch
    free, total = torch.cuda.mem_get_info()
    return {'peak_b': torch.cuda.max_memory_allocated(),
            'reserved_b': torch.cuda.max_memory_reserved(), 'driver_b': total - free,
            'context_b': total - free - torch.cuda.memory_reserved()}


def follower(meter):
    "A callback of transformers' trainer that reads `meter`."
    from transformers import TrainerCallback

    class Follower(TrainerCallback):
        def on_train_begin(self, args, state, control, **more): meter.begin()

        def on_step_begin(self, args, state, control, **more): meter.before()

        def on_step_end(self, args, state, control, model=None, optimizer=None, **more):
            meter.after(model, optimizer)
    return Follower()


# One rank

def by_trainer(recipe, meter) -> None:
    "Take the steps by the library's trainer."
    from llm_workbook import resolve
    from llm_workbook.training.trainer import make_trainer
    from transformers import AutoTokenizer
    blank = recipe.cluster.ranks > 1
    with tempfile.TemporaryDirectory() as folder:
        model = build(recipe, recipe.cluster.device, blank=blank)
        tokenizer = AutoTokenizer.from_pretrained(resolve('tiny-base'))
        trainer = make_trainer(recipe, folder, rows(recipe, 8, STEPS), model, tokenizer)
        del model
        # What was not gathered may be no number at all, which a log refuses
        trainer.args.logging_strategy = 'no'
        trainer.add_callback(follower(meter))
        trainer.train()
        assert all(hasattr(p, '_local_tensor')
                   for p in trainer.model.parameters()) == (recipe.sharding.strategy == 'fsdp2')


def by_loop(recipe, meter) -> None:
    "Take the steps by a plain loop, which computes whole logits."
    from llm_workbook.model.adapters import add_adapters
    from llm_workbook.training.float16 import attach_scaler
    from llm_workbook.training.loop import make_accelerator, make_optimizer
    accelerator = make_accelerator(recipe)
    attach_scaler(recipe, accelerator)
    model = build(recipe, recipe.cluster.device, blank=recipe.cluster.ranks > 1)
    vocab, sharding = model.config.get_text_config().vocab_size, recipe.sharding
    if recipe.method.kind != 'full': model = add_adapters(model, recipe.method, recipe.seed)
    if sharding.activation_checkpointing == 'full' and sharding.strategy != 'fsdp2':
        model.gradient_checkpointing_enable({'use_reentrant': sharding.reentrant})
        if recipe.method.kind != 'full': model.enable_input_require_grads()
    optimizer, _ = make_optimizer(recipe, model)
    if sharding.strategy == 'none':  # Else into a DDP of one rank
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = accelerator.prepare(optimizer)
    else: model, optimizer = accelerator.prepare(model, optimizer)
    meter.begin()
    for _ in range(recipe.optimizer.steps):
        meter.before()
        step(model, optimizer, accelerator, vocab, recipe)
        meter.after(model, optimizer)


def alone(recipe) -> dict:
    "Be a rank of `recipe`; what the allocator saw of three steps, and the driver."
    from unittest.mock import patch
    from llm_workbook import cpu_fsdp, fake_ranks, fsdp_env
    from llm_workbook.training.rank_run import set_up_device
    device, ranks = recipe.cluster.device, recipe.cluster.ranks
    # A payload that was not gathered is not hashed
    recipe = recipe.changed({'sharding.loading': 'every_rank', 'optimizer.steps': STEPS})
    words = fsdp_env(recipe) | {'ACCELERATE_USE_CPU': str(device == 'cpu').lower()}
    pretended = ranks > 1 and 'WORLD_SIZE' not in os.environ
    meter = Meter(device)
    with (fake_ranks(ranks) if pretended else nullcontext(), patch.dict(os.environ, words),
          cpu_fsdp() if device == 'cpu' else nullcontext()):
        set_up_device(recipe)
        train = by_loop if recipe.batch.loss_head == 'full' else by_trainer
        train(recipe, meter)
    return meter.seen


def main() -> None:
    "Be the rank whose recipe is given, and print what was seen."
    warnings.filterwarnings('ignore')
    job = json.loads(Path(sys.argv[1]).read_text() if sys.argv[1:] else sys.stdin.read())
    if job['method']['kind'] == 'qlora': import llm_workbook.model.quantize  # noqa: F401
    import torch, torch.distributed.fsdp, transformers  # noqa: E401, F401
    from llm_workbook import Recipe
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1 if job['cluster']['device'] == 'cpu' else torch.get_num_threads())
    seen = alone(Recipe.model_validate(job))
    if os.environ.get('RANK', '0') == '0': print(json.dumps(seen), flush=True)
    if torch.distributed.is_initialized(): torch.distributed.destroy_process_group()


if __name__ == '__main__':
    main()
