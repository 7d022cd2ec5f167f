"""What assets/rules.yaml calls measured is so: two real ranks on the tiny base, and what each
combination does to them."""
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from trouble import slow_case

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
from llm_workbook.model.adapters import add_adapters
from llm_workbook.files import resolve
from llm_workbook.training.loop import skip_compiler
from llm_workbook.model.quantize import load_base
from llm_workbook.parallel.ranks import RankError, notebook_ranks, run_ranks
from llm_workbook.config.recipe import (
    Data, Method, Model, Precision, Recipe, planned_only, shrink)
from llm_workbook.config.rules import rules
from llm_workbook.parallel.backends import cpu_fsdp, fsdp_env

MEASURED = {rule.id for rule in rules() if rule.source.startswith('measured')}
FOR = []  # Rules that a test below repeats


def repeats(*ids):
    "Mark a test as the measurement of these rules."
    FOR.extend(ids)
    return lambda test: test


@pytest.fixture(scope='module', autouse=True)
def imported():
    "Import once what every rank needs; forks share it."
    import accelerate, bitsandbytes, deepspeed, peft, transformers  # noqa: E401, F401
    import torch.distributed.fsdp, torch.distributed.tensor  # noqa: E401, F401
    transformers.logging.disable_progress_bar()


def base(kind='lora', storage='float32', compute='float32', reentrant=None):
    "The tiny base with adapters that have a gradient, and checkpointing of one kind or none."
    import torch
    torch.manual_seed(0)
    model = load_base(
        'tiny-base', Method(kind=kind, storage=storage), Precision(compute=compute), 'cpu')
    if kind != 'full': model = add_adapters(model, Method(kind=kind), dtype=compute)
    for name, parameter in model.named_parameters():
        if 'lora_B' in name: torch.nn.init.normal_(parameter, std=.02)
    if reentrant is not None:
        model.gradient_checkpointing_enable({'use_reentrant': reentrant})
        if kind != 'full': model.enable_input_require_grads()
    return model.train()


def loss(model):
    "Loss of this rank's two rows."
    import torch
    import torch.distributed as dist
    ids = torch.randint(5, 1000, (2, 32), generator=torch.Generator().manual_seed(dist.get_rank()))
    return model(input_ids=ids, labels=ids).loss


def step(model):
    "The same after a backward pass, as a number."
    value = loss(model)
    value.backward()
    return value.item()


def shard(model, wrap=lambda layer: layer):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    for name, layer in list(model.named_modules()):
        if type(layer).__name__ != 'LlamaDecoderLayer': continue
        model.set_submodule(name, wrap(layer))
        fully_shard(model.get_submodule(name), mesh=mesh)
    return fully_shard(model, mesh=mesh)


@repeats('ddp-reentrant-adapters')
def test_reentrant_checkpointing_of_adapters_under_ddp():
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Trainer, TrainingArguments

    def find_unused():
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(folder, use_cpu=True, report_to='none')
            return Trainer(
                base(reentrant=True), args).accelerator.ddp_handler.find_unused_parameters

    def run(reentrant):
        return step(DistributedDataParallel(base(reentrant=reentrant), find_unused_parameters=True))

    assert run_ranks(find_unused, 2, timeout_s=120) == [True, True], (
        'transformers no longer looks for unused parameters')
    assert run_ranks(run, 2, args=(False,), timeout_s=120)
    with pytest.raises(RankError, match='mark a variable ready only once'):
        run_ranks(run, 2, args=(True,), timeout_s=120)


@repeats('fsdp2-reentrant')
def test_reentrant_checkpointing_inside_an_fsdp2_unit_loses_gradients():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl, checkpoint_wrapper)

    def norms(kind):
        model = shard(base('full'), lambda layer: checkpoint_wrapper(layer, checkpoint_impl=kind))
        return step(model), {
            name: p.grad.full_tensor().norm().item() for name, p in model.named_parameters()}

    right, wrong = (run_ranks(norms, 2, args=(kind,), timeout_s=120)[0]
                    for kind in (CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT))
    lost = [name for name, norm in wrong[1].items() if norm == 0]
    assert right[0] == pytest.approx(wrong[0], rel=1e-6)
    assert 0 not in right[1].values()
    assert lost
    assert all('k_proj' in name or 'v_proj' in name for name in lost)
    whole = [sum(n**2 for n in found.values())**.5 for _, found in (right, wrong)]
    assert whole == pytest.approx([33.65, 21.09], abs=.02)


