"""What a benchmark line leaves behind: its figures, with the machine, the versions and the date."""
import datetime
import json
import os
import platform
import re
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT/'bench'/'results'
PACKAGES = 'torch transformers accelerate peft trl bitsandbytes datasets'.split()
NEEDED = {'line': str, 'value': (int, float), 'unit': str, 'repetitions': int, 'machine': dict,
          'versions': dict, 'date': str}
OPTIONAL = {'peer': str, **dict.fromkeys(('peer_value', 'ratio', 'goal', 'worst'), (int, float))}


class Skip(Exception):
    "This machine cannot run the line; the message says what is missing."


def machine() -> dict:
    "Describe this machine without naming it."
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    names = re.findall(r'^model name\s*: (.*)$', Path('/proc/cpuinfo').read_text(), re.MULTILINE)
    return {'cpu': names[0] if names else platform.machine(), 'cores': len(os.sched_getaffinity(0)),
            'memory_gib': round(memory / 2**30, 1),
            'system': f'{platform.system()} {platform.machine()}'}


def versions(packages: list[str]) -> dict[str, str]:
    "List the versions of Python and of those `packages` that are installed."
    found = {'python': platform.python_version()}
    for package in packages:
        try: found[package] = version(package)
        except PackageNotFoundError: pass
    return found


def record(line: str, values: list[float], unit: str, peers: list[float] = (), **more) -> dict:
    "Make the record of `line`: medians of `values` and of the interleaved `peers`, and `more`."
    made = {'line': line, 'value': round(statistics.median(values), 4), 'unit': unit}
    if peers:
        made['peer'], made['peer_value'] = more.pop('peer'), round(statistics.median(peers), 4)
        made['ratio'] = round(made['value'] / made['peer_value'], 3)
    here = {'machine': machine(), 'versions': versions(PACKAGES + more.pop('packages', [])),
            'date': datetime.date.today().isoformat()}
    return made | {'worst': round(max(values), 4), 'repetitions': len(values)} | more | here


def faults(made: dict) -> list[str]:
    "Say what is wrong with a record; an empty list when nothing is."
    found = [f'{key} is missing' for key in NEEDED if key not in made]
    found += [f'{key} is {made[key]!r}' for key, kind in (NEEDED | OPTIONAL).items()
              if key in made and (not isinstance(made[key], kind) or isinstance(made[key], bool))]
    if ('peer' in made) != ('peer_value' in made): found.append('peer and peer_value come together')
    paths = re.findall(r'"(?:/|~/)[^"]*"', json.dumps(made))
    return found + [f'{path} is a path of one machine' for path in paths]


def save(made: dict, results: Path = RESULTS) -> Path:
    "Write a record where the pages look for it."
    if wrong := faults(made):
        raise ValueError(f'the record of {made.get("line")} is not valid: {"; ".join(wrong)}')
    path = results/('gpu' if 'gpu' in made['machine'] else 'cpu')/f'{made["line"]}.json'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + '\n', encoding='utf-8')
    return path
