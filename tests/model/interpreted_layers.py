"""What `test_liger_layers` runs in a process whose Triton interprets kernels: `python -m` this,
with names of checks; their findings are printed as JSON."""
import json
import sys

import torch

from llm_workbook.config.recipe import Method, Precision
from llm_workbook.model.adapters import add_adapters
from llm_workbook.model.liger_layers import count_liger_layers, use_liger_layers
from llm_workbook.model.quantize import load_base
from llm_workbook.model.recompute import recompute_selectively
from tests.model.interpreted_head import filled_in, four_steps, off

KINDS = ('llama', 'mistral', 'qwen2', 'qwen3', 'gemma', 'gemma2', 'gemma3_text', 'phi3', 'granite',
         'smollm3', 'glm4', 'exaone4')


def made(model, ids) -> tuple[float, dict]:
    "A loss and its gradients."
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    slopes = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), slopes


def compared(plain, changed, ids) -> dict:
    "How far losses and gradients of two models are apart."
    (expected, slopes), (loss, found) = made(plain, ids), made(changed, ids)
    assert found.keys() == slopes.keys()
    one, other = (torch.cat([each[name].flatten() for name in slopes]) for each in (slopes, found))
    return {'loss_off': abs(loss / expected - 1),
            'gradients_off': float((other - one).norm() / one.norm())}


def built(kind: str, head='AutoModelForCausalLM'):
    "A random model of a family, whose norms are not all ones."
    import transformers
    from tests.model.test_loss_head import SIZES
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model = getattr(transformers, head).from_config(config, dtype=torch.float32,
                                                    attn_implementation='eager')
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1: parameter.add_(torch.randn_like(parameter) / 5)
    return model.train()


def families() -> dict:
    from tests.model.test_loss_head import IDS
    rows = {}
    for kind in KINDS:
        changed = built(kind)
        use_liger_layers(changed)
        rows[kind] = compared(built(kind), changed, IDS[:, :16])
        replaced, parts = count_liger_layers(changed)
        rows[kind]['left'] = parts - replaced
    return rows


def classifier() -> dict:
    plain, changed = (built('llama', 'AutoModelForSequenceClassification') for _ in range(2))
    use_liger_layers(changed)
    ids, labels = torch.arange(3, 43).view(2, 20), torch.tensor([0, 1])
    found = []
    for model in (plain, changed):
        model(input_ids=ids, labels=labels).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return {'gradients_off': off(found[1], found[0])}


def methods() -> dict:
    "On the packaged model, in float32: NumPy, and so the interpreter, has no bfloat16."
    cases = {'lora': ('lora', 'float32', False), 'lora, selective': ('lora', 'float32', True),
             'full, selective': ('full', 'float32', True), 'qlora': ('qlora', 'float32', False)}
    return {name: _method(*case) for name, case in cases.items()}


def _method(kind, compute, selective) -> dict:
    models = []
    for liger in (False, True):
        method = Method(kind=kind, dropout=0.0)
        model = load_base('tiny-base', method, Precision(compute=compute), device='cpu')
        if kind != 'full': model = add_adapters(model, method, seed=1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if 'lora_B' in name: parameter.fill_(0.01)
        if liger: use_liger_layers(model)
        if selective: recompute_selectively(model)
        models.append(model.train())
    return compared(*models, torch.arange(100, 164).view(2, 32))


def trained() -> dict:
    from llm_workbook import run_ranks
    return {kernels: run_ranks(losses, 2, (kernels,), timeout_s=240)[0]
            for kernels in ('liger', 'plain')}


def losses(kernels: str) -> tuple:
    "Of four checkpointed steps: how many modules are Liger's, and each loss."
    return four_steps({'model.kernels': kernels, 'sharding.activation_checkpointing': 'full'},
                      count_liger_layers)


if __name__ == '__main__':
    with filled_in(): print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
