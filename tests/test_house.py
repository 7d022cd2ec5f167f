"""The house looks at itself: sizes, documentation, order of imports, names, and what must never be
written."""
import ast
import importlib
import io
import json
import re
import statistics
import subprocess
import sys
import tokenize
from configparser import ConfigParser
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from measures import measure
from page import PACKAGE, ROOT, pages, skipped

GROUND = 'display', 'files', 'squares', 'pictures'  # Modules below all rooms
# Room, or module beside the rooms -> what it may import; each also imports from itself, without a
# circle
ROOMS = {
    'display': '', 'files': '', 'squares': '', 'pictures': '', 'config': '', 'model': 'config',
    'parallel': 'config model', 'checkpoint': 'config model parallel',
    'training': 'config model parallel checkpoint',
    'rehearsal': 'config model parallel checkpoint training',
    'plan': 'config model rehearsal',
    'launching': 'config model plan parallel checkpoint training',
    'release': 'config model parallel checkpoint training',
    'watching': 'config model plan parallel checkpoint training launching',
    'report': 'config model plan training rehearsal',
    'exercises': 'config model plan parallel checkpoint training rehearsal',
    '__main__': (
        'config model plan parallel checkpoint training rehearsal launching release watching '
        'report exercises')}
HEAVY = (
    'torch transformers accelerate peft trl datasets bitsandbytes matplotlib deepspeed pandas '
    'numpy fastcore nbdev '
    'IPython ipywidgets').split()
MODULES = sorted(p for p in (ROOT/'llm_workbook').rglob('*.py') if p.name != '_modidx.py')
BENCH = sorted((ROOT/'bench').rglob('*.py'))
PROGRAMS = [*MODULES, *sorted((ROOT/'tools').glob('*.py')), *BENCH]
PAGES = pages()
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def settings() -> dict:
    parser = ConfigParser(delimiters=['='])
    parser.read(ROOT/'settings.ini', encoding='utf-8')
    return dict(parser['DEFAULT'])


@cache
def parsed(path: Path) -> ast.Module: return ast.parse(path.read_text(encoding='utf-8'))


@cache
def comments(path: Path) -> set[int]:
    "Lines of `path` that end in a comment."
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding='utf-8')).readline)
    return {t.start[0] for t in tokens if t.type == tokenize.COMMENT}


@cache
def functions(path: Path) -> list:
    return [node for node in ast.walk(parsed(path)) if isinstance(node, FUNCTION)]


def public(path: Path) -> list[tuple]:
    "Public functions, classes and methods of a module, as (name, node)."
    found = []
    for node in parsed(path).body:
        if not isinstance(node, (*FUNCTION, ast.ClassDef)) or node.name.startswith('_'): continue
        found.append((node.name, node))
        if isinstance(node, ast.ClassDef):
            found += [
                (f'{node.name}.{m.name}', m)
                for m in node.body
                if isinstance(m, FUNCTION) and not m.name.startswith('_')]
    return found


def arguments(node) -> list:
    args = node.args
    every = [
        *args.posonlyargs, *args.args, *filter(None, [args.vararg]), *args.kwonlyargs,
        *filter(None, [args.kwarg])]
    return [a for a in every if a.arg not in ('self', 'cls')]


def lines_of_code(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith('#'))


def exported(path: Path) -> list[str]:
    return next((ast.literal_eval(node.value) for node in parsed(path).body
                 if isinstance(node, ast.Assign) and node.targets[0].id == '__all__'), [])


@cache
def cells(page: Path) -> list[tuple]:
    "Cells of a page, as (type, source, outputs)."
    return [
        (c['cell_type'], ''.join(c['source']), c.get('outputs', []))
        for c in json.loads(page.read_text('utf-8'))['cells']]


def code(page: Path) -> list[str]:
    return [source for kind, source, _ in cells(page) if kind == 'code' and source.strip()]


def is_export(source: str) -> bool: return bool(re.match(r'#\|\s*exports?\b', source))


def name(path: Path) -> str: return str(path.relative_to(ROOT))


