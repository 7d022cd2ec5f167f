"""What allocator and driver see of rank 0 of N on one device, beside `rehearse`.

Its program is `one_rank`. Without a GPU it runs small recipes on the CPU, and the record says of
every GPU recipe what is predicted, and that it is not measured.
"""
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from bench.programs.one_rank import STEPS
from bench.record import ROOT, record
from bench.shared.heap import COUNTING
from bench.shared.small_rehearsals import AGAIN, FULL, LORA, QLORA, percent
from bench.shared.small_rehearsals import recipe as small_recipe

HERE = [  # On a CPU: shape, changes
    ('quick', FULL | {'cluster.processes': 8}), ('quick', LORA | AGAIN | {'cluster.processes': 4}),
    ('quick', QLORA), ('quick', QLORA | AGAIN | {'cluster.processes': 16})]
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


def measured(made) -> dict:
    "What a process of its own saw as rank 0 of a recipe."
    command = [sys.executable, '-m', 'bench.programs.one_rank']
    done = subprocess.run(command, input=made.model_dump_json(), env=os.environ | COUNTING,
                          cwd=ROOT, capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f'{made.name}: {done.stderr[-2000:]}')
    return json.loads(done.stdout.splitlines()[-1])


# The comparison

def gpu_recipes():
    "Yield what to run on a GPU: a name to show, the changes, and the recipe."
    from llm_workbook import Recipe
    for name, changes in NAMED:
        yield name, changes, Recipe.named(name).changed(changes | {'optimizer.steps': STEPS})
    for preset, ranks, changes in PLAIN:
        plain = Recipe(name='gpu-memory', model={'source': preset},
                       data={'source': 'sample-conversations'},
                       cluster={'device': 'cuda', 'nodes': -(-ranks // 8),
                                'processes': min(ranks, 8)},
                       batch={'micro': 1, 'length': 2048}, optimizer={'steps': STEPS})
        yield preset, {'ranks': ranks} | changes, plain.changed(changes)


def beyond_b(made) -> int:
    """What the ledger adds to tensors for the driver's figure: the context and unused blocks.

    NCCL's buffers are not there.
    """
    from llm_workbook import memory
    lines = memory(made).lines
    return sum(x.size_b for x in lines if x.phase == 'step' and x.place == 'gpu'
               and x.kind in ('context', 'allocator'))


def compared(name: str, changes: dict, made, gpu: bool) -> dict:
    "One row: what is predicted, and what was measured where it was."
    from llm_workbook import rehearse
    ours = rehearse(made)
    where = {'ranks': made.cluster.ranks, 'device': made.cluster.device}
    row = {'recipe': name, 'changes': changes, **where, 'rehearsed_b': ours.peak_b}
    if made.cluster.device == 'cuda': row['driver_predicted_b'] = ours.peak_b + beyond_b(made)
    if made.cluster.device == 'cuda' and not gpu: return row | {'peak_b': 'not measured',
                                                                'driver_b': 'not measured'}
    row |= measured(made)
    if row.pop('built_b', 0) >= row['peak_b']:
        raise RuntimeError(f'{name}: building the model took more than a step')
    if gpu: row['driver_error'] = percent(row['driver_predicted_b'], row['driver_b'])
    return row | {'error': percent(ours.peak_b, row['peak_b'])}


def measure() -> dict:
    "On a GPU, run every recipe; else check the program on the CPU, and say what is predicted."
    import torch
    warnings.simplefilter('ignore')
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        here = [(shape, changes, small_recipe(shape, changes, Path(folder))) for shape,
                changes in HERE]
        found = [compared(*job, gpu) for job in [*([] if gpu else here), *gpu_recipes()]]
    made = record('gpu_memory', [abs(r['error']) for r in found if 'error' in r], '%',
                  goal=3 if gpu else 1, rows=found)
    if not gpu: return made | {'gpu': 'not measured',
                               'value_of': 'the same program on the CPU, at small size'}
    made['machine']['gpu'] = torch.cuda.get_device_name()
    return made | {'driver_worst': max(abs(r['driver_error']) for r in found), 'driver_goal': 5}
