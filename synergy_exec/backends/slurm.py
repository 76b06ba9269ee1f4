"""The Slurm backend: a job step per node of an allocation runs the node's agent."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from synergy_core.errors import InputError
from synergy_exec.agent.gpus import UNTYPED
from synergy_exec.backends import _agents
from synergy_exec.backends._agents import AgentPlace

if TYPE_CHECKING:
    from synergy_exec.backends import Meeting

_KILLING_S = 10.0
_ASKING_S = 30.0
_JOBS_OWN = re.compile(r"S(LURM|RUN)_(N?TASKS.*|NPROCS|GPUS?(_.*)?|GRES.*|CPUS_PER_.*|MEM_PER_.*|TRES_.*|DISTRIBUTION)")
"""Environment variables of the whole allocation, which srun would use as options of a step on one node."""
_GPUS_OF_NODES = re.compile(r"^\s*Nodes=(\S+)\s.*?\bGRES=(\S*)", re.MULTILINE)
_GPUS = re.compile(r"gpu(?::(?:\(null\)|([^:(,]+)))?:([1-9]\d*)(?:\(|,|$)")


def backend(slots: int | None = None, gpu_type: str | None = None) -> SlurmNodes:
    """The nodes of the allocation that this process runs in.

    slots: number in each node, at most what is allocated; by default all allocated GPUs, or CPUs if no GPUs are
    allocated. gpu_type: type of the GPUs; by default Slurm's name for it. Raises InputError.
    """
    if slots is not None and slots < 1:
        raise InputError(f"backend slurm: slots={slots}; write a number from 1.")
    job = os.environ.get("SLURM_JOB_ID")
    names = os.environ.get("SLURM_JOB_NODELIST")
    if not job or not names:
        raise InputError(
            "backend slurm: this is no Slurm allocation (SLURM_JOB_ID is not set). Type "
            "`salloc --nodes=2 --ntasks-per-node=1 --gpus-per-node=4` first, or submit a script with sbatch; "
            "docs/backends.md has one."
        )
    hosts = _scontrol("show", "hostnames", names).split()
    if (said := os.environ.get("SLURM_JOB_NUM_NODES")) and int(said) != len(hosts):
        raise InputError(f"SLURM_JOB_NUM_NODES={said}, but {names} are {len(hosts)} nodes; run in the job's own shell.")
    gpus = gpus_of(_scontrol("show", "job", "--details", job))
    if gpus:
        found = [_gpus_on(host, gpus, gpu_type) for host in hosts]
    elif any(os.environ.get(name) for name in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")):
        raise InputError(
            f"job {job} has GPUs, but `scontrol show job --details {job}` does not say how many on which node; "
            "it is expected to have lines such as `Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:a100:4(IDX:0-3)`."
        )
    else:
        counts = _cpus(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""), len(hosts))
        found = [AgentPlace(host, cpus, "cpu") for host, cpus in zip(hosts, counts, strict=True)]
    return SlurmNodes([_with_slots(place, slots) for place in found])


def gpus_of(details: str) -> dict[str, tuple[str, int]]:
    """Type and number of GPUs by node, from `scontrol show job --details`. Raises InputError."""
    found = {}
    for names, resources in _GPUS_OF_NODES.findall(details):
        pairs = _GPUS.findall(resources)
        if len({gpu_type for gpu_type, _ in pairs}) > 1:
            raise InputError(f"{names}: GPUs of several types ({resources}); ask for one with --gpus-per-node=TYPE:N.")
        if pairs:
            for host in _scontrol("show", "hostnames", names).split():
                found[host] = pairs[0][0] or UNTYPED, sum(int(number) for _, number in pairs)
    return found


def _gpus_on(host: str, gpus: Mapping[str, tuple[str, int]], gpu_type: str | None) -> AgentPlace:
    if host not in gpus:
        raise InputError(
            f"{host} has no GPU in this allocation, other nodes have; ask for them with --gpus-per-node=N."
        )
    named, number = gpus[host]
    return AgentPlace(host, number, gpu_type or named)


def _with_slots(place: AgentPlace, slots: int | None) -> AgentPlace:
    if slots is not None and slots > place.slots:
        units = "CPUs" if place.gpu_type == "cpu" else "GPUs"
        raise InputError(
            f"backend slurm: slots={slots}, but {place.host} has {place.slots} {units} in this allocation."
        )
    return AgentPlace(place.host, slots or place.slots, place.gpu_type)


def _cpus(said: str, nodes: int) -> list[int]:
    """CPUs of each node from SLURM_JOB_CPUS_PER_NODE: `16(x2),8` means 16, 16 and 8."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in said.split(",")]
    counts = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    if None in parts or len(counts) != nodes:
        raise InputError(f"SLURM_JOB_CPUS_PER_NODE={said!r} does not say what {nodes} nodes have, such as 16(x2),8.")
    return counts


def _scontrol(*arguments: str) -> str:
    try:
        asked = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=_ASKING_S)
    except FileNotFoundError:
        raise InputError("backend slurm: there is no scontrol on the PATH; is Slurm installed here?") from None
    except subprocess.TimeoutExpired:
        raise InputError(f"`scontrol {shlex.join(arguments)}` took longer than {_ASKING_S:g} s") from None
    if asked.returncode:
        raise InputError(f"`scontrol {shlex.join(arguments)}` failed: {asked.stderr.strip()}")
    return asked.stdout


class SlurmNodes(_agents.Processes):
    """One job step per node, so that a lost step does not affect others and can be started again."""

    def __init__(self, places: list[AgentPlace]) -> None:
        # Agents exit by themselves when the controller is gone; at SIGTERM Slurm would kill a step while it saves.
        super().__init__(places, wait_s=_agents.LEAVING_S, save_s=_KILLING_S)

    async def start(self, node: int, meeting: Meeting) -> None:
        """Starts the agent of a node. Its log, with srun's messages, is `agent-<node>.txt` in the run's folder."""
        _agents.require_reachable(meeting.url, [place.host for place in self.places], _here())
        environment = _agents.environment(meeting.token)
        environment = {name: value for name, value in environment.items() if not _JOBS_OWN.fullmatch(name)}
        command = [*_srun(self.places[node]), *_agents.command(node, self.places[node], meeting.url)]
        try:
            await self.run(node, meeting, command, environment)
        except FileNotFoundError:
            raise InputError("backend slurm: there is no srun on the PATH; is Slurm installed here?") from None


def _srun(place: AgentPlace) -> Iterator[str]:
    """The srun command of a step. It does not contain the token, because other users can read command lines."""
    yield from ("srun", "--nodes=1", "--ntasks=1", f"--nodelist={place.host}", "--export=ALL")
    # The lost step of the same node may still hold its resources in Slurm.
    yield from ("--overlap", "--kill-on-bad-exit=0", "--mem=0", "--cpu-bind=none")
    if place.gpu_type != "cpu":
        yield f"--gpus-per-node={place.slots}"


def _here() -> set[str]:
    return {name for name in (os.environ.get("SLURMD_NODENAME"), socket.gethostname()) if name}
