"""What tests of faults share: waiting, looking at processes, and a model and rows small enough to
be broken often."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from llm_workbook.files import asset
from llm_workbook.config.recipe import Recipe

SAID = []  # Lines for the end of the report, whether tests pass or not
CANARY = 'hf' + '_' + 'Canary' * 6  # Put together here, so that no file holds it
TOKENS = 'HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'WANDB_API_KEY'


def wait_for(condition, seconds=10):
    "Look until `condition()` holds, at most so long; give back what it was last."
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end: time.sleep(0.05)
    return found


def variables() -> dict:
    return {key: value for key, value in os.environ.items() if key != 'PYTEST_CURRENT_TEST'}


def children() -> list:
    return [
        p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def ports(process=None) -> set:
    "Addresses on which a process listens, as (host, port); this one if none is named."
    found = (process or psutil.Process()).net_connections('inet')
    return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}


def later(*values):
    "A case that takes long: `make test` leaves it out, `make test-fault` runs it."
    return pytest.param(*values, marks=pytest.mark.slow)


def files(directory: Path) -> set:
    "Every file below `directory`."
    return {str(path.relative_to(directory)) for path in directory.rglob('*') if path.is_file()}


def small_base(folder: Path) -> Path:
    "A Llama of two layers and 64 columns with the tokenizer of the tiny base: 0.2 M parameters."
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    AutoTokenizer.from_pretrained(asset('tiny-base')).save_pretrained(folder)
    config = json.loads((asset('tiny-base')/'config.json').read_text())
    config |= {
        'hidden_size': 64, 'intermediate_size': 128, 'num_hidden_layers': 2,
        'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 16}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    return folder


def small_recipe(folder: Path, rows=24, **changes) -> Recipe:
    """Full training of the small base over two ranks, 6 steps of 2 rows; dotted changes as
    `changed` takes them."""
    (folder/'rows').mkdir(parents=True, exist_ok=True)
    for split in 'train', 'test':
        lines = (
            (asset('sample-conversations')/f'{split}.jsonl').read_text().splitlines(keepends=True))
        (folder/'rows'/f'{split}.jsonl').write_text(''.join(lines[:rows]))
    plain = Recipe(
        name='small', model={'source': str(small_base(folder/'base'))},
        data={'source': str(folder/'rows'), 'format': 'messages'}, method={'kind': 'full'},
        precision={'compute': 'float32'}, batch={'micro': 1, 'length': 64},
        optimizer={'steps': 6, 'learning_rate': 1e-3})
    return plain.changed(changes)


def fine_tune(recipe: Recipe, directory: Path, **how):
    "Fine-tune without a picture; a hang ends it after two minutes."
    from llm_workbook.training.fine_tune import fine_tune
    return fine_tune(recipe, directory, timeout_s=120, live=False, **how)


def losses(directory: Path) -> list:
    from llm_workbook import read_metrics
    return [row['loss'] for row in read_metrics(directory/'metrics.jsonl')]


def disturb(monkeypatch, act, rank=1, passes=3):
    "Let one rank call `act` in the middle of a forward pass, the third if not said otherwise."
    from llm_workbook.training import fine_tune as training
    make, seen = training.make_trainer, []
    def hook(*args):
        seen.append(1)
        if len(seen) == passes: act()
    def make_disturbed(*args, **how):
        trainer = make(*args, **how)
        layers = [m for m in trainer.model.modules() if type(m).__name__ == 'LlamaDecoderLayer']
        if int(os.environ['RANK']) == rank: layers[1].register_forward_pre_hook(hook)
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_disturbed)


def torchrun(
    recipe, directory: Path, *options, program=('-m', 'llm_workbook', 'train'), words=()
) -> subprocess.Popen:
    """Start two ranks by torchrun, as the job script does; what they say goes into `log` beside the
    directory."""
    directory.parent.mkdir(exist_ok=True)
    recipe.save(directory.parent/'recipe.yaml')
    command = [
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2',
        *options, *program, directory.parent/'recipe.yaml', '--directory', directory, *words]
    with open(directory.parent/'log', 'a') as log:
        # torchrun leaves a folder there
        env = os.environ | {'TMPDIR': str(directory.parent)} | {name: CANARY for name in TOKENS}
        return subprocess.Popen(
            list(map(str, command)), stdout=log, stderr=log, cwd=directory.parent, env=env)


def steps(directory) -> int: return len(losses(directory)) if directory.is_dir() else 0


def ended(process, seconds=90) -> int:
    try: return process.wait(seconds)
    finally:
        for child in (
            psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        ):
            child.kill()
        process.kill()


def launched(recipe, kind):
    """Render, and run the commands of one kind; it begins with the loss that one process has for
    the same rows."""
    from bench.shared.launches import by_command, single
    by_command(recipe, Path('runs/a b'), kind)
    fine_tune(single(recipe), Path('runs/alone'))
    found = losses(Path('runs/a b'))
    alone = losses(Path('runs/alone'))
    assert len(found) == 2
    assert found[0] == pytest.approx(alone[0], abs=1e-5)
    assert found[1] != found[0]
