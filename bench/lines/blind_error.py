"""How far plans are from runs that were predicted before their figures were entered.

Each row of bench/blind.yaml is scored twice: the prediction that was committed before its figures,
and the one that the library makes now. A source that bench/published.yaml has taken since is no
longer blind: constants may be fitted on it, so only its committed predictions count.
`python -m bench.lines.blind_error` keeps the predictions of new rows.
"""
import datetime
import json
import statistics
import subprocess
from functools import cache

from bench.record import ROOT, record
from bench.shared.published import error, ledger_gib, middle, node_of, recipe_of, spec_of, table

KEPT = ROOT/'bench'/'blind_predictions.json'
SCORES = 'blind', 'today'
SMALL = 1000  # Tokens of a pass on one GPU: below it, launching kernels is most of the time


def predict(row: dict) -> dict:
    "Predict what is asked of a row: GiB by kind, seconds for a million tokens, what overflows."
    from llm_workbook import estimate_step, memory
    recipe = recipe_of(row['id'], 'blind')
    node, spec = node_of(recipe, 'blind'), spec_of(recipe, 'blind')
    ledger = memory(recipe, spec, node)
    said = {'memory': {kind: round(ledger_gib(ledger, kind, node), 3)
                       for kind in row['asked'] if kind != 'time'}}
    if 'time' in row['asked']:
        said['time'] = round(1e6 / estimate_step(recipe, spec, node).tokens_per_s, 4)
    short = [f'{place}, {phase}' for place, phase, need_b, have_b in ledger.rooms(node)
             if need_b > have_b]
    return said | {'short': short}


def kept() -> list[dict]:
    "Read the predictions that were kept, a batch for each commit of the library."
    return json.loads(KEPT.read_text(encoding='utf-8')) if KEPT.exists() else []


def blind() -> dict[str, dict]:
    "Give the kept prediction of every row."
    return {row_id: said for batch in kept() for row_id, said in batch['rows'].items()}


def keep() -> None:
    "Predict rows that have no prediction yet, and refuse those whose figures are there already."
    new = [row for row in table('blind')['rows'] if row['id'] not in blind()]
    late = [row['id'] for row in new if 'memory' in row or 'time' in row]
    if late: raise ValueError(f'figures were entered before a prediction: {", ".join(late)}')
    if not new: return
    commit = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.strip()
    made = {'library': commit, 'date': datetime.date.today().isoformat(),
            'rows': {row['id']: predict(row) for row in new}}
    lines = json.dumps([*kept(), made], indent=1)
    KEPT.write_text(lines + '\n', encoding='utf-8')


def measured(row: dict) -> dict:
    "Give the figures of a row in the units of `predict`."
    recipe = recipe_of(row['id'], 'blind')
    found = {'memory': {figure['kind']: figure['gib'] for figure in row.get('memory', ())}}
    if 'time' not in row: return found
    given = row['time']
    samples_per_s = given['samples'] / given['s'] if 's' in given else None
    tokens_per_s = given.get('tokens_per_s') or samples_per_s * recipe.batch.length
    return found | {'time': round(1e6 / tokens_per_s, 4)}


def score(row: dict) -> dict:
    "Compare the figures of a row with both predictions."
    recipe, figures = recipe_of(row['id'], 'blind'), measured(row)
    said = {name: row.get(name, default)
            for name, default in (('id', ''), ('source', ''), ('judged', True))}
    said |= {'tokens': recipe.batch.micro * recipe.batch.length, 'measured': figures}
    for name, guess in zip(SCORES, (blind()[row['id']], predict(row)), strict=True):
        errors = {'memory': {kind: error(gib, guess['memory'][kind])
                             for kind, gib in figures['memory'].items()}}
        if 'time' in figures: errors['time'] = error(figures['time'], guess['time'])
        said[name] = guess | {'error': errors}
    return said


def fitted_since() -> list[str]:
    "Name the sources that bench/published.yaml has by now."
    taken = {source['url'] for source in table()['sources'].values()}
    return [name for name, source in table('blind')['sources'].items() if source['url'] in taken]


@cache
def scored() -> tuple[dict, ...]:
    "Score every row."
    return tuple(score(row) for row in table('blind')['rows'])


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


def summary(rows, name: str) -> dict:
    "Summarise a prediction: errors by sort of figure and by source, and false refusals."
    if name == 'today': rows = [row for row in rows if row['source'] not in fitted_since()]
    passes = {'time': lambda row: row['tokens'] >= SMALL,
              'time of small passes': lambda row: row['tokens'] < SMALL}
    said = {what: middles(errors(rows, name, what))
            for what in ('memory', 'allocated', 'reserved', 'device')}
    said |= {what: middles(errors([row for row in rows if belongs(row)], name, 'time'))
             for what, belongs in passes.items()}
    sources = {}
    for source in dict.fromkeys(row['source'] for row in rows if row['judged']):
        own = [row for row in rows if row['source'] == source]
        sources[source] = {what: middles(errors(own, name, what)) for what in ('memory', 'time')}
    return said | {'sources': sources, 'refused': refused(rows, name),
                   'each source once': {what: each_once(sources, what)
                                        for what in ('memory', 'time')}}


def each_once(sources: dict, what: str) -> dict:
    "Give the median over sources of their medians: no source counts more for having more rows."
    return middle([said[what]['median'] for said in sources.values() if said[what]['figures']])


def measure() -> dict:
    "Score every row; the value is the median error of memory, predicted blind, in percent."
    rows = scored()
    sizes = [abs(value) for value in errors(rows, 'blind', 'memory')]
    seconds = [abs(value) for value in errors(rows, 'blind', 'time')]
    said = {name: summary(rows, name) for name in SCORES}
    return record('blind_error', sizes, '% of the measured memory',
                  time_median=round(statistics.median(seconds), 2), time_worst=max(seconds),
                  sources=len(said['blind']['sources']), fitted_since=fitted_since(),
                  judged=sum(row['judged'] for row in rows), summary=said, rows=list(rows))


if __name__ == '__main__': keep()
