"""Every test in this folder is a fault that is made on purpose; after each, nothing of it may be
left."""
import os
import signal
import tempfile
from pathlib import Path

import pytest
from trouble import CANARY, TOKENS, children, fine_tune, ports, small_recipe, variables, wait_for

HANDLED = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


def pytest_collection_modifyitems(items):
    "`make test-fault` runs all that is marked so; `make test` those of them that are not `slow`."
    for item in items:
        if Path(__file__).parent in item.path.parents: item.add_marker(pytest.mark.fault)


def state_of_this_process() -> tuple:
    handlers = [signal.getsignal(number) for number in HANDLED]
    return variables(), os.getcwd(), handlers


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path_factory, monkeypatch):
    """After every test: no child, no port that listens, no temporary file, the same signal
    handlers, variables and folder."""
    temp = tmp_path_factory.mktemp('temp')
    state_before = state_of_this_process()
    ports_before = ports()
    monkeypatch.setenv('TMPDIR', str(temp))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    monkeypatch.setattr(tempfile, 'tempdir', str(temp))
    yield
    monkeypatch.undo()
    assert wait_for(lambda: not children()), children()
    # Nothing is collected first: an error must hold no store
    assert wait_for(lambda: ports() <= ports_before), ports() - ports_before
    assert [path.name for path in temp.iterdir()] == []
    assert state_of_this_process() == state_before


@pytest.fixture(scope='session')
def recipe(tmp_path_factory):
    "The smallest full fine-tune over two ranks: 24 rows, 6 steps."
    return small_recipe(tmp_path_factory.mktemp('small'))


@pytest.fixture(scope='session')
def kept(recipe, tmp_path_factory):
    """An undisturbed run that saved every second step and kept two checkpoints, with a token in its
    environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in TOKENS: patch.setenv(name, CANARY)
        return fine_tune(
            recipe.changed({'intervals.saving': 2}), tmp_path_factory.mktemp('kept')/'run')
