"""The rehearsal against real ranks: two small recipes run here, and what was measured of larger
ones stands in the records."""
import json
import os
import subprocess
import sys

import pytest
from bench.lines.rehearsal_error import RealRanks
from bench.record import ROOT
from bench.shared import gpu_rows
from bench.shared.heap import COUNTING
from bench.shared.small_rehearsals import AGAIN, FULL, LORA, PAIRS, QLORA, counted, percent, recipe
from test_ddp_buckets import BUCKETS, DDP, summed
from trouble import slow_case

from llm_workbook.plan.ledger import memory

SHORT = {'batch.length': 64}
RECORDS = {
    name: json.loads((ROOT/f'bench/results/cpu/{name}.json').read_text())
    for name in ('rehearsal_error', 'gpu_memory')}


def rehearsed(made):
    from llm_workbook import rehearse
    return rehearse(made, exact=True)


def assert_same(ours, saw: dict) -> None:
    "Assert that a rehearsal has the peak, the messages and the FLOP of real ranks."
    assert abs(percent(ours.peak_b, saw['peak_b'])) < 1
    assert [tuple(message) for message in saw['collectives']] == [
        ('backward' * (phase == 'backward'), kind, size) for phase, kind, size, _ in ours.messages]
    assert ours.flops == saw['flops']


@pytest.fixture(scope='module')
def ranks():
    with RealRanks() as made: yield made


HALF = FULL | {'precision.compute': 'float16', 'precision.loss_scale': 'dynamic'}


SELECTIVE = {'sharding.activation_checkpointing': 'selective'}
GROUPS = {'cluster.processes': 4, 'sharding.group': 2}


@pytest.mark.parametrize(
    'changes', [slow_case(how) for how in (
        QLORA | AGAIN, HALF, FULL | GROUPS, QLORA | GROUPS, FULL | SELECTIVE)],
    ids=['qlora', 'float16', 'full in groups', 'qlora in groups', 'full, selective'])
def test_a_rehearsal_does_what_the_ranks_do(changes, ranks, tmp_path):
    # Buffers of whole weights in groups are a smaller part of a larger model
    shape = 'quick' if changes == FULL | GROUPS else 'brief'
    made = recipe(shape, changes | SHORT, tmp_path)
    assert_same(rehearsed(made), ranks.measured(made))


@pytest.mark.parametrize('changes', [
    slow_case(how) for how in (LORA, QLORA | AGAIN, FULL)], ids=['lora', 'qlora', 'full'])
def test_ranks_that_train_pairs_do_what_was_rehearsed_and_planned(changes, ranks, tmp_path):
    # With packed weights 0.96 and 1.00 % too much is planned of the larger model, 1.04 of the other
    shape, room = ('quick', 1.2) if changes == QLORA | AGAIN else ('brief', 1)
    made = recipe(shape, changes | PAIRS | SHORT, tmp_path)
    saw = ranks.measured(made)
    assert_same(rehearsed(made), saw)
    planned_b = memory(made).total('step', 'gpu', 'allocated')
    assert abs(percent(planned_b, saw['peak_b'])) < room


@pytest.mark.slow
def test_real_ranks_send_the_buckets_of_ddp(ranks, tmp_path):
    made = recipe('brief', FULL | DDP | AGAIN, tmp_path)
    saw, ours = ranks.measured(made), rehearsed(made)
    assert summed(saw['collectives']) == BUCKETS['again']
    assert abs(percent(ours.peak_b, saw['peak_b'])) < .1
    assert ours.flops == saw['flops']


LATE = """
import threading
from bench.shared.heap import mapped_b, wait_for_release
before_b = mapped_b()
copies = [bytearray(4_000_000)]
threading.Timer(.2, copies.clear).start()
assert mapped_b() - before_b >= 4_000_000
wait_for_release(before_b, 4_000_000)
assert not copies
copies.append(bytearray(4_000_000))
try: wait_for_release(before_b, 4_000_000, seconds=.01)
except RuntimeError as error: print(error)
"""


def test_a_copy_that_another_thread_frees_late_is_waited_for():
    done = subprocess.run([sys.executable, '-c', LATE], env=os.environ | COUNTING, cwd=ROOT,
                          capture_output=True, text=True)
    assert 'a copy of 4,000,000 bytes was not freed' in done.stdout, done.stderr


def label(row): return '-'.join(map(str, [row['shape'], *row['changes'].values()]))


# Each of their settings is in another row too, and most of them with the same method. Of pairs the
# full fine-tune stays: real ranks train all three above
TWICE = (
    'large-lora', 'small-lora-full', 'small-qlora', 'small-lora-True-rslora', 'small-full-one_pass',
    'large-qlora-full', 'small-lora-True-512', 'small-lora-preference-dpo',
    'large-qlora-full-preference-dpo')
ROWS = [row if i < 2 else slow_case(row)
        for i, row in enumerate(RECORDS['rehearsal_error']['rows']) if label(row) not in TWICE]


@pytest.mark.parametrize('row', ROWS, ids=label)
def test_the_rehearsal_alone_gives_what_was_measured(row, tmp_path):
    ours = rehearsed(recipe(row['shape'], row['changes'], tmp_path))
    assert abs(percent(ours.peak_b, row['peak_b'])) < 1
    assert counted([message[1:3] for message in ours.messages]) == row['collectives']
    assert ours.flops == row['flops']


def test_the_record_covers_what_was_promised():
    rows = RECORDS['rehearsal_error']['rows']
    plain = {
        (r['changes']['method.kind'], 'sharding.activation_checkpointing' in r['changes'])
        for r in rows}
    assert plain == {(kind, again) for kind in ('full', 'lora', 'qlora') for again in (False, True)}
    assert len({r['shape'] for r in rows}) == 2
    assert min(r['parameters'] for r in rows) >= 10**8
    assert all(
        abs(r['error']) < 1 and r['collectives_equal'] and r['in_order'] and r['flops_equal']
        for r in rows)


@pytest.mark.slow
def test_one_rank_alone_with_real_tensors_holds_what_was_rehearsed(tmp_path):
    made = recipe('brief', QLORA | SHORT | {'cluster.processes': 16}, tmp_path)
    assert abs(percent(rehearsed(made).peak_b, gpu_rows.measured(made)['peak_b'])) < 1


def test_what_no_gpu_measured_is_not_said():
    record = RECORDS['gpu_memory']
    planned = list(gpu_rows.gpu_recipes())
    far = [row for row in record['rows'] if row['device'] == 'cuda']
    assert [row['recipe'] for row in far] == [name for name, _, _ in planned]
    assert (
        {row['peak_b'] for row in far}
        == {row['driver_b'] for row in far}
        == {record['gpu']}
        == {'not measured'})
    assert len([name for name, _, _ in planned if name in dict(gpu_rows.NAMED)]) >= 3
    assert len(gpu_rows.PLAIN) >= 8
    assert {c['method.kind'] for _, _, c in gpu_rows.PLAIN} == {'full', 'lora', 'qlora'}
