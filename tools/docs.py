"""Build the site in _docs, and check it.

Quarto builds it where Quarto is installed. Else Sphinx builds the same pages without a network.
"""
import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from page import ROOT, WIDGET, settings
from site_check import faults

ROOMS = (
    'config model plan parallel checkpoint training rehearsal launching release watching '
    'exercises package'
).split()
CONF = """
project, html_title = 'llm-workbook', 'llm-workbook'
copyright = '2026, The llm-workbook authors'
extensions = ['myst_nb', 'sphinx-mathjax-offline']
nb_execution_mode = 'off'
myst_enable_extensions = ['attrs_inline', 'dollarmath', 'amsmath', 'colon_fence',
                          'html_admonition', 'html_image']
myst_heading_anchors = 4
exclude_patterns = ['_build', '**.qmd']
suppress_warnings = ['myst.header', 'myst.xref_missing', 'mystnb.unknown_mime_type',
                     'misc.highlighting_failure', 'docutils']
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
  padding: .3em .8em; border-bottom: 1px solid var(--color-background-border);
  vertical-align: top; }
.cell_output tr:nth-child(even), table.docutils tbody tr:nth-child(even) {
  background: var(--color-background-secondary); }
.cell_output caption { text-align: left; font-weight: bold; padding: .3em 0; }
/* Sentences are wrapped, not cut */
.cell_output pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.cell_output img { background: transparent; }
"""
# A link on a name of code, as nbdev writes it; the same without its group, inside another pattern
NAME_LINK = r'\[(`[^`]+`)\]\([^)]*\)'
NAME_LINK_INSIDE = r'\[(?:`[^`]+`)\]\([^)]*\)'
# A link whose words may contain links on names of code
OUTER_LINK = rf'\[((?:[^][]|{NAME_LINK_INSIDE})*)\]\(([^)]+)\)'


# Links

def home() -> str:
    "Return the address of the published site, to which nbdev links names of code."
    site = settings()
    return site['doc_host'] + site['doc_baseurl'] + '/'


def local_links(text: str, page: Path, source: Path, ending: str = '.ipynb') -> str:
    "Point links from names of code to the published site at the files in `source` instead."
    def local(match):
        name, address, anchor = match.groups()
        target = documented_page(source, address)
        is_private = anchor.startswith('_') or '._' in anchor  # Private names have no entry
        if target is None or is_private: return name
        path = os.path.relpath(target.with_suffix(ending), page.parent)
        entry = anchor.partition('.')[0]
        return f'[{name}]({path}#{entry})'
    published = re.escape(home()) + r'([\w/]+)\.html#([\w.-]+)'
    return re.sub(rf'\[(`[^`]+`)\]\({published}\)', local, text)


def documented_page(source: Path, address: str) -> Path | None:
    "Find the page of an address such as `plan/ledger`: its file may begin with a number."
    folder, _, stem = address.rpartition('/')
    pages = [*(source/folder).glob(f'{stem}.ipynb'),
             *(source/folder).glob(f'[0-9][0-9]_{stem}.ipynb')]
    return pages[0] if pages else None


def without_name_links(text: str) -> str:
    "Replace every link on a name of code by the name."
    return re.sub(NAME_LINK, r'\1', text)


def single_links(text: str) -> str:
    "Remove the links that nbdev has put on names inside the words of another link."
    def plain_words(link): return f'[{without_name_links(link[1])}]({link[2]})'
    return re.sub(OUTER_LINK, plain_words, text)


# Pages as Sphinx can show them

def described(text: str) -> str:
    "Repair the description of a function: add an anchor; remove attributes, and links in code."
    def anchored(heading): return f'<a id="{heading[2].lower()}"></a>\n\n{heading[0]}'
    def unlinked(code): return without_name_links(code[0])
    text = re.sub(r'\{target="_blank"[^}]*\}', '', text)
    text = re.sub(r'(?s)```python.*?```', unlinked, text)
    return re.sub(r'(?m)^(#+) ([\w.]+)$', anchored, text)


