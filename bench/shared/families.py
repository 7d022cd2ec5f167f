"""Families of models in miniature, and recipes that fine-tune them."""
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from llm_workbook.config.recipe import Recipe
from llm_workbook.files import asset

METHODS = 'full', 'lora', 'qlora'


class Family(NamedTuple):
    "Where the configuration of a family comes from: a preset, or a model type of transformers."
    source: str
    fields: dict = {}  # Published, where the default of the class is nothing that runs


_MOE = {'n_routed_experts': 64, 'num_experts_per_tok': 6, 'first_k_dense_replace': 1}
_NO_DROPOUT = {'attn_pdrop': 0.0, 'embd_pdrop': 0.0, 'resid_pdrop': 0.0}
_MROPE = {'rope_type': 'default', 'rope_theta': 1e6, 'mrope_section': [16, 24, 24]}
_HALF_MROPE = _MROPE | {'mrope_section': [8, 12, 12], 'partial_rotary_factor': 0.5}
_GRANITE = 4 * (['linear_attention'] * 5 + ['full_attention'] + ['linear_attention'] * 4)
FAMILIES = {
    'Llama 2': Family('llama-2-7b'),
    'Llama 3.1': Family('llama-3.1-8b'),
    'Llama 4': Family('llama4_text'),
    'Qwen 2.5': Family('qwen2.5-7b'),
    'Qwen 2 MoE': Family('qwen2_moe'),
    'Qwen 3': Family('qwen3-8b'),
    'Qwen 3 MoE': Family('qwen3-30b-a3b'),
    'Qwen 3 Next': Family('qwen3_next'),
    'Qwen 3.5': Family('qwen3_5_text'),
    'Qwen 3.5 MoE': Family('qwen3_5_moe_text'),
    'Mistral': Family('mistral-7b-v0.3'),
    'Ministral 3': Family('ministral3'),
    'Mixtral': Family('mixtral-8x7b'),
    'Gemma 2': Family('gemma-2-9b'),
    'Gemma 3': Family('gemma-3-1b'),
    'Gemma 3n': Family('gemma3n_text'),
    'Gemma 4': Family('gemma4_text'),
    'Phi 3': Family('phi3'),
    'Phi 3.5 MoE': Family('phimoe', {'router_jitter_noise': 0.0, 'input_jitter_noise': 0.0}),
    'Phi 4': Family('phi-4'),
    'gpt-oss': Family('gpt-oss-20b'),
    'DeepSeek V2': Family('deepseek_v2', _MOE),
    'DeepSeek V3': Family('deepseek-v3'),
    'DeepSeek V3.2': Family('deepseek_v32'),
    'DeepSeek V4': Family('deepseek_v4'),
    'GLM 4': Family('glm4'),
    'GLM 4.5': Family('glm4_moe'),
    'Nemotron': Family('nemotron', {'num_key_value_heads': 8}),
    'Nemotron H': Family('nemotron_h'),
    'SmolLM 3': Family('smollm3'),
    'OLMo 2': Family('olmo2'),
    'OLMo 3': Family('olmo3'),
    'OLMoE': Family('olmoe'),
    'Granite': Family('granite'),
    'Granite 4': Family(
        'granitemoehybrid', {'num_hidden_layers': 40, 'layer_types': _GRANITE}),
    'Falcon': Family('falcon'),
    'Falcon H1': Family('falcon_h1'),
    'Command R7B': Family('cohere2'),
    'EXAONE 4': Family('exaone4'),
    'ERNIE 4.5': Family('ernie4_5'),
    'ERNIE 4.5 MoE': Family('ernie4_5_moe'),
    'MiniMax M2': Family('minimax_m2'),
    'Kimi Linear': Family('kimi_linear'),
    'Jamba': Family('jamba'),
    'StarCoder 2': Family('starcoder2'),
    'GPT-NeoX': Family('gpt_neox'),
    'GPT-2': Family('gpt2', _NO_DROPOUT),
    # With towers for images or sound
    'Gemma 3 (images)': Family('gemma-3-4b'),
    'Gemma 4 (images)': Family('gemma4', {'vision_config': {'hidden_size': 768}}),
    'Llama 4 (images)': Family('llama4'),
    'Mistral Small 3.1': Family('mistral3'),
    'Qwen 2.5 VL': Family('qwen2_5_vl', {'text_config': {'rope_parameters': _MROPE}}),
    'Qwen 3 VL': Family('qwen3_vl'),
    'Qwen 3.5 (images)': Family('qwen3_5'),
    'InternVL 3': Family('internvl'),
    'GLM 4.1V': Family('glm4v', {'text_config': {'rope_parameters': _HALF_MROPE}}),
    'Voxtral': Family('voxtral')}
