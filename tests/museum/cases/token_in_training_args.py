"""The token given to TrainingArguments is masked when printed, and plain in what every save
writes."""
import torch
from transformers import TrainingArguments

TOKEN = 'hf' + '_' + 'Canary' * 6


def save(**options):
    arguments = TrainingArguments('run', report_to='none', use_cpu=True, **options)
    torch.save(arguments, 'run/training_args.bin')
    assert TOKEN not in str(arguments)
    return TOKEN.encode() in open('run/training_args.bin', 'rb').read()


def broken():
    import os
    os.makedirs('run')
    assert save(hub_token=TOKEN)
    return 'run'


def mended():
    import os
    os.makedirs('run')
    os.environ['HF_TOKEN'] = TOKEN  # The Hub's library reads it from there
    assert not save()
