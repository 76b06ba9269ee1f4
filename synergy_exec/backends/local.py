"""The local backend: agents as processes on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from synergy_core.errors import InputError
from synergy_exec.agent.cores import divide, own_cores
from synergy_exec.backends import Meeting, _agents
from synergy_exec.backends._agents import AgentPlace
from synergy_exec.worker.start import see_only

_ASK_FOR_GPUS = (
    "import torch; print(*(torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())), sep='\\n')"
)

_DRIVERS: dict[str, Callable[[], bool]] = {
    "nvidia-smi": lambda: shutil.which("nvidia-smi") is not None,
    "/proc/driver/nvidia": lambda: Path("/proc/driver/nvidia").exists(),
    "/dev/kfd, the driver of AMD's GPUs,": lambda: Path("/dev/kfd").exists(),
}
"""Signs that there may be GPUs, and how to check for them. With ROCm torch shows AMD's GPUs as CUDA devices."""


def backend(nodes: int = 1, slots: int | None = None) -> Local:
    """This machine as one node or several.

    nodes: number of equal parts. slots: number in each node; by default all its GPUs, or all its CPU cores if it has
    no GPUs.
    """
    if nodes < 1 or (slots is not None and slots < 1):
        raise InputError(f"backend local: nodes={nodes} slots={slots}; write numbers from 1.")
    return Local(nodes, slots, gpu_names(), own_cores())


def gpu_names() -> list[str]:
    """Names of the GPUs that torch can use here. Another process imports torch, so that this one need not do so.
    Prints a message if there are GPU drivers but torch can use no GPU.
    """
    driver = next((name for name, there in _DRIVERS.items() if there()), "")
    if not driver:
        return []
    asked = subprocess.run([sys.executable, "-c", _ASK_FOR_GPUS], capture_output=True, text=True, timeout=120)
    if asked.returncode:
        raise InputError(f"torch cannot say which GPUs are here:\n{asked.stderr[-1000:]}")
    names = asked.stdout.split("\n")[:-1] if asked.stdout.strip() else []
    if not names:
        print(f"{driver} is here, but this torch can use no GPU: slots are CPU cores.", file=sys.stderr, flush=True)
    return names


class Local(_agents.Processes):
    """Agents as children of this process; each saves its runs and exits when this process ends, however it ends."""

    def __init__(self, nodes: int, slots: int | None, gpus: list[str], cores: list[int]) -> None:
        if gpus and len(gpus) < nodes * (slots or 1):
            raise InputError(f"backend local: {len(gpus)} GPUs cannot be {nodes} nodes of {slots or 1}; take fewer.")
        self._cores = [each.cores for each in divide(cores, nodes, gpus=False)]
        each_has = slots or (len(gpus) // nodes if gpus else len(self._cores[0]))
        types = [each.lower().removeprefix("nvidia ").replace(" ", "-") for each in gpus[::each_has]]
        types = types[:nodes] or ["cpu"] * nodes
        super().__init__([AgentPlace(socket.gethostname(), each_has, gpu_type) for gpu_type in types])

    async def start(self, node: int, meeting: Meeting) -> None:
        """Starts the agent of a node. Its log is `agent-<node>.txt` in the run's folder."""
        environment, place = _agents.environment(meeting.token), self.places[node]
        if place.gpu_type != "cpu":
            environment |= see_only(range(node * place.slots, (node + 1) * place.slots), os.environ)
        cores = f"--cores={','.join(map(str, self._cores[node]))}"
        command = [*_agents.command(node, place, meeting.url), f"--parent={os.getpid()}", cores]
        await self.run(node, meeting, command, environment)
