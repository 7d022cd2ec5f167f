"""Two rows in one sequence, with positions that begin anew, and yet the second reads the first."""
import torch
from transformers import AutoModelForCausalLM

from llm_workbook.files import asset

ROWS = torch.arange(10, 30), torch.arange(100, 117)


def packed(**options):
    "How far the logits of packed rows are from those of rows that are read alone."
    model = AutoModelForCausalLM.from_pretrained(asset('tiny-base'), dtype=torch.float32).eval()
    positions = torch.cat([torch.arange(len(row)) for row in ROWS])[None]
    batch = {'input_ids': torch.cat(ROWS)[None], 'position_ids': positions} | options
    with torch.no_grad():
        alone = torch.cat([model(row[None]).logits for row in ROWS], 1)
        difference = (model(**batch).logits - alone).abs().max().item()
    return difference, {'model': model, 'batch': batch}


def broken():
    difference, given = packed(attention_mask=torch.ones(1, 37, dtype=torch.long))
    assert difference > 1
    return given


def mended():
    assert packed(use_cache=False)[0] < 1e-4
