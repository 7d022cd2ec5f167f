"""Random models as a recipe wants them: packed, fused, in memory that is not counted; and rows."""
import mmap
from functools import partial


def outside(shape, dtype):
    "A tensor in memory that malloc does not count, and that takes pages where it is written."
    import torch
    size = torch.Size(shape).numel()
    size_b = max(1, size * dtype.itemsize)
    memory = mmap.mmap(-1, size_b, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=size).view(shape)


def one_block(model, dtype, device: str):
    """Make memory on `device` that every parameter of `model` is given the first part of.

    It is as large as the largest of them. What is sharded is copied out of it, so a model that
    fits no device is built there without a copy on the host.
    """
    import torch
    largest = max(parameter.numel() for parameter in model.parameters())
    block = torch.empty(largest, dtype=dtype, device=device).normal_(0, 0.02)

    def make(shape, dtype): return block[:torch.Size(shape).numel()].view(shape)
    return make


def place(recipe, model, dtype, device: str):
    "Say where the parameters of a recipe's model are made, and whether each has its own numbers."
    import torch
    sharded = recipe.sharding.strategy == 'fsdp2'
    if device == 'cpu': return (outside if sharded else torch.empty), True
    if sharded: return one_block(model, dtype, device), False
    return partial(torch.empty, device=device), True


def build(recipe, device: str = 'cpu', blank: bool = False):
    """A random model, or one of zeros, packed as `recipe` wants it; on `device` from the start.

    On a CPU, where it will be sharded it waits in memory that is not counted.
    """
    import torch
    from llm_workbook.model.architecture import configuration, skeleton
    full, packed = recipe.method.kind == 'full', recipe.method.kind == 'qlora'
    dtype = getattr(torch, recipe.precision.master if full else recipe.precision.compute)
    name, raw = configuration(recipe.model.source, recipe.model.revision)
    model = skeleton(raw, name)
    model.set_attn_implementation(recipe.model.attention)
    model.config.dtype = dtype
    make, own = place(recipe, model, dtype, device)
    staged = make
    if packed and own:  # What is packed away is no memory of a step, and may not fit the device
        staged = outside if device == 'cpu' else one_block(model, dtype, device)
    fill(model, staged, dtype)
    torch.manual_seed(0)
    if own and not blank and (staged is make or device == 'cpu'):
        with torch.no_grad(): model.apply(model._init_weights)
    if packed: pack(model, recipe, device)
    if packed and own:
        for parameter in model.parameters():
            parameter.data = make(parameter.shape, dtype=parameter.dtype).copy_(parameter.data)
    return model.train()


def fill(model, make, dtype) -> None:
    "Give the shapes of a model memory of `make`; a parameter that two modules share is made once."
    import torch
    parameters = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None: continue
            if id(old) not in parameters:
                new = make(old.shape, dtype=dtype)
                parameters[id(old)] = torch.nn.Parameter(new, old.requires_grad)
            module._parameters[name] = parameters[id(old)]
        for name, old in module._buffers.items():
            module._buffers[name] = torch.zeros(old.shape, dtype=old.dtype)


def rows(recipe, vocab: int, steps: int) -> list[dict]:
    "As many rows of `batch.length` tokens as the steps take; packed ones hold two, pairs have two."
    import torch
    examples = 2 if recipe.batch.packing else 1
    shape = recipe.global_batch * steps * examples, recipe.batch.length // examples
    ids = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(0)).tolist()
    if recipe.method.objective == 'dpo': return [pair(row) for row in ids]
    return [{'input_ids': row, 'labels': row} for row in ids]


