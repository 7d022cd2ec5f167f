"""What `test_fused_head` runs in a process whose Triton interprets kernels: `python -m` this, with
names of checks; their findings are printed as JSON."""
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from unittest.mock import patch

import numpy
import torch

from llm_workbook.model import loss_head
from llm_workbook.model.loss_head import add_one_pass_head


def filled_in():
    """What Triton's interpreter lacks: a GPU is given a Python float as a number in float32, and
    has functions in CUDA's own library."""
    import triton.language as tl
    from liger_kernel.ops import cross_entropy, geglu, rms_norm
    from triton.runtime import interpreter
    usual = interpreter._implicit_cvt

    def convert(value):
        if type(value) is not float: return usual(value)
        handle = interpreter.TensorHandle(numpy.array([value], numpy.float32), tl.float32)
        return tl.core.tensor(handle, tl.float32)

    def tanh(x): return 2 * tl.sigmoid(2 * x) - 1

    def rsqrt(x): return 1 / tl.sqrt(x)

    stack = ExitStack()
    stack.enter_context(patch.object(interpreter, '_implicit_cvt', convert))
    for module, name, function in (
        (cross_entropy, 'tanh', tanh), (geglu, 'tanh', tanh), (rms_norm, 'rsqrt', rsqrt)):
        stack.enter_context(patch.object(module, name, function))
    return stack


def off(made: dict, expected: dict) -> float:
    assert made.keys() == expected.keys()
    return max(float((made[name] - gradient).norm() / (gradient.norm() + 1e-12))
               for name, gradient in expected.items())


def families() -> dict:
    from tests.model.test_loss_head import FAMILIES, IDS, LABELS, built, gradients
    rows = {}
    for name in FAMILIES:
        model = built(name)
        whole = model(input_ids=IDS, labels=LABELS, use_cache=False)
        whole.loss.backward()
        expected = gradients(model)
        add_one_pass_head(model, fused=True)
        ours = model(input_ids=IDS, labels=LABELS, fused_lm_head=True)
        ours.loss.backward()
        mask = LABELS[:, 1:] != -100
        hits = (whole.logits[:, :-1].argmax(-1) == IDS[:, 1:]) & mask
        rows[name] = {
            'loss_off': abs(ours.loss.item() / whole.loss.item() - 1),
            'gradients_off': off(gradients(model), expected),
            'hits_equal': torch.equal(ours.is_top1, hits),
            'entropy_unknown': bool(ours.entropy[mask].isnan().all())}
    return rows


def forgotten() -> dict:
    from tests.model.test_loss_head import IDS, LABELS, built
    model = built('gemma2')
    whole = model(input_ids=IDS, labels=LABELS).loss
    with patch.object(loss_head, '_CAPS', ()): add_one_pass_head(model, fused=True)
    made = model(input_ids=IDS, labels=LABELS, fused_lm_head=True).loss
    return {'loss_off': abs(float(made - whole))}


def methods() -> dict:
    from functools import partial

    from trl.trainer.utils import add_fused_lm_head

    from tests.model.test_loss_head import trained
    fused = partial(add_one_pass_head, fused=True)
    cases = {'full': ('full', 'float32'), 'lora': ('lora', 'float32'),
             'qlora, bfloat16': ('qlora', 'bfloat16')}
    rows = {}
    for name, case in cases.items():
        heads = add_fused_lm_head, fused
        (theirs, expected), (ours, made) = (trained(head, *case) for head in heads)
        losses_off = max(abs(a / b - 1) for a, b in zip(ours, theirs))
        rows[name] = {'off': max(losses_off, off(made, expected)),
                      'head_trains': any('embed' in key or 'lm_head' in key for key in made)}
    return rows


def rows() -> list:
    from liger_kernel.ops import fused_linear_cross_entropy as liger

    from llm_workbook.model.fused_head import kernel_scores
    seen = []
    usual = liger.liger_cross_entropy_kernel

    class Counting:
        def __getitem__(self, grid):
            seen[-1].append(grid[0])
            return usual[grid]

    with patch.object(liger, 'liger_cross_entropy_kernel', Counting()):
        for tokens, words, width in (40, 64, 64), (50, 321, 8), (257, 321, 32):
            seen.append([])
            kernel_scores((torch.randn(tokens, width), torch.randn(words, width), None),
                          torch.arange(tokens) % words)
    return [[sum(parts), max(parts)] for parts in seen]


def scores() -> dict:
    "Of one head by the kernel and by this library's tiles: log-probabilities, hits, gradients."
    from llm_workbook.model.loss_head import fused_scores, token_scores
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(words, 32, generator=draw) for words in (60, 321)]
    found = []
    for score in fused_scores, token_scores:
        hidden, weight = (tensor.clone().requires_grad_() for tensor in drawn)
        made = score(hidden, weight, torch.arange(60), outputs=('log_probs', 'entropy', 'is_top1'))
        made.log_probs.mean().backward()
        found.append((made, {'hidden': hidden.grad, 'weight': weight.grad}))
    (ours, gradients), (theirs, expected) = found
    return {'log_probs_off': float((ours.log_probs - theirs.log_probs).abs().max()),
            'gradients_off': off(gradients, expected),
            'hits_equal': torch.equal(ours.is_top1, theirs.is_top1),
            'entropy_unknown': bool(ours.entropy.isnan().all())}


def trained() -> dict:
    from llm_workbook import run_ranks
    found = {head: run_ranks(losses, 2, (head,), timeout_s=240)[0] for head in ('fused', 'chunked')}
    return {'heads': [seen for seen, _ in found.values()],
            **{head: made for head, (_, made) in found.items()}}


def losses(head: str) -> tuple:
    "Of four steps: which head computed them, and what it found."
    from llm_workbook.model.loss_head import loss_head_of
    return four_steps({'batch.loss_head': head}, loss_head_of)


def four_steps(changes: dict, look) -> tuple:
    "Steps of one rank of two by TRL's trainer: what `look` finds in the model, and each loss."
    from llm_workbook.config.recipe import Recipe
    from llm_workbook.model.architecture import load_tokenizer
    from llm_workbook.model.quantize import load_base
    from llm_workbook.parallel.backends import cpu_fsdp, fsdp_env
    from llm_workbook.training.trainer import make_trainer
    plain = Recipe(
        name='interpreted', model={'source': 'tiny-base'}, data={'source': 'sample-conversations'},
        method={'kind': 'full'}, cluster={'processes': 2}, precision={'compute': 'float32'},
        batch={'length': 64, 'micro': 2}, optimizer={'steps': 4}, intervals={'logging': 1})
    recipe = plain.changed(changes)
    os.environ.update(fsdp_env(recipe))
    draw = torch.Generator().manual_seed(0)
    rows = []
    for size in range(20, 52):  # Tokens, of which the first ten do not train
        ids = torch.randint(5, 1200, (size,), generator=draw).tolist()
        rows.append({'input_ids': ids, 'labels': [-100] * 10 + ids[10:]})
    model = load_base('tiny-base', recipe.method, recipe.precision, device='cpu')
    with filled_in(), cpu_fsdp(), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(recipe, folder, rows, model, load_tokenizer('tiny-base'))
        trainer.train()
        found = look(trainer.accelerator.unwrap_model(trainer.model))
        return found, [line['loss'] for line in trainer.state.log_history if 'loss' in line]


if __name__ == '__main__':
    with filled_in(): print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
