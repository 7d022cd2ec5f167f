"""A page of the workbook goes through the real nbgrader: released, handed in, graded."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from answers import cells_of
from page import ROOT

from llm_workbook.exercises.check import exercise
from llm_workbook.exercises.classroom import export_assignment

PAGE = ROOT/'nbs/workbook/06_collectives.ipynb'


def nbgrader(course: Path, *words: str) -> None:
    tools = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'  # Of its database
    env = os.environ | {
        'PATH': tools, 'HOME': str(course), 'PYTHONPATH': str(ROOT),
        'LLMW_PROGRESS': str(course/'progress.json')}
    done = subprocess.run(
        [sys.executable, '-m', 'nbgrader', *words], cwd=course, env=env, capture_output=True,
        text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def gradebook(course: Path) -> dict:
    "Points of each graded cell of the one student."
    from nbgrader.api import Gradebook
    with Gradebook(f'sqlite:///{course}/gradebook.db') as book:
        notebook = book.find_submission_notebook(PAGE.stem, 'ps6', 'ada')
        return {grade.name: (grade.auto_score, grade.max_score) for grade in notebook.grades}


@pytest.mark.workbook
def test_nbgrader_releases_and_grades_a_page(tmp_path):
    pytest.importorskip('nbgrader')
    (tmp_path/'nbgrader_config.py').write_text(
        "c = get_config()\nc.CourseDirectory.course_id = 'llm'\n"
        "c.ExecutePreprocessor.timeout = 120\n")
    export_assignment(PAGE, tmp_path/'source/ps6')
    nbgrader(tmp_path, 'generate_assignment', 'ps6', '--create')
    released = json.loads((tmp_path/'release/ps6'/PAGE.name).read_text())
    assert 'BEGIN SOLUTION' not in json.dumps(released)
    answer = next(source for source in cells_of(ROOT/'nbs/answers/06_collectives.ipynb')
                  if source.startswith('# answer 6.1'))
    for cell in released['cells']:
        if 'def ring_all_gather(' in ''.join(cell['source']): cell['source'] = answer
        if 'def to_blame(' in ''.join(cell['source']):
            cell['source'] = 'def to_blame(): return 0, 3'
    handed_in = tmp_path/'submitted/ada/ps6'
    handed_in.mkdir(parents=True)
    (handed_in/PAGE.name).write_text(json.dumps(released))
    nbgrader(tmp_path, 'autograde', 'ps6', '--create')
    scores = gradebook(tmp_path)
    assert scores.pop('check-6-1') == (20, 20)
    most = {f'check-6-{place}': exercise(f'6.{place}').minutes for place in (2, 5, 7)}
    for name, minutes in most.items(): assert scores[name] == (0, minutes)
    assert {score for score, _ in scores.values()} == {0}


def test_what_a_teacher_writes_stays_with_the_teacher_and_a_check_cannot_be_changed(tmp_path):
    page = json.loads(PAGE.read_text())
    for cell in page['cells']:
        if cell['cell_type'] == 'code':
            cell['outputs'] = [{'output_type': 'stream', 'name': 'stdout', 'text': 'the answer'}]
    answered = tmp_path/PAGE.name
    answered.write_text(json.dumps(page))
    assignment = json.loads(export_assignment(answered, tmp_path/'source/ps6').read_text())
    assert 'the answer' not in json.dumps(assignment)
    for cell in assignment['cells']:
        marks, source = cell['metadata']['nbgrader'], ''.join(cell['source'])
        lines = [line.strip() for line in source.splitlines()]
        if 'raise NotImplementedError' in lines:
            begin, end = map(lines.index, ('### BEGIN SOLUTION', '### END SOLUTION'))
            assert lines[begin:end + 1] == [lines[begin], 'raise NotImplementedError', lines[end]]
        assert marks['solution'] is ('raise NotImplementedError' in lines) is not marks['locked']
