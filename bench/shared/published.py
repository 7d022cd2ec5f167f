"""What others have published: the table of their runs."""
from functools import cache

import yaml

from bench.record import ROOT

ROWS = ROOT/'bench'/'published.yaml'


@cache
def table() -> dict:
    "Read sources, machines, models and rows."
    return yaml.safe_load(ROWS.read_text(encoding='utf-8'))
