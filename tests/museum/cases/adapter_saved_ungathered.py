"""ZeRO-3 leaves a parameter empty outside of its pass, and an adapter is saved there as it is."""
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from llm_workbook.files import asset


def base(): return AutoModelForCausalLM.from_pretrained(asset('tiny-base'))


def save(gathered):
    model = get_peft_model(base(), LoraConfig(target_modules=['q_proj', 'v_proj']))
    for name, parameter in model.named_parameters():
        if 'lora_' in name and not gathered: parameter.data = torch.empty(0)  # As ZeRO-3 does
    model.save_pretrained('adapter')


def broken():
    save(gathered=False)
    PeftModel.from_pretrained(base(), 'adapter')


def mended():
    save(gathered=True)
    loaded = PeftModel.from_pretrained(base(), 'adapter')
    assert all(p.numel() for name, p in loaded.named_parameters() if 'lora_' in name)
