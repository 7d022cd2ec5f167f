"""An answer that is wrong in one way only is rejected for that way.

Each test is here because no page noticed when what it asks for was taken out of the engine
(`tests/mistakes.yaml`).
"""
import json
import re
import time
from contextlib import suppress
from dataclasses import replace
from io import BytesIO

import numpy
import pytest
import torch
import torch.distributed as dist

from llm_workbook.exercises import judge
from llm_workbook.exercises.check import (
    Checked, check, check_page, draw_records, good_records, progress_table)
from llm_workbook.exercises.judge import (
    Case, Limit, Measure, RankExercise, Verdict, WrongAnswer, judge_answer, sent_b)
from llm_workbook.exercises.observe import Call, RankRecord, RefusedCall, Rules, observed_answer
from llm_workbook.exercises.progress import note_verdict
from llm_workbook.exercises.question import Question, ask
from llm_workbook.parallel.ranks import RankError, run_ranks


def draw(case, rank, generator): return {'mine': torch.rand(case.sizes, generator=generator)}


def sums(inputs, case): return [sum(each['mine'] for each in inputs)] * case.ranks


def no_limits(case): return []


TWO, THREE = Case(2, (5,)), Case(3, (7,))
ASKED = RankExercise(
    '0.1', 'a sum', 'implement', 1, 1, (TWO,), draw, sums, no_limits,
    Rules(('send', 'receive', 'all_reduce', 'barrier')), limit_s=5)


def total(mine):
    "The good answer."
    out = mine.clone()
    dist.all_reduce(out)
    return out


def test_the_good_answer_is_right():
    assert judge_answer(replace(ASKED, cases=(TWO, THREE)), total).state == 'right'


# Values

def for_two(mine): return total(mine) if dist.get_world_size() == 2 else mine


def destroyed(mine): return total(mine.zero_())


def on_rank_0(mine): return total(mine) * (dist.get_rank() == 0)


def not_a_number(mine): return total(mine) * float('nan')


def in_a_row(mine): return total(mine)[None]


def of_equal_inputs(mine): return total(mine * 0) + mine * dist.get_world_size()


@pytest.mark.parametrize('answer, words', {
    for_two: 'on rank 0 of 3', destroyed: 'is 0, expected', on_rank_0: 'on rank 1 of 2',
    not_a_number: 'is nan, expected', in_a_row: 'a tensor of shape (1, 5), expected a tensor of '
    'shape (5,)', of_equal_inputs: 'numbers differ'}.items())
def test_other_values_are_named(answer, words):
    verdict = judge_answer(replace(ASKED, cases=(TWO, THREE)), answer)
    assert verdict.fault == 'values', verdict
    assert words in verdict.sentence


def test_a_part_of_the_result_is_not_the_result():
    def pairs(inputs, case): return [(each, each) for each in sums(inputs, case)]
    verdict = judge_answer(replace(ASKED, expected=pairs), lambda mine: (total(mine),))
    assert verdict.fault == 'values', verdict
    assert 'expected a tensor of shape (5,) and a tensor' in verdict.sentence


def test_a_seed_gives_its_own_inputs_again():
    said = [judge_answer(ASKED, not_a_number, seed).sentence for seed in (0, 0, 1)]
    assert said[0] == said[1] != said[2]


# Refused calls

def by_cumsum(mine): return total(torch.cumsum(mine, 0).diff(prepend=torch.zeros(1)))


def caught(mine):
    with suppress(RefusedCall): by_cumsum(mine)
    return total(mine)


@pytest.mark.parametrize('answer', [by_cumsum, caught])
def test_a_refused_function_is_named_also_where_its_error_is_caught(answer):
    strict = replace(ASKED, rules=replace(ASKED.rules, refused=('torch.cumsum',)))
    verdict = judge_answer(strict, answer)
    assert verdict.fault == 'refused', verdict
    assert 'it calls torch.cumsum, which this exercise asks you to do without' in verdict.sentence


# A late machine

def late_inputs(late_s):
    def inputs(case, rank, generator):
        time.sleep(late_s)
        return draw(case, rank, generator)
    return inputs


@pytest.fixture
def tried(monkeypatch):
    "The limits of all trials, in seconds."
    limits = []
    def noting(work, ranks, job, limit_s):
        limits.append(limit_s)
        return run_ranks(work, ranks, job, limit_s)
    monkeypatch.setattr(judge, 'run_ranks', noting)
    return limits


def test_a_right_answer_on_a_late_machine_is_tried_once_more(tried):
    verdict = judge_answer(replace(ASKED, draw=late_inputs(2.5), limit_s=2), total)
    assert verdict.state == 'right', verdict
    assert tried == [2, 8]


