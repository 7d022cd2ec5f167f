"""A hosted notebook has two T4 cards, and the run starts one process."""
from llm_workbook.config.recipe import Recipe


def recipe(processes):
    return Recipe.named('70b-2x24gb-qlora').changed(
        {'cluster.hardware': '2x-t4', 'cluster.processes': processes})


def broken():
    return recipe(1)


def mended():
    from llm_workbook.watching.diagnose import diagnose
    assert diagnose(recipe(1)).recipe.cluster.processes == 2
    assert diagnose(recipe(2)).rule != 'gpus-left-idle'
