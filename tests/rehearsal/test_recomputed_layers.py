"""Layers that run forward again: what the plan has at their fullest, and what a rehearsal has."""
import json
import os

import pytest

os.environ['HF_HUB_OFFLINE'] = '1'

from bench.lines.rehearsal_grid import fullest_instant

from llm_workbook import Recipe, rehearse
from llm_workbook.plan.ledger import memory

# Wide layers and few words, so that a layer is fullest and not the head
SHAPE = {'model_type': 'llama', 'hidden_size': 512, 'intermediate_size': 4096,
         'num_hidden_layers': 6, 'num_attention_heads': 8, 'num_key_value_heads': 4,
         'vocab_size': 1000}
ABOVE = 'layer above the first'  # Where the gradients of a layer are more than what it keeps
WAYS = [  # Method, what runs again, rows, and the instant at which the step is fullest
    ('lora', 'selective', 4, 'last layer'), ('full', 'selective', 1, ABOVE),
    ('full', 'full', 4, ABOVE)]


@pytest.mark.parametrize('kind, again, rows, instant', WAYS)
def test_the_plan_is_as_full_as_the_rehearsal(kind, again, rows, instant, tmp_path):
    (tmp_path/'config.json').write_text(json.dumps(SHAPE))
    made = Recipe(
        name='again', model={'source': str(tmp_path)}, data={'source': 'sample-conversations'},
        method={'kind': kind}, sharding={'activation_checkpointing': again},
        cluster={'processes': 2, 'device': 'cuda'}, batch={'micro': rows, 'length': 1024},
        optimizer={'kind': 'adamw_fused'})
    ledger = memory(made)
    assert fullest_instant(ledger) == instant
    assert abs(ledger.total('step', level='allocated') - rehearse(made).peak_b) < 2**19
