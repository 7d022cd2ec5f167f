"""Checkpoints on disk: every byte range equals the tensor's, and a file that lies is refused before
it is read."""
import json
import struct
from math import prod

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_workbook.files import asset
from llm_workbook.model.weight_files import Weights

TINY = asset('tiny-base')/'model.safetensors'


def write(folder, header, heap=b'', name='model.safetensors', length=None):
    "Write a safetensors file by hand, with whatever header."
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder/name).write_bytes(
        struct.pack('<Q', len(text) if length is None else length) + text + heap)
    return folder


def entry(dtype='F32', shape=(2,), offsets=(0, 8)):
    return {'dtype': dtype, 'shape': list(shape), 'data_offsets': list(offsets)}


def split(folder, names=('one.safetensors', 'two.safetensors')):
    "The tiny base in two shards with an index."
    tensors = load_file(TINY)
    where = {name: names[i % 2] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder/file)
    (folder/'model.safetensors.index.json').write_text(
        json.dumps({'metadata': {}, 'weight_map': where}))
    return folder, where


@pytest.mark.parametrize('place', ['tiny-base', TINY])
def test_every_tensor_and_any_part_of_it(place):
    real = load_file(TINY)
    with Weights(place) as weights:
        assert weights.tensors.keys() == real.keys()
        assert weights.total_b == sum(t.numel() * t.element_size() for t in real.values())
        torch.manual_seed(0)
        for name, tensor in real.items():
            assert weights.tensors[name].shape == tuple(tensor.shape)
            assert weights.tensors[name].numel == tensor.numel()
            assert weights.read(name).equal(tensor.flatten())
            before, (a, b) = (
                weights.read_b, sorted(torch.randint(tensor.numel() + 1, (2,)).tolist()))
            assert weights.read(name, a, b).equal(tensor.flatten()[a:b])
            assert weights.read_b - before == (b - a) * tensor.element_size()


def test_every_type_of_the_format(tmp_path):
    types = (
        'float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool float8_e4m3fn '
        'float8_e5m2'
    ).split()
    real = {name: torch.tensor([[0, 1], [1, 0], [1, 1]]).to(getattr(torch, name)) for name in types}
    save_file(
        real | {'none': torch.empty(0, 3), 'scalar': torch.tensor(7.0)},
        tmp_path/'model.safetensors')
    with Weights(tmp_path) as weights:
        for name, tensor in real.items():
            assert weights.tensors[name].dtype == name
            assert (
                weights.read(name, 1, 5)
                .view(torch.uint8)
                .equal(tensor.flatten()[1:5].view(torch.uint8)))
        assert weights.read('none').shape == (0,)
        assert weights.read('scalar').tolist() == [7]


def test_shards_with_an_index(tmp_path):
    folder, where = split(tmp_path)
    with Weights(folder) as weights:
        assert {name: found.file.name for name, found in weights.tensors.items()} == where
        assert all(
            weights.read(name).equal(tensor.flatten()) for name, tensor in load_file(TINY).items())


