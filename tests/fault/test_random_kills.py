"""Twenty kills at random points, seven inside a save and four during a resume: nothing committed is
lost, and every run comes to its end."""
import os
import random
import signal

import pytest
from trouble import decoder_layers, fine_tune, losses

from llm_workbook.checkpoint import save_load as checkpoint
from llm_workbook.training import fine_tune as training
from llm_workbook.training import rank_run
from llm_workbook.checkpoint.manifest import check_checkpoint, latest_valid
from llm_workbook.parallel.ranks import RankError

SEED = int(os.environ.get('LLMW_SEED', 15))  # Another number draws other points
CHAINS = [['step', 'save', 'resume', 'step', 'save'], ['save', 'step', 'resume', 'save', 'step'],
          ['step', 'save', 'step', 'resume', 'save'], ['step', 'step', 'resume', 'step', 'save']]
STEPS = 16  # Of which 5 kills commit at most 12


@pytest.fixture(scope='module')
def whole(recipe, tmp_path_factory):
    "The run that nobody kills."
    longer = recipe.changed({'optimizer.steps': STEPS, 'intervals.saving': 2})
    return fine_tune(longer, tmp_path_factory.mktemp('whole')/'run')


def die(victims, note):
    "Kill this rank if it is one of the victims, and leave word of where."
    if int(os.environ['RANK']) not in victims: return
    with open(note, 'a') as file: file.write('x')
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_step(patch, chance, victims, note, must_commit):
    "Kill in a forward or backward pass of a layer."
    make_trainer = training.make_trainer
    last_pass = chance.randint(1, 5)
    direction = chance.choice(['forward', 'backward'])
    passes = []
    def count_and_die(*args):
        passes.append(1)
        if len(passes) == last_pass: die(victims, note)
    def make_deadly_trainer(*args, **how):
        trainer = make_trainer(*args, **how)
        layer = decoder_layers(trainer)[chance.randrange(2)]
        if direction == 'forward': layer.register_forward_pre_hook(count_and_die)
        else: layer.register_full_backward_hook(count_and_die)
        return trainer
    patch.setattr(training, 'make_trainer', make_deadly_trainer)
    return f'{direction} pass {last_pass}'


def in_a_save(patch, chance, victims, note, must_commit):
    "Kill while files are written, or around the commit, which is rank 0's."
    write, commit = checkpoint._write, checkpoint.commit_checkpoint
    points = ['files']
    if 0 in victims: points += ['files', 'before the commit', 'after the commit']
    point = chance.choice(points)
    if must_commit:
        point = 'after the commit'
        victims = {0, *victims}
    part = chance.random()
    def deadly_write(folder, files, needed_b):
        if point == 'files':
            first_files = list(files.items())[:round(part * len(files))]
            write(folder, dict(first_files), needed_b)
            die(victims, note)
        return write(folder, files, needed_b)
    def deadly_commit(*args, **how):
        if point == 'before the commit': die(victims, note)
        manifest = commit(*args, **how)
        if point == 'after the commit': die(victims, note)
        return manifest
    patch.setattr(checkpoint, '_write', deadly_write)
    patch.setattr(checkpoint, 'commit_checkpoint', deadly_commit)
    return f'files ({part:.0%} of them)' if point == 'files' else point


def in_a_resume(patch, chance, victims, note, must_commit):
    "Kill before, in the middle of or after loading the checkpoint."
    load, load_rest = checkpoint.load_checkpoint, checkpoint._resume
    point = chance.choice(['before', 'between weights and optimizer', 'after'])
    def deadly_load(*args, **how):
        if point == 'before': die(victims, note)
        facts = load(*args, **how)
        if point == 'after': die(victims, note)
        return facts
    def deadly_load_rest(*args):
        if point == 'between weights and optimizer': die(victims, note)
        return load_rest(*args)
    patch.setattr(rank_run, 'load_checkpoint', deadly_load)
    patch.setattr(checkpoint, '_resume', deadly_load_rest)
    return point


KILL = {'step': in_a_step, 'save': in_a_save, 'resume': in_a_resume}


def committed_step(directory) -> int:
    "The step of the newest valid checkpoint; 0 if there is none."
    newest = latest_valid(directory, deep=True)
    return check_checkpoint(newest, deep=True).step if newest else 0


@pytest.mark.slow
@pytest.mark.parametrize('chain', range(len(CHAINS)))
def test_kills_at_random_points_lose_nothing_that_was_committed(
    chain, whole, tmp_path, monkeypatch, record_property
):
    # A killed rank cannot take its temporary folders away
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    chance = random.Random(SEED + chain)
    run = tmp_path/'run'
    committed = 0
    kinds_left = [*CHAINS[chain]]
    for number in range(len(kinds_left)):
        # Where there is nothing to resume, a kill in a resume comes later
        kind = next(kind for kind in kinds_left if committed or kind != 'resume')
        kinds_left.remove(kind)
        victims = chance.choice([[0], [1], [0, 1]])
        note = tmp_path/f'note-{number}'
        with pytest.MonkeyPatch.context() as patch:
            must_commit = not committed and 'resume' in kinds_left
            where = KILL[kind](patch, chance, victims, note, must_commit)
            with pytest.raises(RankError, match='SIGKILL'):
                fine_tune(whole.recipe, run, resume=True)
        assert note.exists()
        before, committed = committed, committed_step(run)
        record_property(
            'report',
            f'seed {SEED}, chain {chain}: ranks {victims} killed in a {kind}: {where}; '
            f'committed {before} -> {committed}')
        assert before <= committed < STEPS
        if kind == 'resume': assert committed == before > 0
    fine_tune(whole.recipe, run, resume=True)
    assert losses(run) == pytest.approx(losses(whole.directory), abs=1e-6)
    assert len(losses(run)) == STEPS


def test_there_are_twenty_kills():
    kinds = sum(CHAINS, [])
    assert (len(kinds), kinds.count('resume')) == (20, 4)
    assert kinds.count('save') >= 6
