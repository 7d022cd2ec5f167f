"""Seconds for a search of 5,000 plans."""
import statistics
import time

from bench.record import record

GOAL = 3.0  # s


def searches() -> dict:
    "Searches of over 5,000 plans each. Few fit; some fit; last, all fit: nothing is pruned."
    from llm_workbook import draft
    more = {'optimizer.kind': ['adamw', 'adamw_bf16', 'adamw_8bit', 'sgd']}
    all_fit = {'method.kind': ['qlora', 'lora'], 'optimizer.kind': ['adamw', 'adamw_bf16', 'sgd'],
               'sharding.strategy': 'fsdp2',
               'sharding.offload_parameters': 'none', 'sharding.offload_optimizer': 'none',
               'method.rank': list(range(4, 44, 4))}
    return {'70B on 2 x RTX 3090': (draft('llama-3.1-70b', '2x-rtx-3090', global_batch=128), more),
            '8B on 8 x H100': (
                draft('llama-3.1-8b', '8x-h100', global_batch=512, length=4096), more),
            '1B on 8 x H100, all fit': (
                draft('llama-3.2-1b', '8x-h100', global_batch=512, length=256), all_fit)}


def measure(repetitions: int = 5) -> dict:
    """Time each search in turn, scaled to 5,000 plans.

    The value is the slower of the first two, `worst` the one in which all fit.
    """
    from llm_workbook import search
    spent, found = {name: [] for name in searches()}, {}
    for _ in range(repetitions + 1):
        for name, (base, axes) in searches().items():
            start = time.perf_counter()
            plans = search(base, axes)
            spent[name].append((time.perf_counter() - start) * 5000 / len(plans))
            found[name] = {'plans': len(plans), 'fit': len(plans.accepted) + len(plans.planned),
                           'proved': sum(r.proved for r in plans.refused),
                           'by_rule': sum(r.kind == 'rule' for r in plans.refused)}
    spent = {name: seconds[1:] for name, seconds in spent.items()}  # the first one counts the model
    for name, seconds in spent.items(): found[name]['s'] = round(statistics.median(seconds), 3)
    *usual, last = spent
    slower = max(usual, key=lambda name: statistics.median(spent[name]))
    return record('plan_search', spent[slower], 's', goal=GOAL,
                  searches=found) | {'worst': found[last]['s']}
