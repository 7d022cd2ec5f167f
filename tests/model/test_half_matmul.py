"""16-bit matrix products in float32: who gets them, that forks and FSDP keep them, and that
nothing but the products changes."""
import pytest
import torch

from llm_workbook import Recipe, load_base, rehearse, run_ranks, shard_model, shrink
from llm_workbook.config.recipe import Method
from llm_workbook.model import half_matmul
from llm_workbook.model.half_matmul import (
    slow_half_dtypes, torch_half_matmul, upcast_dtypes, upcast_half_matmul)


@pytest.fixture(autouse=True)
def restored():
    before = upcast_dtypes()
    upcast_half_matmul(())
    yield
    upcast_half_matmul(before)


def numbers(*shape): return torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 4


OPERATORS = {
    'mm': lambda a, b, c: torch.mm(a[0], b[0]),
    'addmm': lambda a, b, c: torch.addmm(c[0], a[0], b[0]),
    'addmm, scaled': lambda a, b, c: torch.addmm(c[0, 0], a[0], b[0], beta=0.5, alpha=2),
    'bmm': lambda a, b, c: torch.bmm(a, b),
    'baddbmm': lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
    'linear': lambda a, b, c: torch.nn.functional.linear(a, b[0].T.contiguous(), c[0, 0])}


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', OPERATORS)
def test_every_operator_gives_the_float32_product_rounded_once(name, dtype):
    operator = OPERATORS[name]
    operands = numbers(3, 40, 64), numbers(3, 64, 24), numbers(3, 40, 24)
    half = [tensor.to(dtype) for tensor in operands]
    wide = operator(*(tensor.float() for tensor in half))
    upcast_half_matmul(('bfloat16', 'float16'))
    assert torch.equal(operator(*half), wide.to(dtype))
    assert operator(*half).dtype == dtype
    assert torch.equal(operator(*(tensor.float() for tensor in half)), wide)


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ITS_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@pytest.mark.parametrize('padded', [False, True])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_the_backward_pass_of_attention_is_that_in_float32_rounded_once(dtype, padded):
    *inputs, slope = numbers(4, 2, 4, 96, 32).to(dtype)
    mask = torch.zeros(96, 96, dtype=dtype).masked_fill_(torch.arange(96) > 60, -torch.inf)
    options = {'attn_mask': mask} if padded else {}
    out, sums = ATTENTION(*inputs, 0.0, not padded, **options)
    tensors = slope, *inputs, out
    wide = ITS_BACKWARD(*(each.float() for each in tensors), sums, 0.0, not padded, **options)
    upcast_half_matmul(('bfloat16', 'float16'))
    made = ITS_BACKWARD(*tensors, sums, 0.0, not padded, **options)
    for one, other in zip(made, wide):
        assert one.dtype == dtype
        assert torch.equal(one, other.to(dtype))
        assert one.count_nonzero() > one.numel() / 2
    assert torch.equal(ATTENTION(*inputs, 0.0, not padded, **options)[0], out)  # As it was


def test_a_torch_without_this_operator_has_the_others(monkeypatch):
    monkeypatch.setattr(half_matmul, '_TENSORS', {'no_such_operator': 2, 'mm': 2})
    monkeypatch.setattr(half_matmul._Upcast, 'library', None)  # Registered anew, for this test
    assert upcast_half_matmul(('bfloat16',)) == ('bfloat16',)


def test_one_type_can_be_upcast_alone(monkeypatch):
    seen = []
    original = half_matmul._product

    def noting(kernel, tensors, keys, *args, **options):
        seen.append(args[0].dtype in half_matmul._Upcast.dtypes)
        return original(kernel, tensors, keys, *args, **options)
    monkeypatch.setattr(half_matmul, '_product', noting)
    monkeypatch.setattr(half_matmul._Upcast, 'library', None)  # Registered anew, for this test
    upcast_half_matmul(('bfloat16',))
    for dtype in torch.bfloat16, torch.float16, torch.float32:
        numbers(4, 4).to(dtype) @ numbers(4, 4).to(dtype)
    assert seen[:3] == [True, False, False]


@pytest.mark.parametrize('slow', [(), ('bfloat16',), ('bfloat16', 'float16')])
def test_a_base_on_the_cpu_brings_what_the_cpu_lacks(monkeypatch, slow):
    monkeypatch.setattr(half_matmul, 'slow_half_dtypes', lambda: slow)
    load_base('tiny-base', device='cpu')
    assert upcast_dtypes() == tuple(sorted(slow))


def test_a_build_of_torch_without_onednn_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(half_matmul, '_PROBES', {'bfloat16': '_no_such_probe'})
    assert slow_half_dtypes() == ()


def loss_of_a_step(upcast):
    "Train one step of a bfloat16 model that FSDP2 has sharded; give loss and norm of gradients."
    assert upcast_dtypes() == upcast  # A fork has what its parent had
    with torch_half_matmul():  # `load_base` would decide by this CPU
        model = load_base('tiny-base', Method(kind='lora'), device='cpu').requires_grad_()
    assert upcast_dtypes() == upcast
    shard_model(model.train())
    ids = torch.arange(2, 130).reshape(2, 64)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    norms = [p.grad.full_tensor().float().norm() for p in model.parameters()]
    return loss.item(), torch.stack(norms).norm().item()


def test_ranks_that_shard_train_alike_with_either_kind_of_kernel():
    results = []
    for upcast in (), ('bfloat16',):
        upcast_half_matmul(upcast)
        results.append(run_ranks(loss_of_a_step, 2, (upcast,), 120))
    for own, other in zip(*results):
        assert other == pytest.approx(own, rel=5e-3)


@pytest.mark.slow
def test_a_rehearsal_does_not_see_it():
    recipe = shrink(Recipe.named('reviews-qlora'))
    plain = rehearse(recipe)
    upcast_half_matmul(('bfloat16', 'float16'))
    again = rehearse(recipe)
    assert (again.peak_b, again.flops) == (plain.peak_b, plain.flops)
    assert len(again.messages) == len(plain.messages)
