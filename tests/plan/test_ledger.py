"""The ledger: what each rank holds, against torch and bitsandbytes; phases, places and verdicts,
against arithmetic."""
import json
import math
import os
from unittest.mock import patch

import pytest

os.environ['HF_HUB_OFFLINE'] = '1'

from bench.lines import step_peak_error
from bench.record import ROOT
from trouble import slow_case

from llm_workbook.plan.step_memory import instant_lines, working_lines
from llm_workbook.plan.lines import KINDS
from llm_workbook.plan.model_states import (
    count_of, rank_of, resident_lines, tensors_of, whole_states)
from llm_workbook.plan.parameter_groups import bucket_fills, trained_tensors
from llm_workbook.plan import ledger
from llm_workbook.plan.ledger import memory
from llm_workbook.model.spec import spec
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.config.recipe import Method, Precision, Recipe, recipe_names
from llm_workbook.training.rank_run import KEPT_CHECKPOINTS

BASE = Recipe(name='tests', model={'source': 'tiny-base'}, data={'source': 'sample-conversations'})
TINY = spec('tiny-base')
STRATEGIES = ['fsdp2', 'fsdp1', 'zero1', 'zero2', 'zero3', 'ddp']


def lines(changes: dict, rank: int = 0, instant: str = 'optimizer') -> list:
    return [
        x
        for x in resident_lines(rank_of(BASE.changed(changes), TINY, rank), TINY)
        if x.instant in ('', instant)]


def size(found: list, *kinds: str) -> int: return sum(x.size_b for x in found if x.kind in kinds)


def every(strategy: str, method: str) -> dict:
    "A recipe for `method` under `strategy` on 3 ranks that no rule refuses."
    changes = {'method.kind': method, 'sharding.strategy': strategy, 'cluster.processes': 3}
    if strategy == 'fsdp1' and method != 'full': changes['precision.master'] = 'bfloat16'
    if strategy.startswith('zero') and method == 'qlora': changes['method.storage'] = 'uint8'
    return changes


# What a rank holds

@pytest.mark.parametrize('ranks', [1, 2, 3, 4, 7, 16])
def test_rows_are_those_of_torch_chunk(ranks):
    import torch
    full = tensors_of(TINY, Method(kind='full')).trained
    for number in range(ranks):
        share = rank_of(
            BASE.changed({'method.kind': 'full', 'cluster.processes': ranks}), TINY, number
        ).part(full)
        for whole, part in zip(full, share):
            chunks = torch.empty(whole.shape, device='meta').chunk(ranks)
            assert part.shape == (
                tuple(chunks[number].shape) if number < len(chunks) else (0, *whole.shape[1:]))


@pytest.mark.parametrize('method', ['full', 'lora', 'qlora'])
@pytest.mark.parametrize('strategy', STRATEGIES)
def test_every_exact_formula_gives_its_bytes(strategy, method):
    for rank in range(3):
        for x in resident_lines(rank_of(BASE.changed(every(strategy, method)), TINY, rank), TINY):
            assert eval(x.formula, {'ceil': math.ceil}, x.symbols) == x.size_b, x
            assert x.size_b >= 0
            assert type(x.size_b) is int
            assert x.kind in KINDS
            assert x.source
            assert x.sure in ('exact', 'model', 'cited')


@pytest.mark.parametrize('method', ['full', 'lora', 'qlora'])
def test_ranks_of_fsdp2_hold_the_model_together(method):
    alone = lines({'method.kind': method, 'sharding.strategy': 'none', 'cluster.processes': 1})
    parts = [lines(every('fsdp2', method), rank) for rank in range(3)]
    for kind in ('weights', 'payload', 'adapters', 'optimizer', 'gradients'):
        assert sum(size(part, kind) for part in parts) == size(alone, kind)
    assert all(size(part, 'absmax') == size(alone, 'absmax') for part in parts)
    stored = [
        size(part, 'weights', 'payload', 'adapters')
        + sum(x.size_b for x in part if x.pads and x.pads != 'gradients')
        for part in parts]
    assert len(set(stored)) == 1, 'every rank stores as much as the first'


@pytest.mark.parametrize(
    'method',
    [Method(), Method(double_quant=False), Method(storage='uint8'), Method(storage='float32')])
