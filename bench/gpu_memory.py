"""What the allocator and the driver see of rank 0 of N: real tensors on one device, all other ranks pretended; and `rehearse`.

Run as a program, it takes a recipe as JSON and is that rank: the collectives have shapes and sizes and move nothing, so its
numbers mean nothing and its memory is that of a real run. Without CUDA the same program runs small recipes on the CPU, where
glibc counts; the record then says of every GPU recipe what is predicted, and that it is not measured.
"""
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from bench.record import ROOT, record
from bench.rehearsal_error import AGAIN, FULL, LORA, QLORA, percent
from bench.rehearsal_error import recipe as small_recipe
from bench.rehearsal_program import build, rows
from bench.step_peak_program import held_b, highest_b, mapped_b

STEPS = 3
HERE = [  # On a CPU: shape, changes
    ('quick', FULL | {'cluster.processes': 8}), ('quick', LORA | AGAIN | {'cluster.processes': 4}),
    ('quick', QLORA), ('quick', QLORA | AGAIN | {'cluster.processes': 16})]
NAMED = [  # Recipes of this package, each as far as the trainer runs it
    ('70b-2x4-h100-zero3-qlora-classifier',  # A: FSDP2 for ZeRO-3, and a language model's head
     {'sharding.strategy': 'fsdp2', 'sharding.reentrant': False, 'model.head': 'causal_lm'}),
    ('70b-2x24gb-qlora', {}),  # C
    ('70b-2x24gb-qlora', {'sharding.offload_parameters': 'none', 'sharding.offload_optimizer': 'none'}),
    ('70b-2x8-a100-80-full', {'model.attention': 'sdpa', 'batch.packing': False})]  # D
PLAIN = [  # Preset, ranks, changes to a plain recipe
    ('llama-3.2-1b', 2, FULL), ('llama-3.2-1b', 8, LORA), ('qwen2.5-1.5b', 4, FULL | AGAIN), ('llama-3.2-3b', 4, FULL | AGAIN),
    ('llama-3.1-8b', 8, FULL | AGAIN), ('llama-3.1-8b', 2, LORA), ('qwen2.5-7b', 2, QLORA), ('llama-2-13b', 2, QLORA | AGAIN),
    ('qwen2.5-32b', 8, LORA | AGAIN), ('llama-3.1-70b', 16, LORA | AGAIN)]


# One rank

def meter(seen: dict, device: str):
    "A callback that starts counting when the model is sharded, and reads the counters after the last step."
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
                seen.update(peak_b=torch.cuda.max_memory_allocated(), reserved_b=torch.cuda.max_memory_reserved(),
                            driver_b=total - free, context_b=total - free - torch.cuda.memory_reserved())
            else:
                other = mapped_b() - held_b(model, getattr(optimizer, 'optimizer', optimizer))
                seen.update(peak_b=highest_b() - other, built_b=seen['built_b'] - other)
    return Meter()


def alone(recipe) -> dict:
    "Be rank 0 of `recipe`; what the allocator saw of three steps, and the driver."
    import torch
    from contextlib import nullcontext
    from unittest.mock import patch
    from llm_workbook import cpu_fsdp, fake_ranks, fsdp_env, resolve
    from llm_workbook.training.fine_tune import make_trainer
    from transformers import AutoTokenizer
    device, seen = recipe.cluster.device, {}
    words = fsdp_env(recipe) | {'ACCELERATE_USE_CPU': str(device == 'cpu').lower()}
    with (fake_ranks(recipe.cluster.ranks), patch.dict(os.environ, words), cpu_fsdp() if device == 'cpu' else nullcontext(),
          tempfile.TemporaryDirectory() as folder):
        model = build(recipe, device, blank=True)
        tokenizer = AutoTokenizer.from_pretrained(resolve('tiny-base'))
        trainer = make_trainer(recipe, folder, rows(recipe, 8, STEPS), model, tokenizer)
        del model
        trainer.args.logging_strategy = 'no'  # What was not gathered may be no number at all, which a log refuses
        trainer.add_callback(meter(seen, device))
        trainer.train()
        assert all(hasattr(p, '_local_tensor') for p in trainer.model.parameters()) == (recipe.sharding.strategy == 'fsdp2')
    return seen


