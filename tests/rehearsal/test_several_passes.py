"""The plan of a step of several passes, and of what variables name, against the rehearsal: small
models in which either the head or the layers are the largest."""
from itertools import product

import pytest
from bench.gpu.place import recipe_folder
from bench.shared.gpu_rows import plain_recipe
from trouble import slow_case

from llm_workbook import memory, rehearse

LLAMA = {'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], 'num_hidden_layers': 4,
         'num_attention_heads': 8, 'num_key_value_heads': 4, 'max_position_embeddings': 4096,
         'dtype': 'bfloat16'}
SHAPES = {
    'head': LLAMA | {'vocab_size': 128_256, 'hidden_size': 512, 'intermediate_size': 1024},
    'layers': LLAMA | {'vocab_size': 1024, 'hidden_size': 1024, 'intermediate_size': 4096}}
FULL = {'method.kind': 'full', 'optimizer.kind': 'sgd', 'batch.accumulation': 2}
LORA = {'method.kind': 'lora', 'batch.micro': 2, 'batch.loss_head': 'one_pass'}
AGAIN = {'sharding.activation_checkpointing': 'full'}


def apart_by(folder, shape: str, tied: bool, changes: dict, ranks: int = 1) -> float:
    "How far the plan is from the rehearsal, in percent."
    source = recipe_folder(str(folder), SHAPES[shape] | {'tie_word_embeddings': tied})
    plain = {'batch.length': 1024, 'cluster.hardware': f'{ranks}x-h100'}
    made = plain_recipe(source, ranks, plain | changes)
    planned_b = memory(made).total('step', 'gpu', 'allocated')
    return 100 * (planned_b / rehearse(made).peak_b - 1)


WAYS = [*product(('head', 'layers'), (True, False), (AGAIN, {}), ('chunked', 'one_pass'))]
QUICK = [way for way in WAYS if way[1:3] == (True, AGAIN)]


@pytest.mark.parametrize('shape, tied, again, head', [
    way if way in QUICK else slow_case(*way) for way in WAYS])
def test_gradients_of_earlier_passes_and_copies_of_weights_are_planned(
        tmp_path, shape, tied, again, head):
    changes = FULL | again | {'batch.loss_head': head}
    assert abs(apart_by(tmp_path, shape, tied, changes)) < 0.5  # 4 MiB at most


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp2'])
@pytest.mark.parametrize('shape', SHAPES)
def test_so_they_are_of_two_ranks(tmp_path, shape, strategy):
    changes = FULL | AGAIN | {'sharding.strategy': strategy}
    assert abs(apart_by(tmp_path, shape, True, changes, ranks=2)) < 0.15


@pytest.mark.parametrize('changes', [
    {}, {'method.dropout': 0.1}, slow_case({'method.kind': 'qlora'}),
    slow_case({'method.kind': 'qlora', 'method.dropout': 0.1})], ids=str)
def test_what_variables_name_is_planned(tmp_path, changes):
    "The fullest instant is the last layer's forward pass: nothing runs again."
    assert abs(apart_by(tmp_path, 'layers', False, LORA | changes)) < 0.15
