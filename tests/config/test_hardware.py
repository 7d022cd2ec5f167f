"""Hardware: figures have sources and sane sizes, machines are put together rightly, drivers and
limits read rightly."""
import importlib
import pickle
import sys
import types

import pytest
from llm_workbook.config import this_machine
from llm_workbook.config.document import RecipeError
from llm_workbook.config.hardware import (
    Gpu, Link, Node, gpu, gpus, link, links, node, nodes, same_nodes)
from llm_workbook.config.this_machine import detect, measure

FIGURES = {
    'name': 'x', 'memory_b': 2**34, 'bf16_flops': 1e14, 'fp16_flops': 1e14, 'fp32_flops': 1e13,
    'bandwidth_bps': 1e12, 'power_w': 300, 'price_hour': 1}


# The figures

@pytest.mark.parametrize('card', [gpu(name) for name in gpus()], ids=lambda card: card.name)
def test_a_gpu_has_sources_and_sane_ratios(card):
    needed = {'memory_b', 'flops', 'bandwidth_bps', 'power_w', 'price_hour'} | (
        {'ceiling'} if card.ceiling else set()) | ({'usable'} if card.usable else set())
    assert needed == set(dict(card.sources))
    assert all(dict(card.sources).values())
    assert card.half_flops >= card.fp16_flops >= card.fp32_flops
    assert card.fp8_flops is None or 1.99 <= card.fp8_flops / card.bf16_flops <= 2.05
    assert card.flops(card.half) <= card.half_flops
    is_priced = not dict(card.sources)['price_hour'].startswith('unknown')
    assert card.price_hour < 20
    assert is_priced == (card.price_hour > 0)
    assert card.link in links()
    assert card.host_link in links()
    assert (card.nvlink or 'nvlink4') in links()
    assert 30 < card.ridge < 500
    if card.name != 'cpu':
        assert card.memory_b % 2**20 == 0
        assert .97 * card.memory_b < card.usable_b < card.memory_b
        assert 9.9 * 2**30 < card.memory_b < 280 * 2**30
        assert 3e10 < card.half_flops / card.power_w < 3e12
        assert card.driver_names


def test_the_gpus_the_book_promises_are_there():
    workstation = 'rtx-3090 rtx-4090 rtx-5090 rtx-a5000'
    server = 'a10g l4 l40s a100-40 a100-80 h100 h200 b200 mi300x'
    older = 't4 v100-16 v100-32 a10 a40 rtx-a6000 rtx-3060 rtx-3080 rtx-3080-ti'
    newer = ('rtx-4060-ti-16 rtx-4070 rtx-4070-ti rtx-4070-ti-super rtx-4080 rtx-5060-ti-16 '
             'rtx-5070 rtx-5070-ti rtx-5080 rtx-6000-ada rtx-pro-6000 l20 l40 h20 gb200 b300')
    promised = {*workstation.split(), *server.split(), *older.split(), *newer.split(), 'cpu'}
    assert set(gpus()) >= promised
    drivers = [name for card in map(gpu, gpus()) for name in card.driver_names]
    assert len(drivers) == len(set(drivers))


def test_peaks_are_dense_and_accumulate_in_fp32():
    advertised = {
        'rtx-3090': 142e12, 'rtx-4090': 330.3e12, 'rtx-5090': 419e12, 'rtx-a5000': 222.2e12,
        'l4': 242e12, 'a100-80': 624e12, 'h100': 1979e12, 'b200': 4500e12, 'rtx-3080': 119e12,
        'rtx-4080': 195e12, 'rtx-5070': 123.5e12, 'rtx-5070-ti': 175.8e12, 'rtx-5080': 225.1e12,
        'rtx-a6000': 309.7e12, 'a10': 250e12, 'a40': 299.4e12, 'l40': 362.1e12, 'l20': 239e12,
        'rtx-6000-ada': 1457e12 / 2, 'gb200': 360e15 / 72, 'b300': 36e15 / 8}
    for name, sheet in advertised.items():
        assert gpu(name).bf16_flops == pytest.approx(sheet / 2, rel=0.001), name