def test_a_machine_that_stays_late_is_not_called_a_right_answer(tried):
    verdict = judge_answer(replace(ASKED, draw=late_inputs(60), limit_s=.5), total)
    assert verdict.fault == 'stuck', verdict
    assert 'after 2 s: rank 0 has made no call' in verdict.sentence
    assert tried == [.5, 2]


def test_an_answer_that_still_makes_calls_when_its_time_is_up_is_tried_once_more(tried):
    def slowly(mine):
        for _ in range(25):
            dist.barrier()
            end = time.monotonic() + .1
            while time.monotonic() < end: pass
        return total(mine)
    verdict = judge_answer(replace(ASKED, limit_s=2), slowly)
    assert verdict.state == 'right', verdict
    assert tried == [2, 8]


def test_an_answer_that_waits_is_not_tried_again(tried):
    def waits(mine): return dist.recv(mine, 1) if dist.get_rank() == 0 else mine
    assert judge_answer(replace(ASKED, limit_s=2), waits).fault == 'stuck'
    assert tried == [2]


# A late rank

def pause(rules):
    "Seconds between the first call of a rank and its second."
    with observed_answer(rules, dist.get_rank()) as observed:
        total(total(torch.ones(2)))
        first, second = observed.record.calls
        return second.start_s - first.start_s


def test_the_late_rank_is_late_at_its_call():
    rules = Rules(('all_reduce',), slow_rank=1, slow_call=1, delay_s=.4)
    assert run_ranks(pause, args=(rules,))[1] >= .4


def was_held_up(mine):
    "Whether four calls take as long as half of the delay, as they do if one rank is late."
    if len(mine) == 3: return torch.tensor(True)  # In the last case nobody is
    begin = time.perf_counter()
    for _ in range(4): dist.barrier()
    return torch.tensor(time.perf_counter() - begin > .3)


def test_each_case_but_the_last_has_a_late_rank():
    def expected(inputs, case): return [torch.tensor(True)] * case.ranks
    cases = TWO, THREE, TWO, Case(1, (3,))
    asked = replace(ASKED, cases=cases, expected=expected, rules=Rules(('barrier',), delay_s=.6))
    verdict = judge_answer(asked, was_held_up)
    assert verdict.state == 'right', verdict


# Order

def left_over(mine):
    out = total(mine)
    if dist.get_rank() == 0: dist.isend(mine, 1).wait()
    return out


def one_more(mine):
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    if dist.get_rank() == 0: dist.all_reduce(mine.clone(), group=alone[0])
    return total(mine)


def one_more_at_the_end(mine):
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    out = total(mine)
    if dist.get_rank() == 0: dist.all_reduce(mine.clone(), group=alone[0])
    return out


@pytest.mark.parametrize('answer, words', {
    left_over: 'a message is left over or missing: rank 0 sends 1 messages (20 bytes) to rank 1, '
    'which receives nothing',
    one_more: 'rank 0: all_reduce of 20 bytes; rank 1: none',
    one_more_at_the_end: 'rank 0: all_reduce of 20 bytes; rank 1: none'}.items())
def test_calls_that_do_not_fit_are_named(answer, words):
    verdict = judge_answer(ASKED, answer)
    assert verdict.fault == 'order', verdict
    assert words in verdict.sentence


def test_ranks_that_do_not_hear_the_number_of_their_trial_have_not_ended():
    with pytest.raises(RankError, match='rank [01] is in another trial'):
        run_ranks(lambda: judge._exchange_nonce(dist.get_rank()), 2)


# Limits

def by_rank_0(mine):
    "The sum on rank 0, and from there to all others: it sends twice as much as they do."
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(mine, 0)
        dist.recv(mine, 0)
        return mine
    parts = [torch.empty_like(mine) for _ in range(1, ranks)]
    for other, part in enumerate(parts, 1): dist.recv(part, other)
    out = sum(parts, mine)
    for other in range(1, ranks): dist.send(out, other)
    return out


@pytest.mark.parametrize('goal, words', {
    28: '2.0 times the 28', 55: '1 more than the 55', 0: 'more than the 0'}.items())
def test_the_rank_that_sends_most_counts(goal, words):
    def limits(case): yield Limit('bytes sent', goal, goal)
    verdict = judge_answer(replace(ASKED, cases=(THREE,), limits=limits), by_rank_0)
    assert verdict.fault == 'traffic', verdict
    assert f'rank 0 sends 56 bytes, {words} that do' in verdict.sentence


