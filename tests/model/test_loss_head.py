"""The loss head that scores tokens once: the same losses and gradients as whole logits in float32,
for families, methods and ranks, and as TRL's tiles."""
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from llm_workbook import run_ranks
from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Method, Model, Precision
from llm_workbook.model import loss_head
from llm_workbook.model.adapters import add_adapters
from llm_workbook.model.forward_check import check_forward
from llm_workbook.model.loss_head import (
    add_one_pass_head, check_logits, loss_head_of, tile_rows, token_scores)
from llm_workbook.model.quantize import load_base

SIZES = {'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, 'vocab_size': 321,
         'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 8, 'pad_token_id': 0,
         'bos_token_id': 1, 'eos_token_id': 2}
FAMILIES = {  # Name -> class of the configuration, and what is special about it
    'llama': ('llama', {}),
    'llama, tied': ('llama', {'tie_word_embeddings': True}),
    'gemma2': ('gemma2', {'final_logit_softcapping': 0.5, 'query_pre_attn_scalar': 8}),
    'cohere': ('cohere', {'logit_scale': 0.25}),
    'granite': ('granite', {'logits_scaling': 4.0}),
    'mixtral': ('mixtral', {'num_local_experts': 4, 'output_router_logits': True,
                            'router_aux_loss_coef': 0.5}),
    'phi, bias': ('phi', {}),
}
XLSTM = {'hidden_size': 64, 'embedding_dim': 64, 'num_blocks': 2, 'num_heads': 2}
IDS = torch.randint(3, 321, (2, 40), generator=torch.Generator().manual_seed(0))
LABELS = torch.where(torch.arange(40) % 3 > 0, IDS, -100)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    "Several tiles, and several blocks in each, for the few tokens of a test."
    monkeypatch.setitem(loss_head._TILE_B, 'cpu', 4 * 321 * 20)
    monkeypatch.setitem(loss_head._BLOCK_B, 'cpu', 4 * 321 * 7)


@pytest.fixture(params=[False, True], ids=['by tokens', 'by words'])
def walk(request, monkeypatch):
    "Make the gradients of a head that trains as a CPU does, and as a GPU does."
    monkeypatch.setitem(loss_head._BY_WORDS, 'cpu', request.param)


def built(name: str):
    "A random model of a family in float32; with large embeddings, so that softcaps bend."
    kind, special = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | special)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32,
                                             attn_implementation='eager')
    with torch.no_grad():
        for parameter in model.get_output_embeddings().parameters(): parameter.normal_(0, 0.5)
    return model.train()


def gradients(model) -> dict:
    "Take the gradients away from a model."
    made = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return made


def assert_alike(made: dict, expected: dict, error: float = 1e-4):
    "Each gradient is there, and no farther from the expected one than `error` of its size."
    assert made.keys() == expected.keys()
    for name, gradient in expected.items():
        off = float((made[name] - gradient).norm() / (gradient.norm() + 1e-12))
        assert off < error, f'{name} is off by {off:.2g}'


@pytest.mark.parametrize('name', FAMILIES)
def test_a_family_has_its_own_loss_and_gradients(walk, name):
    model = built(name)
    whole = model(input_ids=IDS, labels=LABELS, use_cache=False)
    whole.loss.backward()
    expected = gradients(model)
    add_one_pass_head(model)
    ours = model(input_ids=IDS, labels=LABELS, fused_lm_head=True)
    ours.loss.backward()
    assert ours.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
    assert_alike(gradients(model), expected)
    logs = whole.logits.detach()[:, :-1].float().log_softmax(-1)
    mask = LABELS[:, 1:] != -100
    entropy = -(logs.exp() * logs).sum(-1) * mask
    assert torch.equal(ours.label_mask, mask)
    assert torch.allclose(ours.entropy, entropy, atol=1e-4)
    assert torch.equal(ours.is_top1, (logs.argmax(-1) == IDS[:, 1:]) & mask)


def test_a_softcap_that_is_forgotten_is_seen():
    "The family test above would find it: the loss is another one."
    model = built('gemma2')
    capped = model(input_ids=IDS, labels=LABELS).loss
    with patch.object(loss_head, '_CAPS', ()): add_one_pass_head(model)
    assert abs(model(input_ids=IDS, labels=LABELS, fused_lm_head=True).loss - capped) > 0.1


