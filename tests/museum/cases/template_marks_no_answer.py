"""`assistant_only_loss` needs {% generation %} in the chat template, and this one has none."""
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from llm_workbook.files import asset

ROWS = [{'messages': [{'role': 'user', 'content': 'Add 2 and 3.'},
                      {'role': 'assistant', 'content': '5'}]}] * 4
UNMARKED = ("{% for m in messages %}{{ '<|' + m['role'] + '|> ' + m['content'] }}"
            "{% if m['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def labels(template=None):
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    if template: tokenizer.chat_template = template
    arguments = SFTConfig('run', assistant_only_loss=True, report_to='none', use_cpu=True,
                          bf16=False, disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(ROWS),
                         processing_class=tokenizer)
    return next(iter(trainer.get_train_dataloader()))['labels']


def broken():
    labels(UNMARKED)


def mended():
    trained = (labels() != -100).float().mean()
    assert 0 < trained < 0.8
