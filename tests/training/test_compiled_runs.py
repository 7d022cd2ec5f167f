"""Runs whose blocks are compiled: the losses of plain runs, what is written down of it, and results
and checkpoints with the names that weights had before.

The unflagged case traces and splits, and generates no code: its compiler is torch's own kernels.
"""
import json
import shutil

import pytest
from safetensors import safe_open
from trouble import losses, slow_case, small_recipe

from llm_workbook.config.document import RecipeError
from llm_workbook.config.recipe import planned_only
from llm_workbook.files import asset
from llm_workbook.model.architecture import load_tokenizer
from llm_workbook.release.export import export
from llm_workbook.training import compiled_steps
from llm_workbook.training import fine_tune as training
from llm_workbook.training.effective import explain_config
from llm_workbook.training.run_directory import RunFiles, mark_run, read_metrics

COMPILED = {'model.kernels': 'compile'}
ONE = {'cluster.processes': 1, 'sharding.strategy': 'none'}
# Adapters beside one product of each half of a block: beside all, twice as much code is made
FEW = {'method.targets': ('q_proj', 'down_proj')}
LORA = FEW | {
    'method.kind': 'lora', 'method.storage': 'float32', 'optimizer.weight_decay': 0.0}
QLORA = FEW | {'method.kind': 'qlora', 'precision.compute': 'bfloat16'}
CHECKPOINTED = {'sharding.activation_checkpointing': 'full'}
PACKED = {'batch.packing': True, 'batch.length': 128}
SEGMENTS = PACKED | {'model.attention': 'segments', 'batch.micro': 2}
# float32: sums in another order, as in test_parity. bfloat16: a compiled block leaves out roundings
# of 2^-9 between operations; a loss of 7 is a sum of few that matter
LOSS, NORM, LOSS_16, NORM_16 = 1e-5, 1e-4, 2**-9, 2**-5


def fine_tune(recipe, directory, **how):
    return training.fine_tune(recipe, directory, timeout_s=600, live=False, **how)


@pytest.fixture
def traced(monkeypatch):
    "Compile without generating code, which would take a minute."
    whole = compiled_steps.compile_blocks
    monkeypatch.setattr(
        compiled_steps, 'compile_blocks', lambda model: whole(model, 'aot_eager_decomp_partition'))


def names_in(directory) -> set:
    "Names of all tensors in all files of weights below `directory`."
    found = set()
    for file in directory.rglob('*.safetensors'):
        with safe_open(file, 'pt') as weights: found |= set(weights.keys())
    return found


def compare(recipe, folder):
    "Train plainly and compiled; losses agree, and names are the same in every file."
    plain = fine_tune(recipe, folder/'plain')
    compiled = fine_tune(recipe.changed(COMPILED), folder/'compiled')
    half = recipe.precision.compute == 'bfloat16'
    for ours, theirs in zip(compiled.metrics, plain.metrics, strict=True):
        assert ours['loss'] == pytest.approx(theirs['loss'], rel=LOSS_16 if half else LOSS)
        assert ours['grad_norm'] == pytest.approx(
            theirs['grad_norm'], rel=NORM_16 if half else NORM)
    assert names_in(compiled.directory) == names_in(plain.directory)
    assert names_in(compiled.directory) and '_orig_mod' not in ' '.join(
        names_in(compiled.directory))
    texts = [f.read_text(errors='ignore') for f in compiled.directory.rglob('*.json')]
    assert '_orig_mod' not in ' '.join(texts)
    return compiled


def check_record(run, programs):
    "What was compiled is written down, in the first step above all."
    found = explain_config(run)
    assert found['model.kernels'].found == found['model.kernels'].asked == 'compile'
    record = json.loads(RunFiles(run.directory).compiled(0).read_text())
    assert record['blocks'] == ['layers.0', 'layers.1'] and record['breaks'] == {}
    assert len(record['compilations']) <= programs and not record['plain']
    assert record['steps'][0]['step'] == 1 and record['steps'][0]['compile_s'] > 0
    assert found['compiled.given_up'].found is False
    lines = read_metrics(run.directory/'metrics.jsonl')
    assert lines[0]['compiled'] >= 1 and 'compiled' not in lines[-1]


