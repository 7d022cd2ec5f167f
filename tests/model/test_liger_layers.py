"""Liger's norms and gates: the same losses and gradients as torch's, for families, methods, two
ranks and TRL's trainer. Triton interprets them, where no GPU builds them."""
import importlib.util
from unittest.mock import patch

import pytest

from llm_workbook import check_recipe
from llm_workbook.config.recipe import RecipeError, planned_only, shrink
from llm_workbook.model.architecture import configuration, skeleton
from llm_workbook.model.liger_layers import (
    check_liger_layers, count_liger_layers, use_liger_layers)
from tests.model.test_fused_head import ON_GPU, interpreted
from tests.model.test_fused_head import recipe as fused_recipe

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec('liger_kernel'), reason='liger-kernel is not installed here')


def layers(*checks: str) -> dict: return interpreted(*checks, module='interpreted_layers')


def recipe(**changes):
    plain = fused_recipe(**{'batch.loss_head': 'chunked'})
    return plain.changed({'model.kernels': 'liger'} | changes)


def bare(**fields): return skeleton(configuration('tiny-base')[1] | fields)


@pytest.mark.slow
def test_families_have_their_own_losses_and_gradients():
    "Norms of queries and keys, weights of norms that begin at zero, norms around a branch."
    families = layers('families')['families']
    assert len(families) == 12
    for kind, row in families.items():
        assert row['loss_off'] < 1e-5, kind
        assert row['gradients_off'] < 1e-4, kind
        assert not row['left'], kind


@pytest.mark.slow
def test_methods_are_those_of_plain_layers():
    found = layers('methods', 'classifier')
    assert found['classifier']['gradients_off'] < 1e-4
    for name, row in found['methods'].items():
        assert row['loss_off'] < 1e-5, name
        assert row['gradients_off'] < 1e-4, name


@pytest.mark.slow
def test_two_ranks_train_by_trl_what_plain_layers_train():
    "Sharded by FSDP2 and checkpointed: each loss of four steps."
    found = layers('trained')['trained']
    (kernels, losses), (plain, expected) = found['liger'], found['plain']
    assert (kernels, plain) == ([13, 13], [0, 13])
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]


def test_only_the_model_at_hand_is_changed():
    "Not the next one of its family; and a model keeps the names of its weights."
    from transformers.models.llama import modeling_llama
    before = dict(vars(modeling_llama))
    changed, plain = bare(), bare()
    use_liger_layers(changed)
    assert all(vars(modeling_llama)[name] is value for name, value in before.items())
    assert changed.state_dict().keys() == plain.state_dict().keys()
    assert count_liger_layers(bare())[0] == 0


@pytest.mark.parametrize('fields, says', [
    ({'hidden_act': 'gelu'}, 'another activation than layers.0.mlp of LlamaModel'),
    ({'model_type': 'gemma2', 'hidden_activation': 'gelu'}, 'another activation'),
    ({'model_type': 'olmo2'}, 'leaves 8 of 21 norms and gates of Olmo2Model to torch'),
    ({'model_type': 'stablelm'}, 'of StableLmModel to torch'),
    ({'model_type': 'nemotron', 'hidden_act': 'relu2'}, 'cannot replace layers of NemotronModel'),
    ({'model_type': 'mixtral', 'num_local_experts': 4}, 'is not for experts')], ids=str)
def test_a_model_that_would_be_another_one_is_refused(fields, says):
    with pytest.raises(ValueError, match=says) as refused: use_liger_layers(bare(**fields))
    assert "set model.kernels to 'plain'" in str(refused.value)


def test_a_cpu_plans_it_and_does_not_run_it():
    refused = [str(problem) for problem in planned_only(recipe())]
    assert len(refused) == 1
    assert 'set it to plain' in refused[0]
    assert not planned_only(recipe(**ON_GPU))
    assert shrink(recipe(**ON_GPU)).model.kernels == 'plain'


def test_a_run_is_refused_before_a_base_is_loaded():
    from llm_workbook.model import fused_head, quantize
    with patch.object(quantize, 'load_base', side_effect=AssertionError('loaded')):
        with (patch.object(fused_head, 'find_spec', return_value=None),
              pytest.raises((ImportError, RecipeError), match=r"kernels 'liger' needs.*\[liger\]")):
            check_recipe(recipe(**ON_GPU))
        with pytest.raises(ValueError, match='is not for experts'):
            check_liger_layers(recipe(**{'model.source': 'mixtral-8x7b'}).model)


def test_a_task_in_the_cloud_installs_it():
    from llm_workbook.launching.job_scripts import skypilot
    lines = skypilot(recipe(**ON_GPU), '/mnt/run', 'shared', 'H100').splitlines()
    assert sum('llm-workbook[liger]' in line for line in lines) == 1
