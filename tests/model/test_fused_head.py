"""Liger's kernel as the loss head: the same losses and gradients as TRL's tiles, for families,
methods, two ranks and TRL's trainer. Triton interprets it, where no GPU builds it: Liger's own
instructions, on NumPy."""
import importlib.util
import json
import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from llm_workbook.config.recipe import Recipe, RecipeError, planned_only, shrink
from llm_workbook.model.fused_head import check_liger, kernel_rows, kernel_scores

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec('liger_kernel'), reason='liger-kernel is not installed here')
ON_GPU = {'cluster.device': 'cuda', 'cluster.hardware': '8x-h100'}


def interpreted(*checks: str, module='interpreted_head', timeout_s=300) -> dict:
    "Call functions of a module in a process whose Triton interprets; name -> findings."
    variables = os.environ | {'TRITON_INTERPRET': '1', 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(
        [sys.executable, '-m', f'tests.model.{module}', *checks],
        env=variables, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope='module')
def found() -> dict: return interpreted('forgotten', 'rows', 'scores')


@pytest.mark.slow
def test_families_have_their_own_losses_and_gradients():
    "Softcaps, scaled logits, ties, experts and a bias; hits, and entropies that are NaN."
    families = interpreted('families')['families']
    assert len(families) == 7
    for name, row in families.items():
        assert row['loss_off'] < 1e-5, name
        assert row['gradients_off'] < 1e-4, name
        assert row['hits_equal'] and row['entropy_unknown'], name


def test_a_softcap_that_is_forgotten_is_seen(found):
    assert found['forgotten']['loss_off'] > 0.1


@pytest.mark.slow
def test_methods_are_those_of_tiles():
    "Two micro-batches; with adapters no gradient of the head is made."
    methods = interpreted('methods')['methods']
    assert methods['full']['off'] < 1e-4
    assert methods['lora']['off'] < 1e-4
    assert methods['qlora, bfloat16']['off'] < 3e-2
    assert not methods['lora']['head_trains']


@pytest.mark.slow
def test_two_ranks_train_by_trl_what_tiles_train():
    "Sharded by FSDP2, through TRL's trainer: each loss of four steps, and what is in force."
    found = interpreted('trained')['trained']
    assert found['heads'] == ['fused', 'chunked']
    assert found['fused'] == pytest.approx(found['chunked'], rel=1e-5)
    assert found['fused'][-1] < found['fused'][0]


def test_a_head_has_the_scores_and_gradients_of_tiles(found):
    scores = found['scores']
    assert scores['log_probs_off'] < 1e-5
    assert scores['gradients_off'] < 1e-5
    assert scores['hits_equal'] and scores['entropy_unknown']


def test_the_tiles_are_those_of_liger(found):
    "Its function asks for as many rows of logits at once as `kernel_rows` says."
    assert found['rows'] == [[40, 40], [50, 2], [257, 32]]
    sizes = (40, 64, 64), (50, 321, 8), (257, 321, 32)
    assert [kernel_rows(*three) for three in sizes] == [40, 2, 32]


# What is refused

def recipe(**changes) -> Recipe:
    plain = Recipe(
        name='fused', model={'source': 'tiny-base'}, data={'source': 'sample-conversations'},
        method={'kind': 'lora'}, batch={'loss_head': 'fused'})
    return plain.changed(changes)


def test_a_cpu_plans_it_and_does_not_run_it():
    refused = [str(problem) for problem in planned_only(recipe())]
    assert len(refused) == 1
    assert 'set it to one_pass' in refused[0]
    assert shrink(recipe(**ON_GPU)).batch.loss_head == 'one_pass'
    assert not planned_only(recipe(**ON_GPU))


def test_float16_is_refused_before_a_run():
    half = {'precision.compute': 'float16', 'precision.loss_scale': 'dynamic',
            'method.storage': 'float16'}
    assert any('rounds most gradients' in str(p) for p in planned_only(recipe(**ON_GPU, **half)))
    with pytest.raises(ValueError, match='lose gradients in float16'):
        kernel_scores((torch.ones(2, 4).half(), torch.ones(9, 4).half(), None),
                      torch.tensor([0, 1]), needs=(True, False, False))


def test_a_run_without_the_package_is_refused_before_a_base_is_loaded(tmp_path):
    from llm_workbook import check_recipe
    from llm_workbook.model import fused_head
    with (patch.object(fused_head, 'find_spec', return_value=None),
          pytest.raises((ImportError, RecipeError), match=r"pip install '.\[liger\]'")):
        check_recipe(recipe(**ON_GPU))


def test_an_old_package_is_refused_by_its_version():
    from llm_workbook.model import fused_head
    with patch.object(fused_head, 'version', return_value='0.6.5'):
        with pytest.raises(ImportError, match='0.8.2 or newer, not 0.6.5'): check_liger()


def test_pairs_are_not_for_it():
    with pytest.raises(RecipeError, match='dpo-scores-in-tiles'):
        recipe(**ON_GPU, **{'method.objective': 'dpo', 'data.format': 'preference'})


def test_a_task_in_the_cloud_installs_it():
    from llm_workbook.launching.job_scripts import skypilot
    extra = [line for line in skypilot(recipe(**ON_GPU), '/mnt/run', 'shared', 'H100').splitlines()
             if 'pip install' in line]
    assert len(extra) == 1
    assert 'llm-workbook[liger]' in extra[0]
