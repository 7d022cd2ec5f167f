"""How far bytes of the ledger and seconds of the step are from what others measured.

Three other estimators of memory stand beside the ledger.
"""
import statistics
from functools import cache

from bench.record import record
from bench.shared.estimators import others
from bench.shared.published import node_of, recipe_of, spec_of, table, times

GIB = 2**30
GROUPS = {'all': lambda row: True, 'table': lambda row: row['table'],
          'held out': lambda row: row['half'] == 'held out',
          'calibration': lambda row: row['half'] == 'calibration'}


def error(measured: float, predicted: float) -> float:
    "Give the error of a prediction in percent of the measurement."
    return round(100 * (predicted / measured - 1), 2)


def ledger_gib(ledger, kind: str, node) -> float:
    """Give the ledger's total of a kind.

    A full card is full, as the allocator then empties its cache and goes on.
    """
    size = ledger.total('step', level='device' if kind == 'bound' else kind)
    return (min(size, node.gpu.memory_b) if kind in ('reserved', 'device') else size) / GIB


def memory_of(row: dict, ledger, recipe, node) -> list[dict]:
    "Predict each memory figure of a row, by the ledger and by the others."
    said, rest = [], others(recipe, ledger.spec)
    for figure in row.get('memory', ()):
        kind, measured = figure['kind'], figure['gib']
        gib = {'ledger': ledger_gib(ledger, kind, node)} | rest
        said.append({'kind': kind, 'measured': measured,
                     'predicted': {name: round(value, 3) for name, value in gib.items()},
                     'error': {name: error(measured, value) for name, value in gib.items()}})
    return said


def judge(row: dict) -> dict:
    "Predict every figure of one row."
    from llm_workbook import memory, estimate_step
    recipe = recipe_of(row['id'])
    node, spec = node_of(recipe), spec_of(recipe)
    said = {name: row.get(name, default) for name,
            default in (('id', ''), ('half', ''), ('table', 0), ('judged', True))}
    said['memory'] = memory_of(row, memory(recipe, spec, node), recipe, node)
    if 'time' in row:
        step = estimate_step(recipe, spec, node)
        measured, predicted = (round(s, 4) for s in times(row, step, recipe))
        said['time'] = {'measured': measured, 'predicted': predicted,
                        'error': error(measured, predicted), 'bound': step.bound}
    return said


@cache
def judged() -> tuple[dict, ...]:
    "Predict every row."
    return tuple(judge(row) for row in table()['rows'])


def errors(rows, what: str, name: str = 'ledger') -> list[float]:
    """Collect absolute errors of the rows that count: of 'time', 'memory', or one kind of memory.

    Bounds are apart.
    """
    counted = [row for row in rows if row['judged']]
    if what == 'time': return [abs(row['time']['error']) for row in counted if 'time' in row]
    figures = [figure for row in counted for figure in row['memory'] if figure['kind'] != 'bound']
    return [abs(figure['error'][name]) for figure in figures if what in ('memory', figure['kind'])]


def bounds(rows) -> list[bool]:
    "Say of each row that only had to fit whether the ledger says so."
    return [f['error']['ledger'] <= 0 for row in rows if row['judged'] for f in row['memory']
            if f['kind'] == 'bound']


def middle(values: list[float]) -> dict:
    "Give count, median and worst."
    if not values: return {'figures': 0}
    return {'figures': len(values), 'median': round(statistics.median(values), 2),
            'worst': max(values)}


def summary(rows) -> dict:
    "Median and worst error for each group of rows and each sort of figure."
    groups = {group: [row for row in rows if belongs(row)] for group, belongs in GROUPS.items()}
    said = {what: {group: middle(errors(some, what)) for group, some in groups.items()}
            for what in ('memory', 'time')}
    said |= {kind: middle(errors(rows, kind)) for kind in ('allocated', 'reserved', 'device')}
    names = ('accelerate', 'deepspeed', 'bare rule')
    return said | {'others': {name: middle(errors(rows, 'memory', name)) for name in names},
                   'bounds': bounds(rows)}


def measure() -> dict:
    "Judge every row; the value is the median error of memory in the goal's table, in percent."
    rows = judged()
    said, here = summary(rows), errors([row for row in rows if row['table']], 'memory')
    peers = errors([row for row in rows if row['table']], 'memory', 'bare rule')
    return record('published_error', here, '% of the measured memory', peers,
                  peer='bare parameter count', goal=8, goal_worst=20,
                  time_median=said['time']['table']['median'],
                  time_worst=said['time']['table']['worst'],
                  held_out={what: said[what]['held out'] for what in ('memory', 'time')},
                  summary=said, rows=list(rows))
