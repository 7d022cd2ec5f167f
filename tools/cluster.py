"""Run a SLURM cluster of two nodes on this machine.

Usage: cluster.py up | down | status | cut NODE | restore NODE | run COMMAND ...
"""
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

# Only root can read this folder. All files of the cluster are in it.
# The cluster neither reads nor writes the files of a SLURM that is installed on this machine.
HOME = Path('/run/llmw-cluster')
# These addresses exist only in the networks of the cluster, which lead to no other network
HEAD_ADDRESS = '10.83.0.254'
ADDRESSES = {'node1': '10.83.0.1', 'node2': '10.83.0.2'}
NODES = tuple(ADDRESSES)
HOSTS = ('head', *NODES)
PROGRAMS = 'slurmctld', 'slurmd', 'sbatch', 'munged', 'ip', 'nsenter', 'unshare', 'mount'
COMMANDS = 'sbatch', 'srun', 'squeue', 'scontrol', 'scancel', 'sinfo'
INSTALL = 'apt-get install --no-install-recommends slurm-wlm munge iproute2'
ENTER = '''\
#!/bin/sh
# enter NODE COMMAND ...: run a command with the network, the name and the hosts of a node
node=$1; shift
exec nsenter --net=/run/netns/llmw-$node unshare --uts --mount sh -c '
    hostname "$0" &&
    mount --bind {home}/hosts /etc/hosts &&
    SLURM_CONF={home}/slurm.conf exec "$@"
' "$node" "$@"
'''
COMMAND = '''\
#!/bin/sh
# Run {name} on the head of the cluster. A job is in the cluster already and calls it directly.
[ -n "$SLURM_JOB_ID" ] && exec {program} "$@"
exec {home}/enter head {program} "$@"
'''
# A node has four processors, however many this machine has.
# SLURM notices a lost node within seconds; a real site waits for minutes.
CONF = '''\
ClusterName=llmw
SlurmctldHost=head({head_address})
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=30
SlurmdTimeout=15
KillWait=60
MinJobAge=600
SchedulerParameters=requeue_delay=1,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
'''


def obstacle() -> str:
    "Say why this machine cannot run the cluster; return '' where it can."
    if sys.platform != 'linux' or os.geteuid(): return 'a cluster of namespaces needs root on Linux'
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing: return f'{", ".join(missing)} not found: on Debian, {INSTALL}'
    if not os.access(HOME.parent, os.W_OK): return f'{HOME.parent} cannot be written to'
    for device in 'type bridge', 'type veth peer name llmw1':
        error = network_error(device)
        if error: return f'no right to make networks of its own here: {error}'
    return ''


def network_error(device: str) -> str:
    "Try to make a network with one device; return the error, or '' when it works."
    trial = ('mount --bind /etc/hosts /etc/hosts && hostname node1 && '
             f'ip link add llmw0 {device}')
    command = ['unshare', '--net', '--uts', '--mount', 'sh', '-c', trial]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode: return ''
    return done.stderr.strip() or f'exit code {done.returncode}'


def run_command(*words: str | Path) -> None:
    "Run a command to its end; exit with its error when it fails."
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        error = done.stderr.strip() or done.returncode
        sys.exit(f'{" ".join(command)}: {error}')


def run_ip(host: str, *words: str) -> None:
    "Run the command `ip` in the network of a host."
    run_command('ip', '-n', f'llmw-{host}', *words)


def start_daemon(host: str, *words: str | Path) -> None:
    "Start a daemon on a host; it runs on when this program ends."
    command = [str(HOME/'enter'), host, *map(str, words)]
    with open(HOME/'daemons.log', 'a') as log:
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                         start_new_session=True)


def wait_for(condition, seconds: float) -> bool:
    "Call `condition` until it is true or the time is over; return whether it is true."
    end = time.monotonic() + seconds
    while True:
        if condition(): return True
        if time.monotonic() >= end: return False
        time.sleep(0.1)


