"""A header of a job script has a variable in it. sbatch reads options before it asks a
controller, so
it needs no cluster; where it is not installed, its words are recorded."""
import os
import shutil
import subprocess
from pathlib import Path

CONFIGURATION = 'ClusterName=none\nSlurmctldHost=localhost\nNodeName=localhost\n'
RECORDED = 'sbatch: error: "$NUM_NODES" is not a valid node count\n'


def submit(nodes):
    "What sbatch says of a script."
    Path('slurm.conf').write_text(CONFIGURATION)
    Path('job.sh').write_text(f'#!/bin/bash\n#SBATCH --nodes={nodes}\nhostname\n')
    environment = os.environ | {'SLURM_CONF': str(Path('slurm.conf').absolute())}
    command = ['timeout', '3', 'sbatch', 'job.sh']
    return subprocess.run(command, env=environment, capture_output=True, text=True).stderr


def broken():
    return submit('$NUM_NODES') if shutil.which('sbatch') else RECORDED


def mended():
    if shutil.which('sbatch'): assert 'node count' not in submit('2')
