"""A real Slurm on this machine, of nodes that are all this machine: started by a test and ended by it."""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

CONFIG = """\
ClusterName=course
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=5
{nodes}
PartitionName=course Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=FORCE
"""


@contextmanager
def slurm_cluster(nodes: int = 2) -> Iterator[dict[str, str]]:
    """Start a cluster of this many nodes, as root; gives the environment in which Slurm's commands speak to it."""
    # Not below pytest's folder: the path of a socket may have 107 characters, and the daemons want to be let through.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as place, ExitStack() as daemons:
        folder = Path(place)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        ports = free_ports(nodes + 1)
        lines = []
        for number, port in enumerate(ports[1:], start=1):
            (folder / f"node{number}").mkdir()
            lines.append(
                f"NodeName=node{number} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=1"
            )
        config = CONFIG.format(
            host=socket.gethostname(), control=ports[0], user="root", folder=folder, nodes="\n".join(lines)
        )
        (folder / "slurm.conf").write_text(config)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

        def start(*command: str) -> None:
            log = daemons.enter_context(open(folder / f"{Path(command[0]).name}.out", "ab"))
            # It ends with the test, also with one that is killed.
            child = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", *command],
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            daemons.callback(stop, child)

        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "key-file": "key"}
        places = [f"--{option}={folder}/munge.{ending}" for option, ending in files.items()]
        start("munged", "--foreground", "--force", *places)
        wait_for(lambda: (folder / "munge.socket").exists(), folder)
        start("slurmctld", "-D")
        for number in range(1, nodes + 1):
            start("slurmd", "-D", "-N", f"node{number}")
        wait_for(lambda: idle_nodes(environment) == nodes, folder)
        yield environment


def idle_nodes(environment: dict[str, str]) -> int:
    found = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%t"], env=environment, capture_output=True, text=True, timeout=30
    )
    return found.stdout.split().count("idle")


def run_job(script: Path, environment: dict[str, str], timeout: float = 400.0) -> tuple[str, str]:
    """Submit a script from its folder and wait for its end; returns its state and its log."""
    command = ["sbatch", "--parsable", script.name]
    sent = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=30)
    assert sent.returncode == 0, sent.stderr
    job, end = sent.stdout.strip(), time.monotonic() + timeout
    while time.monotonic() < end:
        shown = subprocess.run(
            ["scontrol", "-o", "show", "job", job], env=environment, capture_output=True, text=True, timeout=30
        )
        fields = dict(part.split("=", 1) for part in shown.stdout.split() if "=" in part)
        if fields.get("JobState") not in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING"):
            break
        time.sleep(0.3)
    return fields["JobState"], Path(fields["StdOut"]).read_text()


def wait_for(holds, folder: Path, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            logs = "\n".join(
                f"{path.name}: {path.read_text(errors='replace')[-800:]}"
                for path in (*folder.glob("*.log"), *folder.glob("*.out"))
            )
            raise AssertionError(f"Slurm did not start:\n{logs}")
        time.sleep(0.1)


def stop(child: subprocess.Popen) -> None:
    child.terminate()
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]
