"""How many families pass the stations of `try_out` by QLoRA, and how long one trial takes.

One family goes to every station. The others leave out those that start a fresh process: the line
`families` loads their results in one.
"""
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from bench.record import record
from bench.shared.families import FAMILIES, Case, accepted, make_base

WHOLE = 'Llama 3.1'  # Goes to every station
INSIDE = ['mask', 'cache', 'shares', 'adapters', 'parity', 'resume', 'merge']
LEFT_OUT = (
    'Gemma 3n', 'GPT-2', 'Falcon',  # Refused by QLoRA, as `families` says
    'Llama 2', 'Ministral 3', 'Phi 4', 'OLMo 2', 'Granite', 'ERNIE 4.5')  # As one of the others


def asked_for(family: str, folder: Path) -> 'Recipe':
    "The recipe of two 24 GB cards for a family, with the fixes that a refusal names."
    from llm_workbook import Recipe, shrink
    case = Case(family, 'qlora', folder)
    make_base(family, case.base)
    recipe = Recipe.named('70b-2x24gb-qlora').changed({
        'model.source': str(case.base), 'batch.length': 128, 'method.targets': 'all-linear',
        'method.dropout': 0.0,
        'data': {'source': 'sample-conversations', 'format': 'messages'}})
    _, changes, _ = accepted(shrink(recipe, model='own'))
    return recipe.changed(changes)


def tried(family: str, folder: Path, stations: list[str] | None) -> dict:
    "One trial as a row: seconds, changes, and the station that failed with its reason."
    from llm_workbook import try_out
    start = time.monotonic()
    try: trial = try_out(asked_for(family, folder), stations=stations)
    except Exception as error: return {'family': family, 'failed': {'recipe': str(error)[:300]}}
    failed = {station.name: station.what[:300].replace(str(folder), '')
              for station in trial.problems}
    return {'family': family, 'failed': failed, 'seconds': round(time.monotonic() - start, 1),
            'passed': [station.name for station in trial.stations if station.passed]}


def measure(families: Iterable[str] = FAMILIES) -> dict:
    "Try the families one after the other."
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for family in families:
            if family in LEFT_OUT: continue
            stations = None if family == WHOLE else INSIDE
            rows.append(tried(family, Path(name), stations))
    passed = sum(not row['failed'] for row in rows)
    return record('try_out', [passed], 'families that pass the stations they go to', rows=rows,
                  failed=[row['family'] for row in rows if row['failed']])
