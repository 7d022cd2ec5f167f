"""One optimizer step of a full fine-tune over some chat-like examples, by several trainers in turn.

`python -m bench.programs.throughput EXAMPLES KIND...`, where a KIND is a key of `TRAINERS`. Every
turn is a fork of one process, which has imported everything and computed nothing. It begins with
the same weights and sees the same examples once. Prints one JSON line for each turn.
"""
import ctypes
import gc
import json
import math
import multiprocessing
import random
import re
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

LENGTH = 1024
DEFAULT_ROWS = 8  # Of a batch, as SFTConfig has it
JOINED_ROWS = 4  # Packed rows of ours that are computed at once, as one row without a mask
LEARNING_RATE = 2e-5  # As SFTConfig has it
SHAPE = {'vocab_size': 32_000, 'hidden_size': 768, 'intermediate_size': 2048,
         'num_hidden_layers': 12, 'num_attention_heads': 12, 'num_key_value_heads': 4,
         'max_position_embeddings': LENGTH, 'tie_word_embeddings': True}
SMALL = {'hidden_size': 384, 'intermediate_size': 1024, 'num_hidden_layers': 6,
         'num_attention_heads': 6, 'num_key_value_heads': 2}  # For a pass over many rows


# What is trained

def model(**changes):
    "A Llama of 100 M parameters, or of another shape, untrained, in float32."
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | changes))


def drawn(examples: int) -> list[dict]:
    """Random words in rows of chat-like lengths.

    Their logarithm is spread normally, with a mean of 406 tokens and 2,204 at 99 %, as published
    chat data; the first 30 % of each are a question, which does not train.
    """
    draw, rows = random.Random(0), []
    for _ in range(examples):
        size = min(LENGTH, max(16, round(draw.lognormvariate(5.6, 0.9))))
        words = [draw.randrange(SHAPE['vocab_size']) for _ in range(size)]
        question = 3 * size // 10
        rows.append({'input_ids': words, 'labels': [-100] * question + words[question:]})
    return rows


# Who trains it

def ours(rows, folder):
    "The library's trainer: few bins, attention inside of examples, tokens scored once, compiled."
    from llm_workbook import Recipe
    from llm_workbook.model.compiled_blocks import compile_blocks
    from llm_workbook.model.segments import register_segments
    from llm_workbook.training.packed_rows import pack_rows
    from llm_workbook.training.trainer import make_trainer
    numbered = [row | {'row': number} for number, row in enumerate(rows)]
    bins = len(pack_rows(numbered, LENGTH))
    recipe = Recipe(
        name='throughput', model={'source': 'tiny-base', 'attention': 'segments',
                                    'kernels': 'compile'},
        data={'source': 'sample-conversations'}, method={'kind': 'full'},
        cluster={'processes': 1}, sharding={'strategy': 'none'},
        batch={'length': LENGTH, 'packing': True, 'loss_head': 'one_pass', 'micro': JOINED_ROWS,
               'accumulation': math.ceil(bins / JOINED_ROWS)},
        optimizer={'kind': 'adamw_fused', 'steps': 1, 'warmup': 0.0,
                   'learning_rate': LEARNING_RATE, 'schedule': 'linear'})
    register_segments()
    base = model()
    base.set_attn_implementation('segments')
    trainer = make_trainer(recipe, folder, rows, base)
    trainer.blocks = compile_blocks(trainer.model)
    return trainer


def by_trl(rows, folder, **settings):
    """TRL's trainer as SFTConfig leaves it, but for `settings` and what any run here needs.

    That is a CPU, one step over all rows, its loss, and nothing saved.
    """
    from datasets import Dataset
    from llm_workbook.model.architecture import load_tokenizer
    from trl import SFTConfig, SFTTrainer
    config = SFTConfig(output_dir=str(folder), use_cpu=True, max_steps=1, logging_steps=1,
                       save_strategy='no', **settings)
    return SFTTrainer(model(), config, train_dataset=Dataset.from_list(rows),
                      processing_class=load_tokenizer('tiny-base'))


def default(rows, folder):
    "TRL with all its defaults: batches of 8, padded to the longest row, and recomputed."
    return by_trl(rows, folder, gradient_accumulation_steps=math.ceil(len(rows) / DEFAULT_ROWS))


def packed(rows, folder):
    """TRL's packing at its best on a CPU: one packed row at a time, and nothing recomputed.

    Two rows at a time took 9 % more time of the processor and 1.7 times the memory.
    """
    from datasets import Dataset
    from trl import pack_dataset
    bins = len(pack_dataset(Dataset.from_list(rows), LENGTH, 'bfd'))
    return by_trl(rows, folder, packing=True, per_device_train_batch_size=1,
                  gradient_accumulation_steps=bins, activation_checkpointing=False)


def one_pass(rows, folder, **batch):
    "The library's trainer on a small model: one pass over the rows, a step for each batch."
    from llm_workbook import Recipe
    from llm_workbook.model.segments import register_segments
    from llm_workbook.training.packed_rows import pack_rows
    from llm_workbook.training.trainer import make_trainer
    numbered = [row | {'row': number} for number, row in enumerate(rows)]
    count = len(pack_rows(numbered, LENGTH)) if batch.get('packing') else len(rows)
    recipe = Recipe(
        name='grouped', model={'source': 'tiny-base', 'attention': 'segments'},
        data={'source': 'sample-conversations'}, method={'kind': 'full'},
        cluster={'processes': 1}, sharding={'strategy': 'none'},
        batch={'length': LENGTH, 'loss_head': 'one_pass'} | batch,
        optimizer={'kind': 'adamw_fused', 'steps': math.ceil(count / batch['micro'])})
    register_segments()
    base = model(**SMALL)
    base.set_attn_implementation('segments')
    return make_trainer(recipe, folder, rows, base)


