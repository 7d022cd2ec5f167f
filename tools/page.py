"""Execute pages in a real kernel: `page.py run PAGE OUT`, `page.py result OUT`, `page.py book [PAGE ...]`."""
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
KEY = 'llm_workbook'  # Where a page's record lies in its metadata; settings.ini lets nbdev_clean keep it


def pages() -> list[Path]:
    "List every page in reading order."
    nbs = ROOT/'nbs'
    hidden = lambda page: any(part[0] in '._' or part == 'runs' for part in page.relative_to(nbs).parts)
    return sorted(page for page in nbs.rglob('*.ipynb') if not hidden(page))


def code_hash(cells: list) -> str:
    "Hash the source of the code cells in `cells`, whatever wrote the notebook."
    sources = [''.join(c['source']).strip() for c in cells if c['cell_type'] == 'code']
    return hashlib.sha256(json.dumps([s for s in sources if s]).encode()).hexdigest()[:16]


PACKAGE = ROOT/'llm_workbook'


def module_file(name: str) -> Path | None:
    "Find the file of a module of the package, as `plan.ledger`; None for the package itself, and for what is no module."
    file = PACKAGE.joinpath(*name.split('.')).with_suffix('.py')
    return file if name and file.exists() else None


@cache
def tree_of(file: Path) -> ast.Module: return ast.parse(file.read_text(encoding='utf-8'))


@cache
def owners() -> dict[str, str]:
    "Map every public name to the module that exports it."
    table = {}
    for file in PACKAGE.rglob('[!_]*.py'):
        for node in tree_of(file).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__':
                module = '.'.join(file.relative_to(PACKAGE).with_suffix('').parts)
                table |= dict.fromkeys(ast.literal_eval(node.value), module)
    return table


def imported(tree: ast.Module, package: tuple[str, ...] = ()) -> set[str]:
    "List the modules of the package that a tree imports, anywhere in it; `package`: the folders it lies in."
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): found |= {alias.name.removeprefix('llm_workbook.') for alias in node.names}
        if not isinstance(node, ast.ImportFrom): continue
        base = ('llm_workbook', *package)[:len(package) + 2 - node.level] if node.level else ()
        where = '.'.join([*base, *filter(None, [node.module])])
        if where.split('.')[0] != 'llm_workbook': continue
        where = where.removeprefix('llm_workbook').strip('.')
        found.add(where)
        for alias in node.names: found |= {f'{where}.{alias.name}'.strip('.'), owners().get(alias.name, '')}
    return {name for name in found if module_file(name)}


def source_tree(source: str) -> ast.Module:
    "Parse the code of a cell; what only IPython understands imports nothing."
    try: return ast.parse(source)
    except SyntaxError: return ast.parse('')


@cache
def reached(name: str) -> frozenset[str]:
    "List a module, the modules that it imports, and those which these import in turn."
    names, waiting = {name}, [name]
    while waiting:
        name = waiting.pop()
        new = imported(tree_of(module_file(name)), tuple(name.split('.')[:-1])) - names
        names |= new
        waiting += new
    return frozenset(names)


def used_modules(cells: list) -> set[str]:
    "List the modules that the code of a page imports, and all that these reach."
    sources = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    names = set().union(*(imported(source_tree(source)) for source in sources))
    names |= {name for source in sources for name in re.findall(r'#\|\s*default_exp\s+(\S+)', source)}
    return set().union(*(reached(name) for name in names if module_file(name)))


@cache
def plain_text(file: Path) -> str:
    "Give the code of a module without comments."
    return ast.unparse(tree_of(file))


@cache
def named_assets(text: str) -> frozenset[str]:
    "List the assets whose names stand in a text."
    return frozenset(asset.name for asset in (PACKAGE/'assets').iterdir() if asset.name in text or asset.stem in text)


@cache
def asset_digest(name: str) -> bytes:
    "Hash one asset, a file or a folder."
    digest = hashlib.sha256()
    for path in sorted([PACKAGE/'assets'/name, *(PACKAGE/'assets'/name).rglob('*')]):
        if path.is_file(): digest.update(path.read_bytes())
    return digest.digest()


def library_hash(cells: list) -> str:
    "Hash what a page uses of the library: its modules without comments, and the assets that they or the page name."
    modules = [plain_text(module_file(name)) for name in sorted(used_modules(cells))]
    sources = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    digest = hashlib.sha256(''.join(modules).encode())
    assets = set().union(*map(named_assets, modules), *map(named_assets, sources))
    for name in sorted(assets): digest.update(asset_digest(name))
    return digest.hexdigest()[:16]


