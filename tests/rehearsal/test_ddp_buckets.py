"""What DDP sends in a rehearsal, and what it sends on two real ranks."""
import os

import pytest

os.environ['HF_HUB_OFFLINE'] = '1'

from bench.lines.rehearsal_error import RealRanks
from bench.shared.small_rehearsals import AGAIN, FULL, percent, recipe

from llm_workbook import rehearse

SHORT = {'batch.length': 64, 'precision.compute': 'bfloat16', 'sharding.strategy': 'ddp'}
# Bytes of the buckets of `brief` on two real ranks, in their order
BUCKETS = {'again': [12_288_000, 31_762_944], 'kept': [31_762_944, 12_288_000]}


def summed(messages: list) -> list:
    which = 'backward', 'all_reduce'
    return [size_b for *what, size_b in messages if tuple(what) == which]


@pytest.mark.parametrize('name', BUCKETS)
def test_a_rehearsal_sends_the_buckets_of_real_ranks(name, tmp_path):
    changes = FULL | SHORT | (AGAIN if name == 'again' else {})
    ours = rehearse(recipe('brief', changes, tmp_path))
    sent = summed([message[:3] for message in ours.messages])
    assert [size_b for size_b in sent if size_b > 1000] == BUCKETS[name]


@pytest.mark.slow
def test_real_ranks_send_them_too(tmp_path):
    made = recipe('brief', FULL | SHORT | AGAIN, tmp_path)
    with RealRanks() as ranks: saw = ranks.measured(made)
    assert summed(saw['collectives']) == BUCKETS['again']
    ours = rehearse(made)
    assert abs(percent(ours.peak_b, saw['peak_b'])) < .1
    assert ours.flops == saw['flops']
