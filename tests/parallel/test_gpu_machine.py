"""CPU ranks on a machine with a GPU: nothing touches it, neither in the kernel nor in a rank.

The GPU is emulated. The tests marked `wheel` run with the CUDA build of torch alone, which make
test-cuda-wheel installs: most ways to train, the quickstart and the page of ZeRO recipes.
"""
import json
import os
import subprocess
import sys

import pytest
import torch
from emulated_gpu import emulate
from page import ROOT
from trouble import fine_tune, losses, small_recipe

from llm_workbook import Recipe, rehearse
from llm_workbook.model.architecture import presets
from llm_workbook.parallel import ranks as module
from llm_workbook.parallel.backends import read_allocator
from llm_workbook.parallel.ranks import notebook_ranks, run_ranks
from llm_workbook.training import fine_tune as training

ALONE = {'cluster.processes': 1, 'sharding.strategy': 'none'}
QLORA = {
    'method.kind': 'qlora', 'method.rank': 4, 'precision.compute': 'bfloat16',
    'sharding.activation_checkpointing': 'full'}
ZERO = {
    'sharding.strategy': 'zero2', 'precision': {'compute': 'float32'},
    'zero.reduce_bucket': 1_000_000}


def wheel_case(changes): return pytest.param(changes, marks=pytest.mark.wheel)


@pytest.fixture
def gpu_machine(monkeypatch):
    "Let torch say that there is a GPU, and that this process has opened it."
    emulate(monkeypatch.setattr)


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
        wheel_case({}),
        wheel_case(QLORA | ALONE),
        wheel_case(QLORA | {'sharding.loading': 'sharded'}),
        wheel_case(ZERO | {'sharding.strategy': 'zero3', 'method.kind': 'lora'}),
        wheel_case(
            {'optimizer.kind': 'adamw_8bit', 'method.kind': 'lora', 'sharding.strategy': 'ddp'})],
    ids=['qlora', 'full', 'one process', 'loaded sharded', 'zero3', '8-bit under ddp'])
def test_cpu_runs_leave_the_gpu_alone(gpu_machine, tmp_path, changes):
    common = {
        'optimizer.steps': 2, 'intervals.saving': 1, 'intervals.evaluation': 2,
        'batch.accumulation': 2}
    recipe = small_recipe(tmp_path, **(common | changes))
    run = fine_tune(recipe, tmp_path/'run')
    assert len(losses(tmp_path/'run')) == 2
    assert run.evaluations


def test_a_launched_rank_sets_the_allocator_before_a_library_opens_the_gpu(tmp_path, monkeypatch):
    recipe = Recipe.named('8b-1x24gb-qlora')
    def stop(finished): raise KeyError(os.environ.get('PYTORCH_ALLOC_CONF'), read_allocator())
    monkeypatch.setattr(training, '_import_libraries', stop)
    def train():
        with pytest.raises(KeyError) as stopped: training.train_here(recipe, tmp_path/'run')
        return stopped.value.args
    grows = 'expandable_segments:True'
    assert run_ranks(train, 1) == [(grows, grows)]


@pytest.mark.wheel
def test_a_classifier_leaves_it_alone(gpu_machine, tmp_path):
    recipe = Recipe.named('reviews-qlora').changed(
        {'model.head': 'classification', 'optimizer.steps': 2})
    fine_tune(recipe, tmp_path/'run')
    assert len(losses(tmp_path/'run')) == 2


@pytest.mark.slow
@pytest.mark.parametrize('name', ['70b-2x24gb-qlora', '7b-zero3-offload'])
def test_a_rehearsal_leaves_it_alone(request, name, tmp_path):
    fields = presets()['llama-3.2-1b'].config | {'num_hidden_layers': 3}
    (tmp_path/'config.json').write_text(json.dumps(fields))
    recipe = Recipe.named(name).changed({'model.source': str(tmp_path)})
    plain = rehearse(recipe)
    request.getfixturevalue('gpu_machine')
    found = rehearse(recipe)
    assert (found.peak_b, len(found.messages)) == (plain.peak_b, len(plain.messages))


# On the CUDA build

AFTER_FAKES = '''
import torch
from llm_workbook.parallel.fresh_process import why_no_fork
from llm_workbook.rehearsal.fake_tensors import fake_tensors
with fake_tensors(): torch.ones(3, requires_grad=True).sum().backward()
print(why_no_fork())
'''


@pytest.mark.wheel
def test_ranks_can_be_forked_after_a_rehearsal():
    "A fake mode of torch lets the first backward pass start a thread for a GPU that is not there."
    done = subprocess.run([sys.executable, '-c', AFTER_FAKES], capture_output=True, text=True)
    assert done.stdout == 'None\n', done.stderr[-2000:]


@pytest.mark.wheel
def test_where_they_cannot_be_forked_a_run_starts_from_a_fresh_process(tmp_path, monkeypatch):
    monkeypatch.setattr(training, 'why_no_fork', lambda: 'a backward pass has started threads')
    recipe = small_recipe(tmp_path, **ALONE, **{'optimizer.steps': 2})
    fine_tune(recipe, tmp_path/'run')
    assert len(losses(tmp_path/'run')) == 2


PAGES = [ROOT/'nbs/book/00_quickstart.ipynb', ROOT/'nbs/recipes/20_zero_from_objects.ipynb']


@pytest.mark.wheel
def test_this_torch_is_a_build_with_cuda():
    assert torch.version.cuda
    assert not torch.cuda.is_available()  # Else the emulation would hide a real GPU


@pytest.mark.wheel
@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_the_cells_of_recipes_leave_it_alone(page):
    program = ROOT/'tests/emulated_gpu.py'
    done = subprocess.run([sys.executable, program, page], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
