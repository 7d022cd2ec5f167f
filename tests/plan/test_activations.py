"""The inventory of a step against autograd's own hooks, to the byte, and against the allocator of a
real process."""
import time

import pytest
import torch
import transformers
from bench.lines import step_peak_error
from bench.shared.models import pack
from llm_workbook import (
    Recipe, Setting, coverage, has_adapter, head_tape, instant_lines, layer_tape, saved, spec,
    working_lines)
from llm_workbook.model.adapters import add_adapters
from llm_workbook.model.segments import register_segments
from llm_workbook.plan.activations import step_sizes

WIDTHS = dict(
    hidden_size=96, intermediate_size=272, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, vocab_size=200)
KINDS = {
    'llama': {},
    'qwen2': {},
    'mistral': {},
    'qwen3': {'head_dim': 32},
    'gemma3_text': {'head_dim': 32, 'sliding_window': 16},
    'phi3': {'pad_token_id': 0, 'eos_token_id': 0, 'bos_token_id': 0},
    'mixtral': {'num_local_experts': 4, 'num_experts_per_tok': 2}}
PLAIN = {'batch.micro': 2, 'batch.length': 48}
BF16 = {'precision.compute': 'bfloat16'}
PURE = {'precision.compute': 'bfloat16', 'precision.master': 'bfloat16'}
FULL, EAGER = {'sharding.activation_checkpointing': 'full'}, {'model.attention': 'eager'}
LORA, QLORA = {'method.kind': 'lora'}, {'method.kind': 'qlora'}
DORA = {'method.dora': True}


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def config(kind: str) -> dict: return {'model_type': kind, **WIDTHS, **KINDS[kind]}


def recipe(changes: dict): return step_peak_error.recipe(PLAIN | changes)


def model(kind: str, made):
    words = config(kind)
    full = made.method.kind == 'full'
    dtype = getattr(torch, made.precision.master if full else made.precision.compute)
    plain = transformers.AutoConfig.for_model(words.pop('model_type'), **words)
    base = transformers.AutoModelForCausalLM.from_config(
        plain, dtype=dtype, attn_implementation=made.model.attention)
    if made.method.kind == 'qlora': pack(base, made)
    if made.sharding.activation_checkpointing == 'full':
        base.gradient_checkpointing_enable({'use_reentrant': False})
    if not full: base = add_adapters(base, made.method, dtype=made.precision.master)
    if not full and made.sharding.activation_checkpointing == 'full':
        base.enable_input_require_grads()
    return base.train()


def hooked(base, made, **borders) -> int:
    """Bytes that autograd saves in one forward pass, parameters and buffers apart, each storage
    once."""
    own = {t.untyped_storage().data_ptr() for t in [*base.parameters(), *base.buffers()]}
    found = {}
    def keep(t):
        found.setdefault(t.untyped_storage().data_ptr(), t)
        return t
    ids = torch.randint(0, WIDTHS['vocab_size'], (made.batch.micro, made.batch.length))
    mixed = made.precision.frozen or (
        made.method.kind == 'full'
        and made.precision.compute == 'bfloat16'
        and made.precision.master == 'float32')
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        torch.autocast('cpu', torch.bfloat16, enabled=bool(mixed))
    ):
        base(
            input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(ids.numel()),
            use_cache=False, **borders)
    return sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in own)


@pytest.mark.parametrize(
    'kind, changes',
    [
        *[
            ('llama', c)
            for c in (
                {}, PURE, BF16, EAGER, PURE | EAGER, FULL, PURE | FULL, BF16 | FULL, LORA,
                LORA | BF16, LORA | PURE, LORA | BF16 | FULL, LORA | BF16 | EAGER,
                LORA | {'method.dropout': 0.1}, LORA | BF16 | {'method.dropout': 0.1},
                LORA | BF16 | {'method.targets': ('q_proj', 'v_proj')}, QLORA | BF16,
                QLORA | BF16 | FULL, QLORA | PURE, LORA | DORA, LORA | BF16 | DORA,
                LORA | PURE | DORA, LORA | BF16 | FULL | DORA, QLORA | BF16 | DORA)],
        *[(k, c) for k in ('qwen2', 'mistral', 'qwen3', 'phi3')
          for c in ({}, PURE, LORA | BF16, LORA | BF16 | DORA)],
        *[(k, c) for k in ('gemma3_text', 'mixtral') for c in ({}, PURE)]],
    ids=str)
