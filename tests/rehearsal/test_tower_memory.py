"""A plan of a model with towers is its rehearsal: what is frozen lies there, never gathered."""
import json

import pytest

from llm_workbook.config.recipe import Recipe
from llm_workbook.model.architecture import presets
from llm_workbook.model.spec import spec
from llm_workbook.plan.estimate import estimate
from llm_workbook.rehearsal.step import rehearse
from llm_workbook.report import reconcile

CHANGES = {'sharding.offload_parameters': 'none', 'sharding.offload_optimizer': 'none'}
WIDTHS = {'hidden_size': 256, 'intermediate_size': 512, 'num_hidden_layers': 6, 'vocab_size': 2000}


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    "A narrow text model beside a tower that is larger than it."
    fields = json.loads(json.dumps(presets()['gemma-3-4b'].config))
    fields['text_config'] |= WIDTHS | {'num_attention_heads': 4, 'num_key_value_heads': 2}
    fields['text_config']['head_dim'] = 64
    fields['vision_config']['num_hidden_layers'] = 3
    folder = tmp_path_factory.mktemp('base')
    (folder/'config.json').write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize('method', ['full', 'qlora'])
def test_the_plan_of_a_model_with_a_tower_is_its_rehearsal(method, base):
    assert spec(base).by_kind()['tower'] > spec(base).parameters / 2
    recipe = Recipe.named('70b-2x24gb-qlora').changed(
        CHANGES | {'model.source': base, 'method.kind': method})
    peak = reconcile(estimate(recipe), rehearse(recipe)).part('peak')[0]
    assert peak.rehearsed == pytest.approx(peak.planned, abs=2**21)  # The tower: 99 MB on a rank
