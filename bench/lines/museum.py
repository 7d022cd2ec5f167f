"""How many bugs the doctor takes for what they are, with these versions of the libraries.

Each is broken here, diagnosed, and mended. Texts of good runs and of other errors must not be taken
for one. `alive` says of each bug whether it is there with the versions of the record.
"""
import re

from bench.record import record
from bench.shared.museum import (
    LIBRARIES, bring_libraries, clean_texts, diagnosed_clean, examine, names)


def row(found: dict) -> dict:
    "What the record keeps of one bug."
    kept = ('alive', 'rule', 'confirmed', 'evidence', 'others', 'mended', 'seconds', 'why_not')
    short = {key: found[key] for key in ('id', *kept) if found.get(key) is not None}
    return {key: without_folders(value)[-300:] if isinstance(value, str) else value
            for key, value in short.items()}


def without_folders(text: str) -> str:
    "Leave out the folders of this machine: what stands before the name of a file."
    return re.sub(r'(?<![\w.-])(?:/[\w.-]+)+/(?=[\w.-]+)', '', text)


def measure() -> dict:
    "Go through the museum once."
    bring_libraries()
    found = [examine(name) for name in names()]
    right = [one for one in found if one.get('rule') == one['id'] and one.get('evidence')]
    confirmed = sum(bool(one['confirmed']) for one in right)
    clean = clean_texts()
    wrong = [file.stem for file in clean if diagnosed_clean(file)]
    return record(
        'museum', [len(right)], 'bugs diagnosed', bugs=len(found), confirmed=confirmed,
        goal=len(found), wrong=len(wrong), wrong_texts=wrong, clean=len(clean),
        near=sum(file.stem.startswith('near') for file in clean),
        not_alive=[one['id'] for one in found if not one['alive']],
        not_mended=[one['id'] for one in found if one['mended'] is False],
        packages=[name for name in LIBRARIES if name == 'deepspeed'],
        processor_s=round(sum(one['processor_s'] for one in found)),
        rows=[row(one) for one in found])
