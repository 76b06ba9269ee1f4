"""The local backend: agents as processes on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from synergy_core.errors import InputError
from synergy_exec.agent.cores import divide, own_cores
from synergy_exec.backends import Meeting, _agents
from synergy_exec.worker.start import see_only

_ASK_FOR_GPUS = (
    "import torch; print(*(torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())), sep='\\n')"
)

_DRIVERS: dict[str, Callable[[], bool]] = {
    "nvidia-smi": lambda: shutil.which("nvidia-smi") is not None,
    "/dev/kfd, the driver of AMD's GPUs,": lambda: Path("/dev/kfd").exists(),
}
"""Signs that there may be GPUs, and how to check for them. With ROCm torch shows AMD's GPUs as CUDA devices."""


def backend(nodes: int = 1, slots: int | None = None) -> Local:
    """This machine as one node or several.

    nodes: number of equal parts. slots: of each node; by default all its GPUs, or its CPU cores if it has none.
    """
    if nodes < 1 or (slots is not None and slots < 1):
        raise InputError(f"backend local: nodes={nodes} slots={slots}; write numbers from 1.")
    return Local(nodes, slots, gpu_names(), own_cores())


def gpu_names() -> list[str]:
    """Names of the GPUs that torch can use here. It asks torch in another process, so that this one need not import it.

    If there are GPU drivers but torch can use no GPU, it says so.
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


class Local:
    """Agents as children of this process; each saves its runs and exits when this process ends, however it ends."""

    def __init__(self, nodes: int, slots: int | None, gpus: list[str], cores: list[int]) -> None:
        if gpus and len(gpus) < nodes * (slots or 1):
            raise InputError(f"backend local: {len(gpus)} GPUs cannot be {nodes} nodes of {slots or 1}; take fewer.")
        self.nodes = nodes
        self._gpus, self._cores = gpus, [each.cores for each in divide(cores, nodes, gpus=False)]
        self._slots = slots or (len(gpus) // nodes if gpus else len(self._cores[0]))
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: dict[int, Path] = {}

    async def start(self, node: int, meeting: Meeting) -> None:
        """Starts the agent of a node. Its log is `agent-<node>.txt` in the folder."""
        if (old := self._agents.get(node)) is not None and old.poll() is None:
            # The connection to the old one is lost. Kill it: there must not be two agents for the same slots.
            await asyncio.to_thread(_end, old)
        log = self._logs[node] = _agents.log_of(node, meeting)
        environment = _agents.environment(meeting.token_file.read_text(encoding="utf-8").strip())
        gpu_type = "cpu"
        if self._gpus:
            first = node * self._slots
            gpu_type = self._gpus[first].lower().removeprefix("nvidia ").replace(" ", "-")
            environment |= see_only(range(first, first + self._slots), os.environ)
        place = _agents.AgentPlace(socket.gethostname(), self._slots, gpu_type)
        cores = f"--cores={','.join(map(str, self._cores[node]))}"
        command = [*_agents.command(node, place, meeting.url), f"--parent={os.getpid()}", cores]
        with log.open("ab") as output:
            self._agents[node] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for the controller, which then tells the agents.
                start_new_session=True,
            )

    def lost(self) -> dict[int, str]:
        """Agents that have exited, with the ends of their logs."""
        return {
            node: _agents.farewell(agent.returncode, self._logs[node])
            for node, agent in self._agents.items()
            if agent.poll() is not None
        }

    async def stop(self) -> None:
        """SIGTERM, with time to save, then SIGKILL."""
        await asyncio.gather(*(asyncio.to_thread(_end, agent) for agent in self._agents.values()))
        self._agents.clear()


def _end(agent: subprocess.Popen[bytes]) -> None:
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
    try:
        agent.wait(_agents.LEAVING_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
