"""What stops a fine-tune: a recipe that cannot work, before any weight is loaded; ranks that die,
hang or diverge."""
import json
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import nullcontext

import psutil
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trouble import disturb, losses, slow_case, some_rows, wait_for

from llm_workbook.parallel import load as loading

from llm_workbook.parallel import ranks

from llm_workbook.parallel import shard
from llm_workbook.training import fine_tune as training
from llm_workbook.training import rank_run, trainer
from llm_workbook.training.data import load_rows
from llm_workbook.files import asset
from llm_workbook.parallel.fresh_process import run_fresh
from llm_workbook.parallel.ranks import RankError, RankTimeout
from llm_workbook.training.resume import Preempted
from llm_workbook.config.recipe import Recipe


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path_factory, monkeypatch):
    """After every test: no child process, and nothing in a folder for temporary files that this
    test has for itself."""
    temp = tmp_path_factory.mktemp('temp')
    monkeypatch.setenv('TMPDIR', str(temp))
    monkeypatch.setattr(tempfile, 'tempdir', str(temp))
    yield
    assert [
        child for child in psutil.Process().children(recursive=True) if child.is_running()] == []
    assert list(temp.iterdir()) == []


@pytest.fixture(scope='module')
def recipe(tmp_path_factory):
    "The smallest QLoRA over two ranks: 12 rows, 4 steps."
    folder = some_rows(tmp_path_factory.mktemp('rows'), 12)
    return Recipe(
        name='small', model={'source': 'tiny-base'},
        data={'source': str(folder), 'format': 'messages'}, batch={'micro': 1, 'length': 64},
        optimizer={'steps': 4, 'learning_rate': 3e-3})


@pytest.fixture(scope='module')
def healthy(recipe, tmp_path_factory):
    "An undisturbed run, with the seconds that it took from the call to the return."
    begin = time.monotonic()
    run = training.fine_tune(recipe, tmp_path_factory.mktemp('healthy')/'run', 300, live=False)
    return run, time.monotonic() - begin


@pytest.mark.parametrize('text', [False, True], ids=['conversations', 'text'])
def test_the_tokens_of_the_check_are_those_that_trl_makes(recipe, tmp_path, text):
    "Rows that bring no tokens are tokenised with the others; texts are short enough for a row."
    changes = {'batch.length': 64, 'method.kind': 'full', 'precision.compute': 'float32'}
    if text:
        lines = [f'The answer of row {i} is {i * i}.\n' for i in range(12)]
        (tmp_path/'lines.txt').write_text(''.join(lines))
        changes |= {'data.source': str(tmp_path/'lines.txt'), 'data.format': 'text'}
    asked = recipe.changed(changes)
    rows = training.check_recipe(asked)[0]
    plain = load_rows(asked.data, asked.seed)[0]
    assert plain == [{key: row[key] for key in plain[0]} for row in rows]
    assert len(rows) >= 10
    base = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    def tokenised(train, held_out):
        return training.make_trainer(asked, tmp_path, train, base, None, held_out).train_dataset
    ours = tokenised(rows, [])
    trl = tokenised(plain, [])
    mixed = tokenised(rows, plain)
    for key in 'input_ids', 'row': assert list(ours[key]) == list(trl[key]) == list(mixed[key])
    predicted = [[row['labels'][1:] for row in table] for table in (ours, trl, mixed)]
    assert predicted[0] == predicted[1] == predicted[2]


# Refused before a weight is loaded

@pytest.fixture
def no_weights(monkeypatch):
    "Fail the test when anything loads weights or starts a rank."
    def fail(*args, **kwargs): pytest.fail('a weight was loaded, or a rank started')
    for kind in AutoModelForCausalLM, PreTrainedModel:
        monkeypatch.setattr(kind, 'from_pretrained', fail)
    for module, name in (
        (loading, 'load_base'),
        (training, 'notebook_ranks'),
        (ranks, 'notebook_ranks'),
        (ranks, 'run_ranks')
    ):
        monkeypatch.setattr(module, name, fail)


def rows(*texts):
    return ''.join(
        json.dumps({'instruction': f'Say {text}', 'output': text}) + '\n' for text in texts)


