"""Steps over some chat-like examples on one device, by one trainer: seconds, memory and losses.

`python -m bench.programs.device_speed JOB`, where JOB is JSON: `trainer` is `ours` or `trl`,
`recipe` what to train, `examples` how many rows, of which a step sees all, `steps` how many steps
there are. With `lengths` in place of examples, each step is one row of so many tokens, as long as
memory lasts; with `card_b` it is that of a card with so many bytes. Weights are random and of the
true shapes. Prints one JSON line.
"""
import json
import math
import os
import random
import sys
import tempfile
import time
import warnings

from bench.shared.models import build

TRL_ROWS = 8  # Of a batch, as SFTConfig has it


# What is trained on

def drawn(examples: int, longest: int, words: int) -> list[dict]:
    """Random words in rows of chat-like lengths.

    Their logarithm is spread normally, with a mean of 406 tokens and 2,204 at 99 %, as published
    chat data; the first 30 % of each are a question, which does not train.
    """
    draw, rows = random.Random(0), []
    for _ in range(examples):
        size = min(longest, max(16, round(draw.lognormvariate(5.6, 0.9))))
        ids = [draw.randrange(words) for _ in range(size)]
        question = 3 * size // 10
        rows.append({'input_ids': ids, 'labels': [-100] * question + ids[question:]})
    return rows


def whole(length: int, words: int) -> dict:
    "A row of random words that all train."
    ids = random.Random(length).choices(range(words), k=length)
    return {'input_ids': ids, 'labels': ids}


# Who trains

def ours(recipe, rows, folder):
    "The library's trainer, as the recipe says."
    from llm_workbook.model.compiled_blocks import compile_blocks
    from llm_workbook.model.segments import register_segments
    from llm_workbook.training.packed_rows import pack_rows
    from llm_workbook.training.trainer import make_trainer
    if recipe.model.attention == 'segments': register_segments()
    bins = len(rows)
    if recipe.batch.packing:
        bins = len(pack_rows([row | {'row': i} for i, row in enumerate(rows)], recipe.batch.length))
    passes = math.ceil(bins / recipe.batch.micro)
    recipe = recipe.changed({'batch.accumulation': passes})
    trainer = make_trainer(recipe, folder, rows, build(recipe, recipe.cluster.device), tokenizer())
    if recipe.model.kernels == 'compile': trainer.blocks = compile_blocks(trainer.model)
    return trainer


def trl(recipe, rows, folder):
    "TRL's trainer as SFTConfig leaves it, with the same weights, adapters, lengths and steps."
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer
    method = recipe.method
    adapters = LoraConfig(r=method.rank, lora_alpha=method.alpha, lora_dropout=method.dropout,
                          target_modules=method.targets, task_type='CAUSAL_LM')
    config = SFTConfig(output_dir=folder, use_cpu=recipe.cluster.device == 'cpu', report_to='none',
                       max_length=recipe.batch.length, max_steps=recipe.optimizer.steps,
                       logging_steps=1, save_strategy='no',
                       gradient_accumulation_steps=math.ceil(len(rows) / TRL_ROWS))
    base = build(recipe.changed({'model.attention': 'sdpa'}), recipe.cluster.device)
    return SFTTrainer(base, config, train_dataset=Dataset.from_list(rows),
                      processing_class=tokenizer(), peft_config=adapters)


TRAINERS = {'ours': ours, 'trl': trl}


def tokenizer():
    "The tokenizer that the trainers pad with; random words need no other."
    from llm_workbook.model.architecture import load_tokenizer
    return load_tokenizer('tiny-base')


# What is measured

class Meter:
    "Seconds and highest memory of each step."
    def __init__(self, device: str):
        self.on_gpu, self.steps = device == 'cuda', []

    def begin(self) -> None:
        "Start the clock of a step."
        import torch
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.began_s = time.perf_counter()

    def end(self) -> None:
        "Note a step."
        import torch
        if self.on_gpu: torch.cuda.synchronize()
        step = {'seconds': time.perf_counter() - self.began_s}
        self.steps.append(step)
        if not self.on_gpu: return
        free, total = torch.cuda.mem_get_info()
        step |= {'allocated_b': torch.cuda.max_memory_allocated(),
                 'reserved_b': torch.cuda.max_memory_reserved(), 'driver_b': total - free}