def test_packed_bytes_are_those_of_bitsandbytes(method):
    from llm_workbook.model.quantize import load_nf4, payload_bytes
    real = payload_bytes(load_nf4('tiny-base', method, device='cpu'))
    t = tensors_of(TINY, method)
    item = {'uint8': 1, 'float32': 4}.get(method.storage, 2)
    assert item * count_of(tuple(x for x in t.frozen if x.kind == 'payload')) == real['payload']
    assert t.absmax[0] == real['absmax']
    assert 2 * count_of(tuple(x for x in t.frozen if x.kind == 'weights')) == real['other']


def test_a_group_shares_one_copy_and_no_more():
    hybrid = {'method.kind': 'full', 'cluster.processes': 4, 'sharding.group': 2}
    for rank in range(4):
        assert size(lines(hybrid, rank), 'weights', 'optimizer') == size(
            lines(hybrid | {'cluster.processes': 2, 'sharding.group': None}, rank % 2), 'weights',
            'optimizer')


def test_zero_partitions_are_deepspeeds():
    "Each group of the optimizer is rounded up by itself: matrices decay, norms do not."
    norms = sum(u.count * w.numel for u in TINY.units for w in u.weights if w.kind == 'norm')
    for ranks in (2, 3, 5):
        full = {'method.kind': 'full', 'cluster.processes': ranks}
        padded = sum(
            math.ceil(n / (2 * ranks)) * 2 * ranks for n in (TINY.parameters - norms, norms))
        one = lines(full | {'sharding.strategy': 'zero1'})
        three = lines(full | {'sharding.strategy': 'zero3', 'zero.persistence_threshold': 0})
        assert (size(one, 'weights'), size(one, 'master')) == (2 * padded, 4 * padded // ranks)
        assert (size(one, 'optimizer'), size(one, 'gradients'), size(one, 'counters')) == (
            8 * padded // ranks, 2 * padded // ranks, 4 * 2)
        part = sum(u.count * math.ceil(w.numel / ranks) for u in TINY.units for w in u.weights)
        assert (
            size(three, 'weights'), size(three, 'gradients'), size(three, 'master'),
            size(three, 'optimizer')) == (2 * part, 2 * part, 4 * part, 8 * part)
    adapters = lines({'method.kind': 'lora', 'sharding.strategy': 'zero1', 'cluster.processes': 2})
    assert size(adapters, 'counters') == 4  # One group


def test_small_parameters_stay_whole_under_zero3():
    small = [
        w.numel for u in TINY.units for w in u.weights for _ in range(u.count) if w.numel <= 300]
    full = {'method.kind': 'full', 'sharding.strategy': 'zero3', 'zero.persistence_threshold': 300}
    more = size(lines(full), 'weights') - size(
        lines(full | {'zero.persistence_threshold': 0}), 'weights')
    assert small
    assert more == 2 * sum(2 * math.ceil(n / 2) for n in small)


def test_buckets_follow_the_knobs_and_not_the_model():
    full = {'method.kind': 'full', 'sharding.strategy': 'zero2', 'zero.reduce_bucket': 10**6}
    def buckets_b(changes, instant='last layer'):
        return size(lines(full | changes, instant=instant), 'zero_buckets')

    assert buckets_b({}) == 2 * 2 * 10**6
    assert buckets_b({'zero.overlap': False}) == 2 * 10**6
    assert buckets_b({'zero.contiguous': False}) == 0


@pytest.mark.parametrize('stage, passes, times', [(1, 1, 0), (1, 2, 1), (2, 1, 0), (2, 2, 0)])
def test_buckets_come_with_the_first_gradient_and_zero1_keeps_them_for_later_passes(
        stage, passes, times):
    full = {'method.kind': 'full', 'sharding.strategy': f'zero{stage}',
            'zero.reduce_bucket': 10**6, 'batch.accumulation': passes}
    for instant in ('forward', 'loss', 'head'):
        assert size(lines(full, instant=instant), 'zero_buckets') == times * 2 * 2 * 10**6
    assert size(lines(full, instant='head reduced'), 'zero_buckets') == 2 * 2 * 10**6


@pytest.mark.parametrize('kind, each', [('adamw', 8), ('adamw_bf16', 4), ('sgd', 0)])
def test_states_per_number(kind, each):
    full = {
        'method.kind': 'full', 'optimizer.kind': kind, 'sharding.strategy': 'none',
        'cluster.processes': 1}
    assert size(lines(full), 'optimizer') == each * TINY.parameters
    assert whole_states(rank_of(BASE.changed(full), TINY)) == each * TINY.parameters + size(
        lines(full), 'counters')


def test_eight_bit_states_are_those_of_bitsandbytes():
    import bitsandbytes
    import torch

    wide = {
        'method.kind': 'full', 'optimizer.kind': 'adamw_8bit', 'sharding.strategy': 'none',
        'cluster.processes': 1}
    weights = [
        torch.nn.Parameter(torch.zeros(w.shape))
        for u in TINY.units
        for w in u.weights
        if w.kind != 'embedding'
        for _ in range(u.count)]
    optimizer = bitsandbytes.optim.AdamW8bit(weights)
    for w in weights: w.grad = torch.ones_like(w)
    optimizer.step()
    storages = {
        v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()
        for s in optimizer.state.values()
        for v in s.values()
        if torch.is_tensor(v)}
    embedding = sum(w.numel for u in TINY.units for w in u.weights if w.kind == 'embedding')
    assert size(lines(wide), 'optimizer') == sum(storages.values()) + 8 * embedding


@pytest.mark.parametrize('shape', [(64, 63), (64, 64), (4097, 1)], ids=str)
def test_eight_bit_states_begin_at_4096_numbers_as_in_bitsandbytes(shape):
    import bitsandbytes
    import torch
    from llm_workbook.plan.model_states import TensorGroup, _eight_bit
    weights = [torch.nn.Parameter(torch.zeros(shape)), torch.nn.Parameter(torch.zeros(128, 128))]
    optimizer = bitsandbytes.optim.AdamW8bit(weights)
    for w in weights: w.grad = torch.ones_like(w)
    optimizer.step()
    held_by = {
        v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()
        for s in optimizer.state.values()
        for v in s.values()
        if torch.is_tensor(v)}
    groups = tuple(TensorGroup('weights', 1, tuple(w.shape), 0) for w in weights)
    assert _eight_bit(groups)[0] == sum(held_by.values())


def test_offloaded_tensors_are_rounded_to_powers_of_two():
    away = {
        'method.kind': 'full', 'cluster.device': 'cuda', 'sharding.offload_parameters': 'cpu',
        'sharding.offload_optimizer': 'cpu'}
    pinned = lines(away)
    paged = lines(away | {'sharding.pin_memory': False})
    def up(b): return 2**math.ceil(math.log2(b))
    shards = [
        4 * math.prod((math.ceil(w.shape[0] / 2), *w.shape[1:]))
        for u in TINY.units
        for w in u.weights
        for _ in range(u.count)]
    # weights, gradients
    assert [x.size_b for x in pinned if x.kind == 'pinned_rounding'] == [
        sum(map(up, shards)) - sum(shards)] * 2
    assert {x.place for x in pinned if x.kind in ('weights', 'gradients')} == {'pinned'}
    assert {x.place for x in paged if x.kind in ('weights', 'gradients', 'optimizer')} == {'host'}
    assert not size(paged, 'pinned_rounding')


def test_a_classification_head_is_trained_as_a_copy():
    two = spec('tiny-base', head='classification')
    recipe = Recipe.named('reviews-qlora').changed({'model.head': 'classification'})
    t = tensors_of(two, recipe.method)
    assert (
        sum(x.shape == (2, two.hidden) for x in t.frozen)
        == sum(x.shape == (2, two.hidden) for x in t.trained)
        == 1)


# Phases, places, verdicts

@pytest.mark.parametrize('name', recipe_names())
def test_every_named_recipe_has_a_ledger(name):
    recipe = Recipe.named(name)
    found = memory(recipe)
    judged = ('evaluation',) if recipe.intervals.evaluation else ()
    assert {x.phase for x in found.lines} == {'load', 'step', *judged, 'save'}
    for phase in found.phases:
        assert (
            found.total(phase, 'gpu', 'allocated')
            <= found.total(phase, 'gpu', 'reserved')
            <= found.total(phase, 'gpu', 'device'))
        assert sum(found.by_kind(phase).values()) == found.total(phase)
        assert found.total(phase) <= found.peak()
    low, high = found.band
    assert low <= found.peak() <= high
    assert found.to_dict()['instant'] == found.instant()
    assert '<table>' in found._repr_html_()
    assert found.plot()


def test_loading_decides_the_first_peak():
    big = Recipe.named('70b-2x8-a100-80-full')
    n = spec('llama-2-70b').parameters
    how = {
        word: memory(big.changed({'sharding.loading': word}))
        for word in ('every_rank', 'rank0', 'sharded')}
    assert (
        how['every_rank'].total('load', 'gpu', 'allocated')
        > 4 * n
        > 10 * how['sharded'].total('load', 'gpu', 'allocated'))
    assert how['rank0'].total('load', 'host', 'allocated') == 4 * n
    assert how['sharded'].total('load', 'host', 'allocated') < 2**24
    assert (
        memory(big.changed({'sharding.loading': 'rank0'}), rank=1).total(
            'load', 'host', 'allocated')
        == 0)


def test_checkpoints_fill_the_disk():
    full = BASE.changed({'method.kind': 'full', 'intervals.saving': 10, 'optimizer.steps': 45})
    part = memory(full)
    whole = memory(full.changed({'intervals.checkpoint': 'full'}))
    # Those that are kept, and the one being written
    n, checkpoints = TINY.parameters, KEPT_CHECKPOINTS + 1
    assert (
        sum(memory(full, rank=r).total('save', 'disk') for r in range(2))
        == checkpoints * 12 * n + 4 * n)
    assert whole.on_node('save', 'disk') == checkpoints * (12 * n + 4 * 38) + 4 * n
    assert whole.total('save', 'host', 'allocated') > part.total('save', 'host', 'allocated')
    once = memory(full.changed({'intervals.saving': 30}))
    assert once.on_node('save', 'disk') == 12 * n + 4 * n


def saved(how, kind, folder):
    """What a rank copies for a thread that writes, by its own count and by that of the process;
    bytes."""
    import torch
    from llm_workbook.model.adapters import add_adapters
    from llm_workbook.checkpoint.save_load import finish_saving, save_checkpoint
    from llm_workbook.model.quantize import load_base
    from llm_workbook.parallel.shard import shard_model
    torch.set_num_threads(1)
    model = load_base('tiny-base', Method(kind=kind), Precision(master='float32'), device='cpu')
    if kind != 'full': model = add_adapters(model, Method(kind=kind))
    model = (
        shard_model(model) if how == 'fsdp2' else torch.nn.parallel.DistributedDataParallel(model))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(5, 1000, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    copied, clone = [], torch.Tensor.clone
    with patch.object(
        torch.Tensor, 'clone',
        lambda self, **more: copied.append(self.nbytes) or clone(self, **more)
    ):
        saving = save_checkpoint(folder / 'checkpoint-1', model, optimizer, wait=False)
    finish_saving()
    return saving.bytes, sum(copied)


@pytest.mark.parametrize(
    'how, kind', [
        ('fsdp2', 'full'), slow_case('fsdp2', 'lora'), slow_case('ddp', 'full'), ('ddp', 'qlora')])
def test_the_copy_of_an_asynchronous_save_is_planned(how, kind, tmp_path):
    recipe = BASE.changed(
        {
            'method.kind': kind, 'sharding.strategy': how, 'cluster.processes': 2,
            'intervals.saving': 2, 'optimizer.steps': 4})
    found = run_ranks(saved, 2, (how, kind, tmp_path), timeout_s=120)
    for rank, (planned, copied) in enumerate(found):
        ledger = memory(recipe, rank=rank)
        (line,) = [
            x
            for x in ledger.lines
            if x.phase == 'save' and x.place == 'host' and x.instant == 'checkpoint']
        assert line.size_b == eval(line.formula, {'ceil': math.ceil}, line.symbols)
        assert planned == pytest.approx(line.size_b, rel=.02)
        assert copied == pytest.approx(line.size_b, rel=.02)
        assert ledger.total('save', 'host') >= line.size_b
        disk, = [x for x in ledger.lines if 'checkpoints' in x.name]
        assert disk.size_b == 2 * line.size_b


def test_deepspeed_copies_nothing_and_neither_does_a_run_without_checkpoints():
    saving = {'intervals.saving': 2, 'method.kind': 'full', 'cluster.processes': 2}
    def copies(changes):
        lines = memory(BASE.changed(changes)).lines
        return [x for x in lines if x.place == 'host' and x.instant == 'checkpoint']
    assert copies(saving)
    assert not copies(saving | {'intervals.saving': 0})
    assert not copies(saving | {'sharding.strategy': 'zero3'})


def test_what_a_node_shares_counts_once():
    big = memory(Recipe.named('70b-2x8-a100-80-full').changed({'sharding.loading': 'rank0'}))
    process = next(x.size_b for x in big.lines if x.kind == 'process')
    assert big.on_node('load', 'host') == big.total('load', 'host', 'allocated') + 8 * process


def test_a_verdict_names_the_place_and_the_lines():
    tight = memory(
        Recipe.named('70b-2x24gb-qlora').changed(
            {'sharding.loading': 'rank0', 'cluster.hardware': '2x-rtx-3090'}))
    assert not tight.fits()
    assert tight.fits('8x-h100')
    assert 'gpu is' in tight.why()
    assert 'whole on every rank' in tight.why()
    assert tight.why('8x-h100').startswith('it fits')
    cpu = memory(BASE)
    assert [room[0] for room in cpu.rooms('cpu')] == ['host', 'disk']


@pytest.mark.parametrize(
    'call, words',
    [
        (lambda: memory(BASE, rank=-1), 'from 0 to 1'),
        (lambda: memory(BASE, rank=1.5), 'from 0 to 1'),
        (lambda: memory(BASE).total('steps'), 'none of load, step, save'),
        (lambda: memory(BASE).total('step', 'ram'), 'none of gpu, host'),
        (lambda: memory(BASE).total('step', 'gpu', 'all'), 'none of allocated'),
        (lambda: memory(BASE).fits('2x-rtx-3091'), '3090')])
def test_errors_name_the_value(call, words):
    with pytest.raises(ValueError, match=words): call()


def test_the_allocator_returns_what_it_does_not_need():
    fixed = {'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:False'}
    full = Recipe.named('70b-2x8-a100-80-full').changed(
        {'cluster.hardware': None, 'cluster.variables': fixed})
    free, tight, tiny = (memory(full, node=node) for node in (None, '8x-h200', '8x-a10g'))
    P, A, O = free.pools('step')
    assert (
        free.total('step', 'gpu', 'reserved')
        == int(P + 1.3 * A + O)
        > free.total('step', 'gpu', 'allocated'))
    assert tight.total('step', 'gpu', 'reserved') <= free.total('step', 'gpu', 'reserved')
    allocated = tiny.total('step', 'gpu', 'allocated')
    assert tiny.total('step', 'gpu', 'reserved') == allocated + int(.033 * allocated)
    whole = memory(full.changed({'batch.accumulation': 2}))
    assert whole.pools('step')[1] > A, 'gradients that wait whole are not those of the optimizer'


@pytest.mark.parametrize('changes, again', [
    ({}, True), ({'sharding.activation_checkpointing': 'none'}, False)])
def test_segments_that_grow_serve_the_optimizer_too(changes, again):
    full = Recipe.named('70b-2x8-a100-80-full').changed({'cluster.hardware': None} | changes)
    free = memory(full)
    P, A, O = free.pools('step')
    allocated = free.total('step', 'gpu', 'allocated')
    wasted = free.total('step', 'gpu', 'reserved') - allocated
    assert wasted >= int(.001 * allocated)
    assert P + O <= allocated < P + A + O
    if allocated > P + O: assert wasted == int(ledger._GROWING[again] * A)
    unequal = memory(full.changed({'batch.packing': False, 'batch.padded': True}))
    P, A, O = unequal.pools('step')
    assert unequal.total('step', 'gpu', 'reserved') == int(P + 1.3 * A + O)
    assert memory(full).band[1] < unequal.band[1]


PEAKS = json.loads((ROOT/'bench/results/cpu/step_peak_error.json').read_text())['rows']


def peak_case(row):
    "A compiled 4-bit layer is planned too high by one block of its MLP, 1.7 % in the record."
    name = f'{row["shape"]}-{row["instant"]}'
    case = 'model.kernels', 'method.kind'
    found = tuple(row['changes'].get(path) for path in case)
    if found != ('compile', 'qlora'): return pytest.param(row, id=name)
    reason = 'the program uses a block of the MLP again, which is planned twice'
    return pytest.param(row, id=name, marks=pytest.mark.xfail(strict=True, reason=reason))


@pytest.mark.parametrize('row', [peak_case(row) for row in PEAKS])
def test_the_ledger_alone_gives_the_peaks_that_were_measured(row):
    """The record adds its prediction of a step to what the process held; here the ledger gives
    both, and no measurement enters."""
    changes = {path: value for path, value in row['changes'].items() if path != 'foreach'}
    # There AdamW goes through all weights at once
    if 'foreach' in row['changes']: changes |= {'cluster.device': 'cuda'}
    made = memory(step_peak_error.recipe(changes), spec(step_peak_error.SHAPES[row['shape']]))
    planned_b = made.total('step', level='allocated')
    planned_b -= made.by_kind('step').get('workspace', 0)  # The products ran on a CPU
    assert abs(planned_b / row['peak_b'] - 1) < .01


def test_workspaces_of_products_stay_from_the_first_step_on():
    lines = [x for x in memory(BASE.changed({'cluster.device': 'cuda'})).lines
             if x.kind == 'workspace']
    assert [(x.phase, x.size_b, x.sure) for x in lines] == [
        ('step', 2**26, 'model'), ('save', 2**26, 'model')]
    assert not [x for x in memory(BASE).lines if x.kind == 'workspace']
    contexts = {name: memory(BASE.changed({'cluster.device': 'cuda'}), node=name).by_kind('step')
                for name in ('2x-rtx-3090', '8x-h100')}
    assert [(sizes['workspace'], sizes['context']) for sizes in contexts.values()] == [
        (2 * 8_320 * 2**10, int(.47 * 2**30)), (2**26, 804_061_184)]


# Labels are for people

REWORDED = [
    {}, {'method.kind': 'full', 'intervals.saving': 2, 'optimizer.steps': 4},
    {'method.kind': 'full', 'batch.accumulation': 2},
    *(
        {
            'sharding.strategy': name, 'method.kind': 'full', 'cluster.device': 'cuda',
            'sharding.offload_optimizer': 'cpu'}
        for name in ('zero1', 'zero2', 'zero3')),
    {
        'sharding.strategy': 'ddp', 'method.kind': 'lora', 'intervals.saving': 2,
        'optimizer.steps': 4}]


def verdicts(changes: dict) -> tuple:
    "Everything that a ledger decides, without its texts."
    found = memory(BASE.changed(changes))
    recipe = BASE.changed(changes)
    totals = found.to_dict()
    lines = [(x.kind, x.phase, x.instant, x.place, x.size_b) for x in found.lines]
    passing = {
        name: [x.size_b for x in working_lines(TINY, recipe, name)]
        for name in instant_lines(TINY, recipe)}
    return (
        totals['allocated'], totals['band'], totals['device'], lines, passing,
        found.fits('8x-h100'))


def forget():
    "Empty the caches of lines."
    from llm_workbook.plan import ledger, step_memory
    for cached in (step_memory.passing_lines, ledger._passing, ledger._held, ledger._fixed_lines,
                   ledger._workspace_lines):
        cached.cache_clear()


@pytest.mark.parametrize('changes', REWORDED, ids=str)
def test_rewording_every_label_changes_no_verdict(changes, monkeypatch):
    from llm_workbook.plan import (
        ledger, lines as plan_lines, loading, model_states, saving, step_memory, zero_buffers)
    plain = verdicts(changes)
    made = []

    def reworded(*args, **fields):
        made.append(
            plan_lines.Line(*args, **fields)._replace(
                name=f'words {len(made)}', formula='a formula', source='a source'))
        return made[-1]
    forget()
    for module in (loading, ledger, model_states, saving, step_memory, zero_buffers):
        monkeypatch.setattr(module, 'Line', reworded)
    other = memory(BASE.changed(changes))
    assert made
    assert all(x.name.startswith('words') for x in other.lines)
    assert verdicts(changes) == plain
    forget()


APART = [
    {'sharding.reshard_after_forward': False}, {'batch.accumulation': 2}, {'batch.micro': 2},
    {'sharding.activation_checkpointing': 'full'}, {'optimizer.kind': 'sgd'},
    {'intervals.saving': 1}, {'method.rank': 4, 'method.kind': 'lora'}]


@pytest.mark.parametrize('changes', APART, ids=str)
def test_shared_lines_are_those_of_a_fresh_count(changes):
    recipe = BASE.changed({'sharding.strategy': 'fsdp2', 'cluster.processes': 2})
    for other in recipe, recipe.changed(changes):
        memory(recipe)  # What this one leaves in the caches must not serve the other
        shared = memory(other).to_dict()
        forget()
        assert memory(other).to_dict() == shared


def test_what_a_ledger_gives_away_is_no_part_of_the_next():
    found = memory(BASE).to_dict()
    for line in found['lines']: line['symbols'].clear()
    assert all(line.symbols for line in memory(BASE).lines)


def test_a_ledger_with_more_lines_leaves_the_first_as_it_was():
    first = memory(BASE)
    line = first.lines[0]._replace(kind='context', phase='step', place='gpu', instant='', size_b=7)
    more = first.with_lines((line,))
    assert (more.total('step') - first.total('step'), more.total('load') - first.total('load')) == (
        7, 0)
    assert memory(BASE).total('step') == first.total('step')
    assert more.lines == (*first.lines, line)


def test_buffers_of_a_step_are_gone_while_loading_and_saving_and_so_is_their_rounding():
    away = BASE.changed(
        {
            'method.kind': 'full', 'cluster.device': 'cuda', 'sharding.strategy': 'zero2',
            'sharding.offload_optimizer': 'cpu'})
    rounding = {
        phase: [
            x.name for x in memory(away).lines if x.phase == phase and x.kind == 'pinned_rounding']
        for phase in ('load', 'step', 'save')}
    assert rounding['load'] == rounding['save'] == ['master weights, each tensor rounded up']
    assert len(rounding['step']) == 4


@pytest.mark.parametrize('stage, ranks', [(2, 2), (3, 2), (3, 4)])
def test_a_full_bucket_is_copied_to_be_sent_and_zero3_makes_its_part_besides(stage, ranks):
    made = memory(BASE.changed({
        'method.kind': 'full', 'sharding.strategy': f'zero{stage}', 'cluster.nodes': 1,
        'cluster.processes': ranks, 'zero.reduce_bucket': 10**6}))
    sent = {x.instant: x.size_b for x in made.lines
            if x.name == 'a full bucket, copied to be reduced'}
    moving = [x.size_b for x in made.lines if x.name == 'a gradient on its way into a bucket'
              and x.instant in ('last layer', 'layer reduced')]
    assert len(moving) == 2
    assert moving[0] == moving[1]
    base = spec('tiny-base')
    tensors = trained_tensors(base, made.recipe.method)
    *fills, last = bucket_fills((tensor.numel for tensor in reversed(tensors)), 10**6)
    copy_b = 2 * max(fills)
    assert 1.5 * 10**6 < copy_b <= 2 * 10**6
    assert sent['layer reduced'] == copy_b + (copy_b // ranks if stage == 3 else 0)
    assert sent['embedding'] == 2 * last


@pytest.mark.parametrize('checkpointing', ['none', 'full'])
def test_zero_reduces_in_the_backward_pass_alone(checkpointing):
    zero = memory(
        BASE.changed(
            {
                'method.kind': 'full', 'sharding.strategy': 'zero2',
                'sharding.activation_checkpointing': checkpointing})).lines
    buckets = {
        x.instant for x in zero if x.kind == 'zero_buckets' and x.name == 'gradients on their way'}
    partition = {x.instant for x in zero if x.name == 'gradients, one partition'}
    moving = {x.instant for x in zero if x.name == 'a gradient on its way into a bucket'}
    backward = {'head reduced', 'last layer', 'first layer', 'embedding'}
    assert backward <= buckets <= backward | {'layer reduced'}
    assert moving == buckets | {'loss', 'head'}
    # The first bucket takes more than the head, and the first rank has the first layers
    assert partition == buckets - {'head reduced', 'last layer'} | {'optimizer'}
