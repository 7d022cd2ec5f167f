"""The good answers that the pages of answers give, as functions; their records for the package.

A cell that begins with `# answer 6.1` defines the answer to that exercise as its last function.
`python tools/answers.py` runs them all and writes `exercise-records.json`.
"""
import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from page import ROOT

RECORDS = ROOT/'llm_workbook/assets/exercise-records.json'
DEFINITIONS = ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom


def answer_pages() -> list[Path]:
    "List the pages of answers, in their order."
    return sorted((ROOT/'nbs/answers').glob('[0-9]*.ipynb'))


def cells_of(page: Path) -> Iterator[str]:
    "Go through the code of a page that is not exported."
    for cell in json.loads(page.read_text('utf-8'))['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'code' and not source.startswith('#| '): yield source


def answers_of(page: Path) -> dict[str, Callable]:
    "Define what a page defines, and give its answers by the number of their exercise."
    namespace, found = {'__name__': page.stem}, {}
    for source in cells_of(page):
        nodes = [node for node in ast.parse(source).body if isinstance(node, DEFINITIONS)]
        code = compile(ast.Module(nodes, []), str(page), 'exec')
        header = re.match(r'# (answer|wrong) (\d+\.\d+)', source)
        exec(code, namespace)
        names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
        if header and header[1] == 'answer': found[header[2]] = namespace[names[-1]]
    return found


def good_answers() -> dict[str, Callable]:
    "Give the good answer to every exercise."
    found = {}
    for page in answer_pages(): found |= answers_of(page)
    return found


def records() -> dict[str, list]:
    "Run the good answer to each exercise that has ranks, and pack what they did."
    from llm_workbook.exercises.check import exercise, pack_records
    from llm_workbook.exercises.judge import RankExercise, judge_answer
    packed = {}
    for number, answer in good_answers().items():
        asked = exercise(number)
        if not isinstance(asked, RankExercise): continue
        verdict = judge_answer(asked, answer)
        if verdict.state != 'right': sys.exit(str(verdict))
        packed[number] = pack_records(verdict.records)
    return packed


def main() -> None:
    "Write the records, a line for each exercise."
    lines = [f'{json.dumps(number)}: {json.dumps(packed)}' for number, packed in records().items()]
    RECORDS.write_text('{' + ',\n'.join(lines) + '}\n', 'utf-8')


if __name__ == '__main__': main()
