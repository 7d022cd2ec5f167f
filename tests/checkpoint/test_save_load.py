"""Checkpoints: exact on any number of ranks, whole or not there at all, never gathered, never a
program."""
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from trouble import slow_case

from llm_workbook.checkpoint import save_load as checkpoint

from llm_workbook.checkpoint import sharded_files as slices
from llm_workbook.checkpoint.save_load import (
    finish_saving, load_checkpoint, save_checkpoint, to_universal)
from llm_workbook.checkpoint.manifest import (
    DamagedCheckpoint, begin_save, check_checkpoint, commit_checkpoint, latest_valid)
from llm_workbook.config.recipe import Recipe
from llm_workbook.training.memory_trace import memory_trace
from llm_workbook.training.run_directory import _for_ranks
from llm_workbook.parallel.ranks import RankError, run_ranks
from llm_workbook.checkpoint.consolidate import export_full
from llm_workbook.checkpoint.sharded_files import (
    CheckpointError, base_digest, checkpoint_tensors, local_slices, read_slices, stored_tensors,
    unwrapped_parameters)


@pytest.fixture(scope='module', autouse=True)
def imported():
    "Import once what every rank needs; forks share it."
    import bitsandbytes, peft, transformers  # noqa: E401, F401
    import torch.distributed.checkpoint, torch.distributed.fsdp  # noqa: E401, F401
    import torch.distributed.tensor  # noqa: F401
    transformers.utils.logging.disable_progress_bar()


def toy(wide=7):
    "Two odd layers with dropout, a buffer that persists, one that does not, and a norm."
    import torch

    class Layer(torch.nn.Linear): pass

    class Toy(torch.nn.Module):
        _no_split_modules = ['Layer']

        def __init__(self):
            super().__init__()
            self.one = Layer(wide, 5)
            self.two = Layer(5, 2, bias=False)
            self.norm = torch.nn.LayerNorm(2)
            self.register_buffer('seen', torch.tensor(3.0))
            self.register_buffer('scratch', torch.ones(2), persistent=False)

        def forward(self, x):
            return self.norm(
                self.two(torch.nn.functional.dropout(self.one(x).tanh(), 0.2, self.training)))

    torch.manual_seed(1)
    return Toy()


def tiny(kind):
    from llm_workbook.model.adapters import add_adapters
    from llm_workbook.model.quantize import load_base, load_nf4
    from llm_workbook.config.recipe import Method
    if kind == 'full': return load_base('tiny-base', Method(kind='full'), device='cpu').train()
    return add_adapters(load_nf4('tiny-base', device='cpu')).train()


def prepared(kind, how, rate=1e-2):
    "A model, an optimizer and a scheduler, spread as `how` says."
    import torch
    from llm_workbook.parallel.shard import shard_model
    torch.set_num_threads(1)
    model = toy() if kind == 'toy' else tiny(kind)
    if how == 'fsdp2': model = shard_model(model)
    if how == 'hsdp': model = hybrid(model)
    if how == 'ddp': model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=rate if kind == 'toy' else 1e-4)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def hybrid(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('copies', 'parts'))
    for layer in (model.one, model.two): fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ranks():
    import torch.distributed as dist
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def step(model, optimizer, scheduler, number):
    "One step on this rank's rows of the batch of step `number`; the mean loss of all ranks."
    import torch
    import torch.distributed as dist
    (rank, world), draw = ranks(), torch.Generator().manual_seed(number)
    if type(getattr(model, 'module', model)).__name__.endswith('Toy'):
        out = model(torch.randn(12, 7, generator=draw)[rank::world])
        loss = out.pow(2).mean() + out[:, 0].mean()
    else:
        ids = torch.randint(5, 1000, (4, 16), generator=draw)[rank::world]
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    if dist.is_initialized(): dist.all_reduce(mean)
    return mean.item() / world


def exact(kind, how, folder):
    """Three steps, a save that a thread writes, three steps; then the same three from the
    checkpoint."""
    live = prepared(kind, how)
    for number in range(3): step(*live, number)
    saving = save_checkpoint(
        folder/'checkpoint-3', *live, {'epoch': 0.5, 'rows': [1, 2]}, wait=False)
    rates = [live[1].param_groups[0]['lr']]
    on = [step(*live, number) for number in range(3, 6)]
    saving.result()
    fresh = prepared(kind, how)
    step(*fresh, 99)
    facts = load_checkpoint(folder / 'checkpoint-3', *fresh)
    rates.append(fresh[1].param_groups[0]['lr'])
    return (
        on, [step(*fresh, number) for number in range(3, 6)], facts, rates, saving.bytes,
        base_digest(fresh[0]))


