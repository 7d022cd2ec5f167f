"""The recorder and its fakes: nothing stays behind, nothing is remembered wrongly, and the blocks
are those of real tensors."""
import gc
import os
import threading
from collections import Counter
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from torch.utils.flop_counter import FlopCounterMode
from trouble import slow_case

from llm_workbook.model.architecture import configuration, skeleton
from llm_workbook.model.architecture import materialise
from llm_workbook.rehearsal.fake_tensors import (
    OperationMemo, fake_ranks, fake_tensors, watched_operations)
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.config.recipe import Sharding
from llm_workbook.parallel.shard import shard_model
from llm_workbook.rehearsal.recorder import recorded

SMALL = dict(configuration('tiny-base')[1], num_hidden_layers=2)
OPS = torch.ops.aten


@pytest.fixture(scope='module', autouse=True)
def imported():
    "Import once what every recorder needs, so that a later import is no difference."
    import accelerate, bitsandbytes, transformers  # noqa: E401, F401
    torch.set_num_threads(1)


def counter_of_torch():
    "Without the attention of CPUs, which torch counts since 2.15, and a recorder never."
    aten = torch.ops.aten
    attention = (aten._scaled_dot_product_flash_attention_for_cpu,
                 aten._scaled_dot_product_flash_attention_for_cpu_backward)
    return FlopCounterMode(display=False, custom_mapping=dict.fromkeys(attention, no_flops))


def no_flops(*args, **kwargs): return 0


def small(): return materialise(skeleton(SMALL, 'tiny-base'), torch.float32)


def program(recorder=None, checkpointing='none', steps=2):
    model = shard_model(small(), Sharding(activation_checkpointing=checkpointing))
    optimizer = torch.optim.AdamW(model.parameters())
    if recorder: recorder.watch(model, optimizer)
    ids = torch.ones(2, 32, dtype=torch.long)
    for _ in range(steps):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
    return [(tuple(p.to_local().shape), p.to_local().nbytes) for p in model.parameters()]


def heights(recorder):
    change = Counter({0: 0})
    for block in recorder.blocks:
        change[max(block.born, 0)] += block.size_b
        if block.died is not None: change[block.died + 1] -= block.size_b
    return list(accumulate(change[i] for i in range(len(recorder.events))))


def described(recorder):
    return Counter(
        (b.size_b, b.kind, b.phase, b.where, b.op, b.shape, b.host) for b in recorder.blocks)


# Nothing stays behind

def state():
    "What a recorder changes, as it is now."
    import torch.optim.optimizer as optimizer
    import torch.utils._foreach_utils as utils
    import transformers.masking_utils as masks
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed import device_mesh
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor import _sharding_prop as prop
    from torch.nn.modules import module
    from torch.utils._python_dispatch import _len_torch_dispatch_stack

    owners = [
        optimizer, utils, masks, PartialState, FakeTensor, device_mesh, device_mesh.DeviceMesh,
        _fsdp_param, prop, prop.ShardingPropagator, torch.UntypedStorage, torch.Tensor, torch.utils]
    hooks = [
        len(hooks)
        for hooks in (
            module._global_forward_hooks, module._global_forward_pre_hooks,
            optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)]
    return (
        [dict(vars(owner)) for owner in owners], hooks, dict(os.environ), dist.is_initialized(),
        gc.isenabled(), _len_torch_dispatch_stack(),
        [dict(s._shared_state) for s in (PartialState, AcceleratorState, GradientState)])


@pytest.mark.parametrize('real', [False, True])
def test_a_recorder_leaves_nothing_behind(real):
    # Torch fills caches of its own the first time
    with recorded(gpu=True, real=real) as recorder: program(recorder, steps=1)
    before = state()
    with recorded(gpu=True, real=real) as recorder:
        os.environ['LLMW_TEST'] = 'x'
        program(recorder, steps=1)
    assert state() == before


