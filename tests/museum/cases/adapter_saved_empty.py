"""Names are cleaned of activation checkpointing first; peft then finds no adapter under them."""
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing, checkpoint_wrapper)
from transformers import AutoModelForCausalLM

from llm_workbook.files import asset
from llm_workbook.model.adapters import save_adapters

WRAPPER = '_checkpoint_wrapped_module.'


def wrapped():
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'), dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(target_modules=['q_proj', 'v_proj']))
    for name, parameter in model.named_parameters():
        if 'lora_B' in name: torch.nn.init.ones_(parameter)
    layer = type(model.base_model.model.model.layers[0])
    apply_activation_checkpointing(model, partial(checkpoint_wrapper),
                                   check_fn=partial(is_layer, layer))
    return model


def is_layer(kind, module): return isinstance(module, kind)


def broken():
    model = wrapped()
    state = {name.replace(WRAPPER, ''): tensor for name, tensor in model.state_dict().items()}
    model.save_pretrained('adapter', state_dict=state)
    return 'adapter'


def mended():
    save_adapters(wrapped(), 'adapter')
    assert len(load_file('adapter/adapter_model.safetensors')) == 16