FILES = {
    'empty.jsonl': '', 'blank.jsonl': '\n\n', 'two.jsonl': rows('yes', 'no'),
    'gap.jsonl': rows('one', 'two') + '{"instruction": "Say three"}\n' + rows('four'),
    'mute.jsonl': rows('one') + '{"instruction": "Say two", "output": ""}\n',
    'cut.jsonl': rows('one', 'two')[:-9],
    'reply.jsonl': '{"messages": [{"role": "user", "content": "Hello"}]}\n'}
REFUSED = {
    'unknown key': (
        {'optimizer.learnig_rate': 1e-4},
        "optimizer.learnig_rate = .*: unknown key; did you mean 'learning_rate'"),
    'unknown part': (
        {'optimiser': {'steps': 3}}, "optimiser.*unknown key; did you mean 'optimizer'"),
    'wrong type': (
        {'optimizer.steps': 'many'}, "optimizer.steps = 'many': must be a valid integer"),
    'wrong word': (
        {'method.kind': 'qlor'}, "method.kind = 'qlor': must be one of .*; did you mean 'qlora'"),
    'missing file': ({'data.source': 'no-such.jsonl'}, "'.*no-such.jsonl' is no path here"),
    'missing test file': (
        {'data.source': 'two.jsonl', 'data.test': 'no-such.jsonl'},
        "'.*no-such.jsonl' is no path here"),
    'empty file': ({'data.source': 'empty.jsonl'}, 'empty.jsonl: the file is empty'),
    'blank file': ({'data.source': 'blank.jsonl'}, 'blank.jsonl: the file is empty'),
    'missing field': ({'data.source': 'gap.jsonl'}, "gap.jsonl: line 3: 'output' is missing"),
    'empty field': ({'data.source': 'mute.jsonl'}, "mute.jsonl: line 2: 'output' is empty"),
    'cut row': ({'data.source': 'cut.jsonl'}, 'cut.jsonl: line 2: is no complete JSON value'),
    'no answer': (
        {'data.source': 'reply.jsonl'}, 'reply.jsonl: line 1: ends with a turn of the user'),
    'more processes than samples': (
        {'data.source': 'two.jsonl', 'data.test_share': 0, 'cluster.processes': 3},
        '2 training rows are fewer than one step takes: 3 .*cluster.processes'),
    'storage that cannot shard': (
        {'method.storage': 'uint8'}, 'method.storage.*accelerate shards .* precision.compute'),
    'storage of another width': (
        {'precision.compute': 'float32'}, 'method.storage.*accelerate shards .*compute'),
    'targets that match nothing': (
        {'method.targets': ['q_porj']}, "match no linear module.*did you mean 'q_proj'"),
    'one of two targets': (
        {'method.targets': ['q_proj', 'gate']}, "'gate', did you mean 'gate_proj'"),
    'missing model': (
        {'model.source': 'tiny-bse'}, "'tiny-bse' is no path here.*did you mean 'tiny-base'"),
    'no model': ({'model.source': '.'}, 'holds no config.json'),
    'rows too long': ({'batch.length': 8}, 'past batch.length 8, so its end would not train'),
    'several machines': ({'cluster.nodes': 2}, 'cluster.nodes is 2'),
    'settings ahead of the trainer': (
        {'batch.loss_head': 'full', 'intervals.checkpoint': 'full'},
        '2 problems in small.*set it to chunked.*set it to sharded'),
    'activations of a CPU that would leave it': (
        {'sharding.offload_activations': 'cpu', 'sharding.strategy': 'ddp',
         'sharding.activation_checkpointing': 'full'},
        "sharding.offload_activations = 'cpu'.*not run: .*is on the host already"),
    'flash attention that is not there': (
        {'model.attention': 'flash', 'cluster.device': 'cuda'},
        "needs the package flash-attn, which is not installed here: set it to 'sdpa'")}
