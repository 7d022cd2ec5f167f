"""Execute pages in a real kernel.

Usage: page.py run PAGE OUT, page.py result OUT, page.py book [PAGE ...]
"""
import ast
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from configparser import ConfigParser
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT/'llm_workbook'
# The record of a page is under this key of its metadata; settings.ini lets nbdev_clean keep it
KEY = 'llm_workbook'
WIDGET = 'application/vnd.jupyter.widget-view+json'


def settings() -> dict[str, str]:
    "Read settings.ini."
    parser = ConfigParser(delimiters=['='])
    parser.read(ROOT/'settings.ini', encoding='utf-8')
    return dict(parser['DEFAULT'])


def pages() -> list[Path]:
    "List every page in reading order."
    return sorted(page for page in (ROOT/'nbs').rglob('*.ipynb') if not is_hidden(page))


def is_hidden(page: Path) -> bool:
    "Say whether a notebook is in a hidden folder or in a folder of runs, and so is no page."
    parts = page.relative_to(ROOT/'nbs').parts
    return any(part == 'runs' or part[0] in '._' for part in parts)


def code_sources(cells: list) -> list[str]:
    "List the sources of the code cells in `cells`."
    return [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']


def code_hash(cells: list) -> str:
    "Hash the code of a page; it does not matter which program wrote the notebook."
    stripped = [source.strip() for source in code_sources(cells)]
    text = json.dumps([source for source in stripped if source])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# What a page uses of the library

def module_file(name: str) -> Path | None:
    "Find the file of a module, as `plan.ledger`; None for the package and for other names."
    file = PACKAGE.joinpath(*name.split('.')).with_suffix('.py')
    return file if name and file.exists() else None


@cache
def tree_of(file: Path) -> ast.Module: return ast.parse(file.read_text(encoding='utf-8'))


@cache
def owners() -> dict[str, str]:
    "Map every public name to the module that exports it."
    module_of = {}
    for file in PACKAGE.rglob('[!_]*.py'):
        module = '.'.join(file.relative_to(PACKAGE).with_suffix('').parts)
        module_of |= dict.fromkeys(exported_names(tree_of(file)), module)
    return module_of


def exported_names(tree: ast.Module) -> list[str]:
    "List the names in `__all__` of a module."
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__':
            return ast.literal_eval(node.value)
    return []


def imported(tree: ast.Module, package: tuple[str, ...] = ()) -> set[str]:
    "List the modules of the library that code in the folders `package` imports."
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.removeprefix('llm_workbook.') for alias in node.names}
        if isinstance(node, ast.ImportFrom): names |= imported_from(node, package)
    return {name for name in names if module_file(name)}


def imported_from(node: ast.ImportFrom, package: tuple[str, ...]) -> set[str]:
    "List the names in a `from` import that may be modules of the library."
    origin = full_name(node, package)
    if origin.split('.')[0] != 'llm_workbook': return set()
    module = origin.removeprefix('llm_workbook').strip('.')
    names = {module}
    for alias in node.names:
        names.add(f'{module}.{alias.name}'.strip('.'))  # It may be a module,
        names.add(owners().get(alias.name, ''))  # or a name that a module exports
    return names


def full_name(node: ast.ImportFrom, package: tuple[str, ...]) -> str:
    "Give the full name of the module after `from`, where the code is in the folders `package`."
    folders = ('llm_workbook', *package)
    kept = len(folders) + 1 - node.level
    base = folders[:kept] if node.level else ()
    return '.'.join([*base, node.module] if node.module else base)


def source_tree(source: str) -> ast.Module:
    "Parse the code of a cell; a cell that only IPython understands counts as empty."
    try: return ast.parse(source)
    except SyntaxError: return ast.parse('')


@cache
def imported_by(name: str) -> set[str]:
    "List the modules of the library that one of them imports."
    folders = tuple(name.split('.')[:-1])
    return imported(tree_of(module_file(name)), folders)


@cache
def reached(name: str) -> frozenset[str]:
    "List a module, the modules that it imports, the modules that these import, and so on."
    names = {name}
    waiting = [name]
    while waiting:
        new_names = imported_by(waiting.pop()) - names
        names |= new_names
        waiting += new_names
    return frozenset(names)


def used_modules(cells: list) -> set[str]:
    "List the modules that the code of a page imports, and all that these reach."
    names = set()
    for source in code_sources(cells):
        names |= imported(source_tree(source))
        names |= set(re.findall(r'#\|\s*default_exp\s+(\S+)', source))
    modules = [name for name in names if module_file(name)]
    return set().union(*map(reached, modules))


@cache
def plain_text(file: Path) -> str:
    "Give the code of a module without comments."
    return ast.unparse(tree_of(file))


@cache
def named_assets(text: str) -> frozenset[str]:
    "List the assets whose names are in a text, with or without their endings."
    assets = (PACKAGE/'assets').iterdir()
    return frozenset(asset.name for asset in assets if asset.name in text or asset.stem in text)


@cache
def asset_digest(name: str) -> bytes:
    "Hash one asset, which is a file or a folder."
    asset = PACKAGE/'assets'/name
    digest = hashlib.sha256()
    for path in sorted([asset, *asset.rglob('*')]):
        if path.is_file(): digest.update(path.read_bytes())
    return digest.digest()


def library_hash(cells: list) -> str:
    "Hash the modules that a page uses, without comments, and the assets that the code names."
    modules = [plain_text(module_file(name)) for name in sorted(used_modules(cells))]
    digest = hashlib.sha256(''.join(modules).encode())
    assets = set().union(*map(named_assets, modules + code_sources(cells)))
    for name in sorted(assets): digest.update(asset_digest(name))
    return digest.hexdigest()[:16]


