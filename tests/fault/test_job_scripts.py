"""Fault 18: values that want to be commands in a job script, and a job that must come back once or
not at all."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trouble import files, wait_for

from llm_workbook.launching.job_scripts import sbatch
from llm_workbook.config.recipe import Recipe

BASE = Recipe.named('70b-2x8-a100-80-full')
# A pretended SLURM: what srun gets, every process of the step gets, as where SLURM tracks them by
# cgroup or by parent; `forks` has those of a warm interpreter
PROGRAMS = {
    'srun': """shift
below() { cat /proc/$1/task/$1/children "$SEEN/../forks/$1" 2> /dev/null; }
tree() { for child in $(below $1); do tree $child; done; kill -USR1 $1; }
"$@" & step=$!
trap "tree $step" USR1
until wait $step; ! kill -0 $step 2> /dev/null; do :; done; wait $step""",
    'scontrol': 'case "$1" in requeue) echo "$2" >> "$SEEN/requeued";; *) echo localhost;; esac',
    'python3': """if [ "$3" = preflight ]; then
    printf "%s\\0" "$@" > "$SEEN/preflight"
    eval "$CHECK"
    exit
fi
printf "%s\\0" "$@" > "$SEEN/arguments"
env > "$SEEN/environment"
eval "$ACT"
exit "$CODE\"""",
}


def start(folder: Path, script: str, code=0, act='true', check='true') -> subprocess.Popen:
    """Start a job script as SLURM would; its preflight does `check`, and its ranks do `act` and end
    with `code`."""
    place = folder/'place'
    place.mkdir(exist_ok=True)
    install_programs(folder, PROGRAMS)
    environment = job_environment(folder) | {'ACT': act, 'CODE': str(code), 'CHECK': check}
    return subprocess.Popen(
        ['bash', '-c', script], env=environment, cwd=place, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True)


def install_programs(folder: Path, names):
    "Put some of the programs into `bin`; what they see goes into `seen`."
    for new in folder/'bin', folder/'seen': new.mkdir(exist_ok=True)
    for name in names:
        (folder/'bin'/name).write_text(f'#!/bin/bash\n{PROGRAMS[name]}\n')
        (folder/'bin'/name).chmod(0o755)


def job_environment(folder: Path) -> dict:
    "What SLURM would set, and the programs of `folder` in front of all others."
    path = f'{folder}/bin:{os.environ["PATH"]}'
    slurm = {'SLURM_JOB_ID': '4711', 'SLURM_JOB_NODELIST': 'localhost'}
    return os.environ | slurm | {'PATH': path, 'SEEN': str(folder/'seen')}


def requeues(folder: Path) -> list:
    "The jobs that were requeued."
    requeued = folder/'seen/requeued'
    return requeued.read_text().split() if requeued.exists() else []


def arguments(folder: Path, program: str) -> list:
    "What the ranks ('arguments') or the preflight were called with."
    return (folder/'seen'/program).read_text().split('\0')


def recipe_with(field: str, value: str) -> Recipe:
    "A recipe that says so without ever having been checked."
    section, _, leaf = field.rpartition('.')
    if not section: return BASE.model_copy(update={leaf: value})
    changed = getattr(BASE, section).model_copy(update={leaf: value})
    return BASE.model_copy(update={section: changed})


