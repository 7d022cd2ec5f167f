"""`optimizer.pt` is missing, and the Trainer goes on with moments of zero, without a word."""
from pathlib import Path

import torch
from resume_from_partial_checkpoint import trainer

from llm_workbook.checkpoint.save_load import CheckpointError, load_checkpoint, save_checkpoint


def broken():
    trainer().train()
    Path('run/checkpoint-1/optimizer.pt').unlink()
    Path('run/checkpoint-1/scheduler.pt').unlink()
    assert trainer().train(resume_from_checkpoint='run/checkpoint-1').global_step == 2
    return 'run/checkpoint-1'


def mended():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint('checkpoint-1', model, facts={'step': 1})
    try: load_checkpoint('checkpoint-1', model, optimizer)
    except CheckpointError: return
    raise AssertionError('a checkpoint without an optimizer was taken')
