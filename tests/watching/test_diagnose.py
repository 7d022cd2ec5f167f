"""The doctor: what it reads, how it ranks what it finds, and what it must not say."""
import json
import re
import time
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from trouble import CANARY

from llm_workbook.__main__ import main
from llm_workbook.config.recipe import Recipe
from llm_workbook.config.rules import rules
from llm_workbook.files import asset
from llm_workbook.launching.background import Launched
from llm_workbook.parallel.ranks import RankError, run_ranks
from llm_workbook.training.watchdog import HangWatch
from llm_workbook.watching.checks import Case, check_names
from llm_workbook.watching.diagnose import diagnose
from llm_workbook.watching.hangs import explain_hang
from llm_workbook.watching.troubles import troubles

TROUBLES = troubles()
OUT_OF_MEMORY = 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.'


def name(trouble): return trouble.id


@pytest.mark.parametrize('trouble', TROUBLES, ids=name)
def test_a_row_is_whole(trouble):
    "Whoever reads it finds a source, a catalogue entry, a check, and fields that a recipe has."
    assert trouble.check_name in check_names()
    assert trouble.pains or trouble.faults or trouble.recipe_c
    assert not trouble.rule or trouble.rule in {rule.id for rule in rules()}
    facts = Recipe.named('reviews-qlora').facts()
    assert set(trouble.changes) <= set(facts)
    copied = [value[1:] for value in trouble.changes.values() if str(value).startswith('=')]
    assert set(copied) <= set(facts)


@pytest.mark.parametrize('trouble', TROUBLES, ids=name)
def test_a_signature_is_no_common_word(trouble):
    "Eight letters at least stand in it as they are."
    for pattern in trouble.signature:
        letters = re.sub(r'\\.|\(\?[^:)]*|\[[^\]]*\]|[^A-Za-z]', '', pattern)
        assert len(letters) >= 8, pattern
        assert not re.search(pattern, '')


def test_every_pain_has_a_row():
    answered = {pain for trouble in TROUBLES for pain in trouble.pains}
    assert not {f'P{number}' for number in range(1, 26)} - answered


def test_files_of_troubles_are_plain_yaml():
    for file in asset('troubles').glob('*.yaml'):
        assert isinstance(yaml.safe_load(file.read_text()), list), file.name


# Reading

def test_an_exception_of_this_process_shows_its_objects():
    import torch

    def flatten(unit):
        raise ValueError('Must flatten tensors with uniform dtype but got torch.bfloat16 and '
                         'torch.float32')
    layers = torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 4, bias=False)
    try: flatten(torch.nn.Sequential(*layers))
    except ValueError as error: found = diagnose(error)
    assert found.rule == 'fsdp1-mixed-types'
    assert '1.weight' in found.evidence and '2 parameters in bfloat16' in found.evidence


def test_the_cause_of_an_exception_is_read_too():
    try:
        try: raise RuntimeError("'Parameter' object has no attribute 'CB'")
        except RuntimeError as error: raise ValueError('training failed') from error
    except ValueError as error: assert diagnose(error).rule == 'int8-under-fsdp'


def test_ranks_of_one_log_are_told_apart():
    log = ('[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:4711\n'
           '[rank1]:   File "train.py", line 40, in step\n'
           f'[rank1]: {OUT_OF_MEMORY}\n')
    found = diagnose(log)
    assert found.rule == 'memory-in-step'
    assert found.findings[0].where == 'rank 1, train.py, line 40, in step'
    assert [finding.trouble.id for finding in found.findings[1:]] == ['peer-is-gone']


KILLED = """[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:4711
E1129 10:00:00 torch/distributed/elastic/api.py:1] failed (exitcode: -9) local_rank: 1
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
llm_workbook FAILED
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4710)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
  traceback : Signal 9 (SIGKILL) received by PID 4711
"""


def test_the_failure_that_torchrun_names_first_comes_first():
    found = diagnose(KILLED)
    assert (found.rule, found.findings[0].where) == ('rank-was-killed', 'rank 1')
    assert [finding.trouble.id for finding in found.findings[1:]] == ['peer-is-gone']
    assert diagnose(KILLED.replace('Root Cause', 'Cause')).rule == 'peer-is-gone'


def test_only_the_last_start_of_a_run_is_read(tmp_path):
    log = tmp_path/'logs'/'rank-0.log'
    log.parent.mkdir()
    start = '--- 2026-11-26 10:00:0{}, rank 0 of 1\n'
    log.write_text(start.format(0) + OUT_OF_MEMORY + '\n' + start.format(1) + 'all is well\n' * 20)
    assert diagnose(tmp_path).rule is None
    log.write_text(start.format(0) + 'all is well\n' + start.format(1) + OUT_OF_MEMORY + '\n' * 120)
    assert diagnose(tmp_path).rule == 'memory-in-step'


def test_a_recipe_in_the_run_is_changed(tmp_path):
    Recipe.named('70b-2x24gb-qlora').changed({'batch.micro': 2}).save(tmp_path/'recipe.yaml')
    (tmp_path/'job.out').write_text(f'  File "train.py", line 1, in step\n{OUT_OF_MEMORY}')
    found = diagnose(tmp_path)
    assert found.changes[0] == ('batch.micro', 2, 1)
    assert found.recipe.global_batch == found.before.global_batch
    assert '-  micro: 2' in repr(found) and '+  micro: 1' in repr(found)


def test_a_change_that_rules_refuse_is_not_shown():
    recipe = Recipe.named('reviews-qlora').changed({'sharding.strategy': 'ddp'})
    text = 'RuntimeError: Cannot flatten integer dtype tensors'
    assert diagnose(text, recipe).recipe is None


