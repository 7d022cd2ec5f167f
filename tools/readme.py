"""Write README.md from nbs/index.ipynb, without Quarto.

The house test compares README.md with `readme.text()`.
"""
import json
import re

from page import ROOT

NOTE = '<!-- Written by `make readme` from nbs/index.ipynb: edit that. -->'


def shown(cell: dict) -> list[str]:
    "List the blocks that a reader sees of one cell: its text, or its code and its outputs."
    source = ''.join(cell['source']).strip()
    if cell['cell_type'] == 'markdown':  # The pages are one folder below the README
        return [re.sub(r'\]\(([\w/]+\.ipynb)', r'](nbs/\1', source)]
    lines = source.splitlines()
    directives = [line.removeprefix('#|').strip() for line in lines if line.startswith('#|')]
    if 'hide' in directives: return []
    code = '\n'.join(line for line in lines if not line.startswith('#|'))
    outputs = [output_text(output) for output in cell['outputs']]
    blocks = [fenced('python', code.strip())]
    blocks += [fenced('text', output.rstrip()) for output in outputs if output]
    return blocks


def output_text(output: dict) -> str:
    "Give what an output printed, or its value as Markdown or plain text; '' for a picture."
    data = output.get('data', {})
    return ''.join(output.get('text') or data.get('text/markdown') or data.get('text/plain') or '')


def fenced(language: str, content: str) -> str:
    "Write a block of code."
    return f'```{language}\n{content}\n```'


def text() -> str:
    "Write the text of the README from the index page."
    cells = json.loads((ROOT/'nbs/index.ipynb').read_text(encoding='utf-8'))['cells']
    blocks = [NOTE]
    for cell in cells: blocks += shown(cell)
    return '\n\n'.join(blocks) + '\n'


if __name__ == '__main__':
    (ROOT/'README.md').write_text(text(), encoding='utf-8')
