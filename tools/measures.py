"""How a module reads, in numbers: `measures.py [MODULE ...]` prints a table; tests hold the limits."""
import ast
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from page import ROOT

FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef


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
    one_child_bases: tuple[str, ...]  # Private classes that exactly one class of the module inherits from
    forwarding_methods: tuple[str, ...]  # Methods that only call a private function with the same arguments


def length(node: ast.AST) -> int:
    "Count the lines of a definition."
    return node.end_lineno - node.lineno + 1


def nodes_per_line(tree: ast.Module) -> list[int]:
    "Count the AST nodes that begin on each line that has any."
    return list(Counter(node.lineno for node in ast.walk(tree) if hasattr(node, 'lineno')).values())


def walruses(function: ast.AST) -> int:
    "Count the assignments inside expressions of a function."
    return sum(isinstance(node, ast.NamedExpr) for node in ast.walk(function))


def one_child_bases(tree: ast.Module) -> tuple[str, ...]:
    "List the private classes that exactly one class inherits from."
    bases = Counter(base.id for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
                    for base in node.bases if isinstance(base, ast.Name))
    private = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith('_')]
    return tuple(name for name in private if bases[name] == 1)


def is_forwarding(method: ast.AST) -> bool:
    "Say whether a method does nothing but call a private function of the module with its own arguments."
    body = [node for node in method.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], (ast.Return, ast.Expr)): return False
    call = body[0].value
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id.startswith('_')): return False
    given = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
    return len(given) == len(call.args) and not call.keywords and given == [a.arg for a in method.args.args]


def forwarding_methods(tree: ast.Module) -> tuple[str, ...]:
    "List the public methods that only forward."
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return tuple(f'{cls.name}.{method.name}' for cls in classes for method in cls.body
                 if isinstance(method, FUNCTION) and is_forwarding(method))


def long_class(node: ast.ClassDef) -> int:
    "Count the lines of a class that has a method of more than 15 lines; 0 where all are short."
    methods = [length(method) for method in node.body if isinstance(method, FUNCTION)]
    return length(node) if max(methods, default=0) > 15 else 0


def without_names(text: str, tree: ast.Module) -> list[str]:
    "Give the lines of a module but for `__all__`, which nbdev writes."
    lines = text.splitlines()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__':
            return lines[:node.lineno - 1] + lines[node.end_lineno:]
    return lines


def measure(path: Path) -> Measures:
    "Measure one module."
    text = path.read_text(encoding='utf-8')
    tree = ast.parse(text)
    nodes = nodes_per_line(tree) or [0]
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTION)]
    lines = without_names(text, tree)
    return Measures(
        module=str(path.relative_to(ROOT)),
        code_lines=sum(1 for line in lines if line.strip() and not line.strip().startswith('#')),
        nodes_median=statistics.median(nodes), nodes_mean=round(statistics.mean(nodes), 1),
        longest_line=max(map(len, lines), default=0),
        longest_function=max(map(length, functions), default=0),
        longest_class=max((long_class(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)), default=0),
        most_walruses=max(map(walruses, functions), default=0),
        named_lambdas=sum(isinstance(n, ast.Assign) and isinstance(n.value, ast.Lambda) for n in ast.walk(tree)),
        tuple_statements=sum(isinstance(n, ast.Expr) and isinstance(n.value, ast.Tuple) for n in ast.walk(tree)),
        one_child_bases=one_child_bases(tree), forwarding_methods=forwarding_methods(tree))


def modules() -> list[Path]:
    "List the modules of the package that have code."
    found = sorted((ROOT/'llm_workbook').rglob('*.py'))
    return [path for path in found if path.name != '_modidx.py' and path.stat().st_size]


def main(names: list[str]) -> None:
    "Print the measures of the modules in `names`, or of all, and their sum."
    rows = [measure(Path(name).resolve()) for name in names] or [measure(path) for path in modules()]
    print('lines  nodes a line   columns  function  class  walrus  lambda  tuple  bases  forwards  module')
    for row in rows:
        counts = (row.longest_line, row.longest_function, row.longest_class, row.most_walruses, row.named_lambdas,
                  row.tuple_statements, len(row.one_child_bases), len(row.forwarding_methods))
        cells = ''.join(f'{count:{width}}' for count, width in zip(counts, (11, 10, 7, 8, 8, 7, 7, 10)))
        print(f'{row.code_lines:5}  {row.nodes_median:4.1f} {row.nodes_mean:6.1f}{cells}  {row.module}')
    print(f'{sum(row.code_lines for row in rows):5} lines in {len(rows)} modules; AST nodes a line: median of the medians '
          f'{statistics.median(row.nodes_median for row in rows):.1f}, mean of the means '
          f'{statistics.mean(row.nodes_mean for row in rows):.1f}')


if __name__ == '__main__':
    main(sys.argv[1:])
