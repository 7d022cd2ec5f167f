"""The plan against real ranks: what each holds and sends in a step, to the byte."""
import json

import pytest
from bench.lines.ledger_bytes import BASES, CASES, bytes_apart, messages, run, sent_apart
from bench.record import RESULTS, faults
from bench.shared.real_ranks import SMALL_REST_B, run_recipe
from trouble import slow_case

HERE = (
    'fsdp2-full-bf16', 'fsdp2-full-accumulated', 'fsdp2-full-checkpointed', 'fsdp2-full-hybrid',
    'fsdp2-lora',
    'fsdp2-lora-kept', 'fsdp2-qlora', 'fsdp2-qlora-experts', 'trainer-qlora', 'ddp-full',
    'ddp-qlora-uint8', 'zero1-lora', 'zero2-full-fp32', 'zero3-full-bf16',
    'zero3-qlora')  # The benchmark runs the rest too


@pytest.fixture(scope='module')
def folder(tmp_path_factory): return tmp_path_factory.mktemp('bases')


@pytest.fixture(scope='module')
def plain(folder): return run('fsdp2-full-fp32', folder)


QUICK = 'fsdp2-qlora', 'ddp-full'


@pytest.mark.parametrize('name', [name if name in QUICK else slow_case(name) for name in HERE])
def test_every_rank_holds_and_sends_what_the_plan_says(name, folder):
    recipe, results, apart, sent = run(name, folder)
    assert len(results) == recipe.cluster.ranks == CASES[name][1]
    assert apart == {}
    assert sent == {}
    assert max(rest for r in results for rest in r['rest'].values()) < SMALL_REST_B


GLM = {'model_type': 'glm4_moe', 'hidden_size': 40, 'intermediate_size': 56, 'head_dim': 22,
       'num_attention_heads': 2, 'num_key_value_heads': 1, 'vocab_size': 103,
       'moe_intermediate_size': 24, 'n_routed_experts': 4, 'num_experts_per_tok': 2,
       'n_shared_experts': 1, 'first_k_dense_replace': 1, 'num_hidden_layers': 2,
       'tie_word_embeddings': False, 'max_position_embeddings': 128}


@pytest.mark.slow
def test_adapters_of_shared_experts_and_dense_layers_are_held_as_planned(folder, monkeypatch):
    monkeypatch.setitem(BASES, 'odd-glm', GLM)
    monkeypatch.setitem(CASES, 'shared', ('fsdp2', 3, 'lora', 'odd-glm', {}))
    _, results, apart, sent = run('shared', folder)
    assert results[0]['held']['backward']['adapters'] and apart == sent == {}


def test_torch_counts_the_same_collectives(plain):
    for result in plain[1]:
        sent = messages(result['collectives'])
        counts = result['comm_debug_mode']
        kinds = {
            '_allgather_base_': 'all_gather', '_reduce_scatter_base_': 'reduce_scatter',
            'all_reduce': 'all_reduce'}
        assert counts == {
            name: sum(n for (found, _), n in sent.items() if found == kind)
            for name, kind in kinds.items()}


@pytest.mark.parametrize('kind', ['weights', 'gradients', 'optimizer'])
def test_one_byte_too_many_is_seen(plain, kind, monkeypatch):
    recipe, results, *_ = plain
    held = results[1]['held']['backward']
    monkeypatch.setitem(held, kind, held[kind] + 1)
    assert bytes_apart(recipe, results) == {kind: 1}


def test_one_message_too_many_is_seen(plain):
    recipe, (first, second), *_ = plain
    more = second | {'collectives': [*second['collectives'], ('backward', 'all_gather', 8)]}
    assert sent_apart(recipe, [first, more]) == {'only run': {('all_gather', 8): 1}}


def test_what_the_loop_would_pass_over_is_refused(plain):
    recipe = plain[0].changed({'sharding.strategy': 'zero2', 'optimizer.kind': 'sgd'})
    with pytest.raises(ValueError, match="does not do optimizer.kind = 'sgd' with zero2"):
        run_recipe(recipe, 'tiny-base')


def test_the_cases_cover_what_they_should():
    strategies, ranks, methods = (set(column) for column in list(zip(*CASES.values()))[:3])
    assert strategies == {'fsdp2', 'ddp', 'zero1', 'zero2', 'zero3'}
    assert ranks == {2, 3, 4}
    assert methods == {'full', 'lora', 'qlora'}
    assert len(CASES) >= 12
    assert sum(base.startswith('odd') for *_, base, _ in CASES.values()) >= 4


def test_the_record_says_that_every_byte_agrees():
    made = json.loads((RESULTS/'cpu'/'ledger_bytes.json').read_text())
    assert faults(made) == []
    assert made['goal'] == made['worst'] == 0
    assert {row['recipe'] for row in made['recipes']} == CASES.keys()
    assert all(
        row['differences_b'] == row['collectives_differ'] == {} and min(row['held_b']) > 0
        for row in made['recipes'])