AHEAD = {  # what a recipe can say and this version does not carry out, for each field of runs.yaml
    'method.quant': {'method.quant': 'int8', 'sharding.strategy': 'ddp'},
    'method.keep_inputs': {'method.keep_inputs': True},
    'precision.frozen': {'precision.frozen': 'norms'},
    'precision.compute': {
        'precision.compute': 'fp8', 'method.kind': 'lora', 'cluster.device': 'cuda'},
    'precision.master': {'precision.master': 'bfloat16'},
    'precision.reduce': {'precision.reduce': 'bfloat16'},
    'sharding.strategy': {'sharding.strategy': 'fsdp1', 'precision.master': 'bfloat16'},
    'sharding.loading': {'sharding.loading': 'rank0'},
    'optimizer.in_backward': {
        'optimizer.in_backward': True, 'optimizer.clip': 0, 'batch.accumulation': 1,
        'method.kind': 'full'},
    'batch.loss_head': {'batch.loss_head': 'full'},
    'optimizer.kind': {'optimizer.kind': 'adamw_bf16'},
    'intervals.checkpoint': {'intervals.checkpoint': 'full'},
}


@pytest.mark.parametrize('changes, words', REFUSED.values(), ids=REFUSED)
def test_a_recipe_that_cannot_work_is_refused_before_a_weight_is_loaded(
    recipe, tmp_path, no_weights, changes, words
):
    for name, text in FILES.items(): (tmp_path/name).write_text(text)
    paths = {name: str(tmp_path/name) for name in (*FILES, 'no-such.jsonl', '.')}
    changes = {
        field: paths.get(value, value) if isinstance(value, str) else value
        for field, value in changes.items()}
    if 'data.source' in changes: changes['data.format'] = 'auto'
    with pytest.raises((ValueError, ImportError), match=f'(?s){words}'):
        training.fine_tune(recipe.changed(changes), tmp_path/'run', live=False)
    assert not (tmp_path/'run').exists()


@pytest.mark.parametrize('field', yaml.safe_load((asset('runs.yaml')).read_text()))
def test_nothing_that_this_version_does_not_run_is_passed_over(recipe, no_weights, field):
    with pytest.raises(ValueError, match=f'{field} = .*not run by this version; set it to'):
        training.check_recipe(recipe.changed(AHEAD[field]))


@pytest.mark.parametrize(
    'changes, expected',  # The class of the optimizer, a word of its states, the attention
    [
        ({}, ('torch.optim.adamw.AdamW', 'torch.float32', 'sdpa')),
        ({'model.attention': 'eager'}, ('torch.optim.adamw.AdamW', 'torch.float32', 'eager')),
        slow_case(
            {'optimizer.kind': 'adamw_fused'},
            ('torch.optim.adamw.AdamW', 'torch.float32', 'sdpa')),
        slow_case({'optimizer.kind': 'sgd'}, ('torch.optim.sgd.SGD', '', 'sdpa')),
        (
            {'optimizer.kind': 'adafactor'},
            ('transformers.optimization.Adafactor', 'exp_avg_sq_row', 'sdpa')),
        (
            {'optimizer.kind': 'adamw_8bit'},
            ('bitsandbytes.optim.adamw.AdamW', 'torch.uint8', 'sdpa')),
    ],
)
def test_the_optimizer_and_the_attention_are_the_recipe_s(
    recipe, tmp_path, monkeypatch, changes, expected
):
    optimizer, states, attention = expected
    make = training.make_trainer
    def make_observed(*args):
        trainer = make(*args)
        train = trainer.train
        def train_observed():
            train()
            used = getattr(trainer.optimizer, 'optimizer', trainer.optimizer)
            first = next(iter(used.state.values()), {})
            what = [f'{name} {getattr(value, "dtype", "")}' for name, value in first.items()]
            in_force = (
                f'{type(used).__module__}.{type(used).__name__}', what,
                trainer.model.config._attn_implementation)
            (tmp_path/'seen.json').write_text(json.dumps(in_force))
        trainer.train = train_observed
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_observed)
    one = {'cluster.processes': 1, 'sharding.strategy': 'none', 'optimizer.steps': 2}
    run = training.fine_tune(recipe.changed(one | changes), tmp_path/'run', 300, live=False)
    name, held, kind = json.loads((tmp_path/'seen.json').read_text())
    assert len(run.metrics) == 2
    assert (name, kind) == (optimizer, attention)
    assert any(states in state for state in held) if states else held == []


