"""Packed rows that are no whole blocks: read as they were packed, by one process and by ranks."""
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from transformers import LlamaConfig, LlamaForCausalLM

from llm_workbook import load_base, load_sharded, run_ranks
from llm_workbook.config.recipe import Method, Precision
from llm_workbook.model import nf4
from llm_workbook.model.whole_blocks import read_whole_blocks


@pytest.fixture(scope='module')
def narrow(tmp_path_factory):
    "A base whose rows have 96 and 160 numbers."
    folder = tmp_path_factory.mktemp('narrow')
    config = LlamaConfig(vocab_size=512, hidden_size=96, intermediate_size=160, head_dim=24,
                         num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def read_by_hand(layer):
    "The numbers of a packed layer, looked up by this library's own arithmetic."
    state = layer.quant_state
    flat = nf4.unpack(layer.weight, nf4.scales(state), torch.float32, state.blocksize)
    return flat.reshape(state.shape)


def test_a_layer_computes_with_the_numbers_that_were_packed(narrow):
    model = load_base(narrow, Method(), Precision(compute='float32'), 'cpu')
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(5, 160, generator=torch.Generator().manual_seed(0), requires_grad=True)
    layer(x).square().sum().backward()
    weight = read_by_hand(layer)
    torch.testing.assert_close(layer(x), x @ weight.T)
    torch.testing.assert_close(x.grad, 2 * (x @ weight.T) @ weight)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('shape', [(4, 64), (3, 96), (7, 2), (5, 34), (3, 7), (2, 3, 48), (130,)])
def test_every_shape_and_type_is_read_as_it_was_packed(shape, dtype):
    replaced = read_whole_blocks()
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, state = quantize_4bit(weight, blocksize=64, quant_type='nf4')
    by_hand = nf4.unpack(packed, state.absmax, torch.float32)[:weight.numel()].reshape(shape)
    with torch.compiler.set_stance('force_eager'):  # bitsandbytes would build a program for these
        read = dequantize_4bit(packed, state)
    if replaced or len(shape) > 1: assert read.shape == shape
    else: assert read.shape == (1, *shape)  # So bitsandbytes' own kernel gives a vector
    torch.testing.assert_close(read.reshape(shape), by_hand.to(dtype), rtol=0, atol=0)


def logits_of_ranks(folder):
    "Logits of a base that FSDP2 has cut; its packed rows begin in the middle of blocks."
    model = load_sharded(str(folder), Method(), Precision(compute='float32'), device='cpu')
    return model(input_ids=torch.arange(8)[None]).logits.detach()


def test_ranks_read_them_as_one_process_does(narrow):
    model = load_base(narrow, Method(), Precision(compute='float32'), 'cpu')
    alone = model(input_ids=torch.arange(8)[None]).logits.detach()
    for logits in run_ranks(logits_of_ranks, 2, (narrow,), 120):
        torch.testing.assert_close(logits, alone)
