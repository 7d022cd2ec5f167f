"""What a cell of the page of `pictures` cannot test well: pixels and bytes."""
import random
from io import BytesIO

import pytest


def widest():
    "Draw each picture as full as a page may make it."
    from llm_workbook import pictures as p
    draw = random.Random(0)
    events = 600
    classes = {
        name: [2**20 * min(i, events - i) + draw.randrange(2**22) for i in range(events)]
        for name in p.CLASS_LOOK}
    spans = [
        (rank, time, time + 1, kind, f'layer {time}')
        for rank in range(4)
        for time, kind in enumerate(p.KIND_LOOK)]
    held = {'gathered': [(time, draw.randrange(2**30)) for time in range(12)]}
    parts = [*range(39), None]
    bars = {f'case {i}': {name: 2**30 * (i + 1) for name in p.CLASS_LOOK} for i in range(8)}
    state = {rank: [1] * 4 for rank in range(4)}
    sends = [(rank, (rank + 1) % 4, rank) for rank in range(4)]
    return {
        'schedule': p.schedule(spans, memory=held, marks={3: 'a mark', 3.5: 'another'}),
        'mountain': p.mountain(classes, marks={0: 'forward', 20: 'x'}, limit_b=2**33, title='t'),
        'memory_bars': p.memory_bars(bars, limit_b={'a card': 2**36}, title='t'),
        'shard_map': p.shard_map({f'row {i}': parts for i in range(4)}),
        'ring': p.ring([state] * 7, [sends] * 7),
        'number_line': p.number_line({'a': range(5000), 'b': range(0, 5000, 7)}, 0, 5000)}


@pytest.fixture(scope='module')
def drawn():
    return {name: figure._repr_png_() for name, figure in widest().items()}


@pytest.mark.parametrize(
    'name', 'schedule mountain memory_bars shard_map ring number_line'.split())
def test_a_picture_is_small_and_without_a_background(drawn, name):
    from PIL import Image
    png = drawn[name]
    image = Image.open(BytesIO(png)).convert('RGBA')
    assert len(png) <= 60 * 2**10
    assert image.width <= 700
    assert image.getpixel((0, 0))[3] == 0


def test_words_inside_a_bar_differ_from_it():
    from llm_workbook.display import PALETTE
    from llm_workbook.pictures import schedule
    figure = schedule([(0, 0, 10, 'copy', 'yellow'), (0, 10, 20, 'compute', 'blue')])
    colours = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert colours == {'yellow': '#1a1a1a', 'blue': 'white'}
    assert set(colours.values()).isdisjoint(PALETTE.values())


def test_a_label_that_does_not_fit_is_left_out():
    from llm_workbook.pictures import schedule
    figure = schedule([(0, 0, 1, 'send', 'a long label'), (0, 1, 100, 'wait', 'short')])
    assert [text.get_text() for text in figure.axes[0].texts] == ['short']


def test_looks_of_classes_and_of_kinds_differ():
    from llm_workbook.pictures import CLASS_LOOK, KIND_LOOK
    assert len(set(CLASS_LOOK.values())) == len(CLASS_LOOK)
    assert KIND_LOOK['compute'] == KIND_LOOK['forward']
    assert len(set(KIND_LOOK.values())) == len(KIND_LOOK) - 1


def test_a_picture_does_not_change_the_settings_of_matplotlib():
    from matplotlib import rcParams
    before = dict(rcParams)
    widest()
    assert dict(rcParams) == before


def test_the_site_says_what_a_picture_shows():
    from docs import describe_images
    from site_check import Page

    def cell(source, png=False):
        kind, data = ('code', [{'data': {'image/png': ''}}]) if png else ('markdown', [])
        return {'cell_type': kind, 'metadata': {}, 'source': source, 'outputs': data}
    cells = [
        cell('# A page\n\nWords'), cell('plot()', True),
        cell('*Each [point](x.ipynb) is\na `plan`.*'),
        cell('## A section'), cell('plot()', True), cell('**No** caption'), cell('1', False)]
    describe_images(cells)
    alts = [c['metadata']['mystnb']['image']['alt'] for c in cells if c['metadata']]
    assert alts == ['Figure: Each point is a plan.', 'Figure: A section']
    shown = Page(f'<img alt="{alts[0]}"><img alt=""><img><img alt="_images/0f1e.png">')
    assert shown.wordless == 3
