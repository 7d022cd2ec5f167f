"""Sharded loading: the same model as loading it whole, from a share of the bytes; and what cannot
be loaded fails on all ranks."""
import json
import os
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.lines.ledger_bytes import BASES, _config
from bench.record import ROOT
from bench.shared.real_ranks import make_base
from trouble import slow_case
from llm_workbook.parallel import load as loading
from llm_workbook.model.adapters import save_adapters
from llm_workbook.files import asset
from llm_workbook.parallel.load import loaded_base, load_sharded
from llm_workbook.model.quantize import fingerprint, load_base, load_nf4
from llm_workbook.parallel.ranks import RankError, notebook_ranks, run_ranks
from llm_workbook.config.recipe import Batch, Method, Model, Precision, Recipe, Sharding
from llm_workbook.parallel.backends import cpu_fsdp, fsdp_env
from llm_workbook.parallel.shard import assert_sharding, shard_model
from llm_workbook.model.weight_files import Origin, Weights

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
FLOAT32 = Precision(compute='float32')
FIXED = torch.arange(1, 41).view(2, 20)
MORE = {
    'qwen2': _config('qwen2', 60, 92, 5, 1, 12, 101),  # Biases
    'olmoe': _config(
        'olmoe', 48, 64, 4, 2, 12, 103, layers=2, num_experts=4, num_experts_per_tok=2),
    'gpt2': dict(
        model_type='gpt2', n_embd=48, n_layer=2, n_head=4, vocab_size=101, n_positions=64,
        bos_token_id=1, eos_token_id=2),
}


@pytest.fixture(scope='module', autouse=True)
def imported():
    "Import once what every rank needs; forks share it."
    import accelerate, bitsandbytes, datasets, peft, transformers, trl  # noqa: E401, F401
    import torch.distributed.fsdp, torch.distributed.tensor  # noqa: E401, F401
    from trl import SFTTrainer  # noqa: F401
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


@pytest.fixture(scope='module')
def bases(tmp_path_factory): return tmp_path_factory.mktemp('bases')


def bits(tensor): return tensor.detach().as_subclass(torch.Tensor).contiguous().view(torch.uint8)