def test_a_directory_with_a_run_is_left_alone(recipe, healthy, no_weights):
    run, _ = healthy
    def times():
        paths = [path for path in run.directory.rglob('*') if path.name != LOCK]
        return {path: path.stat().st_mtime_ns for path in paths}
    before = times()
    with pytest.raises(
        ValueError,
        match=r"'run' holds a run already \(finished, step 4\): continue it with resume=True"
    ):
        training.fine_tune(recipe, run.directory, live=False)
    assert times() == before


def test_the_revision_reaches_all_that_is_read(recipe, tmp_path, monkeypatch):
    def note(*args, **kwargs): raise LookupError([*args, *kwargs.values()])
    asked, rows = recipe.changed({'model.revision': 'abc123'}), [{'messages': []}]
    for module, name, call in (
        (training, 'check_targets', lambda: training.check_recipe(asked)),
        (AutoTokenizer, 'from_pretrained', lambda: training.check_recipe(asked)),
        (loading, 'load_base', lambda: training.train_rank(asked, tmp_path, rows))
    ):
        with monkeypatch.context() as patch, pytest.raises(LookupError, match='abc123'):
            patch.setattr(module, name, note)
            call()


def test_plain_text_is_known_by_its_rows(recipe, tmp_path):
    (tmp_path/'lines.txt').write_text(''.join(f'Line {i} of a text.\n' for i in range(10)))
    one = {'cluster.processes': 1, 'sharding.strategy': 'none', 'optimizer.steps': 2}
    plain = recipe.changed(one | {'data.source': str(tmp_path/'lines.txt'), 'data.format': 'auto'})
    assert len(training.fine_tune(plain, tmp_path/'run', 300, live=False).metrics) == 2


# Faults while it trains

LOCK = '.llmw.lock'  # Stays, empty or not; only what the system says of it counts


WATCHED = (
    'metrics', 'metrics/stage.json', 'metrics/rank-00000.jsonl', 'metrics/rank-00001.jsonl')
BEGUN = {'recipe.yaml', 'effective.json', 'metrics.jsonl', 'run.json', *WATCHED}


def files(directory):
    "All that a run has left, but its lock, and what has ended its ranks."
    names = {str(path.relative_to(directory)) for path in directory.rglob('*')}
    return {name for name in names if LOCK not in name and 'errors' not in name}


def errors(directory): return [file.read_text() for file in directory.glob('errors/rank-*.txt')]


def test_a_run_leaves_its_files_and_the_tokenizer_with_its_template(healthy):
    run, _ = healthy
    assert errors(run.directory) == []
    assert files(run.directory) == BEGUN | {
        'certificate.json', 'adapters', 'adapters/adapter_config.json',
        'adapters/adapter_model.safetensors',
        'adapters/chat_template.jinja', 'adapters/tokenizer.json',
        'adapters/tokenizer_config.json'}
    assert Recipe.load(run.directory/'recipe.yaml') == run.recipe
    assert len(run.metrics) == 4


@pytest.mark.slow
def test_a_killed_rank_is_named_within_5_s_and_the_next_run_is_untouched(
    recipe, healthy, tmp_path, monkeypatch
):
    def die():
        (tmp_path/'died').write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    with monkeypatch.context() as patch:
        disturb(patch, die)
        with pytest.raises(RankError, match='rank 1 was killed by SIGKILL') as caught:
            training.fine_tune(recipe, tmp_path/'killed', 300, live=False)
    late_s = time.time() - float((tmp_path/'died').read_text())
    print(f'a killed rank was told after {late_s:.1f} s')
    assert caught.value.rank == 1
    assert late_s < 5
    assert psutil.Process().children() == []
    assert files(tmp_path/'killed') == BEGUN
    expected = losses(healthy[0].directory)
    assert losses(tmp_path/'killed') == expected[:2]
    assert (
        losses(training.fine_tune(recipe, tmp_path/'next', 300, live=False).directory) == expected)