HOSTILE = [
    '$(touch x)',
    '`touch x`',
    '; touch x',
    "'; touch x; '",
    '"; touch x; "',
    '\n#SBATCH --wrap="touch x"',
    '\ntouch x\n',
    '| touch x',
    '&& touch x',
    '> x',
    '${IFS}touch${IFS}x',
    '$((x=1))',
    '\\\ntouch x',
    '\r\ntouch x',
    '-o ProxyCommand=touch x',
    "$'\\ntouch x'",
    '{touch,x}',
    '~/../x',
    '*',
    '!!touch x',
    'a b',
    '\x00touch x',
    '\x1b]0;x\x07',
    '\u2028touch x',
    '{directory}',
]
PLACES = {
    'paths': lambda text: sbatch(BASE, text, text),
    'python': lambda text: sbatch(BASE, 'run', python=f'./bin/{text}'),
    'name': lambda text: sbatch(recipe_with('name', text), 'run'),
    'interface': lambda text: sbatch(recipe_with('cluster.interface', text), 'run'),
    'variable': lambda text: sbatch(
        recipe_with('cluster.variables', (('NCCL_DEBUG', text),)), 'run'),
    'variable name': lambda text: sbatch(recipe_with('cluster.variables', ((text, '1'),)), 'run'),
    'nodes': lambda text: sbatch(recipe_with('cluster.nodes', text), 'run'),
    'processes': lambda text: sbatch(recipe_with('cluster.processes', text), 'run'),
    'secret': lambda text: sbatch(BASE, 'run', secrets=(text,)),
    'option': lambda text: sbatch(BASE, 'run', options={text: 'x'}),
    'partition': lambda text: sbatch(BASE, 'run', options={'partition': text}),
    'time': lambda text: sbatch(BASE, 'run', options={'time': text}),
    'output': lambda text: sbatch(BASE, 'run', options={'output': text})}


@pytest.mark.filterwarnings('ignore:Pydantic serializer')
@pytest.mark.parametrize('place', PLACES)
def test_18_a_hostile_value_is_refused_or_inert(place, tmp_path):
    """25 payloads, alone and after a word: refused with a ValueError, or the script runs and
    nothing of the payload does."""
    inert = 0
    for number, text in enumerate([*HOSTILE, *(f'run{payload}' for payload in HOSTILE)]):
        try: script = PLACES[place](text)
        except ValueError: continue
        assert subprocess.run(['bash', '-n'], input=script, text=True).returncode == 0, script
        orders = [line for line in script.splitlines() if line.startswith('#SBATCH')]
        assert len(orders) == 11 + (place == 'partition'), orders
        folder = tmp_path/str(number)
        folder.mkdir()
        job = start(folder, script)
        output = job.communicate(timeout=20)[0]
        assert files(folder/'place') == set(), (text, output)
        assert requeues(folder) == [], (text, output)
        if place != 'python': assert job.returncode == 0, (text, output)
        if place == 'paths':
            for program in 'arguments', 'preflight':
                assert arguments(folder, program).count(text) == 2
        inert += 1
    print(f'{place}: {inert} of {2 * len(HOSTILE)} inert, the others refused')
    assert inert >= 30 if place in ('paths', 'python') else inert <= 6


def write_state(state: str, step=4) -> str:
    "A command that writes what a run writes of its state."
    return f"""echo '{{"state": "{state}", "step": {step}}}' > run.new; mv run.new run.json"""


@pytest.mark.parametrize(
    'code, state, wanted',
    [
        (0, 'finished', (0, 0)),
        (1, '', (1, 0)),
        (1, 'running', (1, 0)),
        (137, '', (137, 0)),
        (75, '', (75, 1)),
        (75, 'preempted', (75, 1)),
        (1, 'preempted', (75, 1)),
        (137, 'preempted', (75, 1)),
        (0, 'preempted', (0, 0))])
def test_18_only_a_preempted_job_comes_back_and_once(code, state, wanted, tmp_path):
    (tmp_path/'place').mkdir()
    # Of an earlier launch: it must not count
    (tmp_path/'place/run.json').write_text('{"state": "preempted", "step": 4}')
    act = write_state(state) if state else 'true'
    job = start(tmp_path, sbatch(BASE, '.'), code, act)
    output = job.communicate(timeout=20)[0]
    assert (job.returncode, len(requeues(tmp_path))) == wanted, output


# Python that ends with 75 at the signal, and then leaves word of it as a rank does
WORKER = f"""python3() {{ "$PYTHON" "$@"; }}; python3 -c '
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *what: sys.exit(75))
open("ready", "w")
time.sleep(30)'; [ "$?" != 75 ] || {{ {write_state('preempted')}; }}"""


