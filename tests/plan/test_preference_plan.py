"""Preference pairs in the plan and in the rehearsal; `test_rehearsal_truth` asks real ranks."""
from collections import Counter

import pytest
import torch
from bench.lines import step_peak_error
from bench.shared.small_rehearsals import AGAIN, FULL, LORA, PAIRS, QLORA, percent, recipe
from llm_workbook import (
    draft, estimate, estimate_step, evaluation_b, memory, node, reference_pass, rehearse, search)
from llm_workbook.config.document import RecipeError
from llm_workbook.plan.preferences import ReferencePass
from llm_workbook.training import preferences
from trouble import slow_case

SHORT = {'batch.length': 64}
WAYS = {
    'lora': LORA,
    'qlora, recomputed': QLORA | AGAIN,
    'full': FULL,
    'full, float32': FULL | {'precision.compute': 'float32'},
    'one pass': LORA | {'batch.loss_head': 'one_pass'},
    'two micro-batches': LORA | {'batch.accumulation': 2},
    'four ranks': QLORA | {'cluster.processes': 4},
    'like a GPU': LORA | {'cluster.device': 'cuda'}}


def tensors_b(made) -> int: return memory(made).total('step', 'gpu', 'allocated')


@pytest.mark.parametrize('way', [
    way if way in ('lora', 'like a GPU') else slow_case(way) for way in WAYS])
def test_the_plan_of_pairs_is_what_the_rehearsal_holds(way, tmp_path):
    made = recipe('brief', WAYS[way] | PAIRS | {'batch.length': 128}, tmp_path)
    assert abs(percent(tensors_b(made), rehearse(made, exact=True).peak_b)) < 1


def test_the_messages_of_pairs_are_those_of_the_rehearsal(tmp_path):
    made = recipe('brief', LORA | PAIRS | SHORT | {'batch.accumulation': 2}, tmp_path)
    played = Counter((kind, size_b) for _, kind, size_b, _ in rehearse(made, exact=True).messages)
    planned = Counter()
    for message in estimate_step(made, node=node('8x-h100').changed(gpus=2)).collectives:
        planned[message.kind, message.tensor_b] += message.count
    assert planned == played


def test_no_answer_is_rounded_to_bfloat16_on_its_way_out_of_the_model(tmp_path, monkeypatch):
    seen = []

    def look(log_probs, *others):
        seen.append(log_probs.dtype)
        return real(log_probs, *others)

    real = preferences.pair_scores
    monkeypatch.setattr(preferences, 'pair_scores', look)
    rehearse(recipe('brief', FULL | PAIRS | SHORT, tmp_path), exact=True)
    assert set(seen) == {torch.float32}


@pytest.mark.slow
def test_the_reference_pass_takes_what_was_planned():
    changes = step_peak_error.size(1, 512) | LORA | PAIRS
    job = 'wide', changes | step_peak_error.JUDGES, False
    row = step_peak_error.judged(job, step_peak_error.real(*job))
    assert abs(row['error']) < 1


def test_two_rows_of_unequal_length_count_a_mask_and_twice_the_tokens(tmp_path):
    pairs = recipe('brief', LORA | PAIRS, tmp_path)
    answers = recipe('brief', LORA | {'batch.micro': 2}, tmp_path)
    padded = answers.changed({'batch.padded': True})
    assert tensors_b(pairs) == tensors_b(padded) > tensors_b(answers)
    machine = node('8x-h100').changed(gpus=2)
    of_pairs, of_answers = (estimate_step(one, node=machine) for one in (pairs, padded))
    assert of_pairs.tokens == of_answers.tokens
    assert of_pairs.flops_counted == of_answers.flops_counted


def test_a_reference_is_an_evaluation_before_there_are_states(tmp_path):
    judged = {'intervals.evaluation': 1, 'optimizer.steps': 90}
    pairs = recipe('brief', FULL | PAIRS | judged, tmp_path)
    found = reference_pass(pairs, node=node('8x-h100').changed(gpus=2), rows=90)
    states_b = sum(line.size_b for line in memory(pairs).lines
                   if line.kind == 'optimizer' and line.phase == 'step' and not line.instant)
    assert states_b and found.peak_b == evaluation_b(pairs) - states_b
    assert found.pairs == 90 and found.seconds > 0


def test_an_estimate_names_the_reference_and_only_of_pairs(tmp_path):
    machine = node('8x-h100').changed(gpus=2)
    gpu = LORA | {'cluster.device': 'cuda', 'optimizer.steps': 1000}
    pairs = recipe('brief', gpu | PAIRS, tmp_path)
    for rows, scored in (1234, '1,234'), (4000, '2,000'), (None, '2,000'):
        notes = estimate(pairs, machine, rows=rows).warnings
        assert [note for note in notes if f'the reference scores {scored} pairs' in note]
    plain = estimate(recipe('brief', gpu, tmp_path), machine)
    assert not [note for note in plain.warnings if 'reference' in note]
    assert str(ReferencePass(10, 7200., 0)).endswith('before the first step: 2.00 hours')


@pytest.mark.parametrize('head', ['full', 'fused'])
def test_heads_that_no_plan_counts_are_refused(head, tmp_path):
    with pytest.raises(RecipeError, match='dpo-scores-in-tiles'):
        recipe('brief', LORA | PAIRS | {'batch.loss_head': head}, tmp_path)


# Questions of a user

PREFERS = {'method.objective': 'dpo', 'data.source': 'sample-preferences',
           'data.format': 'preference', 'method.dropout': 0.0}
QUICK = {'optimizer.kind': 'adamw_fused', 'sharding.reshard_after_forward': True}


@pytest.mark.parametrize('model, machine, kind', [
    ('llama-3.1-8b', '1x-rtx-4090', 'qlora'), ('llama-3.1-8b', '1x-a40', 'lora'),
    ('llama-3.1-70b', '8x-h100', 'lora'), ('llama-2-7b', '8x-a100-80', 'full')])
def test_the_cheapest_way_to_learn_from_pairs_runs_fits_and_pays_for_the_reference(
    model, machine, kind
):
    asked = draft(model, machine).changed(PREFERS)
    plan = search(asked, QUICK | {'method.kind': kind}, by='usd').cheapest
    found = estimate(plan.recipe)
    assert found.fits and not plan.not_run and plan.recipe.method.objective == 'dpo'
    assert plan.recipe.batch.loss_head != 'full'
    extra_h = reference_pass(plan.recipe).seconds / 3600
    assert plan.hours == pytest.approx(found.step.hours + extra_h)
    assert plan.usd == pytest.approx(plan.hours * node(machine).price_hour)
    assert extra_h > 0.05 * found.step.hours


def test_pairs_that_fit_no_card_are_refused_with_the_bytes_that_lack():
    asked = draft('llama-3.1-8b', '1x-rtx-4090').changed(PREFERS)
    found = search(asked, QUICK | {'method.kind': 'full', 'batch.loss_head': ['chunked', 'full']})
    assert not found.accepted
    kinds = {refusal.kind for refusal in found.refused}
    assert 'memory' in kinds and 'rule' in kinds
    said = ' '.join(reason for refusal in found.refused for reason in refusal.reasons)
    assert 'too small' in said and '[dpo-scores-in-tiles]' in said
    with pytest.raises(ValueError, match='GiB'): str(found.best)