def test_a_hanging_rank_is_named_at_the_limit(recipe, healthy, tmp_path, monkeypatch):
    def hang():
        (tmp_path/'hangs').touch()
        time.sleep(1000)
    disturb(monkeypatch, hang)
    # the second is for a machine that has just become busy
    for limit_s in 2 * healthy[1], 10 * healthy[1]:
        begin = time.monotonic()
        run = tmp_path/f'{limit_s}'
        with pytest.raises(RankTimeout) as caught:
            training.fine_tune(recipe, run, limit_s, live=False)
        assert time.monotonic() - begin < limit_s + 5
        if (tmp_path/'hangs').exists(): break
    assert (caught.value.rank, caught.value.stuck, caught.value.waiting) == (1, [1], [0]), str(
        caught.value)
    assert 'rank 1 is stuck' in str(caught.value)
    assert 'in hang' in caught.value.stacks[1]
    assert files(run) == BEGUN


@pytest.mark.parametrize('module, name', [
    slow_case(loading, '_read'), (trainer, 'payload_digest')])
def test_a_slow_disk_before_the_first_step_is_no_hang(
    recipe, tmp_path, monkeypatch, module, name
):
    "A base that arrives inside `train`, and its hash; rank 0 waits for rank 1 meanwhile."
    work, slept = getattr(module, name), []
    def slow(*args):
        if os.environ['RANK'] == '1' and not slept:
            slept.append(1)
            time.sleep(8)
            (tmp_path/'slept').touch()
        return work(*args)
    monkeypatch.setattr(module, name, slow)
    arriving = recipe.changed({'sharding.loading': 'sharded', 'optimizer.steps': 2})
    run = training.fine_tune(arriving, tmp_path/'run', 300, live=False, step_timeout_s=5.0)
    assert (tmp_path/'slept').exists()
    assert len(run.metrics) == 2
    assert not (tmp_path/'run/stacks').exists()


def test_after_a_slow_start_a_rank_that_hangs_is_named(recipe, tmp_path, monkeypatch):
    disturb(monkeypatch, lambda: time.sleep(1000), passes=1)
    arriving = recipe.changed({'sharding.loading': 'sharded'})
    with pytest.raises(RankError) as caught:
        training.fine_tune(arriving, tmp_path/'run', 300, live=False, step_timeout_s=5.0)
    assert 'ranks [1] stuck, ranks [0] waiting for another' in caught.value.reason
    assert caught.value.rank == 1


def test_a_loss_that_is_no_number_ends_the_run_and_saves_nothing(recipe, tmp_path):
    with pytest.raises(
        RankError,
        match='FloatingPointError: (loss|grad_norm) (nan|inf) at step [234]: nothing is sav'
    ):
        training.fine_tune(
            recipe.changed({'optimizer.learning_rate': 1e30}), tmp_path/'nan', 300, live=False)
    assert files(tmp_path/'nan') == BEGUN
    assert any('FloatingPointError: ' in text for text in errors(tmp_path/'nan'))
    assert 0 < len(losses(tmp_path/'nan')) < 4


def test_a_last_gradient_that_is_no_number_saves_nothing_either(recipe, tmp_path, monkeypatch):
    make, passes = training.make_trainer, []
    def hook(layer, inputs, output):
        passes.append(1)
        if len(passes) == 2: output.register_hook(lambda gradient: gradient * float('nan'))
    def make_disturbed(*args):
        trainer = make(*args)
        trainer.model.model.layers[2].register_forward_hook(hook)
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_disturbed)
    last = recipe.changed(
        {'optimizer.steps': 2, 'method.kind': 'full', 'precision.compute': 'float32'})
    with pytest.raises(
        RankError, match='FloatingPointError: grad_norm nan at step 2: nothing is saved'
    ):
        training.fine_tune(last, tmp_path/'nan', 300, live=False)
    assert files(tmp_path/'nan') == BEGUN
    assert any('FloatingPointError: ' in text for text in errors(tmp_path/'nan'))
    assert len(losses(tmp_path/'nan')) == 1


def test_under_deepspeed_a_gradient_that_is_no_number_does_not_claim_whole_weights(
    recipe, tmp_path, monkeypatch
):
    make = training.make_trainer
    def spoil_gradient(layer, inputs, output):
        output.register_hook(lambda gradient: gradient * float('nan'))
    def make_disturbed(*args):
        trainer = make(*args)
        trainer.model.model.layers[2].register_forward_hook(spoil_gradient)
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_disturbed)
    zero = recipe.changed(
        {'method.kind': 'full', 'precision.compute': 'float32', 'sharding.strategy': 'zero2'})
    with pytest.raises(RankError, match=r'grad_norm (nan|inf) at step 1: nothing is saved \('):
        training.fine_tune(zero, tmp_path/'nan', 300, live=False)