@pytest.mark.parametrize(
    'how, world',
    [('none', 1), ('fsdp2', 2), ('ddp', 2), slow_case('fsdp2', 3), slow_case('hsdp', 4)])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, how, world):
    for on, again, facts, rates, *_ in run_ranks(exact, world, ('toy', how, tmp_path)):
        assert on == again
        assert rates[0] == rates[1] < 1e-2
        assert facts == {'epoch': 0.5, 'rows': [1, 2], 'step': 3, 'ranks': world}
    held = stored_tensors(tmp_path / 'checkpoint-3/model')
    assert {n: tuple(size) for n, (size, _) in held.items()} == {
        n: tuple(t.shape) for n, t in checkpoint_tensors(toy()).items()}


@pytest.mark.slow
def test_the_tiny_base_goes_on_bit_for_bit(tmp_path):
    (tmp_path / 'full').mkdir()
    (tmp_path / 'qlora').mkdir()
    for kind in ('full', 'qlora'):
        for on, again, *_, size_b, digest in run_ranks(exact, 2, (kind, 'fsdp2', tmp_path / kind)):
            assert on == again
        held = stored_tensors(tmp_path / kind / 'checkpoint-3/model')
        if kind == 'full':
            count = sum(size.numel() for size, _ in held.values())
            # Weights and two moments, halved
            assert digest == ''
            assert count > 3_000_000
            assert abs(size_b - 3 * 4 * count / 2) < 1000
            continue
        assert size_b < 2_000_000
        assert all('.lora_' in name for name in held)
        assert len(held) == 56
        # 2 ranks and one process say the same
        assert digest == base_digest(tiny('qlora')) != base_digest(toy_frozen())


def toy_frozen(change=0.0):
    import torch
    model = toy()
    model.one.weight.requires_grad_(False)
    with torch.no_grad(): model.one.weight[4, 6] += change
    return model


# Other ranks

def saved(how, folder):
    live = prepared('toy', how)
    for number in range(3): step(*live, number)
    live[0].eval()  # The next loss must not depend on how dropout is drawn on how many ranks
    save_checkpoint(folder / 'checkpoint-3', *live)
    return whole(live), step(*live, 3)


def whole(live):
    "All tensors of model and optimizer, whole, by name."
    def full(t): return (t.full_tensor() if hasattr(t, 'full_tensor') else t).detach().clone()
    names = {p: name for name, p in unwrapped_parameters(live[0]).items()}
    states = {
        f'{names[p]}.{key}': full(v)
        for p, state in live[1].state.items()
        for key, v in state.items()}
    return {name: full(t) for name, t in checkpoint_tensors(live[0]).items()} | states


def resumed(how, folder):
    live = prepared('toy', how)
    live[0].eval()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        load_checkpoint(folder / 'checkpoint-3', *live)
    return (
        whole(live), step(*live, 3),
        [str(w.message) for w in warned if 'any_ranks' in str(w.message)])


@pytest.mark.parametrize(
    'first, then',
    [
        (('fsdp2', 2), [('none', 1), ('fsdp2', 3)]),
        slow_case(('fsdp2', 2), [('fsdp2', 1), ('fsdp2', 4), ('ddp', 2), ('hsdp', 4)]),
        (('ddp', 2), [('fsdp2', 2), ('ddp', 2)]),
        slow_case(('hsdp', 4), [('fsdp2', 2)])])
def test_other_ranks_read_what_they_need(tmp_path, first, then):
    before, loss = run_ranks(saved, first[1], (first[0], tmp_path))[0]
    for how, world in then:
        for after, again, messages in run_ranks(resumed, world, (how, tmp_path)):
            assert before.keys() == after.keys()
            assert all(before[name].equal(after[name]) for name in before)
            assert abs(again - loss) <= 1e-6
            assert not messages


def test_one_copy_alone_is_written(tmp_path):
    from safetensors.torch import load_file
    before, _ = run_ranks(saved, 4, ('hsdp', tmp_path))[0]
    files = sorted((tmp_path / 'checkpoint-3' / 'model').glob('*.safetensors'))
    written = [sum(t.numel() for t in load_file(file).values()) for file in files]
    assert len(written) == 4 and written[2:] == [0, 0]
    model = [t for name, t in before.items() if name in checkpoint_tensors(toy())]
    assert sum(written) == sum(t.numel() for t in model) > 0


