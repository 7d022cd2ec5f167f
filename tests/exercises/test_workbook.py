"""Every stub is not attempted, every answer is right, and the house of the workbook is in order."""
import json
import os
import re
from functools import cache

import pytest
from answers import RECORDS, answer_pages, cells_of, good_answers
from page import ROOT

from llm_workbook.exercises.check import (
    Checked, all_exercises, check_page, good_records, pack_records)
from llm_workbook.exercises.judge import RankExercise, judge_answer
from llm_workbook.exercises.question import ask

KNOWN = all_exercises()
PAGES = sorted((ROOT/'nbs/workbook').glob('[0-9]*.ipynb'))
ON_RANKS = {number: asked for number, asked in KNOWN.items() if isinstance(asked, RankExercise)}


def processor_s():
    "Return this process's and its ended ranks' seconds of processor, which load hardly raises."
    return sum(os.times()[:4])


@pytest.fixture(autouse=True)
def progress_of_the_test(tmp_path, monkeypatch):
    monkeypatch.setenv('LLMW_PROGRESS', str(tmp_path/'progress.json'))


@pytest.fixture(scope='module')
def answers(): return good_answers()


@pytest.fixture(scope='module')
def judged(answers):
    "Judge the answer to an exercise on ranks, once for all tests."
    return cache(lambda number: judge_answer(ON_RANKS[number], answers[number], seed=1))


@pytest.mark.parametrize('page', [
    page if page in PAGES[:2] else pytest.param(page, marks=pytest.mark.workbook)
    for page in PAGES], ids=lambda page: page.stem)
def test_every_stub_is_not_attempted(page):
    verdicts = check_page(page)
    assert {verdict.state for verdict in verdicts} == {'not attempted'}
    own = [number for number in KNOWN if int(number.split('.')[0]) == int(page.stem[:2])]
    assert [verdict.number for verdict in verdicts] == own


@pytest.mark.workbook
@pytest.mark.parametrize('number', KNOWN)
def test_every_answer_is_right_and_quick(number, answers, judged):
    start_s = processor_s()
    if number in ON_RANKS: verdict = judged(number)
    else: verdict, _ = ask(KNOWN[number], answers[number])
    assert verdict.state == 'right', verdict
    assert verdict.score > .7, verdict
    assert processor_s() - start_s < 20  # At most 7 on quiet cores
    assert f'{number} right, score' in Checked(verdict)._repr_html_()


def test_a_set_has_its_three_pages_and_wrong_answers():
    stems = [page.stem for page in PAGES]
    assert stems == [page.stem for page in answer_pages()]
    for page in answer_pages():
        text = '\n'.join(cells_of(page))
        numbers = re.findall(r'^# answer (\d+\.\d+)', text, re.M)
        assert numbers == [number for number in KNOWN if int(number.split('.')[0]) ==
                           int(page.stem[:2])]
        assert set(re.findall(r'^# wrong (\d+\.\d+)', text, re.M)) == set(numbers)


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_a_page_of_the_workbook_has_statement_stub_check_and_hints(page):
    cells = json.loads(page.read_text('utf-8'))['cells']
    sources = [''.join(cell['source']) for cell in cells]
    for place, source in enumerate(sources):
        number = re.match(r"check\('(\d+\.\d+)', (\w+)\)$", source)
        if not number: continue
        stub, statement, hints = sources[place - 1], sources[place - 2], sources[place + 1]
        assert f'def {number[2]}(' in stub and 'raise NotImplementedError' in stub
        assert statement.startswith(f'## {number[1]} ')
        assert re.search(r'\*Difficulty [1-5]/5 · \d+ minutes', statement)
        assert '**Checked:**' in statement and '<details>' in hints
        asked = KNOWN[number[1]]
        line = f'Difficulty {asked.difficulty}/5 · {asked.minutes} minutes'
        assert line in statement


@pytest.mark.parametrize('number', ON_RANKS)
def test_an_exercise_is_tried_on_several_numbers_of_ranks_and_with_remainders(number):
    cases = ON_RANKS[number].cases
    assert len(set(cases)) == len(cases) >= 2 or not any(case.sizes for case in cases)
    if max(case.ranks for case in cases) == 1: return
    assert {2, 3, 4} == {case.ranks for case in cases}
    remainders = [size % case.ranks for case in cases for size in case.sizes]
    assert any(remainders) or not remainders, 'every size can be divided by the number of ranks'


# How often ranks talk in these depends on the numbers that they get
BY_NUMBERS = '12.3',


@pytest.mark.workbook
def test_the_kept_records_are_those_of_the_answers(answers, judged):
    kept = json.loads(RECORDS.read_text('utf-8'))
    assert list(kept) == list(ON_RANKS)
    for number in ON_RANKS:
        verdict = judged(number)
        if number in BY_NUMBERS: verdict = judge_answer(KNOWN[number], answers[number])
        now = [[call[:3] for call in fields['calls']] for fields in pack_records(verdict.records)]
        assert now == [[list(call[:3]) for call in record.calls]
                       for record in good_records(number)], f'{number}: run tools/answers.py'
