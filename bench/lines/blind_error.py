"""How far plans are from runs that were predicted before their figures were entered.

Each row of a round (bench/blind.yaml, bench/blind2.yaml) is scored twice: the prediction that was
committed before its figures, and the one that the library makes now. A source that
bench/published.yaml has taken since is no longer blind: constants may be fitted on it, so only its
committed predictions count. The rounds are reported apart: the library was mended after the first.
`python -m bench.lines.blind_error` keeps the predictions of new rows;
`python -m bench.lines.blind_error ROUND FIGURES.yaml` enters the figures of a round.
"""
import statistics
import sys
from functools import cache
from pathlib import Path

import yaml

from bench.record import record
from bench.shared.published import error, middle, recipe_of, table
from bench.shared.rounds import (FIGURES, ROUNDS, blind, enter, has_figures, keep, predict,
                                 uncommitted)

SCORES = 'blind', 'today'
SMALL = 1000  # Tokens of a pass on one GPU: below it, launching kernels is most of the time


def measured(row: dict, which: str = 'blind') -> dict:
    "Give the figures of a row in the units of `predict`."
    recipe = recipe_of(row['id'], which)
    found = {'memory': {figure['kind']: figure['gib'] for figure in row.get('memory', ())}}
    if 'time' not in row: return found
    given = row['time']
    samples_per_s = given['samples'] / given['s'] if 's' in given else None
    tokens_per_s = given.get('tokens_per_s') or samples_per_s * recipe.batch.length
    return found | {'time': round(1e6 / tokens_per_s, 4)}


def score(row: dict, which: str = 'blind') -> dict:
    "Compare the figures of a row with both predictions."
    recipe, figures = recipe_of(row['id'], which), measured(row, which)
    said = {name: row.get(name, default)
            for name, default in (('id', ''), ('source', ''), ('judged', True))}
    said |= {'tokens': recipe.batch.micro * recipe.batch.length, 'measured': figures}
    guesses = blind(which)[row['id']], predict(row, which)
    for name, guess in zip(SCORES, guesses, strict=True):
        if 'refusal' in guess:
            said[name] = guess | {'error': {'memory': {}}, 'short': []}
            continue
        errors = {'memory': {kind: error(gib, guess['memory'][kind])
                             for kind, gib in figures['memory'].items()}}
        if 'time' in figures: errors['time'] = error(figures['time'], guess['time'])
        said[name] = guess | {'error': errors}
    return said


def fitted_since(which: str = 'blind') -> list[str]:
    "Name the sources that bench/published.yaml has by now."
    taken = {source['url'] for source in table()['sources'].values()}
    return [name for name, source in table(which)['sources'].items() if source['url'] in taken]


@cache
def scored(which: str = 'blind') -> tuple[dict, ...]:
    "Score every row of a round whose figures are there."
    return tuple(score(row, which) for row in table(which)['rows'] if has_figures(row))


def errors(rows, name: str, what: str) -> list[float]:
    "Collect signed errors of the rows that count: of 'time', of 'memory', or of one kind of it."
    found = [row[name]['error'] for row in rows if row['judged']]
    if what == 'time': return [said['time'] for said in found if 'time' in said]
    return [value for said in found for kind, value in said['memory'].items()
            if what in ('memory', kind)]


def middles(values: list[float]) -> dict:
    "Give count, median and worst of the sizes of errors, and the median with its sign."
    said = middle([abs(value) for value in values])
    return said | ({'bias': round(statistics.median(values), 2)} if values else {})


def refused(rows, name: str) -> list[str]:
    "Name the rows that ran, and that a plan calls too large."
    return [row['id'] for row in rows if row['judged'] and row[name]['short']]


def not_planned(rows, name: str) -> list[str]:
    "Name the rows that ran, and that the library refuses to plan."
    return [row['id'] for row in rows if row['judged'] and 'refusal' in row[name]]


