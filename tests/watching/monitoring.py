"""Programs that watch a run, started as a user starts them: the exporter, Prometheus and
node-exporter, all on loopback."""
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from trouble import CANARY, TOKENS, wait_for

from llm_workbook.parallel.ranks import free_port
from llm_workbook.watching.dashboard import ask_prometheus

JOB = 'llm-workbook'


def needs(*programs: str):
    "Skip a test, with the reason, where a program of Debian is not installed."
    missing = [name for name in programs if not shutil.which(name)]
    return pytest.mark.skipif(
        bool(missing), reason=f'no {" and no ".join(missing)} here: apt install prometheus '
        'prometheus-node-exporter')


def pretended_driver(folder: Path) -> dict:
    "Build a library that answers in the place of NVIDIA's driver; give the variable to find it."
    source = Path(__file__).with_name('pretended_driver.cpp')
    compiler = shutil.which('c++') or 'g++'
    library = folder/'libnvidia-ml.so.1'
    subprocess.run([compiler, '-shared', '-fPIC', '-o', library, source], check=True)
    return {'LD_LIBRARY_PATH': str(folder)}


class Program:
    """A program that runs until it is ended, and that can be started again in the same way.

    The tokens of a user are in its environment.
    """

    def __init__(self, folder: Path, *command, variables: dict | None = None):
        self.folder, self.command = folder, [str(word) for word in command]
        self.variables = {name: CANARY for name in TOKENS} | (variables or {})
        self.log, self.process = folder/'log', None
        self.start()

    def start(self):
        with open(self.log, 'a') as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, cwd=self.folder,
                env=os.environ | self.variables)

    def end(self):
        "Kill it with all below it, as a machine does that has no time."
        if self.process.poll() is not None: return
        root = psutil.Process(self.process.pid)
        for process in [*root.children(recursive=True), root]: process.kill()
        self.process.wait(20)


class ExporterProgram(Program):
    "`llm-workbook metrics` of a run."

    def __init__(self, folder: Path, run: Path, *options, variables: dict | None = None):
        self.port = free_port()
        command = '-m', 'llm_workbook', 'metrics', run, '--port', self.port, *options
        super().__init__(folder, sys.executable, *command, variables=variables)

    def text(self) -> str:
        "What it answers; '' while it does not."
        try: return urlopen(f'http://127.0.0.1:{self.port}/metrics', timeout=10).read().decode()
        except OSError: return ''


class Prometheus(Program):
    "A server with a configuration and a storage of its own, which asks every second."

    def __init__(self, folder: Path, target_port: int):
        config = folder/'prometheus.yml'
        config.write_text(
            f'scrape_configs:\n- job_name: {JOB}\n  scrape_interval: 1s\n'
            f"  static_configs: [{{targets: ['127.0.0.1:{target_port}']}}]\n")
        self.url = f'http://127.0.0.1:{free_port()}'
        super().__init__(
            folder, 'prometheus', f'--config.file={config}', '--log.level=warn',
            f'--storage.tsdb.path={folder/"data"}',
            f'--web.listen-address={self.url.removeprefix("http://")}')

    def values(self, expression: str) -> list[float]:
        "The newest values; none while it does not answer."
        try: answers = ask_prometheus(self.url, expression)
        except OSError: return []
        return [float(answer['value'][1]) for answer in answers]

    def value(self, expression: str, seconds=30) -> float | None:
        """The one value, or the largest; None where there is none.

        A busy machine may answer Prometheus too late, and then there is none for a moment.
        """
        return max(wait_for(lambda: self.values(expression), seconds), default=None)


def grows(look, seconds=60) -> bool:
    "Whether `look()` gives a larger number than at first, soon."
    first = look()
    return bool(wait_for(lambda: (look() or 0) > (first or 0), seconds))
