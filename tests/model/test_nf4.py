"""NF4 packing: bitsandbytes' bits for whatever comes, whole or in parts, also in the parts that
fully_shard makes."""
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit

from llm_workbook.model.nf4 import blocks, pack, pack_part, scales, share, state, unpack
from llm_workbook.parallel.ranks import run_ranks

DTYPES = torch.float32, torch.bfloat16, torch.float16
SIZES = 32, 64, 128, 256, 4096
LEVELS = get_4bit_type('nf4', device='cpu')


def bits(tensor): return tensor.contiguous().flatten().view(torch.uint8)


def assert_same(values, blocksize=64):
    payload, absmax = pack(values, blocksize)
    theirs, kept = quantize_4bit(values, quant_type='nf4', blocksize=blocksize)
    assert torch.equal(payload, theirs.flatten())
    assert torch.equal(bits(absmax), bits(kept.absmax))


def generator(seed): return torch.Generator().manual_seed(seed)


def wild(n, dtype, seed):
    "Bit patterns drawn evenly: every magnitude, denormals, infinities and NaNs."
    kind = torch.int32 if dtype is torch.float32 else torch.int16
    info = torch.iinfo(kind)
    return torch.randint(info.min, info.max, (n,), generator=generator(seed), dtype=kind).view(
        dtype)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('blocksize', SIZES)
def test_random_weights_of_any_length(dtype, blocksize):
    for n in (1, 2, 31, 64, 65, 4096, 4097, 8191, 2**17 - 1, 2**17 + 4096, 2**18 + 77):
        assert_same(torch.randn(n, generator=generator(n)).mul_(0.02).to(dtype), blocksize)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_every_kind_of_pattern(dtype):
    for seed in range(20):
        values = wild(4096 + 33, dtype, seed)
        assert_same(values)
        assert_same(torch.where(values.isfinite(), values, 0).to(dtype))


@pytest.mark.parametrize('dtype', (torch.bfloat16, torch.float16), ids=str)
def test_all_patterns_of_16_bits(dtype):
    patterns = torch.arange(-2**15, 2**15).short().view(dtype)
    finite = patterns[patterns.isfinite()]
    for values in (
        patterns, finite, finite.sort().values,
        finite[torch.randperm(len(finite), generator=generator(0))]
    ):
        assert_same(values)
    # Each value in blocks of one absmax
    for top in (1.0, 0.75, 3.0, 65280.0 if dtype is torch.bfloat16 else 65504.0):
        within = finite[finite.abs() <= top]
        rows = torch.nn.functional.pad(within, (0, -len(within) % 63)).view(-1, 63)
        assert_same(torch.cat([rows, torch.full_like(rows[:, :1], top)], 1))


@pytest.mark.parametrize('top', [1.0, 0.02, 3.7e-3, 1e-38, 3e-39, 1e-45, 3e38])
def test_edges_and_their_neighbours(top):
    edges = (LEVELS[:-1] + LEVELS[1:]) / 2 * top
    rows = [edges]
    for way in (torch.inf, -torch.inf):
        near = edges
        for _ in range(3):
            near = torch.nextafter(near, torch.tensor(way))
            rows.append(near)
    values = torch.cat([*rows, LEVELS * top]).clamp(-top, top)
    # Each row has its absmax
    values = torch.cat([values, torch.full((128 - len(values),), top)]).view(64, 2).t()
    assert_same(values)
    short = torch.cat([row for row in rows[:7:3]] + [torch.tensor([top])]).clamp(-top, top)
    assert len(short) == 46
    # A short block divides
    for more in rows[1:]: assert_same(torch.cat([more.clamp(-top, top), torch.tensor([top])]))
    assert_same(short)
    assert_same(torch.cat([torch.ones(64), short]))  # Also where it is the last of several


def test_zeros_equal_values_and_infinities():
    for value in (0.0, -0.0, 1.0, -1e-40, 3e38, torch.inf, -torch.inf, torch.nan):
        assert_same(torch.full((64 + 5,), value))
        assert_same(torch.cat([torch.full((1,), value), torch.randn(69, generator=generator(1))]))


def test_shapes_strides_and_gradients_do_not_matter():
    weight = torch.randn(96, 130, generator=generator(0))
    assert_same(weight.t())
    assert_same(weight[:, 3:77])
    assert_same(torch.nn.Parameter(weight))
    assert [t.numel() for t in pack(torch.empty(0))] == [0, 0]


