"""The benchmark harness: lines that run, that are skipped, that nobody knows, and the records they
leave."""
import json
import subprocess
import sys
from math import isclose

import pytest
from bench.lines import import_time, real_data
from bench.record import RESULTS, ROOT, Skip, faults, record, save
from bench.run import LINES, main, run_line

COMMITTED = sorted(RESULTS.glob('*/*.json'))


def test_a_line_runs_and_its_record_is_valid():
    made = import_time.measure(repetitions=3)
    assert faults(made) == []
    assert made['line'] == 'import_time'
    assert made['unit'] == 's'
    assert made['repetitions'] == 3
    assert made['goal'] == 0.5
    assert 0 < made['value'] <= made['worst']
    assert {'python', 'torch'} <= made['versions'].keys()


def test_the_last_line_printed_is_the_record_that_is_written(monkeypatch, tmp_path, capsys):
    made = record('import_time', [3.0, 1.0, 2.0], 's', [4.0, 8.0], peer='another')
    monkeypatch.setattr(import_time, 'measure', lambda: made)
    assert run_line('import_time', tmp_path) == made
    printed = capsys.readouterr().out.splitlines()
    assert (
        json.loads(printed[-1])
        == json.loads((tmp_path/'cpu/import_time.json').read_text())
        == made)
    assert (
        made['value'], made['worst'], made['peer_value'], made['ratio'],
        made['repetitions']) == (2, 3, 6, 0.333, 3)


def test_a_line_that_cannot_run_here_is_skipped_with_its_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv('LLMW_DATA', str(tmp_path))
    assert run_line('real_data', tmp_path) is None
    assert (
        'real_data: skipped: no amazon_reviews.tsv and no instructions.json; set LLMW_DATA'
        in capsys.readouterr().out)
    assert not list(tmp_path.glob('*/*.json'))
    with pytest.raises(Skip): real_data.measure()


def test_an_unknown_line_ends_with_the_known_names():
    done = subprocess.run(
        [sys.executable, '-m', 'bench.run', 'import_tyme'], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.strip() == f'no benchmark line import_tyme; known: {", ".join(LINES)}'


def test_without_a_name_all_lines_run(monkeypatch):
    ran = []
    monkeypatch.setattr('bench.run.run_line', ran.append)
    main([])
    assert tuple(ran) == LINES


@pytest.mark.parametrize(
    'change, fault',
    [
        ({'value': '2'}, "value is '2'"),
        ({'unit': None}, 'unit is None'),
        ({'worst': True}, 'worst is True'),
        ({'peer': 'another'}, 'come together'),
        ({'place': '/tmp' + '/x'}, 'path of one machine')])
def test_a_bad_record_is_not_written(change, fault, tmp_path):
    made = record('import_time', [1.0], 's') | change
    with pytest.raises(ValueError, match=fault): save(made, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_record_without_a_date_is_not_written(tmp_path):
    made = record('import_time', [1.0], 's')
    del made['date']
    with pytest.raises(ValueError, match='date is missing'): save(made, tmp_path)


@pytest.mark.parametrize('path', COMMITTED, ids=lambda path: path.stem)
def test_committed_records_are_valid(path):
    made = json.loads(path.read_text())
    assert faults(made) == []
    assert made['line'] == path.stem
    assert made['line'] in LINES
    if 'peer' in made:
        assert isclose(made['ratio'], made['value'] / made['peer_value'], abs_tol=1e-3)


def test_every_line_has_its_record():
    assert {path.stem for path in COMMITTED} == set(LINES)


def test_luck_is_counted_exactly():
    assert real_data.p_value(2, 2, 0.5) == 0.25
    assert isclose(real_data.p_value(0, 200, 0.5), 1)
    assert real_data.p_value(117, 200, 0.5) < 0.01 < real_data.p_value(116, 200, 0.5)
    rows = [
        {'messages': [{}, {'content': word}]}
        for word in ('positive', 'positive', 'positive', 'negative')]
    assert real_data.chance(rows) == 0.75
    assert real_data.chance(rows[2:]) == 0.5


def test_rows_that_settings_were_tuned_on_are_never_held_out():
    try: source = real_data.folder()/real_data.FILES[0]
    except Skip as reason: pytest.skip(str(reason))
    def asked(rows): return {row['messages'][0]['content'] for row in rows}
    tuning, _ = real_data.pool(real_data.review_recipe(source))
    for seed in real_data.SEEDS:
        train, test = real_data.review_rows(source, seed)
        assert (len(train), len(test)) == (800, 200)
        assert not asked(test) & asked(train)
        assert asked(tuning) <= asked(train)
