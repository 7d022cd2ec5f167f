"""How far bytes of the ledger and seconds of the step are from what others measured.

Three other estimators of memory stand beside the ledger. The calibration rows, and every second
source of the blind table, give the ranges that an estimate shows; the verdict on every run, with
these ranges, is counted.
"""
import math
from collections import Counter
from functools import cache

from bench.record import record
from bench.shared.doubt import SURE, tolerance, write
from bench.shared.estimators import others
from bench.shared.published import (error, ledger_gib, middle, node_of, plan_of, recipe_of,
                                    spec_of, table, times)

GROUPS = {'all': lambda row: True, 'table': lambda row: row['table'],
          'held out': lambda row: row['half'] == 'held out',
          'calibration': lambda row: row['half'] == 'calibration'}
TABLES = 'published', 'blind', 'blind2', 'known_failures'
ON_CARD = 'reserved', 'device'  # Kinds of memory that a whole card shows
# Range -> kinds of figures, constants of the library fitted on calibration rows, tokens of a pass:
# ledger: _WASTED, _LEAST_WASTED; step_time: _MATMUL, _STREAM, _DEQUANTISE, _HIDDEN, _BLEND;
# host_time: _LAUNCH_S, _GATHER_S, _WRAPPED_S. No calibration row has a pass of fewer tokens.
FITTED = {'memory': (ON_CARD, 2, 0), 'time': (('time',), 8, 256)}


def memory_of(row: dict, ledger, node, rest: dict) -> list[dict]:
    "Predict each memory figure of a row, by the ledger and by the others, whose GiB are `rest`."
    said = []
    for figure in row.get('memory', ()):
        kind, measured = figure['kind'], figure['gib']
        gib = {'ledger': ledger_gib(ledger, kind, node)} | rest
        said.append({'kind': kind, 'measured': measured,
                     'predicted': {name: round(value, 3) for name, value in gib.items()},
                     'error': {name: error(measured, value) for name, value in gib.items()}})
    return said


def judge(row: dict, name: str = 'published') -> dict:
    "Predict every figure of one row of a table."
    from llm_workbook import memory, estimate_step
    recipe = recipe_of(row['id'], name)
    node, spec = node_of(recipe, name), spec_of(recipe, name)
    said = {name: row.get(name, default) for name,
            default in (('id', ''), ('half', ''), ('table', 0), ('judged', True))}
    rest = others(recipe, spec) if name == 'published' else {}
    said['memory'] = memory_of(row, memory(recipe, spec, node), node, rest)
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


@cache
def judged_blind() -> tuple[dict, ...]:
    """Predict every row of bench/blind.yaml; every second source helps to fit the ranges.

    Times of a source that bench/published.yaml has too are left to that table.
    """
    known = table('blind')
    taken = {source['url'] for source in table()['sources'].values()}
    counted = dict.fromkeys(row['source'] for row in known['rows'] if row.get('judged', True))
    names = 'calibration', 'held out'
    halves = {source: names[place % 2] for place, source in enumerate(counted)}
    said = []
    for row in known['rows']:
        if not row.get('judged', True): continue
        if known['sources'][row['source']]['url'] in taken:
            row = {key: value for key, value in row.items() if key != 'time'}
        said.append(judge(row, 'blind') | {'half': halves[row['source']]})
    return tuple(said)


@cache
def verdicts(name: str = 'published') -> tuple[dict, ...]:
    "Give the verdict on every run of a table, and in words unless it is a plain one."
    from llm_workbook import RecipeError
    said = []
    for row in table(name)['rows']:
        said.append({'id': row['id'], 'failed': row.get('failed', '')})
        try: plan = plan_of(row['id'], name)
        except RecipeError as refusal:
            said[-1] |= {'outcome': 'not planned', 'verdict': str(refusal)}
            continue
        said[-1] |= {'outcome': plan.outcome}
        if plan.outcome != 'fits': said[-1] |= {'verdict': plan.verdict}
    return tuple(said)


