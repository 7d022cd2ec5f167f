"""The file `latest` is gone: `load_checkpoint` warns, returns nothing, and training begins anew."""
from pathlib import Path

import torch

from llm_workbook.parallel.ranks import run_ranks

CPU = {'DS_ACCELERATOR': 'cpu'}


def save_and_load(tag):
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    __compatible_ops__['deepspeed_shm_comm'] = False  # Else a compiler builds it at first use
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer,
                                      config={'train_batch_size': 1})
    engine.save_checkpoint('checkpoints', tag='step1')
    Path('checkpoints/latest').unlink()
    with open('log.txt', 'w') as log:
        from deepspeed.utils import logger
        from logging import StreamHandler
        logger.addHandler(StreamHandler(log))
        return engine.load_checkpoint('checkpoints', tag=tag)[0]


def broken():
    assert run_ranks(save_and_load, ranks=1, args=(None,), timeout_s=300, env=CPU) == [None]
    return 'log.txt'


def mended():
    loaded, = run_ranks(save_and_load, ranks=1, args=('step1',), timeout_s=300, env=CPU)
    assert loaded is not None
