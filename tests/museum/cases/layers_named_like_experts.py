"""`all-linear` on a model whose dense layer and shared expert have names of its experts: PEFT
adapts the experts alone."""
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from llm_workbook.config.recipe import Method
from llm_workbook.model.adapters import add_adapters

SIZES = {'hidden_size': 64, 'intermediate_size': 96, 'num_hidden_layers': 2, 'vocab_size': 64,
         'num_attention_heads': 4, 'num_key_value_heads': 2, 'moe_intermediate_size': 32,
         'n_routed_experts': 4, 'num_experts_per_tok': 2, 'first_k_dense_replace': 1}


def base():
    return AutoModelForCausalLM.from_config(AutoConfig.for_model('glm4_moe', **SIZES))


def bare(model):
    "Linear layers, other than the output, that have no adapter."
    inner = model.get_base_model()
    return [path for path, module in inner.named_modules()
            if type(module).__name__ == 'Linear' and hasattr(module, 'in_features')
            and not hasattr(module, 'lora_A') and path.endswith('_proj')]


def broken():
    model = get_peft_model(base(), LoraConfig(target_modules='all-linear'))
    assert len(bare(model)) == 6
    return model


def mended():
    assert bare(add_adapters(base(), Method(kind='lora', targets='all-linear'))) == []
