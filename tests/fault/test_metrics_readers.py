"""Fault 23: who reads a file that is being written meets half a line, another file, or none."""
import json
import sys
from pathlib import Path

import pytest

from llm_workbook import LossCurve, read_metrics

ROWS = [{'step': n, 'seconds': n/10, 'loss': 3 - n/10} for n in range(1, 13)]
TEXT = ''.join(json.dumps(row) + '\n' for row in ROWS)


def test_23_half_a_line_is_left_for_the_next_look(tmp_path):
    path = tmp_path/'metrics.jsonl'
    rows_before = []
    assert read_metrics(path) == []
    for end in range(0, len(TEXT) + 1, 7):
        path.write_text(TEXT[:end])
        rows = read_metrics(path)
        whole_lines = TEXT[:end].count('\n')
        assert rows == ROWS[:whole_lines]
        assert len(rows) >= len(rows_before)
        rows_before = rows
    path.write_text(TEXT)
    assert read_metrics(path) == ROWS


@pytest.fixture
def curve(tmp_path, monkeypatch):
    "A curve that draws as in a notebook, and keeps what it has drawn."
    monkeypatch.setitem(sys.modules, 'ipykernel', object())
    curve = LossCurve(tmp_path, 12)
    curve.pictures = []
    def keep_steps(metrics): curve.pictures.append([row['step'] for row in metrics])
    monkeypatch.setattr(curve, '_draw', keep_steps)
    yield curve
    curve.bar.close()


def test_23_the_curve_keeps_going_through_half_lines_rotation_and_loss(curve):
    curve()  # Before the first line
    for end in range(1, len(TEXT)//2, 11):
        curve.files.metrics.write_text(TEXT[:end])
        curve()
    before = curve.pictures[-1]
    assert before == [row['step'] for row in ROWS[:len(before)]]
    assert len(before) >= 4
    curve.files.metrics.unlink()
    curve()
    curve.files.metrics.write_text('')
    curve()
    assert curve.pictures[-1] == before
    first_lines = TEXT.splitlines(keepends=True)[:2]
    curve.files.metrics.write_text(''.join(first_lines))  # Cut back to the last checkpoint
    curve()
    curve.files.metrics.write_text(TEXT)
    curve()
    assert curve.pictures[-2:] == [[1, 2], list(range(1, 13))]
    assert curve.bar.n == 12


def test_23_a_file_that_vanishes_between_two_calls_is_no_error(curve, monkeypatch):
    curve.files.metrics.write_text(TEXT)
    def gone(*args, **how): raise FileNotFoundError('gone')
    monkeypatch.setattr(Path, 'read_text', gone)
    curve()
    assert curve.pictures == []
