"""The mask of the assistant's tokens is all zeros, and labels made of it hold nothing to learn."""
import torch
from template_marks_no_answer import ROWS, UNMARKED
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_workbook.files import asset
from llm_workbook.training.tokens import ChatFormat, answer_tokens


def masked(ids, mask):
    ids, mask = torch.tensor([ids]), torch.tensor([mask], dtype=torch.bool)
    return {'input_ids': ids, 'labels': ids.masked_fill(~mask, -100)}


def broken():
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    tokenizer.chat_template = UNMARKED
    row = tokenizer.apply_chat_template(ROWS[0]['messages'], return_dict=True,
                                        return_assistant_tokens_mask=True)
    batch = masked(row['input_ids'], row['assistant_masks'])
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    assert model(**batch).loss.isnan()
    return {'batch': batch, 'tokenizer': tokenizer}


def mended():
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    tokenizer.chat_template = UNMARKED
    row = answer_tokens(ROWS[0], ChatFormat(tokenizer))[0]
    assert sum(row.mask) == 3  # ' 5' and the end
    assert (masked(row.ids, row.mask)['labels'] != -100).any()
