"""A step as `rehearse` sees it, against the same trainer on real CPU ranks: bytes, collectives, FLOP; torch's tracker too."""
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.record import ROOT, record
from bench.step_peak_program import fuse, pack


def _llama(hidden: int, intermediate: int, layers: int, heads: int, vocab: int) -> dict:
    return dict(model_type='llama', hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=4, vocab_size=vocab)


SHAPES = {'small': _llama(768, 2048, 12, 12, 16_000),  # 100 million parameters
          'large': _llama(1024, 2816, 8, 16, 32_000),  # 156 million
          'quick': _llama(384, 1024, 8, 8, 16_000)}  # 25 million, for tests
FULL, LORA, QLORA = ({'method.kind': kind} for kind in ('full', 'lora', 'qlora'))
AGAIN = {'sharding.activation_checkpointing': 'full'}
JOBS = [  # Shape, changes to a plain recipe
    ('small', FULL), ('large', FULL | AGAIN), ('large', LORA), ('small', LORA | AGAIN), ('small', QLORA),
    ('large', QLORA | AGAIN), ('small', QLORA | {'cluster.processes': 4}), ('small', FULL | {'batch.accumulation': 2}),
    ('small', LORA | {'sharding.strategy': 'ddp'})]


def recipe(shape: str, changes: dict, folder: Path):
    "A plain recipe for two CPU ranks with `changes`; the configuration of its model is written into `folder`."
    from llm_workbook import Recipe
    place = folder/shape
    place.mkdir(exist_ok=True)
    (place/'config.json').write_text(json.dumps(SHAPES[shape]))
    plain = Recipe(name='rehearsal-error', model={'source': str(place)}, data={'source': 'sample-conversations'},
                   cluster={'processes': 2}, batch={'micro': 1, 'length': 256}, optimizer={'steps': 4})
    return plain.changed(changes)


def real(made) -> dict:
    "Run the trainer of a recipe in processes of their own; what rank 0 saw."
    env = os.environ | {'GLIBC_TUNABLES': 'glibc.malloc.mmap_threshold=16384', 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    done = subprocess.run([sys.executable, '-m', 'bench.rehearsal_program'], input=made.model_dump_json(), env=env, cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f'{made.facts()}: {done.stderr[-2000:]}')
    saw = json.loads(done.stdout.splitlines()[-1])[0]
    if saw['built_b'] >= saw['peak_b']: raise RuntimeError('building the model took more than a step')
    return saw


# torch's tracker

def tracked(made, program, foreach: bool | None = None, cleared: bool = False) -> int:
    "Most bytes of two steps of a `program` as torch's FSDPMemTracker counts them; a second entry clears the first step's."
    import torch
    from contextlib import nullcontext
    from llm_workbook import cpu_fsdp, fake_ranks, fake_tensors, fsdp_env
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from unittest.mock import patch
    with patch.dict(os.environ, fsdp_env(made)), fake_ranks(made.cluster.ranks), cpu_fsdp(), fake_tensors():
        model, optimizer, lose = program(made, foreach)
        batch = {key: torch.ones(made.batch.micro, made.batch.length, dtype=torch.long) for key in ('input_ids', 'labels')}
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(tuple(batch.values()))
        with nullcontext() if cleared else tracker:
            for _ in range(2):
                with tracker if cleared else nullcontext():
                    lose(dict(batch)).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), made.optimizer.clip)
                    optimizer.step()
                    optimizer.zero_grad()
                tracker.reset_mod_stats()
        return sum(kinds['Total'] for kinds in tracker.get_tracker_snapshot('peak').values())


def fake_model(made):
    "The model of a recipe, made of what tensors there are where this is called."
    import torch
    from llm_workbook.model.architecture import configuration, skeleton
    from llm_workbook.model.architecture import materialise
    name, raw = configuration(made.model.source)
    dtype = made.precision.master if made.method.kind == 'full' else made.precision.compute
    model = materialise(skeleton(raw, name), getattr(torch, dtype)).train()
    if made.method.kind == 'qlora': pack(model, made)
    return model


def trainer_program(made, foreach):
    "The library's own trainer, and its loss."
    import torch
    from llm_workbook.config.document import resolve
    from llm_workbook.training.fine_tune import make_trainer
    from transformers import AutoTokenizer
    row, tokenizer = [1] * made.batch.length, AutoTokenizer.from_pretrained(resolve('tiny-base'))
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(made, folder, [{'input_ids': row, 'labels': row}], fake_model(made), tokenizer)
    optimizer = torch.optim.AdamW([p for p in trainer.model.parameters() if p.requires_grad], foreach=foreach)
    model, optimizer = trainer.accelerator.prepare(trainer.model, optimizer)
    lose = lambda batch: trainer.compute_loss(model, batch | {'attention_mask': torch.ones_like(batch['input_ids'])})
    return model, optimizer.optimizer, lose


