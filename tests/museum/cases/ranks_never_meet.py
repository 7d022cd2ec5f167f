"""Both nodes start as rank 0 of two, so each waits for a second one that never comes."""
from datetime import timedelta

from llm_workbook.parallel.ranks import free_port, run_ranks


def meet(port, ranks):
    import torch.distributed as dist
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        'gloo', init_method=f'tcp://127.0.0.1:{port + rank * (ranks < 2)}', world_size=2,
        rank=min(rank, ranks - 1), timeout=timedelta(seconds=2 if ranks < 2 else 20))
    return dist.get_world_size()


def broken():
    run_ranks(meet, 2, (free_port(), 1))


def mended():
    assert run_ranks(meet, 2, (free_port(), 2)) == [2, 2]
