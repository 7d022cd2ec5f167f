"""Which families of models train sharded as in one process, are rehearsed, merged and exported.

Every family is a miniature of its published configuration with random weights. It is trained for
three steps by each method, on two ranks and in one process.
"""
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

from bench.record import ROOT, record
from bench.shared.families import FAMILIES, METHODS, Case, accepted, make_base, recipe, write_rows
from bench.shared.family_runs import (
    EQUAL, IDS, REFUSED, import_libraries, plain, said, sharded)

LOSS, NORM, SHARE = 1e-4, 1e-3, .6  # Tolerances: nats; relative; of the bytes on one rank
CHECKS = 'checked', 'trains', 'parity', 'cache', 'rehearses', 'merges', 'exports'


# Before a rank starts

def made(families: Iterable[str], folder: Path) -> tuple[dict, dict]:
    "Make the miniatures: model types by family, and what went wrong with others."
    kinds, failed = {}, {}
    for family in families:
        try: kinds[family] = make_base(family, Case(family, '', folder).base)
        except ValueError as error: failed[family] = said(error)
    return kinds, failed


def checked(case: Case) -> tuple[dict, dict | None]:
    "The row of a case so far, and the changes with which it is accepted; None where it is not."
    asked, changes, reasons = accepted(recipe(case))
    row = {'family': case.family, 'method': case.method, 'checked': True}
    if changes: row |= {'changes': changes, 'refused_without': reasons[0]}
    if asked: return row, changes
    return row | {'checked': reasons[-1], 'refused': reasons[-1]}, None


# All cases

def through(function, work: list, file: Path, ranks: int = 2) -> dict[tuple, list[dict]]:
    "Take cases through ranks; a case at which they end is left out, and the others go on."
    from llm_workbook.parallel.backends import fsdp_env
    from llm_workbook.parallel.ranks import run_ranks
    ended = {}
    while left := [pair for pair in work if key(pair[0]) not in written(file) | ended.keys()]:
        env = fsdp_env(recipe(left[0][0]))
        try: run_ranks(function, ranks, (left, file), 60 + 20 * len(left), env)
        except Exception as error:
            now = [pair for pair in left if key(pair[0]) not in written(file)]
            if now: ended[key(now[0][0])] = [{'error': said(error)}]
    return written(file) | ended


def key(case: Case) -> tuple[str, str]: return case.family, case.method


def written(file: Path) -> dict[tuple, list[dict]]:
    "What the ranks have written of each case that all of them have done."
    rows = {}
    for part in sorted(file.parent.glob(f'{file.name}.*.jsonl')):
        for line in part.read_text(encoding='utf-8').splitlines():
            row = json.loads(line)
            rows.setdefault((row['family'], row['method']), []).append(row)
    return rows