@pytest.mark.parametrize('signals', [1, 3])
def test_18_the_warning_reaches_the_worker_and_not_its_launcher(signals, tmp_path, monkeypatch):
    monkeypatch.setenv('PYTHON', sys.executable)
    job = start(tmp_path, sbatch(BASE, '.'), 1, WORKER)  # 1 is what torchrun makes of 75
    assert wait_for((tmp_path/'place/ready').exists, 20)
    for _ in range(signals): job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=20)[0]
    assert (job.returncode, requeues(tmp_path)) == (75, ['4711']), output


def test_18_a_failed_preflight_ends_the_job_before_training(tmp_path):
    job = start(tmp_path, sbatch(BASE, '.'), act=write_state('preempted'), check='exit 3')
    output = job.communicate(timeout=20)[0]
    assert (job.returncode, requeues(tmp_path), files(tmp_path/'place')) == (3, [], set()), output
    assert 'the preflight failed with exit code 3: nothing was trained' in output
    assert not (tmp_path/'seen/arguments').exists()


@pytest.mark.parametrize(
    'check',
    [
        'touch ready; exec sleep 30', "trap 'exit 0' USR1; touch ready; sleep 30 & wait",
        'touch ready; sleep 2'])
def test_18_a_signal_during_the_preflight_brings_the_job_back_untrained(check, tmp_path):
    job = start(tmp_path, sbatch(BASE, '.'), check=check)
    assert wait_for((tmp_path/'place/ready').exists, 20)
    job.send_signal(signal.SIGUSR1)
    # The `sleep 30` of a check that has ended by itself may hold the pipe until it ends
    output = job.communicate(timeout=45)[0]
    assert (job.returncode, requeues(tmp_path)) == (75, ['4711']), output
    assert 'asked to stop before training' in output
    assert not (tmp_path/'seen/arguments').exists()


def test_18_preflight_and_ranks_meet_at_the_same_node_on_ports_of_their_own(tmp_path):
    job = start(tmp_path, sbatch(BASE, '.'))
    job.communicate(timeout=20)
    check = arguments(tmp_path, 'preflight')
    train = arguments(tmp_path, 'arguments')
    assert check[:5] == ['-m', 'llm_workbook', 'preflight', 'recipe.yaml', '--directory']
    assert check[check.index('--head') + 1] == 'localhost'
    assert check[check.index('--port') + 1] == '24711'
    assert '--rdzv-endpoint=localhost:14711' in train
    assert train[train.index('--step-timeout') + 1] == '1200'


def test_18_the_script_says_all_that_a_requeue_needs():
    script = sbatch(BASE, 'run', options={'time': '30', 'cpus-per-task': 8})
    lines = script.splitlines()
    for option in 'requeue', 'open-mode=append', 'signal=B:USR1@300', 'cpus-per-task=8':
        assert f'#SBATCH --{option}' in lines
    assert '--exclusive' not in script
    assert '--mem' not in script
    assert {'#SBATCH --exclusive', '#SBATCH --mem=0'} <= {*sbatch(BASE, 'run').splitlines()}
    with_memory = sbatch(BASE, 'run', options={'mem': '80G'})
    assert {'#SBATCH --exclusive', '#SBATCH --mem=80G'} <= {*with_memory.splitlines()}
    assert '--rdzv-backend=c10d' in script
    assert '--rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"' in script
    order = 'trap forward', 'llm_workbook preflight', 'llm_workbook train'
    places = [script.index(words) for words in order]
    assert places == sorted(places)
    assert script.count('scontrol requeue') == 1
    last_option = max(n for n, line in enumerate(lines) if line.startswith('#SBATCH'))
    assert last_option < lines.index('set -u')


def test_18_a_secret_is_handed_on_by_name(tmp_path, monkeypatch):
    canary = 'hf' + '_' + 'canary' * 5
    monkeypatch.setenv('HF_TOKEN', canary)
    script = sbatch(BASE, 'run')
    assert canary not in script
    assert 'export HF_TOKEN\n' in script
    job = start(tmp_path, script)
    assert canary not in job.communicate(timeout=20)[0]
    assert job.returncode == 0
    assert f'HF_TOKEN={canary}' in (tmp_path/'seen/environment').read_text()
    assert files(tmp_path/'place') == set()
    with pytest.raises(ValueError, match='never what is in them') as caught:
        sbatch(BASE, 'run', secrets=(canary,))
    assert canary not in str(caught.value)