@pytest.mark.parametrize('threads', (1, 2))
def test_states_are_those_of_bitsandbytes(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # The last has more absmax than one thread adds up
        for shape in (64, 2), (255, 64), (1000, 78), (2304, 1024):
            for double in (False, True):
                weight = torch.randn(shape, generator=generator(0)).bfloat16()
                payload, absmax = pack(weight)
                theirs, peer = quantize_4bit(weight, quant_type='nf4', compress_statistics=double)
                ours = state(absmax, weight.shape, weight.dtype, double)
                mine = ours.as_dict()
                other = peer.as_dict()
                assert mine.keys() == other.keys()
                for key, value in mine.items():
                    assert (
                        torch.equal(value, other[key])
                        if isinstance(value, torch.Tensor)
                        else value == other[key]), key
                assert torch.equal(
                    dequantize_4bit(theirs, peer),
                    unpack(payload, scales(ours), weight.dtype).view(shape))
    finally: torch.set_num_threads(before)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('blocksize', (32, 64, 1024))
def test_unpacking_is_that_of_bitsandbytes(dtype, blocksize):
    for shape in (4, 1024), (5, 1030), (37, 2):
        theirs, kept = quantize_4bit(
            torch.randn(shape, generator=generator(0)).to(dtype), quant_type='nf4',
            blocksize=blocksize)
        assert torch.equal(
            unpack(theirs, kept.absmax, dtype, blocksize).view(shape), dequantize_4bit(theirs, kept)
        )


@pytest.mark.parametrize('shape', [(8, 96), (64, 64), (3, 640), (7, 31)])
# Also where bitsandbytes takes another block's absmax, on AVX-512
def test_unpacking_is_the_definition(shape):
    weight = torch.randn(shape, generator=generator(0))
    for blocksize in SIZES:
        payload, absmax = pack(weight, blocksize)
        numbers = torch.stack([payload >> 4, payload & 15], 1).flatten()[:weight.numel()].long()
        scale = absmax.repeat_interleave(blocksize)[:weight.numel()]
        assert torch.equal(
            unpack(payload, absmax, torch.float32, blocksize)[: weight.numel()],
            LEVELS[numbers] * scale)


@pytest.mark.parametrize('numel', (256, 4100, 8 * 1000, 64 * 257))
@pytest.mark.parametrize('storage', ('uint8', 'bfloat16', 'float32'))
@pytest.mark.parametrize('ranks', (2, 3, 5, 8))
def test_shares_join_to_the_whole(numel, storage, ranks):
    if numel % (2 * getattr(torch, storage).itemsize):
        pytest.skip('bitsandbytes cannot store this in such elements')
    values = torch.randn(numel, generator=generator(numel)).bfloat16()
    read_w = []

    def read(first, last):
        read_w.append(last - first)
        return values[first:last]
    parts = [pack_part(read, *share(numel, rank, ranks, storage), numel) for rank in range(ranks)]
    for joined, whole in zip(map(torch.cat, zip(*parts)), pack(values)):
        assert torch.equal(joined, whole)
    assert sum(read_w) <= numel + ranks * 2 * 62
    column = pack(values)[0].view(getattr(torch, storage))
    assert [len(p) for p, _ in parts if len(p)] == [
        c.numel() * c.element_size() for c in column.chunk(ranks)]


def test_any_even_cut_joins():
    values = torch.randn(1999, generator=generator(3))
    whole = pack(values)
    for seed in range(50):
        inner = (
            torch.randint(0, 1000, (6,), generator=generator(seed)).mul(2).sort().values.tolist())
        ends = [0, *(min(cut, 1998) for cut in inner), 1999]
        parts = [pack_part(lambda a, b: values[a:b], *part, 1999) for part in zip(ends, ends[1:])]
        for joined, expected in zip(map(torch.cat, zip(*parts)), whole):
            assert torch.equal(joined, expected)


def test_blocks_hold_the_part_and_no_block_more():
    for start in range(0, 200, 7):
        for stop in range(start + 1, 201, 5):
            first, last = blocks(start, stop, 200)
            assert first <= start < stop <= last
            assert start - first < 64
            assert last - stop < 64
            assert first % 64 == 0
            assert last % 64 == 0 or last == 200


def sharded(payload, storage):
    "This rank's bytes of `payload`, as `fully_shard` divides it."
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(
        payload.view(getattr(torch, storage)).view(-1, 1), requires_grad=False)
    fully_shard(module, mesh=init_device_mesh('cpu', (dist.get_world_size(),)))
    return bits(module.weight.to_local())


@pytest.mark.parametrize('storage', ('uint8', 'bfloat16', 'float32'))
def test_a_share_is_what_fully_shard_keeps(storage):
    import torch.distributed.fsdp, torch.distributed.tensor  # noqa: E401, F401
    for shape in (10, 100), (2, 16):
        values = torch.randn(shape, generator=generator(0)).flatten()
        for ranks in (2, 3):
            kept = run_ranks(sharded, ranks, args=(pack(values)[0], storage))
            parts = [
                pack_part(
                    lambda a, b: values[a:b], *share(values.numel(), r, ranks, storage),
                    values.numel())
                for r in range(ranks)]
            assert all(torch.equal(local, part[0]) for local, part in zip(kept, parts))
