"""Build the site in _docs: with Quarto where it is installed, else the same processed pages with Sphinx, offline."""
import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from page import ROOT

SECTIONS = {'book': 'Book', 'recipes': 'Recipes', 'config': 'config', 'model': 'model', 'plan': 'plan', 'parallel': 'parallel',
            'checkpoint': 'checkpoint', 'training': 'training',
            'rehearsal': 'rehearsal', 'launching': 'launching', 'release': 'release',
            'package': 'The package', 'notes': 'Notes'}
CONF = """
project, html_title = 'llm-workbook', 'llm-workbook'
extensions = ['myst_nb', 'sphinx-mathjax-offline']
nb_execution_mode = 'off'
myst_enable_extensions = ['dollarmath', 'amsmath', 'colon_fence', 'html_admonition', 'html_image']
myst_heading_anchors = 3
exclude_patterns = ['_build', '**.qmd']
suppress_warnings = ['myst.header', 'myst.xref_missing', 'mystnb.unknown_mime_type', 'misc.highlighting_failure', 'docutils']
html_theme = 'furo'
html_show_sphinx = False
root_doc = 'contents'
"""


def toctree(folder: str, title: str) -> str:
    "Return the part of the table of contents for one `folder` of pages."
    pages = sorted(p.relative_to(folder).with_suffix('') for p in Path(folder).glob('*.ipynb'))
    lines = '\n'.join(str(p) for p in pages)
    return f'# {title}\n\n```{{toctree}}\n:maxdepth: 1\n\n{lines}\n```\n' if pages else ''


def plain(page: Path) -> None:
    "Put into words what only Quarto reads: front matter becomes a heading, `echo: false` a tag, directives go."
    nb = json.loads(page.read_text(encoding='utf-8'))
    for cell in nb['cells']:
        text = ''.join(cell['source'])
        if cell['cell_type'] == 'raw' and text.startswith('---'):
            matter = yaml.safe_load(text.strip().strip('-'))
            cell['cell_type'], text = 'markdown', f"# {matter['title']}\n\n> {matter.get('description', '')}\n"
        elif cell['cell_type'] == 'code':
            if re.search(r'^#\| echo: false', text, re.M): cell['metadata']['tags'] = ['remove-input']
            text = re.sub(r'^#\|.*\n?', '', text, flags=re.M)
            cell.pop('has_sd', None)
        cell['source'] = text
    page.write_text(json.dumps(nb), encoding='utf-8')


def sphinx(source: Path, target: Path) -> None:
    "Build `source` with Sphinx and myst-nb; no step of it uses a network."
    (source/'conf.py').write_text(CONF)
    for page in source.rglob('*.ipynb'): plain(page)
    entries = []
    for name, title in SECTIONS.items():
        if text := toctree(source/name, title):
            (source/name/'contents.md').write_text(text)
            entries.append(f'{name}/contents')
    listing = '\n'.join(['index', *entries])
    (source/'contents.md').write_text(f'# Contents\n\n```{{toctree}}\n:maxdepth: 2\n\n{listing}\n```\n')
    subprocess.run([sys.executable, '-m', 'sphinx', '-q', '-b', 'html', source, target], check=True)


def needed(cell) -> bool:
    "Say whether the description of a function needs this cell run: exports, cells of imports alone, and `show_doc`."
    trees = cell.parsed_() if cell.cell_type == 'code' else []
    if cell.directives_.keys() & {'export', 'exports', 'exporti'}: return True
    return bool(trees) and (all(isinstance(t, (ast.Import, ast.ImportFrom)) for t in trees) or 'show_doc(' in cell.source)


def main() -> None:
    "Process the pages with nbdev, then render them; nbdev's own command would download Quarto, so it is not used."
    from fastcore import docments
    from nbdev import processors
    from nbdev.serve import proc_nbs
    processors._do_eval = needed  # nbdev would run every cell with an import in it, and so half of some pages
    docments.signature = lambda function, eval_str=False: inspect.signature(function)  # 'torch.Tensor' stays a text
    source, target = Path(proc_nbs(n_workers=0, force=True)), ROOT/'_docs'
    shutil.rmtree(target, ignore_errors=True)
    if shutil.which('quarto'):
        subprocess.run(['quarto', 'render', source, '--no-cache', '--output-dir', target], check=True)
    else:
        with tempfile.TemporaryDirectory() as name:
            sphinx(Path(shutil.copytree(source, f'{name}/pages')), Path(name)/'site')
            shutil.move(f'{name}/site', target)
    print(f'Open {target.relative_to(ROOT)}/index.html')


if __name__ == '__main__':
    main()
