"""Ranges and verdicts: as the record has them, as wide as they must be, and with honest digits."""
import json
import math
import random
from types import SimpleNamespace

import pytest
import yaml
from bench.lines import published_error
from bench.record import RESULTS
from bench.shared.doubt import RANGES, SURE, tolerance
from llm_workbook import Recipe, memory
from llm_workbook.plan.ranges import (
    Doubt, Range, card_range, cards_of, condition_of, doubt_of, range_of, squeezed)

GIB = 2**30
OFFLOADED = Recipe.named('70b-2x24gb-qlora')


def test_the_packaged_ranges_are_those_of_the_record():
    made = json.loads((RESULTS/'cpu/published_error.json').read_text('utf-8'))
    written = yaml.safe_load(RANGES.read_text('utf-8'))
    assert written['groups'] == made['ranges']
    for what in ('memory', 'time'):
        group = next(group for group in made['ranges'] if group['what'] == what)
        assert doubt_of(what, OFFLOADED) == Doubt(**group)


def test_the_cards_behind_a_range_are_those_of_its_figures():
    made = json.loads((RESULTS/'cpu/published_error.json').read_text('utf-8'))
    found = published_error.cards({'published': made['rows'], 'blind': made['blind_rows']})
    assert {what: list(cards_of(what)) for what in ('memory', 'time')} == found
    few = [row for row in made['rows'] if row['half'] == 'held out']
    assert published_error.cards({'published': few}) == {'memory': [], 'time': []}


def test_a_tolerance_interval_holds_what_it_promises():
    """Of 400 samples of 20, the interval has at least 90 % of all values in 95 % of the cases, give
    or take two."""
    draw = random.Random(0)
    normal = [draw.gauss(0, 1) for _ in range(4000)]
    enough = 0
    for _ in range(400):
        low, high = tolerance([draw.gauss(0, 1) for _ in range(20)], 0)
        enough += sum(low <= value <= high for value in normal) >= .9 * len(normal)
    assert .93 <= enough / 400 <= .98


def test_a_verdict_asks_a_wider_range():
    values = [.01 * i for i in range(-20, 21)]
    (low, high), (lowest, highest) = (tolerance(values, 2, share) for share in (.9, SURE))
    assert lowest < low < 0 < high < highest
    assert highest / high == pytest.approx(2.326 / 1.645, rel=.01)  # A normal curve's 99 and 95 %
    sure = Doubt('memory', low, high, 41, lowest=lowest, highest=highest).sure
    assert (sure.low, sure.high, sure.rows) == (lowest, highest, 41)
    with pytest.raises(ValueError, match='no ends for a verdict'):
        _ = Doubt('time', -.1, .1, 20).sure


def test_constants_that_were_fitted_widen_a_range():
    values = [.01 * i for i in range(-10, 11)]
    widths = [high - low for low, high in (tolerance(values, fitted) for fitted in (0, 2, 6))]
    assert widths == sorted(set(widths))
    with pytest.raises(ValueError, match='too few for a range'): tolerance(values[:8], 3)


@pytest.mark.parametrize('ends, text', [
    ((16.32, 18.71, 21.38), '18.7 (16.3 to 21.4)'),
    ((66.1, 76.2, 87.4), '76 (66 to 87)'),
    ((351., 405.2, 466.), '410 (350 to 470)'),
    ((.58, .66, .76), '0.66 (0.58 to 0.76)'),
    ((.0012, .0013, .0016), '0.00130 (0.00120 to 0.00160)'),
    ((5., 5., 5.), '5.0')])
def test_a_figure_has_the_digits_that_its_range_allows(ends, text):
    assert Range(*ends).text() == text


def test_a_rate_turns_its_range_round():
    doubt = Doubt('time', -.1, .3, 20)
    seconds, rate = range_of(10, doubt), range_of(1 / 10, doubt, rate=True)
    assert rate.low == pytest.approx(1 / seconds.high)
    assert rate.high == pytest.approx(1 / seconds.low)


def room(need, have): return SimpleNamespace(place='gpu', need_b=need * GIB, have_b=have * GIB)


def test_the_cache_of_the_allocator_is_no_reason_to_refuse():
    doubt = Doubt('memory', -.1, .1, 20)
    assert card_range(room(24, 24), 20 * GIB, doubt).high == 24 * GIB
    assert card_range(room(24, 24), 23 * GIB, doubt).high == pytest.approx(23 * math.exp(.1) * GIB)
    assert card_range(room(20, 24), 19 * GIB, doubt).high == pytest.approx(20 * math.exp(.1) * GIB)
    assert card_range(room(24, 24), 24 * GIB, None) == Range(*3 * [24 * GIB])


@pytest.mark.parametrize('have, outcome', [(30, 'fits'), (26, 'fits if'), (18, 'fits if'),
                                           (15, 'does not fit')])
def test_the_verdict_follows_both_ends(have, outcome):
    need = Range(16 * GIB, 20 * GIB, 28 * GIB)
    found = condition_of(room(20, have), need)
    assert found.outcome == outcome
    assert bool(found.text) == (outcome == 'fits if')
    there = condition_of(room(20, have), need, assumed=True)
    assert there.outcome == ('fits' if outcome == 'fits' else 'fits if')


def test_a_condition_is_true_to_its_percentage():
    need = Range(16 * GIB, 20 * GIB, 28 * GIB)
    assert 'at least 10.0 % less' in condition_of(room(20, 18), need).text
    assert 'at most 30.0 % more' in condition_of(room(20, 26), need).text
    assert 'at most 62.5 % more' in condition_of(room(20, 26), need, squeezed_b=16 * GIB).text


def test_squeezed_is_what_a_full_card_of_that_size_needs():
    ledger = memory(OFFLOADED)
    least_b = squeezed(ledger, 'step')
    card = ledger.spec and memory(OFFLOADED, node=node_of(least_b))
    assert card.total('step') == least_b
    assert memory(OFFLOADED, node=node_of(least_b // 2)).total('step') == least_b


def node_of(size_b):
    from llm_workbook import node
    return node('2x-rtx-3090').changed({'gpu.memory_b': size_b})
