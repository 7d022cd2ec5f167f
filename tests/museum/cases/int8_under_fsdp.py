"""FSDP2 puts plain parameters in the place of LLM.int8's, and the forward pass misses CB."""
import torch

from llm_workbook.parallel.ranks import run_ranks


def forward(sharded):
    import bitsandbytes as bnb
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    layer.load_state_dict(torch.nn.Linear(64, 64, bias=False).state_dict())
    model = torch.nn.Sequential(layer.to('cpu'))
    for parameter in model.parameters(): parameter.requires_grad = False
    if sharded: fully_shard(model)
    return model(torch.ones(1, 64)).shape


def broken():
    run_ranks(forward, 2, (True,))


def mended():
    assert run_ranks(forward, 2, (False,)) == [(1, 64)] * 2
