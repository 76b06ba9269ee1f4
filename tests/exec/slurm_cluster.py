"""Slurm itself for tests: its controller and two nodes on this machine, from what Debian's packages install."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
READY_S = 60.0
CONFIGURATION = """ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> list[str]:
    """The programs that are not installed here."""
    paths = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [each for each in NEEDED if shutil.which(each, path=paths) is None]


@contextlib.contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands speak to it: nodes n1 and n2 of one CPU each, both this machine."""
    with contextlib.ExitStack() as ends:
        # Not pytest's own: names of sockets have at most 107 characters, and munge wants a folder that all may enter.
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        folder.chmod(0o755)
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        environment = os.environ | {"PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        text = CONFIGURATION.format(folder=folder, user=getpass.getuser(), host=socket.gethostname(), ports=_ports(3))
        (folder / "slurm.conf").write_text(text)
        for each in ("state", "spool-n1", "spool-n2"):
            (folder / each).mkdir()
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        munge = ["munged", "--foreground", f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
        munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            ends.enter_context(_daemon(command, environment, folder))
            until_s = time.monotonic() + READY_S
            while command is munge and not (folder / "munge.socket").exists():
                assert time.monotonic() < until_s, (folder / "munged.txt").read_text()
                time.sleep(0.05)
        while asked(environment, "sinfo", "--noheader", "--format=%T %D") != "idle 2":
            assert time.monotonic() < until_s, "\n".join(each.read_text()[-1000:] for each in folder.glob("*.log"))
            time.sleep(0.2)
        yield environment


def asked(environment: dict[str, str], *command: str) -> str:
    """What a command of Slurm's says; "" where its controller does not answer."""
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=READY_S)
    return answer.stdout.strip()


@contextlib.contextmanager
def _daemon(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    with (folder / f"{command[0]}.txt").open("ab") as output:
        daemon = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _ports(number: int) -> list[int]:
    """Ports that are free now."""
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in taken]