def pair(row: list[int]) -> dict:
    "A full row as the better of two answers; the other is shorter, and will be padded."
    from llm_workbook.training.trainer_rows import PAIR_KEYS
    other = row[::-1][:-(len(row) // 4)]
    return dict(zip(PAIR_KEYS, (row, row, other, other)))


def fuse(model, head: str = 'chunked') -> None:
    "Give `model` the head and loss that TRL's SFTTrainer uses, or those of one pass."
    from llm_workbook.model.loss_head import add_one_pass_head
    from trl.trainer.utils import add_fused_lm_head
    add_head = add_one_pass_head if head == 'one_pass' else add_fused_lm_head
    add_head(model, outputs=('log_probs', 'entropy', 'is_top1'))
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, fused_lm_head=True, **kwargs)


def borders(recipe, device) -> dict:
    "Three examples in a row, said to attention that takes borders."
    import torch
    batch = recipe.batch
    if recipe.model.attention != 'segments' or batch.micro > 1: return {}
    begins = [0, batch.length // 2, 3 * batch.length // 4, batch.length]
    return {'cu_seq_lens_q': torch.tensor(begins, dtype=torch.int32, device=device)}


def step(model, optimizer, accelerator, vocab: int, recipe) -> None:
    "Forward and backward as often as the recipe accumulates, clip, update."
    import contextlib
    import torch
    batch, device = recipe.batch, accelerator.device
    given = {'use_cache': False}
    if batch.packing:  # Two examples in each row
        positions = torch.arange(batch.length // 2).repeat(batch.micro, 2)
        given['position_ids'] = positions.to(device)
    for i in range(batch.accumulation):
        ids = torch.randint(0, vocab, (recipe.pass_rows, batch.length)).to(device)
        count = torch.tensor(ids.numel() * batch.accumulation, device=device)
        last = i == batch.accumulation - 1
        inputs = {'input_ids': ids, 'labels': ids} | borders(recipe, device)
        syncs = last or recipe.sharding.sync_each_batch
        with contextlib.nullcontext() if syncs else accelerator.no_sync(model):
            if recipe.method.objective == 'dpo': loss = loss_of_pairs(model, inputs, recipe)
            else: loss = model(**inputs, num_items_in_batch=count, **given).loss
            accelerator.backward(loss)
        del loss
    if recipe.optimizer.clip: accelerator.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
    optimizer.step()
    optimizer.zero_grad()


def mask_of(ids, recipe):
    "Ones; of pairs the second half of the rows is shorter."
    import torch
    mask = torch.ones_like(ids)
    if recipe.method.objective == 'dpo': mask[len(ids) // 2:, -(ids.shape[1] // 4):] = 0
    return mask


def loss_of_pairs(model, inputs: dict, recipe):
    "The loss of a preference run, with a reference of zeros."
    import torch
    from llm_workbook.training.preferences import pair_scores
    mask = mask_of(inputs['input_ids'], recipe)
    log_probs = model(**inputs, attention_mask=mask, use_cache=False).log_probs.sum(-1)
    reference = torch.zeros(len(log_probs), device=log_probs.device)
    return pair_scores(log_probs, reference, recipe.method.beta).losses.mean()


def judge(model, vocab: int, recipe) -> None:
    "Judge rows as a run judges those that are held out: without gradients, and the loss in tiles."
    import torch
    from llm_workbook.checkpoint.sharded_files import unwrapped_parameters
    model.eval()
    with torch.no_grad():
        ids = torch.randint(0, vocab, (recipe.pass_rows, recipe.batch.length))
        mask = mask_of(ids, recipe)
        output = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False)
        float(output.log_probs.sum())
    del output
    model.train()
    unwrapped_parameters(model)


def pack(model, recipe, device: str = 'cpu') -> None:
    "Put an NF4 layer in the place of every linear layer but the head, one by one, on `device`."
    import bitsandbytes as bnb
    import torch
    from llm_workbook.model.quantize import keep_payload
    method, compute = recipe.method, getattr(torch, recipe.precision.compute)
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)
             and m is not model.get_output_embeddings()]
    for name in names:
        old = model.get_submodule(name)
        new = bnb.nn.Linear4bit(old.in_features, old.out_features, bias=False,
                                compute_dtype=compute, quant_type='nf4',
                                compress_statistics=method.double_quant,
                                quant_storage=getattr(torch, method.storage), device='meta')
        new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type='nf4',
                                       module=new,
                                       compress_statistics=method.double_quant,
                                       quant_storage=getattr(torch, method.storage))
        model.set_submodule(name, new.to(device))
        del old, new
    keep_payload(model)
    model.is_loaded_in_4bit = True  # As a load from disk says it: PEFT chooses its layer by this