@pytest.mark.parametrize('error', [KeyError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_recorder_that_fails_leaves_nothing_behind_and_its_error_is_the_programs(error):
    before = state()
    class Failing(torch.nn.Module):
        def forward(self, x): raise error('of the program')
    with pytest.raises(error, match='of the program'):
        with recorded() as recorder:
            torch.nn.Sequential(torch.nn.Linear(2, 2), Failing())(torch.ones(2, 2))
    assert state() == before
    assert not recorder.memory.alive


def test_an_error_in_the_backward_pass_keeps_its_type():
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x * 2

        @staticmethod
        def backward(ctx, grad): raise LookupError('in the backward pass')
    before = state()
    with pytest.raises(LookupError, match='in the backward pass'):
        with recorded(): Odd.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert state() == before


def test_a_module_whose_error_is_caught_is_left():
    layer = torch.nn.Linear(2, 2)
    with recorded() as recorder:
        recorder.watch(torch.nn.ModuleDict({'layer': layer}))
        with pytest.raises(RuntimeError): layer(torch.ones(1, 3))
        torch.ones(7)
    assert recorder.events[-1].where == ''
    assert recorder.modules.stack == ['']


def test_what_accelerate_knew_it_knows_again():
    from accelerate import PartialState
    PartialState._reset_state()
    mine = PartialState(cpu=True)
    with recorded(ranks=8): assert PartialState(cpu=True).num_processes == 8
    assert PartialState().num_processes == 1
    assert mine.initialized
    PartialState._reset_state()


def test_a_recorder_within_a_recorder_or_a_group_is_refused():
    with recorded(ranks=3):
        with pytest.raises(ValueError, match='one of 3 ranks already'): recorded().__enter__()
        assert dist.get_world_size() == 3
    with fake_ranks(2), pytest.raises(ValueError, match='one of 2 ranks already'):
        recorded().__enter__()


def test_what_lives_on_after_the_recorder_changes_no_block():
    with recorded() as recorder: kept = torch.ones(1000)
    before = [(b.size_b, b.died) for b in recorder.blocks]
    del kept
    assert [(b.size_b, b.died) for b in recorder.blocks] == before == [(4000, None)]


# Memory of shapes

def cases():
    "Operations of all kinds, as functions of fresh arguments; each is called twice."
    def t(*shape, dtype=torch.float32): return torch.ones(shape, dtype=dtype)
    i, b, h = torch.int64, torch.bool, torch.bfloat16
    return {
        'add': lambda: OPS.add.Tensor(t(2, 3), t(3)),
        'promotion': lambda: OPS.add.Tensor(t(2, dtype=h), t(2)),
        'scalar tensor': lambda: OPS.mul.Tensor(t(2, dtype=h), t()),
        'alpha': lambda: OPS.add.Tensor(t(2), t(2), alpha=2),
        'by 1': lambda: OPS.mul.Scalar(t(3, dtype=i), 1),
        'by 1.0': lambda: OPS.mul.Scalar(t(3, dtype=i), 1.0),
        'by True': lambda: OPS.mul.Scalar(t(3, dtype=b), True),
        'bool by 1': lambda: OPS.mul.Scalar(t(3, dtype=b), 1),
        'bool by 1.0': lambda: OPS.mul.Scalar(t(3, dtype=b), 1.0),
        'mm': lambda: OPS.mm.default(t(4, 5), t(5, 6)),
        'mm of a view': lambda: OPS.mm.default(t(4, 5), OPS.t.default(t(6, 5))),
        'bmm': lambda: OPS.bmm.default(t(2, 3, 4), t(2, 4, 5)),
        'addmm': lambda: OPS.addmm.default(t(6), t(4, 5), t(5, 6)),
        't': lambda: OPS.t.default(t(4, 5)),
        'transpose': lambda: OPS.transpose.int(t(2, 3, 4), 0, 2),
        'view': lambda: OPS.view.default(t(4, 6), [2, 12]),
        'view of a type': lambda: OPS.view.dtype(t(4), torch.int16),
        'slice': lambda: OPS.slice.Tensor(t(9, 2), 0, 2, 7, 2),
        'view of a slice': lambda: OPS.slice.Tensor(OPS.slice.Tensor(t(9, 2), 0, 2, 7), 0, 1, 3),
        'select': lambda: OPS.select.int(t(3, 4), 0, 1),
        'expand': lambda: OPS.expand.default(t(1, 4), [3, 4]),
        'permute': lambda: OPS.permute.default(t(2, 3, 4), [2, 0, 1]),
        'as_strided': lambda: OPS.as_strided.default(t(12), [2, 3], [3, 1], 2),
        'split': lambda: OPS.split.Tensor(t(7, 2), 3), 'unbind': lambda: OPS.unbind.int(t(3, 2)),
        'detach': lambda: OPS.detach.default(t(3)), 'alias': lambda: OPS.alias.default(t(3)),
        'unsqueeze': lambda: OPS.unsqueeze.default(t(3), 0),
        'in place': lambda: OPS.add_.Tensor(t(3), t(3)),
        'copy_': lambda: OPS.copy_.default(t(3), t(3, dtype=h)),
        'zero_': lambda: OPS.zero_.default(t(3)),
        'in place on a view': lambda: OPS.mul_.Scalar(OPS.t.default(t(3, 4)), 2),
        'to': lambda: OPS._to_copy.default(t(2, 3), dtype=h),
        'clone': lambda: OPS.clone.default(OPS.t.default(t(2, 3))),
        'clone to rows': lambda: OPS.clone.default(
            OPS.t.default(t(2, 3)), memory_format=torch.contiguous_format),
        'empty': lambda: OPS.empty.memory_format([3, 2]),
        'empty of nothing': lambda: OPS.empty.memory_format([0, 2]),
        'zeros': lambda: OPS.zeros.default([3], dtype=h),
        'empty_like': lambda: OPS.empty_like.default(OPS.t.default(t(2, 3))),
        'new_empty': lambda: OPS.new_empty.default(t(2), [4, 4]),
        'arange': lambda: OPS.arange.default(7), 'cat': lambda: OPS.cat.default([t(2, 3), t(4, 3)]),
        'cat of types': lambda: OPS.cat.default([t(2, dtype=h), t(2)]),
        'stack': lambda: OPS.stack.default([t(2), t(2)]),
        'cat into nothing': lambda: OPS.cat.out([t(50), t(50)], out=torch.empty(0)),
        'sum': lambda: OPS.sum.dim_IntList(t(3, 4), [0], True),
        'max of a row': lambda: OPS.max.dim(t(3, 4), 1),
        'topk': lambda: OPS.topk.default(t(3, 9), 2), 'sort': lambda: OPS.sort.default(t(5)),
        'softmax': lambda: OPS._softmax.default(t(3, 4), -1, False),
        'gelu': lambda: OPS.gelu.default(t(3)), 'gt': lambda: OPS.gt.Scalar(t(3), 0),
        'layer norm': lambda: OPS.native_layer_norm.default(t(2, 3), [3], t(3), t(3), 1e-5),
        'embedding': lambda: OPS.embedding.default(t(9, 4), t(2, 3, dtype=i)),
        'dropout': lambda: OPS.native_dropout.default(t(3, 4), 0.5, True),
        'index': lambda: OPS.index.Tensor(t(5, 4), [t(3, dtype=i)]),
        'lists': lambda: OPS._foreach_add.List([t(2), t(3)], [t(2), t(3)]),
        'lists in place': lambda: OPS._foreach_mul_.Scalar([t(2), t(3)], 2.0),
        'norms': lambda: OPS._foreach_norm.Scalar([t(2), t(3, dtype=h)], 2),
        'where': lambda: OPS.where.self(t(3, dtype=b), t(3), t(3, dtype=h)),
        'attention': lambda: OPS._scaled_dot_product_flash_attention_for_cpu.default(
            *(t(1, 2, 8, 4) for _ in 'qkv'), 0.0, True),
        'sides of one memory': lambda: OPS.add.Tensor(*OPS.split.Tensor(t(4), 2))}


def facts(out, given):
    "All that a result shows: shapes, places, memory, and which memory it shares."
    if isinstance(out, (tuple, list)): return type(out), [facts(part, given) for part in out]
    if not isinstance(out, torch.Tensor): return type(out), out
    store = out.untyped_storage()
    return (
        tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, out.device, store.nbytes(),
        out.requires_grad, out.is_contiguous(), [i for i, t in enumerate(given) if t is out],
        [i for i, t in enumerate(given) if t.untyped_storage() is store])


def tell(kept):
    def see(func, args, kwargs, out):
        given = [
            t
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)]
        kept.append((str(func), facts(out, given), [facts(t, given) for t in given]))
    return see


@pytest.mark.parametrize('name', cases())
def test_memory_gives_what_torch_gives(name):
    case, without, first, second, real = cases()[name], [], [], [], []
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tell(without)(func, args, kwargs or {}, out)
            return out
    with FakeTensorMode(), Seeing(): case()
    kept = first
    with fake_tensors(lambda *operation: tell(kept)(*operation)):
        case()
        kept = second
        case()
    with watched_operations(tell(real)): case()
    def plain(rows): return [row for row in rows if row[0] != 'prim.device.default']
    assert plain(without) == first == second
    if name not in ('attention', 'layer norm', 'dropout'): assert first == real


def test_what_was_seen_is_not_worked_out_again():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode() as mode:
        memo = OperationMemo(mode)
        x = torch.ones(4, 4)
        outs = [memo(OPS.mm.default, (x, x), {}) for _ in range(5)]
    assert len(memo.results) == 1
    assert len({id(out.untyped_storage()) for out in outs}) == 5


def test_the_default_type_is_part_of_the_key():
    before = torch.get_default_dtype()
    try:
        with fake_tensors():
            types = []
            for dtype in (torch.float32, torch.bfloat16, torch.float32):
                torch.set_default_dtype(dtype)
                types.append((torch.zeros(3).dtype, (torch.ones(3, dtype=torch.int64) / 2).dtype))
    finally: torch.set_default_dtype(before)
    assert types == [(d, d) for d in (torch.float32, torch.bfloat16, torch.float32)]


def test_complex_sparse_and_known_tensors_are_not_remembered():
    with fake_tensors():
        z = torch.zeros(3, dtype=torch.complex64)
        assert z.conj().is_conj()
        assert z.conj().is_conj()
        assert not z.conj().resolve_conj().is_conj()
        assert [torch.tensor(n).item() for n in (3, 4)] == [3, 4]
        total = torch.tensor(2.)
        total += 3
        assert total.item() == 5
        sparse = torch.sparse_coo_tensor(
            torch.zeros(2, 3, dtype=torch.long), torch.ones(3), (4, 4), check_invariants=False)
        assert [(sparse * 2).layout for _ in range(2)] == [torch.sparse_coo] * 2


def test_a_mask_chooses_all():
    with fake_tensors():
        x = torch.ones(3, 4, 5)
        rows = torch.ones(3, dtype=torch.bool)
        each = torch.ones(3, 4, dtype=torch.bool)
        assert [tuple(x[mask].shape) for mask in (rows, each)] == [(3, 4, 5), (12, 5)]


def test_real_numbers_inside_fakes_are_their_own():
    real = torch.tensor(7.)
    with fake_tensors(): assert real.item() == 7


# Blocks

@pytest.mark.parametrize('checkpointing', ['none', 'full'])
@pytest.mark.parametrize('gpu', [False, True])
def test_blocks_are_those_of_real_tensors(checkpointing, gpu):
    with recorded(gpu=gpu) as fake: program(fake, checkpointing)
    with recorded(gpu=gpu, real=True) as real: program(real, checkpointing)
    mesh = described(real) - described(fake)  # Made outside the fake mode
    assert not described(fake) - described(real)
    assert [key[4] for key in mesh.elements()] == ['arange', 'eq', 'nonzero']
    assert max(heights(real)) - max(heights(fake)) in (8, 512)
    assert [m[1:] for m in fake.messages] == [m[1:] for m in real.messages]
    assert sum(e.flops for e in fake.events) == sum(e.flops for e in real.events)
    if gpu: assert not any(b.size_b % 512 for b in fake.blocks)


def counted():
    calls = []
    def see(func, args, kwargs, out):
        calls.append(func._overloadpacket.__name__) if 'c10d' in func.namespace else None
    with watched_operations(see), counter_of_torch() as counter: held = program()
    return (
        [c for c in calls if 'wrap' not in c and c != 'wait_tensor'], counter.get_total_flops(),
        held)


@pytest.mark.parametrize('ranks', [slow_case(2), 3])
@pytest.mark.slow
def test_every_rank_is_as_it_really_is(ranks):
    "With 3 ranks, 1,262 and 256 rows do not divide: the last rank holds fewer."
    for rank, (calls, flops, held) in enumerate(run_ranks(counted, ranks, timeout_s=120)):
        with recorded(ranks, rank) as recorder: assert program(recorder) == held
        assert [recorder.events[m.event].op for m in recorder.messages] == calls
        assert {m.ranks for m in recorder.messages} == {ranks}
        if ranks == 2: assert sum(e.flops for e in recorder.events) == flops


def test_two_recorders_give_the_same():
    def blocks():
        with recorded() as recorder: program(recorder, 'full')
        return (
            [(b.size_b, b.born, b.died, b.kind, b.where, b.op) for b in recorder.blocks],
            recorder.events, recorder.messages)

    first = blocks()
    # Moves the moments of Python's own collections
    rubbish = [[[] for _ in range(10)] for _ in range(3000)]
    assert blocks() == first
    assert rubbish


def test_unreachable_cycles_go_at_fixed_operations():
    def died(warm):
        with recorded() as recorder:
            [[] for _ in range(warm)]
            ring = [torch.ones(123)]
            ring.append(ring)
            del ring
            for _ in range(2500): torch.ones(1)
        return next(b.died for b in recorder.blocks if b.size_b == 492)
    assert {died(warm) for warm in (0, 333, 5000)} == {999}


def test_gathered_weights_come_and_go():
    with recorded() as recorder: program(recorder, steps=1)
    fillings = [
        b for b in recorder.blocks if b.kind == 'unsharded' and b.op == 'resize_' and b.size_b]
    assert fillings
    assert all(b.died is not None for b in fillings)
    layers = [
        m
        for m in recorder.messages
        if m.kind == 'all_gather' and m.where.startswith('model.layers')]
    assert len(layers) >= 3  # Two layers, and again in the backward pass


def test_memory_that_an_operation_resizes():
    for real in (False, True):
        with recorded(real=real) as recorder:
            for _ in range(2): torch.cat([torch.ones(50), torch.ones(50)], out=torch.empty(0))
        assert [b.size_b for b in recorder.blocks if b.op == 'resize_'] == [400, 400]


def test_views_types_and_data_are_one_block_each():
    with recorded() as recorder:
        x = torch.zeros(1000)
        views = x.view(torch.int32), x[5:], x.view(10, 100).T  # noqa: F841
        assert len(recorder.blocks) == 1
        p = torch.nn.Parameter(torch.zeros(2000))
        p.data = torch.zeros(3000)
        torch.zeros(1)
    assert [b.size_b for b in recorder.blocks if b.died is None] == [4000, 12000]


def test_an_address_used_again_is_another_block():
    with recorded() as recorder:
        for n in range(50): torch.zeros(n + 1)
    assert [b.size_b for b in recorder.blocks] == [4 * (n + 1) for n in range(50)]
    assert all(b.died == b.born for b in recorder.blocks[:-1])


@pytest.mark.parametrize('real', [False, True])
def test_sparse_gradients_and_no_result(real):
    """torch's fake copy of a sparse tensor has no values, so there the gradient that stays is not
    seen."""
    with recorded(real=real) as recorder:
        table = torch.nn.Embedding(50, 8, sparse=True)
        table(torch.ones(4, dtype=torch.long)).square().sum().backward()
        torch._foreach_add_([torch.zeros(2)], 1.0)
    kept = [b.shape for b in recorder.blocks if b.died is None]
    assert kept == [(50, 8), (1, 4), (4, 8)] if real else (50, 8) in kept


def test_a_hook_that_keeps_a_gradient_keeps_its_block():
    kept = []
    with recorded() as recorder:
        x = torch.ones(777, requires_grad=True)
        y = x * 2
        y.register_hook(kept.append)
        y.sum().backward()
        size = [b for b in recorder.blocks if b.size_b == 777 * 4]
    assert kept
    assert sum(b.died is None for b in size) >= 3


# Attribution

def test_the_backward_pass_of_a_cpu_runs_on_the_thread_that_called_it():
    threads = set()
    class Tell(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x * 2

        @staticmethod
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            return torch.sin(grad)
    with recorded() as recorder: Tell.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert threads == {threading.get_ident()}
    # The mode is active there
    assert any(e.op == 'sin' and e.phase == 'backward' for e in recorder.events)


@pytest.mark.parametrize('checkpointing', ['none', 'full'])
def test_the_backward_pass_is_given_to_its_modules(checkpointing):
    with recorded() as recorder: program(recorder, checkpointing, steps=1)
    by = {phase: Counter() for phase in ('forward', 'backward')}
    for event in recorder.events:
        if event.flops: by[event.phase][event.where] += event.flops
    layers = {name for name in by['forward'] if '.layers.' in name}
    assert len(layers) == 14
    again = 3 if checkpointing == 'full' else 2
    # What comes last need not be run again
    def early(name): return checkpointing == 'full' and name.endswith('down_proj')
    assert all(
        by['backward'][name] == (2 if early(name) else again) * by['forward'][name]
        for name in layers)
    assert by['backward']['lm_head'] == 2 * by['forward']['lm_head']


def test_added_gradients_belong_to_the_module_that_made_them():
    layer, model = torch.nn.Linear(3, 3, bias=False), None
    with recorded() as recorder:
        model = torch.nn.ModuleDict({'layer': materialise(layer)})
        recorder.watch(model)
        for _ in range(2): model['layer'](torch.ones(2, 3)).sum().backward()
    adds = [e for e in recorder.events if e.op == 'add_' and e.phase == 'backward']
    assert adds
    assert {e.where for e in adds} == {'layer'}


def test_inference_mode_is_counted_as_torch_counts_it():
    model = small()
    ids = torch.ones(1, 16, dtype=torch.long)
    with torch.inference_mode(), counter_of_torch() as counter:
        model(ids, use_cache=False)
    with recorded() as recorder:
        model = small()
        ids = torch.ones(1, 16, dtype=torch.long)
        with torch.inference_mode(): model(ids, use_cache=False)
    assert sum(e.flops for e in recorder.events) == counter.get_total_flops() > 0
    assert 'linear' not in {e.op for e in recorder.events}


def test_messages_know_their_group():
    from torch.distributed._functional_collectives import all_reduce
    with recorded(ranks=8) as recorder:
        pair = dist.new_group([0, 1])
        all_reduce(torch.zeros(5), 'sum', pair) + 1
        dist.all_reduce(torch.zeros(6), group=pair)
        dist.all_to_all_single(torch.zeros(8), torch.zeros(8))
    sent = [(m.kind, m.size_b, m.ranks) for m in recorder.messages]
    assert sent == [('all_reduce', 20, 2), ('all_reduce', 24, 2), ('all_to_all', 32, 8)]


def test_rows_of_several_examples_get_a_mask():
    def made(packed):
        with recorded(packed=packed) as recorder:
            model = small()
            ids = torch.ones(1, 64, dtype=torch.long)
            start = len(recorder.blocks)
            model(ids, position_ids=torch.arange(64)[None], use_cache=False)
        return sum(b.size_b for b in recorder.blocks[start:])
    assert made(True) >= made(False) + 64 * 64


def test_parts_of_a_parameter_are_those_of_torch():
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    whole = _fsdp_param._chunk_with_empty
    for rows in (1, 2, 5, 8, 16, 17):
        real = [tuple(part.shape) for part in whole(torch.ones(rows, 3), 8, dim=0)]
        with fake_tensors():
            parts = _fsdp_param._chunk_with_empty(torch.ones(rows, 3), 8, dim=0)
            assert [tuple(parts[rank].shape) for rank in range(8)] == real
