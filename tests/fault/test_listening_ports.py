"""Fault 21: whatever listens while you work listens on this machine alone."""
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
import torch
import torch.distributed as dist
from trouble import ports, wait_for

from llm_workbook.parallel.ranks import notebook_ranks, run_ranks

ROOT = Path(__file__).resolve().parents[2]


def look():
    "Join the others, and see where this rank and the kernel listen while the group stands."
    if not dist.is_initialized():
        from accelerate import PartialState
        PartialState(cpu=True)
    dist.all_reduce(torch.ones(3))
    found = ports(), ports(psutil.Process().parent())
    dist.barrier()
    return found


@pytest.mark.parametrize(
    'launch, served', [(run_ranks, 0), (notebook_ranks, 1)], ids=['run_ranks', 'notebook_ranks'])
def test_21_ranks_listen_on_this_machine_alone(launch, served):
    seen = launch(look, 2)
    assert all(host == '127.0.0.1' for found in seen for place in found for host, _ in place), seen
    assert all(rank for rank, _ in seen), seen
    assert [len(kernel) for _, kernel in seen] == [served] * 2, seen


def test_21_pages_are_executed_without_a_port():
    assert "'transport': 'ipc'" in (ROOT/'tools/page.py').read_text()


@pytest.mark.slow
def test_21_make_lab_listens_on_this_machine_alone_and_asks_for_a_token(tmp_path):
    "The command of the Makefile, with a port of its own, no browser and empty settings."
    command = re.search(r'^\t@\$\(BIN\)/jupyter (lab .*)$', (ROOT/'Makefile').read_text(), re.M)[
        1].split()
    more = ['--no-browser', '--ServerApp.port=0', '--ServerApp.port_retries=0', '--allow-root']
    env = {
        name: str(tmp_path)
        for name in (
            'JUPYTER_CONFIG_DIR', 'JUPYTER_DATA_DIR', 'JUPYTER_RUNTIME_DIR', 'HOME', 'TMPDIR')}
    with open(tmp_path/'log', 'w') as log:
        lab = subprocess.Popen(
            [sys.executable, '-m', 'jupyter', *command, *more], cwd=ROOT, stdout=log, stderr=log,
            env=os.environ | env)
    try:
        found = wait_for(lambda: ports(psutil.Process(lab.pid)), 40)
        assert found, (found, (tmp_path/'log').read_text()[-2000:])
        assert all(host == '127.0.0.1' for host, _ in found), (
            found, (tmp_path/'log').read_text()[-2000:])
        with pytest.raises(HTTPError, match='403'):
            urlopen(f'http://127.0.0.1:{min(found)[1]}/api/contents', timeout=20)
    finally:
        lab.terminate()
        lab.wait(20)
