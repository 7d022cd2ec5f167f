"""Fault 22: the Stop button of a notebook, in the middle of a fine-tune."""
import os
import signal
import textwrap
import threading

import pytest
from trouble import CANARY, TOKENS, steps_done, wait_for

from llm_workbook.checkpoint.manifest import latest_valid

STEPS = 40
CELLS = '''
    import os, psutil
    from llm_workbook.checkpoint.manifest import latest_valid
    from llm_workbook.config.recipe import Recipe
    from llm_workbook.training.fine_tune import fine_tune
    recipe = Recipe.load('recipe.yaml')
    # %%
    print('interrupt me')
    fine_tune(recipe, 'run')
    # %%
    left = [child.pid for child in psutil.Process().children(recursive=True)]
    print(left, latest_valid('run').name)
    # %%
    run = fine_tune(recipe, 'run', resume=True, live=False)
    print(len(run.metrics))
'''


def stdout(cell) -> str:
    "All that a cell has printed."
    streams = [output for output in cell.outputs if output.output_type == 'stream']
    return ''.join(stream.text for stream in streams if stream.name == 'stdout')


@pytest.mark.slow
def test_22_a_stopped_cell_saves_and_leaves_no_process(recipe, tmp_path, monkeypatch):
    nbformat = pytest.importorskip('nbformat')
    nbclient = pytest.importorskip('nbclient')
    for name in TOKENS: monkeypatch.setenv(name, CANARY)
    recipe.changed({'optimizer.steps': STEPS, 'intervals.saving': 6}).save(tmp_path/'recipe.yaml')
    sources = textwrap.dedent(CELLS).strip().split('\n# %%\n')
    nb = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources)))
    client = nbclient.NotebookClient(
        nb, timeout=120, kernel_name='python3', allow_errors=True,
        resources={'metadata': {'path': str(tmp_path)}})
    at_stop = {}
    def stop():
        wait_for(lambda: steps_done(tmp_path/'run') >= 8, 80)
        at_stop['step'] = steps_done(tmp_path/'run')
        at_stop['committed'] = latest_valid(tmp_path/'run')
        os.killpg(os.getpgid(client.km.provisioner.process.pid), signal.SIGINT)
    def on_start(cell, cell_index):
        if 'interrupt me' in cell.source: threading.Thread(target=stop).start()
    client.on_cell_execute = on_start
    client.execute()
    errors = [[o.ename for o in cell.outputs if o.output_type == 'error'] for cell in nb.cells]
    assert errors == [[], ['Preempted'], [], []], [o for cell in nb.cells for o in cell.outputs]
    printed = list(map(stdout, nb.cells))
    assert 8 <= at_stop['step'] < STEPS
    assert at_stop['committed'] is not None
    processes, committed = printed[2].split()
    assert processes == '[]', printed
    assert at_stop['step'] <= int(committed.removeprefix('checkpoint-')) < STEPS, printed
    assert printed[3] == f'{STEPS}\n', printed
    assert CANARY not in nbformat.writes(nb)
