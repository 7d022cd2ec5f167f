"""Training on pairs: TRL's loss on one process, the same on two ranks and after a stop, and every
pair that compares nothing is named."""
import json
import math
import os
import shutil

import pytest
import torch

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
from safetensors.torch import load_file, save_file
from trouble import fine_tune, slow_case, small_recipe

from llm_workbook.config.recipe import Data, shrink
from llm_workbook.files import asset
from llm_workbook.model.architecture import load_tokenizer
from llm_workbook.model.quantize import load_base
from llm_workbook.parallel.ranks import RankError
from llm_workbook.release.model_card import model_card
from llm_workbook.training import fine_tune as training
from llm_workbook.training.conversation import DatasetError
from llm_workbook.training.data import load_rows
from llm_workbook.training.effective import explain_config
from llm_workbook.training.fine_tune import check_recipe
from llm_workbook.training.preferences import tokenise_pairs
from llm_workbook.training.run_directory import RunFiles, mark_run

ALONE = {'cluster.processes': 1, 'sharding.strategy': 'none'}
PAIRS, STEPS = 10, 4  # Steps of 4 pairs: the third has the 2 that are left
LOSS, NORM = 1e-5, 1e-4  # As in test_parity: float32, sums in another order


def write_pairs(folder, count):
    "Pairs of answers of several tokens, in rows of many lengths; a third as many are held out."
    lines = (asset('sample-preferences')/'train.jsonl').read_text().splitlines()
    folder.mkdir()
    for split, chosen in ('train', lines[:count]), ('test', lines[count:count + count // 3]):
        rows = []
        for number, line in enumerate(chosen):
            row = json.loads(line)
            row['chosen'] = f'It is {row["chosen"]}' + ', very' * (number % 4)
            row['rejected'] += ' it is' * (number % 3)
            rows.append(json.dumps(row) + '\n')
        (folder/f'{split}.jsonl').write_text(''.join(rows))
    return folder


@pytest.fixture(scope='module')
def recipe(tmp_path_factory):
    "All weights of the small base on one process; `batch.micro` pairs in a pass, 4 in a step."
    folder = tmp_path_factory.mktemp('pairs')
    return small_recipe(folder, **ALONE | {
        'data.source': str(write_pairs(folder/'pairs', PAIRS)), 'data.format': 'preference',
        'method.objective': 'dpo', 'method.beta': 0.5, 'batch.length': 96, 'batch.micro': 2,
        'batch.accumulation': 2, 'optimizer.steps': STEPS, 'optimizer.warmup': 0.0,
        'intervals.evaluation': 2, 'intervals.saving': 2})


@pytest.fixture(scope='module')
def alone(recipe, tmp_path_factory):
    return fine_tune(recipe, tmp_path_factory.mktemp('alone')/'run')


def assert_equal_runs(one, other, loss=LOSS, norm=NORM):
    "Compare two runs, step by step; rewards are as exact as the log-probabilities they are of."
    assert len(one.metrics) == len(other.metrics)
    for ours, theirs in zip(one.metrics, other.metrics, strict=True):
        assert ours['loss'] == pytest.approx(theirs['loss'], rel=loss)
        assert ours['grad_norm'] == pytest.approx(theirs['grad_norm'], rel=norm)
        assert ours['reward_margin'] == pytest.approx(theirs['reward_margin'], abs=10 * loss)
        assert ours['reward_chosen'] == pytest.approx(theirs['reward_chosen'], abs=10 * loss)
        assert ours['num_tokens'] == theirs['num_tokens']
    for ours, theirs in zip(one.evaluations, other.evaluations, strict=True):
        assert ours['loss'] == pytest.approx(theirs['loss'], rel=loss)
        assert ours['pairs'] == theirs['pairs'] == PAIRS // 3


# The loss, and what a step is a mean over

def test_a_run_has_the_losses_of_a_run_of_trl(recipe, alone, tmp_path):
    "TRL's trainer in its own way: it makes the tokens, and holds a second model."
    import datasets
    from trl import DPOConfig, DPOTrainer
    rows = [{'prompt': row['messages'][:-1], 'chosen': row['messages'][-1:],
             'rejected': row['rejected'][-1:]} for row in check_recipe(recipe)[0]]
    optimizer, batch = recipe.optimizer, recipe.batch
    args = DPOConfig(
        str(tmp_path), beta=recipe.method.beta, use_cpu=True, bf16=False, report_to='none',
        per_device_train_batch_size=batch.micro, gradient_accumulation_steps=batch.accumulation,
        max_steps=STEPS, learning_rate=optimizer.learning_rate, seed=recipe.seed,
        data_seed=recipe.seed, lr_scheduler_type='cosine', logging_steps=1,
        gradient_checkpointing=False, save_strategy='no', disable_tqdm=True)
    base, reference = [
        load_base(recipe.model.source, recipe.method, recipe.precision, 'cpu') for _ in range(2)]
    trl = DPOTrainer(
        base, reference, args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=load_tokenizer(recipe.model.source))
    trl.train()
    logged = [line for line in trl.state.log_history if 'loss' in line]
    for ours, theirs in zip(alone.metrics, logged, strict=True):
        assert ours['loss'] == pytest.approx(theirs['loss'], abs=1e-5)
        assert ours['reward_margin'] == pytest.approx(theirs['rewards/margins'], abs=1e-4)
        if ours['step'] > 1:  # Before the first update a margin is 0, and its sign is rounding
            assert ours['reward_accuracy'] == theirs['rewards/accuracies']
        assert ours['num_tokens'] == theirs['num_tokens']


def test_before_the_first_step_the_model_is_its_reference(alone):
    "A reference of another pair, or of none, would show at once."
    first = alone.metrics[0]
    assert first['loss'] == pytest.approx(math.log(2), abs=1e-6)
    assert first['reward_margin'] == pytest.approx(0, abs=1e-5)
    assert alone.metrics[-1]['reward_margin'] > 0.1


@pytest.mark.parametrize('changes', [
    {'batch.micro': 1, 'batch.accumulation': 4}, {'batch.micro': 4, 'batch.accumulation': 1}],
    ids=['one pair a pass', 'one pass a step'])
def test_a_step_is_a_mean_over_its_pairs_however_they_are_divided(
    recipe, alone, tmp_path, changes
):
    assert_equal_runs(fine_tune(recipe.changed(changes), tmp_path/'run'), alone)


# Ranks

RANKS = {'cluster.processes': 2, 'sharding.strategy': 'fsdp2', 'batch.micro': 1}
ADAPTED = {'method.kind': 'lora', 'optimizer.learning_rate': 1e-2}
PACKED = {'method.kind': 'qlora', 'method.storage': 'float32', 'optimizer.learning_rate': 1e-2}


@pytest.mark.parametrize('method', [ADAPTED, slow_case({}), slow_case(PACKED)], ids=[
    'lora', 'full', 'qlora'])
def test_two_ranks_learn_what_one_process_learns(recipe, tmp_path, method):
    one = fine_tune(recipe.changed(method), tmp_path/'one')
    two = fine_tune(recipe.changed(method | RANKS), tmp_path/'two')
    assert_equal_runs(two, one)
    assert one.metrics[-1]['reward_margin'] > 0.1
    held = [rank['shards'].here_b/rank['shards'].total_b for rank in two.ranks]
    assert max(held) < 0.6  # And no second model


ZERO = {
    'zero.persistence_threshold': 1000, 'zero.reduce_bucket': 10**6, 'zero.prefetch_bucket': 10**6}
HOW = {
    'ddp': {'sharding.strategy': 'ddp'},
    'zero2': ZERO | {'sharding.strategy': 'zero2'},
    'zero3': ZERO | {'sharding.strategy': 'zero3'},
    'one pass, recomputed, arriving': {
        'batch.loss_head': 'one_pass', 'sharding.activation_checkpointing': 'full',
        'sharding.loading': 'sharded'},
    'segments, selective': {
        'model.attention': 'segments', 'sharding.activation_checkpointing': 'selective'}}
HALF = {'precision.compute': 'float16', 'precision.loss_scale': 'dynamic'}


@pytest.fixture(scope='module')
def adapted(recipe, tmp_path_factory):
    return fine_tune(recipe.changed(ADAPTED), tmp_path_factory.mktemp('adapted')/'run')


@pytest.mark.parametrize('how', HOW)
@pytest.mark.slow
def test_how_the_work_is_done_changes_no_loss(recipe, adapted, tmp_path, how):
    "The twin of every case is that of two ranks above."
    changed = recipe.changed(ADAPTED | RANKS | HOW[how])
    assert_equal_runs(fine_tune(changed, tmp_path/'two'), adapted)


@pytest.mark.parametrize('half', [HALF, {'precision.compute': 'bfloat16'}], ids=str)
@pytest.mark.slow
def test_half_the_digits_give_nearly_the_same_losses(recipe, adapted, tmp_path, half):
    run = fine_tune(recipe.changed(ADAPTED | RANKS | half), tmp_path/'run')
    for ours, theirs in zip(run.metrics, adapted.metrics, strict=True):
        assert ours['loss'] == pytest.approx(theirs['loss'], rel=0.02)


def test_the_card_of_a_run_names_objective_reference_and_rewards(alone):
    card, last = model_card(alone), alone.metrics[-1]
    rows = [
        '| objective | dpo |', '| method.beta | 0.5 |', '| reference | the same model before',
        f'{PAIRS} pairs to train on', '\n- dpo\n', f'{last["reward_margin"]:.4f} in the mean',
        '| step | loss | reward_chosen | reward_margin | reward_accuracy | pairs |']
    for row in rows: assert row in card, row
    for line in alone.evaluations: assert f'| {line["reward_margin"]:.4g} |' in card
    assert '\n- sft\n' not in card


# Which pairs have a reference

def test_a_short_run_computes_the_pairs_that_it_takes(recipe, alone, tmp_path):
    "Its losses are those of a longer one; without rows to judge, none are computed."
    short = recipe.changed({
        'optimizer.steps': 2, 'optimizer.schedule': 'constant', 'intervals.evaluation': 0})
    run = fine_tune(short, tmp_path/'run')
    found = load_file(RunFiles(run.directory).reference)
    assert found['train'].isnan().all(-1).sum() == PAIRS - 8
    assert found['held'].shape == (0, 2)
    longer = load_file(RunFiles(alone.directory).reference)
    taken = ~found['train'].isnan()
    torch.testing.assert_close(found['train'][taken], longer['train'][taken])
    for name in ('loss', 'grad_norm'):  # That loss is log 2 whatever the pairs; the norm is not
        assert run.metrics[0][name] == pytest.approx(alone.metrics[0][name], rel=1e-5)
    mark_run(run.directory, 'preempted', 2)
    shutil.rmtree(run.saved)
    with pytest.raises(RankError, match='no values for some of the pairs that 4 steps take'):
        fine_tune(short.changed({'optimizer.steps': 4}), run.directory, resume=True)
    judging = short.changed({'intervals.evaluation': 1})
    with pytest.raises(ValueError, match='has no such held-out pairs.*set intervals.evaluation'):
        fine_tune(judging, run.directory, resume=True)


@pytest.mark.slow
def test_sources_of_a_mix_are_judged_one_by_one(recipe, tmp_path):
    parts = [{'source': recipe.data.source}, {'source': 'sample-preferences'}]
    mixed = recipe.changed({'data.source': None, 'data.mix': parts})
    [*_, last] = fine_tune(mixed, tmp_path/'run').evaluations
    pairs = {name: values['pairs'] for name, values in last['sources'].items()}
    own = PAIRS // 3  # Their questions are taken from the second source, which has them too
    assert pairs == {'pairs': own, 'sample-preferences': 40 + own}
    assert last['pairs'] == 40 + 2 * own
    total = sum(values['loss'] * values['pairs'] for values in last['sources'].values())
    assert last['loss'] == pytest.approx(total / last['pairs'], rel=1e-6)


# Going on

def stopped(alone, folder):
    "A copy of a finished run that was stopped after its second step."
    directory = shutil.copytree(alone.directory, folder/'run')
    shutil.rmtree(directory/f'checkpoint-{STEPS}')
    mark_run(directory, 'preempted', 2)
    return directory


def test_a_run_that_was_stopped_goes_on_as_the_run_that_was_not(recipe, alone, tmp_path):
    directory = stopped(alone, tmp_path)
    written = RunFiles(directory).reference.read_bytes()
    resumed = fine_tune(recipe, directory, resume=True)
    for ours, theirs in zip(resumed.metrics, alone.metrics, strict=True):
        assert ours | {'seconds': 0} == theirs | {'seconds': 0}
    assert resumed.evaluations == alone.evaluations
    assert RunFiles(directory).reference.read_bytes() == written


@pytest.mark.parametrize('spoil, said', [
    (lambda file: file.unlink(), 'reference.safetensors is not there, and after 2 steps'),
    (lambda file: file.write_bytes(b'none'), 'is broken'),
    (lambda file: save_file({}, file, {'train': '{}'}), 'is of other training pairs')],
    ids=['gone', 'broken', 'of other pairs'])
def test_a_run_without_its_reference_does_not_go_on(recipe, alone, tmp_path, spoil, said):
    directory = stopped(alone, tmp_path)
    spoil(RunFiles(directory).reference)
    with pytest.raises(ValueError, match=said) as caught:
        fine_tune(recipe, directory, resume=True)
    assert 'put the file of this run back' in str(caught.value)


# What is in force

def test_objective_and_beta_are_confirmed(recipe, alone):
    found = explain_config(alone)
    assert (found['method.objective'].found, found['method.beta'].found) == ('dpo', 0.5)
    assert found['method.beta'].read == 'trainer'


def test_another_beta_than_that_of_the_recipe_ends_the_run(recipe, tmp_path, monkeypatch):
    make = training.make_trainer
    def make_other(*args):
        trainer = make(*args)
        trainer.beta = 0.1
        return trainer
    monkeypatch.setattr(training, 'make_trainer', make_other)
    with pytest.raises(RankError, match='method.beta: asked 0.5, found 0.1'):
        fine_tune(recipe, tmp_path/'run')


def test_a_shrunk_recipe_keeps_the_objective(recipe):
    small = shrink(recipe)
    assert (small.method.objective, small.method.beta) == ('dpo', 0.5)
    assert small.data.source == 'sample-preferences'


# Rows

ASK, GOOD, BAD = [{'role': role, 'content': content} for role, content in (
    ('user', 'Hi'), ('assistant', 'Ho'), ('assistant', 'Hm'))]
PAIR = {'prompt': 'Hi', 'chosen': 'Ho', 'rejected': 'Hm'}


def read(folder, *rows, **settings):
    file = folder/'pairs.jsonl'
    file.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return load_rows(Data(source=str(file), test_share=0.0, **settings))[0]


@pytest.mark.parametrize('row', [
    PAIR, {'prompt': [ASK], 'chosen': [GOOD], 'rejected': [BAD]},
    {'chosen': [ASK, GOOD], 'rejected': [ASK, BAD]},
    {'prompt': 'Hi', 'chosen': [ASK, GOOD], 'rejected': [ASK, BAD]},
    {'conversations': [{'from': 'human', 'value': 'Hi'}], 'chosen': GOOD, 'rejected': BAD}],
    ids=['texts', 'lists', 'implicit prompt', 'prompt twice', 'LLaMA-Factory'])
@pytest.mark.parametrize('asked', ['auto', 'preference'])
def test_pairs_are_read_in_every_usual_form(tmp_path, row, asked):
    assert read(tmp_path, row, format=asked) == [{'messages': [ASK, GOOD], 'rejected': [ASK, BAD]}]


def test_the_implicit_prompt_is_that_of_trl(tmp_path):
    from trl import extract_prompt
    talk = [ASK, GOOD, ASK]
    for chosen, rejected in (
        ([*talk, GOOD], [*talk, BAD]), ('Q: Hi A: Ho', 'Q: Hi A: no'), ('Q: Hi', 'Q: Ho, no')
    ):
        row = {'chosen': chosen, 'rejected': rejected}
        [pair] = read(tmp_path, row)
        found = pair['messages'][:-1] if isinstance(chosen, list) else pair['prompt']
        assert found == extract_prompt(row)['prompt'] != ''


WRONG = [
    (PAIR | {'rejected': 'Ho'}, 'has the same answer twice: take the row out'),
    (PAIR | {'rejected': None}, "has no 'rejected': a pair needs both answers"),
    (PAIR | {'chosen': ''}, "has no 'chosen'"),
    ({'chosen': 'Ho'}, "has no 'rejected'"),
    ({'chosen': [ASK, GOOD], 'rejected': [ASK | {'content': 'He'}, BAD]}, 'a different one for'),
    ({'chosen': [GOOD], 'rejected': [BAD]}, 'has no question'),
    ({'chosen': 'Ho', 'rejected': 'Um'}, 'texts that begin differently'),
    ({'chosen': [ASK, GOOD, ASK, GOOD], 'rejected': [ASK, BAD]}, 'does not end there with'),
    ({'chosen': [ASK, GOOD], 'rejected': [ASK]}, "'rejected' does not end there with an answer")]


@pytest.mark.parametrize('row, said', WRONG, ids=[said for _, said in WRONG])
def test_a_pair_that_compares_nothing_is_named(tmp_path, row, said):
    with pytest.raises(DatasetError, match='pairs.jsonl: line 2: has ') as caught:
        read(tmp_path, PAIR, row, format='preference')
    assert said in str(caught.value)


def test_pairs_that_only_tokens_show_are_named_by_line(tmp_path):
    tokenizer = load_tokenizer('tiny-base')
    rows = read(tmp_path, PAIR, PAIR | {'chosen': 'Ho ' * 200})
    with pytest.raises(DatasetError, match='pairs.jsonl: line 2: has an answer that ends at token'):
        tokenise_pairs(rows, tokenizer, 64)
    with pytest.warns(UserWarning, match='1 of 2 pairs have an answer past batch.length'):
        assert len(tokenise_pairs(rows, tokenizer, 64, 'drop')) == 1
    marked = read(tmp_path, PAIR, PAIR | {'rejected': 'Ho <|endoftext|>'})
    with pytest.raises(DatasetError, match='line 2: rejected: has <.endoftext.> in its text'):
        tokenise_pairs(marked, tokenizer)


def test_a_question_that_fills_the_row_is_told_from_a_long_answer(tmp_path):
    tokenizer = load_tokenizer('tiny-base')
    long = {'prompt': 'Hi ' * 100, 'chosen': 'Ho', 'rejected': 'No'}
    rows = read(tmp_path, PAIR, PAIR | {'chosen': 'Ho ' * 200}, long)
    with pytest.raises(DatasetError, match='line 3: has a question of [0-9]+ tokens, which fills'):
        tokenise_pairs(rows, tokenizer, 64)
    said = '2 of 3 pairs have an answer past batch.length and are left out; the question of 1 fills'
    with pytest.warns(UserWarning, match=said):
        assert len(tokenise_pairs(rows, tokenizer, 64, 'drop')) == 1


def test_columns_of_margins_and_scores_are_named_as_unread(tmp_path):
    scored = PAIR | {'margin': 0.5, 'score_chosen': 1, 'score_rejected': 5}
    with pytest.warns(UserWarning, match='not read: margin, score_chosen, score_rejected'):
        read(tmp_path, scored, format='preference')


def test_pairs_of_a_later_source_of_a_mix_are_not_trained_as_answers(recipe, tmp_path):
    answers = tmp_path/'answers.jsonl'
    answers.write_text(json.dumps({'prompt': 'Hi', 'completion': 'Ho'}))
    mix = [{'source': str(answers), 'test_share': 0.0}, {'source': recipe.data.source}]
    changes = {'data': {'mix': mix}, 'method.objective': 'answers', 'method.beta': 0.1}
    with pytest.raises(ValueError, match=f'{PAIRS} of {PAIRS + 1} training rows are pairs'):
        check_recipe(recipe.changed(changes))


@pytest.mark.parametrize('changes, said', [
    ({'data.format': 'auto', 'method.objective': 'answers', 'method.beta': 0.1},
     r'are pairs of a chosen and a rejected answer \(first: .* 1\): set method.objective to dpo'),
    ({'data.format': 'auto', 'data.source': 'sample-conversations'},
     "1: has no 'chosen' but .*messages.*; a pair has both answers in the columns 'chosen' and")],
    ids=['pairs without dpo', 'dpo without pairs'])
def test_rows_and_objective_fit(recipe, changes, said):
    with pytest.raises(ValueError, match=said): check_recipe(recipe.changed(changes))
