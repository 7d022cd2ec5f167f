"""A run whose tokens are scored once: the losses and norms of a run with TRL's tiles, under every
strategy, and what is in force."""
import os

import pytest

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
from bench.shared.small_rehearsals import recipe as rehearsed_recipe
from trouble import fine_tune, slow_case, small_recipe

from llm_workbook.config.recipe import planned_only
from llm_workbook.plan.ledger import memory
from llm_workbook.training.effective import explain_config

LORA, QLORA = {'method.kind': 'lora'}, {'method.kind': 'qlora', 'precision.compute': 'bfloat16'}
BF16, DDP = {'precision.compute': 'bfloat16'}, {'sharding.strategy': 'ddp'}
HALF = {'precision.compute': 'float16', 'precision.loss_scale': 'dynamic',
        'method.storage': 'float16'}
ONE = {'sharding.strategy': 'none', 'cluster.processes': 1}
ZERO = {'zero.reduce_bucket': 1_000_000, 'zero.persistence_threshold': 1000,
        'zero.prefetch_bucket': 1_000_000}
AGAIN = {'sharding.activation_checkpointing': 'full'}
WAYS = {
    'fsdp2, full': {'batch.accumulation': 2, 'intervals.evaluation': 3},
    'fsdp2, lora': LORA | AGAIN,
    'fsdp2, qlora': QLORA | {'batch.micro': 2}, 'fsdp2, fp16': HALF, 'ddp, bf16': DDP | BF16,
    'one, full': ONE, 'zero2, full': ZERO | {'sharding.strategy': 'zero2'},
    'zero3, qlora': ZERO | QLORA | {'sharding.strategy': 'zero3'},
}
GPU = {'cluster.device': 'cuda', 'cluster.hardware': '8x-h100'}
FULL = {'method.kind': 'full'}
ERROR = {'float32': 1e-4, 'bfloat16': 2e-2, 'float16': 5e-3}  # Relative, of losses and norms


@pytest.mark.parametrize(
    'way', [way if way == 'fsdp2, full' else slow_case(way) for way in WAYS])
def test_one_pass_trains_what_tiles_train(tmp_path, way):
    recipe = small_recipe(tmp_path, **(WAYS[way] | {'optimizer.steps': 3}))
    metrics, held = [], []
    for head in 'chunked', 'one_pass':
        asked = recipe.changed({'batch.loss_head': head})
        assert not planned_only(asked)
        run = fine_tune(asked, tmp_path/head)
        metrics.append(run.metrics)
        held.append([row['loss'] for row in run.evaluations])
        setting = explain_config(run)['batch.loss_head']
        assert (setting.asked, setting.found) == (head, head)
    error = ERROR[recipe.precision.compute]
    for key in 'loss', 'grad_norm':
        theirs, ours = ([row[key] for row in rows if key in row] for rows in metrics)
        assert ours == pytest.approx(theirs, rel=error)
    assert held[1] == pytest.approx(held[0], rel=error)
    assert len(held[1]) == (1 if 'intervals.evaluation' in WAYS[way] else 0)


@pytest.mark.parametrize('changes', [
    FULL, slow_case(LORA | AGAIN), slow_case(FULL | AGAIN | GPU),
    slow_case(FULL | DDP), slow_case(FULL | {'batch.accumulation': 2})],
    ids=['full', 'lora', 'gpu', 'ddp', 'accumulated'])
@pytest.mark.slow
def test_what_one_pass_takes_is_what_is_planned(tmp_path, changes):
    "A rehearsal plays what ranks do: bench/lines/rehearsal_error.py measures some."
    from llm_workbook import rehearse
    peaks = {}
    for head in 'chunked', 'one_pass':
        recipe = rehearsed_recipe(
            'quick', changes | {'batch.length': 512, 'batch.loss_head': head}, tmp_path)
        peaks[head] = rehearse(recipe, exact=True).peak_b
        planned_b = memory(recipe).total('step', level='allocated')
        assert planned_b == pytest.approx(peaks[head], rel=.02 if head == 'chunked' else .01)
    if changes.get('cluster.device') != 'cuda': assert peaks['one_pass'] < .8 * peaks['chunked']
