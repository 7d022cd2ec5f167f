"""The Trainer keeps the logits of all held-out rows for its metrics; the loss alone needs none."""
import resource

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from llm_workbook.files import asset
from llm_workbook.parallel.ranks import run_ranks

SLOW = True  # Several ranks or models, in seconds of processor


def leave_room(room_b):
    "Let this process have so much more memory than it has now."
    with open('/proc/self/statm') as file: pages = int(file.read().split()[0])
    limit_b = pages * resource.getpagesize() + room_b
    resource.setrlimit(resource.RLIMIT_AS, (limit_b, limit_b))


def evaluate(loss_only):
    import torch.distributed as dist
    dist.destroy_process_group()
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    ids = torch.zeros(128, dtype=torch.int64)
    rows = [{'input_ids': ids, 'labels': ids}] * 128
    arguments = TrainingArguments(
        'run', use_cpu=True, report_to=[], prediction_loss_only=loss_only,
        per_device_eval_batch_size=8, disable_tqdm=True)
    trainer = Trainer(model, arguments, eval_dataset=rows, compute_metrics=lambda kept: {})
    trainer.evaluate(rows[:8])
    leave_room(60 * 2**20)
    return trainer.evaluate()['eval_loss'] > 0


def broken():
    run_ranks(evaluate, 1, (False,))


def mended():
    assert run_ranks(evaluate, 1, (True,)) == [True]
