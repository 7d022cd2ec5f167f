"""Architectures other than a Llama: what ranks would refuse is refused before, and what has
experts, routers or another base than its prefix says trains sharded."""
import json

import pytest
import torch

from trouble import slow_case
from llm_workbook.config.recipe import Method, Precision, Recipe
from llm_workbook.files import asset
from llm_workbook.model.adapters import add_adapters, load_adapters, save_adapters
from llm_workbook.model.miniature import miniature
from llm_workbook.model.quantize import load_base
from llm_workbook.parallel.load import check_base, load_sharded
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.release.merge import merged
from llm_workbook.training.fine_tune import check_recipe, fine_tune
from llm_workbook.model.spec import has_router_loss

ROWS = torch.arange(1, 41).view(2, 20)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
SIZES = {
    'mixtral': dict(num_local_experts=4),
    'qwen3_moe': EXPERTS | dict(num_local_experts=4),
    'deepseek_v3': EXPERTS | dict(n_routed_experts=4, first_k_dense_replace=1),
    'gemma2': {}, 'gpt_oss': dict(num_local_experts=4), 'falcon_h1': {}, 'gpt_neox': {},
    'gpt2': dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    'falcon': {}, 'jamba': {}, 'gemma3n_text': {}, 'gemma4_text': {}, 'qwen3_5_text': {},
    'deepseek_v32': EXPERTS | dict(n_routed_experts=4), 'deepseek_v4': {},
    'llama4_text': dict(num_local_experts=4)}


@pytest.fixture(scope='module')
def bases(tmp_path_factory):
    "A miniature of each family on disk, with the tokenizer of the tiny base."
    from transformers import AutoConfig, logging
    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp('bases')

    def made(kind):
        place = folder/kind
        if place.exists(): return str(place)
        tiny = json.loads((asset('tiny-base')/'config.json').read_text())
        tokens = {key: tiny[key] for key in tiny if key == 'vocab_size' or key.endswith('token_id')}
        miniature(AutoConfig.for_model(kind, **tokens | SIZES[kind]).to_dict(), place)
        for name in 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja':
            (place/name).write_bytes((asset('tiny-base')/name).read_bytes())
        return str(place)
    return made


@pytest.fixture(scope='module')
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp('rows')
    lines = (asset('sample-conversations')/'train.jsonl').read_text().splitlines(keepends=True)
    (folder/'train.jsonl').write_text(''.join(lines[:24]))
    return Recipe(
        name='family', model={'source': 'tiny-base'},
        data={'source': str(folder), 'format': 'messages', 'test_share': 0.0},
        sharding={'loading': 'sharded', 'activation_checkpointing': 'full'},
        batch={'micro': 2, 'length': 64}, optimizer={'steps': 3, 'learning_rate': 1e-2})


# Refused before a rank starts

REFUSED = {
    'gemma2': ({}, "model.attention = 'sdpa': Gemma2ForCausalLM .*set model.attention to 'eager'"),
    'gpt_oss': ({}, "model.attention = 'sdpa': GptOssForCausalLM .*set model.attention to 'eager'"),
    'gpt2': ({}, "c_attn.weight lies transposed on disk.*set sharding.loading to 'every_rank'"),
    'mixtral': ({}, "% of the weights of .*stay in 16 bit, most of them in .*method.unpacked to 0"),
    'qwen3_moe': (
        {'method.dropout': .1}, r'PEFT adapts their parameters .*set method.dropout to 0'),
    'deepseek_v3': (
        {'method.dropout': .1}, r'PEFT adapts their parameters .*set method.dropout to 0'),
    'llama4_text': ({}, r'Llama4Router returns no tensor.*set method.targets to \[down_proj, '),
    'falcon': ({}, "FalconForCausalLM has no linear layer that NF4 can pack: set method.kind to"),
    'jamba': (
        {'method.unpacked': 1.0}, 'dt_proj, whose weight is read past its layer, so an adapter '
        r'would not train: set method.targets to \[down_proj, gate_proj'),
    'gemma3n_text': (
        {'method.targets': ['q_proj']}, 'computes with .*_coefs.weight itself, and a packed '
        "one is no matrix: set method.kind to 'lora'"),
    'deepseek_v32': ({}, r'indexer.*, which only chooses tokens, so an adapter would not train'),
    'deepseek_v4': ({'model.attention': 'eager'}, 'a DeepseekV4GroupedLinear returns no tensor'),
    'falcon_h1': ({}, r"'out_proj' is incompatible with Mamba.*Set method.targets to \[down_proj")}


