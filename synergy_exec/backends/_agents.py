"""Code that backends share: starts and ends agents as processes, and checks that nodes can reach the controller."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import synergy_exec
from synergy_core.errors import InputError
from synergy_exec.agent.__main__ import TOKEN
from synergy_exec.agent.forkserver import JOBS_PATH
from synergy_exec.backends import Meeting

LEAVING_S = 25.0
"""Time for an agent to exit after the controller has waited for its runs."""
_LOG_LINES = 5


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """An agent's node. host: the backend's name of it. slots: their number. gpu_type: `cpu` if slots are CPU cores."""

    host: str
    slots: int
    gpu_type: str


def command(node: int, place: AgentPlace, url: str) -> list[str]:
    """The command line that starts a node's agent with this Python."""
    return [
        sys.executable,
        "-m",
        "synergy_exec.agent",
        f"--url={url}",
        f"--node={node}",
        f"--slots={place.slots}",
        f"--gpu-type={place.gpu_type}",
    ]


def environment(token: str) -> dict[str, str]:
    """This process's environment with the token, and with the folder of this synergy_exec first on Python's path.

    The path of commands is that of this process. Where synergy_exec is not installed but was started in its folder,
    that folder comes last on it, because scripts may import `synergy_exec.reporting`.
    """
    package = str(Path(synergy_exec.__file__).parents[1])
    own = [*filter(None, [os.environ.get("PYTHONPATH")])]
    of_jobs = own if package in sys.path[1:] else [*own, package]
    paths = {"PYTHONPATH": os.pathsep.join([package, *own]), JOBS_PATH: os.pathsep.join(of_jobs)}
    return os.environ | paths | {TOKEN: token}


def log_of(node: int, meeting: Meeting) -> Path:
    """The absolute path of the log of a node's agent."""
    return meeting.folder.resolve() / f"agent-{node}.txt"


def started(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts an agent whose output goes to that log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal is for the controller, which then tells the agents.
            start_new_session=True,
        )


def end(agent: subprocess.Popen[bytes], *, wait_s: float = 0.0, save_s: float = LEAVING_S) -> None:
    """Waits for an agent to exit; sends SIGTERM after wait_s, and SIGKILL after another save_s. Then kills the rest of
    its process group, because a forkserver that was stopped while it started does not notice that the agent is gone.
    """
    for patience_s, then in ((wait_s, signal.SIGTERM), (save_s, signal.SIGKILL)):
        try:
            agent.wait(patience_s)
        except subprocess.TimeoutExpired:
            agent.send_signal(then)
    agent.wait()
    with suppress(ProcessLookupError):
        os.killpg(agent.pid, signal.SIGKILL)


def farewell(code: int, log: Path) -> str:
    """Why an agent exited, from its exit code and the end of its log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-_LOG_LINES:]
    except OSError as error:
        lines = [f"(it cannot be read: {error.strerror})"]
    return f"agent left with exit code {code}; {log} ends in:\n" + "\n".join(lines)


class Processes:
    """One child process for each node: the node's agent, or the srun that runs it.

    places: one for each node. wait_s, save_s: see `end`.
    """

    def __init__(self, places: Sequence[AgentPlace], *, wait_s: float = 0.0, save_s: float = LEAVING_S) -> None:
        self.places, self.nodes = places, len(places)
        self._end = partial(end, wait_s=wait_s, save_s=save_s)
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: dict[int, Path] = {}

    async def run(self, node: int, meeting: Meeting, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the agent of a node. First ends a lost earlier agent, because two would use the same slots."""
        if (old := self._agents.get(node)) is not None:
            await asyncio.to_thread(self._end, old)
        self._logs[node] = log_of(node, meeting)
        self._agents[node] = started(command, environment, self._logs[node])

    def lost(self) -> dict[int, str]:
        """Nodes whose agent has exited, with the ends of their logs."""
        return {
            node: f"{self.places[node].host}: {farewell(agent.returncode, self._logs[node])}"
            for node, agent in self._agents.items()
            if agent.poll() is not None
        }

    async def stop(self) -> None:
        """Waits until every agent has saved and exited; ends those that do not."""
        await asyncio.gather(*(asyncio.to_thread(self._end, agent) for agent in self._agents.values()))
        self._agents.clear()


def require_reachable(url: str, hosts: Collection[str], here: Collection[str]) -> None:
    """Raises InputError if agents on other hosts would look for the controller on their own host.

    hosts: names or addresses of the nodes. here: names and addresses of this host.
    """
    others = sorted(set(hosts) - set(here))
    name = urlsplit(url).hostname or ""
    if others and _is_own(name):
        raise InputError(
            f"the controller listens on {name}, which {others[0]} cannot reach. "
            "Start it with host=ADDRESS, an address of this machine that all nodes reach."
        )


def _is_own(name: str) -> bool:
    """Whether the name means the host on which it is used, like localhost."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(name or None, 0)}
    except OSError:
        # This host does not know the name. If the agents do not know it either, their logs say so.
        return False
    addresses = [ipaddress.ip_address(each.partition("%")[0]) for each in found]
    return any(each.is_loopback or each.is_unspecified for each in addresses)
