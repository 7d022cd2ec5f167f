"""Write llm_workbook/__init__.pyi, where editors and type checkers find the names of the package.

The house test compares the file with `stub.text()`.
"""
from page import PACKAGE

from llm_workbook import FACE, names

HEAD = '# Written by `make stub` from the `__all__` of every module: edit the pages.'
TAIL = """
__version__: str
FACE: tuple[str, ...]
__all__ = [
{face}]

def names() -> dict[str, str]: ..."""


def text() -> str:
    "Write one import for each public name, from the module that defines it."
    table = sorted((module, name) for name, module in names().items())
    rooms = sorted({module.split('.')[0] for module, _ in table})
    lines = [f'from . import {room} as {room}' for room in rooms]
    lines += [f'from .{module} import {name} as {name}' for module, name in table]
    face = ''.join(f'    {name!r},\n' for name in (*FACE, 'FACE', 'names'))
    return '\n'.join([HEAD, *lines, TAIL.format(face=face)]) + '\n'


if __name__ == '__main__':
    (PACKAGE/'__init__.pyi').write_text(text(), encoding='utf-8')
