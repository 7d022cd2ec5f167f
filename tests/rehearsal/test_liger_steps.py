"""Steps whose norms and gates are Liger's: the plan against the rehearsal, and the rehearsal's
stand-ins against Liger's own functions, on tensors without numbers."""
import importlib.util
from contextlib import ExitStack
from itertools import accumulate
from unittest.mock import patch

import pytest
from bench.gpu.place import recipe_folder
from bench.shared.gpu_rows import plain_recipe
from test_several_passes import AGAIN, SHAPES, apart_by
from trouble import slow_case

from llm_workbook import memory, rehearse
from llm_workbook.rehearsal.gpu_kernels import _idle_functions, _IdleKernel, gpu_kernels
from llm_workbook.rehearsal.recorder import recorded

LIGER = {'model.kernels': 'liger', 'batch.micro': 2}
FULL = {'method.kind': 'full', 'precision.master': 'float32', 'optimizer.kind': 'sgd'}
LORA = {'method.kind': 'lora'}


@pytest.mark.parametrize('shape', ['layers', slow_case('head')])
@pytest.mark.parametrize('changes', [
    FULL, slow_case(LORA), slow_case(FULL | AGAIN), slow_case(LORA | AGAIN),
    slow_case(LORA | {'sharding.activation_checkpointing': 'selective'}),
    slow_case({'method.kind': 'qlora'}), slow_case(FULL | {'batch.accumulation': 2}),
    slow_case(LORA | {'batch.loss_head': 'fused'})], ids=str)
def test_its_step_is_planned(tmp_path, shape, changes):
    assert abs(apart_by(tmp_path, shape, False, LIGER | changes)) < 0.6


@pytest.mark.parametrize('strategy, changes', [
    ('fsdp2', LORA), slow_case('ddp', FULL), slow_case('zero3', FULL), slow_case('fsdp2', FULL)])
def test_so_it_is_of_two_ranks(tmp_path, strategy, changes):
    sharded = {'sharding.strategy': strategy}
    assert abs(apart_by(tmp_path, 'layers', False, LIGER | changes | sharded, ranks=2)) < 0.6


@pytest.mark.parametrize('kind, more', [
    ('phi3', {}), slow_case('qwen3', {}), slow_case('mistral', {}),
    slow_case('gemma2', {'hidden_act': 'gelu_pytorch_tanh', 'head_dim': 128})])
def test_so_it_is_of_families(tmp_path, kind, more):
    "Gate and up in one weight, norms of queries and keys, norms around a branch."
    fields = SHAPES['layers'] | {'model_type': kind, 'pad_token_id': 0} | more
    attention = 'eager' if kind == 'gemma2' else 'sdpa'
    made = plain_recipe(recipe_folder(str(tmp_path), fields), 1, LIGER | LORA | {
        'batch.length': 1024, 'cluster.hardware': '1x-h100', 'model.attention': attention})
    planned_b = memory(made).total('step', 'gpu', 'allocated')
    assert abs(100 * (planned_b / rehearse(made).peak_b - 1)) < 0.6


@pytest.mark.slow
def test_it_takes_less_than_plain_layers(tmp_path):
    "A norm keeps no copy in float32, and a gate not what its activation made."
    made = plain_recipe(recipe_folder(str(tmp_path), SHAPES['layers']), 1, LORA | {
        'batch.length': 1024, 'cluster.hardware': '1x-h100', 'batch.micro': 2})
    liger, plain = (rehearse(made.changed({'model.kernels': kernels})).peak_b
                    for kernels in ('liger', 'plain'))
    assert plain - liger > 90 * 2**20


# The stand-ins

def instants(norm, gate) -> list:
    "Bytes after each operation of a norm and a gate, forward and back."
    import torch
    with recorded(ranks=1) as recorder:
        def drawn(*shape): return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        x, weight, up = drawn(2, 512, 256), drawn(256), drawn(2, 512, 256)
        begin = len(recorder.events)
        out = gate(norm(x, weight), up)
        out.backward(torch.empty_like(out))
        sizes = recorder.alive_b()[begin - 1:]
    changes = [b - a for a, b in zip(sizes, sizes[1:]) if b != a]
    return [size_b for size_b in changes if abs(size_b) > 1024]


@pytest.mark.skipif(not importlib.util.find_spec('liger_kernel'), reason='liger-kernel is missing')
@pytest.mark.parametrize('over', [True, False])
def test_the_stand_ins_make_what_the_functions_of_liger_make(over):
    from liger_kernel.ops import rms_norm, swiglu
    idle_norm, idle_gate = _idle_functions()
    ours = instants(lambda x, weight: idle_norm.apply(x, weight, over), idle_gate.apply)
    with ExitStack() as stack:
        for module in (rms_norm, swiglu):
            for name in vars(module):
                if name.endswith(('_kernel', '_kernel_tiled')):
                    stack.enter_context(patch.object(module, name, _IdleKernel()))
        norm, more = rms_norm.LigerRMSNormFunction, (1e-6, 0., 'llama', over)
        theirs = instants(lambda x, weight: norm.apply(x, weight, *more),
                          swiglu.LigerSiLUMulFunction.apply)
    assert sum(ours) == pytest.approx(sum(theirs), abs=2048)
    assert max(accumulate(ours)) == pytest.approx(max(accumulate(theirs)), abs=2048)
    assert len(ours) >= 4


def test_nothing_is_left_replaced():
    from llm_workbook.model import liger_layers
    usual = liger_layers._replace
    with gpu_kernels(layers=True): assert liger_layers._replace is not usual
    assert liger_layers._replace is usual
