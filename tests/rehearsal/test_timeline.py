"""Spans of programs that were written by hand: what is alive at each operation, to the byte."""
import pytest

from llm_workbook.model.spec import spec
from llm_workbook.rehearsal.recorder import Block, Event, Recorder
from llm_workbook.rehearsal.timeline import Span, Timeline, extrapolated, shallow_depths, spans


def block(size_b, born, died, kind='weights', host=False):
    return Block(size_b, born, died, kind, 'forward', 'model.layers.0', 'mm', (size_b,), host)


def program(*blocks):
    "Two operations of loading, then a step of three: two in a layer, one in the head."
    places = [('load', '')] * 2 + [('forward', 'model.layers.0')] * 2 + [('forward', 'lm_head')]
    recorder = Recorder()
    recorder.events += [
        Event(phase, where, f'op {i}', 10 * i) for i, (phase, where) in enumerate(places)]
    recorder.blocks += blocks
    return recorder


def test_what_was_there_before_the_step_is_in_it():
    layer, head = spans(program(block(100, 0, None), block(7, 0, 1)), begin=2)
    assert (layer.kinds, head.kinds) == ({'weights': 100}, {'weights': 100})


def test_a_block_is_there_from_its_first_operation_to_its_last():
    layer, head = spans(program(block(100, 0, None), block(40, 2, 3, 'activations'),
                                block(10, 3, 3, 'logits'), block(5, 4, None, 'logits')), begin=2)
    assert (layer.kinds, layer.op) == ({'weights': 100, 'activations': 40, 'logits': 10}, 'op 3')
    assert (head.kinds, head.op, head.host_b) == ({'weights': 100, 'logits': 5}, 'op 4', 0)
    assert (layer.flops, head.flops) == (20 + 30, 40)
    line = Timeline((layer, head), 1)
    assert line.phases() == {'forward': 150}
    assert line.modules() == {'model.layers.0': 150, 'lm_head': 105}


def test_what_lies_in_host_memory_is_counted_apart():
    layer, _ = spans(program(block(100, 0, None), block(40, 1, None, 'optimizer', True)), begin=2)
    assert (layer.size_b, layer.host_b) == (100, 40)


def step_of(layers):
    """A forward and a backward pass whose layers come in pairs, a narrow and a wide one.

    While a layer gathers, the unit before it is still there; that before the first is no layer.
    """
    sizes = [1000 if layer % 2 else 700 for layer in range(layers)]
    before = zip([55, *sizes], sizes)
    up = [('forward', f'model.layers.{i}', a + b, 10 * i) for i, (a, b) in enumerate(before)]
    after = zip([77, *reversed(sizes)], reversed(sizes))
    down = [('backward', f'model.layers.{layers - 1 - i}', a + b, 10 * (layers - i))
            for i, (a, b) in enumerate(after)]
    parts = [('forward', 'model.embed_tokens', 55, 0), *up, ('forward', 'lm_head', 77, 10 * layers),
             ('backward', 'lm_head', 77, 10 * layers), *down]
    return Timeline(tuple(
        Span(phase, where, {'collective': gathered, 'activations': kept}, 0, 'op', 1, ())
        for phase, where, gathered, kept in parts), layers)


@pytest.mark.parametrize('short', [6, 8])
def test_the_layer_behind_the_embedding_is_not_repeated(short):
    assert extrapolated(step_of(short), step_of(short + 2), 24) == step_of(24)


@pytest.mark.parametrize('source, depths', [
    ('gpt-oss-20b', (6, 8, 24)), ('gemma-3-1b', (14, 20, 26)), ('llama-3.2-1b', (6, 7, 16))])
def test_a_short_model_has_a_layer_more_than_it_repeats(source, depths):
    assert shallow_depths(spec(source)) == depths
