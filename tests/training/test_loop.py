"""The plain loop: the losses of the trainer, resumed to the last digit, on every strategy; and a
head that is found again."""
import functools
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from trouble import fine_tune, slow_case, small_base, small_recipe

from llm_workbook.training import loop as module
from llm_workbook.training.classifier import (
    class_rows, class_tokenizer, load_classifier, make_loader, reload_classifier, token_rows)
from llm_workbook.checkpoint.manifest import survey
from llm_workbook.training.data import load_rows
from llm_workbook.files import asset
from llm_workbook.parallel.ranks import RankError, notebook_ranks
from llm_workbook.config.recipe import Recipe
from llm_workbook.training.run_directory import begin_run, mark_run, read_metrics, run_state
from llm_workbook.parallel.backends import fsdp_env

SLOW = pytest.mark.slow
ALONE = {'cluster.processes': 1, 'sharding.strategy': 'none'}
ZERO = {
    'zero.persistence_threshold': 1000, 'zero.reduce_bucket': 1_000_000,
    'zero.prefetch_bucket': 1_000_000}
ZERO3 = {'sharding.strategy': 'zero3', **ZERO}
FULL = {'method.kind': 'full', 'precision.compute': 'float32'}
WAYS = {
    'alone': ALONE, 'fsdp2': {}, 'zero3': ZERO3, 'fsdp2, full': FULL, 'zero3, full': ZERO3 | FULL,
    'ddp': {'sharding.strategy': 'ddp', 'method.kind': 'lora', 'intervals.logging': 3}}
STARS = {1: 'negative', 2: 'negative', 3: None, 4: 'positive', 5: 'positive'}


@pytest.fixture(scope='module')
def judge(tmp_path_factory):
    """QLoRA with dropout and a head on a base of two layers: some 30 rows to train on, 7 held out,
    8 steps of 2 x 2 x 2 rows."""
    folder = tmp_path_factory.mktemp('judge')
    lines = (asset('sample-reviews')/'train.jsonl').read_text().splitlines(keepends=True)
    for split, part in (
        ('train', lines[:36]),
        ('test', [x for x in lines[36:] if '"stars": 3' not in x][:7])
    ):
        (folder/f'{split}.jsonl').write_text(''.join(part))
    return Recipe(
        name='judge', model={'source': str(small_base(folder/'base')), 'head': 'classification'},
        data={
            'source': str(folder), 'format': 'classification', 'text_column': 'text',
            'label_column': 'stars', 'labels': STARS},
        method={'rank': 8, 'dropout': 0.1}, batch={'micro': 2, 'accumulation': 2, 'length': 48},
        optimizer={'steps': 8, 'learning_rate': 3e-3})


def train(recipe, directory, act=None, resume=False):
    "Train by the loop on real ranks; `act(loop, step)` is called on every rank after each step."
    rows = (
        class_rows(recipe)[0]
        if recipe.model.head == 'classification'
        else load_rows(recipe.data, recipe.seed)[0])
    start = begin_run(recipe, directory, resume)
    def work(*args):
        step = module.train_step
        def watched(loop, window):
            made = step(loop, window)
            if act: act(loop, loop.step)
            return made
        module.train_step = watched
        return module.train_loop(*args)

    return notebook_ranks(
        work, recipe.cluster.ranks, (recipe, directory, rows, start), 200, fsdp_env(recipe))


def logits(model, loader):
    import torch
    model.eval()
    with torch.no_grad():
        return [
            model(input_ids=b['input_ids'], attention_mask=b['attention_mask']).logits.float()
            for b in loader]


@pytest.fixture(scope='module')
def undisturbed(judge, tmp_path_factory):
    """A function that trains in one of `WAYS` to the end, once: gives the recipe, the directory and
    what the ranks gave. `logits-0` there is what rank 0 answers to the rows that are held out."""
    @functools.cache
    def run(way):
        import torch
        recipe = judge.changed(WAYS[way] | {'intervals.evaluation': 2})
        directory = tmp_path_factory.mktemp('undisturbed')/'run'
        def keep(loop, step):
            if step < 8: return
            # The same rows on every rank
            found = logits(loop.model_wrapped, loop.batches(class_rows(recipe)[1]))
            loop.model_wrapped.train()
            torch.save(found, directory/f'logits-{loop.run.rank}')
        return recipe, directory, train(recipe, directory, keep)
    return run


