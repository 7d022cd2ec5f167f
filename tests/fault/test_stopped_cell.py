"""Fault 22: the Stop button of a notebook, in the middle of a fine-tune."""
import os
import signal
import textwrap
import threading

import pytest
from trouble import CANARY, TOKENS, losses, wait_for

from llm_workbook.checkpoint.manifest import latest_valid

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
    print([child.pid for child in psutil.Process().children(recursive=True)], latest_valid('run').name)
    # %%
    run = fine_tune(recipe, 'run', resume=True, live=False)
    print(len(run.metrics))
'''


@pytest.mark.slow
def test_22_a_stopped_cell_saves_and_leaves_no_process(recipe, tmp_path, monkeypatch):
    nbformat = pytest.importorskip('nbformat')
    nbclient = pytest.importorskip('nbclient')
    for name in TOKENS: monkeypatch.setenv(name, CANARY)
    recipe.changed({'optimizer.steps': 80, 'intervals.saving': 5}).save(tmp_path/'recipe.yaml')
    nb = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(c) for c in textwrap.dedent(CELLS).strip().split('\n# %%\n')
        ]
    )
    client = nbclient.NotebookClient(
        nb, timeout=120, kernel_name='python3', allow_errors=True,
        resources={'metadata': {'path': str(tmp_path)}})
    seen = {}
    def stop():
        wait_for(lambda: (tmp_path/'run').is_dir() and len(losses(tmp_path/'run')) >= 12, 80)
        seen['step'], seen['committed'] = len(losses(tmp_path/'run')), latest_valid(tmp_path/'run')
        os.killpg(os.getpgid(client.km.provisioner.process.pid), signal.SIGINT)
    def on_start(cell, cell_index):
        if 'interrupt me' in cell.source: threading.Thread(target=stop).start()
    client.on_cell_execute = on_start
    client.execute()
    errors = [[o.ename for o in cell.outputs if o.output_type == 'error'] for cell in nb.cells]
    assert errors == [[], ['Preempted'], [], []], [o for cell in nb.cells for o in cell.outputs]
    said = [
        ''.join(o.text for o in cell.outputs if o.output_type == 'stream' and o.name == 'stdout')
        for cell in nb.cells]
    assert 12 <= seen['step'] < 80
    assert seen['committed'] is not None
    left, committed = said[2].split()
    assert left == '[]', said
    assert seen['step'] <= int(committed.removeprefix('checkpoint-')) < 80, said
    assert said[3] == '80\n', said
    assert CANARY not in nbformat.writes(nb)
