"""Runs of the library, small, in a process that stands for a notebook's kernel: do they work?"""
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.gpu.place import Missing, Place, hidden
from bench.record import ROOT


def small(place: Place, **changes):
    "The recipe of the quickstart on one process of the device, for four steps, with dropout."
    from llm_workbook import Recipe
    plain = {'cluster.processes': 1, 'sharding.strategy': 'none', 'cluster.device': place.device,
             'optimizer.steps': 4, 'intervals.evaluation': 0, 'intervals.saving': 0,
             'method.dropout': 0.1, 'optimizer.schedule': 'constant'}
    return Recipe.named('reviews-qlora').changed(plain | changes)


def tuned(recipe, folder: str, **how):
    "Fine-tune, quietly; the run, and what was printed."
    from llm_workbook import fine_tune
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run = fine_tune(recipe, Path(folder), timeout_s=400, live=False, **how)
    return run, printed.getvalue()


def losses(run) -> list[float]: return [line['loss'] for line in run.metrics]


def finite(values) -> bool: return all(abs(value) < 1e4 for value in values)


def cpu_ranks(place: Place) -> dict:
    "Two ranks on the CPU of this machine train, with its GPU in sight."
    import torch
    recipe = small(Place('cpu'), **{'cluster.processes': 2, 'sharding.strategy': 'fsdp2',
                                    'optimizer.steps': 2})
    with tempfile.TemporaryDirectory() as folder:
        found = losses(tuned(recipe, folder)[0])
    return {'losses': found, 'opened': torch.cuda.is_initialized(),
            'passed': len(found) == 2 and finite(found)}


def cpu_zero(place: Place) -> dict:
    "Two ranks of ZeRO on the CPU of this machine train."
    from llm_workbook import Recipe, shrink
    recipe = shrink(Recipe.named('7b-zero2-offload')).changed(
        {'optimizer.steps': 2, 'intervals.evaluation': 0})
    with tempfile.TemporaryDirectory() as folder:
        found = losses(tuned(recipe, folder)[0])
    return {'losses': found, 'passed': len(found) == 2 and finite(found)}


def rehearsal_figures(name: str) -> list[int]:
    "What a rehearsal finds: bytes at the peak, and messages."
    from llm_workbook import Recipe, rehearse
    found = rehearse(Recipe.named(name))
    return [found.peak_b, len(found.messages)]


def rehearsal(place: Place) -> dict:
    "A rehearsal here gives what it gives where no GPU is seen."
    import torch
    torch.ones(8, device=place.device).sum().item()  # As a notebook may have done
    name = '70b-2x24gb-qlora'
    here = rehearsal_figures(name)
    program = f'from bench.gpu.runs import rehearsal_figures as f; print(f({name!r}))'
    done = subprocess.run([sys.executable, '-c', program], env=hidden(), cwd=ROOT, check=True,
                          capture_output=True, text=True)
    blind = json.loads(done.stdout.splitlines()[-1])
    return {'peak_b': here[0], 'messages': here[1], 'peak_unseen_b': blind[0],
            'passed': here == blind}


def device_run(place: Place) -> dict:
    "One process on the device begins with the losses of one on the CPU, and keeps its payload."
    found = {}
    for device in (place.device, 'cpu'):
        with tempfile.TemporaryDirectory() as folder:
            run, _ = tuned(small(Place(device), **{'method.dropout': 0.0}), folder)
            found[device] = losses(run), run.ranks[0]['payload']
    ours, truth = found[place.device], found['cpu']
    off = max(abs(a / b - 1) for a, b in zip(ours[0][:2], truth[0]))  # Later ones drift apart
    return {'losses': ours[0], 'cpu_losses': truth[0], 'off': off, 'payload': ours[1],
            'cpu_payload': truth[1], 'passed': finite(ours[0]) and off < 0.02}


FSDP2 = {'sharding.strategy': 'fsdp2'}
OFFLOAD = {'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'}


