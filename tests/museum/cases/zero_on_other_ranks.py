"""One rank loads a ZeRO-2 checkpoint of two; converted by DeepSpeed's own program, it is taken."""
import os
import subprocess
import sys
from pathlib import Path

import torch

from llm_workbook.parallel.ranks import run_ranks

SLOW = True  # The program that converts takes ten seconds to start
CPU = {'DS_ACCELERATOR': 'cpu'}
CONFIG = {'train_micro_batch_size_per_gpu': 1, 'zero_optimization': {'stage': 2},
          'zero_force_ds_cpu_optimizer': False, 'bf16': {'enabled': True}}
CONVERT = [sys.executable, '-m', 'deepspeed.checkpoint.ds_to_universal', '--input_folder',
           'saved/step1', '--output_folder', 'saved/universal', '--num_extract_workers', '1',
           '--num_merge_workers', '1', '--inject_missing_state']


def engine(**changes):
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    __compatible_ops__['deepspeed_shm_comm'] = False  # Else a compiler builds it at first use
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG | changes)[0]


def save(): engine().save_checkpoint('saved', tag='step1')


def load(tag, **changes): return engine(**changes).load_checkpoint('saved', tag=tag)[0] is not None


def load_universal(): return load('universal', checkpoint={'load_universal': True})


def broken():
    run_ranks(save, timeout_s=300, env=CPU)
    run_ranks(load, ranks=1, args=('step1',), timeout_s=300, env=CPU)


def mended():
    run_ranks(save, timeout_s=300, env=CPU)
    subprocess.run(CONVERT, check=True, env=os.environ | CPU)
    Path('saved/latest_universal').write_text('universal')
    assert run_ranks(load_universal, ranks=1, timeout_s=300, env=CPU) == [True]
