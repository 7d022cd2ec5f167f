"""Settings that each have tests of their own, in one run: they must not spoil one another."""
import json

import pytest
from trouble import some_rows

from llm_workbook.config.recipe import Recipe
from llm_workbook.training.fine_tune import fine_tune

TOGETHER = {'batch.packing': True, 'batch.loss_head': 'one_pass', 'model.attention': 'segments'}


@pytest.fixture(scope='module')
def recipe(tmp_path_factory):
    "Two sources, and a rate at which no weight moves by what a loss could show."
    sources = []
    for name, count in (('many', 16), ('few', 8)):
        folder = some_rows(tmp_path_factory.mktemp(name), count)
        sources.append({'source': str(folder), 'weight': count})
    return Recipe(
        name='together', model={'source': 'tiny-base'},
        data={'format': 'messages', 'mix': sources}, batch={'micro': 1, 'length': 64},
        optimizer={'steps': 2, 'learning_rate': 1e-9, 'schedule': 'constant', 'warmup': 0.0},
        intervals={'evaluation': 2})


def judged(recipe, directory) -> dict:
    "What the last evaluation of a run has found."
    return fine_tune(recipe, directory, 300, live=False).evaluations[-1]


@pytest.mark.slow
def test_the_held_out_loss_of_each_source_is_the_same(recipe, tmp_path):
    plain, packed = judged(recipe, tmp_path/'plain'), judged(
        recipe.changed(TOGETHER), tmp_path/'together')
    assert len(plain['sources']) == 2
    for one, other in ((plain, packed), *zip(plain['sources'].values(),
                                             packed['sources'].values())):
        assert (one['rows'], one['tokens']) == (other['rows'], other['tokens'])
        # bfloat16 rounds each logit by up to 2**-9
        assert other['loss'] == pytest.approx(one['loss'], rel=2e-3)
        assert other['perplexity'] == pytest.approx(one['perplexity'], rel=2e-2)
    assert list(plain['sources']) == list(packed['sources'])


@pytest.mark.slow
def test_dora_trains_packed_rows_with_a_head_of_one_pass(recipe, tmp_path):
    changes = TOGETHER | {'method.dora': True, 'method.scaling': 'rslora',
                          'optimizer.learning_rate': 3e-3, 'optimizer.steps': 4}
    run = fine_tune(recipe.changed(changes), tmp_path/'dora', 300, live=False)
    losses = [row['loss'] for row in run.metrics]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    adapter = json.loads((run.saved/'adapter_config.json').read_text())
    assert (adapter['use_dora'], adapter['use_rslora']) == (True, True)