@pytest.mark.parametrize(
    'limit, warning_s',
    [
        ('2', 30),
        ('2:00', 30),
        ('0:02:00', 30),
        ('5', 75),
        ('19:59', 299),
        ('20', 300),
        ('1:00:00', 300),
        ('0-1', 300),
        ('1-0:00', 300)])
def test_18_the_warning_leaves_three_quarters_of_a_short_limit_for_training(limit, warning_s):
    assert f'#SBATCH --signal=B:USR1@{warning_s}\n' in sbatch(BASE, 'run', options={'time': limit})


@pytest.mark.parametrize('limit', ['1', '0', '1:59', '0:01:59', '0-0', '0-0:01'])
def test_18_a_limit_that_is_too_short_to_save_is_refused(limit):
    with pytest.raises(ValueError, match='too short to start, train and save'):
        sbatch(BASE, 'run', options={'time': limit})


def test_18_a_signal_that_comes_while_the_ranks_start_is_sent_again(tmp_path, monkeypatch):
    "The worker ignores it for two seconds, as one that still imports torch."
    monkeypatch.setenv('PYTHON', sys.executable)
    script = sbatch(BASE, '.')
    assert '((s % 10))' in script
    late = 'touch early; trap "" USR1; sleep 2; ' + WORKER
    job = start(tmp_path, script.replace('((s % 10))', '((s % 3))'), 1, late)
    assert wait_for((tmp_path/'place/early').exists, 20)
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=20)[0]
    assert (job.returncode, requeues(tmp_path)) == (75, ['4711']), output


@pytest.mark.parametrize('signals, wanted', [(1, (75, ['4711'])), (0, (138, []))])
def test_18_a_launcher_that_the_signal_kills_comes_back_only_if_it_was_sent(
    signals, wanted, tmp_path
):
    job = start(tmp_path, sbatch(BASE, '.'), 138, f'touch ready; sleep {2 * signals}')
    assert wait_for((tmp_path/'place/ready').exists, 20)
    for _ in range(signals): job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=20)[0]
    assert (job.returncode, requeues(tmp_path)) == wanted, output


@pytest.mark.parametrize(
    'steps, wanted', [((4, 4, 4, 4, 4), 3), ((4, 4, 4, 5, 5), 5), (('',) * 4, 3)])
def test_18_a_job_that_gets_no_further_does_not_come_back_forever(steps, wanted, tmp_path):
    for step in steps:
        act = write_state('preempted', step) if step else 'true'
        job = start(tmp_path, sbatch(BASE, '.'), 75, act)
        output = job.communicate(timeout=20)[0]
        assert job.returncode == 75
    assert len(requeues(tmp_path)) == wanted
    assert ('for the fourth time at step' in output) == (wanted == 3), output


SHOW_LATE = f'(sleep 2; {write_state("preempted")}) &> /dev/null &'


@pytest.mark.parametrize('shown, wanted', [(SHOW_LATE, (75, ['4711'])), ('true', (1, []))])
def test_18_a_file_that_the_network_shows_late_is_waited_for_when_the_job_was_asked(
    shown, wanted, tmp_path
):
    "torchrun ends with 1, and run.json is seen only afterwards, or never."
    script = sbatch(BASE, '.')
    assert '{1..19}' in script
    assert 'sleep 5' in script
    quicker = script.replace('sleep 5', 'sleep .25')
    job = start(tmp_path, quicker, 1, f'touch ready; sleep 1; {shown}')
    assert wait_for((tmp_path/'place/ready').exists, 20)
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=30)[0]
    assert (job.returncode, requeues(tmp_path)) == wanted, output


def test_18_more_processors_for_a_task_reach_srun(tmp_path, monkeypatch):
    monkeypatch.setenv('SLURM_CPUS_PER_TASK', '8')
    start(tmp_path, sbatch(BASE, '.', options={'cpus-per-task': 8})).communicate(timeout=20)
    assert 'SRUN_CPUS_PER_TASK=8\n' in (tmp_path/'seen/environment').read_text()