def test_the_inventory_is_what_autograd_keeps(kind, changes):
    made = recipe(changes)
    assert sum(item.size_b for item in saved(spec(config(kind)), made)) == hooked(
        model(kind, made), made)


@pytest.mark.parametrize('borders', [{}, {'cu_seq_lens_q': [0, 20, 21, 48]}], ids=['one', 'three'])
@pytest.mark.parametrize('kind, changes', [
    *[('llama', c) for c in ({}, PURE, BF16, LORA | BF16, QLORA | BF16, PURE | FULL)],
    *[(k, c) for k in ('qwen3', 'gemma3_text') for c in ({}, PURE)]], ids=str)
def test_segments_keep_the_same_wherever_borders_are(kind, changes, borders):
    register_segments()
    made = recipe(changes | {'model.attention': 'segments', 'batch.micro': 1})
    planned = sum(item.size_b for item in saved(spec(config(kind)), made))
    one_label_b = 8  # The shifted labels of one row are a view of one more
    assert planned + one_label_b == hooked(model(kind, made), made, **borders)


def cast(base, frozen: str) -> None:
    "Put frozen weights into float32: all that are not packed, or the norms."
    for name, weight in base.named_parameters():
        if 'lora_' in name or not weight.is_floating_point() or not weight.ndim: continue
        is_norm = 'norm' in name
        packed = type(weight).__name__ == 'Params4bit'
        if is_norm or frozen == 'float32' and not packed: weight.data = weight.data.float()


@pytest.mark.parametrize('changes', [
    LORA | BF16 | {'precision.frozen': 'float32'},
    LORA | BF16 | {'precision.frozen': 'float32', 'method.dropout': 0.1},
    QLORA | BF16 | {'precision.frozen': 'norms'},
    QLORA | BF16 | {'precision.frozen': 'float32'},
    QLORA | BF16 | FULL | {'precision.frozen': 'norms'}],
    ids=str)
def test_frozen_weights_in_float32_keep_what_autograd_keeps(changes):
    made = recipe(changes)
    base = model('llama', made.changed({'precision.frozen': None}))
    cast(base, made.precision.frozen)
    assert sum(item.size_b for item in saved(spec(config('llama')), made)) == hooked(base, made)


@pytest.mark.slow
def test_the_allocator_of_a_real_process_agrees():
    row = step_peak_error.compare(
        'words', step_peak_error.size(1, 256) | {'sharding.activation_checkpointing': 'full'})
    assert abs(row['error']) < 1


def test_instants_say_what_matters():
    llama = spec('llama-3.1-8b')
    changes = {
        'cluster.device': 'cuda', 'cluster.processes': 8, 'sharding.strategy': 'fsdp2', **BF16,
        **FULL}

    def peak(more):
        found = instant_lines(llama, recipe({**changes, 'batch.length': 8192, **more}))
        return max((sum(i.size_b for i in items), name) for name, items in found.items())
    plain, moment = peak({})
    assert moment == 'loss'
    assert 28e9 < plain < 32e9
    assert peak({'batch.loss_head': 'chunked'})[0] < .4 * plain
    assert (
        peak({'batch.micro': 1})[0] < plain < peak({'sharding.activation_checkpointing': 'none'})[0]
    )
    assert peak({'sharding.reshard_after_forward': False})[0] > plain + 14e9
    assert peak({'batch.accumulation': 2})[0] > plain + 15e9


