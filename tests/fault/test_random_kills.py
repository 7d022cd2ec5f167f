"""Twenty kills at random points, seven inside a save and four during a resume: nothing committed is
lost, and every run comes to its end."""
import os
import random
import signal

import pytest
from trouble import REPORT_LINES, fine_tune, losses

from llm_workbook.checkpoint import save_load as checkpoint

from llm_workbook.training import fine_tune as training
from llm_workbook.training import rank_run
from llm_workbook.checkpoint.manifest import check, latest_valid
from llm_workbook.parallel.ranks import RankError

# Printed at the end; set it to see it again
SEED = int(os.environ.get('LLMW_SEED', random.SystemRandom().randrange(10**6)))
CHAINS = [['step', 'save', 'resume', 'step', 'save'], ['save', 'step', 'resume', 'save', 'step'],
          ['step', 'save', 'step', 'resume', 'save'], ['step', 'step', 'resume', 'step', 'save']]
STEPS = 24


@pytest.fixture(scope='module')
def whole(recipe, tmp_path_factory):
    "The run that nobody kills."
    asked = recipe.changed({'optimizer.steps': STEPS, 'intervals.saving': 2})
    return fine_tune(asked, tmp_path_factory.mktemp('whole')/'run')


def die(victims, note):
    "Kill this rank if it is one of the victims, and leave word of where."
    if int(os.environ['RANK']) not in victims: return
    with open(note, 'a') as file: file.write('x')
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_step(patch, chance, victims, note, sure):
    make, when, passes = training.make_trainer, chance.randint(1, 5), []
    where = chance.choice(['register_forward_pre_hook', 'register_full_backward_hook'])
    def hook(*args):
        passes.append(1)
        if len(passes) == when: die(victims, note)
    def broken(*args, **how):
        trainer = make(*args, **how)
        layer = [m for m in trainer.model.modules() if type(m).__name__ == 'LlamaDecoderLayer'][
            chance.randrange(2)]
        getattr(layer, where)(hook)
        return trainer
    patch.setattr(training, 'make_trainer', broken)
    return f'{where.split("_")[1]} pass {when}'


def in_a_save(patch, chance, victims, note, sure):
    write, commit = checkpoint._write, checkpoint.commit
    point = chance.choice(
        ['files', 'files', 'before the commit', 'after the commit'] if 0 in victims else ['files'])
    if sure: point, victims = 'after the commit', {0, *victims}
    part = chance.random()
    def broken_write(folder, files, needed_b):
        if point != 'files': return write(folder, files, needed_b)
        write(folder, dict(list(files.items())[:round(part * len(files))]), needed_b)
        die(victims, note)
        return write(folder, files, needed_b)
    def broken_commit(*args, **how):
        if point == 'before the commit': die(victims, note)
        made = commit(*args, **how)
        if point == 'after the commit': die(victims, note)
        return made
    patch.setattr(checkpoint, '_write', broken_write)
    patch.setattr(checkpoint, 'commit', broken_commit)
    return point + f' ({part:.0%} of them)' * (point == 'files')


def in_a_resume(patch, chance, victims, note, sure):
    load, rest = checkpoint.load_checkpoint, checkpoint._resume
    point = chance.choice(['before', 'between weights and optimizer', 'after'])
    def broken_load(*args, **how):
        if point == 'before': die(victims, note)
        made = load(*args, **how)
        if point == 'after': die(victims, note)
        return made
    def broken_rest(*args):
        if point.startswith('between'): die(victims, note)
        return rest(*args)
    patch.setattr(rank_run, 'load_checkpoint', broken_load)
    patch.setattr(checkpoint, '_resume', broken_rest)
    return point


BREAK = {'step': in_a_step, 'save': in_a_save, 'resume': in_a_resume}


def newest(directory) -> int:
    found = latest_valid(directory, deep=True)
    return check(found, deep=True).step if found else 0


@pytest.mark.slow
@pytest.mark.parametrize('chain', range(len(CHAINS)))
def test_kills_at_random_points_lose_nothing_that_was_committed(
    chain, whole, tmp_path, monkeypatch
):
    # A killed rank cannot take its temporary folders away
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    chance = random.Random(SEED + chain)
    run = tmp_path/'run'
    done = 0
    kinds = [*CHAINS[chain]]
    for number in range(len(kinds)):
        # Nothing to resume: later
        kind = kinds.pop(next(i for i, kind in enumerate(kinds) if done or kind != 'resume'))
        victims = chance.choice([[0], [1], [0, 1]])
        note = tmp_path/f'note-{number}'
        with pytest.MonkeyPatch.context() as patch:
            where = BREAK[kind](patch, chance, victims, note, not done and 'resume' in kinds)
            with pytest.raises(RankError, match='SIGKILL'):
                fine_tune(whole.recipe, run, resume=True)
        assert note.exists()
        now = newest(run)
        REPORT_LINES.append(
            f'seed {SEED}, chain {chain}: ranks {victims} killed in a {kind}: {where}; committed '
            f'{done} -> {now}'
        )
        assert done <= now < STEPS
        if kind == 'resume': assert now == done > 0
        done = now
    fine_tune(whole.recipe, run, resume=True)
    assert losses(run) == pytest.approx(losses(whole.directory), abs=1e-6)
    assert len(losses(run)) == STEPS


def test_there_are_twenty_kills():
    every = sum(CHAINS, [])
    assert (len(every), every.count('resume')) == (20, 4)
    assert every.count('save') >= 6