def test_16_bit_is_twice_as_fast_as_fp32_on_geforce_and_four_times_on_professional_cards():
    pro = 'rtx-a5000 rtx-a6000 rtx-6000-ada rtx-pro-6000 a10 a40 l4 l40s'.split()
    twice = [name for name in gpus() if 'GeForce' in ' '.join(gpu(name).driver_names)]
    assert len(twice) == 15
    for name in twice: assert gpu(name).bf16_flops / gpu(name).fp32_flops == pytest.approx(2, 0.01)
    for name in pro: assert gpu(name).bf16_flops / gpu(name).fp32_flops == pytest.approx(4, 0.02)


def test_a_capability_says_which_units_there_are():
    cards = [gpu(name) for name in gpus() if name not in ('cpu', 'mi300x')]
    for card in cards:
        assert card.bf16 == (card.bf16_flops is not None) == (card.capability >= 8.0), card.name
        assert (card.fp8_flops is not None) == (card.capability >= 8.9), card.name
    able = {card.name: card.capability for card in cards}
    assert (able['v100-16'], able['t4'], able['a100-80'], able['a10g']) == (7.0, 7.5, 8.0, 8.6)
    assert (able['l4'], able['h20'], able['b200'], able['b300']) == (8.9, 9.0, 10.0, 10.3)
    assert {able[name] for name in able if name.startswith(('rtx-50', 'rtx-pro'))} == {12.0}
    assert gpu('cpu').capability is gpu('mi300x').capability is None


@pytest.mark.parametrize(
    'change, words',
    [
        ({'capability': 7.5, 'bf16': True}, 'gpu.bf16 = True: .* 7.5 says the opposite'),
        ({'capability': 8.0, 'bf16': False}, 'compute capability 8.0 says the opposite'),
        ({'capability': 8.6, 'fp8_flops': 2e14}, 'gpu.fp8_flops = .*8.6 has no fp8 units'),
        ({'capability': 8.6, 'bf16_flops': None}, 'gpu.bf16_flops: is missing'),
        ({'bf16_flops': None}, 'is missing: add it, or bf16: false'),
        ({'capability': 86}, 'gpu.capability = 86: must be less than or equal to 20'),
        ({'capability': '8.6'}, 'gpu.capability')])
def test_figures_that_contradict_the_capability_are_refused(change, words):
    with pytest.raises(RecipeError, match=words): Node(name='n', gpus=1, gpu=FIGURES | change)


def test_old_files_without_a_capability_are_read_as_before():
    assert Gpu(**FIGURES).half == 'bfloat16'
    emulating = Gpu(**FIGURES | {'bf16': False})  # With a peak that nobody reads
    assert (emulating.half, emulating.half_flops) == ('float16', 1e14)
    assert Gpu(**FIGURES | {'capability': 7.5}).half == 'float16'
    assert Gpu(**FIGURES | {'capability': 8}).half == 'bfloat16'
    assert gpu('t4').ridge == pytest.approx(65e12 / 320e9)


@pytest.mark.parametrize(
    'name, meant',
    [
        ('v100', "'v100-32' or 'v100-16'"),
        ('V100', "'v100-32' or 'v100-16'"),
        ('a100', "'a100-80' or 'a100-40'"),
        ('rtx-6000', "'rtx-a6000' or 'rtx-pro-6000' or 'rtx-6000-ada'"),
        ('rtx 4060 ti', "'rtx-4060-ti-16'"),
        ('3090', "'rtx-3090'"),
        ('3060', "'rtx-3060'"),
        ('4060', "'rtx-4060-ti-16'"),
        ('5060', "'rtx-5060-ti-16'"),
        ('a6000', "'rtx-a6000'"),
        ('2080', None),
        ('h1000', "'h100'"),
        ('p100', None),
        ('b100', None),
        ('h800', None),
        ('a30', None),
        ('rtx-2080-ti', None)])
def test_another_letter_or_digit_is_another_card(name, meant):
    with pytest.raises(ValueError) as caught: gpu(name)
    text = str(caught.value).partition('; ')[2]
    if meant: assert text == f'did you mean {meant}?'
    else: assert text.startswith(f'known: {", ".join(gpus())}; of another card write a YAML file')


@pytest.mark.parametrize('name', ['a10', 'l4', 'h20', 't4', 'l40'])
def test_a_name_that_another_begins_with_is_itself(name):
    assert gpu(name.upper()).name == node(f'2x-{name}').gpu.name == name


