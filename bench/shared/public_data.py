"Real rows that do not ship: where they lie on a machine that has them."
import os
from pathlib import Path

from bench.record import ROOT, Skip

FILES = ('amazon_reviews.tsv', 'instructions.json')


def folder() -> Path:
    "Find the data: the folder that LLMW_DATA names, else shared/data beside the checkout."
    place = Path(os.environ.get('LLMW_DATA') or ROOT.parent/'shared/data')
    absent = [name for name in FILES if not (place/name).is_file()]
    if absent:
        names = ' and no '.join(absent)
        raise Skip(f'no {names}; set LLMW_DATA to the folder that holds them')
    return place
