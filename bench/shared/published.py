"""What others have published: the table of their runs."""
from functools import cache

import yaml

from bench.record import ROOT

ROWS = ROOT/'bench'/'published.yaml'


@cache
def table() -> dict:
    "Read sources, machines, models and rows."
    return yaml.safe_load(ROWS.read_text(encoding='utf-8'))


@cache
def recipe_of(row_id: str):
    "Make the recipe of a row: the base, changed by its source, changed by itself."
    from llm_workbook import Recipe
    rows = table()
    row = next(row for row in rows['rows'] if row['id'] == row_id)
    return Recipe(**rows['base']).changed(rows['sources'][row['source']]['changes']
                                          | row['changes'])


def node_of(recipe):
    "Find the machine of `recipe`: one that the library knows, with what the table says otherwise."
    from llm_workbook import node
    own = dict(table()['nodes'].get(recipe.cluster.hardware, {}))
    return node(own.pop('from', recipe.cluster.hardware)).changed(own)


def spec_of(recipe):
    "Find the architecture of `recipe`: one of the table's own, or a preset."
    from llm_workbook import spec
    return spec(table()['models'].get(recipe.model.source, recipe.model.source))


def times(row: dict, step, recipe) -> tuple[float, float]:
    "Measured and predicted seconds for a million tokens of all GPUs together."
    given = row['time']
    if 'tokens_per_s' in given: tokens_per_s = given['tokens_per_s']
    else: tokens_per_s = given['samples'] * recipe.batch.length / given['s']
    return 1e6 / tokens_per_s, 1e6 / step.tokens_per_s
