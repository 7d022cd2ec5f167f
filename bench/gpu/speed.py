"""Training steps and the loss head against what others have: TRL's defaults, and Apple's kernels.

A step's trainers run one after another on the same device, each in a process of its own, with the
same weights and examples. What a card reaches at most in bfloat16 is its published figure.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec

from bench.gpu.place import Missing, Place, recipe_folder
from bench.record import ROOT
from bench.shared.small_rehearsals import SHAPES

WORDS = 128_256
PACKED = {'model.attention': 'segments', 'batch.packing': True, 'batch.loss_head': 'one_pass',
          'optimizer.kind': 'adamw_fused', 'optimizer.learning_rate': 2e-5}
LORA = {'method.kind': 'lora', 'batch.length': 4096}
QLORA = {'method.kind': 'qlora', 'batch.length': 2048, 'sharding.activation_checkpointing': 'full'}
AWAY = QLORA | {'model.attention': 'sdpa', 'batch.packing': False,
                'sharding.offload_activations': 'cpu'}
CARD_B = 85_017_493_504  # Of an H100 with 80 GB, as its driver says; of a larger card no more
LENGTHS = {'float32': (45_056, 49_152), 'bfloat16': (65_536,)}  # Tokens of one row, by adapters


# Steps

def seen(job: dict, allocator: dict, limit_s: int) -> dict:
    "What one process has measured."
    command = [sys.executable, '-m', 'bench.programs.device_speed', json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | allocator, capture_output=True,
                          text=True, timeout=limit_s)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{')]
    if done.returncode or not lines: raise RuntimeError(done.stderr[-600:])
    return json.loads(lines[-1])


def recipe(preset: str, changes: dict, place: Place, folder: str):
    "A recipe of a preset on one device; in toy form of a small model and short rows."
    from bench.shared.gpu_rows import plain_recipe
    changes = PACKED | changes | {'cluster.device': place.device}
    if place.toy:
        preset = recipe_folder(folder, SHAPES['quick'] | {'num_hidden_layers': 2})
        changes |= {'batch.length': 128}
    return plain_recipe(preset, 1, changes)


def rates(run: dict) -> dict:
    "Useful and computed tokens/s of the median step after the first, and memory at its highest."
    later = run['steps'][1:]
    seconds = statistics.median(step['seconds'] for step in later)
    peaks = {name: max(step[name] for step in later)
             for name in ('allocated_b', 'reserved_b', 'driver_b') if name in later[0]}
    return {'useful_per_s': run['useful'] / seconds, 'tokens_per_s': run['tokens'] / seconds,
            'steps_s': [step['seconds'] for step in run['steps']],
            'loss': run['losses'][0]} | peaks | {'settings': run['settings']}


def shares(run: dict) -> dict:
    """Model FLOP/s, by 4 and by 6 for each weight and token, and as shares of what the card is said
    to reach in bfloat16. Of 6, 2 are the gradients of weights, which adapters spare."""
    from llm_workbook.config.hardware import gpu, gpus
    cards = [gpu(name) for name in gpus()]
    most = next((card.bf16_flops for card in cards if run['card'] in card.driver_names), None)
    each, found = run['weights'] * rates(run)['tokens_per_s'], {}
    for factor in 4, 6:
        found[f'flops_{factor}n'] = factor * each
        if most: found[f'mfu_{factor}n'] = factor * each / most
    return found


def compared(place: Place, preset: str, ways: dict, examples: int, steps: int) -> dict:
    "Train the same examples in several ways, one after another."
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (trainer, changes) in ways.items():
            made = recipe(preset, changes, place, folder)
            words = SHAPES['quick']['vocab_size'] if place.toy else WORDS
            job = {'trainer': trainer, 'recipe': made.model_dump(mode='json'), 'words': words,
                   'examples': place.pick(examples, 9), 'steps': steps}
            allocator = made.cluster.allocator if trainer == 'ours' else {}
            run = seen(job, allocator, 220)
            found[name] = rates(run) | (shares(run) if place.on_gpu else {})
            if trainer == 'ours':
                passes = run['settings']['passes']  # Which follows from how the examples packed
                found[name]['planned_b'] = planned_b(made.changed({'batch.accumulation': passes}))
    trl = found['trl']
    for name in ways:
        mine = found[name]
        mine['ratio'] = mine['useful_per_s'] / trl['useful_per_s']
        mine['loss_off'] = abs(mine['loss'] - trl['loss'])
        if 'allocated_b' in mine: mine['memory_ratio'] = mine['allocated_b'] / trl['allocated_b']
    return found | {'weights': run['weights'], 'useful': run['useful'], 'tokens': run['tokens']}


def lora_8b(place: Place) -> dict:
    "8B, LoRA in bfloat16, rows of 4,096 tokens: ours, plain and compiled, and TRL's defaults."
    ways = {'ours': ('ours', LORA), 'trl': ('trl', LORA)}
    if place.on_gpu: ways['compiled'] = 'ours', LORA | {'model.kernels': 'compile'}
    return compared(place, 'llama-3.1-8b', ways, 64, 4)


def qlora_70b(place: Place) -> dict:
    "70B, QLoRA, rows of 2,048 tokens: ours, and TRL's defaults."
    ways = {'trl': ('trl', QLORA), 'ours': ('ours', QLORA | {'batch.micro': 2})}
    return compared(place, 'llama-3.1-70b', ways, 16, 2)


def long_context(place: Place, adapters: str = 'float32') -> dict:
    """70B, QLoRA, activations on the host: the longest row of which a step fits 80 GB.

    A larger card may use so much and no more. The plan is made before.
    """
    if not place.on_gpu: raise Missing('a CPU has no device to move activations from')
    changes, lengths = AWAY | {'precision.master': adapters}, LENGTHS[adapters]
    with tempfile.TemporaryDirectory() as folder:
        made = [recipe('llama-3.1-70b', changes | {'batch.length': length}, place, folder)
                for length in lengths]
        plans = {f'planned_{length}_b': planned_b(one) for length, one in zip(lengths, made)}
        job = {'trainer': 'ours', 'recipe': made[-1].model_dump(mode='json'), 'words': WORDS,
               'lengths': lengths, 'card_b': CARD_B}
        found = seen(job, made[-1].cluster.allocator, 440)
    fits = [step['length'] for step in found['steps'] if step['driver_b'] <= CARD_B]
    return found | plans | {'longest': max(fits, default=0)}


def long_context_16(place: Place) -> dict:
    "The same with adapters in bfloat16."
    return long_context(place, 'bfloat16')


def planned_b(made) -> int:
    "Bytes of tensors at the fullest moment of a step, as the plan says."
    from llm_workbook import memory
    return memory(made).total('step', 'gpu', 'allocated')


# The loss head

ALL_SCORES = 'log_probs', 'entropy', 'is_top1'  # What TRL's trainer asks for


def heads() -> dict:
    "Ways to the mean loss of tokens: the library's, and those of packages that are installed."
    from llm_workbook.model.loss_head import fused_scores, token_scores

    def ours(*tensors, outputs=('log_probs',)):
        return -token_scores(*tensors, outputs=outputs).log_probs.mean()
    ways = {'ours': ours, 'ours_all_scores': partial(ours, outputs=ALL_SCORES)}
    import torch
    if torch.cuda.is_available() and find_spec('liger_kernel'):
        def liger(*tensors): return -fused_scores(*tensors).log_probs.mean()
        ways['liger'] = liger
    if find_spec('cut_cross_entropy'):
        from cut_cross_entropy import linear_cross_entropy
        ways['cce'] = linear_cross_entropy
    return ways


def drawn(place: Place):
    "Hidden states, the head of an untrained model, and words: at random, on the device."
    import torch
    torch.manual_seed(0)
    tokens, width, words = place.pick((8192, 4096, WORDS), (64, 32, 512))
    how = {'device': place.device, 'dtype': torch.bfloat16}
    hidden = torch.randn(tokens, width, **how).requires_grad_()
    weight = torch.randn(words, width, **how).mul_(0.02)
    return hidden, weight, torch.randint(words, (tokens,), device=place.device)


def loss_and_back(head, hidden, weight, targets) -> None:
    "The mean loss, and gradients that were not there before."
    hidden.grad = weight.grad = None
    head(hidden, weight, targets).backward()


def peak_b(place: Place, call) -> int | None:
    "Bytes that a call takes at most, beside what was there; None on a CPU."
    import torch
    if not place.on_gpu: return call()
    place.wait()
    torch.cuda.reset_peak_memory_stats()
    before_b = torch.cuda.memory_allocated()
    call()
    place.wait()
    return torch.cuda.max_memory_allocated() - before_b


def head_figures(place: Place, head, tensors: tuple, truth: tuple) -> dict:
    "Seconds, memory and errors of one way."
    call = partial(loss_and_back, head, *tensors)
    found = {'s': place.seconds(call)}
    for tensor in tensors[:2]: tensor.grad = None
    found['b'] = peak_b(place, call)
    for part, tensor, right in zip(('hidden', 'head'), tensors, truth):
        if tensor.grad is None: continue
        found[f'{part}_off'] = ((tensor.grad.float() - right).norm() / right.norm()).item()
    return found


def head_speed(place: Place) -> dict:
    "Seconds, memory and errors of the loss head, forward and back, with a head that trains or not."
    from bench.shared.heads import exact
    tensors = drawn(place)
    truth, found, missing = exact(*tensors), {}, {}
    for key, trains in ('', True), ('_frozen', False):
        tensors[1].requires_grad_(trains)
        for name, head in heads().items():
            made = head_figures(place, head, tensors, truth)
            found |= {f'{name}{key}_{what}': value for what, value in made.items()}
        if f'cce{key}_s' not in found: continue
        for ratio, what in ('time_ratio', 's'), ('memory_ratio', 'b'):
            ours, theirs = found[f'ours{key}_{what}'], found[f'cce{key}_{what}']
            if theirs: found[f'{ratio}{key}'] = ours / theirs
    for name in [name for name, value in found.items() if value is None]:
        missing[name] = 'a CPU has no allocator of blocks'
        del found[name]
    if 'cce_s' not in found: missing['cce_s'] = 'cut_cross_entropy is not installed'
    return found | {'missing': missing}
