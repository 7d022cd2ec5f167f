"""Cheats that work on every distributed exercise are rejected in each, with what is wrong."""
import pytest
from answers import good_answers
from cheats import CHEATS, NO_CHEAT, cheating

from llm_workbook.exercises.check import all_exercises
from llm_workbook.exercises.judge import RankExercise, judge_answer

DISTRIBUTED = {
    number: asked for number, asked in all_exercises().items()
    if isinstance(asked, RankExercise) and max(case.ranks for case in asked.cases) > 1}
WORDS = {  # Fault -> what its sentence says
    'silent': 'no rank sends anything', 'values': 'expected', 'refused': 'it calls',
    'order': 'rank', 'memory': 'holds', 'traffic': 'the numbers are right, but rank'}


@pytest.fixture(scope='module')
def answers(): return good_answers()


def check_right(verdict): assert verdict.state == 'right', verdict


@pytest.mark.workbook
@pytest.mark.parametrize('number', DISTRIBUTED)
@pytest.mark.parametrize('name', CHEATS)
def test_a_cheat_is_rejected_and_named(name, number, answers):
    verdict = judge_answer(cheating(DISTRIBUTED[number], name), answers[number])
    if (name, number) in NO_CHEAT: return check_right(verdict)
    assert verdict.state == 'wrong', verdict
    assert verdict.fault in CHEATS[name][1], verdict
    assert WORDS[verdict.fault] in verdict.sentence


def test_there_are_seven_cheats_and_one_with_two_forms():
    assert len(CHEATS) == 8 and {'sleeps', 'spins'} < set(CHEATS)
