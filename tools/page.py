"""Execute pages in a real kernel: `page.py run PAGE OUT`, `page.py result OUT`, `page.py book [PAGE ...]`."""
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from configparser import ConfigParser
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


def package_hash() -> str:
    "Hash the package and its assets: pages are executed again when the library under them has changed."
    digest = hashlib.sha256()
    for path in sorted((ROOT/'llm_workbook').rglob('*')):
        if path.is_file() and '__pycache__' not in path.parts: digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


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
    for cell in nb.cells:  # a finished progress bar is a dead widget on a page
        if cell.cell_type == 'code': cell.outputs = [o for o in cell.outputs if not is_bar(o)]
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
    package = package_hash()
    for page in [Path(name).resolve() for name in names] or pages():
        nb = nbformat.read(page, as_version=4)
        record = {'code': code_hash(nb.cells), 'package': package}
        if not names and nb.metadata.get(KEY) == record: continue
        start = time.monotonic()
        nb = execute(page, page.parent)
        nb.metadata[KEY] = record
        nb.metadata.pop('widgets', None)  # the state of progress bars
        nbformat.write(nb, page)
        nbdev_clean(str(page))
        print(f'{page.relative_to(ROOT)}: {time.monotonic() - start:.1f} s', flush=True)
    print('The book is up to date.')


if __name__ == '__main__':
    verb, *rest = sys.argv[1:]
    book(rest) if verb == 'book' else {'run': run, 'result': result}[verb](*rest)