def record(cells: list) -> dict[str, str]:
    "Make the record that a page keeps of its execution; when it differs later, the page is stale."
    return {'code': code_hash(cells), 'library': library_hash(cells)}


# Execution

def skipped(source: str, lifted: set) -> bool:
    "Say whether nbdev_test would skip a cell: `eval: false`, or a test flag not in `lifted`."
    flags = set(settings()['tst_flags'].split()) - lifted
    matches = [re.match(r'#\s*\|(.*)', line) for line in source.splitlines()]
    directives = [match[1].strip() for match in matches if match]
    first_words = {directive.split()[0] for directive in directives if directive}
    not_run = any(re.fullmatch(r'eval:\s*false', directive) for directive in directives)
    return not_run or bool(flags & first_words)


def is_passing(output: dict) -> bool:
    "Say whether an output was meant for the time of waiting: a progress bar, or a cleared text."
    data = output.get('data', {})
    is_bar = WIDGET in data and '%|' in data.get('text/plain', '')
    return is_bar or data.get('text/html') == ''


def execute(page: Path, folder: Path) -> object:
    "Run `page` in `folder` and return the executed notebook; skipped cells keep their outputs."
    import nbformat
    # DeepSpeed, where it is installed, would report a missing GPU on every page
    if not Path('/dev/nvidiactl').exists(): os.environ.setdefault('DS_ACCELERATOR', 'cpu')
    notebook = nbformat.read(page, as_version=4)
    # Threads that wait leave their core to others: ranks, or another page
    os.environ.setdefault('OMP_WAIT_POLICY', 'passive')
    # The client and the kernel talk through local sockets: no port is opened
    with tempfile.TemporaryDirectory() as sockets:
        os.environ['LLMW_PROGRESS'] = f'{sockets}/progress.json'  # Not the reader's own
        make_client(notebook, folder, sockets).execute()
    for cell in notebook.cells:
        if cell.cell_type == 'code': remove_noise(cell, page.name)
    return notebook


def make_client(notebook, folder: Path, sockets: str) -> object:
    "Make a client that runs a notebook in `folder`, slow cells too, but no cells of other flags."
    from nbclient import NotebookClient
    from traitlets.config import Config
    lifted = {'slow', *os.environ.get('FLAGS', '').split()}

    class Client(NotebookClient):
        async def async_execute_cell(self, cell, cell_index, **kwargs):
            if cell.cell_type == 'code' and skipped(cell.source, lifted): return cell
            return await super().async_execute_cell(cell, cell_index, **kwargs)

    config = Config({'KernelManager': {'transport': 'ipc', 'ip': f'{sockets}/kernel'}})
    return Client(notebook, timeout=3600, kernel_name='python3', config=config,
                  resources={'metadata': {'path': str(folder)}})


def remove_noise(cell, name: str) -> None:
    "Remove what showed progress, and what went to stderr, which is printed for the author."
    outputs = []
    for output in cell.outputs:
        is_stderr = output.get('name') == 'stderr'
        if is_stderr: print(f'{name}: stderr: {output.text.rstrip()}', flush=True)
        if not is_stderr and not is_passing(output): outputs.append(output)
    cell.outputs = outputs


# The command line

def run(page: str, out: str) -> None:
    "Execute `page` in the root of the project, and write the executed notebook to `out`."
    import nbformat
    start = time.monotonic()
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f'Running {page}', flush=True)
    notebook = execute(Path(page), ROOT)
    nbformat.write(notebook, target)
    print(f'Done in {time.monotonic() - start:.0f} s')


def result(out: str) -> None:
    "Print the result of an executed page, the folders of its adapters, and its own path."
    lines = printed_lines(json.loads(Path(out).read_text(encoding='utf-8'))['cells'])
    results = [line for line in lines if line.startswith('result:')]
    print('\n'.join(results or lines[-1:]))
    for path in sorted(Path(out).parent.rglob('adapter_model.safetensors')):
        print(f'adapters: {path.parent}')
    print(f'notebook: {out}')


def printed_lines(cells: list) -> list[str]:
    "List the lines that the cells of a page printed."
    lines = []
    for cell in cells:
        for output in cell.get('outputs', []):
            is_print = output['output_type'] == 'stream' and output['name'] == 'stdout'
            if is_print: lines += ''.join(output['text']).splitlines()
    return lines


def book(names: list[str]) -> None:
    "Execute in place the pages in `names`; without names, those with a record of older code."
    import nbformat
    from nbdev.clean import nbdev_clean
    for page in [Path(name).resolve() for name in names] or pages():
        notebook = nbformat.read(page, as_version=4)
        if not names and notebook.metadata.get(KEY) == record(notebook.cells): continue
        start = time.monotonic()
        notebook = execute(page, page.parent)
        notebook.metadata[KEY] = record(notebook.cells)
        notebook.metadata.pop('widgets', None)  # The state of progress bars
        nbformat.write(notebook, page)
        nbdev_clean(str(page))
        print(f'{page.relative_to(ROOT)}: {time.monotonic() - start:.1f} s', flush=True)
    print('The book is up to date.')


def main(verb: str = '', *words: str) -> None:
    "Do what the command line asks for."
    if verb == 'book': book(list(words))
    elif verb == 'run' and len(words) == 2: run(*words)
    elif verb == 'result' and len(words) == 1: result(*words)
    else: sys.exit(__doc__.strip())


if __name__ == '__main__': main(*sys.argv[1:])