@pytest.mark.parametrize('name, same', [
    ('T4', 't4'), ('2x RTX 4090', '2x-rtx-4090'), ('8xH100', '8x-h100'), ('P5', 'p5'),
    ('2xrtx4090', '2x-rtx-4090'), ('RTX5070Ti', 'rtx-5070-ti'), ('8xa10080', '8x-a100-80'),
    ('2x_rtx_3090@ethernet-10', '2x-rtx-3090@ethernet-10')])
def test_a_machine_is_found_however_it_is_written(name, same):
    assert node(name).changed(name='it') == node(same).changed(name='it')


@pytest.mark.parametrize('way', [link(name) for name in links()], ids=lambda way: way.name)
def test_a_link_has_a_source_and_sane_ratios(way):
    assert way.source
    assert 0 < way.bps <= way.nominal_bps
    assert way.measured_bps is None or way.bps == way.measured_bps
    assert way.latency_s < 1e-3
    assert way.hop_s < 1e-3


def test_a_slot_of_half_the_lanes_has_half_the_rate():
    for gen in (4, 5):
        assert link(f'pcie{gen}-x8').nominal_bps * 2 == link(f'pcie{gen}-x16').nominal_bps
    assert (
        link('pcie5-x16').nominal_bps
        == 2 * link('pcie4-x16').nominal_bps
        == 4 * link('pcie3-x16').nominal_bps)


# Machines

@pytest.mark.parametrize(
    'name', [*nodes(), *gpus(), *(f'{n}x-{g}' for g in gpus() for n in (1, 2, 16))])
def test_every_machine_reads_back_equal(name):
    machine = node(name)
    assert Node.parse(machine.dump()) == machine == Node(**machine.to_dict())
    assert pickle.loads(pickle.dumps(machine)) == machine
    assert hash(machine) == hash(node(name))
    assert machine.memory_b > 0
    assert machine.price_hour >= 0
    assert machine.total_gpu_b == machine.gpus * machine.gpu.memory_b
    assert machine.backend == ('gloo' if machine.gpu.name == 'cpu' else 'nccl')


def test_a_file_names_what_the_package_knows(tmp_path):
    file = tmp_path/'lab.yml'
    file.write_text('version: 1\nname: lab\ngpu: h200\ngpus: 4\nnetwork: infiniband-400\n')
    machine = node(file)
    assert machine.gpu == gpu('h200')
    assert machine.link == link('nvlink4')
    assert machine.network.bps == 40e9
    assert machine.memory_b == 2 * 4 * gpu('h200').memory_b
    assert node(str(file)).changed(name='4x-h200', network=None) == node('4x-h200')


@pytest.mark.parametrize(
    'name, words',
    [
        ('2x-rtx-3900', "did you mean 'rtx-3090'"),
        ('h1000', "did you mean 'h100'"),
        ('v100', "no machine 'v100'.* did you mean 'v100-32' or 'v100-16'"),
        ('1x24GB', "did you mean 'rtx-3090' or 'rtx-4090' or .*'l4'"),
        ('2x80', "did you mean 'a100-80' or 'h100'"),
        ('NVIDIA H100 80GB HBM3', "did you mean 'h100'"),
        ('1x3090ti', "the nearest known: rtx-3090; of another card write a YAML file"),
        ('3090-ti', "the nearest known: rtx-3090; of another card"),
        ('4090d', "the nearest known: rtx-4090; of another card"),
        ('quadro-rtx-6000', "the nearest known: rtx-a6000, rtx-pro-6000, rtx-6000-ada;"),
        ('2080ti', "known: desktop-2x-3090, .*; of another card"),
        ('tpu-v4', "known: desktop-2x-3090, .*; of another card"),
        ('1x12gb', r"did you mean 'rtx-3060' .* or 'rtx-5070'\?$"),
        ('2x-20gb', "known: .*; of another card write a YAML file, as node"),
        ('0x-h100', '1 to 16'),
        ('17x-h100', '1 to 16'),
        ('-2x-h100', 'no machine'),
        ('', 'no machine'),
        ('dgx-h10', "did you mean 'dgx-h100'"),
        ('none.yaml', 'cannot be read'),
        ('8x', 'no machine'),
        ('8x-', 'no figures'),
        ('99999999999x-cpu', '1 to 1024'),
        ('h100\nh100', 'no machine'),
        (None, 'no machine')])