GOOD = {'a': entry(), 'b': entry(offsets=(8, 16))}
LIES = {  # What is wrong -> header, heap, what the error says
    'a short heap': (GOOD, b'x' * 15, 'truncated: .* its tensors end at'),
    'a long heap': (GOOD, b'x' * 17, '1 bytes at its end belong to no tensor'),
    'a gap': (
        {'a': entry(), 'b': entry(offsets=(9, 17))}, b'x' * 17,
        'b begins at byte .*, where .* is free'),
    'an overlap': ({'a': entry(), 'b': entry(offsets=(4, 12))}, b'x' * 12, 'b begins at byte'),
    'offsets that are not the shape': (
        {'a': entry(shape=(3,))}, b'x' * 8, r'a is F32 of shape \(3,\), 12 bytes, but has 8'),
    'more bytes than the shape takes': (
        {'a': entry('BF16', (8,), (0, 32))}, b'x' * 32,
        r'a is BF16 of shape \(8,\), 16 bytes, but has 32'),
    'offsets that go back': ({'a': entry(shape=(), offsets=(8, 4))}, b'x' * 8, 'but has -4'),
    'a shape below zero': (
        {'a': entry(shape=(-1, -2))}, b'x' * 8,
        'a has a shape or offsets that are no whole numbers'),
    'a shape of text': ({'a': entry() | {'shape': 'xy'}}, b'x' * 8, 'no whole numbers'),
    'a shape of halves': ({'a': entry(shape=(0.5, 4))}, b'x' * 8, 'no whole numbers'),
    # Whose product takes minutes
    'a shape beyond any disk': ({'a': entry(shape=[2**62] * 80_000)}, b'x' * 8, 'no whole numbers'),
    'a size beyond any disk': ({'a': entry(shape=(2**64,))}, b'x' * 8, 'no whole numbers'),
    'three offsets': ({'a': entry(offsets=(0, 4, 8))}, b'x' * 8, 'no whole numbers'),
    'an unknown type': ({'a': entry(dtype='F4')}, b'x' * 8, "a has no usable 'F4'"),
    'no offsets': (
        {'a': {'dtype': 'F32', 'shape': [2]}}, b'x' * 8, "a has no usable 'data_offsets'"),
    'an entry that is a list': ({'a': [1, 2]}, b'x' * 8, 'no whole numbers'),
    'a header that is a list': ([1], b'', 'its header is a list'),
    'a name twice': (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', b'x' * 8,
        'a name is there twice'),
    'no JSON': (b'{"a":', b'', 'its header is no JSON'),
    'no UTF-8': (b'\xff\xfe{}', b'', 'its header is no JSON'),
    'deep nesting': (b'[' * 100_000, b'', 'its header is no JSON'),
}