def lines(directory, name='metrics.jsonl'): return read_metrics(Path(directory)/name)


def far(a, b, keys=('loss', 'grad_norm', 'learning_rate')):
    assert [x['step'] for x in a] == [x['step'] for x in b]
    found = {key: max(abs(x[key] - y[key]) for x, y in zip(a, b)) for key in keys}
    print(found)
    return max(found.values())


# The same as the trainer

@pytest.mark.parametrize(
    'changes',
    [
        {'sharding.strategy': 'fsdp2', 'batch.accumulation': 4},
        pytest.param({'sharding.strategy': 'zero3', **ZERO}, marks=SLOW),
        pytest.param(
            {'sharding.strategy': 'ddp', 'method.kind': 'lora', 'intervals.logging': 2}, marks=SLOW
        ),
        pytest.param(ALONE | {'optimizer.kind': 'sgd'}, marks=SLOW),
    ],
    ids=['fsdp2', 'zero3', 'ddp', 'alone'],
)
def test_the_loop_has_the_losses_of_the_trainer(tmp_path, changes):
    from llm_workbook.training.fine_tune import train_rank

    recipe = small_recipe(
        tmp_path,
        23,
        **{
            'batch.micro': 2, 'batch.accumulation': 2, 'optimizer.weight_decay': 0.1,
            'optimizer.warmup': 0.3}
        | changes)
    train(recipe, tmp_path/'loop')
    rows = load_rows(recipe.data, recipe.seed)[0]
    notebook_ranks(
        train_rank, recipe.cluster.ranks,
        (recipe, tmp_path/'trainer', rows, begin_run(recipe, tmp_path/'trainer')), 200,
        fsdp_env(recipe))
    trainer = lines(tmp_path/'trainer')
    loop = lines(tmp_path/'loop')
    assert far(trainer, loop) <= 1e-6
    assert [m.keys() for m in trainer] == [m.keys() for m in loop]
    assert [m['num_tokens'] for m in trainer] == [m['num_tokens'] for m in loop]


def test_a_clip_of_zero_switches_clipping_off(tmp_path):
    "As documented: what trains is what trains under a limit that nothing reaches."
    recipe = small_recipe(
        tmp_path, 8, **ALONE,
        **{'optimizer.kind': 'sgd', 'optimizer.steps': 3, 'optimizer.warmup': 0.0})
    free = tmp_path/'free'
    far_off = tmp_path/'far off'
    train(recipe.changed({'optimizer.clip': 0.0}), free)
    train(recipe.changed({'optimizer.clip': 1e9}), far_off)
    assert far(lines(free), lines(far_off)) == 0
    assert len({line['loss'] for line in lines(free)}) == 3, 'every step has changed the weights'


# Resumed

@pytest.mark.parametrize('way, tolerance', [
    ('alone', 0), *[
        slow_case(way, 1e-6) for way in ('fsdp2', 'fsdp2, full', 'zero3', 'ddp')]])
def test_a_resumed_loop_is_the_one_that_was_not_stopped(undisturbed, tmp_path, way, tolerance):
    recipe, directory, whole = undisturbed(way)
    def tell(loop, step):
        if step == 4 and loop.run.rank == recipe.cluster.ranks - 1:
            os.kill(os.getpid(), signal.SIGTERM)
    assert train(recipe, tmp_path/'two', tell) == [{'preempted': 4}] * recipe.cluster.ranks
    assert run_state(tmp_path/'two') == {'state': 'preempted', 'step': 4}
    assert [f.step for f in survey(tmp_path/'two').valid] == [4]
    resumed = train(recipe, tmp_path/'two', resume=True)
    assert far(lines(directory), lines(tmp_path/'two')) <= tolerance
    assert (
        far(
            *(lines(folder, 'evaluation.jsonl') for folder in (directory, tmp_path/'two')),
            ('loss', 'accuracy'))
        <= tolerance)
    assert run_state(tmp_path/'two')['state'] == 'finished'
    assert resumed[0]['payload'] == whole[0]['payload']
    assert resumed[0]['scores']['rows'] == 7 == sum(map(sum, resumed[0]['scores']['counts']))