# Optimizer -> words of its refusal; None: it trains
ON_SHARDS = {
    'adamw': None,
    'sgd': None,
    'adafactor': 'mixed torch.Tensor and DTensor',
    'adamw_8bit': 'mixed torch.Tensor and DTensor',
    'paged_adamw': 'sharding strategy',
    'paged_adamw_8bit': 'mixed torch.Tensor and DTensor'}


@repeats('sharded-tensors-need-torch-optimizers')
@pytest.mark.slow
def test_optimizers_on_sharded_tensors():
    def two_losses(kind):
        import bitsandbytes as bnb
        import torch
        from transformers.optimization import Adafactor
        model = shard(base())
        makers = {
            'adamw': torch.optim.AdamW, 'sgd': torch.optim.SGD, 'adamw_8bit': bnb.optim.AdamW8bit,
            'paged_adamw': bnb.optim.PagedAdamW32bit, 'paged_adamw_8bit': bnb.optim.PagedAdamW8bit,
            'adafactor': lambda ps, lr: Adafactor(
                ps, lr=lr, scale_parameter=False, relative_step=False)}
        optimizer = makers[kind]([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        first = step(model)
        optimizer.step()
        optimizer.zero_grad()
        return first, step(model)

    def outcome(kind):
        try: return two_losses(kind)
        except Exception as error: return str(error)

    def run(): return {kind: outcome(kind) for kind in ON_SHARDS}

    for outcomes in run_ranks(run, 2, timeout_s=120):
        for kind, words in ON_SHARDS.items():
            if words: assert words in outcomes[kind], kind
            else: assert outcomes[kind][1] < outcomes[kind][0], kind


@repeats('dora-without-dropout')
def test_dora_with_dropout_keeps_a_copy_of_the_weight():
    import torch
    from peft import LoraConfig, get_peft_model

    def kept(dropout):
        base = torch.nn.Sequential(torch.nn.Linear(96, 160, bias=False, dtype=torch.bfloat16))
        config = LoraConfig(r=4, use_dora=True, lora_dropout=dropout, target_modules=['0'])
        model = get_peft_model(base, config).train()
        shapes = []
        def keep(tensor):
            shapes.append((tuple(tensor.shape), tensor.dtype))
            return tensor
        x = torch.randn(7, 96, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor): model(x * 1)
        return [kind for shape, kind in shapes if {*shape} == {96, 160}]
    assert kept(0.) == [torch.bfloat16], 'the weight itself'
    assert kept(.1) == [torch.bfloat16, torch.float32]


@repeats('int8-does-not-shard')
def test_int8_under_fsdp2():
    def run(sharded):
        from torch.nn.parallel import DistributedDataParallel
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        model = AutoModelForCausalLM.from_pretrained(
            resolve('tiny-base'), dtype='bfloat16', device_map={'': 'cpu'},
            quantization_config=BitsAndBytesConfig(load_in_8bit=True))
        model = add_adapters(model, Method(kind='lora'), dtype='bfloat16').train()
        return step(shard(model) if sharded else DistributedDataParallel(model))
    assert run_ranks(run, 2, args=(False,), timeout_s=120)
    with pytest.raises(RankError, match="has no attribute 'CB'"):
        run_ranks(run, 2, args=(True,), timeout_s=120)


def zero3(model, optimizer=None):
    import deepspeed
    import torch
    skip_compiler(shrink(Recipe.named('7b-zero3-offload')))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer(trained) if optimizer else torch.optim.AdamW(trained, lr=1e-3)
    low = next(p.dtype for p in trained) == torch.bfloat16
    config = {
        'train_micro_batch_size_per_gpu': 2, 'bf16': {'enabled': low},
        'zero_allow_untested_optimizer': True,
        'zero_optimization': {
            'stage': 3, 'reduce_bucket_size': 10**6, 'stage3_param_persistence_threshold': 0}}
    return deepspeed.initialize(
        model=model, model_parameters=trained, optimizer=optimizer, config=config)


@repeats('zero-casts-the-payload')
@pytest.mark.parametrize('storage', [
    slow_case('bfloat16'), 'uint8', slow_case('float16'), slow_case('float32')])
def test_deepspeed_casts_the_payload(storage):
    def run():
        model = base('qlora', storage, 'bfloat16')
        return loss(model).item(), loss(zero3(model)[0]).item()

    if storage == 'float32':
        with pytest.raises(RankError, match='is invalid for input of size'):
            run_ranks(run, 2, timeout_s=300)
        return
    for whole, partitioned in run_ranks(run, 2, timeout_s=300):
        assert (whole == partitioned) == (storage != 'float16'), (
            'a cast payload trains on another model')


@pytest.mark.slow
def test_zero3_checkpoints_adapters_either_way():
    def run(reentrant):
        import torch
        from deepspeed.utils import safe_get_full_grad
        engine, *_ = zero3(base(reentrant=reentrant))
        losses, gradients = [], {}
        for _ in range(2):
            value = loss(engine)
            engine.backward(value)
            gradients = {
                name: safe_get_full_grad(p).norm().item()
                for name, p in engine.module.named_parameters()
                if p.requires_grad}
            engine.step()
            losses += [value.item(), float(engine.get_global_grad_norm() or 0)]
        assert len(gradients) == 56
        assert 0 not in gradients.values()
        assert torch.is_grad_enabled()
        return losses, gradients

    plain, checkpointed, reentrant = (
        run_ranks(run, 2, args=(how,), timeout_s=300)[0] for how in (None, False, True))
    for other in checkpointed, reentrant:
        assert other[0] == pytest.approx(plain[0], rel=1e-5)
        assert other[1] == pytest.approx(plain[1], rel=1e-4)


@repeats('fsdp2-offload-needs-a-gpu')
def test_offload_of_fsdp2_pins_memory():
    def run():
        import torch
        from accelerate import Accelerator
        with cpu_fsdp(): accelerator = Accelerator(cpu=True)
        model = base()
        return accelerator.prepare(
            model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))

    recipe = Recipe(
        name='rule', model=Model(source='tiny-base'), data=Data(source='sample-conversations'),
        sharding={'offload_parameters': 'cpu', 'offload_optimizer': 'cpu'})
    env = fsdp_env(recipe)
    assert env['FSDP_OFFLOAD_PARAMS'] == 'true'
    assert planned_only(recipe)
    assert not planned_only(recipe.changed({'cluster.device': 'cuda'}))
    assert not planned_only(recipe.changed({'sharding.pin_memory': False}))
    # torch's build with CUDA looks for a driver
    no_gpu = 'Cannot access accelerator device when none is available|Found no NVIDIA driver'
    with pytest.raises(RankError, match=no_gpu):
        notebook_ranks(run, 2, env=env, timeout_s=120)


@repeats('zero-flattens')
def test_adafactor_has_nothing_to_factor_under_zero():
    def run():
        from transformers.optimization import Adafactor

        def make(trained):
            return Adafactor(trained, lr=1e-3, scale_parameter=False, relative_step=False)
        engine, optimizer, *_ = zero3(base(), make)
        engine.backward(loss(engine))
        engine.step()
        return [
            {name: tuple(value.shape) for name, value in state.items() if hasattr(value, 'shape')}
            for state in optimizer.state.values()]

    for states in run_ranks(run, 2, timeout_s=300):
        assert states
        assert all('exp_avg_sq' in state and 'exp_avg_sq_row' not in state for state in states)


@repeats('paging-needs-a-gpu')
def test_what_a_cpu_ignores():
    def run():
        import bitsandbytes as bnb
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True, mixed_precision='fp16')
        weight = torch.nn.Parameter(torch.ones(300, 300))
        weight.grad = torch.ones_like(weight)
        optimizer = bnb.optim.PagedAdamW8bit([weight])
        optimizer.step()
        return (
            accelerator.mixed_precision, accelerator.native_amp, accelerator.scaler,
            optimizer.page_mng.paged_tensors)

    assert run_ranks(run, 1, timeout_s=120) == [('fp16', False, None, [])]