def dotted(path: Path) -> str:
    "Name of a module below the package, as in `plan.ledger`; empty for the package itself."
    parts = path.relative_to(ROOT/'llm_workbook').with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def fresh(program: str) -> str:
    "Run Python source in a new process and return what it prints."
    return subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


# Names

def test_import_is_quick_and_light():
    program = (
        'import time; start = time.process_time(); import llm_workbook, sys; dir(llm_workbook); '
        # Processor time: another process must not fail this
        'print(time.process_time() - start, *sys.modules)'
    )
    seconds, loaded = [], set()
    for _ in range(3):
        first, *modules = fresh(program).split()
        seconds.append(float(first))
        loaded |= set(modules)
    assert min(seconds) < 0.5
    assert not loaded & {*HEAVY, 'pydantic', 'yaml'}


def test_every_module_is_light():
    names = ', '.join(f'llm_workbook.{dotted(p)}' for p in MODULES if dotted(p))
    assert not set(fresh(f'import sys, {names}; print(*sys.modules)').split()) & set(HEAVY)


def test_every_public_name_resolves_from_the_top():
    import llm_workbook
    owners = {}
    for path in MODULES:
        if path.stem == '__main__': continue  # A program
        module = importlib.import_module(f'llm_workbook.{dotted(path)}'.strip('.'))
        for public_name in exported(path):
            assert getattr(llm_workbook, public_name) is getattr(module, public_name)
            assert owners.setdefault(public_name, path) == path, f'{public_name} is in two modules'
    assert not set(owners) & {dotted(p).split('.')[0] for p in MODULES}, 'a name hides a room'
    assert set(llm_workbook.FACE) <= set(dir(llm_workbook))
    assert set(llm_workbook.FACE) <= set(owners)


def test_a_missing_name_is_an_attribute_error_with_the_nearest():
    import llm_workbook
    with pytest.raises(AttributeError, match='the nearest: Recipe'): print(llm_workbook.Recipee)
    assert not hasattr(llm_workbook, '_nothing')


def test_version_has_one_source():
    import llm_workbook
    assert llm_workbook.__version__ == settings()['version']


# Lines that are read once: tools/measures.py says what is counted

@pytest.mark.parametrize('path', MODULES, ids=name)
def test_modules_are_read_at_once(path):
    found = measure(path)
    limits = {
        'code_lines': 500, 'nodes_median': 6, 'longest_line': 100, 'longest_function': 40,
        'longest_class': 40, 'most_walruses': 1, 'named_lambdas': 0, 'tuple_statements': 0}
    beyond = {
        key: getattr(found, key) for key, limit in limits.items() if getattr(found, key) > limit}
    beyond |= {
        key: getattr(found, key)
        for key in ('one_child_bases', 'forwarding_methods')
        if getattr(found, key)}
    assert not beyond


SETS = sorted((ROOT/'llm_workbook/exercises').glob('set_*.py'))
EXERCISES = [page for page in PAGES if page.parent.name in ('workbook', 'answers')]


@pytest.mark.parametrize('path', SETS, ids=name)
def test_sets_are_read_at_once(path):
    "Sets are teaching pages too: the mean finds the dense lines that a median hides."
    assert measure(path).nodes_mean <= 6.5


@pytest.mark.parametrize('page', EXERCISES, ids=name)
def test_code_of_exercises_is_narrow(page):
    assert not [line for source in code(page) for line in source.splitlines() if len(line) > 100]


def unused_imports(tree: ast.AST) -> set[str]:
    "Names that the head of a module or of a function imports and nothing in it uses."
    imports_here = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.asname or alias.name for node in imports_here for alias in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    # `import torch._dynamo` loads a module before the fork
    return {name for name in names - used if '.' not in name}


@pytest.mark.parametrize('path', SETS, ids=name)
def test_sets_use_what_they_import(path):
    assert not [unused_imports(node) for node in [parsed(path), *functions(path)]
                if unused_imports(node)]


