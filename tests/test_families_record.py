"""The table of families: what its record says, what its checks would notice, and some rows live."""
import json
import re

import pytest
from bench.lines import families
from bench.record import RESULTS, faults
from bench.shared.families import FAMILIES, METHODS, named_fixes

RECORD = json.loads((RESULTS/'cpu'/'families.json').read_text(encoding='utf-8'))
ROWS = {(row['family'], row['method']): row for row in RECORD['rows']}
FIX = re.compile(r'\b[Ss]et \w+\.\w+ to |merge (?:them|it) with peft|train it as it is'
                 '|serve the base with its adapters')


def test_the_record_has_every_family_and_method_and_no_failure():
    assert set(ROWS) == {(family, method) for family in FAMILIES for method in METHODS}
    assert RECORD['families'] >= 24
    assert RECORD['value'] >= RECORD['goal'] == 24
    assert RECORD['failed'] == {}


def test_every_refusal_names_a_fix():
    assert RECORD['refused']
    for where, reason in RECORD['refused'].items(): assert FIX.search(reason), f'{where}: {reason}'
    for row in ROWS.values():
        if 'changes' in row: assert named_fixes(row['refused_without']), row


def test_the_newest_generations_train_by_every_method():
    for family in ('Llama 4', 'Qwen 3.5', 'Qwen 3.5 MoE', 'Gemma 4', 'Phi 4', 'gpt-oss',
                   'DeepSeek V3', 'GLM 4.5', 'SmolLM 3', 'OLMo 3', 'Llama 4 (images)',
                   'Qwen 3.5 (images)', 'Qwen 3 VL', 'Gemma 4 (images)', 'Mistral Small 3.1'):
        for method in METHODS:
            row = ROWS[family, method]
            assert row['trains'] is row['parity'] is row['rehearses'] is True, (family, method)


@pytest.mark.parametrize('reason, fixes', [
    ("has none; set model.attention to 'eager'", {'model.attention': 'eager'}),
    ('set method.targets to [q_proj, v_proj]', {'method.targets': ['q_proj', 'v_proj']}),
    ("Set method.kind to 'lora', or method.unpacked to 0.2", {'method.unpacked': .2}),
    ("set sharding.loading to 'every_rank'", {}),
    ('it does not run', {})])
def test_the_setting_that_a_refusal_names_is_read(reason, fixes):
    assert named_fixes(reason) == fixes


ROW = {'family': 'A', 'method': 'lora', 'kind': 'a', 'checked': True}
STEPS = {'losses': [7.0, 6.9], 'norms': [2.0, 2.1]}
RANK = STEPS | {'share': .5}
PROCESS = {'alone': STEPS, 'cache': 0.0, 'merges': 1e-6, 'exports': True, 'rehearses': 100}
WORSE = {
    'trains': ({'share': .7}, {}, 0.0), 'parity': ({'losses': [7.0, 6.8]}, {}, 0.0),
    'cache': ({}, {'cache': .01}, 0.0), 'merges': ({}, {'merges': .01}, 0.0),
    'rehearses': ({}, {'rehearses': 'RuntimeError: no'}, 0.0), 'exports': ({}, {}, .01)}


def judged(rank, process, difference):
    ranks = [RANK | rank, RANK | rank]
    return families.judged(dict(ROW), ranks, PROCESS | process, difference)


def test_a_row_in_which_all_holds_is_counted():
    found = families.summary([judged({}, {}, 0.0)])
    assert found == {'architectures': 1, 'families': 1, 'refused': {}, 'failed': {}}


@pytest.mark.parametrize('check', WORSE)
def test_a_row_in_which_one_check_does_not_hold_is_a_failure(check):
    found = families.summary([judged(*WORSE[check])])
    assert list(found['failed']) == [f'A, lora, {check}']
    assert found['architectures'] == (0 if check in ('trains', 'parity') else 1)


def test_a_rank_that_ended_is_a_failure_of_its_case():
    ended = families.judged(dict(ROW), [{'error': 'RankError: gone'}], PROCESS, 0.0)
    failed = families.summary([ended])['failed']
    assert failed == {'A, lora, trains': 'RankError: gone', 'A, lora, parity': 'RankError: gone'}


@pytest.mark.slow
def test_a_family_lives():
    "Of others, tests/parallel/test_families.py trains those that are unlike a Llama."
    made = families.measure(['Qwen 3.5 (images)'])
    assert faults(made) == []
    assert made['failed'] == {}
    assert made['value'] == made['families'] == 1
    assert len(made['rows']) == 3
    for row in made['rows']:
        assert row['losses'] == pytest.approx(ROWS[row['family'], row['method']]['losses'], abs=.01)


def test_trials_have_taken_at_least_24_families_through_every_station():
    trials = json.loads((RESULTS/'cpu'/'try_out.json').read_text(encoding='utf-8'))
    assert trials['value'] == len({row['family'] for row in trials['rows']}) >= 24
    assert trials['failed'] == []
    passed = set.intersection(*(set(row['passed']) for row in trials['rows']))
    assert {'mask', 'shares', 'adapters', 'parity', 'resume', 'merge'} <= passed
