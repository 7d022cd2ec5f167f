"""DeepSpeed's engine on fake tensors: against DeepSpeed on real ranks, and against the ledger."""
import os

import pytest

os.environ['HF_HUB_OFFLINE'] = '1'

from bench.lines.rehearsal_error import real
from bench.shared.small_rehearsals import AGAIN, FULL, LORA, QLORA, percent, recipe
from trouble import slow_case

from llm_workbook import Recipe, rehearse
from llm_workbook.plan.ledger import memory

SHORT = {'batch.length': 64, 'precision.compute': 'bfloat16'}
BUCKETS = {'zero.reduce_bucket': 3_000_000, 'zero.prefetch_bucket': 1_000_000}


def zero(stage, **more): return {'sharding.strategy': f'zero{stage}'} | BUCKETS | more


AWAY = {'sharding.offload_optimizer': 'cpu'}
WAYS = {
    'zero1, full': FULL | zero(1),
    'zero2, full': FULL | zero(2),
    'zero3, full': FULL | zero(3),
    'zero2, lora': LORA | zero(2) | AGAIN,
    'zero3, lora': LORA | zero(3),
    'zero2, qlora': QLORA | zero(2) | AGAIN,
    'zero3, qlora': QLORA | zero(3) | AGAIN,
    'zero1, accumulated': FULL | zero(1) | {'batch.accumulation': 2},
    'zero3, accumulated': FULL | zero(3) | {'batch.accumulation': 2},
    'zero2, offloaded': FULL | zero(2) | AWAY,
    'zero3, offloaded': FULL | zero(3) | AWAY | {'sharding.offload_parameters': 'cpu'},
    'zero2, one buffer': FULL | zero(2) | {'zero.overlap': False},
    'zero3, four ranks': FULL | zero(3) | {'cluster.processes': 4},
}


def in_all_b(rehearsal):
    "Most bytes on the GPU and in host memory together: on CPU ranks both are the same memory."
    return max(span.size_b + span.host_b for span in rehearsal.timeline.spans)


@pytest.mark.parametrize('name', [
    name if name == 'zero2, full' else slow_case(name) for name in WAYS])
def test_the_engine_does_on_fake_tensors_what_it_does_on_ranks(name, tmp_path):
    made = recipe('quick', WAYS[name] | SHORT, tmp_path)
    saw = real(made)
    ours = rehearse(made)
    assert abs(percent(in_all_b(ours), saw['peak_b'])) < 1
    assert [tuple(message) for message in saw['collectives']] == [
        ('backward' * (phase == 'backward'), kind, size) for phase, kind, size, _ in ours.messages]
    assert ours.flops == saw['flops']
