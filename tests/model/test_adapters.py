"""Which modules a target means, before any weight is loaded, as PEFT reads it; and what differs
from PEFT's own layers of DoRA."""
import pytest

from llm_workbook.config.recipe import Method
from llm_workbook.model.adapters import add_adapters, check_targets
from llm_workbook.model.quantize import load_base
from llm_workbook.parallel.ranks import run_ranks


@pytest.mark.parametrize('target', ['proj', '_proj', 'own_proj', 'attn.q_proj', 'q_pro'])
def test_a_target_is_a_whole_part_of_a_name(target):
    "PEFT compares whole names or what follows a dot: the end of a part finds nothing there."
    from llm_workbook.model.architecture import configuration, skeleton
    from peft import LoraConfig, get_peft_model
    name, raw = configuration('tiny-base')
    with pytest.raises(ValueError, match='Target modules .* not found'):
        get_peft_model(skeleton(raw, name), LoraConfig(target_modules=[target]))
    words = f"match no linear module of 'tiny-base': '{target}', did you mean"
    with pytest.raises(ValueError, match=words):
        check_targets('tiny-base', [target])


@pytest.mark.parametrize('target, count', [
    ('q_proj', 4), ('self_attn.q_proj', 4), ('layers.3.mlp.up_proj', 1)])
def test_the_end_of_a_name_is_enough(target, count):
    assert len(check_targets('tiny-base', [target])) == count


def of_peft(method):
    "The tiny base with PEFT's own layers."
    from peft import LoraConfig, get_peft_model
    config = LoraConfig(r=method.rank, use_dora=True, target_modules='all-linear')
    return get_peft_model(load_base('tiny-base', method, device='cpu'), config)


def magnitudes(model):
    return {name: p for name, p in model.named_parameters() if 'magnitude' in name}


@pytest.mark.parametrize('kind', ['lora', 'qlora'])
def test_an_untrained_dora_is_the_base_and_that_of_peft_is_not(kind):
    """PEFT rounds the first magnitudes to the bfloat16 of the base: 8 bits, one part in 256."""
    import torch
    method = Method(kind=kind, dora=True, rank=4)
    ids = torch.arange(5, 69).view(2, 32)
    with torch.no_grad():
        plain = load_base('tiny-base', method, device='cpu')(input_ids=ids).logits
        ours = add_adapters(load_base('tiny-base', method, device='cpu'), method)
        theirs = of_peft(method)
        assert torch.equal(ours(input_ids=ids).logits, plain)
        assert (theirs(input_ids=ids).logits - plain).abs().max() > .05
    exact, rounded = magnitudes(ours), magnitudes(theirs)
    assert exact.keys() == rounded.keys()
    apart = max((rounded[name] / exact[name] - 1).abs().max().item() for name in exact)
    assert 1/1024 < apart < 1/256


def test_a_packed_weight_that_fsdp2_has_gathered_is_unpacked():
    import torch

    def run():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        method = Method(dora=True, rank=4)
        model = add_adapters(load_base('tiny-base', method, device='cpu'), method)
        ids = torch.arange(5, 37)[None]
        with torch.no_grad(): before = model(input_ids=ids, labels=ids).loss.item()
        mesh = init_device_mesh('cpu', (2,))
        for layer in model.get_base_model().model.layers: fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        moves = [p.grad.full_tensor().norm().item() for p in magnitudes(model).values()]
        return before, loss.item(), min(moves)

    for before, after, least in run_ranks(run, 2, timeout_s=120):
        assert before == after
        assert least > 0