def test_an_unknown_machine_says_what_was_meant(name, words):
    with pytest.raises(ValueError, match=words): node(name)


@pytest.mark.parametrize(
    'field, value, words',
    [
        ('memory_b', -1, 'greater than 0'),
        ('memory_b', 11 * 10**12, 'less than or equal to 10000000000000'),
        ('bandwidth_bps', 0, 'greater than 0'),
        ('bf16_flops', -1e12, 'greater than'),
        ('bf16_flops', 1e18, 'less than'),
        ('ceiling', 1.01, 'less than or equal to 1'),
        ('power_w', 1e5, 'less than'),
        ('price_hour', -1, 'greater than'),
        ('fp32_flops', float('nan'), 'finite'),
        ('memory_b', '24 GB', 'integer')])
def test_absurd_figures_are_refused(field, value, words):
    with pytest.raises(RecipeError, match=words): Gpu(**FIGURES | {field: value})
    with pytest.raises(RecipeError, match=rf'gpu\.{field}'):
        Node(name='n', gpus=1, gpu=FIGURES | {field: value})


def test_mistakes_in_a_file_come_together_with_their_lines():
    text = 'version: 1\nname: lab\ngpu: h1000\ngpus: 0\nlink: nvlnk4\ndisk: 3\n'
    with pytest.raises(RecipeError) as caught: Node.parse(text)
    assert [p.line for p in caught.value.problems] == [3, 4, 5, 6]
    assert all(word in str(caught.value) for word in ("'h100'", "'nvlink4'", 'unknown key'))


def test_a_processor_is_shared_and_a_gpu_is_not():
    two = node('2x-cpu')
    one = two.using(1)
    assert one.gpu.bf16_flops == 2 * two.gpu.bf16_flops
    assert one.gpu.memory_b == two.memory_b
    for n in (1, 2, 3, 4):
        shared = two.using(n)
        assert shared.gpus * shared.gpu.fp32_flops == pytest.approx(2 * two.gpu.fp32_flops)
        assert shared.total_gpu_b <= two.memory_b
        assert shared.price_hour == pytest.approx(two.price_hour)
    assert node('8x-h100').using(4) == node('8x-h100')
    with pytest.raises(ValueError, match='at most one each'): node('8x-h100').using(9)
    with pytest.raises(ValueError, match='at least 1'): node('8x-h100').using(0)


def test_rent_takes_the_place_of_prices():
    assert node('2x-h100').price_hour == 2 * gpu('h100').price_hour
    assert node('2x-h100').changed(rent_hour=0).price_hour == 0
    assert node('2x-h100').changed({'gpu.price_hour': 1.5}).price_hour == 3


def test_differing_machines_are_named():
    a = node('8x-h100')
    b = node('8x-a100-80').changed(name='old')
    with pytest.raises(ValueError) as caught: same_nodes([a, a, b])
    assert (
        "8x-h100 and old differ in gpu.name ('h100' and 'a100-80'), link.name ('nvlink4' and "
        "'nvlink3')"
        in str(caught.value))
    assert 'bf16_flops' not in str(caught.value)
    with pytest.raises(ValueError, match='network.name'):
        same_nodes([a, a.changed(network='efa-400')])
    with pytest.raises(ValueError, match=r'gpu.price_hour \(3.49 and 1'):
        same_nodes([a, a.changed({'gpu.price_hour': 1})])
    with pytest.raises(ValueError, match='gpus'): same_nodes([a, a.changed(gpus=4)])
    with pytest.raises(ValueError, match='at least one'): same_nodes([])
    less = a.changed(name='b', memory_b=a.memory_b - 2**20)
    assert same_nodes([a]) == a
    assert same_nodes([a, less]) == a.changed(memory_b=less.memory_b)


def test_a_machine_shows_itself():
    machine = node('p4d').changed(notes=['<b>'])
    assert '&lt;b&gt;' in machine._repr_html_()
    assert 'efa-400' in machine._repr_html_()
    assert machine.plot()._repr_png_()[:4] == b'\x89PNG'


