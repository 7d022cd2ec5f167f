"""Only one rank is told to stop: it saves while the other sums gradients, and they never meet
again."""
import os
import signal
import time

from llm_workbook.parallel.ranks import RankError, run_ranks

ENV = {'ACCELERATE_USE_CPU': 'true'}
SLOW = True  # The Trainer waits three seconds between the signal and its save


def train(told):
    import torch.distributed as dist
    from resume_from_partial_checkpoint import trainer
    from transformers import TrainerCallback

    class Told(TrainerCallback):
        def on_step_begin(self, arguments, state, control, **_):
            time.sleep(0.1)
            if state.global_step == 2 and dist.get_rank() in told:
                os.kill(os.getpid(), signal.SIGTERM)

    made = trainer(max_steps=80, enable_jit_checkpoint=True, save_steps=1000)
    made.add_callback(Told())
    made.train()
    return made.state.global_step


def broken():
    try: run_ranks(train, args=([1],), env=ENV, timeout_s=20)
    except RankError: return 'run'
    raise AssertionError('the ranks agreed')


def mended():
    steps = run_ranks(train, args=([0, 1],), env=ENV, timeout_s=60)
    assert steps[0] == steps[1] < 80
