"""What glibc sees of rank 0 of N on one device, beside `rehearse`: the program, on the CPU.

Of every GPU recipe the record says what is predicted. `python -m bench.gpu` measures them, one by
one, where there is a GPU.
"""
import tempfile
import warnings
from pathlib import Path

from bench.record import record
from bench.shared.gpu_rows import compared, gpu_recipes, rehearsed
from bench.shared.small_rehearsals import AGAIN, FULL, LORA, QLORA
from bench.shared.small_rehearsals import recipe as small_recipe

HERE = [  # Shape, changes
    ('quick', FULL | {'cluster.processes': 8}), ('quick', LORA | AGAIN | {'cluster.processes': 4}),
    ('quick', QLORA), ('quick', QLORA | AGAIN | {'cluster.processes': 16})]
NOT_HERE = {'peak_b': 'not measured', 'driver_b': 'not measured'}


def measure() -> dict:
    "Check the program on the CPU, and say what is predicted for GPUs."
    warnings.simplefilter('ignore')
    with tempfile.TemporaryDirectory() as folder:
        found = [compared(shape, changes, small_recipe(shape, changes, Path(folder)))
                 for shape, changes in HERE]
    found += [rehearsed(*job) | NOT_HERE for job in gpu_recipes()]
    return record('gpu_memory', [abs(r['error']) for r in found if 'error' in r], '%',
                  goal=1, rows=found, gpu='not measured',
                  value_of='the same program on the CPU, at small size')