_TOKENIZER = 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'


class Case(NamedTuple):
    "One family and one method, and where its files go."
    family: str
    method: str
    folder: Path  # Of all cases

    @property
    def base(self) -> Path: return self.folder/'bases'/self.family.replace(' ', '-')

    def place(self, kind: str) -> Path:
        "A directory of this case."
        return self.folder/kind/f'{self.family} {self.method}'.replace(' ', '-')


def family_fields(family: str) -> dict:
    "The published configuration of a family, with the tokens of the tiny base."
    from llm_workbook.model.architecture import configuration, presets
    from transformers import AutoConfig
    tiny = json.loads((asset('tiny-base')/'config.json').read_text())
    tokens = {key: tiny[key] for key in tiny if key == 'vocab_size' or key.endswith('token_id')}
    source, changes = FAMILIES[family]
    if source in presets(): fields = configuration(source)[1] | tokens | changes
    else: fields = AutoConfig.for_model(source, **tokens | changes).to_dict()
    if 'text_config' in fields: fields['text_config'] |= tokens
    return fields


def add_tokenizer(place: Path) -> None:
    "Put the tokenizer of the tiny base beside a configuration."
    for name in _TOKENIZER: shutil.copyfile(asset('tiny-base')/name, place/name)


def make_base(family: str, place: Path) -> str:
    "Write the miniature of a family, with the tokenizer of the tiny base; give its model type."
    from llm_workbook.model.miniature import miniature
    fields = family_fields(family)
    miniature(fields, place)
    add_tokenizer(place)
    return fields['model_type']


def write_rows(folder: Path) -> None:
    "Write the few conversations that all cases train on."
    folder.mkdir()
    lines = (asset('sample-conversations')/'train.jsonl').read_text().splitlines(keepends=True)
    (folder/'train.jsonl').write_text(''.join(lines[:12]))


def recipe(case: Case) -> Recipe:
    "Three steps on two CPU ranks in float32, so that a difference is not one of rounding."
    return Recipe(
        name='family',
        model={'source': str(case.base)},
        data={'source': str(case.folder/'rows'), 'format': 'messages', 'test_share': 0.0},
        method={'kind': case.method, 'storage': 'float32'},
        precision={'compute': 'float32'},
        sharding={'loading': 'sharded', 'activation_checkpointing': 'full'},
        cluster={'processes': 2},
        batch={'micro': 1, 'length': 48},
        optimizer={'steps': 3, 'learning_rate': 1e-2})


ALONE = {  # What makes the same steps in one process, without sharding
    'cluster.processes': 1, 'sharding.strategy': 'none', 'sharding.loading': 'every_rank',
    'sharding.activation_checkpointing': 'none', 'batch.accumulation': 2}


# What is refused, and the fix that the refusal names

_ANOTHER = 'method.kind', 'sharding.loading'  # A fix that makes another case of it


def named_fixes(reason: str) -> dict:
    "Read the settings that a refusal names, as in: set model.attention to 'eager'."
    found = re.findall(r"(\w+\.\w+) to (\[[^\]]*\]|'[^']*'|[\d.]+\d)", reason)
    fixes = {}
    for field, text in found:
        if field in _ANOTHER: continue
        if text[0] == '[': fixes[field] = text[1:-1].split(', ')
        elif text[0] == "'": fixes[field] = text[1:-1]
        else: fixes[field] = float(text)
    return fixes


def accepted(asked: Recipe) -> tuple[Recipe | None, dict, list[str]]:
    "Check a recipe as often as its refusal names a fix: what is accepted, the fixes, the reasons."
    from llm_workbook.training.fine_tune import check_recipe
    changes, reasons = {}, []
    while True:
        try: check_recipe(asked.changed(changes))
        except (ValueError, ImportError) as error: reason = ' '.join(str(error).split())
        else: return asked.changed(changes), changes, reasons
        reasons.append(reason.replace(asked.model.source, 'it'))
        fixes = named_fixes(reason)
        if not fixes or fixes.items() <= changes.items(): return None, changes, reasons
        changes |= fixes
