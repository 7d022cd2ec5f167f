"""One optimizer step of a full fine-tune over some chat-like examples, in a fresh process.

`python -m bench.programs.throughput KIND EXAMPLES`, where KIND is a key of `TRAINERS`. Every kind
begins with the same weights and sees the same examples once. Prints one JSON line.
"""
import json
import random
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path

LENGTH = 1024
PADDED = 4  # Rows of a padded batch
SHAPE = {'vocab_size': 32_000, 'hidden_size': 768, 'intermediate_size': 2048,
         'num_hidden_layers': 12, 'num_attention_heads': 12, 'num_key_value_heads': 4,
         'max_position_embeddings': LENGTH, 'tie_word_embeddings': True}


# What is trained

def model():
    "A Llama of 100 M parameters, untrained, in float32."
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


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
    "The library's trainer: few bins, attention inside of examples, tokens scored once."
    from llm_workbook import Recipe
    from llm_workbook.model.segments import register_segments
    from llm_workbook.training.packed_rows import pack_rows
    from llm_workbook.training.trainer import make_trainer
    numbered = [row | {'row': number} for number, row in enumerate(rows)]
    bins = len(pack_rows(numbered, LENGTH))
    recipe = Recipe(
        name='throughput', model={'source': 'tiny-base', 'attention': 'segments'},
        data={'source': 'sample-conversations'}, method={'kind': 'full'},
        cluster={'processes': 1}, sharding={'strategy': 'none'},
        batch={'length': LENGTH, 'packing': True, 'loss_head': 'one_pass', 'accumulation': bins},
        optimizer={'steps': 1, 'schedule': 'constant', 'warmup': 0.0, 'learning_rate': 1e-5})
    register_segments()
    base = model()
    base.set_attn_implementation('segments')
    return make_trainer(recipe, folder, rows, base)


def by_trl(rows, folder, **settings):
    "TRL's trainer, with `settings` beyond what every kind has."
    from datasets import Dataset, disable_progress_bars
    from llm_workbook.model.architecture import load_tokenizer
    from trl import SFTConfig, SFTTrainer
    disable_progress_bars()
    config = SFTConfig(
        output_dir=str(folder), use_cpu=True, max_length=LENGTH, max_steps=1, logging_steps=1,
        learning_rate=1e-5, lr_scheduler_type='constant', activation_checkpointing=False,
        save_strategy='no', report_to='none', disable_tqdm=True, **settings)
    return SFTTrainer(model(), config, train_dataset=Dataset.from_list(rows),
                      processing_class=load_tokenizer('tiny-base'))


def padded(rows, folder):
    "TRL as it comes: batches are padded to their longest row."
    return by_trl(rows, folder, per_device_train_batch_size=PADDED,
                  gradient_accumulation_steps=len(rows) // PADDED,
                  dataset_kwargs={'skip_prepare_dataset': True})


def packed(rows, folder):
    "TRL's packing, with as many micro-batches as it makes rows."
    from datasets import Dataset
    from trl import pack_dataset
    strategy = 'bfd_split'
    bins = len(pack_dataset(Dataset.from_list(rows), LENGTH, strategy))
    return by_trl(rows, folder, packing=True, packing_strategy=strategy,
                  per_device_train_batch_size=1, gradient_accumulation_steps=bins)


TRAINERS = {'ours': ours, 'packed': packed, 'padded': padded}


# What is measured

def resident_b(name: str) -> int:
    "Read a line of this process's status: VmRSS, or VmHWM, the most since it was set back."
    status = Path('/proc/self/status').read_text()
    return int(re.search(rf'^{name}:\s+(\d+)', status, re.M)[1]) * 1024


def warm(trainer) -> None:
    "One short row forward and back, so that what is loaded late is there."
    collated = trainer.data_collator([trainer.train_dataset[0]])
    short = {name: values[:, :16] for name, values in collated.items()
             if name in ('input_ids', 'labels')}
    trainer.model(**short, use_cache=False).loss.backward()
    trainer.model.zero_grad()


def main(kind: str, examples: str) -> None:
    "Print what one process has seen."
    warnings.simplefilter('ignore')
    rows = drawn(int(examples))
    useful = sum(label != -100 for row in rows for label in row['labels'])
    with tempfile.TemporaryDirectory() as folder:
        trainer = TRAINERS[kind](rows, Path(folder))
        warm(trainer)
        Path('/proc/self/clear_refs').write_text('5')  # Sets the highest back to what is there
        before_b, begin = resident_b('VmRSS'), time.monotonic()
        trainer.train()
        seconds = time.monotonic() - begin
        losses = [log['loss'] for log in trainer.state.log_history if 'loss' in log]
    print(json.dumps({
        'seconds': seconds, 'peak_b': resident_b('VmHWM') - before_b, 'loss': losses[0],
        'useful': useful, 'tokens': sum(len(row['input_ids']) for row in rows),
        'micro_batches': trainer.args.gradient_accumulation_steps}))


if __name__ == '__main__':
    main(*sys.argv[1:])
