"""What others have published: tables of their runs, each row a recipe on a machine.

The tables are `published`, `blind`, `blind2`, and `known_failures`: runs that ended without memory.
"""
import statistics
from functools import cache

import yaml

from bench.record import ROOT

ROWS = ROOT/'bench'/'published.yaml'
GIB = 2**30


@cache
def table(name: str = 'published') -> dict:
    """Read sources, machines, models and rows of a table.

    Other tables start from the base of the published one, and may name its machines and models.
    """
    told = yaml.safe_load(ROWS.with_stem(name).read_text(encoding='utf-8'))
    if name == 'published': return told
    first = table()
    shared = {key: first[key] | told.get(key, {}) for key in ('nodes', 'models')}
    return {'base': first['base']} | told | shared


@cache
def recipe_of(row_id: str, name: str = 'published'):
    "Make the recipe of a row of a table: the base, changed by its source, changed by itself."
    from llm_workbook import Recipe
    rows = table(name)
    row = next(row for row in rows['rows'] if row['id'] == row_id)
    return Recipe(**rows['base']).changed(rows['sources'][row['source']]['changes']
                                          | row['changes'])


def node_of(recipe, name: str = 'published'):
    "Find the machine of `recipe`: one that the library knows, with what the table says otherwise."
    from llm_workbook import node
    own = dict(table(name)['nodes'].get(recipe.cluster.hardware, {}))
    return node(own.pop('from', recipe.cluster.hardware)).changed(own)


def spec_of(recipe, name: str = 'published'):
    "Find the architecture of `recipe`: one of the table's own, or a preset."
    from llm_workbook import spec
    model = recipe.model
    source = table(name)['models'].get(model.source, model.source)
    return spec(source, head=model.head, classes=model.classes)


def plan_of(row_id: str, name: str = 'published'):
    "Estimate a row on its machine: every phase and place, with its verdict."
    from llm_workbook import Estimate, estimate_step, memory
    from llm_workbook.plan.estimate import Room
    recipe = recipe_of(row_id, name)
    node, spec = node_of(recipe, name), spec_of(recipe, name)
    ledger = memory(recipe, spec, node)
    rooms = tuple(Room(*room) for room in ledger.rooms(node))
    return Estimate(recipe, spec, node, ledger, estimate_step(recipe, spec, node), rooms, ())


def times(row: dict, step, recipe) -> tuple[float, float]:
    "Measured and predicted seconds for a million tokens of all GPUs together."
    given = row['time']
    if 'tokens_per_s' in given: tokens_per_s = given['tokens_per_s']
    else: tokens_per_s = given['samples'] * recipe.batch.length / given['s']
    return 1e6 / tokens_per_s, 1e6 / step.tokens_per_s


def error(measured: float, predicted: float) -> float:
    "Give the error of a prediction in percent of the measurement."
    return round(100 * (predicted / measured - 1), 2)


def ledger_gib(ledger, kind: str, node) -> float:
    """Give the ledger's total of a kind.

    A full card is full, as the allocator then empties its cache and goes on.
    """
    size = ledger.total('step', level='device' if kind == 'bound' else kind)
    return (min(size, node.gpu.usable_b) if kind in ('reserved', 'device') else size) / GIB


def middle(values: list[float]) -> dict:
    "Give count, median and worst."
    if not values: return {'figures': 0}
    return {'figures': len(values), 'median': round(statistics.median(values), 2),
            'worst': max(values)}
