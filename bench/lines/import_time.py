"""Seconds to `import llm_workbook` in a fresh process."""
import subprocess
import sys

from bench.record import ROOT, record

PROGRAM = """
import time
start = time.perf_counter()
import llm_workbook
print(time.perf_counter() - start)
"""
GOAL = 0.5  # s


def measure(repetitions: int = 21) -> dict:
    "Time the import; the first process, which may compile and fill the disk cache, is not counted."
    def fresh():
        done = subprocess.run([sys.executable, '-c', PROGRAM], cwd=ROOT, stdout=subprocess.PIPE,
                              text=True, check=True)
        return float(done.stdout)
    fresh()
    return record('import_time', [fresh() for _ in range(repetitions)], 's', goal=GOAL)