def reloaded(cases: list[Case], folder: Path) -> dict[tuple, str | float]:
    "Load each export with transformers alone: how far its logits are from those of the merge."
    import torch
    places = {case: case.place('two')/'model' if case.method == 'full' else case.place('export')
              for case in cases}
    results = {case: case.place('one')/'reloaded.pt' for case in cases}
    task = folder/'reload.json'
    directories = {str(places[case]): str(results[case]) for case in cases}
    task.write_text(json.dumps({'ids': IDS, 'directories': directories}))
    done = subprocess.run([sys.executable, '-m', 'bench.programs.plain_transformers', str(task)],
                          cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    said, differences = json.loads(done.stdout.splitlines()[-1]), {}
    for case in cases:
        wrong = said[str(places[case])]
        if wrong: differences[key(case)] = f'plain transformers: {wrong}'
        else:
            logits, merged = torch.load(results[case]), torch.load(case.place('one')/'merged.pt')
            differences[key(case)] = (logits - merged).abs().max().item()
    return differences


# The record

def judged(row: dict, ranks: list[dict], process: dict, difference) -> dict:
    "Join what the ranks, the one process and plain transformers gave for a case."
    wrong = next((rank['error'] for rank in ranks if 'error' in rank), None)
    share = max((rank.get('share', 1) for rank in ranks), default=1)
    row['trains'] = wrong or (share < SHARE or f'a rank holds {share:.0%} of the bytes')
    row['share'] = share
    alone = process.get('alone', 'it did not run in one process')
    if wrong or isinstance(alone, str): row['parity'] = wrong or alone
    else: row |= parity(ranks[0], alone)
    for name in 'cache', 'merges':
        row[name] = within(process.get(name))
        row[f'{name}_difference'] = number(process.get(name))
    row['rehearses'] = process['rehearses'] if isinstance(process.get('rehearses'), str) else True
    row['exports'] = process.get('exports', 'it did not run')
    if row['exports'] is True: row['exports'] = within(difference)
    row['exports_difference'] = number(difference)
    return row


def within(value) -> bool | str | None:
    "True, or the reason why not; None where there is nothing to judge."
    if value is None or isinstance(value, str): return value
    return value <= EQUAL or f'logits differ by {value:.2g}, more than {EQUAL:g}'


def number(value) -> float | None: return None if isinstance(value, str) else value


def parity(two: dict, one: dict) -> dict:
    "Compare the steps of two ranks with those of one process."
    pairs = list(zip(two['losses'], one['losses'], strict=True))
    loss = max(abs(ours - theirs) for ours, theirs in pairs)
    norm = max(abs(ours / theirs - 1) for ours, theirs in zip(two['norms'], one['norms']))
    close = loss <= LOSS and norm <= NORM
    return {'parity': close or f'losses differ by {loss:.2g}, gradients by {norm:.2g}',
            'loss_difference': loss, 'norm_difference': norm, 'losses': two['losses']}


def rows_of(families: Iterable[str], folder: Path) -> list[dict]:
    "Make, check and train every family by every method; one row for each."
    write_rows(folder/'rows')
    kinds, failed = made(families, folder)
    rows = [{'family': family, 'method': method, 'checked': reason}
            for family, reason in failed.items() for method in METHODS]
    work, known = [], {}
    for case in (Case(family, method, folder) for family in kinds for method in METHODS):
        row, changes = checked(case)
        known[case] = row | {'kind': kinds[case.family]}
        if changes is not None: work.append((case, changes))
    two = through(sharded, work, folder/'two')
    one = through(plain, work, folder/'one')
    exported = [case for case, _ in work if one[key(case)][0].get('exports') is True]
    differences = reloaded(exported, folder)
    for case, _ in work:
        given = two[key(case)], one[key(case)][0], differences.get(key(case))
        known[case] = judged(known[case], *given)
    return rows + list(known.values())


def summary(rows: list[dict]) -> dict:
    "Count the architectures that train as in one process; name what is refused and what failed."
    ticks = [row for row in rows if row.get('trains') is True and row.get('parity') is True]
    refused, failed = {}, {}
    for row in rows:
        name = f'{row["family"]}, {row["method"]}'
        if 'refused' in row: refused[name] = row['refused']
        else:
            for check in CHECKS:
                reason = row.get(check)
                if not isinstance(reason, str): continue
                where = refused if reason.startswith(REFUSED) else failed
                where[f'{name}, {check}'] = reason.removeprefix(REFUSED)
    return {'architectures': len({row['kind'] for row in ticks}),
            'families': len({row['family'] for row in ticks}),
            'refused': refused, 'failed': failed}


def measure(families: Iterable[str] = FAMILIES) -> dict:
    "Take all families through; the value counts architectures of transformers."
    import_libraries()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter('ignore')
        rows = rows_of(families, Path(folder))
    found = summary(rows)
    tolerances = {'loss': LOSS, 'norm': NORM, 'share': SHARE, 'logits': EQUAL}
    return record('families', [found.pop('architectures')], 'architectures', goal=24,
                  failed_goal=0, tolerances=tolerances, **found, rows=rows)
