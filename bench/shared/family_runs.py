"""What each family of models goes through: ranks that shard it, and one process that does not."""
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.shared.families import ALONE, Case, recipe

EQUAL = 1e-4  # Largest difference of logits that are to be equal
REFUSED = 'refused: '  # How a reason begins that is no failure
IDS = [[7 * n % 1200 + 2 for n in range(40)]]  # More tokens than a window of a miniature has


def import_libraries() -> None:
    "Import once what every rank needs; ranks are forks of this process."
    import datasets, peft, trl.trainer.sft_trainer  # noqa: E401, F401
    import torch.distributed.fsdp, torch.distributed.tensor  # noqa: E401, F401
    import transformers
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


def train(asked, directory: Path) -> dict:
    "Train on this rank, whatever another case has left in the libraries."
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from llm_workbook.parallel.backends import fsdp_env
    from llm_workbook.training.fine_tune import check_recipe, train_rank
    for kind in AcceleratorState, PartialState, GradientState: kind._shared_state.clear()
    os.environ.update(fsdp_env(asked))
    rows, _ = check_recipe(asked)
    shards = train_rank(asked, directory, rows, step_timeout_s=60)['shards']
    return {'share': round(shards.here_b / shards.total_b, 3)}


def steps(directory: Path) -> dict:
    "Read the losses and the norms of the gradients of a run."
    from llm_workbook.training.run_directory import read_metrics
    lines = read_metrics(directory/'metrics.jsonl')
    return {'losses': [line['loss'] for line in lines],
            'norms': [line['grad_norm'] for line in lines]}


def noted(file: Path, rows: Iterable) -> None:
    "Write rows as they come: what is written outlives a rank."
    with open(file, 'a', encoding='utf-8') as lines:
        for row in rows:
            lines.write(json.dumps(row) + '\n')
            lines.flush()


def said(error: BaseException) -> str:
    "An error in one line."
    text = ' '.join(str(error).split())[:400]
    return f'{type(error).__name__}: {text}'


# Two ranks

def sharded(work: list[tuple[Case, dict]], file: Path) -> None:
    "One of two ranks: train one case after the other; an error ends both ranks."
    import torch.distributed as dist
    def trained():
        for case, changes in work:
            dist.barrier()
            yield {'family': case.family, 'method': case.method,
                   **sharded_case(case, changes)}
    rank = dist.get_rank()
    noted(file.with_suffix(f'.{rank}.jsonl'), trained())


def sharded_case(case: Case, changes: dict) -> dict:
    "Train one case on this rank of two."
    directory, began_s = case.place('two'), time.process_time()
    shares = train(recipe(case).changed(changes), directory)
    return shares | steps(directory) | {'processor_s': round(time.process_time() - began_s, 2)}


# One process

def leave_group() -> tuple[int, int]:
    "Be a process of its own, though it was started as one of several ranks."
    import torch.distributed as dist
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # Else the other rank, still connecting, would meet a closed connection
    dist.destroy_process_group()
    for name in 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT'.split():
        os.environ.pop(name, None)
    return rank, ranks


def plain(work: list[tuple[Case, dict]], file: Path) -> None:
    "Every second case, without another rank; an error becomes its row."
    rank, ranks = leave_group()
    noted(file.with_suffix(f'.{rank}.jsonl'),
          (plain_case(case, changes) for case, changes in work[rank::ranks]))


def plain_case(case: Case, changes: dict) -> dict:
    "All that one process does with a case: a value, or an error in words, for each check."
    asked, began_s = recipe(case).changed(changes), time.process_time()
    row = {'family': case.family, 'method': case.method}
    for name, check in CHECKS.items():
        try: row[name] = check(case, asked)
        except Exception as error:
            row[name] = said(error)
            row.setdefault('traceback', traceback.format_exc()[-1500:])
    return row | {'processor_s': round(time.process_time() - began_s, 2)}


def alone(case: Case, asked) -> dict:
    "The same steps in one process."
    directory = case.place('one')
    train(asked.changed(ALONE), directory)
    return steps(directory)


def cache(case: Case, asked) -> float:
    "How far the logits are apart with a cache and without one."
    import torch
    from llm_workbook.model.quantize import load_base
    model = load_base(asked.model, asked.method, asked.precision, 'cpu')
    ids = torch.tensor(IDS)
    with torch.inference_mode():
        with_cache = model(input_ids=ids, use_cache=True).logits
        without = model(input_ids=ids, use_cache=False).logits
    return (with_cache - without).abs().max().item()


def refused(check: Callable, *given) -> str | None:
    "The reason of a refusal, or None: what is refused before anything is loaded is no failure."
    try: check(*given)
    except ValueError as error: return f'{REFUSED}{" ".join(str(error).split())[:400]}'
    return None


def merges(case: Case, asked) -> float | str | None:
    "Merge the adapters of the sharded run: how far its logits are from those of base and adapters."
    import torch
    from llm_workbook.model.adapters import load_adapters
    from llm_workbook.release.merge import Merge, merged
    if case.method == 'full': return None
    base, method, precision = asked.model, asked.method, asked.precision
    named = base.source, adapters_of(case), into(case), method, precision
    if reason := refused(Merge, *named): return reason
    given = logits(merged(*named))
    torch.save(given, case.place('one')/'merged.pt')
    beside = load_adapters(base.source, adapters_of(case), method, precision, 'cpu').eval()
    wanted = logits(beside)
    with beside.disable_adapter(): moved = (logits(beside) - wanted).abs().max().item()
    if moved < 10 * EQUAL: raise RuntimeError(f'the adapters move the logits by {moved:.2g} alone')
    return (given - wanted).abs().max().item()


def logits(model):
    "The logits of one row."
    import torch
    with torch.inference_mode(): return model(input_ids=torch.tensor(IDS)).logits[0].float()


def exports(case: Case, asked) -> bool | str:
    "Write what plain transformers is to load; a full fine-tune has written it already."
    import torch
    from llm_workbook.model.quantize import load_base
    from llm_workbook.release.export import export
    from llm_workbook.release.merge import Merge
    if case.method == 'full':
        model = load_base(str(case.place('two')/'model'), asked.method, asked.precision, 'cpu')
        torch.save(logits(model), case.place('one')/'merged.pt')
        return True
    base, adapters, way = asked.model, adapters_of(case), into(case)
    if reason := refused(Merge, base.source, adapters, way, asked.method): return reason
    case.place('export').parent.mkdir(exist_ok=True)
    export(asked, adapters, case.place('export'), way, {'gate': False}, prove=False)
    return True


def rehearses(case: Case, asked) -> int | str:
    "Rehearse the training on fake tensors, in bfloat16: bytes at the peak."
    from llm_workbook.rehearsal.step import rehearse
    half = asked.changed({'precision.compute': 'bfloat16', 'method.storage': 'bfloat16'})
    found = []
    reason = refused(lambda: found.append(rehearse(half).peak_b))
    return reason or found[0]


def adapters_of(case: Case) -> Path: return case.place('two')/'adapters'


def into(case: Case) -> str: return {'lora': '16-bit', 'qlora': 'dequantised'}[case.method]



CHECKS: dict[str, Callable] = {
    'alone': alone, 'cache': cache, 'merges': merges, 'exports': exports, 'rehearses': rehearses}
