"Limits are held, also where they are given one by one and no rank sends anything."
import torch

from llm_workbook.exercises.judge import Case, Limit, Measure, RankExercise, judge_answer
from llm_workbook.exercises.observe import Rules


def draw(case, rank, generator): return {'x': torch.randn(8, generator=generator)}


def total(inputs, case): return [inputs[0]['x'].sum()]


def little(case): yield Limit('peak bytes', 36, 40)


ASKED = RankExercise('0.1', 'a sum', 'implement', 1, 1, (Case(1),), draw, total, little, Rules(()))


def test_an_answer_without_messages_is_held_to_its_limits():
    lean = judge_answer(ASKED, lambda x: x.sum())
    assert lean.state == 'right'
    assert lean.measures == (Measure('peak bytes', 36, 36),)  # Eight numbers come in, one goes out
    fat = judge_answer(ASKED, lambda x: x.repeat(9).view(9, 8)[0].sum())
    assert (fat.state, fat.fault) == ('wrong', 'memory')
