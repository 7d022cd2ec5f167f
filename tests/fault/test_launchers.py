"""Every launcher starts the same training: rendered commands, run as they are, with the same first loss."""
import pytest
from trouble import launched, small_recipe


@pytest.fixture(scope='module')
def small(tmp_path_factory): return small_recipe(tmp_path_factory.mktemp('small'), **{'optimizer.steps': 2})


@pytest.mark.slow
@pytest.mark.parametrize('way, kind', [('fsdp2', 'torchrun'), ('ddp', 'accelerate'), ('zero2', 'accelerate')])
def test_a_rendered_command_trains_over_two_ranks(small, way, kind, tmp_path, monkeypatch):
    (tmp_path/'temp').mkdir()
    monkeypatch.setenv('TMPDIR', str(tmp_path/'temp'))  # Launchers leave logs there
    monkeypatch.setenv('TORCH_DISTRIBUTED_DEBUG', 'OFF')  # With DETAIL, DDP of torch 2.13 ends in a segmentation fault
    monkeypatch.chdir(tmp_path)
    launched(small.changed({'sharding.strategy': way}), kind)
