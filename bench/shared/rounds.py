"""Rounds of published runs that are predicted before their figures are entered.

A round is a table of bench/ and, beside it, the predictions of its rows. Three commits make one:
conditions, predictions, figures. `keep` and `enter` refuse another order.
"""
import datetime
import json
import math
import subprocess

import yaml

from bench.record import ROOT
from bench.shared.published import ledger_gib, node_of, recipe_of, spec_of, table

ROUNDS = 'blind', 'blind2'
FIGURES = 'memory', 'time'


def table_file(which: str):
    "Name the file of a round's conditions and figures."
    return ROOT/'bench'/f'{which}.yaml'


def kept_file(which: str):
    "Name the file of a round's predictions."
    return ROOT/'bench'/f'{which}_predictions.json'


def has_figures(row: dict) -> bool:
    "Say whether the figures of a row are there."
    return any(key in row for key in FIGURES)


def ranges_of(recipe) -> dict:
    "Give the ends between which the library expects measured over planned, for memory and time."
    from llm_workbook.plan.ranges import doubt_of
    found = {what: doubt_of(what, recipe) for what in FIGURES}
    return {what: [round(math.exp(end), 4) for end in (doubt.low, doubt.high)]
            for what, doubt in found.items() if doubt}


def predict(row: dict, which: str = 'blind') -> dict:
    """Predict what is asked of a row: GiB by kind, seconds for a million tokens, what overflows.

    A row that the library refuses to plan gets its `refusal` instead: it stays in the round.
    """
    from llm_workbook import RecipeError, estimate_step, memory
    recipe = recipe_of(row['id'], which)
    node, spec = node_of(recipe, which), spec_of(recipe, which)
    try: ledger = memory(recipe, spec, node)
    except RecipeError as error: return {'refusal': str(error)}
    said = {'memory': {kind: round(ledger_gib(ledger, kind, node), 3)
                       for kind in row['asked'] if kind != 'time'}}
    if 'time' in row['asked']:
        said['time'] = round(1e6 / estimate_step(recipe, spec, node).tokens_per_s, 4)
    short = [f'{place}, {phase}' for place, phase, need_b, have_b in ledger.rooms(node)
             if need_b > have_b]
    return said | {'short': short, 'ranges': ranges_of(recipe)}


def kept(which: str = 'blind') -> list[dict]:
    "Read the predictions that were kept, a batch for each commit of the library."
    file = kept_file(which)
    return json.loads(file.read_text(encoding='utf-8')) if file.exists() else []


def blind(which: str = 'blind') -> dict[str, dict]:
    "Give the kept prediction of every row."
    return {row_id: said for batch in kept(which) for row_id, said in batch['rows'].items()}


def keep(which: str = 'blind') -> list[str]:
    """Predict rows that have no prediction yet, and name them.

    Rows whose figures are there already are refused.
    """
    new = [row for row in table(which)['rows'] if row['id'] not in blind(which)]
    late = [row['id'] for row in new if has_figures(row)]
    if late: raise ValueError(f'figures were entered before a prediction: {", ".join(late)}')
    if not new: return []
    made = {'library': git('rev-parse', 'HEAD'), 'date': datetime.date.today().isoformat(),
            'rows': {row['id']: predict(row, which) for row in new}}
    lines = json.dumps([*kept(which), made], indent=1)
    kept_file(which).write_text(lines + '\n', encoding='utf-8')
    return list(made['rows'])


def uncommitted(which: str) -> str:
    "Name what differs from the commit that a prediction would name; '' when nothing does."
    names = [f'bench/{which}.yaml', 'bench/published.yaml', 'bench/shared', 'llm_workbook']
    return git('status', '--porcelain', '--', *names)


def git(*words: str) -> str:
    "Run git here and give what it says."
    return subprocess.run(['git', *words], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout.strip()


def enter(which: str, told: dict[str, dict]) -> None:
    """Write the figures of every row of a round into its table, each row predicted before.

    `told` maps a row to its `memory` and `time`, as the tables have them.
    """
    rows = {row['id']: row for row in table(which)['rows']}
    if told.keys() != rows.keys():
        raise ValueError(f'not the rows of {which}: {", ".join(sorted(told.keys() ^ rows.keys()))}')
    for row_id, row in rows.items():
        given = {figure['kind'] for figure in told[row_id].get('memory', ())}
        given |= {'time'} & told[row_id].keys()
        if has_figures(row): raise ValueError(f'{row_id} has its figures already')
        if row_id not in blind(which): raise ValueError(f'{row_id} has no prediction yet')
        if given != set(row['asked']):
            raise ValueError(f'{row_id}: {sorted(given)} is not what was asked')
    file = table_file(which)
    text = file.read_text(encoding='utf-8')
    file.write_text(with_figures(text, told), encoding='utf-8')


def with_figures(text: str, told: dict[str, dict]) -> str:
    "Add the figures of each row behind the line that says what was asked."
    lines, row_id = [], ''
    for line in text.splitlines():
        lines.append(line)
        if line.startswith('- id: '): row_id = line.removeprefix('- id: ')
        if line.startswith('  asked:'): lines += figure_lines(told[row_id])
    return '\n'.join(lines) + '\n'


def figure_lines(figures: dict) -> list[str]:
    "Write the figures of one row, a line for each sort."
    return [f'  {key}: ' + yaml.safe_dump(figures[key], default_flow_style=True, sort_keys=False,
                                          width=math.inf).strip()
            for key in FIGURES if key in figures]