def test_ddp_warns_of_other_ranks(tmp_path):
    run_ranks(saved, 2, ('ddp', tmp_path))
    [(_, _, messages)] = run_ranks(resumed, 1, ('none', tmp_path))
    assert 'checkpoint-3 is of 2 ranks and there are 1' in messages[0]
    model, *rest = prepared('toy', 'none')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        load_checkpoint(tmp_path / 'checkpoint-3', model, *rest, any_ranks=True)


def streams(folder):
    import random, numpy, torch  # noqa: E401
    live = prepared('toy', 'fsdp2')
    if ranks()[1] == 2: save_checkpoint(folder / 'checkpoint-1', *live)
    else: load_checkpoint(folder / 'checkpoint-1', *live)
    return random.random(), numpy.random.rand(), torch.rand(1).item()


def test_ranks_that_join_draw_their_own_numbers(tmp_path):
    two = run_ranks(streams, 2, (tmp_path,))
    four = run_ranks(streams, 4, (tmp_path,))
    assert four[:2] == two
    assert len({draws[2] for draws in four[1:]}) == 3


# Optimizers and schedulers

@pytest.mark.parametrize(
    'name, how',
    [
        ('SGD', {}),
        ('SGD', {'momentum': 0.9}),
        ('AdamW', {'amsgrad': True}),
        ('AdamW', {'fused': True}),
        ('Adagrad', {}),
        ('RMSprop', {'centered': True}),
        ('Adafactor', {}),
        ('NAdam', {})])
def test_optimizers_go_on(tmp_path, name, how):
    import torch

    def made():
        model = toy()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **how)
        return (
            model, optimizer,
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.9**number))

    live = made()
    fresh = made()
    for number in range(3): step(*live, number)
    save_checkpoint(tmp_path / 'checkpoint-3', *live)
    on = [step(*live, number) for number in (3, 4)]
    load_checkpoint(tmp_path / 'checkpoint-3', *fresh)
    assert on == [step(*fresh, number) for number in (3, 4)]


