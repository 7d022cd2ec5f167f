"""A checkpoint on a host without room for copies of it: the plan says what the run will do."""
import pytest

from llm_workbook import Recipe, estimate, memory
from llm_workbook.checkpoint import save_load
from llm_workbook.config.hardware import node as find_node
from llm_workbook.files import asset
from llm_workbook.plan import ledger as plan

LARGE = Recipe.named('70b-2x8-a100-80-full')
P4DE = find_node('p4de')


def copies_b(ledger) -> int:
    "Bytes of a rank's copy, where the plan has one."
    return sum(line.size_b for line in ledger.lines
               if 'copied for a thread' in line.name)


def process_b(ledger) -> int:
    "Bytes that a rank holds on the host while nothing is saved."
    return sum(line.size_b for line in ledger.lines
               if (line.phase, line.place, line.instant) == ('save', 'host', ''))


@pytest.mark.parametrize('more_b, streams', [(2**20, False), (-2**20, True)])
def test_plan_and_run_decide_alike(monkeypatch, more_b, streams):
    roomy = memory(LARGE, node=P4DE)
    copy_b, resting_b = copies_b(roomy), LARGE.cluster.processes * process_b(roomy)
    free_b = int(LARGE.cluster.processes * copy_b / plan._FREE_SHARE) + more_b
    small = P4DE.changed(memory_b=resting_b + free_b)
    planned = memory(LARGE, node=small)
    assert bool(copies_b(planned)) != streams
    monkeypatch.setattr(save_load, '_free_b', lambda: small.memory_b - resting_b)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', str(LARGE.cluster.processes))
    if streams:
        with pytest.warns(UserWarning, match='training waits until'):
            assert not save_load._has_room([(copy_b, save_load._room_b())])
    else:
        assert save_load._has_room([(copy_b, save_load._room_b())])


def test_a_host_without_room_fits_and_the_plan_says_what_it_costs():
    small = P4DE.changed(memory_b=100 * 2**30)
    plan_of = estimate(LARGE, small)
    host, = (room for room in plan_of.rooms if room.place == 'host')
    assert host.spare_b > 0
    note, = (text for text in plan_of.warnings if 'training waits' in text)
    [symbols] = [line.symbols for line in plan_of.ledger.lines if 'free' in line.symbols]
    assert f'every {LARGE.intervals.saving} steps' in note
    assert f"{symbols['needed'] / small.disk_bps:,.0f} s or more" in note
    assert not any('training waits' in text for text in estimate(LARGE, P4DE).warnings)


def test_a_tensor_on_its_way_is_the_largest_part_of_this_rank():
    small = memory(LARGE, node=P4DE.changed(memory_b=100 * 2**30))
    [line] = [line for line in small.lines if 'free' in line.symbols]
    spec, ranks = small.spec, LARGE.cluster.ranks
    assert line.symbols['l'] == -(-spec.vocab // ranks) * spec.hidden
    assert line.symbols['b'] == 4


@pytest.mark.parametrize('changes', [
    {'intervals.saving': 0},
    {'intervals.checkpoint': 'full'},  # Rank 0 has all of it, and nobody else a copy
    {'sharding.strategy': 'zero3', 'model.attention': 'sdpa', 'batch.packing': False}])
def test_a_run_without_copies_waits_for_no_room(changes):
    small = P4DE.changed(memory_b=100 * 2**30)
    assert not [line for line in memory(LARGE.changed(changes), node=small).lines
                if 'free' in line.symbols]


def test_memory_that_nobody_gave_refuses_nothing():
    unknown = P4DE.changed(memory_b=100 * 2**30, assumed={'memory_b': 100 * 2**30})
    assert copies_b(memory(LARGE, node=unknown)) == copies_b(memory(LARGE, node=P4DE))


def test_a_checkpoint_of_cpu_ranks_needs_no_copy_to_be_written():
    recipe = Recipe.named('reviews-qlora').changed({'intervals.saving': 10})
    machine = find_node('2x-rtx-3090')
    assert copies_b(memory(recipe, node=machine))
    small = machine.changed(memory_b=2**20)
    [line] = [line for line in memory(recipe, node=small).lines if 'free' in line.symbols]
    assert line.size_b == 0


def test_the_tokenizer_beside_adapters_is_planned_and_fits():
    def planned(name):
        lines = memory(Recipe.named(name)).lines
        return [line.size_b for line in lines if 'tokenizer' in line.name]
    [tiny_b] = planned('reviews-qlora')
    assert tiny_b >= (asset('tiny-base')/'tokenizer.json').stat().st_size
    [llama_b] = planned('70b-2x24gb-qlora')
    assert llama_b >= 17_210_000  # tokenizer.json of Llama 3, as transformers writes it
    assert planned('70b-2x8-a100-80-full') == []
