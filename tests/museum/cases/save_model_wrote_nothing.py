"""Under FSDP2 with SHARDED_STATE_DICT the Trainer's `save_model` writes no weights and says
nothing."""
from pathlib import Path

import torch
from safetensors.torch import load_file

from llm_workbook.files import asset
from llm_workbook.parallel.backends import cpu_fsdp
from llm_workbook.parallel.ranks import run_ranks

SLOW = True  # Several ranks or models, in seconds of processor

ENV = {'ACCELERATE_USE_CPU': 'true', 'ACCELERATE_USE_FSDP': 'true', 'FSDP_VERSION': '2',
       'FSDP_AUTO_WRAP_POLICY': 'TRANSFORMER_BASED_WRAP',
       'FSDP_TRANSFORMER_CLS_TO_WRAP': 'LlamaDecoderLayer'}


FILE = """distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


def train_and_save():
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'), dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(target_modules=['q_proj', 'v_proj']))
    arguments = TrainingArguments('run', max_steps=1, report_to='none', use_cpu=True,
                                  disable_tqdm=True, save_strategy='no')
    row = {'input_ids': [5, 6, 7], 'labels': [5, 6, 7]}
    trainer = Trainer(model, arguments, train_dataset=[row] * 4)
    trainer.train()
    trainer.save_model('adapter')


def ranks(kind):
    with_kind = ENV | {'FSDP_STATE_DICT_TYPE': kind}
    run_ranks(in_fsdp, timeout_s=100, env=with_kind)


def in_fsdp():
    with cpu_fsdp(): train_and_save()


def broken():
    ranks('SHARDED_STATE_DICT')
    assert not Path('adapter').exists()
    Path('accelerate.yaml').write_text(FILE)
    Path('train.py').write_text("trainer.train()\ntrainer.save_model('adapter')\n")
    return '.'


def mended():
    ranks('FULL_STATE_DICT')
    assert len(load_file('adapter/adapter_model.safetensors')) == 16