def plain_program(made, foreach):
    "A loop by hand over the same model and loss head, in the units of the trainer, but the last norm and head with the root."
    import torch
    from llm_workbook.model.adapters import add_adapters
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    half, full = torch.bfloat16, made.method.kind == 'full'
    policy = MixedPrecisionPolicy(half, half, half) if full else MixedPrecisionPolicy()
    model = fake_model(made)
    fuse(model)
    if not full: model = add_adapters(model, made.method)
    fully_shard(model.get_input_embeddings(), mp_policy=policy)
    for name, layer in [(name, m) for name, m in model.named_modules() if type(m).__name__ in model._no_split_modules]:
        if made.sharding.activation_checkpointing == 'full':
            layer = checkpoint_wrapper(layer)
            model.set_submodule(name, layer)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=foreach)
    count = torch.tensor(made.batch.micro * made.batch.length)
    return model, optimizer, lambda batch: model(**batch, num_items_in_batch=count, use_cache=False).loss


def why(error: Exception) -> str:
    "An error on one short line, the same in every run."
    return re.sub(r' at 0x\w+', '', f'{type(error).__name__}: {" ".join(str(error).split())}')[:240]


def peers(made) -> dict:
    "What the tracker says of both programs, and of a full one with AdamW as on GPUs, kept and cleared; or why it says nothing."
    if made.sharding.strategy != 'fsdp2' or made.batch.accumulation > 1: return {}  # It tracks FSDP2, and one pass in a step
    ways, found = {'tracker_trainer': (trainer_program,), 'tracker': (plain_program,)}, {}
    if made.method.kind == 'full':
        ways |= {'tracker_foreach': (plain_program, True), 'tracker_cleared': (plain_program, True, True)}
    for name, way in ways.items():
        try: found[f'{name}_b'] = tracked(made, *way)
        except Exception as error: found[f'{name}_fails'] = why(error)
    return found


# The comparison

def counted(messages: list) -> list:
    "How often each (kind, bytes of the whole tensor) occurs, as a record keeps it."
    return sorted([*message, n] for message, n in Counter(messages).items())


def percent(ours: int, truth: int) -> float:
    "The error of `ours` in percent of `truth`."
    return round(100 * (ours / truth - 1), 3)


def row(shape: str, changes: dict, folder: Path) -> dict:
    "One row of the record: what the ranks did, what the rehearsal says, and what torch's tracker says."
    from llm_workbook import rehearse, spec
    made = recipe(shape, changes, folder)
    saw, ours, peer = real(made), rehearse(made, exact=True), peers(made)
    sent = [(kind, size) for _, kind, size in saw['collectives']]
    said = [(kind, size) for _, kind, size, _ in ours.messages]
    kept = {key: saw[key] for key in 'held_b first_b peak_b flops seconds'.split()}
    errors = {key.replace('_b', '_error'): percent(size, saw['peak_b']) for key, size in peer.items() if key.endswith('_b')}
    return {'shape': shape, 'changes': changes, 'parameters': spec(SHAPES[shape]).parameters, **kept, 'rehearsed_b': ours.peak_b,
            'error': percent(ours.peak_b, saw['peak_b']), 'at': f'{ours.timeline.peak.op} in {ours.timeline.peak.phase}',
            'collectives': counted(sent), 'collectives_equal': counted(sent) == counted(said), 'in_order': sent == said,
            'flops_equal': ours.flops == saw['flops'], **peer, **errors}


def measure() -> dict:
    "Run every job; the value is the median error of the peak, the peer's is that of torch's tracker where it gives one."
    with tempfile.TemporaryDirectory() as folder: rows = [row(*job, Path(folder)) for job in JOBS]
    wrong = [r['changes'] for r in rows if not (r['collectives_equal'] and r['flops_equal'])]
    if wrong: raise RuntimeError(f'collectives or FLOP differ: {wrong}')
    peer = [abs(r['tracker_error']) for r in rows if 'tracker_error' in r]
    return record('rehearsal_error', [abs(r['error']) for r in rows], '%', peer, peer='torch FSDPMemTracker', goal=1, rows=rows)