# This machine. No GPU is where these tests run, so NVML is imitated: they check what is made of its
# answers, not the answers.

class Fake(types.ModuleType):
    "The part of NVML that is used, for `count` GPUs called `name`."
    NVMLError = type('NVMLError', (Exception,), {})
    NVML_NVLINK_MAX_LINKS, NVML_P2P_STATUS_OK, NVML_CLOCK_SM, NVML_CLOCK_MEM = 18, 0, 1, 2

    def __init__(self, names, memory_mib, **facts):
        super().__init__('pynvml')
        sizes = memory_mib if isinstance(memory_mib, list) else [memory_mib] * len(names)
        self.names, self.memory_mib, self.open = names, sizes, 0
        self.facts = {'gen': 4, 'width': 16, 'nvlinks': 0, 'peers': 0, 'able': (8, 6)} | facts

    def nvmlInit(self): self.open += 1
    def nvmlShutdown(self): self.open -= 1
    def nvmlDeviceGetCount(self): return len(self.names)
    def nvmlDeviceGetHandleByIndex(self, i): return i
    def nvmlDeviceGetName(self, h): return self.names[h]
    def nvmlDeviceGetMemoryInfo(self, h):
        return types.SimpleNamespace(total=self.memory_mib[h] * 2**20)
    def nvmlDeviceGetMaxPcieLinkGeneration(self, h): return self.facts['gen']
    def nvmlDeviceGetMaxPcieLinkWidth(self, h): return self.facts['width']
    def nvmlDeviceGetP2PStatus(self, a, b, index): return 0 if self.facts['peers'] else 1
    def nvmlDeviceGetNumGpuCores(self, h): return 10496
    def nvmlDeviceGetMaxClockInfo(self, h, kind): return 1695 if kind == 1 else 9751
    def nvmlDeviceGetMemoryBusWidth(self, h): return 384
    def nvmlDeviceGetCudaComputeCapability(self, h): return self.facts['able']
    def nvmlDeviceGetPowerManagementDefaultLimit(self, h): return 350_000

    def nvmlDeviceGetNvLinkState(self, h, number):
        if number >= self.facts['nvlinks']: raise self.NVMLError
        return 1


def seen(monkeypatch, *args, **facts) -> Node:
    "What `detect` makes of an imitated NVML, which must be closed again."
    fake = Fake(*args, **facts)
    monkeypatch.setitem(sys.modules, 'pynvml', fake)
    try: return detect()
    finally: assert fake.open == 0


def test_known_gpus_are_recognised_and_keep_the_drivers_memory(monkeypatch):
    machine = seen(monkeypatch, ['NVIDIA H100 80GB HBM3'] * 8, 81559, gen=5, nvlinks=18, peers=1)
    same = {'name': 'n', 'memory_b': 1, 'disk_b': 1, 'notes': (), 'gpu.sources': {}}
    assert machine.changed(same) == node('8x-h100').changed(same)
    assert dict(machine.gpu.sources)['memory_b'] == 'the driver'
    machine = seen(monkeypatch, [b'NVIDIA A100-SXM4-40GB'] * 4, 40536, nvlinks=12, peers=1)
    assert machine.gpu.name == 'a100-40'
    assert machine.gpu.memory_b == 40536 * 2**20
    assert machine.link == link('nvlink3')


