"""TRL trains on every token of a conversation unless it is told otherwise: the prompts as well."""
from datasets import Dataset
from template_marks_no_answer import ROWS
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from llm_workbook.files import asset


def first_batch(**options):
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    arguments = SFTConfig('run', report_to='none', use_cpu=True, bf16=False, disable_tqdm=True,
                          **options)
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(ROWS),
                         processing_class=tokenizer)
    return {'batch': next(iter(trainer.get_train_dataloader())), 'tokenizer': tokenizer}


def broken():
    return first_batch()


def mended():
    batch = first_batch(assistant_only_loss=True)['batch']
    assert (batch['labels'] == -100).any() and (batch['labels'] != -100).any()