def mpt(**special):
    "MPT, whose class reads no `logit_scale`."
    sizes = {'n_heads': 4, 'd_model': 32, 'n_layers': 2, 'vocab_size': 321}
    torch.manual_seed(0)
    config = AutoConfig.for_model('mpt', **sizes | special)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_a_field_that_the_forward_pass_does_not_read_is_refused():
    "Taken at its word, it would change the loss: of our head, and of TRL's."
    scaled, plain = mpt(logit_scale=4.0), mpt()
    for model in scaled, plain: torch.nn.init.normal_(model.get_output_embeddings().weight, 0, 0.5)
    own = scaled(input_ids=IDS, labels=LABELS).loss
    add_fused_lm_head(scaled)
    assert scaled(input_ids=IDS, labels=LABELS, fused_lm_head=True).loss > own + 0.5
    with pytest.raises(ValueError, match='MptForCausalLM does not read logit_scale = 4.0'):
        add_one_pass_head(scaled)
    own = plain(input_ids=IDS, labels=LABELS).loss
    add_one_pass_head(plain)
    made = plain(input_ids=IDS, labels=LABELS, fused_lm_head=True).loss
    assert made.item() == pytest.approx(own.item(), rel=1e-5)


@pytest.mark.parametrize('head', ['chunked', 'one_pass'])
def test_it_is_refused_before_a_base_is_loaded(tmp_path, head):
    from llm_workbook.config.recipe import Recipe
    from llm_workbook.parallel.load import check_base
    mpt(logit_scale=4.0).config.save_pretrained(tmp_path)
    recipe = Recipe(
        name='mpt', model={'source': str(tmp_path), 'attention': 'eager'},
        data={'source': 'sample-conversations'}, method={'kind': 'full'},
        batch={'loss_head': head})
    with pytest.raises(ValueError, match='does not read logit_scale = 4.0.*config.json'):
        check_base(recipe)


def test_every_class_that_changes_its_logits_says_so():
    "The names of fields are those of transformers 5.23; these classes read all that they have."
    for name in 'gemma2', 'cohere', 'granite': assert check_logits(built(name)) != (1.0, 0.0)


def trained(head, kind: str, compute: str):
    "Losses and gradients of the tiny base with `head`, in two micro-batches of one step."
    precision = Precision(compute=compute)
    method = Method(kind=kind, storage=compute if kind == 'qlora' else 'bfloat16')
    model = load_base('tiny-base', method, precision, device='cpu')
    head(model, outputs=('log_probs', 'entropy', 'is_top1'))
    if kind != 'full':
        model = add_adapters(model, method, seed=0)
        generator = torch.Generator().manual_seed(3)
        for name, p in model.named_parameters():
            if '.lora_B.' in name: p.data.normal_(0, .02, generator=generator)
    count = int((LABELS[:, 1:] != -100).sum())
    losses = []
    for ids, labels in zip(IDS.split(1), LABELS.split(1)):
        found = model.train()(input_ids=ids, labels=labels, fused_lm_head=True,
                              num_items_in_batch=count, use_cache=False)
        found.loss.backward()
        losses.append(found.loss.item())
    return losses, gradients(model)


@pytest.mark.parametrize('kind, compute, error', [
    ('full', 'float32', 1e-4), ('lora', 'float32', 1e-4), ('qlora', 'bfloat16', 3e-2),
    ('full', 'bfloat16', 3e-2)])
def test_a_step_of_two_passes_is_that_of_tiles(walk, kind, compute, error):
    (theirs, expected), (ours, made) = (
        trained(head, kind, compute) for head in (add_fused_lm_head, add_one_pass_head))
    assert ours == pytest.approx(theirs, rel=error)
    assert_alike(made, expected, error)


def test_a_frozen_head_gets_no_gradient_and_none_is_made():
    class NoSums(loss_head._Gradients):
        def __init__(self, *args):
            super().__init__(*args)
            assert self.weight is None and self.bias is None
    with patch.object(loss_head, '_Gradients', NoSums):
        _, made = trained(add_one_pass_head, 'lora', 'float32')
    assert made and all('lora_' in name for name in made)


def test_autocast_gives_float32_weights_a_float32_gradient(walk):
    weight = torch.randn(321, 32).requires_grad_()
    hidden, targets = torch.randn(60, 32), torch.arange(60)
    with torch.autocast('cpu', torch.bfloat16): token_scores(
        hidden, weight, targets).log_probs.sum().backward()
    rounded = weight.grad.bfloat16().float()
    assert weight.grad.dtype == torch.float32 and not torch.equal(weight.grad, rounded)
    made, weight.grad = weight.grad, None
    token_scores(hidden, weight, targets).log_probs.sum().backward()
    assert_alike({'weight': made}, {'weight': weight.grad}, 2e-2)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_a_cpu_without_16_bit_products_multiplies_in_float32(monkeypatch, dtype):
    hidden, weight = (torch.randn(n, 32).to(dtype).requires_grad_() for n in (60, 321))
    scores = token_scores(hidden, weight, torch.arange(60))
    scores.log_probs.sum().backward()
    made = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    monkeypatch.setattr(loss_head, 'slow_half_dtypes', lambda: ('bfloat16', 'float16'))
    monkeypatch.setattr(loss_head, 'PART_NUMBERS', 321 * 5)
    slow = token_scores(hidden, weight, torch.arange(60))
    slow.log_probs.sum().backward()
    assert torch.allclose(scores.log_probs, slow.log_probs, atol=2e-2)
    for one, other in zip(made, (hidden.grad, weight.grad)):
        assert_alike({'': other.float()}, {'': one.float()}, 2e-2)


