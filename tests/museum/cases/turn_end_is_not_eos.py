"""The template ends a turn with a token that `generate` does not stop at."""
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_workbook.files import asset
from llm_workbook.training.tokens import end_tokens


def save(ends):
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    tokenizer.add_special_tokens({'additional_special_tokens': ['<|end|>']})
    template = tokenizer.chat_template
    tokenizer.chat_template = template.replace('<|endoftext|>', '<|end|>')
    model.generation_config.eos_token_id = ends(tokenizer)
    tokenizer.save_pretrained('model')
    model.save_pretrained('model')
    return model.generation_config.eos_token_id


def of_the_base(tokenizer): return [tokenizer.eos_token_id]


def broken():
    save(of_the_base)
    return 'model'


def mended():
    assert len(save(end_tokens)) == 2
