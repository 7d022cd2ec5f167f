"""Selective checkpointing on real ranks: the losses of a run that keeps all, what is in force, and
bytes as they are planned."""
import os

import pytest

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
from bench.shared.small_rehearsals import FULL, LORA, QLORA
from bench.shared.small_rehearsals import recipe as rehearsed_recipe
from trouble import fine_tune, slow_case, small_recipe

from llm_workbook.config.recipe import planned_only
from llm_workbook.plan.ledger import memory
from llm_workbook.training.effective import explain_config
from llm_workbook.training.run_directory import read_metrics

SELECTIVE = {'sharding.activation_checkpointing': 'selective'}
ZERO = {'zero.reduce_bucket': 1_000_000, 'zero.persistence_threshold': 1000,
        'zero.prefetch_bucket': 1_000_000}
BF16 = {'precision.compute': 'bfloat16'}
REVIEWS = {
    'model.head': 'classification', 'data.source': 'sample-reviews',
    'data.format': 'classification', 'data.text_column': 'text', 'data.label_column': 'stars',
    'data.labels': {1: 'negative', 2: 'negative', 3: None, 4: 'positive', 5: 'positive'}}
ONE = {'sharding.strategy': 'none', 'cluster.processes': 1}
WAYS = {
    'fsdp2, full': {}, 'fsdp2, qlora': QLORA | BF16 | {'method.dropout': .1},
    'fsdp2, arriving': QLORA | BF16 | {'sharding.loading': 'sharded'},
    'ddp, lora': LORA | {'sharding.strategy': 'ddp'},
    'one, bf16': ONE | BF16, 'zero2, full': ZERO | {'sharding.strategy': 'zero2'},
    'zero3, qlora': ZERO | QLORA | BF16 | {'sharding.strategy': 'zero3'},
    'loop, fsdp2': QLORA | BF16 | REVIEWS,
}


@pytest.mark.parametrize(
    'way', [way if way == 'fsdp2, full' else slow_case(way) for way in WAYS])
def test_a_selection_changes_no_loss(tmp_path, way):
    recipe = small_recipe(tmp_path, **(WAYS[way] | {'optimizer.steps': 3}))
    metrics = []
    for how in {}, SELECTIVE:
        asked = recipe.changed(how)
        assert not planned_only(asked)
        run = fine_tune(asked, tmp_path/f'run-{len(metrics)}')
        metrics.append(read_metrics(run.directory/'metrics.jsonl'))
        setting = explain_config(run)['sharding.activation_checkpointing']
        assert setting.found == setting.asked == ('selective' if how else 'none')
    for key in 'loss', 'grad_norm':
        kept, selected = ([row[key] for row in rows] for rows in metrics)
        assert kept == pytest.approx(selected, rel=1e-6)


@pytest.mark.parametrize(
    'changes', [FULL, slow_case(QLORA), slow_case(LORA | {'sharding.strategy': 'ddp'})],
    ids=['full', 'qlora', 'lora under ddp'])
@pytest.mark.slow
def test_what_is_kept_is_what_is_planned(tmp_path, changes):
    "A rehearsal plays what ranks do: tests/rehearsal/test_rehearsal_truth.py."
    from llm_workbook import rehearse
    peaks = []
    for how in 'full', 'selective', 'none':
        recipe = rehearsed_recipe('quick', changes | {
            'batch.length': 128, 'sharding.activation_checkpointing': how}, tmp_path)
        played = rehearse(recipe, exact=True).peak_b
        assert memory(recipe).total('step', level='allocated') == pytest.approx(played, rel=.01)
        peaks.append(played)
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]
