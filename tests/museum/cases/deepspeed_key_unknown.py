"""One letter is missing in `zero_optimization`, and DeepSpeed trains with stage 0."""
import json
from pathlib import Path

import torch

from llm_workbook.parallel.ranks import run_ranks

CPU = {'DS_ACCELERATOR': 'cpu'}


def stage(config):
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    __compatible_ops__['deepspeed_shm_comm'] = False  # Else a compiler builds it at first use
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine.zero_optimization_stage()


def config(key):
    return {'train_batch_size': 1, key: {'stage': 2}, 'zero_force_ds_cpu_optimizer': False}


def broken():
    typo = config('zero_optimizaton')
    assert run_ranks(stage, ranks=1, args=(typo,), timeout_s=300, env=CPU) == [0]
    Path('ds_config.json').write_text(json.dumps(typo))
    return 'ds_config.json'


def mended():
    right = config('zero_optimization')
    assert run_ranks(stage, ranks=1, args=(right,), timeout_s=300, env=CPU) == [2]
