"""The local backend: agents as processes on this machine."""

from __future__ import annotations

import os
import socket

from synergy_core.errors import InputError
from synergy_exec.agent.cores import divide, near_gpus, own_cores
from synergy_exec.agent.gpus import Gpu, gpus_here, seen_by, type_of_node
from synergy_exec.backends import Meeting, _agents
from synergy_exec.backends._agents import AgentPlace
from synergy_exec.worker.start import see_only


def backend(nodes: int = 1, slots: int | None = None) -> Local:
    """This machine as one node or several.

    nodes: number of equal parts. slots: number in each node; by default all its GPUs, or all its CPU cores if it has
    no GPUs.
    """
    if nodes < 1 or (slots is not None and slots < 1):
        raise InputError(f"backend local: nodes={nodes} slots={slots}; write numbers from 1.")
    return Local(nodes, slots, gpus_here(), own_cores())


class Local(_agents.Processes):
    """Agents as children of this process; each saves its runs and exits when this process ends, however it ends."""

    def __init__(self, nodes: int, slots: int | None, gpus: list[Gpu], cores: list[int]) -> None:
        each_has = slots or max(1, len(gpus or cores) // nodes)
        self._gpus = [range(node * each_has, (node + 1) * each_has) for node in range(nodes)]
        self._environment = seen_by(gpus)
        near = near_gpus(cores, [each.numa for each in gpus[: nodes * each_has]]) if gpus else cores
        self._cores = [each.cores for each in divide(near, nodes, gpus=False)]
        types = [type_of_node(gpus, own) if gpus else "cpu" for own in self._gpus]
        super().__init__([AgentPlace(socket.gethostname(), each_has, gpu_type) for gpu_type in types])

    async def start(self, node: int, meeting: Meeting) -> None:
        """Starts the agent of a node. Its log is `agent-<node>.txt` in the run's folder."""
        environment, place = _agents.environment(meeting.token), self.places[node]
        if place.gpu_type != "cpu":
            environment |= see_only(self._gpus[node], os.environ | self._environment)
        cores = f"--cores={','.join(map(str, self._cores[node]))}"
        command = [*_agents.command(node, place, meeting.url), f"--parent={os.getpid()}", cores]
        await self.run(node, meeting, command, environment)
