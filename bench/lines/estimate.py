"""Milliseconds for one estimate with its model counted, and what counting a 405B takes."""
import json
import statistics
import subprocess
import sys
import time

from bench.record import ROOT, record

GOAL = 5.0  # ms
SPEC_GOAL_S, SPEC_GOAL_MB = 2.0, 500
PROGRAM = '''
import json, resource, time
import torch, transformers
from llm_workbook.model.spec import spec
start = time.perf_counter()
counted = spec("llama-3.1-405b")
seconds = time.perf_counter() - start
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
print(json.dumps({"spec_s": seconds, "spec_peak_mb": peak_mb, "parameters": counted.parameters}))
'''


def recipes() -> list:
    "One recipe for each of the sorts that a ledger treats apart."
    from llm_workbook import Recipe, draft
    full = {'method.kind': 'full', 'batch.length': 4096}
    experts = {'method.kind': 'lora', 'sharding.strategy': 'zero3', 'batch.accumulation': 2}
    return [Recipe.named('70b-2x24gb-qlora'), draft('llama-3.1-8b', '1x-rtx-4090'),
            draft('llama-3.1-70b', 'p5', 2, global_batch=32).changed(full),
            draft('llama-3.1-405b', 'p5', 8, global_batch=64).changed(full),
            draft('mixtral-8x7b', '8x-a100-80').changed(experts)]


def fresh() -> dict:
    "Count a 405B in a new process; imports of libraries are in the memory and not in the time."
    done = subprocess.run([sys.executable, '-c', PROGRAM], cwd=ROOT, stdout=subprocess.PIPE,
                          text=True, check=True)
    return json.loads(done.stdout)


def once(recipe) -> float:
    "Time one estimate, in ms."
    from llm_workbook import estimate
    start = time.perf_counter()
    estimate(recipe)
    return 1e3 * (time.perf_counter() - start)


def measure(repetitions: int = 40) -> dict:
    """Time every recipe in turn, each time with another length.

    The value is the median, `worst` the slowest recipe's median.
    """
    rows = recipes()
    for recipe in rows: once(recipe)
    spent = {recipe.name: [] for recipe in rows}
    for i in range(repetitions):
        for recipe in rows: spent[recipe.name].append(once(recipe.changed({'batch.length': 1024
                                                                           + 8 * i})))
    medians = {name: round(statistics.median(ms), 3) for name, ms in spent.items()}
    counts = [fresh() for _ in range(3)]
    made = record('estimate', [ms for row in spent.values() for ms in row], 'ms', goal=GOAL,
                  recipes=medians,
                  spec_405b_s=round(statistics.median(c['spec_s'] for c in counts), 2),
                  spec_goal_s=SPEC_GOAL_S,
                  spec_405b_peak_mb=round(max(c['spec_peak_mb'] for c in counts)),
                  spec_goal_mb=SPEC_GOAL_MB)
    return made | {'worst': max(medians.values())}
