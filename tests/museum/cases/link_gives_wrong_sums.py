"""Cards copy wrong data to each other, and no error is raised; preflight adds known numbers."""
from llm_workbook.config.recipe import Recipe
from llm_workbook.launching.node_limits import node_limits
from llm_workbook.launching.preflight import assess

NODE = {
    'rank': 0, 'host': 'node1', 'gpus': 2, 'software': {}, 'recipe': '', 'error': '',
    'compiler': {'content': ''}, 'builder': {'content': ''}, 'allocator': {'content': ''},
    'own_address': '10.0.0.1', 'interfaces': {}, 'others': {}, 'sources': {}, 'free_b': 10**13,
    'clock_s': 0., 'error_s': 0., 'planned_b': 10**9, 'faults': [], 'copies': [], 'needs': None}


def link(wrong):
    "What preflight says of a link that has given so many wrong sums."
    measured = {
        'hosts': ('node1', 'node1'), 'backend': 'nccl', 'bps': 10**9, 'planned': None, 'error': '',
        'wrong': wrong}
    recipe = Recipe.named('reviews-qlora').changed({'cluster.processes': 1})
    node = NODE | {'limits': node_limits(recipe, {})}
    return '\n'.join(str(finding) for finding in assess(recipe, [node], [measured]))


def broken():
    return link(4096)


def mended():
    assert 'wrong sums' not in link(0)