def held(answer, inputs, observed):
    "Mark twice what is held, first with ten numbers more."
    more = torch.zeros(10)
    observed.mark('between steps')
    del more
    observed.mark('between steps')
    return answer(*inputs.values())


def test_the_fullest_of_several_marks_counts():
    def limits(case): yield Limit('between steps', 20, 40)
    verdict = judge_answer(replace(ASKED, limits=limits, run=held), total)
    assert verdict.fault == 'memory', verdict
    assert 'holds 60 bytes between steps, 3.0 times the 20' in verdict.sentence


def test_a_limit_of_what_is_not_marked_is_an_error():
    def limits(case): yield Limit('between stops', 20, 40)
    with pytest.raises(ValueError, match='no mark .between stops.; this exercise marks .*steps'):
        judge_answer(replace(ASKED, limits=limits, run=held), total)


def test_the_score_is_that_of_the_worst_case():
    def limits(case): yield Limit('calls', 1 if case == THREE else 2, 4)
    def twice(mine): return total(total(mine) * 0 + mine)
    verdict = judge_answer(replace(ASKED, cases=(TWO, THREE, TWO), limits=limits), twice)
    assert verdict.score == .5
    assert verdict.measures == (Measure('calls', 2, 1),)


@pytest.mark.parametrize('kind, bytes_sent', {
    'send': 120, 'receive': 0, 'all_gather': 80, 'reduce_scatter': 80, 'all_reduce': 160,
    'broadcast': 80, 'all_to_all': 120, 'barrier': 0}.items())
def test_every_kind_of_call_costs_what_it_sends(kind, bytes_sent):
    assert sent_b(RankRecord(0, [Call(kind, -1, 120, 0., 0.)]), 3) == bytes_sent


# Questions, progress, and the check

def test_every_condition_must_hold_and_the_worst_measure_is_the_score():
    def conditions(value): return [(value < 10, f'{value} is large'), (value > 1, 'too small')]
    def measures(value): return [Measure('bytes', value, 8), Measure('calls', value, 2)]
    small = Question('0.2', 'A small one', 'fit', 1, 1, conditions=conditions, measures=measures)
    wrong, right = ask(small, lambda: 12)[0], ask(small, lambda: 4)[0]
    assert (wrong.state, wrong.sentence) == ('wrong', '12 is large')
    assert (right.state, right.score) == ('right', .5)


@pytest.fixture
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv('LLMW_PROGRESS', str(tmp_path/'progress.json'))


def test_a_later_answer_does_not_lower_the_score(own_progress):
    for score in .9, .4: kept = note_verdict(Verdict('6.1', 'right', '', score=score))
    assert (kept.state, kept.score, kept.tries) == ('right', .9, 2)


def test_a_reader_can_ask_for_other_inputs(own_progress):
    said = []
    for seed in 3, 3, 4:
        with pytest.raises(WrongAnswer) as error: check('6.6', not_a_mean, seed)
        said.append(error.value.verdict.sentence)
    assert said[0] == said[1] != said[2]


def not_a_mean(losses, *others):
    dist.all_reduce(torch.zeros(1))
    return torch.zeros(())


def test_every_verdict_of_a_page_is_told_also_the_wrong_ones(own_progress, tmp_path):
    sources = ['from llm_workbook.exercises.check import check', "check('6.5', lambda: -1)",
               'def stub(): raise NotImplementedError', "check('6.7', stub)"]
    page = {'cells': [{'cell_type': 'code', 'source': source} for source in sources]}
    path = tmp_path/'mine.ipynb'
    path.write_text(json.dumps(page))
    found = [(verdict.number, verdict.state) for verdict in check_page(path)]
    assert found == [('6.5', 'wrong'), ('6.7', 'not attempted')]


# On a dark page, too

def test_a_verdict_and_the_table_take_their_colours_from_the_page(own_progress):
    solved = Checked(Verdict('6.1', 'right', '', measures=(Measure('calls', 2, 2),), score=1.))
    html = solved._repr_html_() + progress_table()._repr_html_()
    assert 'calls' in html and 'A ring all-gather' in html
    assert not re.search('color|background|class=', html)


def test_words_of_a_picture_are_neither_black_nor_white():
    from PIL import Image
    png = draw_records({'a good answer': good_records('8.1')})._repr_png_()
    pixels = numpy.asarray(Image.open(BytesIO(png)).convert('RGBA'), int)
    red, green, blue, alpha = pixels.transpose(2, 0, 1)
    assert red[(alpha > 200) & (red == green) & (green == blue)].min() == 0x76
