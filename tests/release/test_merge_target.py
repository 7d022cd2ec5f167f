"""Adapters are merged into what they were trained on, where nothing else is asked for."""
import json
import shutil

import pytest

from llm_workbook.config.recipe import Recipe
from llm_workbook.files import asset
from llm_workbook.model.adapters import add_adapters, save_adapters
from llm_workbook.model.quantize import load_base
from llm_workbook.release.export import export
from llm_workbook.release.merge import judge, merge_target
from llm_workbook.training.data import load_rows
from llm_workbook.training.fine_tune import check_recipe

RECIPE = Recipe.named('reviews-qlora').changed(
    {'method.rank': 2, 'cluster.processes': 1, 'sharding.strategy': 'none',
     'cluster.hardware': None})


@pytest.fixture(scope='module', params=['lora', 'qlora'])
def trained(request, tmp_path_factory):
    recipe = RECIPE.changed({'method.kind': request.param})
    base = load_base(recipe.model, recipe.method, recipe.precision, 'cpu')
    folder = tmp_path_factory.mktemp(request.param)/'adapters'
    model = add_adapters(base, recipe.method, 0)
    for name, weight in model.named_parameters():
        if 'lora_B' in name: weight.data.fill_(1e-4)
    save_adapters(model, folder)
    return recipe, folder


def test_an_export_needs_no_word_for_its_kind_of_adapters(trained, tmp_path):
    recipe, adapters = trained
    made = export(recipe, adapters, tmp_path/'out', prove=False)
    assert made.into == merge_target(recipe) == {'lora': '16-bit', 'qlora': 'dequantised'}[
        recipe.method.kind]
    assert json.loads((made.directory/'config.json').read_text())['model_type'] == 'llama'
    rows, held = check_recipe(recipe.changed({'model.source': str(made.directory)}))
    assert rows and held  # A run can begin from it


def test_a_judgement_needs_none_either(trained):
    recipe, adapters = trained
    assert judge(recipe, adapters, load_rows(recipe.data)[1][:4]).into == merge_target(recipe)


def test_adapters_in_the_place_of_a_model_are_told_the_way(trained):
    recipe, adapters = trained
    for place in adapters, adapters.parent:
        with pytest.raises(ValueError, match='holds adapters: `export` merges them into a model'):
            check_recipe(recipe.changed({'model.source': str(place)}))


def test_the_folder_of_a_run_that_trained_everything_is_told_the_way(tmp_path):
    shutil.copytree(asset('tiny-base'), tmp_path/'model')
    with pytest.raises(ValueError, match=f"did you mean '{tmp_path}/model'"):
        check_recipe(RECIPE.changed({'model.source': str(tmp_path)}))
