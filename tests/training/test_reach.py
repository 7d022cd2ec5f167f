"Adapters that get no gradient are found by ranks that each hold a part of them."
import json
from functools import partial

import pytest
import torch
from trouble import small_recipe

from llm_workbook.config.recipe import Method, Recipe, shrink
from llm_workbook.model.adapters import add_adapters, moved
from llm_workbook.model.quantize import load_base
from llm_workbook.parallel.load import load_sharded
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.training import fine_tune as training
from llm_workbook.training import reach as module
from llm_workbook.training.fine_tune import check_recipe, fine_tune
from llm_workbook.training.reach import Reach, write_certificate
from llm_workbook.training.watchdog import Votes

ROWS = torch.arange(1, 41).view(2, 20)


def watched(bypassed=()):
    "One rank: the names that it waits for after one step, and what all ranks say then."
    model = load_sharded('tiny-base', Method(rank=4), device='cpu', seed=0)
    for number in bypassed:
        layer = model.get_base_model().model.layers[number].mlp.down_proj
        layer.forward = layer.base_layer.forward
    reach = Reach(model, 1)
    for parameter in reach.waiting.values():  # As if the other rank held all of the first adapter
        if torch.distributed.get_rank() and parameter is reach.waiting[reach.names[0]]:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', None))
    model(input_ids=ROWS, labels=ROWS).loss.backward()
    try: reach.note(Votes())
    except RuntimeError as error: return str(error)
    return reach.late


def test_a_gradient_that_one_rank_alone_has_counts():
    assert run_ranks(watched, 2, timeout_s=120) == [[], []]


def test_one_adapter_without_a_gradient_is_noted_and_a_kind_without_is_refused():
    for late in run_ranks(watched, 2, ((1,),), timeout_s=120):
        assert [name for name in late if 'layers.1.mlp.down_proj.lora_B' in name] == late != []
    for error in run_ranks(watched, 2, (range(4),), timeout_s=120):
        assert '4 adapters, all of down_proj, had no gradient in 1 steps' in error


def test_magnitudes_without_a_gradient_are_refused_as_a_kind_of_their_own():
    method = Method(kind='lora', rank=4, dora=True, targets=('q_proj', 'v_proj'))
    model = add_adapters(load_base('tiny-base', method, device='cpu'), method)
    model(input_ids=ROWS, labels=ROWS).loss.backward()
    assert Reach(model, 1).note(Votes()) is None
    for name, parameter in model.named_parameters():
        if 'v_proj.lora_magnitude' in name: parameter.grad = None
    words = '4 adapters, all of v_proj magnitude, had no gradient'
    with pytest.raises(RuntimeError, match=words): Reach(model, 1).note(Votes())


def test_under_zero_a_kind_that_is_not_used_is_refused_before_a_rank_starts(tmp_path, monkeypatch):
    "The layers multiply by the weight itself, as some kernels do."
    recipe = small_recipe(tmp_path, **{'method.kind': 'lora', 'sharding.strategy': 'zero2'})
    assert check_recipe(recipe)
    make = module.live_miniature

    def without_calls(*args):
        model = make(*args)
        for layer in model.model.layers: layer.mlp.forward = partial(multiplied, layer.mlp)
        return model

    monkeypatch.setattr(module, 'live_miniature', without_calls)
    with pytest.raises(ValueError, match='in a miniature of .* all of down_proj, had no gradient'):
        check_recipe(recipe)
    assert check_recipe(recipe.changed({'sharding.strategy': 'ddp'}))  # There a step shows it


def multiplied(mlp, x):
    inner = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
    return torch.nn.functional.linear(inner, mlp.down_proj.weight)


@pytest.mark.parametrize('steps, known', [(0, None), (1, None), (2, [])])
def test_a_certificate_says_nothing_of_steps_that_float16_has_skipped(tmp_path, steps, known):
    model = torch.nn.Linear(2, 2)
    reach = Reach(model, 2)
    for _ in range(steps):  # A skipped step is not noted
        model(torch.ones(2)).sum().backward()
        reach.note(Votes())
    norms = {'layers.0.q_proj.lora_B.weight': 1.0}
    written = json.loads(write_certificate(tmp_path, norms, reach, None).read_text())
    assert (written['steps_watched'], written['without_gradient']) == (steps, known)


@pytest.mark.slow
def test_a_run_with_one_adapter_that_is_never_used_ends_and_names_it(tmp_path, monkeypatch):
    make = training.make_trainer

    def bypass(*args, **how):
        made = make(*args, **how)
        layer = made.model.get_base_model().model.layers[1].mlp.down_proj
        layer.forward = layer.base_layer.forward
        return made

    monkeypatch.setattr(training, 'make_trainer', bypass)
    recipe = small_recipe(tmp_path, **{
        'method.kind': 'lora', 'cluster.processes': 1, 'batch.accumulation': 2,
        'sharding.strategy': 'none', 'optimizer.steps': 3})
    run = fine_tune(recipe, tmp_path/'run', 300, live=False)
    written = json.loads((run.directory/'certificate.json').read_text())
    [late] = written['without_gradient']
    assert 'layers.1.mlp.down_proj.lora_B' in late
    assert written['adapters']['down_proj'] == {'count': 2, 'least_norm': 0.0}
    with pytest.warns(UserWarning, match='1 of 14 adapters change nothing.*layers.1.mlp.down_proj'):
        moved(run.directory/'adapters')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['70b-2x24gb-qlora', '70b-2x4-h100-zero3-qlora-classifier'])
def test_a_run_certifies_its_adapters(name, tmp_path):
    "By TRL's trainer under FSDP2, and by the plain loop under ZeRO-3, where nothing is watched."
    recipe = shrink(Recipe.named(name)).changed({'optimizer.steps': 2, 'intervals.evaluation': 0})
    run = fine_tune(recipe, tmp_path/'run', 300, live=False)
    written = json.loads((run.directory/'certificate.json').read_text())
    is_zero = recipe.sharding.strategy == 'zero3'
    assert written['base'] == run.ranks[0]['payload']
    assert written['steps_watched'] == (0 if is_zero else 2)
    assert written['without_gradient'] == (None if is_zero else [])
    kinds = written['adapters']
    assert sum(kind['count'] for kind in kinds.values()) == len(run.ranks[0]['saved'])
    assert all(kind['least_norm'] > 0 for kind in kinds.values())
