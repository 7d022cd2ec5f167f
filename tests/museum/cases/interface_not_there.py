"""gloo is told to use a network interface that this node does not have."""
from llm_workbook.parallel.ranks import run_ranks


def add(): return 1


def broken():
    run_ranks(add, 2, env={'GLOO_SOCKET_IFNAME': 'eth99'})


def mended():
    assert run_ranks(add, 2, env={'GLOO_SOCKET_IFNAME': 'lo'}) == [1, 1]
