"""What DDP sends in a rehearsal; `test_rehearsal_truth` asks two real ranks."""
import os

import pytest

os.environ['HF_HUB_OFFLINE'] = '1'

from bench.shared.small_rehearsals import AGAIN, FULL, recipe

from llm_workbook import rehearse

DDP = {'batch.length': 64, 'precision.compute': 'bfloat16', 'sharding.strategy': 'ddp'}
# Bytes of the buckets of `brief` on two real ranks, in their order
BUCKETS = {'again': [12_288_000, 31_762_944], 'kept': [31_762_944, 12_288_000]}


def summed(messages: list) -> list:
    which = 'backward', 'all_reduce'
    return [size_b for *what, size_b in messages if tuple(what) == which]


@pytest.mark.parametrize('name', BUCKETS)
def test_a_rehearsal_sends_the_buckets_of_real_ranks(name, tmp_path):
    changes = FULL | DDP | (AGAIN if name == 'again' else {})
    ours = rehearse(recipe('brief', changes, tmp_path))
    sent = summed([message[:3] for message in ours.messages])
    assert [size_b for size_b in sent if size_b > 1000] == BUCKETS[name]
