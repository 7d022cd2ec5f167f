"""Build the site in _docs: with Quarto where it is installed, else the same pages with Sphinx, offline; then check it."""
import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from configparser import ConfigParser
from pathlib import Path

import yaml
from page import ROOT
from site_check import faults

ROOMS = 'config model plan parallel checkpoint training rehearsal launching release package'.split()
CONF = """
project, html_title = 'llm-workbook', 'llm-workbook'
copyright = '2026, The llm-workbook authors'
extensions = ['myst_nb', 'sphinx-mathjax-offline']
nb_execution_mode = 'off'
myst_enable_extensions = ['attrs_inline', 'dollarmath', 'amsmath', 'colon_fence',
                          'html_admonition', 'html_image']
myst_heading_anchors = 4
exclude_patterns = ['_build', '**.qmd']
suppress_warnings = ['myst.header', 'myst.xref_missing', 'mystnb.unknown_mime_type', 'misc.highlighting_failure', 'docutils']
html_theme = 'furo'
html_static_path = ['_theme']
html_css_files = ['custom.css']
html_show_sphinx = False
root_doc = 'index'
"""
CSS = """
/* Tables: room between columns, stripes, and their own scrolling where they are wide */
.cell_output, .table-wrapper { overflow-x: auto; }
.cell_output table, table.docutils { border-collapse: collapse; margin: .5em 0; }
.cell_output th, .cell_output td, table.docutils th, table.docutils td {
  padding: .3em .8em; border-bottom: 1px solid var(--color-background-border); vertical-align: top; }
.cell_output tr:nth-child(even), table.docutils tbody tr:nth-child(even) {
  background: var(--color-background-secondary); }
.cell_output caption { text-align: left; font-weight: bold; padding: .3em 0; }
/* Sentences are wrapped, not cut */
.cell_output pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.cell_output img { background: transparent; }
"""


def settings() -> dict:
    "Read settings.ini."
    parser = ConfigParser(delimiters=['='])
    parser.read(ROOT/'settings.ini', encoding='utf-8')
    return dict(parser['DEFAULT'])


def home() -> str:
    "Return the address under which nbdev expects the site, and to which it links names of code."
    return settings()['doc_host'] + settings()['doc_baseurl'] + '/'


def local_links(text: str, page: Path, source: Path, ending: str = '.ipynb') -> str:
    "Point links of code names, which nbdev addresses to the published site, at the page beside this one."
    def local(match):
        name, (folder, _, stem), anchor = match[1], match[2].rpartition('/'), match[3]
        found = [*(source/folder).glob(f'{stem}.ipynb'), *(source/folder).glob(f'[0-9][0-9]_{stem}.ipynb')]
        if not found or anchor.startswith('_') or '._' in anchor: return name  # What is private has no entry
        target = os.path.relpath(found[0].with_suffix(ending), page.parent)
        return f'[{name}]({target}#{anchor.partition(".")[0]})'
    return re.sub(r'\[(`[^`]+`)\]\(' + re.escape(home()) + r'([\w/]+)\.html#([\w.-]+)\)', local, text)


def described(text: str) -> str:
    "Correct the description of a function as nbdev writes it: an anchor, no raw attributes, no links inside code."
    text = re.sub(r'\{target="_blank"[^}]*\}', '', text)
    text = re.sub(r'(?s)```python.*?```', lambda code: without_name_links(code[0]), text)
    def anchored(heading): return f'<a id="{heading[2].lower()}"></a>\n\n{heading[0]}'
    return re.sub(r'(?m)^(#+) ([\w.]+)$', anchored, text)


NAME_LINK = r'\[(`[^`]+`)\]\([^)]*\)'  # As nbdev writes it for a name of code


def without_name_links(text: str) -> str:
    "Leave of every link on a name of code the name."
    return re.sub(NAME_LINK, r'\1', text)


def single_links(text: str) -> str:
    "Undo the links that nbdev has put on names inside the words of another link."
    return re.sub(rf'\[((?:[^][]|{NAME_LINK.replace("(", "(?:", 1)})*)\]\(([^)]+)\)',
                  lambda link: f'[{without_name_links(link[1])}]({link[2]})', text)


def plain_source(cell: dict) -> str:
    "Put into words what only Quarto reads: front matter becomes a heading, `echo: false` a tag."
    text = ''.join(cell['source'])
    if cell['cell_type'] == 'raw' and text.startswith('---'):
        matter = yaml.safe_load(text.strip().strip('-'))
        cell['cell_type'] = 'markdown'
        return f"# {matter['title']}\n\n> {matter.get('description', '')}\n"
    if cell['cell_type'] == 'code':
        if re.search(r'^#\| echo: false', text, re.M): cell['metadata']['tags'] = ['remove-input']
        text = re.sub(r'^#\|.*\n?', '', text, flags=re.M)
    return text


