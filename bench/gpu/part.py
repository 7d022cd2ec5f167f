"""Run one part, or read the machine: `python -m bench.gpu.part NAME DEVICE [toy]`.

The last line printed is JSON: `facts`, or what the part found.
"""
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

from bench.gpu.place import Missing, Place, plain
from bench.record import PACKAGES, machine, versions


def facts(device: str) -> dict:
    "What the lines of this machine have in common, beside its versions."
    import torch
    made = {'machine': machine(), 'versions': versions(PACKAGES), 'torch_cuda': torch.version.cuda}
    if device == 'cpu': return made | {'name': 'cpu', 'gpu': None}
    if not torch.cuda.is_available(): return made | {'name': None, 'gpu': None}
    card, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
    name = re.sub(r'[^a-z0-9]+', '-', f'{card.name.lower()}').strip('-')
    gpu = {'name': card.name, 'count': count, 'memory_b': card.total_memory,
           'capability': f'{card.major}.{card.minor}', 'processors': card.multi_processor_count,
           'driver': driver()}
    return made | {'name': f'{count}x-{name}', 'gpu': gpu}


def driver() -> str | None:
    "The version of NVIDIA's driver, from nvidia-smi or from the kernel."
    try:
        command = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError): pass
    file = Path('/proc/driver/nvidia/version')
    found = re.search(r'\d+\.\d+(\.\d+)?', file.read_text()) if file.exists() else None
    return found[0] if found else None


def outcome(part, place: Place) -> dict:
    "What a part found: its status, its figures, and the reasons of those that it lacks."
    if absent := part.absent():
        return {'status': 'skipped', 'reason': f'not installed: {", ".join(absent)}'}
    try: figures = part.run(place)
    except Missing as reason: return {'status': 'skipped', 'reason': str(reason)}
    except Exception as error: return {'status': 'failed', 'reason': plain(error)}
    missing = figures.pop('missing', {})
    passed = figures.pop('passed', None)
    status = {None: 'measured', True: 'passed', False: 'failed'}[passed]
    if figures.pop('out_of_memory', False): status = 'out of memory'
    if missing and not figures: status = 'skipped'
    reason = '; '.join(sorted(set(missing.values()))) if status == 'skipped' else None
    return {'status': status, 'reason': reason, 'figures': figures | dict.fromkeys(missing),
            'missing': missing}


def main() -> None:
    "Run what the command line names."
    name, device, *more = sys.argv[1:]
    if name == 'facts': print(json.dumps(facts(device)))
    else:
        from bench.gpu.parts import PARTS
        part = next(part for part in PARTS if part.name == name)
        print(json.dumps(outcome(part, Place(device, 'toy' in more))), flush=True)


if __name__ == '__main__':
    assert platform.system() == 'Linux', 'parts read /proc'
    main()
