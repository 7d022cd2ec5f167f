"""The desk in JupyterLab, in a real Chromium: where things stand, and what a click does.

It needs playwright (`pip install playwright`) and a `chromium` on the PATH, which the project does
not install; without them it is skipped.
"""
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest
from page import ROOT
from trouble import wait_for

CHROMIUM = shutil.which('chromium')
playwright = pytest.importorskip('playwright.sync_api')
pytest.importorskip('jupyterlab')
pytestmark = pytest.mark.skipif(not CHROMIUM, reason='no chromium on the PATH')
OUTPUT = '.jp-OutputArea-output'


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    "Address of a JupyterLab on copies of the pages."
    place = tmp_path_factory.mktemp('lab')
    pages = shutil.copytree(ROOT/'nbs/desk', place/'desk', ignore=shutil.ignore_patterns('runs'))
    port, token = free_port(), os.urandom(16).hex()
    settings = {
        'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1', 'JUPYTER_TOKEN': token,
        'JUPYTER_CONFIG_DIR': str(place/'config'), 'JUPYTER_DATA_DIR': str(place/'data')}
    command = [
        sys.executable, '-m', 'jupyterlab', '--no-browser', '--allow-root',
        '--ServerApp.ip=127.0.0.1', f'--ServerApp.port={port}', f'--ServerApp.root_dir={pages}']
    with (place/'log').open('w') as log:
        server = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log)
    try:
        assert wait_for(lambda: 'is running at' in (place/'log').read_text(), 120)
        yield f'http://127.0.0.1:{port}/lab/tree/{{}}?reset&token={token}'
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope='module')
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox'])
        yield opened
        opened.close()


def run_page(browser, lab, name, width, awaited):
    "Open a page of the desk, run its first cell of code, and wait for an element."
    tab = browser.new_context(viewport={'width': width, 'height': 800}).new_page()
    tab.goto(lab.format(name), timeout=120_000)
    tab.wait_for_selector('.jp-Notebook .jp-CodeCell', timeout=120_000)
    tab.wait_for_selector('text=| Idle', timeout=120_000)
    tab.evaluate("document.querySelectorAll('.jp-OutputArea-child').forEach(old => old.remove())")
    tab.click('.jp-CodeCell .cm-content >> nth=0')
    tab.keyboard.press('Shift+Enter')
    tab.wait_for_selector(f'{OUTPUT} {awaited}', timeout=180_000)
    tab.locator(f'{OUTPUT} {awaited}').first.scroll_into_view_if_needed()
    time.sleep(1)  # Until the layout is at rest
    return tab


def shut_down(tab):
    "End the kernel of a page: only one at a time."
    tab.click('text=Kernel >> nth=0')
    tab.click('text=Shut Down Kernel >> nth=0')
    tab.wait_for_selector('text=No Kernel', state='attached', timeout=60_000)
    tab.context.close()


def left_of(box): return box['x'] + box['width']


@pytest.mark.parametrize('width', [1000, 1500])
def test_the_plan_stands_beside_the_controls_with_its_verdict_above_the_fold(browser, lab, width):
    tab = run_page(browser, lab, '01_plan.ipynb', width, 'select')
    whole = tab.locator(f'{OUTPUT} .widget-vbox').first.bounding_box()
    verdict = tab.locator(f'{OUTPUT} [role=status]').first.bounding_box()
    picture = tab.locator(f'{OUTPUT} img[alt]').first.bounding_box()
    lists = tab.locator(f'{OUTPUT} .widget-vbox .widget-vbox select')
    model = lists.nth(0).bounding_box()
    last = lists.nth(lists.count() - 1).bounding_box()
    assert verdict['x'] > left_of(model) and picture['x'] > left_of(model)
    assert abs(verdict['y'] - model['y']) < 60  # As high as the first control,
    assert verdict['y'] + verdict['height'] < 800  # and seen without scrolling
    assert picture['y'] < last['y']
    assert left_of(verdict) <= left_of(whole) + 1 and left_of(picture) <= left_of(whole) + 1
    assert verdict['width'] > 200
    texts = lists.evaluate_all('all => all.map(one => one.selectedOptions[0].text)')
    assert all(texts)
    cut = tab.locator(f'{OUTPUT} .widget-label').evaluate_all(
        'all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText)')
    assert cut == []

    before = tab.locator(f'{OUTPUT} [role=status]').first.inner_text()
    tab.click('text=Make it fit >> nth=-1')
    tab.wait_for_selector('text=Changed: ', timeout=60_000)
    assert 'does not fit' in before.lower()
    assert 'Fits: ' in tab.locator(f'{OUTPUT} [role=status]').last.inner_text()
    shut_down(tab)


def test_a_run_is_followed_and_stopped_and_its_button_stays(browser, lab):
    tab = run_page(browser, lab, '02_run.ipynb', 1000, 'button:has-text("Stop and save")')
    button = tab.locator(f'{OUTPUT} button:has-text("Stop and save")').first
    said = tab.locator(f'{OUTPUT} [role=status]').first
    first = button.bounding_box()
    assert wait_for(lambda: 'loss' in said.inner_text(), 180)
    charts = [tab.locator(f'{OUTPUT} img[alt]').nth(n).bounding_box() for n in (0, 1)]
    assert charts[1]['x'] > charts[0]['x'] + 200
    assert abs(charts[0]['y'] - charts[1]['y']) < 5
    assert button.bounding_box()['width'] == first['width']
    assert button.bounding_box()['x'] == first['x']
    button.click()
    stopped = wait_for(lambda: 'stopped and saved at step' in said.inner_text(), 120)
    assert stopped, said.inner_text()
    assert 'resume=True) goes on' in said.inner_text()
    ended = tab.locator(f'{OUTPUT} button:has-text("Ended")').first.bounding_box()
    assert (ended['x'], ended['width']) == (first['x'], first['width'])
    shut_down(tab)