def test_a_step_in_the_backward_pass_keeps_no_gradient():
    llama = spec('llama-3.1-8b')
    for changes in ({'cluster.processes': 1, 'sharding.strategy': 'none'},
                    {'cluster.processes': 8, 'sharding.strategy': 'fsdp2'}):
        made = recipe({'cluster.device': 'cuda', 'optimizer.clip': 0.0, **PURE, **FULL, **changes})
        within = made.changed({'optimizer.in_backward': True})
        held = [max(sum(line.size_b for line in lines if line.kind == 'gradients')
                    for name, lines in instant_lines(llama, some).items() if name != 'embedding')
                for some in (made, within)]
        largest_b = 2 * max(unit.parameters for unit in llama.units)
        assert held[1] <= largest_b < held[0]
        assert not [line for line in instant_lines(llama, within)['optimizer']
                    if line.kind == 'gradients']


AWAY = {'cluster.device': 'cuda', 'cluster.processes': 1, 'sharding.strategy': 'none',
        'sharding.activation_checkpointing': 'full', 'sharding.offload_activations': 'cpu'}


def test_activations_on_the_host_leave_five_layers_inputs_on_the_card():
    "Of a compiled layer nobody has seen more: the hook may have five tensors on their way."
    llama = spec('llama-3.1-8b')
    made = recipe({**PURE, **FULL, **AWAY, 'model.kernels': 'compile'})
    _, step = step_sizes(llama, made)
    away = instant_lines(llama, made)['forward']
    sizes = {line.name: line.size_b for line in away}
    stream_b = 2 * made.batch.micro * made.batch.length * llama.hidden
    assert sizes['kept by the layers'] == 5 * stream_b
    assert sizes['saved tensors, on the host'] == llama.layers * stream_b + step.final_b
    assert {line.place for line in away if line.name.endswith('on the host')} == {'pinned'}


def test_what_comes_back_from_the_host_by_hand():
    """Llama 3.1 8B with LoRA: 4,096 tokens of width 4,096 in bfloat16, 32 MiB for an input. At the
    last layer there are its input, the output of the embedding, and 64 MiB of the last norm in
    float32; at the first one the input of the layer above, and those two."""
    llama = spec('llama-3.1-8b')
    made = recipe({**BF16, **AWAY, 'method.kind': 'lora', 'batch.micro': 2, 'batch.length': 2048})
    found = instant_lines(llama, made)
    def kept(name):
        return next(line.size_b for line in found[name] if line.name == 'kept by the layers')
    input_b = 2 * 4096 * 4096
    assert kept('last layer') == 2 * input_b + 4 * 4096 * 4096
    assert kept('first layer') == 3 * input_b
    assert kept('loss') == kept('head') == input_b
    assert kept('optimizer') == 2 * input_b


def test_page_locked_activations_take_powers_of_two_by_hand():
    """Llama 3.2 3B: 4,096 tokens of width 3,072 in bfloat16 are 24 MiB, and take 32; the last norm
    keeps 48 MiB in float32, which take 64, and the head 24 MiB. Log-probabilities are powers."""
    llama = spec('llama-3.2-3b')
    made = recipe({**BF16, **AWAY, 'method.kind': 'lora', 'batch.micro': 2, 'batch.length': 2048,
                   'batch.loss_head': 'chunked'})
    lines = {line.name: line for line in instant_lines(llama, made)['forward']}
    rounding = lines['saved tensors, each rounded up']
    _, step = step_sizes(llama, made)
    powers = [1 << (size_b - 1).bit_length() for size_b in step.finals]
    small_b = sum(powers[i] - size_b for i, size_b in enumerate(step.finals) if size_b < 2**20)
    assert rounding.size_b == (28 * 8 + 16 + 8) * 2**20 + small_b
    assert (rounding.kind, rounding.place) == ('pinned_rounding', 'pinned')
    on_cpu = instant_lines(llama, made.changed({'cluster.device': 'cpu'}))['forward']
    assert not [line for line in on_cpu if line.kind == 'pinned_rounding']


