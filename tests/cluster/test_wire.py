"""Bytes that pass between the two nodes while they train, against what `estimate_step` says of
gloo."""
import cluster
import pytest
from bench.lines.wire_bytes import compare, make_base, recipe_for, start

NODES = [[cluster.HOME/'enter', node] for node in cluster.NODES]
# Headers are 1.046 at 1,500 bytes a packet, and near 1 here, where the link takes 64 KiB at once
LOWEST, HIGHEST = 0.98, 1.15


@pytest.fixture(scope='module')
def base(tmp_path_factory): return make_base(tmp_path_factory.mktemp('base'))


@pytest.mark.parametrize('strategy', ['fsdp2', 'ddp', 'zero3'])
def test_the_wire_carries_what_the_plan_says(strategy, base, slurm, tmp_path):
    recipe = recipe_for(strategy, base)
    made = compare(recipe, start(recipe, tmp_path, NODES, head='node1'))
    print(
        f'{strategy}: {made["sent_b"][0]:,} bytes sent per step, '
        f'{made["planned_b"]:,} planned for gloo, {made["planned_nccl_b"]:,} for NCCL; '
        f'{made["ratios"]}')
    assert min(made['sent_b'] + made['received_b']) >= 50e6
    assert all(LOWEST <= ratio <= HIGHEST for ratio in made['ratios']), made
    assert made['planned_nccl_b'] <= made['planned_b']