def with_tables(how):
    "A model and an optimizer that keeps a plain table for the slice of each rank."
    import torch
    from llm_workbook.parallel.shard import shard_model

    class Tables(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group['params']:
                    self.state[p]['table'] = torch.ones(p.to_local().numel())
            return super().step(closure)

    model = shard_model(toy()) if how == 'fsdp2' else hybrid(toy())
    optimizer = Tables(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def saves_tables(folder):
    live = with_tables('hsdp')
    step(*live, 0)
    save_checkpoint(folder / 'checkpoint-1', *live)
    load_checkpoint(folder / 'checkpoint-1', *with_tables('hsdp'))
    load_checkpoint(folder / 'checkpoint-1', *with_tables('fsdp2'))


def test_tables_of_one_rank_are_refused_in_other_groups(tmp_path):
    words = r'table@0 is of one of 2 ranks that share a copy, not 4: set sharding.group to 2'
    with pytest.raises(RankError, match=words): run_ranks(saves_tables, 4, (tmp_path,))


def test_a_rate_that_is_a_tensor_stays_one(tmp_path):
    import torch
    model = toy()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=torch.tensor(0.5), foreach=False, capturable=False)
    save_checkpoint(tmp_path / 'checkpoint-1', model, optimizer)
    rate = optimizer.param_groups[0]['lr'].fill_(1.0)
    load_checkpoint(tmp_path / 'checkpoint-1', model, optimizer)
    assert optimizer.param_groups[0]['lr'] is rate
    assert rate == 0.5
    assert optimizer.param_groups[0]['betas'] == (0.9, 0.999)


def test_what_accelerate_wraps_is_found(tmp_path):
    model, optimizer, scheduler = prepared('toy', 'none')
    step(model, optimizer, scheduler, 0)
    save_checkpoint(
        tmp_path/'checkpoint-1', model, SimpleNamespace(optimizer=optimizer),
        SimpleNamespace(scheduler=scheduler))
    fresh = prepared('toy', 'none')
    load_checkpoint(
        tmp_path/'checkpoint-1', fresh[0], SimpleNamespace(optimizer=fresh[1]),
        SimpleNamespace(scheduler=fresh[2]))
    assert fresh[1].state[fresh[0].one.weight]['step'] == 1
    assert fresh[2].last_epoch == 1


def test_what_json_would_change_is_refused(tmp_path):
    import torch
    model, optimizer, _ = prepared('toy', 'none')
    milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    with pytest.raises(ValueError, match='scheduler.milestones is a Counter'):
        save_checkpoint(tmp_path / 'checkpoint-1', model, optimizer, milestones)
    with pytest.raises(ValueError, match=r'facts.at\[1\] is a Path|facts.at\[1\] is a PosixPath'):
        save_checkpoint(tmp_path / 'checkpoint-1', model, facts={'at': [1, tmp_path]})
    with pytest.raises(ValueError, match="not named for its step: .*last/checkpoint-100'"):
        save_checkpoint(tmp_path / 'last', model)
    assert not list(tmp_path.iterdir())


# Asynchronous

@contextmanager
def slow(seconds=0.0, breaks=None, kills=None):
    "Write slowly; on rank `breaks` run out of disk at the second file, on rank `kills` die there."
    plain, count = slices.write_slices, [0]
    def write(path, parts):
        count[0] += 1
        time.sleep(seconds)
        if count[0] == 2 and ranks()[0] == breaks: raise OSError(28, 'No space left on device')
        if count[0] == 2 and ranks()[0] == kills: os.kill(os.getpid(), signal.SIGKILL)
        return plain(path, parts)
    checkpoint.write_slices = write
    try: yield count
    finally: checkpoint.write_slices = plain


def late(folder):
    "Change everything while a thread writes; a second save waits for the first."
    import torch
    live = prepared('toy', 'fsdp2')
    for number in range(2): step(*live, number)
    before = whole(live)
    with slow(1.0):
        saving = save_checkpoint(folder / 'checkpoint-2', *live, wait=False)
        early = saving.done
        time.sleep(0.1 * ranks()[0])  # Meanwhile the ranks talk on their own line
        assert base_digest(live[0]) == ''
        with torch.no_grad():
            for p in live[0].parameters(): p.zero_()
        for state in live[1].state.values():
            state['exp_avg'].zero_()
            state['step'].zero_()
        begin = time.monotonic()
        second = save_checkpoint(folder / 'checkpoint-3', *live, wait=False)
        waited, first_done = time.monotonic() - begin, saving.done
        finish_saving()
    fresh = prepared('toy', 'fsdp2')
    load_checkpoint(folder / 'checkpoint-2', *fresh)
    after = whole(fresh)
    return (
        early, first_done, second.done, waited,
        all(before[name].equal(after[name]) for name in before), saving.blocked_s)


def test_what_is_written_is_the_state_at_the_call(tmp_path):
    for early, first_done, second_done, waited, same, blocked_s in run_ranks(late, 2, (tmp_path,)):
        assert not early
        assert first_done
        assert second_done
        assert same
        assert waited > 1.0 > blocked_s


def blocked():
    """How long a copy takes here, and how long a save holds its caller that copies, and one that
    waits."""
    import tempfile, torch  # noqa: E401
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))  # 67 MB
    rows = []
    with tempfile.TemporaryDirectory() as folder, slow(0.5):
        for number in range(3):
            begin = time.monotonic()
            checkpoint._copied({'model': local_slices(checkpoint_tensors(model))})
            copy_s = time.monotonic() - begin
            saving = save_checkpoint(Path(folder) / f'checkpoint-{number}', model, wait=False)
            finish_saving()
            rows.append((saving.blocked_s, copy_s, saving.bytes))
        waits = save_checkpoint(Path(folder) / 'checkpoint-9', model)
    return rows, waits.blocked_s


def test_training_waits_for_the_copy_and_no_longer():
    rows, waits_s = blocked()
    assert rows[0][2] == 4 * 4 * 2048 * 2049
    # Beyond the copy: three words among ranks
    assert min(held_s - copy_s for held_s, copy_s, _ in rows) < 0.25 < 0.5 < waits_s


@pytest.mark.slow
def test_a_program_that_ends_waits_for_its_checkpoint(tmp_path):
    program = (
        'import sys, time, torch; from llm_workbook.checkpoint import save_load as checkpoint; '
        'plain = checkpoint.write_slices; '
        'checkpoint.write_slices = lambda *parts: (time.sleep(0.5), plain(*parts))[1]; '
        'checkpoint.save_checkpoint(sys.argv[1], torch.nn.Linear(3, 3), wait=False); print("left")')
    done = subprocess.run(
        [sys.executable, '-c', program, str(tmp_path/'checkpoint-1')], capture_output=True,
        text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, 'left\n'), done.stderr
    assert latest_valid(tmp_path).name == 'checkpoint-1'


