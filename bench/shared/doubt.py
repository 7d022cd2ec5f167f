"""How wide a range must be that was fitted on few figures."""
import math
from statistics import NormalDist, mean

import yaml

from bench.record import ROOT

RANGES = ROOT/'llm_workbook'/'assets'/'ranges.yaml'
SHARE, CONFIDENCE = .9, .95
SURE = .98  # Of a verdict: one run in a hundred beyond each end
HEAD = '''# How far published runs were from the plan: natural logarithms of measured over planned.
# Written by `make bench LINE=published_error` from its calibration rows; its record is
# bench/results/cpu/published_error.json.
'''


def least_chi2(freedom: float, share: float) -> float:
    "Give the value below which a chi-squared variable is found with probability `share`."
    z, part = NormalDist().inv_cdf(share), 2 / (9 * freedom)  # Wilson and Hilferty, within 1 %
    return freedom * (1 - part + z * math.sqrt(part))**3


def tolerance(values: list[float], fitted: int, share: float = SHARE) -> tuple[float, float]:
    """Give the ends between which `share` of other values lie, at a confidence of `CONFIDENCE`.

    A normal tolerance interval (Howe, 1969); `fitted` constants were chosen on the same values.
    """
    count, middle = len(values), mean(values)
    freedom = count - 1 - fitted
    if freedom < 5: raise ValueError(f'{count} values and {fitted} constants fitted on them: '
                                     'too few for a range')
    spread = math.sqrt(sum((value - middle)**2 for value in values) / freedom)
    within = NormalDist().inv_cdf((1 + share) / 2)
    factor = within * math.sqrt(freedom * (1 + 1 / count) / least_chi2(freedom, 1 - CONFIDENCE))
    return round(middle - factor * spread, 3), round(middle + factor * spread, 3)


def write(groups: list[dict], cards: dict) -> None:
    "Write the ranges, and the cards of the runs behind them, where the library reads them."
    fields = {'share': SHARE, 'verdict_share': SURE, 'confidence': CONFIDENCE, 'groups': groups,
              'cards': cards}
    RANGES.write_text(HEAD + yaml.safe_dump(fields, sort_keys=False), encoding='utf-8')
