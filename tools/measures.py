"""Measure how a module reads.

Usage: measures.py [MODULE ...] prints a table; tests/test_house.py holds the limits.
"""
import ast
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from page import ROOT

FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef
HEADS = ('lines  nodes a line   columns  function  class  walrus  lambda  tuple  bases  '
         'forwards  module')


class Measures(NamedTuple):
    "What is counted in one module."
    module: str
    code_lines: int
    nodes_median: float  # AST nodes of a line: the median over its lines,
    nodes_mean: float  # and the mean
    longest_line: int  # Columns
    longest_function: int  # Lines
    longest_class: int  # Lines, of the classes that have a method of more than 15
    most_walruses: int  # In one function
    named_lambdas: int
    tuple_statements: int  # `a(), b()` as a statement
    one_child_bases: tuple[str, ...]  # Private classes with exactly one subclass in the module
    forwarding_methods: tuple[str, ...]  # Methods that only call a private function


def length(node: ast.AST) -> int:
    "Count the lines of a definition."
    return node.end_lineno - node.lineno + 1


def nodes_per_line(tree: ast.Module) -> list[int]:
    "Count the AST nodes that begin on each line that has any."
    counts = Counter(node.lineno for node in ast.walk(tree) if hasattr(node, 'lineno'))
    return list(counts.values())


def walruses(function: ast.AST) -> int:
    "Count the assignments inside expressions of a function."
    return sum(isinstance(node, ast.NamedExpr) for node in ast.walk(function))


def is_named_lambda(node: ast.AST) -> bool:
    "Say whether a statement gives a name to a lambda."
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)


def is_tuple_statement(node: ast.AST) -> bool:
    "Say whether a statement is a tuple and nothing else, as `a(), b()`."
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Tuple)


def one_child_bases(tree: ast.Module) -> tuple[str, ...]:
    "List the private classes that exactly one class inherits from."
    children = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            children.update(base.id for base in node.bases if isinstance(base, ast.Name))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return tuple(name for name in classes if name.startswith('_') and children[name] == 1)


def is_docstring(node: ast.AST) -> bool:
    "Say whether a statement is a docstring or another constant."
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_private_call(node: ast.AST) -> bool:
    "Say whether an expression calls a private function of the module."
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name): return False
    return node.func.id.startswith('_')


def is_forwarding(method: ast.AST) -> bool:
    "Say whether a method only passes its own arguments to a private function of the module."
    body = [node for node in method.body if not is_docstring(node)]
    if len(body) != 1 or not isinstance(body[0], (ast.Return, ast.Expr)): return False
    call = body[0].value
    if not is_private_call(call) or call.keywords: return False
    passed = [getattr(argument, 'id', None) for argument in call.args]
    return passed == [argument.arg for argument in method.args.args]


def forwarding_methods(tree: ast.Module) -> tuple[str, ...]:
    "List the methods that only pass their arguments on."
    names = []
    for cls in tree.body:
        if not isinstance(cls, ast.ClassDef): continue
        methods = [node for node in cls.body if isinstance(node, FUNCTION)]
        names += [f'{cls.name}.{method.name}' for method in methods if is_forwarding(method)]
    return tuple(names)


def long_class(node: ast.ClassDef) -> int:
    "Count the lines of a class that has a method of more than 15 lines; 0 where all are short."
    methods = [length(method) for method in node.body if isinstance(method, FUNCTION)]
    return length(node) if max(methods, default=0) > 15 else 0


def without_exports(text: str, tree: ast.Module) -> list[str]:
    "Give the lines of a module except those of `__all__`, which nbdev writes."
    lines = text.splitlines()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__':
            return lines[:node.lineno - 1] + lines[node.end_lineno:]
    return lines


def is_code(line: str) -> bool:
    "Say whether a line is neither empty nor a comment."
    return bool(line.strip()) and not line.strip().startswith('#')


def measure(path: Path) -> Measures:
    "Measure one module."
    text = path.read_text(encoding='utf-8')
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, FUNCTION)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    lines = without_exports(text, tree)
    nodes_of_lines = nodes_per_line(tree) or [0]
    return Measures(
        module=str(path.relative_to(ROOT)),
        code_lines=sum(map(is_code, lines)),
        nodes_median=statistics.median(nodes_of_lines),
        nodes_mean=round(statistics.mean(nodes_of_lines), 1),
        longest_line=max(map(len, lines), default=0),
        longest_function=max(map(length, functions), default=0),
        longest_class=max(map(long_class, classes), default=0),
        most_walruses=max(map(walruses, functions), default=0),
        named_lambdas=sum(map(is_named_lambda, nodes)),
        tuple_statements=sum(map(is_tuple_statement, nodes)),
        one_child_bases=one_child_bases(tree),
        forwarding_methods=forwarding_methods(tree))


def modules() -> list[Path]:
    "List the modules of the package that have code."
    paths = sorted((ROOT/'llm_workbook').rglob('*.py'))
    return [path for path in paths if path.name != '_modidx.py' and path.stat().st_size]


def table_row(row: Measures) -> str:
    "Write the measures of one module as a row of the table."
    cells = [
        f'{row.code_lines:5}', f'{row.nodes_median:6.1f}', f'{row.nodes_mean:7.1f}',
        f'{row.longest_line:11}', f'{row.longest_function:10}', f'{row.longest_class:7}',
        f'{row.most_walruses:8}', f'{row.named_lambdas:8}', f'{row.tuple_statements:7}',
        f'{len(row.one_child_bases):7}', f'{len(row.forwarding_methods):10}', f'  {row.module}']
    return ''.join(cells)


def main(names: list[str]) -> None:
    "Print the measures of the modules in `names`, or of all modules, and a summary."
    paths = [Path(name).resolve() for name in names] or modules()
    rows = [measure(path) for path in paths]
    print(HEADS)
    for row in rows: print(table_row(row))
    code_lines = sum(row.code_lines for row in rows)
    median = statistics.median(row.nodes_median for row in rows)
    mean = statistics.mean(row.nodes_mean for row in rows)
    print(f'{code_lines:5} lines in {len(rows)} modules; AST nodes a line: '
          f'median of the medians {median:.1f}, mean of the means {mean:.1f}')


if __name__ == '__main__': main(sys.argv[1:])