@pytest.mark.slow
def test_a_huge_log_is_read_in_seconds(tmp_path):
    line = "{'loss': 2.5, 'grad_norm': 1.2, 'learning_rate': 2e-05, 'epoch': 0.1}\n"
    (tmp_path/'job.out').write_text(line * 200_000 + OUT_OF_MEMORY)
    start = time.process_time()
    assert diagnose(tmp_path/'job.out').rule == 'memory-in-step'
    assert time.process_time() - start < 20


# Honesty

def test_what_nobody_has_written_down_is_said_to_be_unknown():
    found = diagnose('  File "train.py", line 3, in <module>\nKeyError: "lr"')
    assert (found.rule, found.evidence, found.recipe) == (None, '', None)
    assert 'No trouble that is known here fits' in repr(found) and 'KeyError: "lr"' in found.read
    assert f'compared with {len(TROUBLES)} troubles' in found.read


@pytest.mark.parametrize('text', [
    'all went well', 'Loading checkpoint shards: 100%', 'out of memory cards, said the shop',
    'mmap of 3 files', 'the connection of both layers', 'CUDA initialised', 'saved adapter_model'])
def test_near_words_are_no_trouble(text): assert diagnose(text).rule is None


def test_a_check_that_breaks_leaves_the_trouble_possible(monkeypatch):
    from llm_workbook.watching import checks

    def broken(case, **options): raise ZeroDivisionError('sorry')
    monkeypatch.setitem(checks._CHECKS, 'types-of-units', broken)
    found = diagnose('Must flatten tensors with uniform dtype but got a and b')
    assert not found.findings[0].confirmed and 'ZeroDivisionError: sorry' in found.evidence


@pytest.mark.parametrize('text', [
    'Exception: No space left on device (os error 28)',
    "OSError: [Errno 28] 'adapters' is not saved: the disk has 12 free (No space left on device)"])
def test_a_full_disk_is_known_whoever_says_it(text):
    assert diagnose(text).rule == 'disk-full-while-saving'


def test_no_token_is_repeated(tmp_path):
    (tmp_path/'job.out').write_text(f'login with {CANARY}\n{OUT_OF_MEMORY} {CANARY}')
    found = diagnose(tmp_path)
    shown = repr(found) + found._repr_html_() + json.dumps(found.to_dict())
    assert CANARY not in shown and '***' in shown


def test_html_of_a_log_is_escaped():
    found = diagnose(f'<script>alert(1)</script> {OUT_OF_MEMORY}')
    assert '<script>' not in found._repr_html_() and '&lt;script&gt;' in found._repr_html_()


def test_a_case_has_no_field_that_is_lost_on_the_way():
    assert {field.name for field in fields(Case)} <= {
        'excerpts', 'error', 'recipe', 'directory', 'model', 'sighting', 'file', 'given'}


# Words of other versions, of other launchers, and of other ranks

SAID = yaml.safe_load((Path(__file__).parent/'words.yaml').read_text())
FORMS = {
    'alone': '{}', 'of a rank': '[rank3]: {}', 'of torchrun': '[default7]:[rank7]: {}',
    'of srun': ' 0: {}', 'in colour': '\x1b[31m{}\x1b[0m', 'after a bar': '  9%| | 3/9\r{}'}


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('rule', SAID)
def test_words_are_known_in_every_form(rule, form):
    lines = SAID[rule].split('\n') if form != 'after a bar' else [SAID[rule]]
    found = diagnose('\n'.join(map(FORMS[form].format, lines)))
    assert found.rule == rule, [finding.trouble.id for finding in found.findings]
    ranks = {'of a rank': 3, 'of torchrun': 7, 'of srun': 0}
    assert found.findings[0].sighting.excerpt.rank == ranks.get(form)


# Hangs

def stand_still():
    time.sleep(60)


def hang(folder):
    import torch
    import torch.distributed as dist
    with HangWatch(folder, 1.0, dist.get_rank(), 2) as watch:
        for step in range(3):
            if (step, dist.get_rank()) == (2, 1): stand_still()
            dist.all_reduce(torch.ones(2))
            watch.beat()


def test_a_real_hang_is_one_sentence(tmp_path):
    with pytest.raises(RankError) as caught: run_ranks(hang, 2, (tmp_path,))
    found = diagnose(caught.value, directory=tmp_path)
    assert found.rule == 'rank-hangs' and found.findings[0].confirmed
    sentence = explain_hang(tmp_path)
    assert sentence.startswith('rank 1 is in stand_still (') and 'time.sleep(60)' in sentence
    assert 'rank 0 waits in all_reduce number 3 of group gloo 0' in sentence
    assert sentence in found.evidence


def test_a_launched_run_that_failed_is_read(tmp_path):
    recipe = Recipe.named('reviews-qlora')
    launched = Launched(recipe, tmp_path, None)
    launched._error = RankError(1, 'failed: RuntimeError: Cannot flatten integer dtype tensors')
    launched._ended.set()
    found = diagnose(launched)
    assert (found.rule, found.findings[0].where) == ('fsdp1-integer-storage', 'rank 1')
    assert found.before == recipe


# The command

def test_the_command_answers_by_its_code(tmp_path, capsys):
    log = tmp_path/'job.out'
    log.write_text(OUT_OF_MEMORY)
    assert main(['diagnose', str(log), '--json']) == 0
    assert json.loads(capsys.readouterr().out)['rule'] == 'memory-in-step'
    log.write_text('all went well')
    assert main(['diagnose', str(log)]) == 1
