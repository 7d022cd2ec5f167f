"""What is kept of each part: one JSON line a part, in a file for each machine."""
import datetime
import hashlib
import json
import os
import subprocess
from pathlib import Path

from bench.record import RESULTS, ROOT

FOLDER = RESULTS/'gpu'
CODE = 'llm_workbook', 'bench/gpu', 'bench/shared', 'bench/programs'


def code_digest(root: Path = ROOT) -> str:
    "Name the state of the library and of what measures it."
    digest = hashlib.sha256()
    for folder in CODE:
        for file in sorted((root/folder).rglob('*')):
            if file.suffix not in ('.py', '.yaml', '.json', '.jsonl'): continue
            digest.update(f'{file.relative_to(root)}\0'.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def commit(root: Path = ROOT) -> str | None:
    "The commit of a checkout, with + where files have changed since; None outside of git."
    try:
        head = subprocess.run(['git', 'rev-parse', '--short=12', 'HEAD'], cwd=root, check=True,
                              capture_output=True, text=True).stdout.strip()
        changed = subprocess.run(['git', 'status', '--porcelain', '--untracked-files=no'],
                                 cwd=root, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError): return None
    return head + ('+' if changed else '')


def read(file: Path) -> list[dict]:
    "The lines of a file; one that was cut off at its end is left out."
    if not file.exists(): return []
    found = []
    for text in file.read_text(encoding='utf-8').splitlines():
        try: found.append(json.loads(text))
        except json.JSONDecodeError: continue
    return found


def same(line: dict, facts: dict) -> bool:
    "Whether a line is of this machine, these versions and this code."
    return all(line[key] == facts[key] for key in ('gpu', 'versions', 'code', 'toy'))


def write(file: Path, line: dict) -> None:
    "Add a line, and see it on the disk."
    file.parent.mkdir(parents=True, exist_ok=True)
    cut = file.exists() and file.read_bytes()[-1:] not in (b'', b'\n')
    with file.open('a', encoding='utf-8') as out:
        out.write('\n' * cut + json.dumps(line) + '\n')
        out.flush()
        os.fsync(out.fileno())


def rounded(value):
    "Keep five digits of every fraction."
    if isinstance(value, float): return float(f'{value:.5g}')
    if isinstance(value, dict): return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def made(part, found: dict, seconds: float, facts: dict) -> dict:
    "The line of a part."
    line = {'group': part.group, 'part': part.name, 'figures': {}, 'missing': {}}
    line |= rounded(found) | {'seconds': round(seconds, 1)} | facts
    return line | {'date': datetime.date.today().isoformat()}


def table(lines: list[dict]) -> str:
    "Lines as text: each part's last one."
    last = {(line['group'], line['part']): line for line in lines}
    rows = [(group, name, line['status'], f'{line["seconds"]:.0f} s', said(line))
            for (group, name), line in last.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)] if rows else []
    return '\n'.join('  '.join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[4]])
                     for row in rows)


def said(line: dict) -> str:
    "A reason, or the figures that are numbers, in short."
    if line.get('reason'): return line['reason'][:100]
    figures = [f'{name} {value:,.4g}' for name, value in line['figures'].items()
               if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return ', '.join(figures[:6])
