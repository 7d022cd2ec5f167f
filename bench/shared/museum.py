"""The museum: each bug of the doctor's rules, broken and mended here, and texts without a bug.

Every reproduction runs in a fork of a process that has the libraries, so that none meets what
another one left behind.
"""
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from bench.record import ROOT

CASES = ROOT/'tests'/'museum'/'cases'
RECORDED = ROOT/'tests'/'museum'/'recorded'
CLEAN = ROOT/'tests'/'museum'/'clean'
QUIET = {'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false'}
LIMIT_S = 400  # DeepSpeed builds an operator when it is used for the first time
LIBRARIES = 'torch transformers accelerate peft trl bitsandbytes datasets deepspeed'.split()


def names() -> list[str]:
    "Names of the rules that have a case here."
    return sorted(file.stem.replace('_', '-') for file in CASES.glob('*.py'))


def load_case(name: str):
    "Read the reproduction of a rule as a module."
    if str(CASES) not in sys.path: sys.path.insert(0, str(CASES))
    return importlib.import_module(name.replace('-', '_'))


def text_of(file: Path) -> str:
    "A recorded text, without the first line, which says where it comes from."
    head, _, text = file.read_text(encoding='utf-8').partition('\n')
    if not head.startswith('# '): raise ValueError(f'{file.name} does not say where it is from')
    return text


def what_breaks(name: str) -> tuple[object, str]:
    "What the doctor is to see, and why the bug is not alive; one of the two is None or empty."
    case = load_case(name)
    if hasattr(case, 'recorded'): return text_of(RECORDED/Path(case.recorded).name), ''
    try: seen = case.broken()
    except AssertionError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        if Path(place.filename).parent != CASES: return error, ''
        return None, f'{place.line} does not hold: {error}'
    except BaseException as error: return error, ''
    return seen, '' if seen is not None else 'nothing was raised'


def broken_facts(name: str) -> dict:
    "Break one thing, and say how the doctor takes it."
    from llm_workbook.watching.diagnose import diagnose
    seen, why_not = what_breaks(name)
    if why_not: return {'alive': False, 'why_not': why_not}
    found = diagnose(seen)
    first = found.findings[0] if found.findings else None
    return {'alive': True, 'rule': found.rule, 'evidence': found.evidence,
            'confirmed': bool(first and first.confirmed),
            'others': [finding.trouble.id for finding in found.findings[1:]]}


def mended_facts(name: str) -> dict:
    "Do the same with the fix; a text of others cannot be mended here."
    case = load_case(name)
    if not hasattr(case, 'mended'): return {'mended': None}
    case.mended()
    return {'mended': True}


@contextmanager
def private_folder():
    "Work in a folder of its own, which goes away."
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try: yield
        finally: os.chdir('/')


def _be_child(work: Callable, name: str, end: int) -> None:
    "Do the work and write what it found into the pipe."
    os.setpgid(0, 0)
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in 1, 2: os.dup2(silent, stream)
    try:
        with private_folder(): found = work(name)
    except BaseException as error: found = {'failed': ''.join(traceback.format_exception(error))}
    with os.fdopen(end, 'w') as pipe: json.dump(found, pipe)
    os._exit(0)


def in_fork(work: Callable, name: str, limit_s: float = LIMIT_S) -> dict:
    "Call `work(name)` in a fork of this process, and end whatever it leaves behind."
    start, end = os.pipe()
    began_s = time.monotonic()
    sys.stdout.flush()
    gc.freeze()
    child = os.fork()
    if child == 0:
        signal.alarm(int(limit_s))
        os.close(start)
        _be_child(work, name, end)
    os.close(end)
    with os.fdopen(start) as pipe: text = pipe.read()
    _, _, used = os.wait4(child, 0)
    try: os.killpg(child, signal.SIGKILL)
    except ProcessLookupError: pass
    gc.unfreeze()
    found = json.loads(text) if text else {'failed': f'ended within {limit_s} s without a word'}
    return found | {'seconds': time.monotonic() - began_s,
                    'processor_s': used.ru_utime + used.ru_stime}


def bring_libraries() -> None:
    "Import and read once what nearly every case needs."
    os.environ.update(QUIET)
    import datasets, peft, torch, transformers  # noqa: E401, F401
    import torch.distributed.checkpoint, torch.distributed.fsdp  # noqa: E401, F401
    import transformers.trainer, trl.trainer.sft_trainer  # noqa: E401, F401
    transformers.utils.logging.disable_progress_bar()
    from llm_workbook.files import asset
    from llm_workbook.watching.checks import check_names
    from llm_workbook.watching.diagnose import diagnose
    check_names()
    # The first model compiles patterns for the names of all models' weights
    transformers.AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    diagnose('')  # Reads the rules; later, as Python would forget their patterns for those


def examine(name: str) -> dict:
    "One bug: is it alive, is it diagnosed, and does the fix cure it?"
    broken, mended = in_fork(broken_facts, name), in_fork(mended_facts, name)
    took = {name: round(broken.pop(name) + mended.pop(name), 2)
            for name in ('seconds', 'processor_s')}
    if 'failed' in broken: broken = {'alive': None, 'why_not': broken['failed'][-2000:]}
    if 'failed' in mended: mended = {'mended': False, 'mended_error': mended['failed'][-2000:]}
    return {'id': name} | broken | mended | took


def clean_texts() -> list[Path]:
    "Texts of good runs and of errors that no rule is for; the near misses begin with `near`."
    return sorted(CLEAN.glob('*.txt'))


def diagnosed_clean(file: Path) -> str | None:
    "The rule that a text without a bug is taken for; None is right."
    from llm_workbook.watching.diagnose import diagnose
    return diagnose(text_of(file)).rule
