"""What the cells of the desk leave behind. They assert nothing: a reader moves controls or stops a
run, and then runs the next cell, which must not fail.
"""
import json

import pytest
from page import ROOT, code_sources

from llm_workbook import estimate

PAGES = sorted((ROOT/'nbs/desk').glob('*.ipynb'))


def sources(name):
    notebook = json.loads((ROOT/'nbs/desk'/name).read_text('utf-8'))
    return code_sources(notebook['cells'])


def after(name, place, monkeypatch):
    "The names that a page leaves after its cells, run in `place`."
    monkeypatch.chdir(place)
    names = {}
    for source in sources(name): exec(source, names)
    return names


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_no_cell_fails_because_a_reader_has_moved_something(page):
    assert not [source for source in sources(page.name) if 'assert' in source or '#|' in source]


def test_the_plan_begins_with_a_70b_that_is_too_large(tmp_path, monkeypatch):
    panel = after('01_plan.ipynb', tmp_path, monkeypatch)['panel']
    assert panel.adopt.name == 'llama-3.1-70b'
    assert not estimate(panel.adopt).fits
    panel.fit_button.click()
    assert estimate(panel.adopt).fits


@pytest.mark.slow
def test_the_run_learns(tmp_path, monkeypatch):
    run = after('02_run.ipynb', tmp_path, monkeypatch)['run']
    assert run.state == 'finished'
    assert run.metrics[-1]['loss'] < run.metrics[0]['loss']
    assert (tmp_path/'runs/desk/adapters').is_dir()


@pytest.mark.slow
def test_the_talk_asks_the_tuned_model_what_it_was_tuned_on(tmp_path, monkeypatch):
    names = after('03_talk.ipynb', tmp_path, monkeypatch)
    assert len(names['run'].metrics) == 12
    assert names['run'].metrics[-1]['loss'] < names['run'].metrics[0]['loss']
    row, = names['panel'].shown.rows
    assert row.prompt.startswith(names['recipe'].data.question)
    assert row.tuned == 'positive'
    assert row.base != row.tuned
