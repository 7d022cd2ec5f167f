"""Recipe C, row 4: the host gasps under offloaded shards, and a third GPU was to spread the load.

Measured: the shards of all ranks of one machine add up to the same bytes, however many there are.
"""
from llm_workbook import Recipe, estimate
from llm_workbook.files import asset
from llm_workbook.parallel.ranks import run_ranks


def shard_bytes():
    from transformers import AutoModelForCausalLM

    from llm_workbook.parallel.shard import shard_model
    model = shard_model(AutoModelForCausalLM.from_pretrained(asset('tiny-base')), device='cpu')
    return sum(parameter.to_local().nbytes for parameter in model.parameters())


def on_host(ranks): return sum(run_ranks(shard_bytes, ranks=ranks))


def broken():
    "A 16-bit base of 70 billion parameters, offloaded to a host of 96 GiB."
    assert on_host(3) == on_host(2)
    return Recipe.named('70b-2x24gb-qlora').changed({'method.kind': 'lora'})


def mended():
    "Fewer bytes help: the same recipe with a packed base fits."
    rooms = estimate(Recipe.named('70b-2x24gb-qlora')).rooms
    assert all(room.need_b <= room.have_b for room in rooms if room.place == 'host')
