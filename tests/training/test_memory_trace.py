"""Memory of the GPU: what tensors use and what torch holds; samples read the host alone."""
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from llm_workbook.config.recipe import Recipe
from llm_workbook.training import memory_trace as module
from llm_workbook.training.fine_tune import Run
from llm_workbook.training.memory_trace import Bytes, MemoryTrace, memory_trace
from llm_workbook.training.run_directory import RunFiles, write_line


class FakeCuda:
    "Counts what is asked; two marks that rise only while a block lasts."
    def __init__(self):
        self.asked = Counter()
        self.now = 3, 4
        self.most = self.now

    def grow(self, allocated, reserved):
        self.most = max(self.most[0], allocated), max(self.most[1], reserved)

    def memory_allocated(self): return self.now[0]
    def memory_reserved(self): return self.now[1]
    def reset_peak_memory_stats(self): self.most = self.now

    def max_memory_allocated(self):
        self.asked['allocated'] += 1
        return self.most[0]

    def max_memory_reserved(self):
        self.asked['reserved'] += 1
        return self.most[1]


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(module, '_cuda', lambda: fake)
    return fake


def test_what_torch_holds_is_recorded_beside_what_tensors_use(cuda):
    with memory_trace() as outer:
        cuda.grow(10, 20)
        with memory_trace() as inner:
            cuda.grow(7, 30)
    assert (outer.begin.gpu_b, outer.begin.reserved_b) == (3, 4)
    assert (inner.peak.gpu_b, inner.peak.reserved_b) == (7, 30)
    assert (outer.peak.gpu_b, outer.peak.reserved_b) == (10, 30)
    assert (outer.end.gpu_b, outer.end.reserved_b) == (3, 4)


def test_samples_read_the_host_alone(cuda, monkeypatch):
    class ReadOnlyPath(type(Path())):
        def write_text(self, *args): raise PermissionError
    monkeypatch.setattr(module, 'Path', ReadOnlyPath)
    with memory_trace() as trace:
        cuda.grow(10, 20)
        time.sleep(0.1)  # Room for some fifty samples
        assert not cuda.asked
    assert trace.method == 'samples'
    assert trace.peak.host_b >= trace.begin.host_b > 0
    assert (trace.peak.gpu_b, trace.peak.reserved_b) == (10, 20)
    assert set(cuda.asked.values()) == {1}


def test_without_a_gpu_the_host_is_shown_alone():
    with memory_trace() as trace: pass
    assert (trace.peak.gpu_b, trace.peak.reserved_b) == (0, 0)
    assert 'GPU' not in str(trace.peak)
    both = Bytes(2**31, None, 2**30, 3 * 2**29)
    assert str(both) == 'host 2,048 MiB, GPU 1,024 MiB (1,536 reserved)'


def test_the_table_of_a_run_shows_both_figures_of_a_gpu(tmp_path):
    write_line(RunFiles(tmp_path).metrics, {'step': 1, 'seconds': 1.0, 'loss': 2.0})
    shards = SimpleNamespace(here_b=1, total_b=2)
    def table(peak):
        rank = {'shards': shards, 'payload': None, 'memory': MemoryTrace(Bytes(), peak)}
        return Run(Recipe.named('reviews-qlora'), tmp_path, [rank])._repr_html_()
    both = table(Bytes(2**30, None, 2**31, 3 * 2**30))
    assert 'host 1,024 MiB, GPU 2,048 MiB (3,072 reserved)' in both
    assert 'GPU' not in table(Bytes(2**30))
