"""What has to work on a GPU, in parts small enough to name what is wrong. Each says `passed`."""
import os
import tempfile
import threading
import time

from bench.gpu.place import Missing, Place


def device_setup(place: Place) -> dict:
    "`set_up_device` gives one process its device, TF32 and no process group."
    import torch
    import torch.distributed as dist
    from bench.shared.gpu_rows import plain_recipe
    from llm_workbook.training.rank_run import set_up_device
    os.environ |= {'LOCAL_RANK': '0', 'WORLD_SIZE': '1', 'RANK': '0'}  # As a launcher would
    state = set_up_device(plain_recipe('tiny-base', 1, {'cluster.device': place.device}))
    found = {'device': state.device.type, 'kind': state.distributed_type.value,
             'grouped': dist.is_initialized()}
    passed = found == {'device': place.device, 'kind': 'NO', 'grouped': False}
    if not place.on_gpu:
        return found | {'passed': passed} | place.gpu_alone(['tf32'], 'a CPU has no TF32')
    tf32 = torch.backends.cuda.matmul.fp32_precision
    return found | {'tf32': tf32, 'passed': passed and tf32 == 'tf32'}


def nccl_probe(place: Place) -> dict:
    "A group made as preflight makes one, by options with a limit, adds up what one rank has."
    from datetime import timedelta
    from unittest.mock import patch
    import torch
    import torch.distributed as dist
    if not place.on_gpu: group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=9))
    else:
        if not dist.is_nccl_available(): raise Missing('this torch has no NCCL')
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=12)
        with patch.dict(os.environ, TORCH_NCCL_BLOCKING_WAIT='1'):
            group = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
    numbers = torch.arange(2**20, dtype=torch.float32, device=place.device) % 1021
    before, start = numbers.clone(), time.perf_counter()
    group.allreduce([numbers]).wait()
    place.wait()
    return {'first_s': time.perf_counter() - start, 'passed': torch.equal(numbers, before)}


def watchdog(place: Place) -> dict:
    "The hang watch tells a rank that waits for its GPU from one that is stuck."
    if not place.on_gpu: raise Missing('a rank on a CPU waits for no GPU')
    import torch
    from llm_workbook.training.watchdog import HangWatch
    told, spoken = [], threading.Event()

    def note(error):
        told.append(str(error))
        spoken.set()
    number = torch.zeros(1, device='cuda')
    torch.cuda._sleep(1)
    with tempfile.TemporaryDirectory() as folder, HangWatch(folder, 1.0, act=note):
        torch.cuda._sleep(8 * 10**9)  # Cycles, so some 4 to 8 s
        number.add_(1).item()
        spoken.wait(20)
    return {'said': told[0][:160] if told else '',
            'passed': bool(told) and 'waiting for a GPU' in told[0]}


def float16_scaler(place: Place) -> dict:
    "The scaler takes a step with finite gradients, and skips and counts one without."
    import torch
    from llm_workbook.training.float16 import make_scaler
    weight = torch.nn.Parameter(torch.ones(8, device=place.device))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = make_scaler(place.device)
    seen = []
    for factor in (1.0, float('inf')):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.overflowed, round(float(weight[0].detach()), 4)))
        optimizer.zero_grad()
    found = {'scale': scaler.get_scale(), 'skipped': scaler.skipped}
    return found | {'passed': seen == [(False, 0.5), (True, 0.5)]
                    and found == {'scale': 2.0**15, 'skipped': 1}}


def differences(ours, theirs) -> int:
    "How many codes of two NF4 payloads differ."
    ours, theirs = ours.flatten().cpu(), theirs.flatten().cpu()
    changed = ours ^ theirs
    return int((changed & 15).ne(0).sum() + (changed >> 4).ne(0).sum())


def nf4_bytes(place: Place) -> dict:
    """The library on the CPU and bitsandbytes on the device pack a weight to the same bytes.

    Whole and in two parts; the mean of the absmax, which double quantisation takes off, may differ.
    """
    import bitsandbytes.functional as bnb
    import torch
    from llm_workbook.model import nf4
    shape = place.pick((8192, 28672), (64, 128))
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    payload, absmax = nf4.pack(weight)
    there = weight.to(place.device)
    theirs, state = bnb.quantize_4bit(there, quant_type='nf4')
    halves = [bnb.quantize_4bit(part, quant_type='nf4')[0].flatten() for part in there.chunk(2)]
    double = bnb.quantize_4bit(there, quant_type='nf4', compress_statistics=True)[1]
    ours = nf4.state(absmax, shape, torch.bfloat16)
    found = {
        'weights': weight.numel(),
        'differ': differences(payload, theirs),
        'differ_in_parts': differences(torch.cat(halves), theirs),
        'absmax_differ': int((absmax != state.absmax.cpu()).sum()),
        'offset_off': abs(float(ours.offset) - float(double.offset)),
        'absmax_codes_differ': int((ours.absmax != double.absmax.cpu()).sum())}
    exact = 'differ', 'differ_in_parts', 'absmax_differ'
    return found | {'passed': not any(found[name] for name in exact)}


