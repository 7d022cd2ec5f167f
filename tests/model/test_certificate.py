"""Packed bytes arrive: all bf16 patterns and whole bases, on 2 and 3 ranks, in every storage,
through sharding and checkpoints."""
import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_merge import moved_adapters
from trouble import slow_case

from llm_workbook.release import merge as release_merge
from llm_workbook.model.nf4 import pack, state
from llm_workbook.model.adapters import add_adapters
from llm_workbook.checkpoint.save_load import CheckpointError, load_checkpoint, save_checkpoint
from llm_workbook.parallel.load import load_sharded
from llm_workbook.release.merge import Merge
from llm_workbook.model.quantize import fingerprint, load_nf4
from llm_workbook.parallel.ranks import RankError, run_ranks
from llm_workbook.config.recipe import Method
from llm_workbook.parallel.shard import shard_model

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
PATTERNS = torch.arange(-2**15, 2**15).short().view(torch.bfloat16)
IDS = torch.randint(5, 1200, (3, 16), generator=torch.Generator().manual_seed(0))
ZERO = {'train_micro_batch_size_per_gpu': 1, 'bf16': {'enabled': True},
        'zero_optimization': {'stage': 3, 'stage3_param_persistence_threshold': 0},
        'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3, 'torch_adam': True}}}


@pytest.fixture(scope='module', autouse=True)
def imported():
    "Import once what every rank needs; forks share it."
    import accelerate, bitsandbytes, peft, transformers  # noqa: E401, F401
    import deepspeed, deepspeed.ops  # noqa: E401, F401
    import torch.distributed.checkpoint, torch.distributed.fsdp  # noqa: E401, F401
    import torch.distributed.tensor  # noqa: F401
    transformers.logging.disable_progress_bar()
    deepspeed.utils.logger.setLevel('ERROR')
    deepspeed.ops.__compatible_ops__ = {}  # Else it tries what it could compile


def raw(tensor): return tensor.detach().contiguous().flatten().view(torch.uint8)


class Bytes(torch.nn.Module):
    "A module that keeps a payload, and shows what its forward pass sees of it."
    def __init__(self, payload):
        super().__init__()
        self.weight = torch.nn.Parameter(payload.clone(), requires_grad=payload.is_floating_point())

    def forward(self): return raw(self.weight).clone()


def stations(payload, folder):
    "Names of the stations at which the bytes are others."
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    ranks = dist.get_world_size()
    whole = raw(payload)
    module = fully_shard(Bytes(payload), mesh=init_device_mesh('cpu', (ranks,)))
    parts = [*payload.chunk(ranks), *[payload[:0]] * ranks]
    seen = {
        'shard': raw(module.weight.to_local()).equal(raw(parts[dist.get_rank()])),
        'forward': module().equal(whole)}
    module.reshard()

    def gathered(): return raw(module.weight.full_tensor()).equal(whole)

    def lost():
        with torch.no_grad(): module.weight.zero_()
    seen['full_tensor'] = gathered()
    dcp.save(module.state_dict(), checkpoint_id=folder / 'dcp')
    lost()
    dcp.load(module.state_dict(), checkpoint_id=folder / 'dcp')
    seen['dcp'] = gathered()
    if payload.is_floating_point():
        save_checkpoint(folder / 'checkpoint-1', module)
        lost()
        load_checkpoint(folder / 'checkpoint-1', module)
        seen['checkpoint'] = gathered()
    return [name for name, same in seen.items() if not same]


@pytest.mark.parametrize('ranks', (2, 3))
@pytest.mark.parametrize('storage', (
    'bfloat16', 'uint8', slow_case('float16'), slow_case('float32')))
def test_every_pattern_arrives(ranks, storage, tmp_path):
    column = PATTERNS.view(getattr(torch, storage)).view(-1, 1)
    assert run_ranks(stations, ranks, args=(column, tmp_path)) == [[]] * ranks


@pytest.mark.parametrize('rows', (1, 2, 4, 65521))
def test_odd_rows_arrive(rows, tmp_path):  # Fewer rows than ranks, and a prime number
    assert run_ranks(stations, 3, args=(PATTERNS[-rows:].view(-1, 1), tmp_path)) == [[]] * 3


def test_a_wrong_policy_is_seen():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def cast(dtype):
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        module = fully_shard(
            Bytes(PATTERNS.view(-1, 1)), mesh=init_device_mesh('cpu', (2,)), mp_policy=policy)
        back = module().view(dtype).bfloat16()
        return (back.view(torch.int16) != PATTERNS.view(torch.int16)).sum().item()
    assert run_ranks(cast, args=(torch.bfloat16,)) == [0, 0]
    changed = run_ranks(cast, args=(torch.float32,))[0]
    assert 0 < changed <= PATTERNS.isnan().sum()


def spread(model, strategy):
    import deepspeed
    trained = [p for p in model.parameters() if p.requires_grad]
    if strategy == 'zero3':
        return deepspeed.initialize(model=model, model_parameters=trained, config=ZERO)[0], None
    model = (
        shard_model(model)
        if strategy == 'fsdp2'
        else torch.nn.parallel.DistributedDataParallel(model))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def digest(model, strategy):
    import deepspeed
    if strategy != 'zero3': return fingerprint(model).digest
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return fingerprint(model).digest


def train(model, optimizer):
    mine = IDS[dist.get_rank():][:1]
    model.train()
    loss = model(input_ids=mine, labels=mine).loss
    if optimizer:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        model.backward(loss)
        model.step()
    model.eval()
    with torch.no_grad(): model(input_ids=mine)


def journey(strategy, models, folder):
    "Digests after each station of a run that is saved and resumed."
    model, optimizer = spread(models[0], strategy)
    seen = [digest(model, strategy)]
    train(model, optimizer)
    seen.append(digest(model, strategy))
    save_checkpoint(folder / 'checkpoint-1', model, optimizer)
    model, optimizer = spread(models[1], strategy)
    load_checkpoint(folder / 'checkpoint-1', model, optimizer)
    train(model, optimizer)
    return [*seen, digest(model, strategy)]


@pytest.fixture(scope='module')
def certified():
    return {
        double: fingerprint(load_nf4('tiny-base', Method(double_quant=double), device='cpu')).digest
        for double in (True, False)}


@pytest.mark.parametrize(
    'strategy, storage, double, ranks',
    [
        slow_case('fsdp2', 'bfloat16', False, 3),
        slow_case('fsdp2', 'uint8', True, 3),  # The page follows both on two ranks
        ('ddp', 'uint8', True, 2),
        slow_case('zero3', 'uint8', True, 3)])
def test_a_base_arrives(strategy, storage, double, ranks, certified, tmp_path):
    models = [
        add_adapters(
            load_nf4('tiny-base', Method(storage=storage, double_quant=double), device='cpu'))
        for _ in range(2)]
    rows = run_ranks(journey, ranks, args=(strategy, models, tmp_path), timeout_s=120)
    assert rows == [[certified[double]] * 3] * ranks


@pytest.mark.parametrize('double', (True, False))
def test_shares_are_loaded_as_the_whole_is(double, certified):
    def loaded():
        return fingerprint(
            load_sharded('tiny-base', Method(double_quant=double), device='cpu')).digest

    assert run_ranks(loaded, 3) == [certified[double]] * 3


@pytest.mark.parametrize('double, storage', [(True, 'bfloat16'), (False, 'uint8')])
def test_a_dequantised_merge_starts_from_it(double, storage, certified, tmp_path):
    """What a merge packs and unpacks again, put into the layers of a model whose own bytes were
    spoilt."""
    packed, stats = [], []

    def noted_pack(*args):
        packed.append(pack(*args))
        return packed[-1]

    def noted_state(*args):
        stats.append(state(*args))
        return stats[-1]
    method = Method(storage=storage, double_quant=double)
    moved_adapters(tmp_path / 'adapters', method=method)
    merge = Merge('tiny-base', tmp_path / 'adapters', 'dequantised', method)
    model = load_nf4('tiny-base', method, device='cpu')
    names = sorted(name.removesuffix('.weight') for name in merge.packed)
    with (merge.weights, patch.object(release_merge, 'pack', noted_pack),
          patch.object(release_merge, 'state', noted_state)):
        for name in names: merge.parts(f'{name}.weight')
    assert len(packed) == len(stats) == len(names) == 28
    for name, (payload, _), quant_state in zip(names, packed, stats):
        layer = model.get_submodule(name)
        raw(layer.weight).zero_()
        layer.weight.data = payload.view(layer.weight.dtype).view(-1, 1)
        layer.quant_state = quant_state
    assert fingerprint(model).digest == certified[double]


def test_another_base_is_refused(tmp_path):
    "A checkpoint pins the bytes of the base it was trained on."
    models = [add_adapters(load_nf4('tiny-base', device='cpu')) for _ in range(2)]
    payload = raw(
        models[1].get_submodule('base_model.model.model.layers.3.mlp.up_proj').base_layer.weight)
    payload[1000] ^= 1  # One bit of one weight
    with pytest.raises(RankError, match=CheckpointError.__name__):
        run_ranks(journey, args=('fsdp2', models, tmp_path), timeout_s=120)