def test_measures_count_what_they_say(tmp_path):
    file = ROOT/'llm_workbook/probe.py'
    source = (
        "class _Base: pass\nclass Child(_Base):\n    def verdict(self): return _verdict(self)\n"
        "def _verdict(child): return (a := 1) + (b := a)\nname = lambda x: x\nprint(1), print(2)\n")
    try:
        file.write_text(source)
        found = measure(file)
    finally: file.unlink()
    assert (found.code_lines, found.most_walruses, found.named_lambdas, found.tuple_statements) == (
        6, 2, 1, 1)
    assert (found.one_child_bases, found.forwarding_methods) == (('_Base',), ('Child.verdict',))
    assert found.longest_line == max(map(len, source.splitlines()))
    assert found.nodes_median > 1


def test_ruff_finds_nothing():
    places = 'llm_workbook', 'bench', 'tests', 'tools', 'setup.py'
    done = subprocess.run(
        [sys.executable, '-m', 'ruff', 'check', '--output-format=concise', *places],
        cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    found = [line for line in done.stdout.splitlines() if re.match(r'\S+:\d+:\d+:', line)]
    assert not [line for line in found if not is_list_of_names(line)]


def is_list_of_names(line: str) -> bool:
    "Say whether ruff speaks of a line of `__all__`, which nbdev writes."
    file, number, *_ = line.split(':')
    tree = parsed(ROOT/file)
    return any(node.lineno <= int(number) <= node.end_lineno for node in tree.body
               if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__')


@pytest.mark.parametrize('path', PROGRAMS, ids=name)
def test_programs_are_small(path):
    long = [
        f'{n.name}: {n.end_lineno - n.lineno + 1} lines'
        for n in functions(path)
        if n.end_lineno - n.lineno + 1 > 40]
    wide = [
        f'{n.name}: {len(arguments(n))} parameters'
        for n in functions(path)
        if len(arguments(n)) > 6]
    assert not long + wide


def test_the_assets_are_small():
    assert sum(p.stat().st_size for p in (ROOT/'llm_workbook/assets').rglob('*')) <= 8 * 2**20


def may_be_long(source: str) -> bool:
    """Say whether an exported cell holds nothing but short definitions: methods of 15 lines,
    functions of 25."""
    if not is_export(source): return False
    tree = ast.parse(source)
    methods = [
        node
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, FUNCTION)]
    functions_ = [node for node in tree.body if isinstance(node, FUNCTION)]
    def lengths(nodes): return [node.end_lineno - node.lineno + 1 for node in nodes]
    return max(lengths(methods), default=0) <= 15 and max(lengths(functions_), default=0) <= 25


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_pages_are_small(page):
    sizes = [lines_of_code(source) for source in code(page)]
    words = sum(len(source.split()) for kind, source, _ in cells(page) if kind == 'markdown')
    long = [
        source[:60]
        for source in code(page)
        if lines_of_code(source) > (80 if may_be_long(source) else 40)]
    assert not long
    assert len(cells(page)) <= 90
    assert words <= 2400
    assert words >= sum(sizes), f'{words} words for {sum(sizes)} lines of code'
    assert page.stat().st_size <= 400 * 2**10
    # a note may be mostly data, as the word lists of the tiny base are
    notes = 'notes' in page.parts
    # Plain lines are more lines
    assert not sizes or statistics.median(sizes) <= (10 if notes else 8)


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_a_title_stands_alone(page):
    "nbdev takes a title and the line below it out of their cell, and drops the rest of it."
    titles = [
        source for kind, source, _ in cells(page) if kind == 'markdown' and source.startswith('# ')
    ]
    assert len(titles) == 1, titles
    assert re.fullmatch(r'# .+(\n+(> .+\n?)+)?\s*', titles[0]), titles


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_pages_show_what_they_do(page):
    errors = [
        source for _, source, outputs in cells(page) for o in outputs if o['output_type'] == 'error'
    ]
    assert not errors
    if len(code(page)) > 3:
        assert any(outputs for _, _, outputs in cells(page)), 'no outputs: run make book'


# Documentation

@pytest.mark.parametrize('path', MODULES, ids=name)
def test_everything_public_has_a_docstring_of_one_line(path):
    docs = [(label, (ast.get_docstring(node) or '').strip()) for label, node in public(path)]
    bad = [label for label, doc in docs if not doc or '\n' in doc]
    assert not bad


@pytest.mark.parametrize('path', MODULES, ids=name)
def test_every_parameter_and_return_has_a_docment(path):
    documented, bad = comments(path), []
    for label, node in public(path):
        if isinstance(node, ast.ClassDef):
            fields = [
                f
                for f in node.body
                if isinstance(f, ast.AnnAssign) and not f.target.id.startswith('_')]
            bad += [
                f'{label}.{f.target.id}'
                for f in fields
                if not documented & set(range(f.lineno, f.end_lineno + 1))]
            continue
        places = [a.lineno for a in arguments(node)]
        shared = {node.returns.end_lineno} if node.returns else set()
        bad += [
            f'{label}({a.arg})'
            for a in arguments(node)
            if a.lineno not in documented
            or a.lineno in shared
            or places.count(a.lineno) > 1
            or a.annotation is None]
        if node.returns is None:
            bad.append(f'{label} -> no annotation')
        elif (
            not (isinstance(node.returns, ast.Constant) and node.returns.value is None)
            and node.returns.end_lineno not in documented
        ):
            bad.append(f'{label} -> no docment')
    assert not bad


@cache
def cells_of_words() -> dict[str, list[str]]:
    "Each word of the cells that are not exported, with the sources of the cells that have it."
    sources = [source for page in PAGES for source in code(page) if not is_export(source)]
    found = {}
    for source in sources:
        for word in set(re.findall(r'\w+', source)): found.setdefault(word, []).append(source)
    return found


@pytest.mark.parametrize('path', MODULES, ids=name)
def test_every_public_name_is_demonstrated(path):
    shown = set(exported(path)) & set(cells_of_words())
    for label, node in public(path):  # A class is shown by a function that returns it
        if label.split('.')[0] in shown and isinstance(node, FUNCTION) and node.returns:
            shown |= set(re.findall(r'\w+', ast.unparse(node.returns)))
    assert not set(exported(path)) - shown


@pytest.mark.parametrize('path', MODULES, ids=name)
def test_every_function_has_its_assertions(path):
    """Two assertions in the cells that use a function, one a failing case unless it takes nothing
    that could be wrong."""
    bare = []
    for name, node in public(path):
        if '.' in name or not isinstance(node, FUNCTION): continue
        used = cells_of_words().get(name, [])
        checks = [
            line
            for source in used
            for line in source.splitlines()
            if re.match(r'\s*(assert |test_\w+\(|with expect_fail)', line)]
        fails = any(re.search(rf'(test_fail|expect_fail)\(.*\b{name}\b', source) for source in used)
        if len(checks) < 2 or arguments(node) and not fails:
            bare.append(f'{name}: {len(checks)} assertions, failing case: {fails}')
    assert not bare


def test_editors_find_every_public_name():
    import stub
    from llm_workbook import FACE, names
    text = (PACKAGE/'__init__.pyi').read_text('utf-8')
    assert text == stub.text(), 'run make stub'
    found = {
        alias.asname: node.module for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom) and node.module for alias in node.names}
    assert found == names()
    assert {*FACE} <= {*found}
    assert (PACKAGE/'py.typed').exists()


