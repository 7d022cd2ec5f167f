"Mixtures of experts: their products run in every type, and are planned as they are rehearsed."
import json

import pytest
from bench.shared import gpu_rows
from bench.shared.small_rehearsals import SHAPES

from llm_workbook import Recipe, memory, rehearse

FULL, LORA = {'method.kind': 'full'}, {'method.kind': 'lora'}
KEPT = {'sharding.activation_checkpointing': 'none'}
BRIEF = SHAPES['brief'] | {'num_experts_per_tok': 2}
EXPERTS = {
    'mixtral': {'num_local_experts': 4, 'intermediate_size': 512},
    'qwen3_moe': {'num_experts': 4, 'moe_intermediate_size': 256}}
HALF = {'precision.compute': 'float16', 'precision.loss_scale': 'dynamic'}


def mixture(folder, kind, changes) -> Recipe:
    "A recipe of one process for a small mixture of this kind; activations are most of its memory."
    (folder/'config.json').write_text(json.dumps(BRIEF | EXPERTS[kind] | {'model_type': kind}))
    plain = Recipe(
        name='experts', model={'source': str(folder)}, data={'source': 'sample-conversations'},
        cluster={'processes': 1}, batch={'micro': 16, 'length': 512},
        sharding={'strategy': 'none'}, optimizer={'steps': 3})
    return plain.changed(changes)


@pytest.mark.parametrize('kind', ['mixtral', 'qwen3_moe'])
@pytest.mark.parametrize('changes', [
    FULL | KEPT, FULL | HALF, FULL | KEPT | {'precision.compute': 'float32'},
    FULL | {'precision.master': 'bfloat16'}, LORA | KEPT, LORA,
], ids=['autocast', 'float16', 'float32', 'bfloat16', 'adapters', 'adapters, again'])
def test_a_mixture_is_planned_as_it_is_rehearsed(kind, changes, tmp_path):
    recipe = mixture(tmp_path, kind, changes)
    planned_b = memory(recipe).total('step', level='allocated')
    assert planned_b == pytest.approx(rehearse(recipe).peak_b, rel=.012)


@pytest.mark.slow
def test_real_tensors_of_experts_in_float32_hold_what_was_rehearsed(tmp_path):
    changes = FULL | {'batch.micro': 8, 'batch.length': 256}
    recipe = mixture(tmp_path, 'mixtral', changes)
    measured_b = gpu_rows.measured(recipe)['peak_b']
    assert rehearse(recipe, exact=True).peak_b == pytest.approx(measured_b, rel=.01)