@pytest.mark.parametrize('kind', REFUSED)
def test_what_a_rank_would_refuse_is_refused_before(kind, bases, recipe):
    changes, words = REFUSED[kind]
    asked = recipe.changed({'model.source': bases(kind)} | changes)
    with pytest.raises(ValueError, match=words): check_recipe(asked)


@pytest.mark.parametrize('kind, changes', [
    ('gemma2', {'model.attention': 'eager'}),
    ('gpt2', {'sharding.loading': 'every_rank'}),
    ('gpt2', {'method.kind': 'full'}),
    ('gpt_neox', {}),
    ('falcon', {'method.kind': 'lora'}),
    ('jamba', {'method.kind': 'lora', 'method.targets': ['q_proj', 'in_proj', 'x_proj']}),
    ('gemma3n_text', {'method.kind': 'lora', 'method.targets': ['q_proj', 'per_layer_projection']}),
    ('deepseek_v32', {'method.kind': 'lora', 'method.targets': ['q_b_proj', 'o_proj']}),
    ('mixtral', {'method.unpacked': 1.0}),
    ('mixtral', {'method.kind': 'lora'}),
    ('mixtral', {'method.kind': 'lora', 'method.dropout': .1, 'method.targets': ['q_proj']}),
    ('mixtral', {'method.kind': 'lora', 'method.targets': ['q_proj', 'w1', 'w2', 'w3']}),
    ('llama4_text', {'method.kind': 'lora', 'method.targets': ['q_proj', 'v_proj']}),
    ('falcon_h1', {'method.targets': ['q_proj', 'in_proj']})])
def test_the_fix_that_is_named_is_accepted(kind, changes, bases, recipe):
    rows, _ = check_recipe(recipe.changed({'model.source': bases(kind)} | changes))
    assert len(rows) > 4


def test_a_name_on_the_hub_is_left_to_the_ranks(recipe):
    "Its configuration is a preset; no file of it is here."
    hub = recipe.changed({'model.source': 'meta-llama/Llama-3.1-8B'})
    assert check_base(hub) is None


# Experts

def stepped(source):
    "One rank: what an adapted model holds and computes, loaded in shares and loaded whole."
    method = Method(rank=4, kind='lora')
    model = load_sharded(source, method, device='cpu', seed=3)
    model(input_ids=ROWS, labels=ROWS).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: p.grad.full_tensor() for name, p in trained.items()}
    return {name: p.full_tensor().detach() for name, p in trained.items()}, gradients


def test_adapters_of_experts_and_routers_are_those_of_a_model_loaded_whole(bases):
    source = bases('mixtral')
    whole = add_adapters(load_base(source, Method(kind='lora'), device='cpu'), Method(rank=4), 3)
    whole(input_ids=ROWS, labels=ROWS).loss.backward()
    expected = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    assert any('experts.base_layer.lora_A' in name for name in expected)
    assert any('.gate.lora_A' in name for name in expected)
    for adapters, gradients in run_ranks(stepped, 2, (source,), timeout_s=120):
        assert adapters.keys() == expected.keys()
        for name, parameter in expected.items():
            assert adapters[name].equal(parameter.detach()), name
            assert torch.allclose(gradients[name], parameter.grad, atol=1e-4), name
        assert any(gradient.abs().max() > 0 for gradient in gradients.values())