@pytest.mark.parametrize(
    'driver, memory_mib, row',
    [
        ('Tesla T4', 15360, 't4'),
        ('Tesla T4', 15109, 't4'),
        ('Tesla V100-SXM2-16GB', 16160, 'v100-16'),
        ('Tesla V100-SXM2-32GB', 32768, 'v100-32'),
        ('NVIDIA A10', 23028, 'a10'),
        ('NVIDIA A10G', 23028, 'a10g'),
        ('NVIDIA A40', 46068, 'a40'),
        ('NVIDIA L4', 23034, 'l4'),
        ('NVIDIA L40', 46068, 'l40'),
        ('NVIDIA L40S', 46068, 'l40s'),
        ('NVIDIA H20', 97871, 'h20'),
        ('NVIDIA B200', 183359, 'b200'),
        ('NVIDIA GB200', 189471, 'gb200'),
        ('NVIDIA B300 SXM6 AC', 275040, 'b300'),
        ('NVIDIA RTX A6000', 46068, 'rtx-a6000'),
        ('NVIDIA RTX 6000 Ada Generation', 49140, 'rtx-6000-ada'),
        ('NVIDIA RTX PRO 6000 Blackwell Workstation Edition', 97887, 'rtx-pro-6000'),
        ('NVIDIA RTX PRO 6000 Blackwell Server Edition', 97887, 'rtx-pro-6000-server'),
        ('NVIDIA GeForce RTX 4060 Ti', 16380, 'rtx-4060-ti-16'),
        ('NVIDIA GeForce RTX 4060 Ti', 8188, None),
        ('NVIDIA GeForce RTX 3060', 8192, None),
        ('NVIDIA GeForce RTX 3080', 10240, 'rtx-3080'),
        ('NVIDIA GeForce RTX 3080', 12288, None),
        ('NVIDIA GeForce RTX 5060 Ti', 8151, None),
        ('NVIDIA H20-3e', 143771, None),
        ('NVIDIA H100 PCIe', 81559, None),
        ('Tesla V100-PCIE-16GB', 16384, None),
        ('NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition', 97887, None)])
def test_a_drivers_name_is_its_row_or_none(monkeypatch, driver, memory_mib, row):
    card = seen(monkeypatch, [driver], memory_mib, able=(7, 0)).gpu
    assert card.name == (row or driver)
    assert card.memory_b == memory_mib * 2**20
    assert card.capability == (gpu(row).capability if row else 7.0)
    assert ('derived' in dict(card.sources)['flops']) == (row is None) or 'server' in card.name


def test_a_desktop_is_read_slot_by_slot(monkeypatch):
    names = ['NVIDIA GeForce RTX 3090'] * 2
    apart = seen(monkeypatch, names, 24576, width=8)
    assert (apart.gpus, apart.link, apart.host_link) == (2, link('pcie4-x8-host'), link('pcie4-x8'))
    assert seen(monkeypatch, names, 24576, nvlinks=4).link == link('nvlink3-bridge')
    assert seen(monkeypatch, names, 24576, peers=1).link == link('pcie4-x16')
    assert seen(monkeypatch, names[:1], 24576).link == link('pcie4-x16')
    odd = seen(monkeypatch, names, 24576, width=4, gen=3)
    assert odd.link.name == 'pcie3-x4-host'
    assert odd.link.nominal_bps == link('pcie3-x16').nominal_bps / 4
    assert odd.link.share == .5


def test_an_unknown_gpu_is_derived_and_says_so(monkeypatch):
    machine = seen(monkeypatch, ['NVIDIA Fancy 9000'], 12288)
    card = machine.gpu
    assert (card.name, card.memory_b, card.power_w) == ('NVIDIA Fancy 9000', 12288 * 2**20, 350)
    # Its cores and clocks were given
    assert card.fp32_flops == pytest.approx(gpu('rtx-3090').fp32_flops, rel=.01)
    assert card.bf16_flops == pytest.approx(gpu('rtx-3090').bf16_flops, rel=.01)
    assert card.bandwidth_bps == pytest.approx(gpu('rtx-3090').bandwidth_bps, rel=.01)
    assert 'derived' in dict(card.sources)['flops']
    assert 'unknown' in dict(card.sources)['price_hour']
    assert card.bf16
    assert card.fp8_flops is None
    assert seen(monkeypatch, ['x'], 1024, able=(8, 9)).gpu.fp8_flops
    old = seen(monkeypatch, ['x'], 1024, able=(7, 5)).gpu
    assert (old.bf16, old.bf16_flops, old.capability) == (False, None, 7.5)
    assert card.capability == 8.6
    assert seen(monkeypatch, ['x'], 1024, able=(12, 1)).gpu.capability == 12.1
    assert old.flops('float16') > 0
    with pytest.raises(ValueError, match='x has no bfloat16 units: compute in float16'): old.flops()
    assert seen(monkeypatch, ['x', 'x'], 1024, nvlinks=6).link.nominal_bps == 150e9


def test_mixed_gpus_are_refused(monkeypatch):
    names = ['NVIDIA H100 80GB HBM3', 'NVIDIA L4']
    with pytest.raises(ValueError, match='GPUs here differ .*h100.*l4'):
        seen(monkeypatch, names, [81559, 23034])