def test_the_readme_is_the_index_page():
    import readme
    text = (ROOT/'README.md').read_text('utf-8')
    assert text == readme.text(), 'run make readme'
    assert 600 <= len(text.split()) <= 1000
    assert len(cells(ROOT/'nbs/index.ipynb')) <= 16
    assert all((ROOT/link).exists() for link in re.findall(r'\]\((nbs/[^)#]+)\)', text))


# Order

@cache
def imports(path: Path) -> list[tuple]:
    """What a module imports from this package, anywhere in it, as (module, name or None):
    ('plan.ledger', 'Ledger')."""
    package = ['llm_workbook', *path.relative_to(ROOT/'llm_workbook').parts[:-1]]
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import): found += [(a.name, None) for a in node.names]
        if not isinstance(node, ast.ImportFrom): continue
        base = package[:len(package) + 1 - node.level] if node.level else []
        where = '.'.join([*base, *filter(None, [node.module])])
        for alias in node.names:
            is_module = (ROOT/where.replace('.', '/')/f'{alias.name}.py').exists()
            found.append((f'{where}.{alias.name}', None) if is_module else (where, alias.name))
    return [
        (where.removeprefix('llm_workbook.'), what)
        for where, what in found
        if where.split('.')[0] == 'llm_workbook']


BELOW = [path for path in MODULES if path.stem != '__init__']


