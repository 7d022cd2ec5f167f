"""What loading holds and reads, as planned, against real ranks that load."""
import ctypes
import gc
import shutil
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from trouble import slow_case

from llm_workbook.plan.model_states import rank_of
from llm_workbook.plan.loading import read_b
from llm_workbook.plan.ledger import memory
from llm_workbook.model.spec import spec
from llm_workbook.parallel.ranks import run_ranks
from llm_workbook.config.recipe import Recipe
from llm_workbook.rehearsal.load import rehearse_load

SHAPE = dict(
    hidden_size=640,
    intermediate_size=1728,
    num_hidden_layers=3,
    num_attention_heads=10,
    num_key_value_heads=5,
    # A third of 6,007 rows is no whole number, and shares cut blocks
    vocab_size=6007,
    tie_word_embeddings=False,
)
RECIPE_C = Recipe.named('70b-2x24gb-qlora')


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    "A checkpoint in several files."
    folder = tmp_path_factory.mktemp('base')
    with torch.random.fork_rng():
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SHAPE), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size='10MB')
    assert len(list(folder.glob('*.safetensors'))) > 2
    return folder


def recipe(base, kind, ranks):
    return Recipe(
        name='load', model={'source': str(base)}, method={'kind': kind},
        data={'source': 'sample-conversations', 'format': 'messages'},
        cluster={'processes': ranks, 'device': 'cpu'}, sharding={'loading': 'sharded'})


def loads(made, seed=None):
    "Load on this rank; bytes read, and the most that glibc had mapped for it while the base came."
    import bitsandbytes, peft, torch.distributed.fsdp  # noqa: E401, F401
    from llm_workbook.parallel import load as loading
    from llm_workbook.rehearsal.fake_tensors import watched_operations
    libc, fill, peak = ctypes.CDLL(None), loading._fill, [0]
    libc.mallinfo2.restype = type(
        'Counts', (ctypes.Structure,), {'_fields_': [(str(i), ctypes.c_size_t) for i in range(10)]})
    libc.mallopt(-3, 2**14)  # Each tensor from 16 KiB on gets pages of its own, and gives them back
    def mapped(): return getattr(libc.mallinfo2(), '4')
    gc.collect()
    start = mapped()
    # What earlier tests left free in the heap would be given out first
    while mapped() == start: libc.malloc(2**14)
    start = mapped()
    def note_peak(*_): peak[0] = max(peak[0], mapped() - start)
    def watch(*args):
        with watched_operations(note_peak): return fill(*args)
    with patch.object(loading, '_fill', watch):
        model = loading.load_sharded(
            made.model, made.method, made.precision, made.sharding, 'cpu', seed)
    return model.arrived.read_b, model.arrived.total_b, peak[0]


@pytest.mark.parametrize('kind, ranks', [
    ('full', 2), slow_case('lora', 2), slow_case('qlora', 2), ('qlora', 3)])
def test_a_rank_reads_and_holds_what_is_planned(base, kind, ranks):
    made = recipe(base, kind, ranks)
    found = run_ranks(loads, ranks, (made,), timeout_s=300)
    shape = spec(str(base))
    for rank, (read, total, peak) in enumerate(found):
        assert total == 2 * shape.parameters
        assert read == read_b(rank_of(made, shape, rank))
        ledger = memory(made, rank=rank)
        adapters = sum(x.size_b for x in ledger.lines if x.phase == 'load' and x.kind == 'adapters')
        planned = (
            ledger.total('load', 'gpu', 'allocated')
            + ledger.total('load', 'host', 'allocated')
            - adapters)
        print(
            f'{kind}, rank {rank} of {ranks}: {read:,} bytes read; {peak:,} held, {planned:,} '
            f'planned ({planned / peak - 1:+.2%})'
        )
        assert -.02 * peak < planned - peak < 2**22  # Not all is there yet when most is on its way
    assert sum(read for read, *_ in found) < found[0][1] * 1.001 + ranks * 256 * 21