def test_a_session_that_is_over_ends_the_loop_before_its_first_step(judge, tmp_path):
    short = judge.changed(ALONE | {'intervals.session_h': 1e-6})
    assert train(short, tmp_path/'run') == [{'preempted': 0}]
    assert run_state(tmp_path/'run') == {'state': 'preempted', 'step': 0}


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_loop_goes_on_from_the_last_commit(
    judge, undisturbed, tmp_path
):
    recipe, (_, whole, _) = judge.changed({'intervals.saving': 2}), undisturbed('fsdp2')
    def die(loop, step):
        if step == 6 and loop.run.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankError, match='rank 1 was killed by SIGKILL'):
        train(recipe, tmp_path/'two', die)
    assert survey(tmp_path/'two').valid[0].step in (2, 4)
    train(recipe, tmp_path/'two', resume=True)
    assert far(lines(whole), lines(tmp_path/'two')) <= 1e-6


# Guards

def test_a_loss_that_is_no_number_ends_every_rank_and_saves_nothing(judge, tmp_path):
    with pytest.raises(
        RankError,
        match=r'FloatingPointError: (loss|grad_norm) (nan|inf) at step [23]: nothing is saved.*rank'
    ):
        train(
            judge.changed({'optimizer.learning_rate': 1e30, 'optimizer.warmup': 0.0}),
            tmp_path/'run')
    assert not (tmp_path/'run'/'adapters').exists()


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(judge, tmp_path):
    def work(*args):
        train_step = module.train_step
        def step_and_hang(loop, window):
            result = train_step(loop, window)
            if loop.step == 2 and loop.run.rank == 1: time.sleep(1000)
            return result
        module.train_step = step_and_hang
        return module.train_loop(*args)
    task = judge, tmp_path/'run', class_rows(judge)[0], begin_run(judge, tmp_path/'run'), 15.0
    with pytest.raises(RankError): notebook_ranks(work, 2, task, 120, fsdp_env(judge))
    stacks = {
        path.name: json.loads(path.read_text())
        for path in (tmp_path/'run'/'stacks').glob('rank-*.json')}
    assert stacks['rank-0.json']['waits']
    assert not stacks['rank-1.json']['waits']


def test_a_base_that_is_hashed_slowly_is_no_hang(judge, tmp_path):
    def work(*args):
        payload_digest = module.payload_digest
        def slow(*args):
            if os.environ['RANK'] == '1': time.sleep(8)
            return payload_digest(*args)
        module.payload_digest = slow
        return module.train_loop(*args)
    recipe = judge.changed({'optimizer.steps': 2})
    task = recipe, tmp_path/'run', class_rows(recipe)[0], begin_run(recipe, tmp_path/'run'), 5.0
    notebook_ranks(work, 2, task, 120, fsdp_env(recipe))
    assert [line['step'] for line in lines(tmp_path/'run')] == [1, 2]
    assert not (tmp_path/'run/stacks').exists()


def test_accelerate_that_counts_too_few_ranks_is_refused(judge, tmp_path):
    wrong = judge.changed({'cluster.processes': 3})
    with pytest.raises(RankError, match='accelerate counts 2 ranks and the recipe 3'):
        notebook_ranks(module.make_accelerator, 2, (wrong,), 60, fsdp_env(wrong))


