"""A weight is NaN, the Trainer logs a loss of 0 and saves the model at the end."""
import torch
from resume_from_partial_checkpoint import trainer
from transformers import TrainerCallback


class StopAtNan(TrainerCallback):
    "What a run of this library does: end before the update."
    def on_pre_optimizer_step(self, arguments, state, control, model, **_):
        for parameter in model.parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                raise FloatingPointError('a gradient is not finite')


def train(*callbacks):
    made = trainer()
    made.args.logging_steps = 1
    with torch.no_grad(): made.model.lm_head.weight[0, 0] = float('nan')
    for callback in callbacks: made.add_callback(callback)
    return made.train()


def broken():
    assert train().training_loss == 0
    return 'run'


def mended():
    try: train(StopAtNan)
    except FloatingPointError: return
    raise AssertionError('the run went on')