def follower(meter):
    "A callback of transformers' trainer that reads `meter`."
    from transformers import TrainerCallback

    class Follower(TrainerCallback):
        def on_step_begin(self, args, state, control, **more): meter.begin()

        def on_step_end(self, args, state, control, **more): meter.end()
    return Follower()


def weights(model) -> int:
    "Count the parameters of a model without its adapters; of a packed one as if it were not."
    count = 0
    for name, parameter in model.named_parameters():
        if 'lora_' in name: continue
        state = getattr(parameter, 'quant_state', None)
        count += math.prod(state.shape) if state is not None else parameter.numel()
    return count


def card() -> str | None:
    "The name of the GPU, as its driver gives it."
    import torch
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def in_force(trainer) -> dict:
    "What a trainer does, as words and numbers."
    args = trainer.args
    said = {'rows': args.per_device_train_batch_size, 'passes': args.gradient_accumulation_steps,
            'recomputes': args.gradient_checkpointing, 'optimizer': args.optim,
            'attention': trainer.model.config._attn_implementation,
            'allocator': os.environ.get('PYTORCH_CUDA_ALLOC_CONF')
            or os.environ.get('PYTORCH_ALLOC_CONF')}
    blocks = getattr(trainer, 'blocks', None)
    if blocks:
        blocks.update()
        said |= {'programs': len(blocks.compilations), 'breaks': len(blocks.breaks)}
    return said


def trained(job: dict) -> dict:
    "Train on the examples; what was seen."
    from llm_workbook import Recipe
    recipe = Recipe.model_validate(job['recipe']).changed({'optimizer.steps': job['steps']})
    rows = drawn(job['examples'], recipe.batch.length, job['words'])
    meter = Meter(recipe.cluster.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TRAINERS[job['trainer']](recipe, rows, folder)
        trainer.add_callback(follower(meter))
        trainer.train()
        losses = [log['loss'] for log in trainer.state.log_history if 'loss' in log]
        found = {'weights': weights(trainer.model), 'card': card(),
                 'settings': in_force(trainer)}
    useful = sum(label != -100 for row in rows for label in row['labels'][1:])
    return found | {'steps': meter.steps, 'losses': losses, 'useful': useful,
                    'tokens': sum(len(row['input_ids']) for row in rows)}


def limit(card_b: int) -> None:
    """Leave torch what a card with so many bytes would, beside what the driver keeps.

    A sixteenth of a GiB is for kernels that are loaded later.
    """
    import torch
    free, total = torch.cuda.mem_get_info()
    kept_b = total - free - torch.cuda.memory_reserved() + 2**26
    torch.cuda.set_per_process_memory_fraction(min(1., (card_b - kept_b) / total))


def stretched(job: dict) -> dict:
    "Take a step of one row, for each of the lengths, until memory is at its end."
    import torch
    from llm_workbook import Recipe
    from llm_workbook.training.trainer import make_trainer
    recipe = Recipe.model_validate(job['recipe'])
    rows = [whole(length, job['words']) for length in job['lengths']]
    recipe = recipe.changed({'optimizer.steps': len(rows), 'batch.length': max(job['lengths'])})
    meter, stopped = Meter(recipe.cluster.device), None
    with tempfile.TemporaryDirectory() as folder:
        base = build(recipe, recipe.cluster.device)
        trainer = make_trainer(recipe, folder, rows, base, tokenizer())
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
        trainer.add_callback(follower(meter))
        if 'card_b' in job: limit(job['card_b'])
        try: trainer.train()
        except torch.OutOfMemoryError as error: stopped = str(error)[:300]
        found = {'weights': weights(trainer.model), 'card': card(),
                 'settings': in_force(trainer)}
    steps = [step | {'length': length} for step, length in zip(meter.steps, job['lengths'])]
    return found | {'steps': steps, 'stopped': stopped}


def main(job: dict) -> None:
    "Print what one process has seen."
    warnings.filterwarnings('ignore')
    if job['recipe']['method']['kind'] == 'qlora': import llm_workbook.model.quantize  # noqa: F401
    import datasets
    import transformers
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    print(json.dumps(stretched(job) if 'lengths' in job else trained(job)), flush=True)


if __name__ == '__main__':
    main(json.loads(sys.argv[1]))
