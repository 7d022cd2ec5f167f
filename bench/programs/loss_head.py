"""Score tokens and make the gradients of hidden states and head, in a fresh process.

`python -m bench.programs.loss_head HEAD TOKENS WORDS WIDTH`, where HEAD is `ours`, `trl`, or
`errors` for the distance of both from float32. Prints one JSON line.
"""
import json
import re
import sys
import time
from pathlib import Path

from bench.shared.heads import exact

OUTPUTS = 'entropy', 'is_top1'  # What TRL's trainer asks for besides the log-probabilities


def drawn(tokens: int, words: int, width: int):
    "Hidden states of a last norm, the head of an untrained model, and words, all at random."
    import torch
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).bfloat16().requires_grad_()
    weight = torch.randn(words, width).mul_(.02).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(words, (tokens,))


def ours(hidden, weight, targets):
    "Log-probabilities by the library."
    from llm_workbook.model.loss_head import token_scores
    return token_scores(hidden, weight, targets, outputs=('log_probs', *OUTPUTS)).log_probs


def trl(hidden, weight, targets):
    "Log-probabilities by TRL, with the tiles of its trainer."
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as words
    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, words, None, 1.0,
                                        OUTPUTS)[0]


HEADS = {'ours': ours, 'trl': trl}


def step(head, hidden, weight, targets) -> None:
    "The mean loss, and back."
    hidden.grad = weight.grad = None
    (-HEADS[head](hidden, weight, targets).mean()).backward()


def resident_b(name: str) -> int:
    "Read a line of this process's status: VmRSS, or VmHWM, the most since it was set back."
    status = Path('/proc/self/status').read_text()
    return int(re.search(rf'^{name}:\s+(\d+)', status, re.M)[1]) * 1024


def timed(head: str, sizes: list[int]) -> dict:
    "One step after a small one, which loads what is loaded late."
    step(head, *drawn(8, 64, 16))
    tensors = drawn(*sizes)
    Path('/proc/self/clear_refs').write_text('5')  # Sets the highest back to what is there
    before_b, begin = resident_b('VmRSS'), time.monotonic()
    step(head, *tensors)
    seconds = time.monotonic() - begin
    return {'seconds': seconds, 'peak_b': resident_b('VmHWM') - before_b}


def errors(sizes: list[int]) -> dict:
    "How far the gradients of each head are from float32, as a share of their size."
    hidden, weight, targets = drawn(*sizes)
    expected, found = exact(hidden, weight, targets), {}
    for head in HEADS:
        step(head, hidden, weight, targets)
        for name, made, gradient in zip(('hidden', 'head'), (hidden.grad, weight.grad), expected):
            off = (made.float() - gradient).norm() / gradient.norm()
            found[f'{head}_{name}_error'] = round(off.item(), 5)
    return found


def main(head: str, *sizes: str) -> None:
    "Print what one process has seen."
    numbers = [int(size) for size in sizes]
    print(json.dumps(errors(numbers) if head == 'errors' else timed(head, numbers)))


if __name__ == '__main__':
    main(*sys.argv[1:])
