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

CANARY = 'hf' + '_' + 'Canary' * 6  # Put together here, so that no file holds it
TOKENS = 'HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'WANDB_API_KEY'


def wait_for(condition, seconds=10):
    "Look until `condition()` holds, at most so long; give back what it was last."
    end = time.monotonic() + seconds
    found = condition()
    while not found and time.monotonic() < end:
        time.sleep(0.05)
        found = condition()
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


def slow_case(*values):
    "A case that takes long: `make test` leaves it out, `make test-slow` runs it."
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


def wide_base(folder: Path) -> Path:
    "The shape of three layers as wide as those of Llama 3.2 1B, for plan and rehearsal alone."
    config = {
        'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], 'vocab_size': 32_000,
        'hidden_size': 2048, 'intermediate_size': 8192, 'num_hidden_layers': 3,
        'num_attention_heads': 32, 'num_key_value_heads': 8, 'head_dim': 64,
        'max_position_embeddings': 8192, 'tie_word_embeddings': True, 'dtype': 'bfloat16'}
    (folder/'config.json').write_text(json.dumps(config))
    return folder


def some_rows(folder: Path, train: int, test: int | None = None) -> Path:
    "Write the first conversations of the sample into `folder`; as many of each split, if not said."
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in ('train', train), ('test', train if test is None else test):
        text = (asset('sample-conversations')/f'{split}.jsonl').read_text()
        (folder/f'{split}.jsonl').write_text(''.join(text.splitlines(keepends=True)[:count]))
    return folder


def small_recipe(folder: Path, rows=24, **changes) -> Recipe:
    """Full training of the small base over two ranks, 6 steps of 2 rows; dotted changes as
    `changed` takes them."""
    some_rows(folder/'rows', rows)
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


def decoder_layers(trainer) -> list:
    return [m for m in trainer.model.modules() if type(m).__name__ == 'LlamaDecoderLayer']


def disturb(monkeypatch, act, rank=1, passes=3):
    "Let one rank call `act` in the middle of a forward pass, the third if not said otherwise."
    from llm_workbook.training import fine_tune as training
    make_trainer = training.make_trainer
    passes_done = []
    def count_and_act(*args):
        passes_done.append(1)
        if len(passes_done) == passes: act()
    def make_disturbed_trainer(*args, **how):
        trainer = make_trainer(*args, **how)
        if int(os.environ['RANK']) == rank:
            decoder_layers(trainer)[1].register_forward_pre_hook(count_and_act)
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_disturbed_trainer)


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
    environment = os.environ | {name: CANARY for name in TOKENS}
    environment['TMPDIR'] = str(directory.parent)  # torchrun leaves a folder there
    with open(directory.parent/'log', 'a') as log:
        return subprocess.Popen(
            list(map(str, command)), stdout=log, stderr=log, cwd=directory.parent,
            env=environment)


def steps_done(directory) -> int:
    if not directory.is_dir(): return 0
    return len(losses(directory))


def exit_code(process, seconds=90) -> int:
    "Wait for a process to end; one that does not end in time is killed with all below it."
    try:
        return process.wait(seconds)
    finally:
        still_runs = process.poll() is None
        below = psutil.Process(process.pid).children(recursive=True) if still_runs else []
        for child in below: child.kill()
        process.kill()


def assert_commands_train(recipe, kind):
    """Render, and run the commands of one kind; it begins with the loss that one process has for
    the same rows."""
    from bench.shared.launches import by_command, single
    by_command(recipe, Path('runs/a b'), kind)
    fine_tune(single(recipe), Path('runs/alone'))
    by_ranks = losses(Path('runs/a b'))
    by_one_process = losses(Path('runs/alone'))
    assert len(by_ranks) == 2
    assert by_ranks[0] == pytest.approx(by_one_process[0], abs=1e-5)
    assert by_ranks[1] != by_ranks[0]


def assert_all_kept(found, changes: dict) -> None:
    "Assert that a recipe keeps all relations, but for those that its changes leave out."
    assert found.passed, found
    left_out = {one.name for one in found.relations if one.passed is None}
    expected = set()
    if changes.get('method.kind') == 'full': expected = {'adapters', 'reach', 'merge'}
    if changes.get('sharding.strategy') == 'none': expected = {'ranks'}
    assert left_out == expected, found