def plain_source(cell: dict) -> str:
    "Replace what only Quarto reads: front matter by a heading, `echo: false` by a tag."
    text = ''.join(cell['source'])
    if cell['cell_type'] == 'raw' and text.startswith('---'):
        matter = yaml.safe_load(text.strip().strip('-'))
        cell['cell_type'] = 'markdown'
        return f"# {matter['title']}\n\n> {matter.get('description', '')}\n"
    if cell['cell_type'] == 'code':
        if re.search(r'^#\| echo: false', text, re.M): cell['metadata']['tags'] = ['remove-input']
        text = re.sub(r'^#\|.*\n?', '', text, flags=re.M)
    return text


def html_links(text: str) -> str:
    "Let links that are written in HTML, as in a folded hint, lead to pages of the site."
    return re.sub(r'(<a href="(?!\w+:)[^"#]+)\.ipynb', r'\1.html', text)


def plain_words(text: str) -> str:
    "Give the words of a text without links and marks, on one line."
    linked = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', text)
    return ' '.join(re.sub(r'[*`]', '', linked).split())


def describe_images(cells: list[dict]) -> None:
    "Give each image its caption, or the heading above it, as the text for who does not see it."
    heading = ''
    for cell, following in zip(cells, [*cells[1:], {'source': ''}]):
        if cell['cell_type'] == 'markdown':
            heading = (re.findall(r'(?m)^#+ (.+)$', ''.join(cell['source'])) or [heading])[-1]
        if not any('image/png' in output.get('data', {}) for output in cell.get('outputs', [])):
            continue
        caption = re.match(r'(?s)\*(?!\*).+?\*(?=\s|$)', ''.join(following['source']))
        words = plain_words(caption[0] if caption else heading)
        cell['metadata']['mystnb'] = {'image': {'alt': f'Figure: {words}'}}


def make_plain(page: Path, source: Path) -> None:
    "Rewrite a page for Sphinx: no directives or widgets, local links, words for every image."
    notebook = json.loads(page.read_text(encoding='utf-8'))
    describe_images(notebook['cells'])
    for cell in notebook['cells']:
        text = plain_source(cell)
        if cell['cell_type'] == 'markdown':
            text = html_links(local_links(single_links(text), page, source))
        cell['source'] = text
        cell.pop('has_sd', None)
        for output in cell.get('outputs', []): make_output_plain(output, page, source)
    page.write_text(json.dumps(notebook), encoding='utf-8')


def make_output_plain(output: dict, page: Path, source: Path) -> None:
    "Remove a widget from an output, and give the description of a function local links."
    data = output.get('data', {})
    data.pop(WIDGET, None)
    if 'text/markdown' in data:
        text = described(''.join(data['text/markdown']))
        data['text/markdown'] = local_links(text, page, source, '.html')


# Tables of contents

def title_and_promise(page: Path) -> tuple[str, str]:
    "Read the heading of a page and the line below it."
    cells = json.loads(page.read_text(encoding='utf-8'))['cells']
    texts = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown']
    for text in texts:
        heading = re.match(r'# (.+)\n+(?:> (.+))?', text)
        if heading: return heading[1], heading[2] or ''
    raise ValueError(f'{page} has no title')


def toctree(entries: list[str], caption: str = '', depth: int = 1) -> str:
    "Write one part of the table of contents."
    options = [':hidden:', f':maxdepth: {depth}']
    if caption: options.append(f':caption: {caption}')
    return '\n'.join(['```{toctree}', *options, '', *entries, '```', ''])


def write_listing(folder: Path) -> None:
    "Write the page of a folder: its purpose, and a table of its pages with their promises."
    matter = yaml.safe_load((folder/'index.qmd').read_text().split('---')[1])
    pages = sorted(folder.glob('*.ipynb'))
    rows = ['| page | what it shows |', '|---|---|']
    for page in pages:
        title, promise = title_and_promise(page)
        rows.append(f'| [{title}]({page.name}) | {promise} |')
    parts = [f'# {matter["title"]}', matter['description'], '\n'.join(rows),
             toctree([page.stem for page in pages])]
    (folder/'index.md').write_text('\n\n'.join(parts), encoding='utf-8')


