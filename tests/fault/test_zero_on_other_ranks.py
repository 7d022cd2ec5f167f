"""A ZeRO checkpoint on another number of ranks: refused with a command, and the command works."""
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from trouble import disturb, files, fine_tune, losses, small_base, small_recipe

from llm_workbook.checkpoint.save_load import load_checkpoint, save_checkpoint, to_universal
from llm_workbook.parallel.ranks import RankError, run_ranks
from llm_workbook.training.resume import Preempted

os.environ.setdefault('DS_ACCELERATOR', 'cpu')


@pytest.fixture(scope='module', autouse=True)
def imported():
    "Import once what every rank needs, before the first fork."
    import llm_workbook.model.quantize  # noqa: F401  First: it silences bitsandbytes
    deepspeed = pytest.importorskip('deepspeed')
    from deepspeed.ops import __compatible_ops__
    deepspeed.utils.logger.setLevel('ERROR')
    __compatible_ops__['deepspeed_shm_comm'] = False  # Else its first use compiles


def engine(base, stage, universal=False):
    import deepspeed, torch  # noqa: E401
    from llm_workbook.model.quantize import load_base
    from llm_workbook.config.recipe import Method
    torch.set_num_threads(1)
    model = load_base(str(base), Method(kind='full'), device='cpu')
    config = {
        'train_micro_batch_size_per_gpu': 2,
        'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3, 'torch_adam': True}},
        'zero_optimization': {'stage': stage}, 'checkpoint': {'load_universal': universal}}
    parameters = list(model.parameters())
    made = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    return made[0]


def step(engine, number):
    "Train on the rows of this rank; give back the loss over all ranks."
    import torch, torch.distributed as dist  # noqa: E401
    generator = torch.Generator().manual_seed(number)
    rows = torch.randint(5, 1000, (4, 16), generator=generator)
    ids = rows[dist.get_rank()::dist.get_world_size()]
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def train_save_and_go_on(base, stage, folder):
    "Train two steps, save, and give back the losses of the next two."
    live = engine(base, stage)
    step(live, 0)
    step(live, 1)
    save_checkpoint(folder / 'checkpoint-2', live, facts={'epoch': 0.5})
    return [step(live, number) for number in (2, 3)]


def load_and_go_on(base, stage, folder, universal=False):
    "Load, and give back the losses of the next two steps with the facts of the checkpoint."
    live = engine(base, stage, universal)
    facts = load_checkpoint(folder, live)
    return [step(live, number) for number in (2, 3)], facts


@pytest.mark.slow
def test_09_zero_names_the_command_that_converts(tmp_path, monkeypatch):
    "Of stage 3; the run below is of stage 1."
    stage = 3
    # DeepSpeed opens one at import
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path / 'compiled'))
    base = small_base(tmp_path / 'base')
    folder = tmp_path / 'checkpoint-2'
    arguments = base, stage, tmp_path
    undisturbed = run_ranks(train_save_and_go_on, 2, arguments, timeout_s=120)[0]
    # DeepSpeed leaves programs there
    assert not [name for name in files(folder) if name.endswith('.py')]
    arguments = base, stage, folder
    resumed, facts = run_ranks(load_and_go_on, 2, arguments, timeout_s=120)[0]
    assert resumed == undisturbed
    assert facts == {'epoch': 0.5, 'step': 2, 'ranks': 2}
    with pytest.raises(
        RankError, match='was saved by DeepSpeed on 2 ranks and there are 1'
    ) as refused:
        run_ranks(load_and_go_on, 1, arguments, timeout_s=120)
    command = next(line for line in refused.value.reason.splitlines() if 'to_universal' in line)
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    place = Path(done.stdout.splitlines()[-1])
    with pytest.raises(RankError, match="'load_universal': True"):
        run_ranks(load_and_go_on, 1, (base, stage, place), timeout_s=120)
    arguments = base, stage, place, True
    [(on_one_rank, facts)] = run_ranks(load_and_go_on, 1, arguments, timeout_s=120)
    assert max(abs(a - b) for a, b in zip(on_one_rank, undisturbed)) <= 1e-6
    assert facts['ranks'] == 2


@pytest.mark.slow
def test_09_a_zero_run_goes_on_with_other_ranks_once_its_checkpoint_is_converted(
    tmp_path, monkeypatch
):
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path/'compiled'))
    recipe = small_recipe(tmp_path, **{'sharding.strategy': 'zero1'})
    whole = fine_tune(recipe, tmp_path/'whole')
    with monkeypatch.context() as patch:
        disturb(patch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Preempted) as preempted: fine_tune(recipe, tmp_path/'run')
    alone = recipe.changed({'cluster.processes': 1, 'batch.accumulation': 2})
    with pytest.raises(RankError, match='was saved by DeepSpeed on 2 ranks and there are 1'):
        fine_tune(alone, tmp_path/'run', resume=True)
    to_universal(tmp_path/'run'/f'checkpoint-{preempted.value.step}')
    resumed = fine_tune(alone, tmp_path/'run', resume=True)
    assert losses(resumed.directory) == pytest.approx(losses(whole.directory), abs=1e-4)


def grouped_engine(stage, universal=False):
    "A small net whose norm and biases are in a group of their own, without weight decay."
    import deepspeed, torch  # noqa: E401
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    matrices, others = [[p for p in net.parameters() if (p.ndim == 2) is wide]
                        for wide in (True, False)]
    groups = [{'params': matrices, 'weight_decay': 0.1},
              {'params': others, 'weight_decay': 0.0, 'lr': 2e-3}]
    config = {
        'train_micro_batch_size_per_gpu': 1, 'zero_allow_untested_optimizer': True,
        'zero_optimization': {'stage': stage}, 'checkpoint': {'load_universal': universal}}
    made = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config)
    return made[0]


def net_step(engine, number):
    "Train on one row, the same on every rank; give back its loss."
    import torch
    row = torch.randn(1, 8, generator=torch.Generator().manual_seed(number))
    loss = (engine(row) - row).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def net_losses(stage, folder, universal=False):
    "Five steps and a checkpoint, or load it; then three steps more, and what the optimizer has."
    live = grouped_engine(stage, universal)
    optimizer = live.optimizer.optimizer
    if universal:
        load_checkpoint(folder, live)
    else:
        for number in range(5): net_step(live, number)
        for group in optimizer.param_groups: group['lr'] /= 2
        save_checkpoint(folder, live)
    later = [net_step(live, number) for number in (5, 6, 7)]
    counted = [float(state['step']) for state in optimizer.state.values()]
    groups = [(group['lr'], group['weight_decay']) for group in optimizer.param_groups]
    return later, counted, groups


@pytest.mark.slow
def test_a_converted_checkpoint_keeps_the_groups_and_counts_of_its_optimizer(
    tmp_path, monkeypatch
):
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path / 'compiled'))
    folder = tmp_path / 'checkpoint-5'
    undisturbed = run_ranks(net_losses, 2, (3, folder), timeout_s=120)[0]
    losses, counted, groups = run_ranks(
        net_losses, 1, (3, to_universal(folder), True), timeout_s=120)[0]
    assert losses == pytest.approx(undisturbed[0], abs=1e-6)
    assert counted == undisturbed[1] == [8, 8]
    assert groups == undisturbed[2] == [(5e-4, 0.1), (1e-3, 0.0)]
