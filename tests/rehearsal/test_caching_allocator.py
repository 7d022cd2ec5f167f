"""torch's allocator, played: its rules on random programs, and what one GPU reserved."""
import json
import os
import random
from functools import cache

import pytest

os.environ['HF_HUB_OFFLINE'] = '1'

from bench.lines import caching_allocator as line
from bench.record import RESULTS
from bench.shared.small_rehearsals import SHAPES
from llm_workbook import Recipe, rehearse
from llm_workbook.plan import ledger
from llm_workbook.rehearsal.caching_allocator import CachingAllocator

MIB = 2**20


@cache
def committed() -> dict:
    return json.loads((RESULTS/'cpu/caching_allocator.json').read_text('utf-8'))


def pieces_of(allocator) -> list:
    "All pieces of the segments that have a free piece, each once."
    found = {}
    for pool in allocator.pools.values():
        for piece in pool.pieces.values():
            while piece.before: piece = piece.before
            while piece:
                found[id(piece)] = piece
                piece = piece.after
    return list(found.values())


def random_sizes(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [int(2 ** draw.uniform(6, 26)) for _ in range(400)]


@pytest.mark.parametrize('expandable', [True, False])
@pytest.mark.parametrize('seed', range(4))
def test_pieces_never_meet_and_free_neighbours_are_one(expandable, seed):
    allocator, draw, held = CachingAllocator(expandable), random.Random(seed), []
    for size_b in random_sizes(seed):
        held.append(allocator.allocate(size_b))
        assert held[-1].size_b >= size_b
        if draw.random() < .45: allocator.release(held.pop(draw.randrange(len(held))))
    ends = 0
    for piece in sorted(held, key=lambda piece: piece.start):
        assert piece.start >= ends and not piece.free
        ends = piece.start + piece.size_b
    for piece in pieces_of(allocator):
        if piece.after: assert not (piece.free and piece.after.free)
        if piece.after: assert piece.after.start == piece.start + piece.size_b
    assert allocator.allocated_b == sum(piece.size_b for piece in held)
    free_b = sum(piece.size_b for pool in allocator.pools.values()
                 for piece in pool.pieces.values())
    assert allocator.reserved_b == allocator.allocated_b + free_b
    for piece in held: allocator.release(piece)
    assert allocator.allocated_b == 0
    allocator.empty_cache()
    assert allocator.reserved_b == 0
    allocator.allocate(3 * MIB)
    assert allocator.reserved_b == 20 * MIB


@pytest.mark.parametrize('expandable', [True, False])
def test_a_full_card_is_emptied_once_and_then_refused(expandable):
    allocator = CachingAllocator(expandable, room_b=80 * MIB)
    first, second = allocator.allocate(20 * MIB), allocator.allocate(40 * MIB)
    allocator.release(second)
    third = allocator.allocate(60 * MIB)
    assert allocator.reserved_b == 80 * MIB
    with pytest.raises(MemoryError, match='tensors have 83,886,080 and 0 are free'):
        allocator.allocate(1)
    allocator.release(third)
    allocator.release(first)
    assert allocator.allocate(80 * MIB).size_b == 80 * MIB


@pytest.mark.parametrize('size_b, fixed_b, growing_b', [
    (1, 2 * MIB, 2 * MIB),  # kSmallBuffer
    (MIB, 2 * MIB, 2 * MIB),  # kSmallSize is the last of the small pool
    (MIB + 1, 20 * MIB, 20 * MIB),  # kLargeBuffer
    (10 * MIB - 512, 20 * MIB, 20 * MIB),  # Below kMinLargeAlloc
    (10 * MIB, 10 * MIB, 20 * MIB),  # Rounded to kRoundLarge, or to a page
    (21 * MIB + 1, 22 * MIB, 40 * MIB)])
def test_a_segment_has_the_size_that_the_source_says(size_b, fixed_b, growing_b):
    for expandable, reserved_b in (False, fixed_b), (True, growing_b):
        allocator = CachingAllocator(expandable)
        allocator.allocate(size_b)
        assert allocator.reserved_b == reserved_b


@pytest.mark.parametrize('size_b, expandable, rest_b', [
    (MIB - 512, False, 0), (19 * MIB - 512, False, 0), (19 * MIB, False, MIB),
    (19 * MIB, True, 0), (20 * MIB - 512, True, 0), (20 * MIB - 511, True, 511)])
def test_a_rest_is_cut_off_from_512_bytes_or_above_1_mib(size_b, expandable, rest_b):
    block = CachingAllocator(expandable).allocate(size_b)  # Of a segment of 2 or of 20 MiB
    assert block.size_b - size_b == rest_b


def test_the_record_is_what_one_gpu_reserved():
    rows = {row['part']: row for row in committed()['rows'] if 'reserved_b' in row}
    assert len(rows) == len(line.measured()) >= 5
    for seen in line.measured():
        row, figures = rows[seen['part']], seen['figures']
        assert (row['peak_b'], row['reserved_b']) == (figures['peak_b'], figures['reserved_b'])
        assert abs(row['error']) <= 1
        assert abs(row['allocated_error']) < .01
    assert max(row['fixed_error'] for row in rows.values()) > 10


def test_the_plan_has_the_shares_of_the_record():
    made = committed()
    assert line.fitted(made['rows']) == made['shares']
    assert ledger._GROWING == {False: made['shares']['once'], True: made['shares']['again']}
    measured = [row | {'played_b': 1} if 'reserved_b' in row else row for row in made['rows']]
    assert line.fitted(measured) == made['shares']
    seen = {figures['part']: figures['figures'] for figures in line.measured()}
    for number, configuration in enumerate(line.CONFIGURATIONS):
        part = line.title(*configuration)
        if part not in seen: continue
        planned = ledger.memory(line.recipe(number), node='1x-h200')
        reserved_b = planned.total('step', 'gpu', 'reserved')
        assert reserved_b == pytest.approx(seen[part]['reserved_b'], rel=.03)
        low_b, high_b = planned.band
        assert low_b <= seen[part]['driver_b'] <= high_b or seen[part]['others_b']


@pytest.mark.slow
def test_the_library_reproduces_the_record():
    row = next(row for row in committed()['rows'] if 'reserved_b' in row)
    names = [line.title(*configuration) for configuration in line.CONFIGURATIONS]
    assert line.played(names.index(row['part'])) == {
        key: row[key] for key in ('allocated_b', 'played_b', 'fixed_b')}


@pytest.mark.slow
def test_a_rehearsal_says_what_is_reserved(tmp_path):
    (tmp_path/'config.json').write_text(json.dumps(SHAPES['quick'] | {'num_hidden_layers': 12}))
    plain = Recipe(
        name='small', model={'source': str(tmp_path)}, data={'source': 'sample-conversations'},
        method={'kind': 'full'}, cluster={'device': 'cuda', 'processes': 1},
        sharding={'strategy': 'none'}, batch={'micro': 8, 'length': 256})
    whole, derived = rehearse(plain, exact=True), rehearse(plain)
    assert derived.played == (6, 7)
    assert derived.reserved_b == pytest.approx(whole.reserved_b, abs=40 * MIB)
    assert whole.peak_b < whole.reserved_b < 1.3 * whole.peak_b
    assert rehearse(plain.changed({'cluster.device': 'cpu'}), exact=True).reserved_b is None