def test_an_unpacked_weight_stands_beside_its_statistics_by_hand():
    """down_proj of Llama 3.2 1B: 8192 x 2048 = 16,777,216 numbers in bfloat16, 33,554,432 bytes; a
    block of 64 has one float32, 262,144 of them, and double quantisation undone holds them twice:
    2,097,152 bytes."""
    llama = spec('llama-3.2-1b')
    tape, _ = layer_tape(llama.units[0], llama, Setting(kind='qlora', packed='nf4'))
    op, = [op for op in tape.ops if op.name == 'down_proj']
    assert op.work_b == op.fore_b == 33_554_432 + 2_097_152


def test_gradients_of_adapters_have_the_type_of_the_adapters():
    """q_proj of Llama 3.2 1B, 2048 to 2048, with rank 8: A has 8 x 2048 numbers, B 2048 x 8. In
    float32, beside a compute type of 2 bytes, each gradient takes 65,536 bytes."""
    llama = spec('llama-3.2-1b')
    setting = Setting(
        kind='qlora', packed='nf4', compute_b=2, adapter_b=4, rank=8, targets=('q_proj',))
    tape, _ = layer_tape(llama.units[0], llama, setting)
    sizes = {op.name: op.grads_b for op in tape.ops if op.grads_b}
    assert sizes == {'q_proj: lora_A': 65_536, 'q_proj: lora_B': 65_536}


def test_every_kind_is_one_of_the_ledger():
    kinds = set(
        'activations logits gradients unsharded prefetch collective dequantised buffers '
        'zero_buckets optimizer'.split()
    )
    llama = spec('llama-3.2-1b')
    for strategy in ('none', 'ddp', 'fsdp2', 'fsdp1', 'zero1', 'zero2', 'zero3'):
        many = {
            'cluster.processes': 1 if strategy == 'none' else 2, 'sharding.strategy': strategy,
            **BF16}
        items = [item for found in instant_lines(llama, recipe(many)).values() for item in found]
        assert {'activations', 'logits', 'gradients'} <= {item.kind for item in items} <= kinds
        assert all(isinstance(item.size_b, int) and item.size_b > 0 for item in items)
        assert all(item.formula and item.source for item in items)


def test_it_is_quick():
    llama = spec('llama-3.1-8b')
    made = recipe({**QLORA, **BF16})
    instant_lines(llama, made)
    start = time.process_time()
    for _ in range(1000): instant_lines(llama, made)
    assert time.process_time() - start < .3  # 0.3 ms each
    start = time.process_time()
    for length in range(1000, 1100): instant_lines(llama, made.changed({'batch.length': length}))
    assert time.process_time() - start < 2


def test_the_copy_of_a_new_head_has_gradients():
    judge = spec('tiny-base', head='classification')
    made = Recipe.named('reviews-qlora').changed(
        {'model.head': 'classification', 'method.kind': 'lora', 'sharding.strategy': 'ddp'})
    gradients = [
        line.size_b for line in instant_lines(judge, made)['optimizer'] if line.kind == 'gradients']
    assert gradients == [4 * coverage(judge, made.method).trained]


@pytest.mark.parametrize(
    'call, words',
    [
        (lambda s, r: saved('llama', r), "'llama' is no ModelSpec"),
        (lambda s, r: instant_lines(s, 'x'), "'x' is no Recipe"),
        (lambda s, r: working_lines(s, r, 'los'), "'los' is no instant"),
        (lambda s, r: layer_tape(s.units[-1], s, Setting()), 'has no o_proj'),
        (lambda s, r: head_tape(s, Setting(head='half')), "'half' is none of"),
        (lambda s, r: has_adapter('lora', s), 'is no Setting')])
def test_mistakes_are_named(call, words):
    with pytest.raises(ValueError, match=words): call(spec('tiny-base'), recipe({}))
