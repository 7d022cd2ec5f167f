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


def ports_of_rank_and_kernel():
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
    by_rank = launch(ports_of_rank_and_kernel, 2)
    hosts = {host for both in by_rank for addresses in both for host, _ in addresses}
    assert hosts == {'127.0.0.1'}, by_rank
    assert all(rank for rank, _ in by_rank), by_rank
    assert [len(kernel) for _, kernel in by_rank] == [served] * 2, by_rank


def test_21_pages_are_executed_without_a_port():
    assert "'transport': 'ipc'" in (ROOT/'tools/page.py').read_text()


@pytest.mark.slow
def test_21_make_lab_listens_on_this_machine_alone_and_asks_for_a_token(tmp_path):
    "The command of the Makefile, with a port of its own, no browser and empty settings."
    printed = subprocess.run(
        ['make', '--no-print-directory', '--dry-run', 'lab'],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command = re.search(r'/jupyter (lab .*)$', printed, re.M)[1].split()
    options = ['--no-browser', '--ServerApp.port=0', '--ServerApp.port_retries=0', '--allow-root']
    environment = os.environ | {'HOME': str(tmp_path), 'TMPDIR': str(tmp_path)}
    for kind in 'CONFIG', 'DATA', 'RUNTIME': environment[f'JUPYTER_{kind}_DIR'] = str(tmp_path)
    with open(tmp_path/'log', 'w') as log:
        lab = subprocess.Popen(
            [sys.executable, '-m', 'jupyter', *command, *options],
            cwd=ROOT, stdout=log, stderr=log, env=environment)
    try:
        addresses = wait_for(lambda: ports(psutil.Process(lab.pid)), 40)
        end_of_log = (tmp_path/'log').read_text()[-2000:]
        assert addresses, end_of_log
        assert all(host == '127.0.0.1' for host, _ in addresses), (addresses, end_of_log)
        _, port = min(addresses)
        with pytest.raises(HTTPError, match='403'):
            urlopen(f'http://127.0.0.1:{port}/api/contents', timeout=20)
    finally:
        lab.terminate()
        lab.wait(20)