@pytest.mark.parametrize('path', BELOW, ids=name)
def test_a_room_imports_only_rooms_below_it(path):
    room = dotted(path).split('.')[0]
    assert room in ROOMS, 'a new room: give it its place in ROOMS'
    allowed = {room, *GROUND, *ROOMS[room].split()}
    assert not [where for where, _ in imports(path) if where.split('.')[0] not in allowed]


def test_rooms_have_an_order():
    for place, below in enumerate(ROOMS.values()):
        assert set(below.split()) <= set(list(ROOMS)[:place])


def test_no_circle_of_imports():
    graph = {dotted(path): {where for where, _ in imports(path)} for path in BELOW}
    assert sum(map(len, graph.values())) > 150
    tuple(TopologicalSorter(graph).static_order())  # Raises CycleError, which names the circle


# Room of bench, or module beside the rooms -> what it may import; only `shared` and `gpu` also
# import from themselves
BENCH_ROOMS = {
    'record': '', 'shared': 'record shared', 'programs': 'record shared',
    'lines': 'record shared programs', 'gpu': 'record shared gpu', 'run': 'record'}


def bench_module(path: Path) -> str:
    return '.'.join(path.relative_to(ROOT/'bench').with_suffix('').parts)


def bench_imports(path: Path) -> set[str]:
    "What a module of bench imports from there, anywhere in it, as in `shared.heap`."
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import): found |= {a.name for a in node.names}
        if not isinstance(node, ast.ImportFrom): continue
        assert node.level == 0, f'{name(path)}: name the module in full'
        folder = ROOT/node.module.replace('.', '/')
        found |= {
            f'{node.module}.{a.name}' if (folder/f'{a.name}.py').exists() else node.module
            for a in node.names}
    return {where.removeprefix('bench.') for where in found if where.split('.')[0] == 'bench'}


def test_bench_has_no_circle_of_imports():
    graph = {bench_module(path): bench_imports(path) for path in BENCH}
    assert sum(map(len, graph.values())) > 40
    tuple(TopologicalSorter(graph).static_order())  # Raises CycleError, which names the circle


@pytest.mark.parametrize('path', [path for path in BENCH if path.stem != '__init__'], ids=name)
def test_a_room_of_bench_imports_only_rooms_below_it(path):
    room = bench_module(path).split('.')[0]
    assert room in BENCH_ROOMS, 'a new room: give it its place in BENCH_ROOMS'
    assert {where.split('.')[0] for where in bench_imports(path)} <= set(BENCH_ROOMS[room].split())


def test_every_file_of_bench_lines_is_a_line_and_back():
    from bench.run import LINES

    assert sorted(LINES) == sorted(
        path.stem for path in BENCH if path.parent.name == 'lines' and path.stem != '__init__')


def test_programs_that_bench_starts_are_there():
    started = {
        module
        for path in BENCH
        for module in re.findall(r"'-m', '(bench\.[\w.]+)'", path.read_text('utf-8'))}
    assert all((ROOT/f"{module.replace('.', '/')}.py").is_file() for module in started)
    programs = {
        f'bench.{bench_module(path)}'
        for path in BENCH
        if path.parent.name == 'programs' and path.stem != '__init__'}
    assert programs <= started