def test_a_sharding_that_one_rank_lacks_is_told_to_all(recipe, tmp_path, monkeypatch):
    check = shard.assert_sharding
    def other(*args):
        if os.environ['RANK'] == '1': raise shard.ShardingMismatch('spoilt')
        return check(*args)
    monkeypatch.setattr(rank_run, 'assert_sharding', other)
    begin = time.monotonic()
    with pytest.raises(RankError, match='ShardingMismatch: spoilt'):
        training.fine_tune(recipe, tmp_path/'run', 300, live=False)
    assert time.monotonic() - begin < 120
    assert training.read_metrics(tmp_path/'run'/'metrics.jsonl') == []


def test_a_run_has_no_limit_and_a_step_has_one():
    from inspect import signature
    from llm_workbook.launching.background import launch
    for call in training.fine_tune, launch:
        limits = {
            name: signature(call).parameters[name].default
            for name in ('timeout_s', 'step_timeout_s')}
        assert limits == {'timeout_s': None, 'step_timeout_s': 1200.0}
    with pytest.raises(ValueError, match='timeout_s must be more than 0'):
        launch(Recipe.named('reviews-qlora'), 'never', timeout_s=0)


def test_accelerate_falling_back_to_ddp_is_refused_before_the_first_step(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, 'cpu_fsdp', nullcontext)
    for rank in 0, 1: disturb(monkeypatch, (tmp_path/f'stepped-{rank}').touch, rank, 1)
    with pytest.raises(
        RankError, match='ShardingMismatch: fsdp2 over 2 ranks was asked for, but'
    ) as caught:
        training.fine_tune(recipe, tmp_path/'ddp', 300, live=False)
    assert 'are not DTensors' in str(caught.value)
    assert 'cpu_fsdp()' in str(caught.value)
    assert files(tmp_path) == {
        'ddp', 'ddp/recipe.yaml', 'ddp/run.json', 'ddp/metrics', 'ddp/metrics/stage.json'}
    assert any('ShardingMismatch: fsdp2' in text for text in errors(tmp_path/'ddp'))


# Rows that are tokens already

def test_rows_are_prepared_as_trl_prepares_them(recipe, tmp_path, monkeypatch):
    import random
    from trl import SFTTrainer
    draw = random.Random(0)
    rows = []
    for _ in range(40):
        ids = [draw.randint(5, 1000) for _ in range(draw.randint(3, 40))]
        asked = draw.randint(0, len(ids))
        rows.append({'input_ids': ids, 'labels': [-100] * asked + ids[asked:]})
    alone = recipe.changed({
        'batch.length': 20, 'cluster.processes': 1, 'sharding.strategy': 'none'})
    base = AutoModelForCausalLM.from_pretrained(asset('tiny-base'))
    def prepared():
        plain = alone.changed({'method.kind': 'full'})
        made = training.make_trainer(plain, tmp_path, rows, base, held=rows[:7])
        return list(made.train_dataset), list(made.eval_dataset)
    ours = prepared()
    make = SFTTrainer.__init__
    def by_trl(self, model, args, *more, **options):
        args.dataset_kwargs = None
        make(self, model, args, *more, **options)
    make_table = trainer.trainer_table
    monkeypatch.setattr(SFTTrainer, '__init__', by_trl)
    whole = [row | {'labels': row['input_ids']} for row in rows]  # So that none is left out here
    def uncut(some, keys, recipe, longest=None, by_source=False):
        table = make_table(whole[:len(some)], keys, recipe)
        return table.remove_columns('labels').add_column('labels', [row['labels'] for row in some])
    monkeypatch.setattr(trainer, 'trainer_table', uncut)
    assert ours == prepared()
    assert 7 < len(ours[0]) < len(rows)


# A kernel whose forks could use no GPU; torch's Python side says that there is one

