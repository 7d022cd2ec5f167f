"""More GPU memory is reserved and unused than is asked for. It takes a GPU: the text is torch's."""
from llm_workbook.config.recipe import Recipe

recorded = 'memory_fragmented.txt'


def mended():
    recipe = Recipe.named('70b-2x24gb-qlora')
    assert recipe.cluster.allocator == {'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}