def measured(made) -> dict:
    "What a process of its own saw as rank 0 of a recipe."
    env = os.environ | {'GLIBC_TUNABLES': 'glibc.malloc.mmap_threshold=16384', 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    done = subprocess.run([sys.executable, '-m', 'bench.gpu_memory'], input=made.model_dump_json(), env=env, cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f'{made.name}: {done.stderr[-2000:]}')
    return json.loads(done.stdout.splitlines()[-1])


# The comparison

def gpu_recipes():
    "Yield what to run on a GPU: a name to show, the changes, and the recipe."
    from llm_workbook import Recipe
    for name, changes in NAMED: yield name, changes, Recipe.named(name).changed(changes | {'optimizer.steps': STEPS})
    for preset, ranks, changes in PLAIN:
        plain = Recipe(name='gpu-memory', model={'source': preset}, data={'source': 'sample-conversations'},
                       cluster={'device': 'cuda', 'nodes': -(-ranks // 8), 'processes': min(ranks, 8)},
                       batch={'micro': 1, 'length': 2048}, optimizer={'steps': STEPS})
        yield preset, {'ranks': ranks} | changes, plain.changed(changes)


def beyond_b(made) -> int:
    "What the ledger adds to tensors for the driver's figure: the context and unused blocks; NCCL's buffers are not there."
    from llm_workbook import memory
    lines = memory(made).lines
    return sum(x.size_b for x in lines if x.phase == 'step' and x.place == 'gpu' and x.kind in ('context', 'allocator'))


def compared(name: str, changes: dict, made, gpu: bool) -> dict:
    "One row: what is predicted, and what was measured where it was."
    from llm_workbook import rehearse
    ours = rehearse(made)
    where = {'ranks': made.cluster.ranks, 'device': made.cluster.device}
    row = {'recipe': name, 'changes': changes, **where, 'rehearsed_b': ours.peak_b}
    if made.cluster.device == 'cuda': row['driver_predicted_b'] = ours.peak_b + beyond_b(made)
    if made.cluster.device == 'cuda' and not gpu: return row | {'peak_b': 'not measured', 'driver_b': 'not measured'}
    row |= measured(made)
    if row.pop('built_b', 0) >= row['peak_b']: raise RuntimeError(f'{name}: building the model took more than a step')
    if gpu: row['driver_error'] = percent(row['driver_predicted_b'], row['driver_b'])
    return row | {'error': percent(ours.peak_b, row['peak_b'])}


def measure() -> dict:
    "On a GPU, run every recipe there; else check the program on the CPU, and say what would be measured."
    import torch
    warnings.simplefilter('ignore')
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        here = [(shape, changes, small_recipe(shape, changes, Path(folder))) for shape, changes in HERE]
        found = [compared(*job, gpu) for job in [*([] if gpu else here), *gpu_recipes()]]
    made = record('gpu_memory', [abs(r['error']) for r in found if 'error' in r], '%', goal=3 if gpu else 1, rows=found)
    if not gpu: return made | {'gpu': 'not measured', 'value_of': 'the same program on the CPU, at small size'}
    made['machine']['gpu'] = torch.cuda.get_device_name()
    return made | {'driver_worst': max(abs(r['driver_error']) for r in found), 'driver_goal': 5}


def main() -> None:
    "Be the rank whose recipe comes on standard input, and print what was seen."
    warnings.filterwarnings('ignore')
    job = json.loads(sys.stdin.read())
    import llm_workbook.model.quantize, peft, torch, torch.distributed.fsdp, transformers, trl  # noqa: E401, F401
    from llm_workbook import Recipe
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1 if job['cluster']['device'] == 'cpu' else torch.get_num_threads())
    print(json.dumps(alone(Recipe.model_validate(job))))


if __name__ == '__main__':
    main()
