"""What a compiled layer really keeps for its backward pass, against the plan, byte by byte.

The partitioner of torch decides what is kept, before any code is generated; so most cases leave the
generation out.
"""
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trouble import slow_case

from llm_workbook.config.recipe import Method
from llm_workbook.model.adapters import add_adapters, cast_adapters
from llm_workbook.model.compiled_blocks import compile_blocks
from llm_workbook.model.segments import register_segments
from llm_workbook.model.spec import spec
from llm_workbook.plan.layer_tape import Setting, head_tape, layer_tape

ROWS, LENGTH, RANK = 2, 64, 8
SIZES = {
    'vocab_size': 256, 'hidden_size': 128, 'intermediate_size': 352, 'num_hidden_layers': 3,
    'num_attention_heads': 8, 'num_key_value_heads': 2, 'head_dim': 16,
    'max_position_embeddings': 256}
FAMILIES = {
    'llama': lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    'qwen': lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES))}
TRACED, GENERATED = 'aot_eager_decomp_partition', 'inductor'
BYTES = {'float32': 4, 'bfloat16': 2}


@pytest.fixture(autouse=True)
def fresh_programs(monkeypatch):
    "Compile anew, and start no threads for GPUs: with torch for CUDA no rank could be forked then."
    monkeypatch.setattr(torch._C, '_ensureCUDADeviceGuardSet', lambda: None, raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(name, kind, compute, dropout=0.0):
    model = FAMILIES[name]().to(getattr(torch, compute))
    if kind == 'full': return model.train()
    model.requires_grad_(False)
    method = Method(kind='lora', storage=compute, rank=RANK, alpha=RANK, dropout=dropout)
    model = add_adapters(model, method)
    cast_adapters(model)
    return model.train()


def kept_b(model, positions=None) -> tuple[int, int]:
    """Bytes that layer 1 alone keeps: its neighbours share tables of positions with it.

    And those that the last norm keeps.
    """
    base = model.get_base_model() if hasattr(model, 'get_base_model') else model
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept = {}

    def note(layer):
        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept.setdefault(layer, {})[storage.data_ptr()] = storage.nbytes()
            return tensor
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    blocks = []
    for number, layer in enumerate((*base.model.layers, base.model.norm)):
        blocks.append(layer.forward)
        def forward(*args, number=number, **kwargs):
            with note(number): return blocks[number](*args, **kwargs)
        layer.forward = forward
    ids = torch.randint(0, SIZES['vocab_size'], (ROWS, LENGTH))
    output = model(input_ids=ids, position_ids=positions, use_cache=False)
    norm_b = sum(kept.pop(len(base.model.layers)).values())
    in_all = set.intersection(*(set(tensors) for tensors in kept.values()))
    assert output.logits.requires_grad
    return sum(size_b for place, size_b in kept[1].items() if place not in in_all), norm_b


def planned_b(of, kind, compute, kernels, attention='sdpa') -> tuple[int, int]:
    "Bytes of a layer, and of what follows the last one."
    setting = Setting(
        micro=ROWS, length=LENGTH, compute_b=BYTES[compute], stream_b=BYTES[compute], kind=kind,
        grad_b=BYTES[compute], rank=RANK, kernels=kernels, head='chunked', attention=attention)
    tapes = layer_tape(of.units[0], of, setting)[0], head_tape(of, setting)
    return tuple(sum(tensor.size_b for tensor in tape.saved) for tape in tapes)


WAYS = [('full', 'float32'), ('full', 'bfloat16'), ('lora', 'bfloat16'), ('lora', 'float32')]


CASES = [('llama', 'full', 'bfloat16', TRACED), ('qwen', 'lora', 'bfloat16', TRACED)]
CASES += [slow_case('llama', 'full', 'float32', GENERATED),
          slow_case('qwen', 'lora', 'bfloat16', GENERATED)]
CASES += [
    slow_case(name, *way, TRACED) for name in FAMILIES for way in WAYS
    if (name, *way, TRACED) not in CASES]


@pytest.mark.parametrize('name, kind, compute, backend', CASES)
def test_a_compiled_layer_keeps_what_is_planned(tmp_path, name, kind, compute, backend):
    torch.manual_seed(0)
    FAMILIES[name]().save_pretrained(tmp_path)
    of = spec(str(tmp_path))
    model = trained(name, kind, compute)
    plain_b, plain_norm_b = kept_b(trained(name, kind, compute))
    compile_blocks(model, backend)
    measured_b, norm_b = kept_b(model)
    (plan_b, tail_b), (compiled_b, compiled_tail_b) = (
        planned_b(of, kind, compute, kernels) for kernels in ('plain', 'compile'))
    assert (plain_b, measured_b) == (plan_b, compiled_b)
    assert measured_b < plain_b
    # The last norm is in no layer, and runs as it did
    assert norm_b == plain_norm_b > 0
    assert compiled_tail_b == tail_b


SEGMENT_CASES = [('llama', 'full', 'bfloat16')]
SEGMENT_CASES += [slow_case(name, *way) for name in FAMILIES for way in WAYS
                  if (name, *way) not in SEGMENT_CASES]


@pytest.mark.parametrize('name, kind, compute', SEGMENT_CASES)
def test_a_compiled_layer_of_packed_rows_keeps_what_is_planned(tmp_path, name, kind, compute):
    "The operator that takes borders keeps what the attention of whole rows keeps."
    torch.manual_seed(0)
    FAMILIES[name]().save_pretrained(tmp_path)
    of = spec(str(tmp_path))
    register_segments()
    model = trained(name, kind, compute)
    model.set_attn_implementation('segments')
    record = compile_blocks(model, TRACED)
    positions = torch.cat([torch.arange(length) for length in (40, 24, 3, 61)])
    measured_b, _ = kept_b(model, positions.reshape(ROWS, LENGTH))
    planned, _ = planned_b(of, kind, compute, 'compile', 'segments')
    assert measured_b == planned
    assert not record.breaks
