"""A job that is queued again always passes `resume_from_checkpoint=True`; its first start has
none."""
from resume_from_partial_checkpoint import trainer
from transformers.trainer_utils import get_last_checkpoint


def broken():
    trainer().train(resume_from_checkpoint=True)


def mended():
    from pathlib import Path
    Path('run').mkdir()
    for _ in 'first', 'second':
        assert trainer().train(resume_from_checkpoint=get_last_checkpoint('run')).global_step == 2
