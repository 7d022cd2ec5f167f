"""Under ZeRO-3 an embedding is called by itself, with a weight that is empty between forward
passes."""
import torch

from llm_workbook.parallel.ranks import run_ranks


def embed(gather):
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    __compatible_ops__['deepspeed_shm_comm'] = False  # Else a compiler builds it at first use
    settings = {'train_micro_batch_size_per_gpu': 1, 'zero_optimization': {'stage': 3}}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = torch.nn.Embedding(16, 8)
    ids = torch.tensor([1, 2])
    if not gather: return torch.nn.functional.embedding(ids, model.weight)
    with deepspeed.zero.GatheredParameters([model.weight]):
        return torch.nn.functional.embedding(ids, model.weight).shape


def broken():
    run_ranks(embed, 2, (False,), env={'DS_ACCELERATOR': 'cpu'})


def mended():
    assert run_ranks(embed, 2, (True,), env={'DS_ACCELERATOR': 'cpu'}) == [(2, 8)] * 2