def test_without_a_driver_it_is_the_processor(monkeypatch):
    monkeypatch.setattr(this_machine, '_cores', lambda: 8)
    machine = seen(monkeypatch, [], 0)
    assert (machine.gpus, machine.backend, machine.gpu.name) == (2, 'gloo', 'cpu')
    assert machine.gpu.bf16_flops == 4 * gpu('cpu').bf16_flops
    assert machine.gpu.memory_b == machine.memory_b // 2
    monkeypatch.setitem(sys.modules, 'pynvml', None)
    # Other tests fill the disk meanwhile
    assert detect().changed(disk_b=1) == machine.changed(disk_b=1)
    monkeypatch.setattr(this_machine.Path, 'exists', lambda path: True)
    with pytest.raises(ImportError, match='monitor'): detect()


def test_a_real_nvml_has_the_functions_that_are_called():
    real = pytest.importorskip('pynvml')
    used = {name for name in dir(Fake) if name.startswith(('nvml', 'NVML'))}
    assert not [name for name in used if not hasattr(real, name)]
    assert (real.NVML_P2P_STATUS_OK, real.NVML_CLOCK_SM, real.NVML_CLOCK_MEM) == (0, 1, 2)


@pytest.mark.parametrize(
    'line, folder, file',
    [
        ('0::/a/b', 'a', 'memory.max'),
        ('0::/', '', 'memory.max'),
        ('4:memory:/a/b', 'memory/a/b', 'memory.limit_in_bytes')])
def test_a_container_may_use_less_than_the_machine_has(tmp_path, line, folder, file):
    (tmp_path/'proc/self').mkdir(parents=True)
    (tmp_path/'proc/self/cgroup').write_text(f'3:cpu:/x\n{line}\n')
    group = tmp_path/'sys/fs/cgroup'/folder
    group.mkdir(parents=True)
    (group/file).write_text('max\n' if file == 'memory.max' else '9223372036854771712\n')
    assert (
        this_machine._host(tmp_path)['memory_b']
        == this_machine._host(tmp_path/'none')['memory_b'])
    (group/file).write_text('1073741824\n')
    assert this_machine._host(tmp_path)['memory_b'] == 2**30


def test_a_gpu_without_bf16_is_timed_in_float16(monkeypatch):
    import torch
    asked = []

    def timed(size, dtype, device, wait): return asked.append(dtype) or 32.5e12
    monkeypatch.setattr(this_machine, '_product_flops', timed)
    assert measure(node('kaggle-2x-t4')).gpu.ceiling == 0.5
    assert measure(node('2x-l20')).gpu.ceiling == pytest.approx(32.5 / 119.5)
    assert asked == [torch.float16, torch.bfloat16]


def test_measuring_changes_speeds_only():
    machine = node('cpu')
    timed = measure(machine, 256)
    assert timed.changed({'gpu': 'cpu'}) == machine
    assert timed.gpu.bf16_flops != machine.gpu.bf16_flops
    assert timed.gpu.bandwidth_bps > 0


def test_the_shelf_is_read_once():
    assert gpu('h100') is gpu('H100')
    assert importlib.import_module('llm_workbook.config.hardware').link('loopback') is link(
        'loopback')
    assert isinstance(link('loopback'), Link)


# What nobody has given

def test_a_size_is_assumed_until_somebody_gives_it():
    machine = node('4x-rtx-4090')
    assert dict(machine.assumed) == {'memory_b': machine.memory_b, 'disk_b': 10**12}
    for other in (machine.changed({'gpu.memory_b': 2**36, 'gpus': 2}), Node.parse(machine.dump()),
                  node('4x-rtx-4090@ethernet-100')):
        assert other.assumed == machine.assumed
    told = machine.changed(memory_b=2**38)
    assert dict(told.assumed) == {'disk_b': 10**12}
    assert told.changed(disk_b=10**13).assumed == ()
    assert node('p5').assumed == ()
    given = Node(name='own', gpu='rtx-4090', gpus=4, memory_b=machine.memory_b, disk_b=10**12)
    assert given.assumed == (), 'a size that is given is known, even if it is the usual one'
    assert same_nodes([machine, machine.changed(name='b')]).assumed == machine.assumed