def record(cells: list) -> dict[str, str]:
    "Give what a page keeps of its execution: a page is stale when it is another one now."
    return {'code': code_hash(cells), 'library': library_hash(cells)}


def skipped(source: str, lifted: set) -> bool:
    "Say whether nbdev_test would leave this cell out: `eval: false`, or a test flag that is not `lifted`."
    parser = ConfigParser(delimiters=['='])
    parser.read(ROOT/'settings.ini', encoding='utf-8')
    flags = set(parser['DEFAULT']['tst_flags'].split()) - lifted
    directives = [m[1].strip() for m in map(re.compile(r'#\s*\|(.*)').match, source.splitlines()) if m]
    return any(d.split()[0] in flags or re.fullmatch(r'eval:\s*false', d) for d in directives if d)


def is_bar(output: dict) -> bool:
    "Say whether an output is a progress bar's."
    data = output.get('data', {})
    return 'application/vnd.jupyter.widget-view+json' in data and '%|' in data.get('text/plain', '')


def execute(page: Path, folder: Path) -> object:
    "Return the executed notebook of `page`, run in `folder`; cells that are left out keep their outputs."
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config
    lifted = set(os.environ.get('FLAGS', '').split())
    # DeepSpeed, where it is installed, would report a missing GPU on every page.
    if not Path('/dev/nvidiactl').exists(): os.environ.setdefault('DS_ACCELERATOR', 'cpu')

    class Client(NotebookClient):
        async def async_execute_cell(self, cell, cell_index, **kwargs):
            if cell.cell_type == 'code' and skipped(cell.source, lifted): return cell
            return await super().async_execute_cell(cell, cell_index, **kwargs)

    nb = nbformat.read(page, as_version=4)
    with tempfile.TemporaryDirectory() as sockets:  # The kernel is reached by local sockets: no port is opened
        config = Config({'KernelManager': {'transport': 'ipc', 'ip': f'{sockets}/kernel'}})
        Client(nb, timeout=3600, kernel_name='python3', config=config, resources={'metadata': {'path': str(folder)}}).execute()
    for cell in nb.cells:  # A finished progress bar is a dead widget on a page, and what went to stderr is for the author
        if cell.cell_type != 'code': continue
        for output in cell.outputs:
            if output.get('name') == 'stderr': print(f'{page.name}: stderr: {output.text.rstrip()}', flush=True)
        cell.outputs = [output for output in cell.outputs if not is_bar(output) and output.get('name') != 'stderr']
    return nb


def run(page: str, out: str) -> None:
    "Execute `page` in the project's root, and write the executed notebook to `out`."
    import nbformat
    target, start = Path(out), time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f'Running {page}', flush=True)
    nb = execute(Path(page), ROOT)
    nbformat.write(nb, target)
    print(f'Done in {time.monotonic() - start:.0f} s')


def result(out: str) -> None:
    "Print the result of an executed page, and where its adapters and the page itself are."
    cells = json.loads(Path(out).read_text(encoding='utf-8'))['cells']
    lines = [line for c in cells for o in c.get('outputs', []) if o['output_type'] == 'stream' and o['name'] == 'stdout'
             for line in ''.join(o['text']).splitlines()]
    print('\n'.join([line for line in lines if line.startswith('result:')] or lines[-1:]))
    for path in sorted(Path(out).parent.rglob('adapter_model.safetensors')): print(f'adapters: {path.parent}')
    print(f'notebook: {out}')


def book(names: list[str]) -> None:
    "Re-execute in place the pages whose code, or the package's, has changed; a page that is named is always executed."
    import nbformat
    from nbdev.clean import nbdev_clean
    for page in [Path(name).resolve() for name in names] or pages():
        nb = nbformat.read(page, as_version=4)
        if not names and nb.metadata.get(KEY) == record(nb.cells): continue
        start = time.monotonic()
        nb = execute(page, page.parent)
        nb.metadata[KEY] = record(nb.cells)
        nb.metadata.pop('widgets', None)  # the state of progress bars
        nbformat.write(nb, page)
        nbdev_clean(str(page))
        print(f'{page.relative_to(ROOT)}: {time.monotonic() - start:.1f} s', flush=True)
    print('The book is up to date.')


if __name__ == '__main__':
    verb, *rest = sys.argv[1:]
    book(rest) if verb == 'book' else {'run': run, 'result': result}[verb](*rest)
