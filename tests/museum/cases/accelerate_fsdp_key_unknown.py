"""accelerate refuses an unknown key at the top of its file, and takes one inside `fsdp_config`."""
from pathlib import Path

from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser, _validate_launch_command
from accelerate.utils.launch import prepare_multi_gpu_env

FILE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  {key}: false
machine_rank: 0
num_machines: 1
num_processes: 2
"""


def reshards(key):
    "What the environment of the ranks says about resharding; None: nothing."
    Path('accelerate.yaml').write_text(FILE.format(key=key))
    arguments = launch_command_parser().parse_args(['--config_file', 'accelerate.yaml', 'train.py'])
    arguments, *_ = _validate_launch_command(arguments)
    return prepare_multi_gpu_env(arguments).get('FSDP_RESHARD_AFTER_FORWARD')


def broken():
    assert reshards('fsdp_reshard_after_foward') != 'false'
    return 'accelerate.yaml'


def mended():
    assert reshards('fsdp_reshard_after_forward') == 'false'