def step(model):
    "Loss of one forward pass, and the gradients of what trains, whole."
    loss = model(input_ids=FIXED, labels=FIXED).loss
    loss.backward()
    return loss.item(), {
        n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def both(method, precision, sharding, seed=3):
    "One rank: load its share, and by itself load all; compare what they hold and compute."
    from llm_workbook.model.adapters import add_adapters
    ours = load_sharded('tiny-base', method, precision, sharding, 'cpu', seed)
    whole = load_base('tiny-base', method, precision, 'cpu')
    theirs = shard_model(whole if seed is None else add_adapters(whole, method, seed), sharding)
    for (name, p), (other, q) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert (name, p.dtype, p.shape, p.placements, p.requires_grad) == (
            other, q.dtype, q.shape, q.placements, q.requires_grad)
        assert bits(p.to_local()).equal(bits(q.to_local())), name
    packed = method.kind == 'qlora'
    if packed: assert fingerprint(ours) == fingerprint(theirs)
    (loss, grads), (peer_loss, peer_grads) = step(ours), step(theirs)
    assert loss == peer_loss
    assert all(grads[name].equal(peer) for name, peer in peer_grads.items())
    assert len(grads) == len(peer_grads)
    report = assert_sharding(ours)
    assert (report.here_b, report.replicated_b) == (
        assert_sharding(theirs).here_b, assert_sharding(theirs).replicated_b)
    return ours.arrived, packed and fingerprint(ours).digest


QLORA = Method()
UINT8 = Method(storage='uint8', double_quant=False)
PLAIN = {
    'qlora': (QLORA, None, 'full', 2), 'qlora-uint8': (UINT8, None, 'none', 3),
    'lora': (Method(kind='lora'), None, 'full', 2),
    'qlora-float32': (Method(storage='float32'), FLOAT32, 'none', 3),
    'full': (Method(kind='full'), None, 'none', 3)}


@pytest.mark.parametrize(
    'method, precision, again, ranks',
    [how if name == 'qlora' else slow_case(*how) for name, how in PLAIN.items()],
    ids=PLAIN)
def test_a_share_is_that_of_the_whole(method, precision, again, ranks):
    sharding = Sharding(activation_checkpointing=again)
    seed = None if method.kind == 'full' else 3
    got = run_ranks(both, ranks, (method, precision, sharding, seed), timeout_s=120)
    digests = {digest for _, digest in got}
    if method.kind == 'qlora':
        assert digests == {
            fingerprint(load_nf4('tiny-base', method, precision, device='cpu')).digest}
    for arrived, _ in got: assert arrived.read_b < arrived.total_b / ranks * 1.01


def shape(source, method, attention='sdpa'):
    "One rank: what it read, fingerprint, and every parameter and buffer whole."
    model = load_sharded(Model(source=str(source), attention=attention), method, None, None, 'cpu')
    prints = fingerprint(model) if method.kind == 'qlora' else None
    return (
        model.arrived, prints, {n: p.full_tensor() for n, p in model.named_parameters()},
        dict(model.named_buffers()), model(input_ids=FIXED, labels=FIXED).loss.item())


# Rows that three ranks cannot share evenly; in all of them the boundary of a shard cuts a block of
# 64, in some one of 256
ODD = [
    ('odd-llama', 'qlora'),
    ('odd-qwen3', 'qlora'),
    ('odd-gemma2', 'qlora'),
    ('odd-mixtral', 'qlora'),
    ('odd-mixtral', 'lora'),
    ('olmoe', 'lora'),
    ('qwen2', 'qlora'),
    ('gpt2', 'lora')]


@pytest.mark.parametrize(
    'name, kind',
    [pair if pair[0] in ('odd-gemma2', 'olmoe') else slow_case(*pair) for pair in ODD],
    ids=lambda v: v)
def test_odd_shapes_ties_biases_and_experts(name, kind, bases):
    base = make_base((BASES | MORE)[name], bases/name)
    method = Method(kind=kind)
    attention = 'eager' if 'gemma' in name else 'sdpa'
    whole = load_base(str(base), method, device='cpu', attention=attention)
    expected = dict(whole.named_parameters())
    for arrived, prints, parameters, buffers, loss in run_ranks(
        shape, 3, (base, method, attention), timeout_s=120
    ):
        assert parameters.keys() == expected.keys()
        for key, p in parameters.items():
            assert bits(p).equal(bits(expected[key])), key
        assert buffers.keys() == dict(whole.named_buffers()).keys()
        assert all(buffer.equal(buffers[key]) for key, buffer in whole.named_buffers())
        assert prints == (fingerprint(whole) if kind == 'qlora' else None)
        assert loss == pytest.approx(whole(input_ids=FIXED, labels=FIXED).loss.item(), abs=1e-6)


def test_boundaries_cut_blocks():
    from llm_workbook.model.nf4 import share
    cut = [share(60 * 92, rank, 3)[0] for rank in (1, 2)]
    assert all(start % 64 for start in cut)
    assert all(start // 64 % 256 for start in cut)


def test_a_piece_of_a_fused_tensor_is_read_from_its_own_begin_to_the_end_of_the_range(
    tmp_path, monkeypatch
):
    """Across the edges of pieces, which with one chunk of room would not fit if more than the range
    were read."""
    pieces = {name: torch.arange(10.) + 100 * i for i, name in enumerate('abc')}
    save_file(pieces, tmp_path/'model.safetensors')
    monkeypatch.setattr(loading, '_CHUNK', 12)
    whole = torch.cat([*pieces.values()])
    origin = Origin('experts', [*pieces], (30,), torch.float32, False)
    with Weights(tmp_path) as weights:
        arrival = SimpleNamespace(weights=weights, room={}, device=torch.device('cpu'))
        for start in range(30):
            for stop in range(start + 1, min(start + 12, 30) + 1):
                before = weights.read_b
                assert loading._read(arrival, origin, start, stop).equal(whole[start:stop])
                assert weights.read_b - before == 4 * (stop - start), (start, stop)


def test_rows_of_a_hybrid_mesh_are_those_of_the_group():
    "Two copies on two ranks each: the second copy reads the same rows as the first."
    def rows():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('copies', 'parts'))
        model = fully_shard(torch.nn.Linear(4, 5, bias=False), mesh=mesh)
        first, last = loading._rows(model.weight)
        assert last - first == len(model.weight.to_local())
        return first, last
    assert run_ranks(rows, 4) == [(0, 3), (3, 5)] * 2


# Ties

def tied(folder, head):
    "A tied model whose file has a head, too."
    tensors = load_file(asset('tiny-base')/'model.safetensors')
    save_file(
        tensors | {'lm_head.weight': tensors['model.embed_tokens.weight'] + head},
        folder/'model.safetensors')
    (folder/'config.json').write_bytes((asset('tiny-base')/'config.json').read_bytes())
    return folder


def held(source):
    model = load_sharded(str(source), Method(kind='lora'), None, None, 'cpu')
    return (
        model.lm_head.weight is model.model.embed_tokens.weight,
        len(dict(model.named_parameters())), model(input_ids=FIXED, labels=FIXED).loss.item())


@pytest.mark.parametrize('head, one', [(0, True), (1, False)])
def test_a_tied_head_on_disk_counts_only_if_it_differs(head, one, tmp_path):
    whole = load_base(str(tied(tmp_path, head)), Method(kind='lora'), device='cpu')
    assert (whole.lm_head.weight is whole.model.embed_tokens.weight) == one
    loss = whole(input_ids=FIXED, labels=FIXED).loss.item()
    assert run_ranks(held, 2, (tmp_path,)) == [(one, 38 + (not one), loss)] * 2


# Through the trainer

ROWS = [
    {key: [(7 * i + j) % 1000 + 1 for j in range(24)] for key in ('input_ids', 'labels')}
    for i in range(24)]
RECIPE = Recipe.named('reviews-qlora').changed(
    {'optimizer.steps': 2, 'batch': Batch(micro=2, length=32)})


def trained(recipe, folder):
    """Train on this rank; say losses, first gradients, shards, fingerprints at the begin and the
    end, and what was read."""
    from transformers import TrainerCallback
    from llm_workbook.training.trainer import make_trainer
    seen = {}
    with loaded_base(recipe) as base:
        if recipe.sharding.loading == 'sharded': assert next(base.parameters()).is_meta
        trainer = make_trainer(recipe, folder, ROWS, base)

        class Look(TrainerCallback):
            def on_train_begin(self, args, state, control, **more):
                seen['shards'] = assert_sharding(
                    trainer.model_wrapped, group=recipe.sharding.group).rows
                seen['begin'] = (
                    fingerprint(trainer.model) if recipe.method.kind == 'qlora' else None)

            def on_pre_optimizer_step(self, args, state, control, **more):
                named = trainer.model.named_parameters()
                seen.setdefault(
                    'grads', {n: p.grad.full_tensor() for n, p in named if p.grad is not None})

        trainer.add_callback(Look())
        trainer.train()
        seen['end'] = fingerprint(trainer.model) if recipe.method.kind == 'qlora' else None
    seen['losses'] = [row['loss'] for row in trainer.state.log_history if 'loss' in row]
    if recipe.method.kind != 'full': seen['moved'] = save_adapters(trainer.model, folder)
    return seen, getattr(base, 'arrived', None)


def both_ways(recipe, folder):
    "Train with each way of loading; the runs must be the same to the last bit."
    from pathlib import Path
    with cpu_fsdp():
        (ours, arrived), (theirs, _) = (
            trained(recipe.changed({'sharding.loading': how}), Path(folder) / how)
            for how in ('sharded', 'every_rank'))
    grads = ours.pop('grads')
    peers = theirs.pop('grads')
    assert grads.keys() == peers.keys()
    assert all(grads[name].equal(peers[name]) for name in peers)
    assert ours == theirs
    assert ours['begin'] == ours['end']
    assert len(ours['losses']) == 2
    return arrived, ours['begin'] and ours['begin'].digest


TRAINED = {
    'qlora': (2, {}), 'qlora-3-again': (3, {'sharding.activation_checkpointing': 'full'}),
    'full-3-again': (3, {'method.kind': 'full', 'sharding.activation_checkpointing': 'full'}),
    'lora-hybrid': (4, {'method.kind': 'lora', 'sharding.group': 2})}


@pytest.mark.parametrize(
    'ranks, changes',
    [how if name == 'qlora' else slow_case(*how) for name, how in TRAINED.items()], ids=TRAINED)
@pytest.mark.slow
def test_training_is_the_same_however_the_base_came(ranks, changes, tmp_path):
    recipe = RECIPE.changed({'cluster.processes': ranks} | changes)
    got = notebook_ranks(both_ways, ranks, (recipe, tmp_path), 120, fsdp_env(recipe))
    for arrived, digest in got:
        assert arrived.read_b < arrived.total_b / (recipe.sharding.group or ranks) * 1.01
        if recipe.method.kind == 'qlora':
            assert digest == fingerprint(load_nf4('tiny-base', device='cpu')).digest


def test_what_arriving_does_not_do():
    for changes in (
        {'sharding.loading': 'rank0'},
        {'sharding.loading': 'sharded', 'sharding.strategy': 'zero3', 'method.kind': 'full'}
    ):
        with pytest.raises(
            ValueError, match="is not carried out: set sharding.loading to 'every_rank'"
        ):
            with loaded_base(RECIPE.changed(changes)): pass


# What cannot be loaded fails on all ranks at once, and names what is wrong

def broken(folder, change):
    "The tiny base with a change to its tensors or its configuration."
    tensors = load_file(asset('tiny-base')/'model.safetensors')
    config = json.loads((asset('tiny-base')/'config.json').read_text())
    change(tensors, config)
    save_file(tensors, folder/'model.safetensors')
    (folder/'config.json').write_text(json.dumps(config))


Q = 'model.layers.1.self_attn.q_proj.weight'
BROKEN = {
    'missing': (
        lambda t, c: t.pop(Q),
        f'1 tensors of LlamaForCausalLM are missing, first {Q}; fetch all files'),
    'extra': (
        lambda t, c: t.update({'model.layers.0.extra': torch.ones(1)}),
        'first model.layers.0.extra; correct config.json'),
    'shape': (
        lambda t, c: t.update({Q: t[Q][:128].clone()}),
        rf'{Q} has the shape \(128, 256\), and {Q} should have \(256, 256\)'),
    'type': (lambda t, c: t.update({Q: t[Q].to(torch.int8)}), f'{Q} is int8, which cannot be cast'),
    'packed': (
        lambda t, c: c.update(
            quantization_config={'load_in_4bit': True, 'quant_method': 'bitsandbytes'}),
        "is quantised on disk already: set sharding.loading to 'every_rank'")}


def refused(source, method=None):
    try: load_sharded(str(source), method, None, None, 'cpu')
    except ValueError as error: return str(error)


@pytest.mark.parametrize('change, words', BROKEN.values(), ids=BROKEN)
def test_bad_checkpoints_are_refused_on_every_rank(change, words, tmp_path):
    broken(tmp_path, change)
    errors = run_ranks(refused, 2, (tmp_path,), timeout_s=30)
    assert errors[0] == errors[1]
    if words is None: assert errors[0] is None
    else:
        with pytest.raises(ValueError, match=words): raise ValueError(errors[0])


def test_what_has_to_be_whole_is_refused(bases, tmp_path):
    errors = run_ranks(refused, 2, (make_base(MORE['gpt2'], bases/'gpt2'),))
    assert all(
        "c_attn.weight lies transposed on disk, so no part of it can be packed: set "
        "sharding.loading to"
        in s
        for s in errors)
    narrow = make_base(_config('llama', 30, 45, 3, 1, 10, 101), bases/'narrow')
    assert all(
        '1,350 numbers, which do not fill elements of torch.bfloat16' in s
        for s in run_ranks(refused, 2, (narrow,)))
    (tmp_path/'pytorch_model.bin').write_bytes(b'')
    (tmp_path/'config.json').write_bytes((asset('tiny-base')/'config.json').read_bytes())
    assert all('holds pickles only' in s for s in run_ranks(refused, 2, (tmp_path,)))


def cut_late(source):
    "Rank 1 finds its file cut when it reads: the headers were fine."
    import torch.distributed as dist
    from llm_workbook.model.weight_files import Weights
    plain = Weights.read

    def read(self, name, *more):
        if dist.get_rank() == 1 and name.startswith('model.layers.2'):
            raise OSError(5, 'Input/output error')
        return plain(self, name, *more)
    Weights.read = read
    return refused(source), refused(source, Method(kind='lora'))


def test_a_disk_that_fails_on_one_rank_stops_all():
    start = time.monotonic()
    for errors in run_ranks(cut_late, 3, ('tiny-base',), timeout_s=30):
        assert errors == ('rank 1: OSError: [Errno 5] Input/output error',) * 2
    assert time.monotonic() - start < 20


def test_without_ranks_or_with_another_strategy():
    with pytest.raises(ValueError, match='no process group'): load_sharded('tiny-base')

    def replicated(): load_sharded('tiny-base', sharding=Sharding(strategy='ddp'), device='cpu')
    with pytest.raises(RankError, match="'ddp' shards nothing"): run_ranks(replicated)


def test_the_record_meets_its_goals_and_a_rank_never_holds_more_than_its_share_and_one_tensor():
    from bench.lines.sharded_load import CONFIG
    made = json.loads((ROOT/'bench/results/cpu/sharded_load.json').read_text())
    assert made['ratio'] <= .35
    assert made['peak_ratio'] <= .5
    assert made['rest_ratio'] <= .55
    assert made['read_share'] <= .55
    assert made['same_bytes']
    assert made['layers'] == 22
    largest_b = 2 * CONFIG['vocab_size'] * CONFIG['hidden_size']
    for rank in (rank for run in made['per_rank']['ours'] for rank in run):
        assert rank['peak_b'] <= rank['here_b'] + rank['replicated_b'] + largest_b