def ruled() -> list[dict]:
    "Give the verdicts on the runs of all tables."
    return [row for name in TABLES for row in verdicts(name)]


def counted(said) -> dict:
    """Count the verdicts: on runs that ran, and on runs that did not fit.

    A false refusal is a run that ran and gets 'does not fit'; a false promise the other way round.
    """
    ran = [row for row in said if not row['failed']]
    failed = [row for row in said if row['failed']]
    return {'ran': dict(Counter(row['outcome'] for row in ran)),
            'false refusals': [row['id'] for row in ran if row['outcome'] == 'does not fit'],
            'failed': dict(Counter(row['outcome'] for row in failed)),
            'false promises': [row['id'] for row in failed if row['outcome'] == 'fits']}


def logarithms(rows, kinds) -> list[float]:
    "Collect log(measured / predicted) of the figures that count; 'time' is one of the kinds."
    said = []
    for row in rows:
        if not row['judged']: continue
        said += [math.log(figure['measured'] / figure['predicted']['ledger'])
                 for figure in row['memory'] if figure['kind'] in kinds]
        if 'time' in kinds and 'time' in row:
            said.append(math.log(row['time']['measured'] / row['time']['predicted']))
    return said


def ranges(rows) -> list[dict]:
    "Fit the ranges on calibration rows alone."
    own = [row for row in rows if row['half'] == 'calibration']
    groups = []
    for what, (kinds, fitted, least_tokens) in FITTED.items():
        values = logarithms(own, kinds)
        low, high = tolerance(values, fitted)
        lowest, highest = tolerance(values, fitted, SURE)
        groups.append({'what': what, 'low': low, 'high': high, 'rows': len(values),
                       'least_tokens': least_tokens, 'lowest': lowest, 'highest': highest})
    return groups


def cards(tables: dict) -> dict:
    "Name the cards of the figures that each range is fitted on; `tables`: name -> judged rows."
    found = {what: set() for what in FITTED}
    for name, rows in tables.items():
        for row in rows:
            if row['half'] != 'calibration' or not row['judged']: continue
            card = node_of(recipe_of(row['id'], name), name).gpu.name
            kinds = {figure['kind'] for figure in row['memory']} | ({'time'} & row.keys())
            for what, (wanted, *_) in FITTED.items():
                if kinds & set(wanted): found[what].add(card)
    return {what: sorted(names) for what, names in found.items()}


def covered(rows, groups) -> dict:
    "Count the held-out figures that lie in the range of their sort, by kind."
    rest = [row for row in rows if row['half'] == 'held out']
    kinds = {'memory': ('allocated', *ON_CARD), 'time': ('time',)}
    said = {}
    for group in groups:
        for kind in dict.fromkeys((group['what'], *kinds[group['what']])):
            values = logarithms(rest, kinds.get(kind, (kind,)))
            if not values: continue
            inside = sum(group['low'] <= value <= group['high'] for value in values)
            said[kind] = {'figures': len(values), 'inside': inside,
                          'share': round(inside / len(values), 3)}
    return said


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
    rows, more = judged(), judged_blind()
    groups = ranges([*rows, *more])
    write(groups, cards({'published': rows, 'blind': more}))  # Verdicts read it
    every = ruled()
    said, here = summary(rows), errors([row for row in rows if row['table']], 'memory')
    peers = errors([row for row in rows if row['table']], 'memory', 'bare rule')
    return record('published_error', here, '% of the measured memory', peers,
                  peer='bare parameter count', goal=8, goal_worst=20,
                  time_median=said['time']['table']['median'],
                  time_worst=said['time']['table']['worst'],
                  held_out={what: said[what]['held out'] for what in ('memory', 'time')},
                  ranges=groups, blind_rows=list(more),
                  covered={'published': covered(rows, groups), 'blind': covered(more, groups)},
                  verdicts=counted(every), ruled=every,
                  summary=said, rows=list(rows))
