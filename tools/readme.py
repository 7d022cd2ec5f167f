"""Write README.md from nbs/index.ipynb, without Quarto; `readme.text()` is what the house test compares."""
import json
import re

from page import ROOT

NOTE = '<!-- Written by `make readme` from nbs/index.ipynb: edit that. -->'


def shown(cell: dict) -> list[str]:
    "Return the blocks a reader sees of one cell: its text, or its code and what it printed."
    source = ''.join(cell['source']).strip()
    if cell['cell_type'] == 'markdown':  # The pages lie one folder below the README
        return [re.sub(r'\]\(([\w/]+\.ipynb)', r'](nbs/\1', source)]
    lines = source.splitlines()
    directives = [line.removeprefix('#|').strip() for line in lines if line.startswith('#|')]
    if 'hide' in directives: return []
    blocks = ['```python\n' + '\n'.join(line for line in lines if not line.startswith('#|')).strip() + '\n```']
    for output in cell['outputs']:
        text = output.get('text') or output.get('data', {}).get('text/markdown') or output.get('data', {}).get('text/plain')
        if text: blocks.append('```text\n' + ''.join(text).rstrip() + '\n```')
    return blocks


def text() -> str:
    "Return the README as the index page has it."
    cells = json.loads((ROOT/'nbs/index.ipynb').read_text(encoding='utf-8'))['cells']
    return '\n\n'.join([NOTE, *(block for cell in cells for block in shown(cell))]) + '\n'


if __name__ == '__main__':
    (ROOT/'README.md').write_text(text(), encoding='utf-8')