def fails(folder):
    """Rank 1 runs out of disk in the thread: every rank hears of it, nothing is committed, and the
    next save works."""
    live = prepared('toy', 'fsdp2')
    save_checkpoint(folder / 'checkpoint-1', *live)
    errors = []
    with slow(breaks=1):
        saving = save_checkpoint(folder / 'checkpoint-2', *live, wait=False)
        try: saving.result()
        except CheckpointError as error: errors.append(str(error))
    newest = latest_valid(folder).name
    with slow(breaks=1):
        save_checkpoint(folder / 'checkpoint-2', *live, wait=False)
        try: save_checkpoint(folder / 'checkpoint-3', *live)
        except CheckpointError as error: errors.append(str(error))
    save_checkpoint(folder / 'checkpoint-2', *live)
    return errors, newest, latest_valid(folder).name


def test_an_error_in_the_thread_is_heard_on_every_rank(tmp_path):
    for rank, (errors, before, after) in enumerate(run_ranks(fails, 2, (tmp_path,))):
        assert (before, after) == ('checkpoint-1', 'checkpoint-2')
        assert len(errors) == 2
        assert all(
            'checkpoint-2 is not committed' in text and 'No space left' in text for text in errors)
        assert rank or 'rank 1 failed' in errors[0]


def leaves_early(folder):
    "The process group goes while a thread still writes: no rank may take itself for all."
    import torch.distributed as dist
    live = prepared('toy', 'fsdp2')
    save_checkpoint(folder / 'checkpoint-1', *live)
    with slow(1.0):
        saving = save_checkpoint(folder / 'checkpoint-2', *live, wait=False)
        dist.destroy_process_group()
        try: saving.result()
        except CheckpointError as error: return str(error)


def test_a_group_that_is_destroyed_commits_nothing(tmp_path):
    errors = run_ranks(leaves_early, 2, (tmp_path,))
    assert all('checkpoint-2 is not committed' in text for text in errors), errors
    assert latest_valid(tmp_path).name == 'checkpoint-1'


def dies(folder):
    live = prepared('toy', 'fsdp2')
    save_checkpoint(folder / 'checkpoint-1', *live)
    with slow(kills=1): save_checkpoint(folder / 'checkpoint-2', *live)


def test_a_rank_killed_between_its_files_leaves_the_checkpoint_before(tmp_path):
    with pytest.raises(RankError, match='rank 1 was killed by SIGKILL'):
        run_ranks(dies, 2, (tmp_path,))
    assert (tmp_path / 'checkpoint-2').is_dir()
    assert latest_valid(tmp_path).name == 'checkpoint-1'


# What is refused

def test_missing_parts_are_refused(tmp_path):
    model, optimizer, scheduler = prepared('toy', 'none')
    step(model, optimizer, scheduler, 0)
    save_checkpoint(tmp_path / 'checkpoint-1', model, optimizer, scheduler)
    save_checkpoint(tmp_path / 'checkpoint-2', model)
    for number, rest, text in (
        (1, (), 'holds the optimizer, and none'),
        (1, (optimizer,), 'holds the scheduler, and none'),
        (2, (optimizer,), 'holds no optimizer'),
        (2, (None, scheduler), 'holds no scheduler')
    ):
        with pytest.raises(CheckpointError, match=text):
            load_checkpoint(tmp_path / f'checkpoint-{number}', model, *rest)
    for part in ('optimizer', 'rng', 'scheduler.json'):
        folder = tmp_path / part.partition('.')[0] / 'checkpoint-1'
        shutil.copytree(tmp_path / 'checkpoint-1', folder)
        shutil.rmtree(folder / part, ignore_errors=True)
        (folder / part).unlink(missing_ok=True)
        with pytest.raises(DamagedCheckpoint, match=part):
            load_checkpoint(folder, model, optimizer, scheduler)
        fresh = toy()
        fresh.one.weight.data.zero_()
        assert load_checkpoint(folder, fresh, weights_only=True)['step'] == 1
        assert fresh.one.weight.equal(model.one.weight)
    file = next((folder / 'model').iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match='model/rank-00000'):
        load_checkpoint(folder, model, weights_only=True)


