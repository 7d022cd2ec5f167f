"""The frozen base of a checkpoint: the same on another kind of GPU, and never another one."""
import warnings
import weakref
from threading import Event

import pytest
import torch

from llm_workbook.checkpoint import save_load
from llm_workbook.checkpoint.manifest import MANIFEST, Manifest
from llm_workbook.checkpoint.save_load import finish_saving, load_checkpoint, save_checkpoint
from llm_workbook.checkpoint.sharded_files import (
    CheckpointError, local_slices, read_slices, write_slices)
from llm_workbook.model.adapters import add_adapters
from llm_workbook.model.quantize import load_nf4


def packed(change):
    "The tiny base with adapters, the statistics of its first packed layer changed."
    model = add_adapters(load_nf4('tiny-base', device='cpu'))
    layer = next(m for m in model.modules() if getattr(m, 'quant_state', None) is not None)
    change(layer.quant_state)
    return model


def round_mean(state): state.offset = torch.nextafter(state.offset, state.offset.new_tensor(1.))
def round_scales(state): state.state2.absmax *= 1 + 2**-23
def another_code(state): state.absmax[5] += 1
def another_scale(state): state.state2.absmax *= 1.01
def another_mean(state): state.offset += 1e-3


@pytest.mark.parametrize('change', [round_mean, round_scales, another_code])
def test_a_base_that_another_device_has_packed_is_the_same_base(tmp_path, change):
    save_checkpoint(tmp_path / 'checkpoint-1', packed(lambda state: None))
    with pytest.warns(UserWarning, match='as another device packs it'):
        load_checkpoint(tmp_path / 'checkpoint-1', packed(change), weights_only=True)


@pytest.mark.parametrize('change', [another_scale, another_mean])
def test_a_base_with_other_scales_is_another_base(tmp_path, change):
    save_checkpoint(tmp_path / 'checkpoint-1', packed(lambda state: None))
    with pytest.raises(CheckpointError, match='was trained on a base with digest'):
        load_checkpoint(tmp_path / 'checkpoint-1', packed(change), weights_only=True)


def test_a_checkpoint_of_a_version_that_kept_one_digest_is_compared_by_it(tmp_path):
    folder = tmp_path / 'checkpoint-1'
    save_checkpoint(folder, packed(lambda state: None))
    manifest = Manifest.parse((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(manifest.model_copy(update={'extra': {}}).dump())
    load_checkpoint(folder, packed(lambda state: None), weights_only=True)
    with pytest.raises(CheckpointError, match='was trained on a base with digest'):
        load_checkpoint(folder, packed(round_mean), weights_only=True)


def test_a_base_is_described_again_when_other_parts_of_it_are_frozen(tmp_path):
    def net(frozen):
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        made[0].requires_grad_(not frozen)
        return made

    live = net(frozen=True)
    for step, frozen in ((1, True), (2, False), (3, True)):
        live[0].requires_grad_(not frozen)
        folder = tmp_path / f'checkpoint-{step}'
        payload = save_checkpoint(folder, live).result().payload
        assert bool(payload) == frozen
        load_checkpoint(folder, net(frozen), weights_only=True)
    live[0].weight.mul_(2)
    with pytest.raises(CheckpointError, match='was trained on a base with digest'):
        load_checkpoint(folder, live, weights_only=True)


def test_a_base_that_stays_is_described_once(tmp_path, monkeypatch):
    calls, describe = [], save_load.describe_base

    def counted(model):
        calls.append(model)
        return describe(model)

    monkeypatch.setattr(save_load, 'describe_base', counted)
    model = packed(lambda state: None)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-3)
    for step in (1, 2):
        for p in trained: p.grad = torch.ones_like(p)
        optimizer.step()
        save_checkpoint(tmp_path / f'checkpoint-{step}', model, optimizer)
    load_checkpoint(tmp_path / 'checkpoint-1', model, optimizer)
    assert len(calls) == 1


# Parts of tensors

class Elsewhere(torch.Tensor):
    "A tensor that counts how many of its copies on the host live at once."
    alive, most = [], 0

    def cpu(self):
        copy = self.as_subclass(torch.Tensor).clone()
        weakref.finalize(copy, Elsewhere.alive.pop)
        Elsewhere.alive.append(1)
        Elsewhere.most = max(Elsewhere.most, len(Elsewhere.alive))
        return copy


def test_parts_come_to_the_host_one_at_a_time(tmp_path):
    tensors = {str(i): torch.full((1000,), float(i)).as_subclass(Elsewhere) for i in range(8)}
    parts = [(name, tensor.data.as_subclass(Elsewhere), (0,)) for name, tensor in tensors.items()]
    write_slices(tmp_path / 'rank-00000-of-00001.safetensors', parts)
    assert Elsewhere.most <= 2 and not Elsewhere.alive  # One is freed when the next has come
    found = {name: torch.zeros(1000) for name in tensors}
    read_slices(tmp_path, found)
    assert all((found[name] == float(name)).all() for name in tensors)


def test_parts_are_this_ranks_tensors_and_no_copies():
    weight = torch.ones(4)
    (_, part, _), = local_slices({'weight': weight})
    assert part.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize('room_b, waits', [(10**9, False), (1000, True)])
def test_without_room_for_a_copy_training_waits_and_is_told(tmp_path, monkeypatch, room_b, waits):
    monkeypatch.setattr(save_load, '_room_b', lambda: room_b)
    model = torch.nn.Linear(64, 64)
    begun, written = Event(), save_load._write

    def write(*args):
        begun.wait(timeout=5 * (not waits))
        return written(*args)

    monkeypatch.setattr(save_load, '_write', write)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        saving = save_checkpoint(tmp_path / 'checkpoint-1', model, wait=False)
    assert saving.done == waits
    told = [str(w.message) for w in seen if 'training waits until' in str(w.message)]
    assert len(told) == waits
    before = model.weight.detach().clone()
    model.weight.data.zero_()
    begun.set()
    finish_saving()
    load_checkpoint(tmp_path / 'checkpoint-1', model, weights_only=True)
    assert torch.equal(model.weight, before)


def test_free_memory_is_that_of_the_container(tmp_path):
    (tmp_path / 'proc').mkdir()
    (tmp_path / 'proc/meminfo').write_text('MemTotal: 9 kB\nMemAvailable:     5000 kB\n')
    assert save_load._free_b(tmp_path) == 5_120_000
    group = tmp_path / 'sys/fs/cgroup'
    group.mkdir(parents=True)
    (group / 'memory.max').write_text('max\n')
    assert save_load._free_b(tmp_path) == 5_120_000
    (group / 'memory.max').write_text('3000000\n')
    (group / 'memory.current').write_text('1000000\n')
    assert save_load._free_b(tmp_path) == 2_000_000