def counting(rows, name: str, which: str):
    "Leave out the rows that are no longer blind today."
    return rows if name == 'blind' else [row for row in rows
                                         if row['source'] not in fitted_since(which)]


def summary(rows, name: str, which: str = 'blind') -> dict:
    "Summarise a prediction: errors by sort of figure and by source, and false refusals."
    rows = counting(rows, name, which)
    passes = {'time': lambda row: row['tokens'] >= SMALL,
              'time of small passes': lambda row: row['tokens'] < SMALL}
    said = {what: middles(errors(rows, name, what))
            for what in ('memory', 'allocated', 'reserved', 'device')}
    said |= {what: middles(errors([row for row in rows if belongs(row)], name, 'time'))
             for what, belongs in passes.items()}
    sources = {}
    for source in dict.fromkeys(row['source'] for row in rows if row['judged']):
        own = [row for row in rows if row['source'] == source]
        sources[source] = {what: middles(errors(own, name, what)) for what in FIGURES}
    return said | {'sources': sources, 'refused': refused(rows, name),
                   'not planned': not_planned(rows, name),
                   'each source once': {what: each_once(sources, what) for what in FIGURES}}


def each_once(sources: dict, what: str) -> dict:
    "Give the median over sources of their medians: no source counts more for having more rows."
    return middle([said[what]['median'] for said in sources.values() if said[what]['figures']])


def held(rows, name: str, which: str = 'blind') -> dict:
    """Count the figures of judged rows that lie in the range of their prediction, by sort.

    Figures without a range are not counted: the first predictions were kept without them.
    """
    said = {}
    for what in FIGURES:
        inside = [low <= ratio <= high for row in counting(rows, name, which) if row['judged']
                  for ratio, (low, high) in ratios(row, name, what)]
        said[what] = {'figures': len(inside), 'inside': sum(inside)}
        if inside: said[what]['share'] = round(sum(inside) / len(inside), 3)
    return said


def ratios(row: dict, name: str, what: str) -> list[tuple]:
    "Give measured over predicted of a row's figures of a sort, each with the ends of its range."
    ends = row[name].get('ranges', {}).get(what)  # None also where nothing was planned
    if not ends or what not in row['measured']: return []
    figures, guesses = row['measured'][what], row[name][what]
    if what == 'time': figures, guesses = {'time': figures}, {'time': guesses}
    return [(value / guesses[kind], ends) for kind, value in figures.items()]


def report(which: str) -> dict:
    "Report a round: counts, errors of both predictions, ranges held, and every row."
    rows = scored(which)
    return {'fitted_since': fitted_since(which), 'judged': sum(row['judged'] for row in rows),
            'summary': {name: summary(rows, name, which) for name in SCORES},
            'held': {name: held(rows, name, which) for name in SCORES}, 'rows': list(rows)}


def measure() -> dict:
    """Score every row; the value is the median error of memory, predicted blind, in percent.

    The value is that of the first round; `second` is the report of the second, once it has figures.
    """
    rows = scored()
    sizes = [abs(value) for value in errors(rows, 'blind', 'memory')]
    seconds = [abs(value) for value in errors(rows, 'blind', 'time')]
    first = report('blind')
    more = {'second': report('blind2')} if scored('blind2') else {}
    return record('blind_error', sizes, '% of the measured memory',
                  time_median=round(statistics.median(seconds), 2), time_worst=max(seconds),
                  sources=len(first['summary']['blind']['sources']), **first, **more)


def main(words: list[str]) -> None:
    "Keep the predictions of new rows, or enter the figures of a round from a file."
    if words:
        which, path = words
        enter(which, yaml.safe_load(Path(path).read_text(encoding='utf-8')))
        print(f'{which}: figures entered')
        return
    for which in ROUNDS:
        if all(row['id'] in blind(which) for row in table(which)['rows']): continue
        if changed := uncommitted(which): sys.exit(f'commit these first:\n{changed}')
        print(f'{which}: {len(keep(which))} rows predicted')


if __name__ == '__main__': main(sys.argv[1:])
