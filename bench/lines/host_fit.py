"""The host's constants of a step's time, fitted on the calibration rows of bench/published.yaml.

Held-out rows are not read. The record has the constants that fit best, and those of the library.
"""
import math
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import product

from bench.record import record
from bench.shared import published

FEW = 1024  # Tokens in a pass, up to which the host sets the pace
TRIED = {  # Constant -> its module and the values that are tried
    '_LAUNCH_S': ('host_time', [14e-6, 15e-6, 16e-6, 17e-6, 18e-6, 19e-6, 20e-6]),
    '_GATHER_S': ('host_time', [.3e-3, .325e-3, .35e-3, .375e-3, .4e-3, .425e-3]),
    '_BLEND': ('step_time', [1.5, 2, 2.5, 3, 4])}


@cache
def rows() -> tuple[tuple, ...]:
    "Find the calibration rows with a time, each with its recipe, model and machine."
    found = []
    for row in published.table()['rows']:
        if row['half'] != 'calibration' or 'time' not in row: continue
        recipe = published.recipe_of(row['id'])
        found.append((row, recipe, published.spec_of(recipe), published.node_of(recipe)))
    return tuple(found)


def module(constant: str): return import_module(f'llm_workbook.plan.{TRIED[constant][0]}')


def current() -> dict:
    "The constants that the library has."
    return {name: getattr(module(name), name) for name in TRIED}


@contextmanager
def planned_with(constants: dict):
    "Plan with these constants for as long as the block lasts."
    before = current()
    try:
        for name, value in constants.items(): setattr(module(name), name, value)
        yield
    finally:
        for name, value in before.items(): setattr(module(name), name, value)


def ratios(constants: dict) -> list[float]:
    "Predicted over measured seconds of each row."
    from llm_workbook import estimate_step
    found = []
    with planned_with(constants):
        for row, recipe, spec, node in rows():
            measured, predicted = published.times(row, estimate_step(recipe, spec, node), recipe)
            found.append(predicted / measured)
    return found


def loss(constants: dict) -> float:
    "The sum of squared logarithms of the ratios."
    return sum(math.log(ratio)**2 for ratio in ratios(constants))


def measure() -> dict:
    "Try all combinations; the value is the median error of rows with few tokens, in percent."
    choices = [values for _, values in TRIED.values()]
    best = min((dict(zip(TRIED, values)) for values in product(*choices)), key=loss)
    off = [100 * abs(ratio - 1) for (_, recipe, *_), ratio in zip(rows(), ratios(best))
           if recipe.batch.micro * recipe.batch.length <= FEW]
    return record('host_fit', off, '% of the measured time', fitted=best, library=current(),
                  squares={'fitted': loss(best), 'library': loss(current())}, rows=len(rows()))