@repeats('packing-by-a-mask')
def test_packing_without_flash_builds_the_whole_mask(monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM
    plain, masks = torch.nn.functional.scaled_dot_product_attention, []
    def spy(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return plain(*args, attn_mask=attn_mask, **kwargs)
    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', spy)
    model = AutoModelForCausalLM.from_pretrained(resolve('tiny-base'), dtype='float32').train()
    a, b = (
        torch.randint(5, 1000, (1, n), generator=torch.Generator().manual_seed(n)) for n in (20, 30)
    )
    alone = model(input_ids=b, use_cache=False).logits
    assert masks[-1] is None
    positions = torch.cat([torch.arange(20), torch.arange(30)])[None]
    packed = model(input_ids=torch.cat([a, b], 1), position_ids=positions, use_cache=False).logits[
        :, 20:]
    assert masks[-1].shape[-2:] == (50, 50)
    assert torch.allclose(packed, alone, atol=1e-4)


def test_fp8_passes_packed_layers_by(monkeypatch):
    """accelerate's conversion, with a stand-in for Transformer Engine: a plain layer is converted,
    a packed one is not."""
    import sys

    import accelerate.utils.transformer_engine as convert
    import torch
    from bitsandbytes.nn import Linear4bit

    class Fp8(torch.nn.Linear):
        def __init__(self, inputs, outputs, bias, params_dtype):
            super().__init__(inputs, outputs, bias, dtype=params_dtype)
    engine = SimpleNamespace(Linear=Fp8, LayerNorm=torch.nn.LayerNorm)
    monkeypatch.setitem(sys.modules, 'transformer_engine', SimpleNamespace(pytorch=engine))
    monkeypatch.setitem(sys.modules, 'transformer_engine.pytorch', engine)
    monkeypatch.setattr(convert, 'is_transformer_engine_available', lambda: True)
    monkeypatch.setattr(convert, 'GatheredParameters', lambda *args, **kwargs: nullcontext())
    packed = torch.nn.Sequential(
        Linear4bit(64, 64, bias=False, quant_type='nf4', quant_storage=torch.bfloat16).to('cpu'))
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        for model in packed, plain: convert.convert_model(model)
    assert type(plain[0]) is Fp8
    assert type(packed[0]) is Linear4bit
    assert packed[0].weight.shape[1] == 1


@repeats('compiled-blocks-break-at-sharded-packs')
@pytest.mark.slow
def test_a_sharded_payload_breaks_a_compiled_block():
    from llm_workbook.model.compiled_blocks import compile_blocks
    def breaks(shards):
        model = base('qlora', 'bfloat16', 'bfloat16')
        if shards: shard(model)
        record = compile_blocks(model, 'eager')  # Traced, and no code generated
        step(model)
        return sum(record.breaks.values())
    assert run_ranks(breaks, 1, (False,), timeout_s=300) == [0]
    assert all(found > 0 for found in run_ranks(breaks, 2, (True,), timeout_s=300))


@repeats('routers-count-fill')
def test_the_loss_of_routers_counts_the_filling_of_packed_rows():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        'mixtral', hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=128,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4))
    ids, places = torch.randint(5, 128, (2, 64)), torch.arange(64).repeat(2, 1)
    ids[1, 40:], places[1, 40:] = 1, torch.arange(24)
    told = torch.ones_like(ids)
    told[1, 40:] = 0
    with torch.no_grad():
        found = model(input_ids=ids, position_ids=places, output_router_logits=True,
                      use_cache=False)
    right = load_balancing_loss_func(found.router_logits, 4, 2, told)
    assert abs(found.aux_loss / right - 1) > 1e-4  # Rounding is 1e-7


def test_every_measured_rule_is_repeated_here():
    assert MEASURED == set(FOR)