def test_the_recipe_of_two_cards_needs_an_eighth_of_what_its_author_saw():
    ledger = memory(RECIPE_C)
    lines = [x for x in ledger.lines if x.phase == 'load']
    host = ledger.on_node('load', 'host')
    share = sum(
        x.size_b
        for x in lines
        if x.place == 'pinned' and x.kind in ('weights', 'payload', 'adapters'))
    rounding = sum(x.size_b for x in lines if x.kind == 'pinned_rounding')
    largest = 2 * rank_of(RECIPE_C, ledger.spec).tensors.largest
    assert rounding > 2e9
    assert all(x.place == 'pinned' for x in lines if x.kind == 'pinned_rounding')
    assert host / 2 <= share + largest + 2e9
    assert host < 180e9 / 3.5
    assert ledger.total('load', 'disk') == 2 * ledger.spec.parameters
    print(
        f'{host / 2e9:.2f} GB a rank: a share of {share / 1e9:.2f}, {rounding / 1e9:.2f} of '
        f'rounding'
    )


@pytest.mark.parametrize('rank', [0, 1])
def test_every_line_of_the_load_phase_follows_its_formula(rank):
    for name in ('70b-2x24gb-qlora', '70b-2x8-a100-80-full'):
        made = Recipe.named(name).changed({'sharding.loading': 'sharded', 'method.rank': 256})
        for x in memory(made, rank=rank).lines:
            if x.phase == 'load' and x.kind != 'allocator':
                assert x.size_b == eval(
                    x.formula, {'ceil': lambda a: -(-a // 1)}, dict(x.symbols)), x


@pytest.mark.parametrize('kind', ['full', 'lora', 'qlora'])
def test_the_rehearsal_reads_what_a_rank_reads_and_holds_what_is_planned(base, kind):
    made = recipe(base, kind, 3)
    shape = spec(str(base))
    for rank in 0, 2:
        played = rehearse_load(made, rank=rank)
        ledger = memory(made, rank=rank)
        assert (played.read_b, played.total_b) == (
            read_b(rank_of(made, shape, rank)), 2 * shape.parameters)
        planned = sum(ledger.total('load', place, 'allocated') for place in ('gpu', 'host'))
        # No numbers are packed on a stage
        packing = sum(x.size_b for x in ledger.lines if x.instant == 'pack')
        assert -.02 * planned < planned - played.host_b - played.gpu_b < packing + .04 * planned
        assert played.rounding_b == 0


def test_the_buffer_of_the_reader_lies_in_host_memory_alone():
    "On two GPUs that keep their shares, the host holds the buffer and nothing else."
    stays = {'sharding.offload_parameters': 'none', 'sharding.offload_optimizer': 'none'}
    lora = RECIPE_C.changed(
        {'model.source': 'meta-llama/Llama-3.2-1B', 'method.kind': 'lora', **stays})
    loaded, ledger = rehearse_load(lora), memory(lora)
    buffer_b = ledger.total('load', 'host', 'allocated')
    assert 4 * 2**20 <= buffer_b <= loaded.host_b < buffer_b + 1000
    assert abs(loaded.gpu_b - ledger.total('load', 'gpu', 'allocated')) < 2**20 < buffer_b


@pytest.mark.slow
def test_two_small_models_load_as_the_large_one_does():
    whole, small = (
        rehearse_load(RECIPE_C.changed({'model.source': 'meta-llama/Llama-3.2-1B'}), exact, rank=1)
        for exact in (True, False))
    assert (whole.played, small.played) == ((16,), (6, 7))
    sizes = [(x.host_b, x.gpu_b, x.rounding_b, x.read_b, x.total_b) for x in (whole, small)]
    assert sizes[0] == sizes[1]


def test_a_missing_tensor_is_told_before_anything_is_launched(base, tmp_path):
    tensors = {}
    for file in base.glob('*.safetensors'): tensors |= load_file(file)
    del tensors['model.norm.weight']
    save_file(tensors, tmp_path/'model.safetensors', metadata={'format': 'pt'})
    shutil.copy(base/'config.json', tmp_path)
    with pytest.raises(
        ValueError, match='1 tensors of LlamaForCausalLM are missing, first model.norm.weight'
    ):
        rehearse_load(recipe(tmp_path, 'lora', 2))


# A base that waits in host memory, as transformers 4 and fsdp_qlora left it

PACKED = {'method.storage': 'bfloat16', 'precision.master': 'bfloat16',
          'sharding.offload_parameters': 'none', 'sharding.offload_optimizer': 'none',
          'sharding.pin_memory': True}


def waiting(strategy, loading, ranks=2, **more):
    changes = {'sharding.strategy': strategy, 'sharding.loading': loading,
               'cluster.processes': ranks, 'cluster.hardware': f'{ranks}x-a100-40'}
    return RECIPE_C.changed(PACKED | changes | more)


def packed_b(recipe):
    "Bytes of the base as it is packed: payload, statistics, and what stays in 16 bit."
    alone = {'sharding.strategy': 'none', 'sharding.loading': 'every_rank', 'cluster.processes': 1,
             'cluster.hardware': '1x-h200', 'batch.accumulation': 2}
    lines = memory(recipe.changed(alone)).lines
    return sum(line.size_b for line in lines if line.phase == 'step' and line.lasting
               and line.kind in ('payload', 'absmax', 'weights'))


@pytest.mark.parametrize('strategy', ['fsdp1', 'fsdp2'])
def test_the_first_rank_of_a_node_keeps_the_base_once(strategy):
    recipe = waiting(strategy, 'rank0_host')
    first, second = (memory(recipe, rank=rank) for rank in (0, 1))
    host = [ledger.total('load', 'host', 'allocated') for ledger in (first, second)]
    assert host[1] == 0
    assert host[0] == pytest.approx(packed_b(recipe), rel=1e-3)
    on_node = first.on_node('load', 'host') - 2 * (first.total('load', 'host') - host[0])
    assert on_node == host[0]
    whole = memory(recipe.changed({'sharding.loading': 'rank0'})).total('load')
    assert first.total('load') < .7 * whole
    assert first.total('load') < 40 * 2**30 < whole


def test_every_rank_keeps_the_base_under_zero3():
    recipe = waiting('zero3', 'every_host', **{'precision.master': 'float32'})
    ledgers = [memory(recipe, rank=rank) for rank in (0, 1)]
    host = [ledger.total('load', 'host', 'allocated') for ledger in ledgers]
    assert host[0] == host[1] == pytest.approx(packed_b(recipe), rel=1e-3)
    assert ledgers[0].on_node('load', 'host') > 2 * host[0]
    assert ledgers[0].total('load') < 40 * 2**30


def test_a_unit_is_there_twice_and_once_on_its_way():
    recipe = waiting('fsdp1', 'rank0_host')
    cut = next(line for line in memory(recipe).lines if line.name == 'largest unit, moved and flat')
    root = 2 * 2 * 128256 * 8192 + 2 * 8192  # Embedding, output and the last norm, in 16 bit
    assert cut.symbols == {'u': root, 'k': 500 * 2**20}
    assert cut.size_b == 2 * root + 500 * 2**20


@pytest.mark.parametrize('strategy, loading, words', [
    ('ddp', 'every_host', 'host-loading-needs-shards'),
    ('zero2', 'rank0_host', 'host-loading-needs-shards'),
    ('zero3', 'rank0_host', 'zero3-has-no-first-reader')])
def test_nothing_waits_where_nothing_is_cut(strategy, loading, words):
    with pytest.raises(ValueError, match=words):
        waiting(strategy, loading, **{'precision.master': 'float32'})


@pytest.mark.parametrize('loading', ['rank0_host', 'every_host'])
def test_lines_of_a_base_that_waits_follow_their_formula(loading):
    for x in memory(waiting('fsdp2', loading)).lines:
        if x.phase == 'load' and x.kind != 'allocator':
            assert x.size_b == eval(x.formula, {'ceil': lambda a: -(-a // 1)}, dict(x.symbols)), x