# Those of TRACED are traced; the others run generated code. Rows of one length need half as
# many programs as rows of many
TRACED = 'two ranks', 'two ranks, segments'
LEVEL = ('two ranks, lora', 'one, qlora', 'ddp, lora')
WAYS = {
    'two ranks': ({}, 3), 'two ranks, lora': (LORA, 2),
    'two ranks, packed, checkpointed': (CHECKPOINTED | PACKED, 3),
    'two ranks, segments': (SEGMENTS, 3),
    'one, qlora': (ONE | QLORA, 2), 'ddp, lora': (LORA | {'sharding.strategy': 'ddp'}, 2)}


def rows_of_one_length(folder):
    "Conversations of the sample that have 21 tokens each."
    tokenizer = load_tokenizer('tiny-base')
    folder.mkdir()
    for split in 'train', 'test':
        lines = (asset('sample-conversations')/f'{split}.jsonl').read_text().splitlines(True)
        kept = [line for line in lines[:200] if tokens_of(tokenizer, line) == 21]
        (folder/f'{split}.jsonl').write_text(''.join(kept))
    return folder


def tokens_of(tokenizer, line):
    messages = json.loads(line)['messages']
    return len(tokenizer.apply_chat_template(messages, return_dict=False))


@pytest.mark.slow
@pytest.mark.parametrize('way', TRACED)
def test_a_traced_run_learns_what_a_plain_one_learns(tmp_path, traced, way):
    changes, programs = WAYS[way]
    recipe = small_recipe(tmp_path, **changes | {'optimizer.steps': 3, 'intervals.saving': 2})
    check_record(compare(recipe, tmp_path), programs)


@pytest.mark.parametrize('way', [slow_case(way) for way in WAYS if way not in TRACED])
def test_a_compiled_run_learns_what_a_plain_one_learns(tmp_path, way):
    changes, programs = WAYS[way]
    recipe = small_recipe(tmp_path, **changes | {'optimizer.steps': 4, 'intervals.saving': 2})
    if way in LEVEL:
        recipe = recipe.changed({'data.source': str(rows_of_one_length(tmp_path/'level'))})
    check_record(compare(recipe, tmp_path), programs)


@pytest.mark.slow
def test_a_compiled_run_goes_on_where_it_was_and_is_exported(tmp_path, traced):
    recipe = small_recipe(tmp_path, **ONE | LORA | COMPILED | {
        'optimizer.steps': 4, 'intervals.saving': 2})
    whole = fine_tune(recipe, tmp_path/'whole')
    shutil.copytree(whole.directory, tmp_path/'cut')
    for later in 'adapters', 'checkpoint-4': shutil.rmtree(tmp_path/'cut'/later)
    mark_run(tmp_path/'cut', 'preempted', 2)
    cut = fine_tune(recipe, tmp_path/'cut', resume=True)
    assert len(cut.metrics) == 4 and cut.saved.is_dir()
    assert losses(cut.directory) == pytest.approx(losses(whole.directory), rel=LOSS)
    export(recipe, cut.saved, tmp_path/'merged', '16-bit', {'gate': False}, False)
    merged, base = names_in(tmp_path/'merged'), names_in(tmp_path/'base')
    assert merged == base


REFUSED = {
    'zero3': {'sharding.strategy': 'zero3'}, 'sharded qlora': QLORA,
    'selective': {'sharding.activation_checkpointing': 'selective'},
    'reentrant': {'sharding.strategy': 'ddp', 'sharding.reentrant': True} | CHECKPOINTED}


@pytest.mark.parametrize('changes', REFUSED.values(), ids=REFUSED)
def test_what_does_not_run_compiled_is_refused_by_name(tmp_path, changes):
    recipe = small_recipe(tmp_path, **changes)
    assert not planned_only(recipe)
    with pytest.raises(RecipeError, match='can be planned, not run'):
        training.check_recipe(recipe.changed(COMPILED))


def test_without_a_compiler_nothing_is_loaded(tmp_path, monkeypatch):
    recipe = small_recipe(tmp_path, **ONE | COMPILED)
    monkeypatch.setenv('PATH', '/nowhere')
    monkeypatch.delenv('CXX', raising=False)
    monkeypatch.setattr(training, 'check_base', lambda recipe: pytest.fail('a base was read'))
    with pytest.raises(ValueError, match='no .* is on PATH: install one'):
        training.fine_tune(recipe, tmp_path/'run', live=False)
    assert not (tmp_path/'run').exists()
