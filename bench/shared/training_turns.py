"""Trainers that take turns, each time in a process of its own."""
import json
import subprocess
import sys

from bench.record import ROOT


def turns(kinds: tuple, examples: int) -> list[dict]:
    "What the processes with these trainers have seen of so many rows, one after another."
    program = [sys.executable, '-m', 'bench.programs.throughput', str(examples), *kinds]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    if done.returncode: raise RuntimeError(done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kind"')]
