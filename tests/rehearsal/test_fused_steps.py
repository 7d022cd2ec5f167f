"""Steps whose loss Liger's kernel scores: the plan against the rehearsal, and the rehearsal's
stand-in against Liger's own function, on tensors that have a GPU's device and no numbers."""
import importlib.util
from unittest.mock import patch

import pytest
from test_several_passes import AGAIN, apart_by
from trouble import slow_case

from llm_workbook.model import fused_head
from llm_workbook.rehearsal.gpu_kernels import _idle_scores, _IdleKernel, gpu_kernels
from llm_workbook.rehearsal.recorder import recorded

FUSED = {'batch.loss_head': 'fused', 'batch.micro': 2}
BF16 = {'precision.master': 'float32', 'optimizer.kind': 'sgd'}
FULL, LORA = {'method.kind': 'full'} | BF16, {'method.kind': 'lora'}


@pytest.mark.parametrize('shape', ['head', 'layers'])
@pytest.mark.parametrize('changes', [
    FULL, LORA | AGAIN, slow_case(FULL | AGAIN), slow_case(LORA),
    slow_case({'method.kind': 'qlora'} | AGAIN), slow_case(FULL | {'batch.accumulation': 2})],
    ids=str)
def test_its_step_is_planned(tmp_path, shape, changes):
    assert abs(apart_by(tmp_path, shape, False, FUSED | changes)) < 0.6


@pytest.mark.parametrize('strategy, shape, changes', [
    ('fsdp2', 'head', FULL), ('fsdp2', 'head', LORA), slow_case('ddp', 'head', FULL),
    slow_case('fsdp2', 'layers', FULL), slow_case('zero3', 'head', FULL)])
def test_so_it_is_of_two_ranks(tmp_path, strategy, shape, changes):
    sharded = {'sharding.strategy': strategy} | AGAIN
    assert abs(apart_by(tmp_path, shape, False, FUSED | changes | sharded, ranks=2)) < 0.6


def sizes(score) -> list:
    "Bytes that are there after each operation of scoring tokens, as they change; a frozen head."
    import torch
    with recorded(ranks=1, gpu=True) as recorder:
        hidden, weight = (torch.empty(n, 1024, dtype=torch.bfloat16) for n in (4096, 32_000))
        targets = torch.empty(4096, dtype=torch.int64)
        begin = len(recorder.events)
        kept = score((hidden, weight, None), targets, None, (True, False, False))
        there = recorder.alive_b()[begin:]
        assert kept.hidden.shape == hidden.shape
    large = [size_b // 2**20 for size_b in there]
    return [large[0], *[b for a, b in zip(large, large[1:]) if a != b]]


@pytest.mark.skipif(not importlib.util.find_spec('liger_kernel'), reason='liger-kernel is missing')
def test_the_stand_in_makes_what_the_function_of_liger_makes():
    "On its way for GPUs. With a head that trains it asks for the tensors' device, which is none."
    import torch
    from liger_kernel.ops import fused_linear_cross_entropy as liger
    with (
        patch.object(liger, 'liger_cross_entropy_kernel', _IdleKernel()),
        patch.object(liger, '_can_use_mm_out', lambda *tensors: True),
        patch.object(torch.Tensor, 'item', lambda tensor: 1),
    ):
        theirs = sizes(fused_head._run)
    ours = sizes(_idle_scores)
    assert max(ours) == max(theirs) == 86  # MiB: 62.5 of a head, three of hidden states
    assert ours[-1] == theirs[-1]


def test_nothing_is_left_replaced():
    from llm_workbook.model import loss_head
    with gpu_kernels(fused=True): assert loss_head.kernel_scores is not fused_head.kernel_scores
    assert loss_head.kernel_scores is fused_head.kernel_scores
