"""`half()` on a model whose 4-bit payload is kept as bfloat16: the bits are rounded as if they were
numbers."""
import bitsandbytes as bnb
import torch

from llm_workbook.config.recipe import Recipe
from llm_workbook.training.rank_run import check_payload, payload_digest

RECIPE = Recipe.named('70b-2x24gb-qlora')


def packed():
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(
        64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type='nf4',
        quant_storage=torch.bfloat16)
    layer.load_state_dict(torch.nn.Linear(64, 64, bias=False).state_dict())
    return torch.nn.Sequential(layer.to('cpu'))


def train(cast):
    model = packed()
    before = payload_digest(RECIPE, model)
    weight = model[0].weight
    if cast: weight.data = weight.data.to(torch.float16).to(torch.bfloat16)
    return check_payload(RECIPE, model, before)


def broken():
    train(cast=True)


def mended():
    assert len(train(cast=False)) == 16
