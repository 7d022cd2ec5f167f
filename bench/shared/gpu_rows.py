"""Recipes to run as one rank on a device, and what the plan and the rehearsal say of them.

Their program is `one_rank`.
"""
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path

from bench.record import ROOT
from bench.shared.heap import COUNTING
from bench.shared.small_rehearsals import AGAIN, FULL, LORA, QLORA, percent

STEPS = 3
NAMED = [  # Recipes of this package, each as far as the trainer runs it
    ('70b-2x4-h100-zero3-qlora-classifier',  # A: FSDP2 for ZeRO-3, and a language model's head
     {'sharding.strategy': 'fsdp2', 'sharding.reentrant': False, 'model.head': 'causal_lm'}),
    ('70b-2x24gb-qlora', {}),  # C
    ('70b-2x24gb-qlora', {'sharding.offload_parameters': 'none',
                          'sharding.offload_optimizer': 'none'}),
    ('70b-2x8-a100-80-full', {'model.attention': 'sdpa', 'batch.packing': False})]  # D
PLAIN = [  # Preset, ranks, changes to a plain recipe
    ('llama-3.2-1b', 2, FULL), ('llama-3.2-1b', 8, LORA), ('qwen2.5-1.5b', 4, FULL | AGAIN),
    ('llama-3.2-3b', 4, FULL | AGAIN),
    ('llama-3.1-8b', 8, FULL | AGAIN), ('llama-3.1-8b', 2, LORA), ('qwen2.5-7b', 2, QLORA),
    ('llama-2-13b', 2, QLORA | AGAIN),
    ('qwen2.5-32b', 8, LORA | AGAIN), ('llama-3.1-70b', 16, LORA | AGAIN)]


def plain_recipe(preset: str, ranks: int, changes: dict):
    "A recipe of a preset on GPUs, sharded if there are several, for a few steps."
    from llm_workbook import Recipe
    plain = Recipe(name='gpu-memory', model={'source': preset},
                   data={'source': 'sample-conversations'},
                   cluster={'device': 'cuda', 'nodes': -(-ranks // 8),
                            'processes': min(ranks, 8)},
                   sharding={'strategy': 'fsdp2' if ranks > 1 else 'none'},
                   batch={'micro': 1, 'length': 2048}, optimizer={'steps': STEPS})
    return plain.changed(changes)


def gpu_recipes():
    "Yield what to pretend on a GPU: a name to show, the changes, and the recipe."
    from llm_workbook import Recipe
    for name, changes in NAMED:
        yield name, changes, Recipe.named(name).changed(changes | {'optimizer.steps': STEPS})
    for preset, ranks, changes in PLAIN:
        yield preset, {'ranks': ranks} | changes, plain_recipe(preset, ranks, changes)


def started(made, real: bool, file: Path) -> tuple[list[str], str | None]:
    "The command that measures a recipe, and what it reads on standard input."
    program = ['-m', 'bench.programs.one_rank']
    if not real: return [sys.executable, *program], made.model_dump_json()
    file.write_text(made.model_dump_json())
    ranks = f'--nproc-per-node={made.cluster.ranks}'
    torchrun = ['-m', 'torch.distributed.run', '--standalone', ranks]
    return [sys.executable, *torchrun, *program, str(file)], None


@contextmanager
def turn():
    "Wait until nobody else measures a GPU of this machine: several calls may prepare at once."
    with open(Path(tempfile.gettempdir())/'llm-workbook-gpu.lock', 'w') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measured(made, real: bool = False) -> dict:
    """What a process of its own saw as rank 0 of a recipe, and what others hold of the GPU.

    The other ranks are pretended, or `real`.
    """
    on_gpu = made.cluster.device == 'cuda'
    words = {'HF_HUB_OFFLINE': '1'} if on_gpu else COUNTING
    with tempfile.TemporaryDirectory() as folder, turn() if on_gpu else nullcontext():
        others_b = used_b() if on_gpu else None
        command, said = started(made, real, Path(folder)/'recipe.json')
        done = subprocess.run(command, input=said, env=os.environ | words, cwd=ROOT,
                              capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f'{made.name}: {done.stderr[-2000:]}')
    lines = [line for line in done.stdout.splitlines() if line.startswith('{')]
    seen = json.loads(lines[-1])
    if not on_gpu: return seen
    if others_b is None: return seen | dict.fromkeys(('others_b', 'driver_b', 'context_b'))
    return seen | {'others_b': others_b, 'driver_b': seen['driver_b'] - others_b,
                   'context_b': seen['context_b'] - others_b}


def used_b() -> int | None:
    "Bytes of the first visible GPU that are taken, asked without opening it; None without a way."
    if shutil.which('nvidia-smi') is None: return None
    number = os.environ.get('CUDA_VISIBLE_DEVICES', '0').split(',')[0] or '0'
    command = ['nvidia-smi', f'--id={number}', '--query-gpu=memory.used',
               '--format=csv,noheader,nounits']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout) * 2**20


def beyond_b(made) -> int:
    """What the ledger adds to tensors for the driver's figure: the context and unused blocks.

    NCCL's buffers are not there.
    """
    from llm_workbook import memory
    lines = memory(made).lines
    return sum(x.size_b for x in lines if x.phase == 'step' and x.place == 'gpu'
               and x.kind in ('context', 'allocator'))


def rehearsed(name: str, changes: dict, made) -> dict:
    "The row of a recipe before it is measured."
    from llm_workbook import rehearse
    ours = rehearse(made)
    where = {'ranks': made.cluster.ranks, 'device': made.cluster.device}
    row = {'recipe': name, 'changes': changes, **where, 'rehearsed_b': ours.peak_b}
    if made.cluster.device == 'cuda': row['driver_predicted_b'] = ours.peak_b + beyond_b(made)
    return row


def compared(name: str, changes: dict, made) -> dict:
    "One row: what is predicted, and what was measured."
    row = rehearsed(name, changes, made) | measured(made)
    if row.pop('built_b', 0) >= row['peak_b']:
        raise RuntimeError(f'{name}: building the model took more than a step')
    if row.get('driver_b'):
        row['driver_error'] = percent(row['driver_predicted_b'], row['driver_b'])
    return row | {'error': percent(row['rehearsed_b'], row['peak_b'])}
