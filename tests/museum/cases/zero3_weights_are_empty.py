"""Under `zero.Init` each rank holds a part, and every weight looks empty to `load_state_dict`."""
import torch

from llm_workbook.parallel.ranks import run_ranks


def load(gather):
    torch.manual_seed(0)
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    __compatible_ops__['deepspeed_shm_comm'] = False  # Else a compiler builds it at first use
    state = torch.nn.Linear(8, 8).state_dict()
    settings = {'train_micro_batch_size_per_gpu': 1, 'zero_optimization': {'stage': 3}}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = torch.nn.Linear(8, 8)
    gathered = list(model.parameters()) if gather else []
    with deepspeed.zero.GatheredParameters(gathered, modifier_rank=0):
        model.load_state_dict(state)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return torch.allclose(model.weight.float(), state['weight'], atol=0.01)


def broken():
    run_ranks(load, 2, (False,), env={'DS_ACCELERATOR': 'cpu'})


def mended():
    assert run_ranks(load, 2, (True,), env={'DS_ACCELERATOR': 'cpu'}) == [True, True]
