"""The pages of the book teach: words before code, an output soon, a picture that carries the idea,
one prediction; they use the library and export nothing."""
import base64
import json
import re
import struct

import pytest
from page import ROOT
from reading_time import STAMP, chapters, lines_of_code, minutes

PAGES = chapters()
WORKBOOK = {page.stem[:2]: page for page in sorted((ROOT/'nbs/workbook').glob('[0-9]*.ipynb'))}


def cells_of(page) -> list[dict]: return json.loads(page.read_text('utf-8'))['cells']


def sources(page, kind) -> list[str]:
    return [''.join(c['source']) for c in cells_of(page) if c['cell_type'] == kind]


def pictures(page) -> list[bytes]:
    "The PNG files among the outputs of a page."
    found = []
    for cell in cells_of(page):
        for output in cell.get('outputs', []):
            png = output.get('data', {}).get('image/png')
            if png: found.append(base64.b64decode(png))
    return found


def test_the_book_has_29_pages_in_one_order():
    numbers = [page.stem.partition('_')[0] for page in PAGES]
    whole = [f'{number:02}' for number in range(1, 27)]
    assert numbers == [*whole[:17], '17a', *whole[17:19], '19a', '19b', *whole[19:]]


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_a_page_teaches_and_exports_nothing(page):
    code = sources(page, 'code')
    assert not [source for source in code if re.match(r'#\|\s*(export|default_exp)', source)]
    assert not [source for source in code if lines_of_code(source) > 25]
    imports = re.compile(r'^(?:import|from) ', re.M)
    assert not [source for source in code if len(imports.findall(source)) > 5]
    words = sum(len(source.split()) for source in sources(page, 'markdown'))
    assert 900 <= words <= 1800


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_words_come_first_and_an_output_within_ten_lines(page):
    cells = cells_of(page)
    assert [cell['cell_type'] for cell in cells[:2]] == ['markdown'] * 2
    lines = 0
    for cell in cells:
        if cell['cell_type'] != 'code': continue
        lines += lines_of_code(''.join(cell['source']))
        if cell['outputs']: break
    assert lines <= 10


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_a_page_has_a_picture_and_one_prediction(page):
    drawn = pictures(page)
    assert drawn
    for png in drawn:
        width, _ = struct.unpack('>II', png[16:24])
        assert width <= 700 and len(png) <= 60 * 2**10
    text = '\n'.join(sources(page, 'markdown'))
    assert len(re.findall(r'^\*\*Predict\.\*\*', text, re.M)) == 1
    assert len(re.findall(r'^\*\*What happened\.\*\*', text, re.M)) == 1
    assert text.index('**Predict.**') < text.index('**What happened.**')


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_the_answer_to_a_prediction_is_folded_until_its_cell_is_run(page):
    cells = cells_of(page)
    texts = [''.join(cell['source']) for cell in cells]
    asked = next(i for i, text in enumerate(texts) if '**Predict.**' in text)
    told = next(i for i, text in enumerate(texts) if '**What happened.**' in text)
    answers = [cell for cell in cells[asked:told] if cell.get('outputs')]
    assert answers
    for cell in answers: assert cell['metadata'].get('jupyter') == {'outputs_hidden': True}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_a_page_says_how_long_it_takes_and_what_comes_next(page):
    cells = cells_of(page)
    assert STAMP.match(''.join(cells[1]['source']))[0] == (
        f'*Reading time: {minutes(cells)} minutes.*'), 'run tools/reading_time.py'
    text = '\n'.join(sources(page, 'markdown'))
    assert '## You can now' in text
    number = re.search(r'Exercises: \[set (\d+)\]\(\.\./workbook/(\w+)\.ipynb\)', text)
    assert number and WORKBOOK[number[2][:2]].stem == number[2]
    assert int(number[1]) == int(number[2][:2])
    place = PAGES.index(page)
    if page is not PAGES[-1]: assert 'Next: [' in text and f']({PAGES[place + 1].name})' in text