@contextmanager
def locked():
    "Wait until no other program brings the cluster up or down, and keep others out."
    with open(HOME.with_suffix('.lock'), 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# Bring the cluster up

def write_files() -> None:
    "Write what the daemons read, and the commands for a user of the cluster."
    HOME.mkdir(mode=0o700)
    spools = [f'spool-{node}' for node in NODES]
    for name in ('munge', 'state', 'bin', *spools): (HOME/name).mkdir(mode=0o700)
    write_key(HOME/'munge/key')
    write_settings()
    write_program(HOME/'enter', ENTER.format(home=HOME))
    for name in COMMANDS:
        text = COMMAND.format(name=name, home=HOME, program=shutil.which(name))
        write_program(HOME/'bin'/name, text)


def write_key(path: Path) -> None:
    "Write a new random key that only root can read."
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    os.write(file, os.urandom(128))
    os.close(file)


def write_settings() -> None:
    "Write the names and addresses of the hosts, and the settings of SLURM."
    names = {'127.0.0.1': 'localhost', HEAD_ADDRESS: 'head'}
    names |= {address: node for node, address in ADDRESSES.items()}
    hosts = [f'{address} {name}\n' for address, name in names.items()]
    (HOME/'hosts').write_text(''.join(hosts))
    nodes = [f'NodeName={node} NodeAddr={address} CPUs=4 RealMemory=4000 State=UNKNOWN'
             for node, address in ADDRESSES.items()]
    conf = CONF.format(head_address=HEAD_ADDRESS, home=HOME, nodes='\n'.join(nodes))
    (HOME/'slurm.conf').write_text(conf)
    (HOME/'cgroup.conf').write_text('CgroupPlugin=cgroup/v1\n')


def write_program(path: Path, text: str) -> None:
    "Write a program that only root can run."
    path.write_text(text)
    path.chmod(0o700)


def make_networks() -> None:
    "Make a network for each host, and link the nodes to a bridge in the network of the head."
    for host in HOSTS:
        run_command('ip', 'netns', 'add', f'llmw-{host}')
        run_ip(host, 'link', 'set', 'lo', 'up')
    run_ip('head', 'link', 'add', 'llmw', 'type', 'bridge')
    run_ip('head', 'addr', 'add', f'{HEAD_ADDRESS}/24', 'dev', 'llmw')
    run_ip('head', 'link', 'set', 'llmw', 'up')
    for node, address in ADDRESSES.items():
        network = f'llmw-{node}'
        run_ip('head', 'link', 'add', node, 'type', 'veth', 'peer', 'name', 'eth0',
               'netns', network)
        run_ip('head', 'link', 'set', node, 'master', 'llmw', 'up')
        run_ip(node, 'addr', 'add', f'{address}/24', 'dev', 'eth0')
        run_ip(node, 'link', 'set', 'eth0', 'up')


def start_daemons() -> None:
    "Start munge, the controller and the two nodes; exit when one of them does not start."
    munge = HOME/'munge'
    start_daemon('head', 'munged', '--foreground', '--force', f'--socket={munge}/socket',
                 f'--key-file={munge}/key', f'--pid-file={munge}/pid',
                 f'--log-file={munge}/log', f'--seed-file={munge}/seed')
    if not wait_for((munge/'socket').exists, 10): fail('munged does not start')
    settings = HOME/'slurm.conf'
    start_daemon('head', 'slurmctld', '-D', '-f', settings)
    for node in NODES: start_daemon(node, 'slurmd', '-D', '-N', node, '-f', settings)
    if not wait_for(usable, 30):
        states = nodes() or 'no controller answers'
        fail(f'the nodes do not come up: {states}')


def fail(reason: str) -> None:
    "Print the last lines of every log, remove the cluster, and exit with the reason."
    for path in sorted(HOME.glob('*.log')):
        last_lines = path.read_text().splitlines()[-8:]
        print(f'{path.name}:', *last_lines, sep='\n  ', file=sys.stderr)
    remove()
    sys.exit(reason)


def nodes() -> str:
    "Give the states of the nodes, as in `node1 idle, node2 idle`; '' when no controller answers."
    sinfo = HOME/'bin/sinfo'
    if not sinfo.exists(): return ''
    command = [sinfo, '-hN', '-p', 'main', '-o', '%N %T']
    try: done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired: return ''
    return ', '.join(done.stdout.splitlines())


def usable() -> bool:
    "Say whether both nodes accept jobs or run jobs."
    wanted = [f'{node} (idle|mixed|allocated|completing)' for node in NODES]
    return re.fullmatch(', '.join(wanted), nodes()) is not None


# Take the cluster down

def network_files() -> dict[str, Path]:
    "Map each network of the cluster that exists to its file."
    files = {f'llmw-{host}': Path(f'/run/netns/llmw-{host}') for host in HOSTS}
    return {name: file for name, file in files.items() if file.exists()}


def inside() -> list[int]:
    "List the processes in the networks of the cluster, daemons and jobs, but not this process."
    networks = {file.stat().st_ino for file in network_files().values()}
    pids = []
    for folder in Path('/proc').glob('[0-9]*'):
        try: network = (folder/'ns/net').stat().st_ino
        except OSError: continue  # The process has ended, or is about to end
        if network in networks: pids.append(int(folder.name))
    return [pid for pid in pids if pid != os.getpid()]


def kill_inside() -> bool:
    "Kill every process in the networks of the cluster; return whether there was none."
    pids = inside()
    for pid in pids: os.kill(pid, signal.SIGKILL)
    return not pids


def remove() -> None:
    "Remove the jobs, daemons, networks and files of the cluster, as far as they exist."
    if not wait_for(kill_inside, 10): sys.exit(f'processes {inside()} do not end')
    for name in network_files(): run_command('ip', 'netns', 'del', name)
    shutil.rmtree(HOME, ignore_errors=True)


# The command line

def up() -> None:
    "Bring the cluster up, unless it is up already."
    reason = obstacle()
    if reason: sys.exit(reason)
    with locked():
        if not usable():
            remove()
            write_files()
            make_networks()
            start_daemons()
    print(f'{nodes()}. For SLURM\'s commands in a shell or a kernel: PATH={HOME}/bin:$PATH')


def down() -> None:
    "Take the cluster down."
    if os.geteuid(): sys.exit(obstacle())
    with locked(): remove()


def link(node: str, state: str) -> None:
    "Set the network link of a node to `down` or `up`."
    if node not in NODES: sys.exit(f'no node {node!r}: {", ".join(NODES)}')
    run_ip(node, 'link', 'set', 'eth0', state)


def cut(node: str) -> None:
    "Take the network link of a node away."
    link(node, 'down')


def restore(node: str) -> None:
    "Give a node its network link back."
    link(node, 'up')


def print_status() -> None:
    "Print the states of the nodes."
    print(nodes() or 'no cluster is up')


def run_on_head(words: tuple[str, ...]) -> None:
    "Replace this program by a command on the head of the cluster."
    if not nodes(): sys.exit('no cluster is up: make cluster-up')
    enter = HOME/'enter'
    os.execv(enter, [str(enter), 'head', *words])


# Command word and number of further words -> function
ACTIONS = {('up', 0): up, ('down', 0): down, ('status', 0): print_status,
           ('cut', 1): cut, ('restore', 1): restore}


def main(verb: str = '', *words: str) -> None:
    "Do what the command line asks for."
    action = ACTIONS.get((verb, len(words)))
    if verb == 'run' and words: run_on_head(words)
    elif action: action(*words)
    else: sys.exit(__doc__.strip())


if __name__ == '__main__': main(*sys.argv[1:])
