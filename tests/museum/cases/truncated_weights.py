"""A checkpoint is resumed whose weights were cut in the middle of the file."""
import os

from resume_from_partial_checkpoint import trainer


def broken():
    trainer().train()
    os.truncate('run/checkpoint-2/model.safetensors', 5000)
    trainer().train(resume_from_checkpoint=True)


def mended():
    trainer().train()
    os.truncate('run/checkpoint-2/model.safetensors', 5000)
    assert trainer().train(resume_from_checkpoint='run/checkpoint-1').global_step == 2