def test_a_rehearsal_does_not_depend_on_the_processor(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode
    monkeypatch.setattr(loss_head, 'slow_half_dtypes', lambda: ('bfloat16', 'float16'))
    with FakeTensorMode(): fake, half = torch.ones(2).bfloat16(), torch.ones(2).half()
    assert loss_head._is_wide(torch.ones(2).bfloat16())
    assert not loss_head._is_wide(fake)
    assert loss_head._is_wide(half)  # As on every CPU


def test_the_same_numbers_come_twice(walk):
    hidden, weight = (torch.randn(n, 32).bfloat16().requires_grad_() for n in (60, 321))
    seen = []
    for _ in range(2):
        hidden.grad = weight.grad = None
        token_scores(hidden, weight, torch.arange(60)).log_probs.sum().backward()
        seen.append((hidden.grad, weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*seen))


def test_a_tile_takes_as_many_bytes_whatever_the_vocabulary(monkeypatch):
    monkeypatch.setitem(loss_head._TILE_B, 'cpu', 2**27)
    for words in 8_000, 32_000, 128_256, 1_000_000:
        assert 2**26 < 2 * words * tile_rows(words, 2) <= 2**27


# Two ranks

def sharded_step(name: str, apart: bool, frozen: bool):
    """A step of a model that two ranks have divided; the head a unit of its own, or one with the
    rest."""
    from torch.distributed.fsdp import fully_shard
    model = built(name)
    if frozen: model.get_output_embeddings().requires_grad_(False)
    for layer in model.model.layers: fully_shard(layer)
    if apart: fully_shard(model.get_output_embeddings())
    add_one_pass_head(model)
    fully_shard(model)
    rank = dist.get_rank()
    found = model(input_ids=IDS[rank:rank + 1], labels=LABELS[rank:rank + 1], fused_lm_head=True)
    found.loss.backward()
    head = model.get_output_embeddings().weight
    parts = 0 if frozen else tuple(head.grad.to_local().shape)
    made = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad}
    return parts, made


@pytest.mark.parametrize('name, apart, frozen', [
    ('llama', True, False), ('llama', True, True), ('llama', False, False),
    ('llama, tied', False, False), ('gemma2', False, False)])
def test_two_ranks_train_what_one_does(name, apart, frozen):
    model = built(name)
    if frozen: model.get_output_embeddings().requires_grad_(False)
    loss = sum(model(input_ids=ids, labels=labels).loss
               for ids, labels in zip(IDS.split(1), LABELS.split(1))) / 2
    loss.backward()
    ranks = run_ranks(sharded_step, 2, (name, apart, frozen), timeout_s=120)
    expected = gradients(model)
    for parts, made in ranks: assert_alike(made, expected)
    if not frozen: assert [parts for parts, _ in ranks] == [(161, 32), (160, 32)]


def test_what_is_in_force_is_read_through_wrappers():
    from accelerate.utils import convert_outputs_to_fp32
    model = built('llama')
    assert loss_head_of(model) == 'full'
    add_fused_lm_head(model)
    assert loss_head_of(model) == 'chunked'
    add_one_pass_head(model)
    model.forward = convert_outputs_to_fp32(torch.autocast('cpu', torch.bfloat16)(model.forward))
    assert loss_head_of(model) == 'one_pass'


@pytest.mark.parametrize('kind, special', [
    ('cohere', {'logit_scale': 0.25}), ('gemma2', {}), ('xlstm', XLSTM)])
def test_a_cap_that_trl_does_not_read_is_refused(tmp_path, kind, special):
    "What is accepted is scored by TRL's own head as by the model; what is refused is not."
    config = AutoConfig.for_model(kind, **SIZES | special)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    batch = {'input_ids': IDS, 'use_cache': False}
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20 / model(**batch).logits.abs().max())
        expected = model(**batch).logits[:, :-1].log_softmax(-1)
        expected = expected.gather(-1, IDS[:, 1:, None])[..., 0]
        add_fused_lm_head(model)
        found = model(**batch, labels=IDS, fused_lm_head=True).log_probs
    config.save_pretrained(tmp_path)
    off = float((found - expected).abs().max())
    try: check_forward(Model(source=str(tmp_path), attention='eager'))
    except RecipeError as error: assert 'one_pass' in str(error) and off > .1
    else: assert off < 1e-4
    assert (off > .1) == (kind == 'xlstm')
