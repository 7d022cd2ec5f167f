"""Reentrant checkpointing around frozen layers: no input requires a gradient, so nothing gets
one."""
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper)
from transformers import AutoModelForCausalLM

from llm_workbook.files import asset

# Model.gradient_checkpointing_enable was tried as well: transformers 5 lets the embedding's output
# require a gradient itself, so only wrappers from elsewhere still have this
TRIED = "gradient_checkpointing_enable({'use_reentrant': True}), before and after get_peft_model"


def is_layer(kind, module): return isinstance(module, kind)


def train(kind):
    base = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    model = get_peft_model(base, LoraConfig(target_modules=['q_proj', 'v_proj']))
    layer = type(model.base_model.model.model.layers[0])
    apply_activation_checkpointing(model, partial(checkpoint_wrapper, checkpoint_impl=kind),
                                   check_fn=partial(is_layer, layer))
    ids = torch.arange(16)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [value.grad for name, value in model.named_parameters() if 'lora_B' in name]


def broken():
    train(CheckpointImpl.REENTRANT)


def mended():
    gradients = train(CheckpointImpl.NO_REENTRANT)
    assert len(gradients) == 8 and all(gradient.abs().max() > 0 for gradient in gradients)