@pytest.mark.parametrize('header, heap, words', LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused_by_name(tmp_path, header, heap, words):
    write(tmp_path, header, heap)
    with pytest.raises(ValueError, match=f'model.safetensors: .*{words}.*fetch the file again'):
        Weights(tmp_path)


def test_a_file_that_ends_early_is_named(tmp_path):
    (tmp_path/'model.safetensors').write_bytes(b'1234')
    with pytest.raises(ValueError, match='model.safetensors: it is truncated: 4 bytes'):
        Weights(tmp_path)
    write(tmp_path, GOOD, length=2**60)
    with pytest.raises(ValueError, match='truncated'): Weights(tmp_path)
    raw = TINY.read_bytes()
    for cut in (len(raw) - 1, len(raw) // 2, 100):
        (tmp_path/'model.safetensors').write_bytes(raw[:cut])
        with pytest.raises(ValueError, match='truncated'): Weights(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    write(tmp_path, GOOD, b'x' * 16)
    with Weights(tmp_path) as weights:
        with open(tmp_path/'model.safetensors', 'r+b') as file: file.truncate(60)
        with pytest.raises(ValueError, match='it ended while b was read'): weights.read('b')


def test_a_header_larger_than_the_format_allows(tmp_path):
    with open(tmp_path/'model.safetensors', 'wb') as file:
        file.write(struct.pack('<Q', 200_000_000))
        file.truncate(300_000_000)
    with pytest.raises(ValueError, match='a header of 200,000,000 bytes is more than'):
        Weights(tmp_path)


def edit(folder, change):
    "Let `change` change the map from tensors to files in the index."
    index = folder/'model.safetensors.index.json'
    contents = json.loads(index.read_text())
    change(contents['weight_map'])
    index.write_text(json.dumps(contents))


@pytest.mark.parametrize(
    'name',
    ['../one.safetensors', '/etc/passwd', 'sub/one.safetensors', '..', '', 'a\\b.safetensors'])
def test_an_index_does_not_lead_out_of_its_directory(tmp_path, name):
    folder, where = split(tmp_path)
    edit(folder, lambda weight_map: weight_map.update(dict.fromkeys(weight_map, name)))
    with pytest.raises(ValueError, match='leads out of the directory|is not there'): Weights(folder)


def test_an_index_and_its_shards_must_agree(tmp_path):
    folder, where = split(tmp_path)
    first, second = list(where)[:2]
    edit(folder, lambda weight_map: weight_map.update({'made.up': 'one.safetensors'}))
    with pytest.raises(
        ValueError, match='1 of its tensors are in no shard, first made.up, which one.safetensors'
    ):
        Weights(folder)
    edit(folder, lambda weight_map: weight_map.pop('made.up'))
    edit(folder, lambda weight_map: weight_map.pop(first))
    with pytest.raises(
        ValueError, match=f'{first} lies in one.safetensors, and the index does not know it'
    ):
        Weights(folder)
    edit(folder, lambda weight_map: weight_map.update({first: 'two.safetensors'}))
    with pytest.raises(
        ValueError, match=f'{first} lies in one.safetensors, and the index places it in two'
    ):
        Weights(folder)
    (folder/'two.safetensors').unlink()
    with pytest.raises(ValueError, match='the shard two.safetensors is not there'): Weights(folder)


@pytest.mark.parametrize('text', ['{', '[]', '{}', '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path/'model.safetensors.index.json').write_text(text)
    with pytest.raises(
        ValueError, match='index.json: it(s weight_map does not| has no weight_map)'
    ):
        Weights(tmp_path)


def test_what_is_no_safetensors_checkpoint(tmp_path):
    with pytest.raises(ValueError, match='holds neither model.safetensors nor'): Weights(tmp_path)
    (tmp_path/'pytorch_model.bin').write_bytes(b'')
    with pytest.raises(
        ValueError, match=r'holds pickles only \(pytorch_model.bin\), which can run code'
    ):
        Weights(tmp_path)
    with pytest.raises(ValueError, match='pytorch_model.bin is no safetensors file'):
        Weights(tmp_path/'pytorch_model.bin')
    with pytest.raises(ValueError, match='did you mean'): Weights('tiny-bas')


def test_a_name_on_the_hub_without_a_network(monkeypatch):
    import huggingface_hub
    asked = {}

    def fetch(name, **what):
        asked.update(what, name=name)
        return TINY.parent
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', fetch)
    assert len(Weights('someone/something', 'abc').tensors) == 38
    assert asked == {
        'name': 'someone/something', 'revision': 'abc',
        'allow_patterns': ['*.safetensors', '*.json']}
    monkeypatch.undo()
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    with pytest.raises(
        ValueError, match="'someone/something' cannot be fetched from the Hub .*; name a directory"
    ):
        Weights('someone/something')


def test_reading_is_told_what_it_may(tmp_path):
    weights = Weights('tiny-base')
    with pytest.raises(
        ValueError, match="has no tensor 'model.norm'; did you mean 'model.norm.weight'"
    ):
        weights.read('model.norm')
    for part in ((-1, 2), (3, 2), (0, 257)):
        with pytest.raises(ValueError, match='model.norm.weight has 256 numbers'):
            weights.read('model.norm.weight', *part)
    assert weights.read_b == 0
    assert weights.read('model.norm.weight', 5, 5).numel() == 0
    weights.close()
    assert weights.read('model.norm.weight', 0, 2).shape == (2,)
    weights.close()
    assert prod((2, 3)) == 6
    assert '38 tensors' in repr(weights)


def test_random_bytes_never_do_more_than_raise(tmp_path):
    torch.manual_seed(0)
    raw = bytearray(TINY.read_bytes()[:6000])
    for _ in range(200):
        broken = bytearray(raw)
        for at in torch.randint(6000, (5,)): broken[at] = int(torch.randint(256, ()))
        (tmp_path/'model.safetensors').write_bytes(broken)
        with pytest.raises(ValueError, match='model.safetensors: '): Weights(tmp_path)
