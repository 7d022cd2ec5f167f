"""The wheel and the source archive hold what they should, and what is in them works where the
checkout is not."""
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from page import ROOT

PARTS = ('settings.ini', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE')


def run(*command, **kwargs) -> str:
    "Run a command, and show what it said when it fails."
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def sources() -> list[Path]:
    "Every file that goes into the archives."
    inside = [
        p
        for p in (ROOT/'llm_workbook').rglob('*')
        if p.is_file() and '__pycache__' not in p.parts]
    return inside + [ROOT/part for part in PARTS]


@pytest.fixture(scope='session')
def archives(tmp_path_factory) -> tuple[Path, Path]:
    "Return (wheel, source archive): those in dist when nothing is newer, else built here."
    folder = ROOT/'dist'
    newest = max(p.stat().st_mtime for p in sources())
    found = sorted(folder.glob('*.whl'))
    if not found or found[0].stat().st_mtime < newest:
        folder = tmp_path_factory.mktemp('dist')
        run(sys.executable, '-m', 'build', '--no-isolation', '--outdir', folder, ROOT)
    return next(folder.glob('*.whl')), next(folder.glob('*.tar.gz'))


def packaged() -> set[str]:
    return {str(p.relative_to(ROOT)) for p in sources() if p.is_relative_to(ROOT/'llm_workbook')}


def test_the_wheel_holds_the_package_and_its_assets_only(archives):
    names = {n for n in zipfile.ZipFile(archives[0]).namelist() if '.dist-info/' not in n}
    assert names == packaged()
    assert archives[0].stat().st_size < 10 * 2**20


def test_the_source_archive_builds_without_the_checkout(archives):
    names = {n.split('/', 1)[1] for n in tarfile.open(archives[1]).getnames() if '/' in n}
    assert packaged() | set(PARTS) <= names
    assert not any(n.startswith(('nbs/', 'tests/', '.venv')) for n in names)


def test_both_are_fit_to_be_published(archives):
    pytest.importorskip('twine')
    run(sys.executable, '-m', 'twine', 'check', '--strict', *archives)


def test_the_wheel_works_from_another_place(archives, tmp_path):
    run(
        sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index', '--target',
        tmp_path/'site', archives[0])
    program = (
        "import llm_workbook, pathlib, sys; from llm_workbook import Recipe, asset, recipe_names; "
        "assert 'torch' not in sys.modules; [Recipe.named(n) for n in recipe_names()]; "
        "assert (asset('tiny-base')/'config.json').read_bytes(); "
        "print(pathlib.Path(llm_workbook.__file__).parent)"
    )
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'} | {
        'PYTHONPATH': str(tmp_path/'site')}
    assert run(sys.executable, '-c', program, cwd=tmp_path, env=env).strip() == str(
        tmp_path/'site/llm_workbook')
    assert '70b-2x24gb-qlora' in run(
        tmp_path/'site/bin/llm-workbook', 'recipes', cwd=tmp_path, env=env)


@pytest.mark.slow
@pytest.mark.net
def test_pip_installs_everything_into_an_empty_environment(archives, tmp_path):
    run(sys.executable, '-m', 'venv', tmp_path/'venv')
    python = tmp_path/'venv/bin/python'
    index = ['--index-url', os.environ['TORCH_INDEX']] if os.environ.get('TORCH_INDEX') else []
    run(python, '-m', 'pip', 'install', '--quiet', '-c', ROOT/'constraints.txt', 'torch', *index)
    run(python, '-m', 'pip', 'install', '--quiet', '-c', ROOT/'constraints.txt', archives[0])
    run(python, '-m', 'pip', 'check')
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    program = 'import llm_workbook as w; print(len([getattr(w, n) for n in dir(w)]))'
    assert int(run(python, '-c', program, cwd=tmp_path, env=env)) > 10