def test_another_model_optimizer_or_base_is_refused(tmp_path):
    import torch
    model, optimizer, _ = prepared('toy', 'none')
    step(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), 0)
    save_checkpoint(tmp_path / 'checkpoint-1', model, optimizer)
    wide = toy(8)
    with pytest.raises(
        CheckpointError,
        match=r'one.weight is \(5, 7\) of float32 there and \(5, 8\) of float32 here'
    ):
        load_checkpoint(tmp_path / 'checkpoint-1', wide, weights_only=True)
    with pytest.raises(CheckpointError, match='1 tensors differ: seen'):
        load_checkpoint(tmp_path / 'checkpoint-1', unbuffered(), weights_only=True)
    half = toy().to(torch.bfloat16)
    with pytest.raises(CheckpointError, match='of bfloat16 here'):
        load_checkpoint(tmp_path / 'checkpoint-1', half, weights_only=True)
    groups = torch.optim.AdamW([{'params': [p]} for p in model.parameters()])
    with pytest.raises(CheckpointError, match='in other groups'):
        load_checkpoint(tmp_path / 'checkpoint-1', model, groups)
    save_checkpoint(tmp_path / 'checkpoint-2', toy_frozen())
    load_checkpoint(tmp_path / 'checkpoint-2', toy_frozen(), weights_only=True)
    with pytest.raises(CheckpointError, match='was trained on a base with digest'):
        load_checkpoint(tmp_path / 'checkpoint-2', toy_frozen(1e-6), weights_only=True)


def unbuffered():
    model = toy()
    del model.seen
    return model


class Program:
    "What a pickle can do when it is read."
    def __init__(self, path): self.path = path

    def __reduce__(self): return open, (str(self.path), 'w')


def test_no_pickle_is_read_and_none_is_written(tmp_path):
    model, optimizer, scheduler = prepared('toy', 'none')
    step(model, optimizer, scheduler, 0)
    save_checkpoint(tmp_path / 'checkpoint-1', model, optimizer, scheduler)
    files = [p for p in (tmp_path / 'checkpoint-1').rglob('*') if p.is_file()]
    assert {p.suffix for p in files} == {'.json', '.safetensors'}
    foreign = tmp_path / 'checkpoint-2'
    foreign.mkdir()
    for name in ('optimizer.pt', '.metadata'):
        (foreign / name).write_bytes(pickle.dumps(Program(tmp_path / 'ran')))
        shutil.copy(foreign / name, tmp_path / 'checkpoint-1' / name)
        with pytest.raises(DamagedCheckpoint): load_checkpoint(foreign, model, optimizer, scheduler)
        with pytest.raises(DamagedCheckpoint, match=name):
            load_checkpoint(tmp_path / 'checkpoint-1', model, optimizer, scheduler)
        with pytest.raises(DamagedCheckpoint, match=name):
            load_checkpoint(tmp_path / 'checkpoint-1', model, weights_only=True)
        (tmp_path / 'checkpoint-1' / name).unlink()
    assert not (tmp_path / 'ran').exists()


# Nothing is gathered

