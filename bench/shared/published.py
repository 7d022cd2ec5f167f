"""What others have published: the table of their runs, and of runs that failed."""
from functools import cache

import yaml

from bench.record import ROOT

ROWS = ROOT/'bench'/'published.yaml'
FAILURES = ROOT/'bench'/'known_failures.yaml'  # Of the same form; rows have `failed: true`
PARTS = 'nodes', 'models', 'sources'


def read(path) -> dict: return yaml.safe_load(path.read_text(encoding='utf-8'))


@cache
def table() -> dict:
    "Read sources, machines, models and rows."
    return read(ROWS)


@cache
def failures() -> dict:
    "Read runs that did not fit; they may use sources, machines and models of the table too."
    return merged(read(FAILURES) if FAILURES.exists() else {})


def merged(found: dict) -> dict:
    "Complete a file of failed runs by what the table has."
    known = table()
    parts = {part: known[part] | found.get(part, {}) for part in PARTS}
    rows = [*found.get('rows', ()), *(row for row in known['rows'] if row.get('failed'))]
    wrong = [row['id'] for row in rows if row.get('failed') is not True]
    if wrong: raise ValueError(f'{wrong} are in known_failures.yaml without failed: true')
    return {'base': found.get('base', known['base']), **parts, 'rows': rows}
