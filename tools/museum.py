"""`make museum`: which bugs are alive with the libraries that are installed, as a table.

The record goes to the file that `MUSEUM` names, or nowhere; with it a page of Markdown, for a
server to publish. It ends with 0 whatever is found: a bug that is gone is no failure.
"""
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.lines.museum import measure  # noqa: E402
from bench.shared.museum import load_case  # noqa: E402
from llm_workbook.watching.troubles import trouble  # noqa: E402

STATES = {True: 'alive', False: 'gone', None: 'broke otherwise'}


def state(row: dict) -> str:
    "Whether a bug is alive; a text of others cannot say so."
    if hasattr(load_case(row['id']), 'recorded'): return 'from a text'
    return STATES[row.get('alive')]


def lines(made: dict) -> list[str]:
    "One line for each bug, as cells."
    rows = []
    for row in made['rows']:
        one = trouble(row['id'])
        kind = 'silent' if one.silent else 'loud'
        cured = {True: 'yes', False: 'no'}.get(row.get('mended'), 'not here')
        rows.append((row['id'], kind, state(row), row.get('rule') or '-', cured))
    return rows


def page(made: dict) -> str:
    "The table as Markdown."
    versions = ', '.join(f'{name} {version}' for name, version in made['versions'].items())
    head = ['bug', 'kind', 'state', 'diagnosed as', 'cured by the fix']
    table = [head, ['---'] * len(head), *lines(made)]
    rows = '\n'.join(f'| {" | ".join(cells)} |' for cells in table)
    alive = sum(state(row) == 'alive' for row in made['rows'])
    return ('# Which bugs are alive\n\n'
            f'{made["date"]}: {alive} of {made["bugs"]}, with {versions}.\n'
            f'{made["value"]:.0f} diagnosed; of {made["clean"]} texts without a bug '
            f'{made["wrong"]} taken for one.\n\n{rows}\n')


def main() -> None:
    "Go through the museum, print the table, and write it where `MUSEUM` says."
    made = measure()
    print(page(made))
    if not os.environ.get('MUSEUM'): return
    folder = Path(os.environ['MUSEUM'])
    folder.mkdir(parents=True, exist_ok=True)
    (folder/'museum.json').write_text(json.dumps(made, indent=1) + '\n', encoding='utf-8')
    (folder/'museum.md').write_text(page(made), encoding='utf-8')


if __name__ == '__main__':
    main()
