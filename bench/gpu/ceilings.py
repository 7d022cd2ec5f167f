"""What a device can do at most: products, copies, launches, attention, dequantisation."""
import time

from bench.gpu.place import Missing, Place

TERA, GIGA = 1e12, 1e9


def product(place: Place, size: int, dtype, exact: bool = True) -> float:
    "FLOP/s of a product of square matrices; in float32 exact, or by TF32."
    import torch
    torch.backends.cuda.matmul.fp32_precision = 'ieee' if exact else 'tf32'
    a = torch.randn(size, size, device=place.device).to(dtype)
    b = torch.randn(size, size, device=place.device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / place.seconds(lambda: torch.mm(a, b, out=out))


def matmul(place: Place) -> dict:
    "TFLOP/s of square products, by type and size."
    import torch
    sizes = place.pick((1024, 2048, 4096, 8192), (64, 128))
    kinds = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
    found = {f'{name}_{size}_tflops': product(place, size, dtype) / TERA
             for name, dtype in kinds.items() for size in sizes}
    names = {f'tf32_{size}_tflops': size for size in sizes}
    if place.on_gpu:
        found |= {name: product(place, size, torch.float32, False) / TERA
                  for name, size in names.items()}
    return found | place.gpu_alone(names, 'a CPU has no TF32')


def bandwidth(place: Place) -> dict:
    "GB/s that a copy within the device reads and writes, by size."
    import torch
    found = {}
    for size in place.pick((2**24, 2**28, 2**31), (2**16,)):
        source = torch.zeros(size, dtype=torch.uint8, device=place.device)
        target = torch.empty_like(source)
        rate = 2 * size / place.seconds(lambda: target.copy_(source)) / GIGA
        found[f'copy_{size // 2**10}_kib_gbps'] = rate
    return found


def host_copies(place: Place) -> dict:
    "GB/s between host and device, from memory that is page-locked and that is not."
    import torch
    names = [f'{way}_{kind}_gbps' for kind in ('pageable', 'pinned')
             for way in ('to_device', 'to_host')]
    if not place.on_gpu: return place.gpu_alone(names, 'a CPU has no memory beside the host')
    size, found = 2**30, {}
    there = torch.zeros(size, dtype=torch.uint8, device=place.device)
    for kind in ('pageable', 'pinned'):
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == 'pinned')
        ways = {'to_device': lambda: there.copy_(here, non_blocking=True),
                'to_host': lambda: here.copy_(there, non_blocking=True)}
        for way, copy in ways.items():
            found[f'{way}_{kind}_gbps'] = size / place.seconds(copy) / GIGA
    return found


def launches(place: Place) -> dict:
    "Microseconds of a kernel that does nothing, called on and on, and in a graph."
    import torch
    names = ['launch_us', 'graph_launch_us']
    if not place.on_gpu: return place.gpu_alone(names, 'a CPU launches no kernel')
    count, number = 1000, torch.zeros(1, device=place.device)

    def call():
        for _ in range(count): number.add_(1)
    found = {'launch_us': 1e6 * place.seconds(call) / count}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): call()
    return found | {'graph_launch_us': 1e6 * place.seconds(graph.replay) / count}


def dequantise(place: Place) -> dict:
    "GB/s of bfloat16 that comes out of NF4, with double quantisation, and of the product with it."
    import bitsandbytes.functional as bnb
    import torch
    found = {}
    for shape in place.pick(((4096, 4096), (4096, 14336), (8192, 28672)), ((64, 128),)):
        weight = torch.randn(shape, device=place.device).mul_(0.02).bfloat16()
        packed, state = bnb.quantize_4bit(weight, quant_type='nf4', compress_statistics=True)
        seconds = place.seconds(lambda: bnb.dequantize_4bit(packed, state))
        found[f'nf4_{shape[0]}x{shape[1]}_gbps'] = 2 * weight.numel() / seconds / GIGA
        seconds = place.seconds(lambda: bnb.quantize_4bit(weight, quant_type='nf4'))
        found[f'pack_{shape[0]}x{shape[1]}_gbps'] = 2 * weight.numel() / seconds / GIGA
    return found


def attention(place: Place) -> dict:
    "TFLOP/s of causal attention forward and backward, and of one with a mask of padding."
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    found, heads, width = {}, place.pick(32, 2), place.pick(128, 16)
    for length in place.pick((1024, 2048, 4096, 8192), (32,)):
        rows = max(1, place.pick(8192, 32) // length)
        q, k, v = (torch.randn(rows, heads, length, width, device=place.device,
                               dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        mask = torch.ones(length, length, dtype=torch.bool, device=place.device).tril()
        flops = 4 * rows * heads * length**2 * width / 2  # A half of the scores is masked
        out, ways = sdpa(q, k, v, is_causal=True), {}
        ways['forward'] = flops, lambda: sdpa(q, k, v, is_causal=True)
        ways['masked_forward'] = flops, lambda: sdpa(q, k, v, attn_mask=mask)
        gradient = torch.ones_like(out)
        ways['backward'] = 2.5 * flops, lambda: torch.autograd.grad(
            out, (q, k, v), gradient, retain_graph=True)
        for name, (work, call) in ways.items():
            found[f'{name}_{length}_tflops'] = work / place.seconds(call) / TERA
    return found


def allocator(place: Place) -> dict:
    "Bytes that the driver, torch's allocator and tensors count, from the first call on."
    import torch
    moments = 'context', 'first_product', 'tensor', 'tensor_freed', 'cache_emptied'
    names = [f'{moment}_{level}_b' for moment in moments
             for level in ('driver', 'reserved', 'allocated')]
    if not place.on_gpu: return place.gpu_alone(names, 'a CPU has no driver that counts memory')
    from bench.shared.gpu_rows import used_b
    before_b, found = used_b(), {}
    if before_b is None: raise Missing('nvidia-smi, which says what others hold, is not there')

    def read(moment):
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found[f'{moment}_driver_b'] = total - free - before_b
        found[f'{moment}_reserved_b'] = torch.cuda.memory_reserved()
        found[f'{moment}_allocated_b'] = torch.cuda.memory_allocated()
    torch.cuda.init()
    read('context')
    a = torch.ones(1024, 1024, device='cuda', dtype=torch.bfloat16)
    product = a @ a
    read('first_product')
    kept = torch.ones(2**30, dtype=torch.uint8, device='cuda')
    read('tensor')
    del a, product, kept
    read('tensor_freed')
    torch.cuda.empty_cache()
    read('cache_emptied')
    return found | {'others_b': before_b}


def nccl(place: Place) -> dict:
    "Seconds to make a group of one rank, bytes that it takes, and GB/s of its all-reduce."
    import torch
    import torch.distributed as dist
    names = ['first_s', 'taken_b', 'all_reduce_gbps']
    if not place.on_gpu: return place.gpu_alone(names, 'a CPU has no NCCL')
    if not dist.is_nccl_available(): raise Missing('this torch has no NCCL')
    torch.zeros(1, device='cuda')
    free_b, start = torch.cuda.mem_get_info()[0], time.perf_counter()
    dist.init_process_group('nccl', store=dist.HashStore(), rank=0, world_size=1)
    numbers = torch.ones(2**26, device='cuda')
    size_b = numbers.nbytes
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
    found = {'first_s': time.perf_counter() - start,
             'taken_b': free_b - torch.cuda.mem_get_info()[0] - size_b}
    rate = size_b / place.seconds(lambda: dist.all_reduce(numbers)) / GIGA
    dist.destroy_process_group()
    return found | {'all_reduce_gbps': rate}
