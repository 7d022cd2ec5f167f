"""Measure this machine's GPU, part by part: `python -m bench.gpu [--quick] [PART ...]`.

A part that has its line for this machine and this code is left out, so what was cut off goes on
where it was; a part that is named runs again.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu.lines import FOLDER, code_digest, commit, made, read, same, table, write
from bench.gpu.parts import PARTS
from bench.gpu.place import plain
from bench.record import ROOT

QUICK_S = 480
ENVIRONMENT = {'HF_HUB_OFFLINE': '1', 'TOKENIZERS_PARALLELISM': 'false'}


def child(name: str, how: list[str], limit_s: float) -> dict:
    "Run a part in a process of its own; what its last line says."
    command = [sys.executable, '-m', 'bench.gpu.part', name, *how]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | ENVIRONMENT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               start_new_session=True)
    try: out, errors = process.communicate(timeout=limit_s)
    except BaseException as error:  # An interrupt too ends what the part has started
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired): raise
        return {'status': 'failed', 'reason': f'cut off after {limit_s:.0f} s'}
    lines = [line for line in out.splitlines() if line.startswith('{')]
    if lines: return json.loads(lines[-1])
    error = RuntimeError(errors[-300:] or f'it ended with code {process.returncode}')
    return {'status': 'failed', 'reason': plain(error)}


def chosen(names: list[str], quick: bool) -> list:
    "The parts that are named, or all that this call takes."
    unknown = set(names) - {part.name for part in PARTS}
    if unknown:
        known = ', '.join(part.name for part in PARTS)
        sys.exit(f'no part {", ".join(sorted(unknown))}; known: {known}')
    if names: return [part for part in PARTS if part.name in names]
    return [part for part in PARTS if part.quick or not quick]


def arguments(words: list[str] | None) -> argparse.Namespace:
    "Read the command line."
    parser = argparse.ArgumentParser(prog='python -m bench.gpu', description=__doc__.split(':')[0])
    parser.add_argument('parts', nargs='*', metavar='PART', help='these alone, and again')
    parser.add_argument('--quick', action='store_true', help='a choice of parts, in 8 minutes')
    parser.add_argument('--device', choices=('cuda', 'cpu'), default='cuda',
                        help='cpu: the same program in toy form, into --results')
    parser.add_argument('--results', type=Path, help='folder of the lines')
    said = parser.parse_args(words)
    if said.device == 'cpu' and said.results is None:
        parser.error('a CPU gives no record of a GPU: name a folder by --results')
    return said


def run(parts: list, file: Path, facts: dict, how: list[str], end_s: float) -> None:
    "Run the parts one by one, as long as there is time, and keep a line of each."
    for number, part in enumerate(parts, 1):
        left_s = end_s - time.monotonic()
        if left_s < 20:
            print(f'no time for {len(parts) - number + 1} parts: call again', flush=True)
            return
        start = time.monotonic()
        limit_s = min(part.limit_s, left_s)
        found = child(part.name, how, limit_s)
        if limit_s < part.limit_s and found.get('reason') == f'cut off after {limit_s:.0f} s':
            print(f'no time for all of {part.name}: call again', flush=True)
            return
        line = made(part, found, time.monotonic() - start, facts)
        write(file, line)
        print(table([line]), flush=True)


def main(words: list[str] | None = None) -> None:
    "Run what has no line yet, and print the table of this machine."
    said, began_s = arguments(words), time.monotonic()
    toy = said.device == 'cpu'
    facts = child('facts', [said.device], 120)
    if not facts.get('name'): sys.exit(f'no GPU: {facts.get("reason", "torch sees none here")}')
    file = (said.results or FOLDER)/f'{facts.pop("name")}.jsonl'
    facts |= {'code': code_digest(), 'commit': commit(), 'toy': toy}
    mine = {line['part'] for line in read(file) if same(line, facts)}
    wanted = chosen(said.parts, said.quick)
    parts = [part for part in wanted if said.parts or part.name not in mine]
    print(f'{len(parts)} parts to run, {len(wanted) - len(parts)} have their line', flush=True)
    end_s = began_s + QUICK_S if said.quick else float('inf')
    run(parts, file, facts, [said.device, *(['toy'] if toy else [])], end_s)
    print(table([line for line in read(file) if same(line, facts)]))


if __name__ == '__main__':
    main()
