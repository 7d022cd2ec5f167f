"""CPU ranks on a machine with a GPU: nothing touches it, neither in the kernel nor in a rank.

The GPU is emulated. Torch's Python side answers as a CUDA build does where one GPU is visible and a
library has opened it, as bitsandbytes does when it is imported: it has counted one device, a forked
process can open none, and FSDP2's default device is CUDA.
"""
import os

import pytest
import torch
from trouble import fine_tune, losses, slow_case, small_recipe

from llm_workbook import Recipe, rehearse
from llm_workbook.parallel import ranks as module
from llm_workbook.parallel.ranks import notebook_ranks

ALONE = {'cluster.processes': 1, 'sharding.strategy': 'none'}
QLORA = {
    'method.kind': 'qlora', 'method.rank': 4, 'precision.compute': 'bfloat16',
    'sharding.activation_checkpointing': 'full'}
ZERO = {
    'sharding.strategy': 'zero2', 'precision': {'compute': 'float32'},
    'zero.reduce_bucket': 1_000_000}


@pytest.fixture
def gpu_machine(monkeypatch):
    "Let torch say that there is a GPU, and that this process has opened it."
    # Imported before CUDA says that it is there
    import datasets, peft, transformers.trainer, trl.trainer.sft_trainer  # noqa: E401, F401
    kernel = os.getpid()

    def open_cuda():
        if os.getpid() != kernel:
            raise RuntimeError('Cannot re-initialize CUDA in forked subprocess')
        raise AssertionError('the kernel touches CUDA')

    def device_count():
        known = torch.cuda._cached_device_count
        if known is not None: return known
        return 0 if os.environ.get('CUDA_VISIBLE_DEVICES') == '' else 1

    changes = {
        '_lazy_init': open_cuda,
        'set_device': lambda device: open_cuda(),
        'current_device': open_cuda,
        'device_count': device_count,
        'is_available': lambda: device_count() > 0,
        '_is_in_bad_fork': lambda: os.getpid() != kernel,
        'manual_seed_all': lambda seed: None,  # Of a kernel that has opened CUDA, harmless
        '_cached_device_count': 1}
    for name, value in changes.items(): monkeypatch.setattr(torch.cuda, name, value)
    accelerator = torch.device('cuda')
    monkeypatch.setattr(torch._C, '_get_accelerator', lambda *args: accelerator)


def test_the_emulation_is_one(gpu_machine):
    "What the project avoids does fail: a fork that asks every GPU for its generator."
    def ask():
        with torch.random.fork_rng(): return torch.cuda.device_count()

    with pytest.raises(AssertionError, match='touches CUDA'): torch.zeros(1).cuda()
    with pytest.raises(module.RankError, match='re-initialize CUDA'):
        notebook_ranks(ask, 1, env={'ACCELERATE_USE_CPU': 'true'})


def test_a_rank_counts_devices_anew(gpu_machine):
    def count(): return torch.cuda.device_count(), torch.cuda.is_available()
    hidden = {'ACCELERATE_USE_CPU': 'true', 'CUDA_VISIBLE_DEVICES': ''}
    assert notebook_ranks(count, 1, env=hidden) == [(0, False)]


@pytest.mark.parametrize(
    'changes',
    [
        QLORA,
        slow_case({}),
        slow_case({'method.kind': 'lora', 'sharding.strategy': 'ddp'}),
        slow_case(QLORA | ALONE),
        slow_case(QLORA | {'sharding.loading': 'sharded'}),
        slow_case(ZERO),
        slow_case(ZERO | {'sharding.strategy': 'zero3', 'method.kind': 'lora'}),
        slow_case(
            {'optimizer.kind': 'adamw_8bit', 'method.kind': 'lora', 'sharding.strategy': 'ddp'})],
    ids=['qlora', 'full', 'ddp', 'one process', 'loaded sharded', 'zero2', 'zero3', '8-bit'])
def test_cpu_runs_leave_the_gpu_alone(gpu_machine, tmp_path, changes):
    common = {
        'optimizer.steps': 2, 'intervals.saving': 1, 'intervals.evaluation': 2,
        'batch.accumulation': 2}
    recipe = small_recipe(tmp_path, **(common | changes))
    run = fine_tune(recipe, tmp_path/'run')
    assert len(losses(tmp_path/'run')) == 2
    assert run.evaluations


@pytest.mark.slow
def test_a_classifier_leaves_it_alone(gpu_machine, tmp_path):
    recipe = Recipe.named('reviews-qlora').changed(
        {'model.head': 'classification', 'optimizer.steps': 2})
    fine_tune(recipe, tmp_path/'run')
    assert len(losses(tmp_path/'run')) == 2


@pytest.mark.slow
def test_a_rehearsal_leaves_it_alone(request):
    recipe = Recipe.named('70b-2x24gb-qlora')
    plain = rehearse(recipe)
    request.getfixturevalue('gpu_machine')
    found = rehearse(recipe)
    assert (found.peak_b, len(found.messages)) == (plain.peak_b, len(plain.messages))
