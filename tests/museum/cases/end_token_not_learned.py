"""The padding token is the end token, and the collator masks it: the end is never learned."""
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

from llm_workbook.files import asset


def collate(pad):
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    tokenizer.pad_token = pad
    rows = [tokenizer(f'{text}<|endoftext|>') for text in ('Yes.', 'No, not at all.')]
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    return {'batch': batch, 'tokenizer': tokenizer}


def broken():
    return collate(pad='<|endoftext|>')


def mended():
    given = collate(pad='<|pad|>')
    ends = given['batch']['labels'] == given['tokenizer'].eos_token_id
    assert ends.sum(1).tolist() == [1, 1]