def test_adapters_of_experts_are_saved_and_come_back(bases, tmp_path):
    source, method = bases('qwen3_moe'), Method(kind='lora', rank=4)
    model = add_adapters(load_base(source, method, device='cpu'), method)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'lora_B' in name: parameter.normal_(std=.1)
    with torch.no_grad(): logits = model.eval()(ROWS).logits
    norms = save_adapters(model, tmp_path)
    assert sum('.experts' in name for name in norms) == 2 * 2  # Two parameters in each layer
    back = load_adapters(source, tmp_path, method, device='cpu')
    with torch.no_grad(), back.disable_adapter(): plain = back(ROWS).logits
    with torch.no_grad(): assert back(ROWS).logits.equal(logits)
    assert (plain - logits).abs().max() > .05


@pytest.mark.parametrize('kind, into', [('mixtral', '16-bit'), ('qwen3_moe', 'dequantised')])
def test_adapters_of_experts_are_merged_one_expert_at_a_time(kind, into, bases, tmp_path):
    method = Method(kind='lora' if into == '16-bit' else 'qlora', rank=4, unpacked=1.0)
    precision = Precision(compute='float32')
    model = add_adapters(load_base(bases(kind), method, precision, device='cpu'), method)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'lora_B' in name: parameter.normal_(std=.1)
    save_adapters(model, tmp_path)
    with torch.no_grad(): wanted = model.eval()(ROWS).logits
    with torch.no_grad(), model.disable_adapter(): plain = model(ROWS).logits
    given = merged(bases(kind), tmp_path, into, method, precision)
    with torch.no_grad(): logits = given(ROWS).logits
    assert torch.allclose(logits, wanted, atol=1e-3)
    assert (plain - wanted).abs().max() > .05


# Trained on two ranks

ALLOWED = {'method.unpacked': 1.0}
TRAINED = [
    ('mixtral', ALLOWED),
    slow_case('qwen3_moe', ALLOWED),
    slow_case('deepseek_v3', ALLOWED),
    slow_case('mixtral', ALLOWED | {'method.targets': ['q_proj', 'v_proj']}),
    slow_case('gpt_oss', ALLOWED | {'model.attention': 'eager'}),
    slow_case('gpt_neox', {}),
    slow_case('qwen3_5_text', {}),
    slow_case('gemma4_text', {}),
    slow_case('gpt2', {'method.kind': 'lora'}),
    slow_case('falcon_h1', {'method.targets': ['q_proj', 'v_proj']}),
    slow_case('llama4_text', ALLOWED | {'method.targets': ['q_proj', 'v_proj']}),
    slow_case('llama4_text', {'method.kind': 'full', 'precision.compute': 'float32'})]


@pytest.mark.parametrize('kind, changes', TRAINED)
@pytest.mark.slow
def test_a_family_trains_on_two_ranks_as_in_one_process(kind, changes, bases, recipe, tmp_path):
    asked = recipe.changed({'model.source': bases(kind)} | changes)
    alone = {'cluster.processes': 1, 'sharding.strategy': 'none', 'sharding.loading': 'every_rank',
             'sharding.activation_checkpointing': 'none', 'batch.accumulation': 2}
    two = fine_tune(asked, tmp_path/'two', 200, live=False)
    one = fine_tune(asked.changed(alone), tmp_path/'one', 200, live=False)
    losses = [[step['loss'] for step in run.metrics] for run in (two, one)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)  # Another seed: 1e-2 and more
    assert two.ranks[0]['shards'].here_b < .6 * two.ranks[0]['shards'].total_b


@pytest.mark.parametrize('kind, special, has_loss', [
    ('doge', {}, False), ('doge', {'is_moe': True, 'num_experts': 16}, True),
    ('qwen3_moe', {'num_experts': 4}, True), ('llama', {}, False),
    ('jetmoe', {'num_local_experts': 4}, False)])
def test_a_loss_of_routers_is_asked_for_where_there_are_routers(kind, special, has_loss):
    "TRL reads the coefficient of the configuration; it has to be 0 where nothing routes."
    from transformers import AutoConfig, AutoModelForCausalLM
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=160)
    config = AutoConfig.for_model(kind, **sizes | special, num_key_value_heads=2, pad_token_id=0)
    with torch.device('meta'): model = AutoModelForCausalLM.from_config(config)
    assert has_router_loss(model) == has_loss
