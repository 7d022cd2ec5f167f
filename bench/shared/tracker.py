"""Torch's own tracker of memory, over the library's trainer and over a loop by hand."""
import os
import tempfile

from bench.shared.models import fuse, pack


def tracked(recipe, program, foreach: bool | None = None, cleared: bool = False) -> int:
    """Most bytes of two steps of a `program` as torch's FSDPMemTracker counts them.

    With `cleared` the tracker is entered for each step, and a second entry clears the first.
    """
    from contextlib import ExitStack, nullcontext
    from llm_workbook import cpu_fsdp, fake_ranks, fake_tensors, fsdp_env
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from unittest.mock import patch
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, fsdp_env(recipe)))
        stack.enter_context(fake_ranks(recipe.cluster.ranks))
        stack.enter_context(cpu_fsdp())
        stack.enter_context(fake_tensors())
        model, optimizer, loss = program(recipe, foreach)
        batch = ones(recipe)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(tuple(batch.values()))
        with nullcontext() if cleared else tracker:
            for _ in range(2):
                with tracker if cleared else nullcontext():
                    step(model, optimizer, loss, batch, recipe.optimizer.clip)
                tracker.reset_mod_stats()
        return sum(kinds['Total'] for kinds in tracker.get_tracker_snapshot('peak').values())


def ones(recipe) -> dict:
    "One micro-batch of ones."
    import torch
    shape = recipe.batch.micro, recipe.batch.length
    return {key: torch.ones(shape, dtype=torch.long) for key in ('input_ids', 'labels')}


def step(model, optimizer, loss, batch: dict, clip: float) -> None:
    "Forward, backward, clip, update; without a name the loss goes after the backward pass."
    import torch
    loss(dict(batch)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def fake_model(recipe):
    "The model of a recipe, made of what tensors there are where this is called."
    import torch
    from llm_workbook.model.architecture import configuration, materialise, skeleton
    name, raw = configuration(recipe.model.source)
    full = recipe.method.kind == 'full'
    dtype = recipe.precision.master if full else recipe.precision.compute
    model = materialise(skeleton(raw, name), getattr(torch, dtype)).train()
    if recipe.method.kind == 'qlora': pack(model, recipe)
    return model


def trainer_program(recipe, foreach):
    "The library's own trainer, and its loss."
    import torch
    from llm_workbook.files import resolve
    from llm_workbook.training.trainer import make_trainer
    from transformers import AutoTokenizer
    tokens = [1] * recipe.batch.length
    row = {'input_ids': tokens, 'labels': tokens}
    tokenizer = AutoTokenizer.from_pretrained(resolve('tiny-base'))
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(recipe, folder, [row], fake_model(recipe), tokenizer)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=foreach)
    del trained  # Else the whole parameters would live on after the sharding
    model, optimizer = trainer.accelerator.prepare(trainer.model, optimizer)

    def loss(batch):
        mask = torch.ones_like(batch['input_ids'])
        return trainer.compute_loss(model, batch | {'attention_mask': mask})
    return model, optimizer.optimizer, loss


def plain_program(recipe, foreach):
    "A loop by hand over the same model; the last norm and the head are in the root unit."
    import torch
    from llm_workbook.model.adapters import add_adapters
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    half, full = torch.bfloat16, recipe.method.kind == 'full'
    policy = MixedPrecisionPolicy(half, half, half) if full else MixedPrecisionPolicy()
    model = fake_model(recipe)
    fuse(model)
    if not full: model = add_adapters(model, recipe.method)
    fully_shard(model.get_input_embeddings(), mp_policy=policy)
    layers = [(name, module) for name, module in model.named_modules()
              if type(module).__name__ in model._no_split_modules]
    for name, layer in layers:
        if recipe.sharding.activation_checkpointing == 'full':
            layer = checkpoint_wrapper(layer)
            model.set_submodule(name, layer)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=foreach)
    tokens = torch.tensor(recipe.batch.micro * recipe.batch.length)

    def loss(batch): return model(**batch, num_items_in_batch=tokens, use_cache=False).loss
    return model, optimizer, loss
