"""An adapter of the bare decoder is put on the model with its head: no name fits, nothing is
raised."""
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM

from llm_workbook.files import asset


def save_adapter(kind):
    base = kind.from_pretrained(asset('tiny-base'))
    model = get_peft_model(base, LoraConfig(target_modules=['q_proj', 'v_proj']))
    for name, parameter in model.named_parameters():
        if 'lora_B' in name: torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained('adapter')


def difference():
    "How far the logits of one prompt move when the adapter is loaded."
    ids = torch.arange(20)[None]
    base = AutoModelForCausalLM.from_pretrained(asset('tiny-base')).eval()
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, 'adapter').eval()(ids).logits
    return (after - before).abs().max().item()


def broken():
    save_adapter(AutoModel)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert difference() == 0
    return '\n'.join(f'{warning.category.__name__}: {warning.message}' for warning in caught)


def mended():
    save_adapter(AutoModelForCausalLM)
    assert difference() > 0.1
