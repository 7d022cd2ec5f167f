"""Two ranks on one GPU. It takes NCCL and a GPU, so the text is NCCL's; a plan refuses such a
recipe before it starts."""
from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import Recipe
from llm_workbook.plan.estimate import estimate

recorded = 'duplicate_gpu.txt'


def is_planned(processes):
    recipe = Recipe.named('70b-2x24gb-qlora').changed({'cluster.processes': processes})
    try: estimate(recipe)
    except RecipeError as error:
        assert 'at most one each' in str(error)
        return False
    return True


def mended():
    assert is_planned(2) and not is_planned(3)