def plain(page: Path, source: Path) -> None:
    "Make a processed page one that Sphinx shows whole: no directives, no widgets without a kernel, local links."
    nb = json.loads(page.read_text(encoding='utf-8'))
    for cell in nb['cells']:
        text = plain_source(cell)
        is_text = cell['cell_type'] == 'markdown'
        cell['source'] = local_links(single_links(text), page, source) if is_text else text
        cell.pop('has_sd', None)
        for output in cell.get('outputs', []):
            data = output.get('data', {})
            data.pop('application/vnd.jupyter.widget-view+json', None)
            if 'text/markdown' in data:
                text = described(''.join(data['text/markdown']))
                data['text/markdown'] = local_links(text, page, source, '.html')
    page.write_text(json.dumps(nb), encoding='utf-8')


def title_and_promise(page: Path) -> tuple[str, str]:
    "Read the heading of a page and the line below it."
    for cell in json.loads(page.read_text(encoding='utf-8'))['cells']:
        found = re.match(r'# (.+)\n+(?:> (.+))?', ''.join(cell['source'])) if cell['cell_type'] == 'markdown' else None
        if found: return found[1], found[2] or ''
    raise ValueError(f'{page} has no title')


def toctree(entries: list[str], caption: str = '', depth: int = 1) -> str:
    "Write one part of the table of contents."
    head = f':caption: {caption}\n' if caption else ''
    return f'```{{toctree}}\n:hidden:\n:maxdepth: {depth}\n{head}\n' + '\n'.join(entries) + '\n```\n'


def listing(folder: Path) -> None:
    "Write the page of a folder: what it is for, and each of its pages with its promise."
    matter = yaml.safe_load((folder/'index.qmd').read_text().split('---')[1])
    pages = sorted(folder.glob('*.ipynb'))
    lines = []
    for page in pages:
        title, promise = title_and_promise(page)
        lines.append(f'| [{title}]({page.name}) | {promise} |')
    table = '| page | what it shows |\n|---|---|\n' + '\n'.join(lines)
    text = f'# {matter["title"]}\n\n{matter["description"]}\n\n{table}\n\n' + toctree([page.stem for page in pages])
    (folder/'index.md').write_text(text, encoding='utf-8')


def contents(source: Path) -> list[str]:
    "Give the sidebar: book and recipes page by page, the rooms by their doors, notes."
    def pages(folder): return [f'{folder}/{page.stem}' for page in sorted((source/folder).glob('*.ipynb'))]
    rooms = [f'{room}/index' for room in ROOMS]
    return [toctree(pages('book'), 'Book'), toctree(['recipes/index'], 'Recipes', 2),
            toctree(rooms, 'Rooms of the library', 2), toctree(['notes/index'], 'Notes', 2)]


def sphinx(source: Path, target: Path) -> None:
    "Build `source` with Sphinx and myst-nb; no step of it uses a network."
    (source/'conf.py').write_text(CONF)
    (source/'_theme').mkdir()
    (source/'_theme/custom.css').write_text(CSS)
    for page in source.rglob('*.ipynb'): plain(page, source)
    for folder in [*ROOMS, 'recipes', 'notes']: listing(source/folder)
    index = json.loads((source/'index.ipynb').read_text(encoding='utf-8'))
    index['cells'].append({'cell_type': 'markdown', 'id': 'contents', 'metadata': {},
                           'source': '\n'.join(contents(source))})
    (source/'index.ipynb').write_text(json.dumps(index), encoding='utf-8')
    subprocess.run([sys.executable, '-m', 'sphinx', '-q', '-b', 'html', source, target], check=True)


def needed(cell) -> bool:
    "Say whether the description of a function needs this cell run: exports, cells of imports alone, and `show_doc`."
    trees = cell.parsed_() if cell.cell_type == 'code' else []
    if cell.directives_.keys() & {'export', 'exports', 'exporti'}: return True
    imports = bool(trees) and all(isinstance(tree, (ast.Import, ast.ImportFrom)) for tree in trees)
    return imports or 'show_doc(' in cell.source


def processed() -> Path:
    "Process the pages with nbdev; its own command would download Quarto, so it is not used."
    from fastcore import docments
    from nbdev import processors
    from nbdev.serve import proc_nbs
    processors._do_eval = needed  # nbdev would run every cell with an import in it, and so half of some pages
    docments.signature = lambda function, eval_str=False: inspect.signature(function)  # 'torch.Tensor' stays a text
    return Path(proc_nbs(n_workers=0, force=True))


def main() -> None:
    "Build the site, and end with an error if it does not say what the pages say."
    source, target = processed(), ROOT/'_docs'
    shutil.rmtree(target, ignore_errors=True)
    if shutil.which('quarto'):
        subprocess.run(['quarto', 'render', source, '--no-cache', '--output-dir', target], check=True)
        print(f'Open {target.relative_to(ROOT)}/index.html; what Quarto makes is not checked here')
        return
    with tempfile.TemporaryDirectory() as name:
        sphinx(Path(shutil.copytree(source, f'{name}/pages')), Path(name)/'site')
        shutil.move(f'{name}/site', target)
    found = faults(target, ROOT/'nbs', home())
    if found: sys.exit('\n'.join([*found, f'{len(found)} places where the site does not say what the pages say']))
    print(f'Open {target.relative_to(ROOT)}/index.html')


if __name__ == '__main__':
    main()
