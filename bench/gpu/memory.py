"""Recipes that take three steps on the device, beside what the plan says of them."""
import os
import tempfile

from bench.gpu.place import Missing, Place, recipe_folder
from bench.shared.gpu_configurations import CONFIGURATIONS, WHOLE, title
from bench.shared.gpu_rows import STEPS, compared, gpu_recipes, measured, plain_recipe
from bench.shared.small_rehearsals import QLORA, SHAPES, percent

QUICK = 1, 3, 8, 10, 18, 19  # Of them
WHOLE_CARD = '8b-1x24gb-qlora', '70b-1xh200-qlora'  # Recipes of this package for one GPU
CPU_REASONS = {
    'reserved_b': 'a CPU has no allocator of blocks', 'driver_b': 'a CPU has no driver',
    'context_b': 'a CPU has no driver'}
NO_SMI = 'nvidia-smi, which says what others hold, is not there'


def packages(method, more) -> tuple[str, ...]:
    "What a configuration imports: whole logits are computed without TRL."
    names = ['pydantic', 'yaml']
    if method == QLORA: names.append('bitsandbytes')
    if not WHOLE.items() <= more.items(): names += ['trl', 'datasets']
    return tuple(names)


def recipe(number: int, place: Place, folder: str):
    "The recipe of a configuration; in toy form on a CPU, of a small model and short rows."
    preset, method, length, micro, ranks, more = CONFIGURATIONS[number]
    changes = method | more | {'batch.length': length, 'batch.micro': micro}
    if place.toy:
        preset = recipe_folder(folder, SHAPES['quick'] | {'num_hidden_layers': 2})
        changes |= {'batch.length': length // 32}
    return plain_recipe(preset, ranks, changes | {'cluster.device': place.device})


def planned(made) -> dict:
    "What the plan says of a step: bytes, and seconds where it knows this machine."
    from llm_workbook import detect, estimate_step, memory
    try: node, missing = detect(), {}
    except ImportError as error: node, missing = None, {'planned_s': str(error)}
    ledger = memory(made, node=node)
    found = {f'planned_{level}_b': ledger.total('step', 'gpu', level)
             for level in ('allocated', 'reserved', 'device')}
    if node: found['planned_s'] = estimate_step(made, node=node).step_s
    return found | {'missing': missing}


def beside(plan: dict, seen: dict) -> dict:
    "Errors of the plan, in percent of what was measured."
    pairs = {'allocated_error': ('planned_allocated_b', 'peak_b'),
             'reserved_error': ('planned_reserved_b', 'reserved_b'),
             'device_error': ('planned_device_b', 'driver_b'),
             'seconds_error': ('planned_s', 'step_s')}
    return {name: percent(plan[ours], seen[truth]) for name, (ours, truth) in pairs.items()
            if plan.get(ours) and seen.get(truth)}


def cards() -> int:
    "Count the GPUs of this machine, without opening one."
    import subprocess
    done = subprocess.run(['nvidia-smi', '-L'], capture_output=True, text=True, check=True)
    seen = os.environ.get('CUDA_VISIBLE_DEVICES')
    return len(seen.split(',')) if seen else len(done.stdout.strip().splitlines())


def configuration(place: Place, number: int) -> dict:
    "One configuration: what the plan says, what was measured, and the errors."
    ranks = CONFIGURATIONS[number][4]
    if place.on_gpu and ranks > cards(): raise Missing(f'it takes {ranks} GPUs')
    with tempfile.TemporaryDirectory() as folder:
        made = recipe(number, place, folder)
        plan = planned(made)
        seen = tried(lambda: measured(made, real=ranks > 1))
    missing = plan.pop('missing', {}) | ({} if place.on_gpu else CPU_REASONS)
    if 'steps_s' in seen: seen['step_s'] = min(seen['steps_s'][1:])
    missing |= {name: NO_SMI for name, value in seen.items() if value is None}
    return plan | seen | beside(plan, seen) | {'missing': missing}


def tried(measure) -> dict:
    "What `measure` gives; where the device had too little memory, that."
    try: return measure()
    except RuntimeError as error:
        if 'OutOfMemory' not in str(error): raise
        return {'out_of_memory': True}


def large_recipes() -> list[tuple]:
    "Recipes at full size: a name, changes, the recipe. Of several ranks rank 0 is measured."
    from llm_workbook import Recipe
    changes = {'optimizer.steps': STEPS}
    return [*gpu_recipes(),
            *((name, {}, Recipe.named(name).changed(changes)) for name in WHOLE_CARD)]


def large(place: Place, number: int) -> dict:
    "A recipe at full size: what the rehearsal says, and what was measured."
    name, changes, made = large_recipes()[number]
    if not place.on_gpu: raise Missing('it needs a GPU: on a CPU see the line gpu_memory')
    return tried(lambda: compared(name, changes, made))
