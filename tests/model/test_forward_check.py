"""What a step takes for granted of a model, and a run of its layers and files, is checked before a
rank starts."""
import json

import pytest

from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Recipe
from llm_workbook.parallel.load import check_base

TEXT = {'hidden_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'head_dim': 16,
        'num_key_value_heads': 4, 'intermediate_size': 96, 'vocab_size': 512,
        'pad_token_id': 0, 'bos_token_id': 1, 'eos_token_id': 2}
TOWER = {'model_type': 'siglip_vision_model', 'hidden_size': 32, 'intermediate_size': 32,
         'num_hidden_layers': 1, 'num_attention_heads': 2, 'image_size': 28, 'patch_size': 14}
PALIGEMMA = {'model_type': 'paligemma', 'vision_config': TOWER, 'image_token_id': 500,
             'text_config': TEXT | {'model_type': 'gemma'}}
MODERNBERT = TEXT | {'model_type': 'modernbert-decoder', 'cls_token_id': 1, 'sep_token_id': 2}
GRIFFIN = TEXT | {'model_type': 'recurrent_gemma', 'num_key_value_heads': 1, 'lru_width': 64,
                  'num_hidden_layers': 3}
RETIRED = {'model_type': 'aya_vision', 'vision_config': TOWER, 'image_token_id': 500,
           'text_config': TEXT | {'model_type': 'cohere2', 'sliding_window': 16}}
ONE = RETIRED | {'text_config': RETIRED['text_config'] | {'logit_scale': 1.0}}
ZAMBA = TEXT | {'model_type': 'zamba2', 'num_hidden_layers': 4, 'mamba_d_state': 16,
                'layers_block_type': ['mamba', 'hybrid', 'mamba', 'hybrid'], 'n_mamba_heads': 8,
                'mamba_headdim': 16, 'mamba_ngroups': 1, 'chunk_size': 16, 'num_mem_blocks': 1,
                'adapter_rank': 8}
ZAMBA.pop('head_dim')
LORA = {'method.kind': 'lora'}
LAGUNA = TEXT | {'model_type': 'laguna', 'num_experts': 4, 'num_experts_per_tok': 2,
                 'moe_intermediate_size': 32}
MLLAMA_TOWER = {'hidden_size': 32, 'intermediate_size': 32, 'num_hidden_layers': 2,
                'num_global_layers': 1, 'attention_heads': 2, 'image_size': 28, 'patch_size': 14,
                'intermediate_layers_indices': [0], 'vision_output_dim': 64,
                'supported_aspect_ratios': [[1, 1]], 'max_num_tiles': 1}
ROPE = {'rope_type': 'default', 'rope_theta': 1e4}
MLLAMA = {'model_type': 'mllama', 'vision_config': MLLAMA_TOWER, 'image_token_index': 500,
          'text_config': TEXT | {'cross_attention_layers': [1], 'rope_parameters': ROPE}}


def recipe(folder, config, attention='sdpa', head='chunked', **changes):
    (folder/'config.json').write_text(json.dumps(config))
    return Recipe.named('reviews-qlora').changed({
        'model.source': str(folder), 'model.head': 'causal_lm', 'model.attention': attention,
        'data.format': 'messages', 'data.source': 'sample-conversations', 'method.kind': 'full',
        'batch.loss_head': head, 'sharding.loading': 'every_rank'} | changes)


@pytest.mark.parametrize('config, changes, words', [
    (PALIGEMMA, {}, "set model.attention to 'eager'"),
    (MODERNBERT, {}, 'it cannot be trained here'),
    (MODERNBERT, {'head': 'one_pass'}, 'it cannot be trained here'),
    (GRIFFIN, {}, "set batch.loss_head to 'one_pass'"),
    (ZAMBA, {'attention': 'eager'}, "set sharding.strategy to 'zero3'"),
    (LAGUNA, LORA, 'peft would look for the adapter in its file under'),
    (MLLAMA, LORA, r'set method.targets to \[self_attn.k_proj'),
    (RETIRED, {}, 'set it to 1.0 in config.json')])
def test_what_would_train_another_model_is_refused(tmp_path, config, changes, words):
    with pytest.raises((RecipeError, ValueError), match=words):
        check_base(recipe(tmp_path, config, **changes))


@pytest.mark.parametrize('config, changes', [
    (PALIGEMMA, {'attention': 'eager'}), (GRIFFIN, {'head': 'one_pass'}), (ONE, {}),
    (LAGUNA, LORA | {'method.targets': ['q_proj', 'o_proj']}),
    (MLLAMA, LORA | {'method.targets': ['self_attn.k_proj', 'self_attn.o_proj']}),
    (ZAMBA, {'attention': 'eager', 'sharding.strategy': 'zero3'})])
def test_the_fix_that_is_named_is_one(tmp_path, config, changes):
    check_base(recipe(tmp_path, config, **changes))
