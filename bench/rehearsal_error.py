"""A step as `rehearse` has it, against the same trainer on real CPU ranks.

Torch's own tracker of memory stands beside it, as far as it runs.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.record import ROOT, record
from bench.rehearsal_program import STEPS
from bench.step_peak_program import fuse, pack


def _llama(hidden: int, intermediate: int, layers: int, heads: int, vocab: int) -> dict:
    return {
        'model_type': 'llama',
        'hidden_size': hidden,
        'intermediate_size': intermediate,
        'num_hidden_layers': layers,
        'num_attention_heads': heads,
        'num_key_value_heads': 4,
        'vocab_size': vocab,
    }


SHAPES = {
    'small': _llama(768, 2048, 12, 12, 16_000),  # 100 million parameters
    'large': _llama(1024, 2816, 8, 16, 32_000),  # 156 million
    'quick': _llama(384, 1024, 8, 8, 16_000),  # 25 million, for tests
}
FULL = {'method.kind': 'full'}
LORA = {'method.kind': 'lora'}
QLORA = {'method.kind': 'qlora'}
AGAIN = {'sharding.activation_checkpointing': 'full'}
JOBS = [  # Shape, changes to a plain recipe
    ('small', FULL),
    ('large', FULL | AGAIN),
    ('large', LORA),
    ('small', LORA | AGAIN),
    ('small', QLORA),
    ('large', QLORA | AGAIN),
    ('small', QLORA | {'cluster.processes': 4}),
    ('small', FULL | {'batch.accumulation': 2}),
    ('small', LORA | {'sharding.strategy': 'ddp'}),
]


def recipe(shape: str, changes: dict, folder: Path):
    "A plain recipe for two CPU ranks with `changes`; its model has a configuration in `folder`."
    from llm_workbook import Recipe
    place = folder/shape
    place.mkdir(exist_ok=True)
    (place/'config.json').write_text(json.dumps(SHAPES[shape]))
    plain = Recipe(
        name='rehearsal-error',
        model={'source': str(place)},
        data={'source': 'sample-conversations'},
        cluster={'processes': 2},
        batch={'micro': 1, 'length': 256},
        optimizer={'steps': STEPS},
    )
    return plain.changed(changes)


def real(recipe) -> dict:
    "Run the trainer of a recipe in processes of their own; what rank 0 measured."
    env = os.environ | {
        'GLIBC_TUNABLES': 'glibc.malloc.mmap_threshold=16384',
        'OMP_NUM_THREADS': '1',
        'HF_HUB_OFFLINE': '1',
    }
    command = [sys.executable, '-m', 'bench.rehearsal_program']
    done = subprocess.run(command, input=recipe.model_dump_json(), env=env, cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f'{recipe.facts()}: {done.stderr[-2000:]}')
    measured = json.loads(done.stdout.splitlines()[-1])[0]
    if measured['built_b'] >= measured['peak_b']:
        raise RuntimeError('building the model took more than a step')
    return measured


# torch's tracker

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
    from llm_workbook.training.fine_tune import make_trainer
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


def why(error: Exception) -> str:
    "An error on one short line, the same in every run."
    text = ' '.join(str(error).split())
    return re.sub(r' at 0x\w+', '', f'{type(error).__name__}: {text}')[:240]


def peers(recipe) -> dict:
    """What the tracker says of both programs, or why it says nothing.

    A full fine-tune is also tracked with AdamW as on GPUs, kept and cleared.
    """
    if recipe.sharding.strategy != 'fsdp2' or recipe.batch.accumulation > 1:
        return {}  # It tracks FSDP2, and one pass in a step
    ways = {'tracker_trainer': (trainer_program,), 'tracker': (plain_program,)}
    if recipe.method.kind == 'full':
        ways['tracker_foreach'] = plain_program, True
        ways['tracker_cleared'] = plain_program, True, True
    results = {}
    for name, way in ways.items():
        try:
            results[f'{name}_b'] = tracked(recipe, *way)
        except Exception as error:
            results[f'{name}_fails'] = why(error)
    return results


# The comparison

def counted(messages: list) -> list:
    "How often each (kind, bytes of the whole tensor) occurs, as a record keeps it."
    return sorted([*message, n] for message, n in Counter(messages).items())


def percent(ours: int, truth: int) -> float:
    "The error of `ours` in percent of `truth`."
    return round(100 * (ours / truth - 1), 3)


def row(shape: str, changes: dict, folder: Path) -> dict:
    "One row of the record: what ranks measured, what the rehearsal says, and torch's tracker."
    from llm_workbook import rehearse, spec
    job = recipe(shape, changes, folder)
    measured = real(job)
    ours = rehearse(job, exact=True)
    tracker = peers(job)
    sent = [(kind, size_b) for _, kind, size_b in measured['collectives']]
    rehearsed = [(kind, size_b) for _, kind, size_b, _ in ours.messages]
    errors = {}
    for key, size_b in tracker.items():
        if not key.endswith('_b'): continue
        errors[key.replace('_b', '_error')] = percent(size_b, measured['peak_b'])
    return {
        'shape': shape,
        'changes': changes,
        'parameters': spec(SHAPES[shape]).parameters,
        'held_b': measured['held_b'],
        'first_b': measured['first_b'],
        'peak_b': measured['peak_b'],
        'flops': measured['flops'],
        'seconds': measured['seconds'],
        'rehearsed_b': ours.peak_b,
        'error': percent(ours.peak_b, measured['peak_b']),
        'at': f'{ours.timeline.peak.op} in {ours.timeline.peak.phase}',
        'collectives': counted(sent),
        'collectives_equal': counted(sent) == counted(rehearsed),
        'in_order': sent == rehearsed,
        'flops_equal': ours.flops == measured['flops'],
        **tracker,
        **errors,
    }


def measure() -> dict:
    "Run every job; the value is the median error of the peak, the peer's that of torch's tracker."
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(shape, changes, Path(folder)) for shape, changes in JOBS]
    wrong = [r['changes'] for r in rows if not (r['collectives_equal'] and r['flops_equal'])]
    if wrong: raise RuntimeError(f'collectives or FLOP differ: {wrong}')
    ours = [abs(r['error']) for r in rows]
    peers_off = [abs(r['tracker_error']) for r in rows if 'tracker_error' in r]
    return record('rehearsal_error', ours, '%', peers_off, peer='torch FSDPMemTracker',
                  goal=1, rows=rows)