@pytest.mark.parametrize('path', MODULES, ids=name)
def test_no_private_name_crosses_modules(path):
    modules = {where.rpartition('.')[2] for where, what in imports(path) if what is None}
    taken = [f'{where}.{what}' for where, what in imports(path) if what and what.startswith('_')]
    taken += [
        f'{n.value.id}.{n.attr}'
        for n in ast.walk(parsed(path))
        if isinstance(n, ast.Attribute)
        and isinstance(n.value, ast.Name)
        and n.value.id in modules
        and n.attr.startswith('_')]
    assert not taken


# What must never be written; the patterns are put together so that this file does not match itself

BANNED = {
    'remote code': 'trust_remote' + r'_code\W{1,4}True', 'a shell': 'shell' + r'\s*=\s*True',
    'an unsafe load': 'weights' + r'_only\s*=\s*False',
    'an unsafe YAML loader': r'yaml\.' + r'(load|unsafe_load|full_load)\(',
    'an open address': r'(?<![\d.])0\.' + r'0\.0\.0(?![\d.])',
    'a token': 'hf' + '_[A-Za-z0-9]{20,}', 'a key': 'sk' + '-[A-Za-z0-9]{20,}',
    'a task left open': r'\b(TO' + r'DO|FIX' + r'ME)\b',
    'a path of one machine': r'(?<![\w.~])/(home|root|work|Users)' + '/'}
WHERE = (
    'llm_workbook/**/*.py llm_workbook/assets/**/*.yaml llm_workbook/assets/**/*.md '
    'tests/**/*.py tests/**/*.md tools/*.py bench/**/*.py '
    '.github/**/*.yml .ci/* *.md *.ini *.py *.toml Makefile').split()
TEXTS = sorted(p for pattern in WHERE for p in ROOT.glob(pattern))


@pytest.mark.parametrize('path', [*TEXTS, *PAGES], ids=name)
def test_nothing_dangerous_is_written(path):
    text = path.read_text('utf-8')
    found = [
        f'{what}: {match[0]}' for what, pattern in BANNED.items()
        for match in re.finditer(pattern, text)]
    assert not found


def test_actions_are_pinned():
    for path in (ROOT/'.github/workflows').glob('*.yml'):
        used = re.findall(r'uses:\s*(\S+)', path.read_text('utf-8'))
        assert all(re.fullmatch(r'[\w.-]+/[\w./-]+@[0-9a-f]{40}', action) for action in used), (
            path.name)


# Dependencies

def pinned():
    from packaging.utils import canonicalize_name

    rows = [
        line
        for line in (ROOT/'constraints.txt').read_text().splitlines()
        if line and not line.startswith('#')
    ]
    return {canonicalize_name(row.split('==')[0]): row.split('==')[1] for row in rows}


def test_the_tested_set_satisfies_every_requirement():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    pins = pinned()
    wanted = [
        Requirement(r)
        for key, value in settings().items()
        if key.endswith('requirements')
        for r in value.split()]
    bad = [
        str(r) for r in wanted if not r.specifier.contains(pins.get(canonicalize_name(r.name), '0'))
    ]
    assert not bad


def test_the_tested_set_installs_on_the_first_python_that_is_promised():
    """Debian 12 has Python 3.11.2, and a package may ask for 3.11.5: then pip says only that
    nothing can be resolved."""
    from importlib.metadata import distributions
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name
    first, pins = f'{settings()["min_python"]}.0', pinned()
    wanted = {
        canonicalize_name(d.metadata['Name']): d.metadata['Requires-Python']
        for d in distributions()}
    assert len(wanted.keys() & pins.keys()) > 100
    assert [name for name in pins if not SpecifierSet(wanted.get(name) or '').contains(first)] == []


def test_flags_are_read_as_nbdev_reads_them():
    assert skipped('#| slow\nx = 1', set())
    assert not skipped('#| slow\nx = 1', {'slow'})
    assert skipped('#| cuda\n#| multigpu\nx = 1', {'cuda'})
    assert skipped('#| eval: false\nx = 1', {'slow', 'cuda', 'multigpu', 'net', 'notest'})
    assert not skipped('#| export\nx = 1  # slow', set())
