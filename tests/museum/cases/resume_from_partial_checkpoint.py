"""The newest checkpoint was cut off; the Trainer takes it for its number, and none before it."""
from pathlib import Path

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from llm_workbook.files import asset


def trainer(**options):
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    row = {'input_ids': [5, 6, 7], 'labels': [5, 6, 7]}
    options = {'max_steps': 2, 'save_steps': 1, 'report_to': 'none', 'use_cpu': True,
               'disable_tqdm': True} | options
    return Trainer(model, TrainingArguments('run', **options), train_dataset=[row] * 4)


def cut_off_newest():
    trainer().train()
    for file in Path('run/checkpoint-2').iterdir():
        if file.name != 'config.json': file.unlink()


def broken():
    cut_off_newest()
    trainer().train(resume_from_checkpoint=True)


def mended():
    cut_off_newest()
    complete = [file.parent for file in Path('run').glob('checkpoint-*/trainer_state.json')]
    assert trainer().train(resume_from_checkpoint=str(complete[-1])).global_step == 2
