"""Seconds to rehearse one whole step of a 70B and a 405B, each in a process of its own.

Torch's tracker of memory stands beside it.
"""
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from bench.record import ROOT, record

_FULL = {'model.attention': 'sdpa', 'batch.packing': False}
JOBS = {  # Name: recipe of the package, changes, whether every layer runs
    '70b-full-16-exact': ('70b-2x8-a100-80-full', _FULL, True),
    '70b-qlora-2-exact': ('70b-2x24gb-qlora', {'batch.accumulation': 1}, True),
    '70b-full-16': ('70b-2x8-a100-80-full', _FULL, False),
    '70b-qlora-2': ('70b-2x24gb-qlora', {'batch.accumulation': 1}, False),
    '405b-full-1024': (
        '70b-2x8-a100-80-full',
        _FULL | {'model.source': 'meta-llama/Llama-3.1-405B', 'cluster.nodes': 128}, False),
}
GOALS = {  # Seconds
    '70b-full-16-exact': 8,
    '70b-qlora-2-exact': 12,
    '70b-full-16': 1.5,
    '70b-qlora-2': 1.5,
    '405b-full-1024': 5,
}


def recipe(name: str):
    "The recipe of one job."
    from llm_workbook import Recipe
    source, changes, _ = JOBS[name]
    return Recipe.named(source).changed(changes)


def libraries() -> None:
    "Import what any fine-tune imports, which is no part of a rehearsal."
    import llm_workbook.model.quantize  # noqa: F401
    import accelerate, bitsandbytes, datasets, peft, torch, transformers, trl  # noqa: E401, F401
    import torch.distributed.fsdp, torch.distributed.tensor  # noqa: E401
    import torch.testing._internal.distributed.fake_pg  # noqa: F401
    from trl import SFTTrainer  # noqa: F401  trl loads its parts when they are asked for


def ours(name: str) -> dict:
    "Rehearse in this process, from cold."
    from llm_workbook.rehearsal.step import rehearse
    began = time.monotonic()
    rehearsal = rehearse(recipe(name), exact=JOBS[name][2])
    return {
        'total_s': time.monotonic() - began,
        'step_s': rehearsal.step_s,
        'peak_b': rehearsal.peak_b,
        'layers': list(rehearsal.played),
        'collectives': len(rehearsal.messages),
    }


def theirs(name: str) -> dict:
    "Two steps under torch's own tracker, from the shapes on, used as its documentation uses it."
    from bench.shared.tracker import plain_program, tracked
    on_cpu = recipe(name).changed({
        'cluster.device': 'cpu',
        'cluster.hardware': None,
        'sharding.loading': 'every_rank',
        'intervals': {},
    })
    began = time.monotonic()
    peak_b = tracked(on_cpu, plain_program, True)
    return {'total_s': time.monotonic() - began, 'peak_b': peak_b, 'steps': 2}


def alone(kind: str, name: str) -> dict:
    "Run one job in a fresh process; add the most memory that it took."
    env = os.environ | {'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-m', 'bench.lines.rehearse_70b', kind, name]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f'{kind}, {name}: {done.stderr[-2000:]}')
    return json.loads(done.stdout.splitlines()[-1])


def median_row(name: str, goal_s: float) -> dict:
    "Run one job three times: its sizes, and the medians of its seconds and its memory."
    runs = [alone('ours', name) for _ in range(3)]
    medians = {}
    for key in ('total_s', 'step_s', 'resident_b'):
        medians[key] = round(statistics.median(run[key] for run in runs), 2)
    return {'job': name, 'goal_s': goal_s} | runs[0] | medians


def measure() -> dict:
    "Run every job three times, and the tracker once; the value is the exact 70B on 16 ranks."
    rows = [median_row(name, goal_s) for name, goal_s in GOALS.items()]
    tracker = alone('theirs', '70b-full-16-exact')
    by_job = {row['job']: row for row in rows}
    exact = by_job['70b-full-16-exact']
    return record(
        'rehearse_70b', [exact['total_s']], 's', [tracker['total_s'] / tracker['steps']],
        peer='torch FSDPMemTracker, one of two steps, with building', goal=8,
        step_s=exact['step_s'], derived=by_job['70b-full-16']['step_s'],
        rows=rows, tracker=tracker)


def main() -> None:
    "Run one job and print what it took as JSON."
    libraries()
    kind, name = sys.argv[1:]
    result = {'ours': ours, 'theirs': theirs}[kind](name)
    result['resident_b'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(result))


if __name__ == '__main__':
    main()
