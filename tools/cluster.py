"""A SLURM cluster of two nodes on this machine: `cluster.py up | down | status | cut NODE | mend NODE | run COMMAND ...`."""
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

HOME = Path('/run/llmw-cluster')  # Root's alone; all that the cluster writes, and nothing of a SLURM that is installed here
NODES, NET = ('node1', 'node2'), '10.83.0'  # An address inside namespaces that lead nowhere else
PROGRAMS = 'slurmctld', 'slurmd', 'sbatch', 'munged', 'ip', 'nsenter', 'unshare', 'mount'
COMMANDS = 'sbatch', 'srun', 'squeue', 'scontrol', 'scancel', 'sinfo'
ENTER = '''\
#!/bin/sh
# enter NODE COMMAND ...: run a command with the network, the name and the hosts of a node
node=$1; shift
exec nsenter --net=/run/netns/llmw-$node unshare --uts --mount sh -c '
    hostname "$0" && mount --bind {home}/hosts /etc/hosts && SLURM_CONF={home}/slurm.conf exec "$@"' "$node" "$@"
'''
COMMAND = '''\
#!/bin/sh
# {name} of the cluster, from anywhere on this machine; a job is there already
[ -n "$SLURM_JOB_ID" ] && exec {program} "$@"
exec {home}/enter head {program} "$@"
'''
# Nodes of four processors whatever this machine has; a lost node is noticed within seconds, where a site waits minutes
CONF = '''\
ClusterName=llmw
SlurmctldHost=head({net}.254)
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
    "Say why there can be no cluster here, or nothing."
    if sys.platform != 'linux' or os.geteuid(): return 'a cluster of namespaces needs root on Linux'
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        return f'{", ".join(missing)} not found: on Debian, apt-get install --no-install-recommends slurm-wlm munge iproute2'
    if not os.access(HOME.parent, os.W_OK): return f'{HOME.parent} cannot be written to'
    for what in 'type bridge', 'type veth peer name llmw1':
        trial = f'mount --bind /etc/hosts /etc/hosts && hostname node1 && ip link add llmw0 {what}'
        done = subprocess.run(['unshare', '--net', '--uts', '--mount', 'sh', '-c', trial], capture_output=True, text=True)
        if done.returncode: return f'no right to make networks of its own here: {done.stderr.strip()}'
    return ''


def sh(*words: str | Path) -> str:
    "Run a command to its end and give back what it prints; an error shows what it said."
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode: sys.exit(f'{" ".join(map(str, words))}: {done.stderr.strip() or done.returncode}')
    return done.stdout


def ip(node: str, *words: str) -> None:
    "Run `ip` in the network of a node."
    sh('ip', '-n', f'llmw-{node}', *words)


def start(node: str, *words: str | Path) -> None:
    "Start a daemon on a node; it outlives this program."
    with open(HOME/'daemons.log', 'a') as log:
        subprocess.Popen([*map(str, (HOME/'enter', node, *words))], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                         start_new_session=True)


def wait_for(condition, seconds: float) -> bool:
    "Look until `condition()` holds, at most so long."
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end: time.sleep(0.1)
    return bool(found)


@contextmanager
def alone():
    "Let no two programs bring the cluster up or down at once."
    with open(HOME.with_suffix('.lock'), 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write() -> None:
    "Write what the daemons read: key, addresses, settings, and the commands for those outside."
    HOME.mkdir(mode=0o700)
    for name in 'munge', 'state', 'bin', *(f'spool-{node}' for node in NODES): (HOME/name).mkdir(mode=0o700)
    key = os.open(HOME/'munge/key', os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    os.write(key, os.urandom(128)), os.close(key)
    hosts = {'127.0.0.1': 'localhost', f'{NET}.254': 'head'} | {f'{NET}.{i}': node for i, node in enumerate(NODES, 1)}
    (HOME/'hosts').write_text(''.join(f'{address} {name}\n' for address, name in hosts.items()))
    rows = '\n'.join(f'NodeName={n} NodeAddr={NET}.{i} CPUs=4 RealMemory=4000 State=UNKNOWN' for i, n in enumerate(NODES, 1))
    (HOME/'slurm.conf').write_text(CONF.format(net=NET, home=HOME, nodes=rows))
    (HOME/'cgroup.conf').write_text('CgroupPlugin=cgroup/v1\n')
    programs = {HOME/'enter': ENTER.format(home=HOME)}
    for name in COMMANDS: programs[HOME/'bin'/name] = COMMAND.format(name=name, home=HOME, program=shutil.which(name))
    for path, text in programs.items(): path.write_text(text), path.chmod(0o700)


def wire() -> None:
    "Make three networks and join them: a bridge in the head's, and a pair of links to each node."
    for node in ('head', *NODES):
        sh('ip', 'netns', 'add', f'llmw-{node}')
        ip(node, 'link', 'set', 'lo', 'up')
    ip('head', 'link', 'add', 'llmw', 'type', 'bridge')
    ip('head', 'addr', 'add', f'{NET}.254/24', 'dev', 'llmw')
    ip('head', 'link', 'set', 'llmw', 'up')
    for i, node in enumerate(NODES, 1):
        ip('head', 'link', 'add', node, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', f'llmw-{node}')
        ip('head', 'link', 'set', node, 'master', 'llmw', 'up')
        ip(node, 'addr', 'add', f'{NET}.{i}/24', 'dev', 'eth0')
        ip(node, 'link', 'set', 'eth0', 'up')


def nodes() -> str:
    "Say how the nodes are, as in `node1 idle, node2 idle`; nothing while no controller answers."
    if not (HOME/'bin/sinfo').exists(): return ''
    try: done = subprocess.run([HOME/'bin/sinfo', '-hN', '-p', 'main', '-o', '%N %T'], capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired: return ''
    return ', '.join(done.stdout.splitlines())


def usable() -> bool:
    "Say whether both nodes take jobs, or run some."
    return re.fullmatch(', '.join(f'{node} (idle|mixed|allocated|completing)' for node in NODES), nodes()) is not None


def up() -> None:
    "Bring the cluster up, unless it is."
    if why := obstacle(): sys.exit(why)
    with alone():
        if not usable():
            clear()
            write(), wire()
            m = HOME/'munge'
            start('head', 'munged', '--foreground', '--force', f'--socket={m}/socket', f'--key-file={m}/key',
                  f'--pid-file={m}/pid', f'--log-file={m}/log', f'--seed-file={m}/seed')
            if not wait_for((m/'socket').exists, 10): fail('munged does not start')
            start('head', 'slurmctld', '-D', '-f', HOME/'slurm.conf')
            for node in NODES: start(node, 'slurmd', '-D', '-N', node, '-f', HOME/'slurm.conf')
            if not wait_for(usable, 30): fail(f'the nodes do not come up: {nodes() or "no controller answers"}')
    print(f'{nodes()}. For SLURM\'s commands in a shell or a kernel: PATH={HOME}/bin:$PATH')


def fail(why: str) -> None:
    "End with what the daemons said last."
    for path in sorted(HOME.glob('*.log')):
        print(f'{path.name}:', *path.read_text().splitlines()[-8:], sep='\n  ', file=sys.stderr)
    clear()
    sys.exit(why)


def inside() -> list[int]:
    "List the processes that are in the networks of the cluster, daemons and jobs alike; this one never."
    wanted = {path.stat().st_ino for node in ('head', *NODES) if (path := Path('/run/netns')/f'llmw-{node}').exists()}
    found = []
    for path in Path('/proc').glob('[0-9]*'):
        try: found += [int(path.name)] if (path/'ns/net').stat().st_ino in wanted else []
        except OSError: continue  # Gone, or as good as gone
    return [pid for pid in found if pid != os.getpid()]


def clear() -> None:
    "Remove the cluster, or what is left of one: its jobs, daemons, networks and files."
    def killed():
        for pid in (pids := inside()): os.kill(pid, signal.SIGKILL)
        return not pids
    if not wait_for(killed, 10): sys.exit(f'processes {inside()} do not end')
    for node in ('head', *NODES):
        if Path(f'/run/netns/llmw-{node}').exists(): sh('ip', 'netns', 'del', f'llmw-{node}')
    shutil.rmtree(HOME, ignore_errors=True)


def down() -> None:
    "Take the cluster down."
    if os.geteuid(): sys.exit(obstacle())
    with alone(): clear()


def link(node: str, state: str) -> None:
    "Cut a node off, or join it again."
    if node not in NODES: sys.exit(f'no node {node!r}: {", ".join(NODES)}')
    ip(node, 'link', 'set', 'eth0', state)


def main(verb: str = '', *words: str) -> None:
    "Do what the command line says."
    if verb in ('up', 'down') and not words: {'up': up, 'down': down}[verb]()
    elif verb in ('cut', 'mend') and len(words) == 1: link(words[0], {'cut': 'down', 'mend': 'up'}[verb])
    elif verb == 'status' and not words: print(nodes() or 'no cluster is up')
    elif verb == 'run' and words:
        if not nodes(): sys.exit('no cluster is up: make cluster-up')
        os.execv(HOME/'enter', [str(HOME/'enter'), 'head', *words])
    else: sys.exit(__doc__)


if __name__ == '__main__': main(*sys.argv[1:])