@pytest.fixture
def spoilt(monkeypatch, recipe):
    "A recipe for GPUs, in a kernel that has asked CUDA for its devices."
    import torch
    kernel = os.getpid()
    monkeypatch.setattr('accelerate.utils.is_cuda_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: False)
    monkeypatch.setattr(torch.cuda, '_is_in_bad_fork', lambda: os.getpid() != kernel)
    monkeypatch.delitem(sys.modules, 'bitsandbytes', raising=False)
    return recipe.changed({'cluster.device': 'cuda'})


def test_a_spoilt_kernel_starts_its_ranks_from_a_fresh_process(
    spoilt, tmp_path, monkeypatch, capsys
):
    calls = []
    def note(*call):
        calls.append(call)
        return ['a report', 'another']
    monkeypatch.setattr(training, 'run_fresh', note)
    run = training.fine_tune(spoilt, tmp_path/'run', 50, live=True, step_timeout_s=7)
    assert (run.recipe, run.directory, run.ranks) == (
        spoilt, tmp_path/'run', ['a report', 'another'])
    assert 'CUDA was asked for its devices in this kernel' in capsys.readouterr().out
    (function, (work, count, task, limit_s, env), curve), = calls
    assert (function, work, count, limit_s) == (ranks.notebook_ranks, training.train_rank, 2, 50)
    assert env == training.fsdp_env(spoilt)
    asked, directory, rows, start, step_timeout_s, held = task
    assert (asked, directory, start.step, step_timeout_s) == (spoilt, tmp_path/'run', 0, 7)
    assert (rows, held) == training.check_recipe(spoilt)
    assert isinstance(curve, training.LossCurve)


def test_a_clean_kernel_forks_its_ranks(spoilt, tmp_path, monkeypatch):
    import torch
    monkeypatch.setattr(torch.cuda, '_is_in_bad_fork', lambda: False)
    monkeypatch.setattr(training, 'run_fresh', lambda *call: pytest.fail('a fresh process'))
    monkeypatch.setattr(training, 'notebook_ranks', lambda *call: ['here'])
    assert training.fine_tune(spoilt, tmp_path/'run', live=False).ranks == ['here']


def test_a_recipe_for_cpus_is_forked_from_a_spoilt_kernel(
    spoilt, recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, 'run_fresh', lambda *call: pytest.fail('a fresh process'))
    monkeypatch.setattr(training, 'notebook_ranks', lambda *call: ['here'])
    assert training.fine_tune(recipe, tmp_path/'run', live=False).ranks == ['here']


def on_cpus(recipe):
    "Stand in for `run_fresh` where there is no GPU: the same call, for CPUs."
    def start(function, call, watch):
        work, count, (_, *task), limit_s, _ = call
        cpu_call = work, count, (recipe, *task), limit_s, training.fsdp_env(recipe)
        return run_fresh(function, cpu_call, watch)
    return start


@pytest.mark.slow
def test_the_run_of_a_fresh_process_is_the_same(healthy, spoilt, recipe, tmp_path, monkeypatch):
    "To the last digit, with the same reports; and it is preempted and goes on like any other."
    monkeypatch.setattr(training, 'run_fresh', on_cpus(recipe))
    run = training.fine_tune(spoilt, tmp_path/'run', 300, live=False)
    expected = healthy[0]
    def without_time(metrics):
        return [{key: value for key, value in row.items() if key in ('step', 'loss', 'grad_norm')}
                for row in metrics]
    assert len(run.metrics) == 4
    assert without_time(run.metrics) == without_time(expected.metrics)
    for ours, theirs in zip(run.ranks, expected.ranks, strict=True):
        for key in 'shards', 'payload', 'saved': assert ours[key] == theirs[key]


@pytest.mark.slow
def test_a_signal_reaches_a_fresh_process(spoilt, recipe, tmp_path, monkeypatch):
    long = {'optimizer.steps': 1000, 'batch.length': 64}
    monkeypatch.setattr(training, 'run_fresh', on_cpus(recipe.changed(long)))
    metrics = tmp_path/'run'/'metrics.jsonl'
    def interrupt():
        wait_for(lambda: metrics.exists() and metrics.read_text().count('loss') > 1, 120)
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Preempted) as caught:
        training.fine_tune(spoilt.changed(long), tmp_path/'run', 300, live=False)
    thread.join()
    assert caught.value.step >= 2
    assert training.run_state(tmp_path/'run') == {'state': 'preempted', 'step': caught.value.step}