def sharded_run(place: Place) -> dict:
    "A rank of FSDP2, on a GPU also with offload, has the losses and the payload of a plain one."
    ways = {'plain': {}, 'fsdp2': FSDP2}
    if place.on_gpu: ways['offload'] = FSDP2 | OFFLOAD
    found, payloads = {}, set()
    for name, changes in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            run, _ = tuned(small(place, **{'method.dropout': 0.0} | changes), folder)
            found[name] = losses(run)
            payloads.add(run.ranks[0]['payload'])
    off = max(abs(a / b - 1) for way in found.values() for a, b in zip(way[:2], found['plain']))
    return found | {'off': off, 'payloads': len(payloads),
                    'passed': all(map(finite, found.values())) and off < 0.02
                    and len(payloads) == 1} | place.gpu_alone(['offload'], 'it needs a GPU')


def activations_away(place: Place) -> dict:
    "Activations that wait on the host give the losses of those that stay."
    if not place.on_gpu: raise Missing('a CPU has no device to move activations from')
    again, found = {'sharding.activation_checkpointing': 'full', 'method.dropout': 0.0}, {}
    for name, where in ('kept', 'none'), ('away', 'cpu'):
        recipe = small(place, **again | {'sharding.offload_activations': where})
        with tempfile.TemporaryDirectory() as folder: found[name] = losses(tuned(recipe, folder)[0])
    off = max(abs(a / b - 1) for a, b in zip(found['away'], found['kept']))
    return found | {'off': off, 'passed': finite(found['away']) and off < 0.02}


def opened_kernel(place: Place) -> dict:
    "A kernel that has used its GPU starts its ranks from a fresh process."
    import torch
    torch.ones(8, device=place.device).sum().item()
    with tempfile.TemporaryDirectory() as folder:
        run, printed = tuned(small(place, **{'optimizer.steps': 1}), folder)
        found, fresh = losses(run), 'fresh process' in printed
    return {'losses': found, 'fresh': fresh,
            'passed': len(found) == 1 and finite(found) and fresh == place.on_gpu}


def float16_run(place: Place) -> dict:
    "A run in float16 takes its steps under a loss scale."
    recipe = small(place, **{'precision.compute': 'float16', 'precision.loss_scale': 'dynamic',
                             'method.storage': 'float16'})
    with tempfile.TemporaryDirectory() as folder: lines = tuned(recipe, folder)[0].metrics
    last = lines[-1]
    return {'losses': [line['loss'] for line in lines], 'scale': last['loss_scale'],
            'skipped': last['skipped'], 'passed': last['loss_scale'] > 1 and last['skipped'] < 4}


def resumed(place: Place) -> dict:
    "A run that is told to stop and goes on gives the losses of one that was left alone."
    recipe = small(place, **{'optimizer.steps': 6, 'intervals.saving': 1})
    with tempfile.TemporaryDirectory() as straight, tempfile.TemporaryDirectory() as folder:
        truth = losses(tuned(recipe, straight)[0])
        stopped = stop_at(recipe, Path(folder), 2)
        ours = losses(tuned(recipe, folder, resume=True)[0])
    exact, off = ours == truth, max(abs(a / b - 1) for a, b in zip(ours, truth))
    near = exact or place.on_gpu and off < 0.01  # Attention on GPUs adds up in any order
    return {'losses': ours, 'straight': truth, 'stopped_at': stopped, 'exact': exact, 'off': off,
            'passed': near and len(ours) == len(truth) and 0 < stopped < 6}


def stop_at(recipe, folder: Path, step: int) -> int:
    "Train in a process of its own, send it SIGTERM after a step; how many steps it had done."
    from llm_workbook.training.run_directory import RunFiles
    file = folder.parent/f'{folder.name}.yaml'
    recipe.save(file)
    program = (f'from llm_workbook import Recipe, fine_tune\n'
               f'fine_tune(Recipe.load({str(file)!r}), {str(folder)!r}, live=False)')
    process = subprocess.Popen([sys.executable, '-c', program], cwd=ROOT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = RunFiles(folder).metrics
    def done(): return lines.read_text().count('\n') if lines.exists() else 0
    limit_s = time.monotonic() + 300
    while done() < step and process.poll() is None and time.monotonic() < limit_s: time.sleep(0.01)
    if process.poll() is None: process.terminate()
    process.wait(60)
    file.unlink()
    return done()
