"""Run the benchmarks: `python -m bench.run` all that this machine can, with LINE that one."""
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

from bench.record import RESULTS, ROOT, Skip, save

# A line is the module of that name in bench.lines, with `measure() -> record`.
LINES = ('import_time', 'launch_latency', 'estimate', 'plan_search', 'ledger_bytes',
         'step_peak_error', 'plan_properties', 'published_error', 'blind_error', 'host_fit',
         'rehearsal_error', 'rehearsal_grid', 'rehearse_70b', 'caching_allocator',
         'gpu_memory', 'nf4_quantise', 'loss_head', 'sft_throughput', 'sharded_load', 'sample_data',
         'real_data', 'first_contact', 'wire_bytes', 'launch_table', 'families', 'try_out',
         'monitor_overhead', 'museum', 'packing', 'length_grouping')


def run_line(name: str, results: Path = RESULTS) -> dict | None:
    "Measure one line, write its record and print it; None when this machine cannot."
    start = time.monotonic()
    print(f'{name}: running', flush=True)
    try: made = import_module(f'bench.lines.{name}').measure()
    except Skip as reason:
        print(f'{name}: skipped: {reason}', flush=True)
        return None
    written = os.path.relpath(save(made, results), ROOT)
    print(f'{name}: {time.monotonic() - start:.0f} s, written to {written}')
    print(json.dumps(made), flush=True)
    return made


def main(names: list[str]) -> None:
    "Run the lines in `names`, or all."
    unknown = [name for name in names if name not in LINES]
    if unknown: sys.exit(f'no benchmark line {", ".join(unknown)}; known: {", ".join(LINES)}')
    for name in names or LINES: run_line(name)


if __name__ == '__main__':
    main(sys.argv[1:])
