"Pairs keep their relations; of the mistakes planted one by one, each breaks its relation."
import os
from dataclasses import replace

import pytest
from trouble import assert_all_kept

from llm_workbook.config.recipe import Recipe
from llm_workbook.model.miniature import miniature
from llm_workbook.release.invariants import check_invariants
from llm_workbook.release.pair_relations import PAIR_RELATIONS, PairSpecimen
from llm_workbook.release.relations import make_specimen
from llm_workbook.release.small_case import (
    LeftOut, alone_recipe, distinct_rows, first_rows, small_recipe)
from llm_workbook.training import preferences
from llm_workbook.training.trainer_rows import PAIR_KEYS

BETWEEN_RUNS = [
    'accumulation', 'ranks', 'resume', 'reported loss', 'schedule', 'start', 'reference file']
WHOLE = {'sharding.loading': 'every_rank', 'sharding.offload_parameters': 'none',
         'sharding.offload_optimizer': 'none'}


def recipe_for(**changes):
    pairs = {'model.source': 'tiny-base', 'data.source': 'sample-preferences',
             'data.format': 'preference', 'method.objective': 'dpo', 'method.dropout': 0.0,
             'batch.length': 512}
    return Recipe.named('70b-2x24gb-qlora').changed(pairs | changes)


def specimen_of(folder, **changes):
    from accelerate.state import AcceleratorState, GradientState, PartialState
    for kind in AcceleratorState, GradientState, PartialState: kind._shared_state.clear()
    asked = recipe_for(**{'precision.compute': 'float32', 'method.storage': 'float32'} | changes)
    base = miniature(asked.model.source, folder/'base')
    rows = distinct_rows(first_rows(asked, base), 12)
    recipe = alone_recipe(small_recipe(asked, base, rows))
    return make_specimen(recipe, folder/'specimen', PairSpecimen)


@pytest.fixture(scope='module')
def specimen(tmp_path_factory):
    return specimen_of(tmp_path_factory.mktemp('pairs'), **{'method.kind': 'lora'})


def found_in(specimen):
    "The relations of one model that are broken."
    names = []
    for name, relation in PAIR_RELATIONS.items():
        try: holds = relation(specimen).passed
        except LeftOut: continue
        if not holds: names.append(name)
    return names


def broken(found): return [one.name for one in found.problems]


@pytest.mark.slow
@pytest.mark.parametrize('changes', [
    {'method.kind': 'full'}, {'method.kind': 'lora', 'batch.loss_head': 'one_pass'},
    {'model.attention': 'segments'}], ids=['full', 'one pass', 'segments'])
def test_all_ways_to_compute_keep_all_relations(changes, tmp_path):
    "The page has adapters on a packed base."
    assert found_in(specimen_of(tmp_path, **changes)) == []


# Mistakes of one model

def scoring(monkeypatch, change):
    "Let the scores of pairs be others."
    right = preferences.pair_scores
    monkeypatch.setattr(preferences, 'pair_scores', lambda *given: change(right, *given))