def contents(source: Path) -> list[str]:
    "Give the parts of the sidebar: pages of desk and book, one entry for each other folder."
    desk = [f'desk/{page.stem}' for page in sorted((source/'desk').glob('*.ipynb'))]
    chapters = [f'book/{page.stem}' for page in sorted((source/'book').glob('*.ipynb'))]
    workbook = ['workbook/index', 'answers/index']
    rooms = [f'{room}/index' for room in ROOMS]
    return [toctree(desk, 'The desk: plan, run, talk'),
            toctree(chapters, 'Understand it: the book'),
            toctree(workbook, 'Understand it: the workbook', 2),
            toctree(['recipes/index'], 'Run mine: recipes', 2),
            toctree(rooms, 'Rooms of the library', 2), toctree(['notes/index'], 'Notes', 2)]


# The two ways to build

def build_with_sphinx(source: Path, target: Path) -> None:
    "Build `source` with Sphinx and myst-nb; no step of it uses a network."
    (source/'conf.py').write_text(CONF)
    (source/'_theme').mkdir()
    (source/'_theme/custom.css').write_text(CSS)
    for page in source.rglob('*.ipynb'): make_plain(page, source)
    for folder in [*ROOMS, 'workbook', 'answers', 'recipes', 'notes']: write_listing(source/folder)
    add_contents(source)
    command = [sys.executable, '-m', 'sphinx', '-q', '-b', 'html', source, target]
    subprocess.run(command, check=True)


def add_contents(source: Path) -> None:
    "Add the table of contents to the index page."
    path = source/'index.ipynb'
    index = json.loads(path.read_text(encoding='utf-8'))
    index['cells'].append({'cell_type': 'markdown', 'id': 'contents', 'metadata': {},
                           'source': '\n'.join(contents(source))})
    path.write_text(json.dumps(index), encoding='utf-8')


def is_needed(cell) -> bool:
    "Say whether nbdev must run a cell: an export, imports alone, or a call of `show_doc`."
    if cell.directives_.keys() & {'export', 'exports', 'exporti'}: return True
    statements = cell.parsed_() if cell.cell_type == 'code' else []
    others = [node for node in statements if not isinstance(node, (ast.Import, ast.ImportFrom))]
    only_imports = bool(statements) and not others
    return only_imports or 'show_doc(' in cell.source


def make_light(shell: type) -> None:
    """Let shells of a class keep no history, and tidy nothing up when Python ends.

    nbdev makes one for each page. Two hundred threads that save what nobody reads, and as many
    collections of garbage at the end, take minutes.
    """
    from IPython.core.history import HistoryManager
    def init_history(self):
        self.history_manager = HistoryManager(shell=self, parent=self, hist_file=':memory:')
    def atexit_operations(self): pass
    shell.init_history, shell.atexit_operations = init_history, atexit_operations


def processed() -> Path:
    "Process the pages with nbdev, without its command `nbdev_docs`, which downloads Quarto."
    from fastcore import docments
    from nbdev import processors
    from nbdev.serve import proc_nbs
    # Annotations such as 'torch.Tensor' stay texts
    def signature(function, eval_str=False): return inspect.signature(function)
    docments.signature = signature
    # nbdev would run every cell that contains an import: on several pages, half of the cells
    processors._do_eval = is_needed
    make_light(processors.CaptureShell)
    return Path(proc_nbs(n_workers=0, force=True))


def main() -> None:
    "Build the site; exit with an error when it does not show what the pages contain."
    source = processed()
    target = ROOT/'_docs'
    shutil.rmtree(target, ignore_errors=True)
    if shutil.which('quarto'):
        subprocess.run(['quarto', 'render', source, '--no-cache', '--output-dir', target],
                       check=True)
        print(f'Open {target.relative_to(ROOT)}/index.html; what Quarto makes is not checked here')
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(source, folder/'pages')
        build_with_sphinx(folder/'pages', folder/'site')
        shutil.move(folder/'site', target)
    problems = faults(target, ROOT/'nbs', home())
    if problems:
        count = f'{len(problems)} places where the site does not say what the pages say'
        sys.exit('\n'.join([*problems, count]))
    print(f'Open {target.relative_to(ROOT)}/index.html')


if __name__ == '__main__': main()
