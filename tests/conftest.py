"""Let the tests use the project's own programs as modules, and keep files of tests apart."""
import gc
import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Tests share what they make
ROOMS = (
    'config model plan parallel checkpoint training rehearsal launching release watching '
    'exercises').split()
for folder in (ROOT, ROOT/'tools', ROOT/'tests', *(ROOT/'tests'/room for room in ROOMS)):
    sys.path.insert(0, str(folder))

# As `make test` has it: a fork of a process whose threads of OpenMP run waits for them for ever
os.environ.setdefault('OMP_NUM_THREADS', '1')

from in_time import LEFT_OUT, is_over  # noqa: E402
from libraries import bring_libraries  # noqa: E402
from warm import warm  # noqa: E402, F401

# A shell lets what it starts in the background ignore Ctrl-C, and every process below would inherit
# that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Imports and the list of tests leave no garbage, and the collector would look through all of them
gc.disable()


def pytest_collection_finish():
    "Collect garbage again once all tests are known."
    gc.freeze()
    # A launch and a rehearsal show all objects again when they end, those of libraries too: to go
    # through them takes 0.3 s, after each file and now and then in between
    gc.unfreeze = lambda: None
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    "Begin no test after the end that `.ci/run` sets; pytest lists those that are left out."
    if is_over(): pytest.skip(LEFT_OUT)


def pytest_configure(config):
    "Show each failure when it happens: a run that is cut off has no summary."
    is_worker = hasattr(config, 'workerinput')
    if not is_worker: config.pluginmanager.register(FailuresAtOnce(config))
    if is_worker or not config.getoption('numprocesses', None):
        os.environ.pop('LLMW_TESTS_UNTIL', None)  # No test or page that a test starts is left out


class FailuresAtOnce:
    "Prints what a failed test says as soon as it has failed."
    def __init__(self, config): self.config = config

    def pytest_runtest_logreport(self, report):
        if not report.failed: return
        reporter = self.config.pluginmanager.get_plugin('terminalreporter')
        lines = report.longreprtext.splitlines()[-12:]
        reporter.write_line('\n'.join(['', f'failed: {report.nodeid} ({report.when})', *lines]))


def pytest_terminal_summary(terminalreporter):
    "Print what tests have recorded as `report`, whether they passed or not."
    ended = [*terminalreporter.getreports('passed'), *terminalreporter.getreports('failed')]
    for report in ended:
        if report.when != 'call': continue
        for name, value in report.user_properties:
            if name == 'report': terminalreporter.write_line(value)


@pytest.fixture(scope='module', autouse=True)
def no_garbage_of_other_files():
    """Let no collection of garbage go through what other files have left.

    It takes half a second after some files, and tests that measure time would count it.
    """
    gc.collect()
    gc.freeze()


# Rooms whose tests start ranks, many times
WITH_RANKS = 'parallel', 'checkpoint', 'training', 'release', 'watching', 'museum', 'fault'


@pytest.fixture(scope='module', autouse=True)
def libraries_of_ranks(request):
    "Import once what ranks need: these are most of a short rank's time."
    if request.path.parent.name in WITH_RANKS: bring_libraries()