def computing(monkeypatch, specimen, compute):
    kind = type(specimen.trainer)
    right = kind.compute_loss

    def wrong(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        def go_on(items=num_items_in_batch): return right(self, model, inputs, False, items)
        return compute(go_on, inputs, num_items_in_batch)

    monkeypatch.setattr(kind, 'compute_loss', wrong)


def test_a_reference_that_trains_is_found(monkeypatch, specimen):
    scoring(monkeypatch, lambda right, now, then, beta: right(now, now.detach(), beta))
    assert found_in(specimen) == ['reference']


@pytest.mark.slow
def test_answers_that_change_places_in_the_loss_are_found(monkeypatch, specimen):
    def exchanged(right, now, then, beta): return right(-now, -then, beta)

    scoring(monkeypatch, exchanged)
    assert found_in(specimen) == ['reference']


@pytest.mark.slow
def test_another_beta_is_found(monkeypatch, specimen):
    scoring(monkeypatch, lambda right, now, then, beta: right(now, then, 2 * beta))
    assert found_in(specimen) == ['reference']


@pytest.mark.slow
def test_a_reference_of_one_side_alone_is_found(monkeypatch, specimen):
    def one_sided(right, now, then, beta):
        kept = then.clone()
        kept[len(kept) // 2:] = 0.98 * kept[len(kept) // 2:]
        return right(now, kept, beta)

    scoring(monkeypatch, one_sided)
    assert found_in(specimen)[0] == 'swap'


def test_answers_that_change_places_in_the_batch_are_found(monkeypatch, specimen):
    right = preferences.PairCollator.__call__

    def exchanged(self, rows):
        turned = [row | dict(zip(PAIR_KEYS, [row[key] for key in (*PAIR_KEYS[2:], *PAIR_KEYS[:2])]))
                  for row in rows]
        return right(self, turned)

    monkeypatch.setattr(preferences.PairCollator, '__call__', exchanged)
    assert found_in(specimen)[0] == 'whole answers'


def collating(monkeypatch, change):
    right = preferences.PairCollator.__call__

    def wrong(self, rows):
        batch = right(self, rows)
        change(batch)
        return batch

    monkeypatch.setattr(preferences.PairCollator, '__call__', wrong)


def test_a_question_that_counts_is_found(monkeypatch, specimen):
    def all_count(batch):
        batch['labels'] = batch['input_ids'].where(batch['attention_mask'].bool(), -100)

    collating(monkeypatch, all_count)
    assert 'no question' in found_in(specimen)


@pytest.mark.slow
def test_an_end_token_that_does_not_count_is_found(monkeypatch, specimen):
    end = specimen.tokenizer.eos_token_id
    collating(monkeypatch, lambda batch: batch['labels'].masked_fill_(batch['labels'] == end, -100))
    assert found_in(specimen)[0] == 'whole answers'
    assert 'no question' not in found_in(specimen)


def test_scores_that_are_means_over_tokens_are_found(monkeypatch, specimen):
    right = preferences.pair_scores

    def by_length(go_on, inputs, items):
        tokens = (inputs['labels'] != -100).sum(-1)

        def mean(now, then, beta): return right(now / tokens, then / tokens, beta)

        with monkeypatch.context() as while_computing:
            while_computing.setattr(preferences, 'pair_scores', mean)
            return go_on()

    computing(monkeypatch, specimen, by_length)
    assert found_in(specimen)[0] in ('loss head', 'shared question')


@pytest.mark.slow
def test_a_mean_over_the_pairs_of_a_batch_is_found(monkeypatch, specimen):
    def of_the_batch(go_on, inputs, items): return go_on(len(inputs['labels']) // 2)

    computing(monkeypatch, specimen, of_the_batch)
    assert 'padding' in found_in(specimen)


@pytest.mark.slow
def test_fill_that_counts_is_found(monkeypatch, specimen):
    def counted(batch):
        batch['labels'] = batch['labels'].where(batch['attention_mask'].bool(), 0)

    collating(monkeypatch, counted)
    assert 'padding' in found_in(specimen)


# Runs

# A check of two ranks takes a quarter of a minute: FAMILIES=all runs them all
few = pytest.mark.skipif(os.environ.get('FAMILIES') != 'all', reason='a long sweep: FAMILIES=all')
ALONE = WHOLE | {'method.kind': 'lora', 'sharding.strategy': 'none', 'cluster.processes': 1}


@pytest.mark.slow
@pytest.mark.parametrize('changes', [
    ALONE, *[pytest.param(changes, marks=few) for changes in (
        {'method.kind': 'full'}, WHOLE | {'method.kind': 'lora', 'sharding.strategy': 'zero3'})]],
    ids=['alone', 'full', 'zero3'])
def test_a_recipe_of_pairs_keeps_all_relations(changes):
    found = check_invariants(recipe_for(**changes))
    assert_all_kept(found, changes)


@pytest.mark.slow
def test_a_loss_that_is_a_sum_over_its_pairs_is_found(monkeypatch):
    kind = preferences.preference_trainer()
    monkeypatch.setattr(kind, '_get_num_items_in_batch', lambda *given: 1)
    found = check_invariants(recipe_for(**ALONE), relations=['cache', 'start'])
    assert 'start' in broken(found), found


@pytest.mark.slow
def test_a_reference_in_another_order_is_found(monkeypatch):
    right = preferences._log_probs

    def turned(*given): return right(*given).flip(0)

    monkeypatch.setattr(preferences, '_log_probs', turned)
    found = check_invariants(recipe_for(**ALONE), relations=['start', 'reference file'])
    assert broken(found) == ['start', 'reference file'], found


@pytest.mark.slow
def test_a_reference_that_is_computed_again_after_a_stop_is_found(monkeypatch):
    right = preferences.set_reference

    def again(trainer, recipe, loader):
        trainer.run.start = replace(trainer.run.start, step=0)
        trainer.run.files.reference.unlink(missing_ok=True)
        right(trainer, recipe, loader)

    monkeypatch.setattr('llm_workbook.training.trainer.set_reference', again)
    found = check_invariants(recipe_for(**ALONE), relations=['start', 'reference file'])
    assert 'reference file' in broken(found) and 'start' not in broken(found), found


@pytest.mark.slow
@few
def test_rewards_of_rank_0_alone_are_found(monkeypatch):
    right = preferences._of_all_ranks

    def own(sums, votes):
        from llm_workbook.parallel.agreement import Votes
        right(sums, votes)  # The others wait in it
        return right(sums, Votes())

    monkeypatch.setattr(preferences, '_of_all_ranks', own)
    found = check_invariants(recipe_for(), relations=['swap', 'reported loss'])
    assert broken(found) == ['reported loss'], found
