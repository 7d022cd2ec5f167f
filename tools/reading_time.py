"""How long a page of the book takes to read, and the line at its top that says so.

A minute is 150 words of text, or 15 lines of code that are read one by one; the cells of a page run
in well under a minute. `python tools/reading_time.py` writes the line into every page.
"""
import json
import re
from pathlib import Path

from page import ROOT

WORDS_A_MINUTE = 150
LINES_A_MINUTE = 15
STAMP = re.compile(r'\*Reading time: \d+ minutes\.\*')


def chapters() -> list[Path]:
    "List the pages of the book after the quickstart."
    return sorted((ROOT/'nbs/book').glob('[0-9]*.ipynb'))[1:]


def lines_of_code(source: str) -> int:
    "Count the lines of a cell that hold code."
    lines = [line.strip() for line in source.splitlines()]
    return sum(bool(line) and not line.startswith('#') for line in lines)


def minutes(cells: list[dict]) -> int:
    "Say how many minutes the cells of a page take to read."
    words = lines = 0
    for cell in cells:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown': words += len(source.split())
        else: lines += lines_of_code(source)
    return round(words / WORDS_A_MINUTE + lines / LINES_A_MINUTE)


def main() -> None:
    "Stamp the pages."
    total = 0
    for page in chapters():
        notebook = json.loads(page.read_text('utf-8'))
        count = minutes(notebook['cells'])
        for cell in notebook['cells']:
            stamped = STAMP.sub(f'*Reading time: {count} minutes.*', ''.join(cell['source']))
            cell['source'] = stamped.splitlines(True)
        text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
        page.write_text(text + '\n', 'utf-8')
        total += count
    print(f'{len(chapters())} pages, {total / 60:.1f} hours')


if __name__ == '__main__': main()