def relative(ours, truth) -> float:
    "The largest error of `ours`, in shares of the largest of `truth`."
    ours, truth = ours.detach().double(), truth.detach().double()
    return float((ours - truth).abs().max() / truth.abs().max())


def packed_product(place: Place) -> dict:
    "A product with a packed weight, and its gradient, are those of the dequantised weight."
    import bitsandbytes as bnb
    import bitsandbytes.functional as functional
    import torch
    torch.manual_seed(0)
    rows, shape = place.pick(512, 8), place.pick((4096, 14336), (64, 128))
    weight = torch.randn(shape, device=place.device).mul_(0.02).bfloat16()
    packed, state = functional.quantize_4bit(weight, quant_type='nf4', compress_statistics=True)
    x = torch.randn(rows, shape[1], device=place.device, dtype=torch.bfloat16, requires_grad=True)
    y = bnb.matmul_4bit(x, packed.t(), quant_state=state)
    gradient, = torch.autograd.grad(y.float().square().sum(), x)
    dense = functional.dequantize_4bit(packed, state)
    truth = x @ dense.t()
    right, = torch.autograd.grad(truth.float().square().sum(), x)
    found = {'off': relative(y, truth), 'gradient_off': relative(gradient, right)}
    return found | {'passed': max(found.values()) < 0.02}


def tf32(place: Place) -> dict:
    "Products in float32, exact and by TF32, against float64: the error, and the seconds."
    import torch
    size = place.pick(4096, 64)
    torch.manual_seed(0)
    a, b = (torch.randn(size, size, device=place.device) for _ in range(2))
    truth, found = a.double() @ b.double(), {}
    for kind in ('ieee', 'tf32') if place.on_gpu else ('ieee',):
        torch.backends.cuda.matmul.fp32_precision = kind
        found[f'{kind}_off'] = relative(a @ b, truth)
        found[f'{kind}_s'] = place.seconds(lambda: a @ b)
    passed = found['ieee_off'] < 1e-5 and found.get('tf32_off', 0) < 5e-3
    return found | {'passed': passed} | place.gpu_alone(['tf32_off', 'tf32_s'],
                                                        'a CPU has no TF32')


def loss_head(place: Place) -> dict:
    "TRL's head on this device gives the loss and the gradients of whole logits."
    return head_errors(place, 'chunked')


def one_pass_head(place: Place) -> dict:
    "So does the library's head, which scores tokens once."
    return head_errors(place, 'one_pass')


def head_errors(place: Place, head: str) -> dict:
    "Loss and gradients of a small model under a head, beside those of whole logits."
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from bench.shared.models import fuse
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=place.pick(1024, 32), intermediate_size=64,
                         num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
                         vocab_size=place.pick(128_256, 512))
    with torch.device(place.device): model = LlamaForCausalLM(config).bfloat16().train()
    ids = torch.randint(config.vocab_size, (2, place.pick(512, 16)), device=place.device)
    labels = ids.clone()
    labels[0, ::3] = -100
    labels[1] = -100  # A row in which nothing trains
    count = (labels[:, 1:] != -100).sum()
    found = []
    for fused in (False, True):
        if fused: fuse(model, head)
        loss = model(input_ids=ids, labels=labels, num_items_in_batch=count, use_cache=False).loss
        model.zero_grad()
        loss.backward()
        found.append((loss.item(), model.lm_head.weight.grad, model.model.norm.weight.grad))
    (whole, *truths), (tiled, *ours) = found
    off = {'loss': whole, 'loss_off': abs(tiled / whole - 1),
           'head_off': relative(ours[0], truths[0]), 'norm_off': relative(ours[1], truths[1])}
    return off | {'passed': off['loss_off'] < 2e-3 and max(off['head_off'], off['norm_off']) < 0.05}


def segments(place: Place) -> dict:
    "Attention by borders gives what a mask gives, and so do its gradients; seconds of both."
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from llm_workbook.model.segments import segment_attention
    torch.manual_seed(0)
    length, width = place.pick(4096, 64), place.pick(128, 16)
    borders = torch.tensor([0, length // 8, length // 2, length], dtype=torch.int32)
    example = torch.bucketize(torch.arange(length), borders[1:], right=True).to(place.device)
    mask = (example[:, None] == example).tril()
    tensors = [torch.randn(1, heads, length, width, device=place.device).bfloat16()
               .requires_grad_() for heads in (8, 2, 2)]
    given = torch.randn(1, length, 8, width, device=place.device).bfloat16()
    borders = borders.to(place.device)
    module = torch.nn.Module()

    def ours():
        out, _ = segment_attention(module, *tensors, None, cu_seq_lens_q=borders)
        return out, *torch.autograd.grad(out, tensors, given)

    def masked():
        query, key, value = tensors
        shared = [part.repeat_interleave(4, dim=1) for part in (key, value)]
        out = scaled_dot_product_attention(query, *shared, mask).transpose(1, 2)
        return out, *torch.autograd.grad(out, tensors, given)

    off = [relative(one, other) for one, other in zip(ours(), masked())]
    found = dict(zip(('off', 'query_off', 'key_off', 'value_off'), off))
    found |= {'seconds': place.seconds(ours), 'masked_s': place.seconds(masked)}
    return found | {'passed': max(off) < 0.03}