def test_under_deepspeed_on_cpu_every_rank_has_rows_of_its_own(judge, tmp_path):
    zero = judge.changed({'sharding.strategy': 'zero2'})
    def count(recipe):
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin
        from llm_workbook.parallel.backends import zero_config
        plain = recipe is None
        from deepspeed.ops import __compatible_ops__
        __compatible_ops__['deepspeed_shm_comm'] = False  # Or it is compiled here
        accelerator = (
            Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero_config(zero)))
            if plain
            else module.make_accelerator(recipe))
        rows = accelerator.prepare_data_loader(
            module.make_loader([{'input_ids': [5], 'labels': 0, 'row': i} for i in range(8)], 1, 2))
        import torch.distributed as dist

        return (
            accelerator.num_processes, [int(i) for batch in rows for i in batch['row']],
            dist.is_initialized() and dist.get_world_size())

    assert notebook_ranks(count, 2, (zero,), 60, fsdp_env(zero)) == [
        (2, [0, 1, 4, 5], 2),
        (2, [2, 3, 6, 7], 2)]
    trap = notebook_ranks(count, 2, (None,), 60, fsdp_env(zero))
    assert [ranks for ranks, *_ in trap] == [1, 1]
    assert [rows for _, rows, _ in trap] == [[*range(8)]] * 2


# The head is found again

@pytest.mark.parametrize('way', [
    'fsdp2', slow_case('zero3'), slow_case('ddp'), slow_case('zero3, full')])
@pytest.mark.slow
def test_what_was_saved_gives_the_same_logits_on_a_fresh_base(undisturbed, way):
    import torch
    recipe, directory, _ = undisturbed(way)
    tokenizer = class_tokenizer(recipe)
    rows = token_rows(recipe, class_rows(recipe)[1], tokenizer)
    for reader in (recipe, recipe.changed(ALONE | {'sharding.strategy': 'none'})):
        model = reload_classifier(reader, directory)
        again = logits(model, make_loader(rows, tokenizer.pad_token_id, recipe.batch.micro))
        for rank in range(2):
            kept = torch.load(directory/f'logits-{rank}')
            assert [a.shape for a in kept] == [b.shape for b in again]
            assert all(map(torch.equal, kept, again))
    fresh = logits(
        load_classifier(recipe), make_loader(rows, tokenizer.pad_token_id, recipe.batch.micro))
    assert not any(map(torch.equal, fresh, again))


# Odd recipes, and what is written once

@pytest.mark.parametrize('zero', [False, pytest.param(True, marks=SLOW)])
@pytest.mark.slow
def test_a_constant_rate_with_its_warm_up_and_sparse_lines(judge, tmp_path, zero):
    changes = {
        'optimizer.schedule': 'constant', 'optimizer.steps': 5, 'optimizer.warmup': 0.4,
        'intervals.logging': 4, 'intervals.evaluation': 4}
    recipe = judge.changed(
        changes | {'intervals.saving': 5} | ({'sharding.strategy': 'zero2'} if zero else {}))
    train(recipe, tmp_path/'run')
    rates = [(m['step'], m['learning_rate']) for m in lines(tmp_path/'run')]
    assert rates == [(1, 0.0), (4, pytest.approx(3e-3)), (5, pytest.approx(3e-3))]
    judged = lines(tmp_path/'run', 'evaluation.jsonl')
    mark_run(tmp_path/'run', 'running', 5)  # As if it had been killed after the last save
    again = train(recipe, tmp_path/'run', resume=True)
    assert lines(tmp_path/'run', 'evaluation.jsonl') == judged
    assert [m['step'] for m in judged] == [4, 5]
    assert again[0]['scores']['rows'] == 7
    assert run_state(tmp_path/'run') == {'state': 'finished', 'step': 5}


def test_a_sharding_that_one_rank_lacks_is_told_to_all(judge, tmp_path):
    from llm_workbook.parallel import shard
    from llm_workbook.training import rank_run
    check = rank_run.assert_sharding
    def other(*args):
        if os.environ['RANK'] == '1': raise shard.ShardingMismatch('spoilt')
        return check(*args)
    errors = []
    def work(*args):
        rank_run.assert_sharding = other
        try: module.train_loop(*args)
        except Exception as error: return f'{type(error).__name__}: {error}'
    task = judge, tmp_path/'run', class_rows(judge)[0], begin_run(judge, tmp_path/'run')
    errors = notebook_ranks(work, 2, task, 60, fsdp_env(judge))
    assert errors == [
        'RankError: rank 1 failed: ShardingMismatch: spoilt', 'ShardingMismatch: spoilt']


