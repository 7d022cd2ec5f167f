"""The parts of `python -m bench.gpu` that compare trainers and loss heads, in toy form on the CPU,
and what their committed lines say."""
import json
import tempfile

import pytest
from bench.gpu import lines, part, runs, speed
from bench.gpu.parts import PARTS
from bench.gpu.place import Missing, Place
from bench.programs import device_speed

from llm_workbook import Recipe

TOY = Place('cpu', toy=True)
NAMED = {made.name: made for made in PARTS}
RUN = {'useful': 70, 'tokens': 100, 'losses': [2.5, 2.4], 'settings': {}, 'weights': 10**9,
       'card': 'NVIDIA H100 80GB HBM3',
       'steps': [{'seconds': 9.0, 'allocated_b': 8}, {'seconds': 2.0, 'allocated_b': 3},
                 {'seconds': 1.0, 'allocated_b': 2}, {'seconds': 4.0, 'allocated_b': 1}]}


def test_the_first_step_counts_neither_in_rates_nor_in_memory():
    found = speed.rates(RUN)
    assert (found['useful_per_s'], found['tokens_per_s'], found['loss']) == (35.0, 50.0, 2.5)
    assert found['allocated_b'] == 3 and found['steps_s'] == [9.0, 2.0, 1.0, 4.0]


def test_flops_are_counted_by_both_conventions():
    found = speed.shares(RUN)
    assert found['flops_4n'] == 4 * 50 * 10**9 and found['flops_6n'] == 6 * 50 * 10**9
    assert found['mfu_4n'] == pytest.approx(200e9 / 989.4e12)
    assert 'mfu_4n' not in speed.shares(RUN | {'card': 'a card of tomorrow'})


def test_heads_are_measured_on_the_cpu():
    made = part.outcome(NAMED['head_speed'], TOY)
    figures = made['figures']
    assert made['status'] == 'measured'
    for name in 'ours', 'ours_all_scores', 'ours_frozen':
        assert figures[f'{name}_s'] > 0 and figures[f'{name}_hidden_off'] < 0.01
        assert made['missing'][f'{name}_b'] == 'a CPU has no allocator of blocks'
    assert figures['ours_head_off'] < 0.01 and 'ours_frozen_head_off' not in figures
    assert 'time_ratio' not in figures or figures['cce_s'] > 0


def test_a_head_that_others_have_is_set_beside_ours(monkeypatch):
    ways = speed.heads()
    monkeypatch.setattr(speed, 'heads', lambda: ways | {'cce': ways['ours']})
    figures = speed.head_speed(TOY)
    assert 0.05 < figures['time_ratio'] < 20 and 0.05 < figures['time_ratio_frozen'] < 20
    assert figures['cce_hidden_off'] == figures['ours_hidden_off']
    assert 'memory_ratio' not in figures


def test_a_cpu_has_nowhere_to_move_activations_to():
    made = part.outcome(NAMED['long_context'], TOY)
    assert made == {'status': 'skipped',
                    'reason': 'a CPU has no device to move activations from'}
    for call in speed.long_context, speed.long_context_16, runs.activations_away:
        with pytest.raises(Missing): call(TOY)


def test_examples_are_of_chat_like_lengths_and_whole_rows_train():
    rows = device_speed.drawn(200, 128, 50)
    sizes = [len(row['input_ids']) for row in rows]
    assert max(sizes) == 128 and min(sizes) >= 16 and len({*sizes}) > 20
    assert all(row['labels'].count(-100) == 3 * len(row['labels']) // 10 for row in rows)
    assert device_speed.drawn(200, 128, 50) == rows
    assert device_speed.whole(9, 50)['labels'] == device_speed.whole(9, 50)['input_ids']


def test_steps_of_rows_of_several_lengths_are_taken_in_their_order():
    with tempfile.TemporaryDirectory() as folder:
        made = speed.recipe('', speed.LORA | {'model.attention': 'sdpa', 'batch.packing': False},
                            TOY, folder)
        job = {'recipe': made.model_dump(mode='json'), 'words': 97, 'lengths': [48, 64, 24]}
        found = device_speed.stretched(job)
    assert [step['length'] for step in found['steps']] == [48, 64, 24]
    assert found['stopped'] is None and found['weights'] > 10**7
    assert found['settings']['attention'] == 'sdpa' and found['settings']['rows'] == 1


@pytest.mark.slow
def test_both_trainers_begin_with_the_same_loss():
    made = part.outcome(NAMED['lora_8b'], TOY)
    assert made['status'] == 'measured', made
    ours, trl = (made['figures'][name] for name in ('ours', 'trl'))
    assert ours['loss_off'] < 1e-3 and len(ours['steps_s']) == len(trl['steps_s']) == 4
    assert ours['settings']['attention'] == 'segments' and not ours['settings']['recomputes']
    assert trl['settings']['rows'] == 8 and trl['settings']['recomputes']
    assert ours['ratio'] == ours['useful_per_s'] / trl['useful_per_s']


def test_the_recipe_of_a_toy_is_that_of_the_card():
    with tempfile.TemporaryDirectory() as folder:
        toy = speed.recipe('llama-3.1-8b', speed.LORA, TOY, folder)
        real = speed.recipe('llama-3.1-8b', speed.LORA, Place('cuda'), folder)
    assert isinstance(real, Recipe) and real.batch.length == 4096 and toy.batch.length == 128
    assert (toy.method, toy.optimizer) == (real.method, real.optimizer)
    assert json.loads(real.model_dump_json())['model']['attention'] == 'segments'


def committed(name: str) -> list[dict]:
    "The figures of a part in the lines of all machines."
    return [line['figures'] for file in lines.FOLDER.glob('*.jsonl') for line in lines.read(file)
            if line['part'] == name and line['status'] == 'measured']


def test_measured_on_a_gpu_the_head_is_small_and_fast_and_right():
    found = committed('head_speed')
    assert found
    for figures in found:
        assert figures['time_ratio'] < 2.5 and figures['memory_ratio'] < 1.5
        for which in 'hidden', 'head':
            assert figures[f'ours_{which}_off'] < 2 * 2**-8


def test_measured_on_a_gpu_packed_rows_outdo_the_defaults():
    found = committed('lora_8b')
    assert found
    for figures in found:
        assert figures['ours']['ratio'] > 1.3 and figures['compiled']['ratio'] > 1.3
        assert max(figures[name]['loss_off'] for name in ('ours', 'compiled')) < 1e-3
        assert figures['compiled']['settings']['breaks'] == 0


def test_measured_on_a_gpu_70b_is_faster_in_less_memory_and_as_planned():
    found = committed('qlora_70b')
    assert found
    for figures in found:
        ours = figures['ours']
        assert ours['ratio'] > 1.2 and ours['memory_ratio'] < 0.9 and ours['loss_off'] < 1e-3
        changes = speed.QLORA | {'batch.micro': 2, 'batch.accumulation': ours['settings']['passes']}
        made = speed.recipe('llama-3.1-70b', changes, Place('cuda'), '')
        assert speed.planned_b(made) == pytest.approx(ours['allocated_b'], rel=0.01)
