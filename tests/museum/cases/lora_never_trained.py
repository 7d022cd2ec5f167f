"""The optimizer was made before the adapters: it steps over frozen weights, and LoRA stays zero."""
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llm_workbook.files import asset


def train(optimizer_first):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-2)
    model = get_peft_model(base, LoraConfig(target_modules=['q_proj', 'v_proj']))
    if not optimizer_first: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(300, (2, 16))
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained('adapter')
    return load_file('adapter/adapter_model.safetensors')


def broken():
    train(optimizer_first=True)
    return 'adapter'


def mended():
    tensors = train(optimizer_first=False)
    assert all(tensors[name].abs().max() > 0 for name in tensors if 'lora_B' in name)
