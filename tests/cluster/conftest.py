"""A SLURM of two nodes for the tests of this folder, brought up once and taken down at the end."""
import os
from pathlib import Path

import cluster
import pytest
from bench.shared import launches as table

from llm_workbook.launching.slurm import submit
from llm_workbook.config.recipe import Recipe
from llm_workbook.training.fine_tune import fine_tune

PATIENCE_S = table.PATIENCE_S


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents: item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope='session', autouse=True)
def slurm(tmp_path_factory):
    "The cluster, its commands on PATH, and jobs that take no more threads than there are cores."
    obstacle = cluster.obstacle()
    if obstacle: pytest.skip(obstacle)
    if cluster.nodes():
        pytest.fail('a cluster is up, perhaps with jobs of yours: make cluster-down first')
    cluster.up()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            'PATH': f'{cluster.HOME}/bin:{os.environ["PATH"]}', 'HF_HUB_OFFLINE': '1',
            'OMP_NUM_THREADS': '1', 'TMPDIR': str(tmp_path_factory.mktemp('temp'))
        }.items():
            patch.setenv(name, value)
        try: yield cluster
        finally: cluster.down()


@pytest.fixture(autouse=True)
def idle_before(slurm):
    assert cluster.wait_for(lambda: cluster.nodes() == 'node1 idle, node2 idle', 60), (
        cluster.nodes())


def toy(letter: str, processes=1, **changes) -> Recipe:
    "A recipe of the table over two nodes."
    return table.toy(letter, 2, processes).changed(changes)


def start(recipe: Recipe, directory: Path, **options):
    return submit(recipe, directory, options={'time': '30'} | options)


def until(job, condition, seconds=PATIENCE_S):
    "Look at a job until `condition(status)` holds; an end that was not meant shows the log."
    seen = []
    def met():
        seen.append(job.status())
        return condition(seen[-1]) or seen[-1].ended
    cluster.wait_for(met, seconds)
    assert condition(seen[-1]), f'{seen[-1]}\n{job.logs(60)}'
    return seen[-1]


def finished(job): return until(job, lambda status: status.state == 'COMPLETED')


def training(job, step=4):
    return until(job, lambda status: status.run == 'running' and status.step >= step)


def losses(directory: Path) -> list:
    from llm_workbook import read_metrics
    return [row['loss'] for row in read_metrics(directory/'metrics.jsonl')]


def places() -> dict:
    "On which node each rank is now, by the network that its process sees."
    networks = {Path(f'/run/netns/llmw-{node}').stat().st_ino: node for node in cluster.NODES}
    found = {}
    for pid in cluster.inside():
        try:
            words = Path(f'/proc/{pid}/environ').read_bytes().split(b'\0')
            rank = next((int(word[5:]) for word in words if word.startswith(b'RANK=')), None)
            if rank is not None: found[rank] = networks[Path(f'/proc/{pid}/ns/net').stat().st_ino]
        except (OSError, KeyError): continue  # Gone meanwhile
    return found


def as_alone(recipe: Recipe, job, directory: Path):
    "The first loss is that of one process, and no rank held more than its part."
    fine_tune(table.single(recipe), directory, timeout_s=PATIENCE_S, live=False)
    cell = table.compare(recipe, job.directory, directory)
    assert table.well(cell), cell


@pytest.fixture(scope='session')
def full():
    "All losses can be compared to the last digits: float32, for 24 steps."
    return toy(
        'D', **{'precision.compute': 'float32', 'optimizer.steps': 24, 'intervals.saving': 0})


@pytest.fixture(scope='session')
def whole(slurm, full, tmp_path_factory):
    "An undisturbed run over both nodes: its directory, and where its ranks were."
    job = start(full.changed({'intervals.saving': 12}), tmp_path_factory.mktemp('whole')/'run')
    training(job, 1)
    where = places()
    finished(job)
    return job, where
