"""Every test in this folder is a fault that is made on purpose; after each, nothing of it may be
left."""
import os
import signal
import tempfile
from pathlib import Path

import pytest
from trouble import (
    CANARY, SAID, TOKENS, children, fine_tune, ports, small_recipe, variables, wait_for)

HANDLED = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


def pytest_collection_modifyitems(items):
    "`make test-fault` runs all that is marked so; `make test` those of them that are not `slow`."
    for item in items:
        if Path(__file__).parent in item.path.parents: item.add_marker(pytest.mark.fault)


def pytest_terminal_summary(terminalreporter):
    for line in SAID: terminalreporter.write_line(line)


@pytest.fixture(scope='session', autouse=True)
def imported():
    "Import what ranks need once, before the first fork, and not in every rank."
    import accelerate, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, transformers  # noqa: E401, F401


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path_factory, monkeypatch):
    """After every test: no child, no port that listens, no temporary file, the same signal
    handlers, variables and folder."""
    temp = tmp_path_factory.mktemp('temp')
    before = variables(), os.getcwd(), [signal.getsignal(number) for number in HANDLED]
    listening = ports()
    for name, value in {
        'TMPDIR': str(temp), 'TORCH_DISTRIBUTED_DEBUG': 'DETAIL', 'HF_HUB_OFFLINE': '1',
        'OMP_NUM_THREADS': '1'}.items(): monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, 'tempdir', str(temp))
    yield
    monkeypatch.undo()
    assert wait_for(lambda: not children()), children()
    # Nothing is collected first: an error must hold no store
    assert wait_for(lambda: ports() <= listening), ports() - listening
    assert [path.name for path in temp.iterdir()] == []
    assert (variables(), os.getcwd(), [signal.getsignal(number) for number in HANDLED]) == before


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