def wide():
    "Four layers of 2.4 million parameters, sharded, after one step: 113 MB with the moments."
    import torch
    from torch.distributed.fsdp import fully_shard
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(1536, 1536) for _ in range(4)))
    for layer in model: fully_shard(layer)
    optimizer = torch.optim.AdamW(fully_shard(model).parameters())
    model(torch.randn(2, 1536)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def traffic(folder):
    "Bytes of all collectives of a save and a load, and what this rank copies of how much."
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    sent = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if any('DTensor' in kind.__name__ for kind in types): return NotImplemented
            if function._schema.name.startswith(('c10d', '_c10d')):
                sent.append(
                    sum(t.nbytes for t in tree_leaves((args, kwargs or {})) if torch.is_tensor(t)))
            return function(*args, **(kwargs or {}))

    live = wide()
    unit_b = 4 * 1536 * 1537
    save_checkpoint(folder / 'checkpoint-0', *live)  # The first one also opens connections
    with Recorder(), memory_trace() as memory:
        saving = save_checkpoint(folder / 'checkpoint-1', *live, wait=False)
        finish_saving()
    with Recorder(), memory_trace() as loading: load_checkpoint(folder / 'checkpoint-1', *live)
    total_b = 3 * sum(p.numel() * 4 for p in live[0].parameters())
    return (
        sum(sent), len(sent), saving.bytes, total_b, unit_b,
        memory.peak.host_b - memory.begin.host_b, loading.peak.host_b - loading.begin.host_b)


def test_no_rank_gathers_the_model(tmp_path):
    for sent_b, collectives, share_b, total_b, unit_b, save_b, load_b in run_ranks(
        traffic, 2, (tmp_path,)
    ):
        assert collectives
        assert sent_b < 2**16 < total_b / 1000  # Words among ranks, no weights
        assert share_b <= total_b / 2 + unit_b
        assert max(save_b, load_b) <= total_b / 2 + unit_b + 2**24 < 0.8 * total_b


# Export

def exports(folder):
    model, optimizer, scheduler = prepared('full', 'fsdp2')
    step(model, optimizer, scheduler, 0)
    save_checkpoint(folder / 'checkpoint-1', model)
    shapes = export_full(folder / 'checkpoint-1', folder / 'model', 'tiny-base', shard_b=4_000_000)
    export_full(folder / 'checkpoint-1', folder / 'half', 'tiny-base', dtype='bfloat16')
    whole = {name: p.full_tensor().detach() for name, p in unwrapped_parameters(model).items()}
    return shapes, whole


def test_the_whole_model_is_exported(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM
    shapes, weights = run_ranks(exports, 2, (tmp_path,))[0]
    assert len(list((tmp_path / 'model').glob('*.safetensors'))) >= 3
    assert shapes == {n: tuple(t.shape) for n, t in weights.items()}
    for name, dtype in (('model', torch.float32), ('half', torch.bfloat16)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert all(p.equal(weights[n].to(dtype)) for n, p in model.named_parameters())
    index = json.loads((tmp_path / 'model/model.safetensors.index.json').read_text())
    assert index['weight_map'].keys() == weights.keys()
    (tmp_path / 'half').rename(tmp_path / 'first')
    export_full(tmp_path/'checkpoint-1', tmp_path/'half', 'tiny-base', dtype='bfloat16', load=False)
    names = sorted(path.name for path in (tmp_path / 'first').iterdir())
    assert all(
        (tmp_path/'half'/name).read_bytes() == (tmp_path/'first'/name).read_bytes()
        for name in names)
    with pytest.raises(FileExistsError, match="'model' holds a model"):
        export_full(tmp_path / 'checkpoint-1', tmp_path / 'model', 'tiny-base')
    save_checkpoint(tmp_path / 'checkpoint-2', toy_frozen())
    with pytest.raises(ValueError, match='only a whole model'):
        export_full(tmp_path / 'checkpoint-2', tmp_path / 'none', 'tiny-base')
    with pytest.raises(ValueError, match='strategy none, which loads on any number'):
        to_universal(tmp_path / 'checkpoint-2')


def test_slices_of_a_tensor_meet(tmp_path):
    "Bytes, dtypes and shapes that a file could get wrong."
    import torch

    tensors = {
        'flag': torch.tensor([True, False]), 'byte': torch.arange(5, dtype=torch.uint8),
        'scalar': torch.tensor(2.5, dtype=torch.float64),
        'half': torch.randn(3, 2).to(torch.bfloat16), 'none': torch.zeros(0, 4),
        'eighth': torch.randn(4).to(torch.float8_e4m3fn),
        'turned': torch.arange(6.0).reshape(2, 3).T}
    slices.write_slices(tmp_path / 'rank.safetensors', local_slices(tensors))
    empty = {name: torch.zeros_like(t) for name, t in tensors.items()}
    read_slices(tmp_path, empty)
    def as_bytes(t): return t.contiguous().flatten().view(torch.uint8)
    assert all(as_bytes(t).equal(as_bytes(empty[name])) for name, t in tensors.items())
    with pytest.raises(CheckpointError, match='complex64 is no type that safetensors knows'):
        slices.write_slices(
            tmp_path/'odd.safetensors',
            local_slices({'odd': torch.zeros(2, dtype=torch.complex64)}))


def reads_badly(folder):
    """The disk fails on rank 1 while it reads: torch's own exception there is no Exception, and
    rank 0 must hear of it."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    live = prepared('toy', 'fsdp2')
    save_checkpoint(folder / 'checkpoint-1', *live)

    def broken(self, *args): raise OSError(5, 'Input/output error')
    if dist.get_rank() == 1: HuggingFaceStorageReader.read_data = broken
    try: load_checkpoint(folder / 'checkpoint-1', *live)
    except Exception as error: return f'{type(error).__name__}: {error}'


def test_a_disk_that_fails_while_it_is_read_is_heard_on_every_rank(tmp_path):
    first, second = run_ranks(reads_badly, 2, (tmp_path,), timeout_s=30)
    assert (
        second == "CheckpointError: 'model' cannot be read: OSError: [Errno 5] Input/output error")
    assert first == f'RankError: rank 1 failed: {second}'


def test_a_module_with_an_at_sign_in_its_name_keeps_its_optimizer_state(tmp_path):
    import torch

    def begun():
        torch.manual_seed(0)
        net = torch.nn.ModuleDict({'en@v1': torch.nn.Linear(4, 4), 'de': torch.nn.Linear(4, 4)})
        return net, torch.optim.AdamW(net.parameters(), 1e-2)

    def step(net, optimizer):
        optimizer.zero_grad()
        for layer in net.values(): layer(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()

    live, resumed = begun(), begun()
    step(*live)
    save_checkpoint(tmp_path / 'checkpoint-1', *live)
    load_checkpoint(tmp_path / 'checkpoint-1', *resumed)
    for each in live, resumed: step(*each)
    assert all(map(torch.equal, live[0].parameters(), resumed[0].parameters()))
    marked = torch.nn.ParameterDict({'en@1': torch.ones(2)})
    with pytest.raises(CheckpointError, match='en@1 has an @ in its name'):
        save_checkpoint(tmp_path / 'checkpoint-2', marked)


def saved_by_deepspeed(directory, words):
    "A committed checkpoint with the layout of DeepSpeed's, whose optimizer has states `words`."
    import torch
    folder = begin_save(directory, 3)
    (folder / 'zero').mkdir()
    torch.save({'state': dict.fromkeys(words, torch.ones(2))},
               folder / 'zero/zero_pp_rank_0_mp_rank_00_optim_states.pt')
    facts = {'step': 3, 'ranks': 2, 'strategy': 'zero2', 'method': 'full', 'recipe_hash': ''}
    commit_checkpoint(folder, facts)
    return folder


@pytest.mark.parametrize('words', [
    (), ('momentum_buffer',), ('state1', 'qmap1'), ('exp_avg_sq', 'exp_avg_sq_row')])
def test_states_that_no_program_converts_are_told_before_a_conversion(tmp_path, words):
    folder = saved_by_deepspeed(tmp_path, words)
    engine = SimpleNamespace(zero_optimization_stage=lambda: 2)
    for attempt in (lambda: to_universal(folder),
                    lambda: checkpoint._load_zero(folder, check_checkpoint(folder), engine, False)):
        with pytest.raises(CheckpointError, match='only the states of plain Adam .* Use 2 ranks'):
            attempt()
    assert not (tmp_path / 'universal').exists()


@pytest.mark.parametrize('ended', [None, KeyboardInterrupt])
def test_a_conversion_that_fails_leaves_no_folder(tmp_path, monkeypatch, ended):
    def run(command, **how):
        Path(command[-1]).mkdir()
        if ended: raise ended
        return SimpleNamespace(returncode=1, stderr='KeyError: no such parameter')

    folder = saved_by_deepspeed(tmp_path, ('exp_avg', 'exp_avg_sq'))
    monkeypatch.setattr(checkpoint.subprocess, 'run', run)
    with pytest.raises(ended or CheckpointError, match=None if ended else 'no such parameter'):
        to_universal(folder)
    assert not [*(tmp_path / 'universal').iterdir()]


def test_an_interrupted_conversion_counts_as_none_and_a_damaged_one_is_named(tmp_path):
    folder = saved_by_deepspeed(tmp_path, ('exp_avg', 'exp_avg_sq'))
    recipe = Recipe.named('reviews-qlora').changed({'cluster.processes': 3})
    (tmp_path / 'universal').mkdir()
    converted = begin_save(tmp_path / 'universal', 3)
    assert _for_ranks(folder, recipe) == folder
    (converted / 'file').write_text('long')
    facts = check_checkpoint(folder).model_dump(include={
        'step', 'ranks', 'method', 'recipe_hash'})
    commit_checkpoint(converted, facts | {'strategy': 'zero2-universal'})
    assert _for_ranks(folder, recipe) == converted
    (converted / 'file').write_text('short')
    with pytest.raises(DamagedCheckpoint, match='delete universal/checkpoint-3 and convert again'):
        _for_ranks(folder, recipe)