TRAINERS = {
    'ours': ours, 'packed': packed, 'default': default,
    'padded': partial(one_pass, micro=DEFAULT_ROWS),
    'grouped': partial(one_pass, micro=DEFAULT_ROWS, group_by_length=True),
    'filled': partial(one_pass, micro=JOINED_ROWS, packing=True)}


# What is measured

# Of a trainer's arguments; `packing` is TRL's, and off where the library has packed the rows
SETTINGS = ('per_device_train_batch_size', 'gradient_accumulation_steps', 'gradient_checkpointing',
            'bf16', 'max_length', 'packing', 'packing_strategy', 'padding_free', 'optim',
            'learning_rate', 'lr_scheduler_type', 'weight_decay', 'max_grad_norm',
            'torch_compile', 'use_liger_kernel')


def settings_of(trainer) -> dict:
    "What is in force in a trainer, as words and numbers."
    import torch
    args = {name: getattr(trainer.args, name) for name in SETTINGS}
    said = {name: getattr(value, 'value', value) for name, value in args.items()}
    parameter = next(trainer.model.parameters())
    return said | {'attention': trainer.model.config._attn_implementation,
                   'weights': str(parameter.dtype), 'threads': torch.get_num_threads()}


def resident_b(name: str) -> int:
    "Read a line of this process's status: VmRSS, or VmHWM, the most since it was set back."
    status = Path('/proc/self/status').read_text()
    return int(re.search(rf'^{name}:\s+(\d+)', status, re.M)[1]) * 1024


def return_freed() -> None:
    """Give the system back what is free, so that no trainer's first pass counts in its peak.

    What lives on is frozen: `train` begins with a collection of its own, which would look at
    600,000 objects again for a quarter of a second, and that is no part of a step.
    """
    gc.collect()
    gc.freeze()
    ctypes.CDLL(None).malloc_trim(0)


def warm(trainer) -> None:
    """Forward and back, twice, so that what is loaded late is there and blocks are compiled: for
    rows of any length, since the second is longer, and of any examples.

    Compiled blocks need rows that are about as long as those of the step: of shorter ones torch
    concludes that a row has 4,096 tokens at most.
    """
    rows = JOINED_ROWS if compiled(trainer) else 1
    collated = trainer.data_collator([trainer.train_dataset[place] for place in range(rows)])
    width = collated['input_ids'].shape[1]
    for missing in width // 3, 8:
        with trainer.accelerator.autocast():
            loss = trainer.model(**shortened(collated, missing), use_cache=False).loss
        loss.backward()
    trainer.model.zero_grad()


def shortened(collated: dict, missing: int) -> dict:
    "What a model reads of a batch, without its last tokens."
    import torch
    read = 'input_ids', 'labels', 'position_ids'
    short = {name: values[:, :-missing] for name, values in collated.items() if name in read}
    if 'cu_seq_lens_q' not in collated: return short
    length = short['input_ids'].shape[1]
    borders = collated['cu_seq_lens_q'].clamp(max=length).unique().to(torch.int32)
    return short | {'cu_seq_lens_q': borders, 'cu_seq_lens_k': borders,
                    'max_length_q': LENGTH, 'max_length_k': LENGTH}


def compiled(trainer) -> dict:
    "What was compiled so far: programs and seconds; empty where nothing is."
    blocks = getattr(trainer, 'blocks', None)
    if not blocks: return {}
    blocks.update()
    return {'programs': len(blocks.compilations), 'breaks': len(blocks.breaks),
            'compile_s': round(blocks.seconds, 1)}


def note_widths(trainer) -> list[int]:
    "Positions of each batch that the trainer will take; filled while it trains."
    seen, collate = [], trainer.data_collator
    def noted(rows):
        batch = collate(rows)
        seen.append(batch['input_ids'].numel())
        return batch
    trainer.data_collator = noted
    return seen


def turn(kind: str, examples: int) -> dict:
    "What one process has seen."
    import datasets
    warnings.simplefilter('ignore')
    datasets.disable_progress_bars()
    rows = drawn(examples)
    useful = sum(label != -100 for row in rows for label in row['labels'])
    with tempfile.TemporaryDirectory() as folder:
        trainer = TRAINERS[kind](rows, Path(folder))
        before_b = resident_b('VmRSS')
        warm(trainer)
        before_step = compiled(trainer)
        return_freed()
        widths = note_widths(trainer)
        Path('/proc/self/clear_refs').write_text('5')  # Sets the highest back to what is there
        begin = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - begin
        losses = [log['loss'] for log in trainer.state.log_history if 'loss' in log]
        settings = settings_of(trainer) | before_step
        if compiled(trainer) != before_step:
            raise RuntimeError(f'compiled inside of the step: {trainer.blocks.again}')
    return {'kind': kind, 'seconds': seconds, 'peak_b': resident_b('VmHWM') - before_b,
            'loss': losses[0], 'useful': useful, 'positions': sum(widths),
            'tokens': sum(len(row['input_ids']) for row in rows), 'settings': settings}


def main(examples: str, *kinds: str) -> None:
    "Take the turns, one after another."
    import llm_workbook.training.trainer, peft, transformers, trl  # noqa: E401, F401
    transformers.logging.set_verbosity_error()
    forks = multiprocessing.get_context('fork')
    for kind in kinds:
        with forks.Pool(1) as pool: seen = pool.apply(turn, (kind, int(examples)))
        print(f'\n{json.dumps(seen)}', flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