def test_a_rank_that_hangs_while_rows_are_judged_is_named(judge, tmp_path):
    judge_rows = module.judge_rows
    def hang(accelerator, model, batches, names):
        def slow():
            for i, batch in enumerate(batches):
                if i and os.environ['RANK'] == '1': time.sleep(1000)
                yield batch
        return judge_rows(accelerator, model, slow(), names)
    def work(*args):
        module.judge_rows = hang
        return module.train_loop(*args)
    recipe = judge.changed({'optimizer.steps': 1})
    task = recipe, tmp_path/'run', class_rows(judge)[0], begin_run(recipe, tmp_path/'run'), 10.0
    with pytest.raises(RankError) as caught: notebook_ranks(work, 2, task, 120, fsdp_env(judge))
    assert 'ranks [1] stuck' in caught.value.log, str(caught.value)


def own_loss(recipe, rows):
    "The loss of one process over all rows, with weights in the type that FSDP2 computes in."
    import torch
    from llm_workbook.config.recipe import Method
    from llm_workbook.model.quantize import load_base
    from trl.trainer.utils import add_fused_lm_head
    frozen = Method(kind='lora', storage='bfloat16')
    model = load_base(recipe.model.source, frozen, recipe.precision, device='cpu')
    add_fused_lm_head(model, outputs=('log_probs',))
    total = tokens = 0
    for row in token_rows(recipe, rows, class_tokenizer(recipe)):
        ids, labels = (torch.tensor([row[name]]) for name in ('input_ids', 'labels'))
        with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
            found = model(input_ids=ids, labels=labels, fused_lm_head=True, use_cache=False)
        total -= float(found.log_probs.double().sum())
        tokens += int(found.label_mask.sum())
    return total / tokens


@pytest.mark.slow
@pytest.mark.parametrize('way', ['trainer', 'loop'])
def test_the_loss_of_two_ranks_is_that_of_one_and_not_rounded(tmp_path, monkeypatch, way):
    "FSDP2 casts what a model returns to bfloat16, whose numbers around 7 are 0.03 apart."
    import torch
    from llm_workbook.training import fine_tune as training
    recipe = small_recipe(tmp_path, rows=2, **{
        'precision.compute': 'bfloat16', 'optimizer.steps': 1})
    types = tmp_path/'types'
    def note(loss):
        with open(types, 'a') as file: print(loss.dtype, file=file)
        return loss
    if way == 'loop':
        loss_sum = module.loss_sum
        monkeypatch.setattr(module, 'loss_sum', lambda *given: note(loss_sum(*given)))
        train(recipe, tmp_path/'run')
    else:
        make = training.make_trainer
        def make_noted(*given):
            trainer = make(*given)
            compute = trainer.compute_loss
            trainer.compute_loss = lambda *given, **how: note(compute(*given, **how))
            return trainer
        monkeypatch.setattr(training, 'make_trainer', make_noted)
        fine_tune(recipe, tmp_path/'run')
    assert types.read_text().split() == ['torch.float32'] * 2
    [line] = lines(tmp_path/'run')
    own = own_loss(recipe, load_rows(recipe.data, recipe.seed)[0])
    assert line['loss'] == pytest.approx(own, rel=1e-5)


def test_a_step_whose_rows_have_no_label_is_an_error_that_names_them():
    import torch
    loop = SimpleNamespace(
        step=1, places={4: 'train.jsonl line 5'}, is_deepspeed_enabled=False,
        accelerator=SimpleNamespace(reduce=lambda counts: counts, device='cpu'))
    batch = {'labels': torch.full((1, 3), -100), 'attention_mask': torch.ones(1, 3),
             'row': torch.tensor([4])}
    words = "no row of step 2 has a label .*train.jsonl line 5.* Raise batch.length"
    with pytest.raises(ValueError, match=words): module.train_step(loop, [batch])
