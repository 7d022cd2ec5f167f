"""peft merges into a 4-bit base: it packs base and adapter anew, with another rounding."""
import copy
import warnings

import torch

from llm_workbook.model.adapters import add_adapters, save_adapters
from llm_workbook.model.quantize import load_nf4
from llm_workbook.release.merge import merged

SLOW = True  # Several ranks or models, in seconds of processor

IDS = torch.randint(5, 1260, (8, 32), generator=torch.Generator().manual_seed(0))


def adapted():
    "The tiny base in NF4, with adapters as if they had been trained."
    torch.manual_seed(0)
    model = add_adapters(load_nf4('tiny-base', device='cpu'))
    for name, parameter in model.named_parameters():
        if 'lora_B' in name: torch.nn.init.normal_(parameter, std=0.01)
    return model.eval()


@torch.no_grad()
def choices(model): return model.eval()(input_ids=IDS).logits.argmax(-1)


def broken():
    model = adapted()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        packed = copy.deepcopy(model).merge_and_unload()
    with model.disable_adapter(): bare = choices(model)
    changed_by_adapter = (bare != choices(model)).float().mean()
    assert (choices(packed) != choices(model)).float().mean() > changed_by_adapter
    text = '\n'.join(f'{warning.category.__name__}: {warning.message}' for warning in caught)
    return {'text': text, 'model': model, 'batch': {'input_ids': IDS}}


def mended():
    model = adapted()
    save_adapters(model, 'adapter')
    whole = merged('tiny-base', 'adapter')  # Into the base as NF4 gives it back, in 16 bit
    assert (choices(whole) == choices(model)).float().mean() > 0.97
