"""The Ray backend: an actor per node runs the node's agent; Ray reserves the nodes and notices their loss."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.errors import InputError
from synergy_exec.agent.gpus import UNTYPED
from synergy_exec.backends import _agents
from synergy_exec.backends._agents import LEAVING_S, AgentPlace

if TYPE_CHECKING:
    from synergy_exec.backends import Meeting

_TYPE = "accelerator_type:"
"""Prefix of Ray's resource for a GPU type. A node has 1 unit of it, so any number of bundles can request a part."""
_A_BIT = 0.001
_ENDING_S = 5.0
_NOTICED_S = 60.0
"""Ray notices within about 15 s that a node is gone."""
_AGAIN_S = 0.5


def backend(
    address: str = "auto", nodes: int | None = None, slots: int | None = None, patience_s: float = 60.0
) -> RayNodes:
    """Connects to Ray and reserves the nodes until `stop`.

    address: the Ray cluster's address; auto for the cluster of this machine. nodes: number of nodes, the largest first;
    by default all. slots: number in each node; by default all its GPUs, or all CPUs if no node has GPUs. patience_s:
    how long to wait for nodes that others hold. Raises InputError.
    """
    if (nodes is not None and nodes < 1) or (slots is not None and slots < 1):
        raise InputError(f"backend ray: nodes={nodes} slots={slots}; write numbers from 1.")
    try:
        import ray
    except ImportError:
        raise InputError("Ray is not installed here: pip install 'synergy-cluster[ray]'") from None
    connected = ray.is_initialized()
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        raise InputError(
            f"no Ray cluster at address={address}: {error} "
            "Start one with `ray start --head`, or say where it is with backend.options.address=HOST:PORT."
        ) from None
    try:
        group, places = _reserve(bundles_of(_there(), nodes, slots), patience_s)
    except BaseException:
        if not connected:
            ray.shutdown()
        raise
    return RayNodes(group, places, disconnect=not connected)


def bundles_of(there: Sequence[Mapping[str, Any]], nodes: int | None, slots: int | None) -> list[dict[str, float]]:
    """The resources to reserve on each node, most slots first. there: Ray's list of nodes. Raises InputError."""
    alive = [each["Resources"] for each in there if each["Alive"]]
    resource = "GPU" if any(resources.get("GPU", 0) >= 1 for resources in alive) else "CPU"
    bundles = []
    for resources in alive:
        most = int(resources.get(resource, 0))
        if most < (slots or 1):
            continue
        bundle = {resource: float(slots or most)}
        if resource == "GPU":
            if cpus := min(bundle["GPU"], int(resources.get("CPU", 0))):
                bundle["CPU"] = float(cpus)
            bundle |= {name: _A_BIT for name in resources if name.startswith(_TYPE)}
        bundles.append(bundle)
    if len(bundles) < (nodes or 1):
        has = ", ".join(str(int(resources.get(resource, 0))) for resources in alive)
        raise InputError(
            f"backend ray: {len(bundles)} nodes have {slots or 1} {resource}s or more, {nodes or 1} are asked for; "
            f"the cluster's nodes have {has or 'nothing'}. Change backend.options.nodes or .slots."
        )
    return sorted(bundles, key=lambda bundle: -bundle[resource])[:nodes]


def _reserve(bundles: list[dict[str, float]], patience_s: float) -> tuple[Any, list[AgentPlace]]:
    """Creates the placement group; returns it and the host of each bundle."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    group = placement_group(bundles, strategy="STRICT_SPREAD")
    if not group.wait(patience_s):
        remove_placement_group(group)
        raise InputError(
            f"Ray did not give {len(bundles)} nodes with {bundles} within {patience_s:g} s; "
            "`ray status` says who holds them. Wait, or ask for less with backend.options.nodes and .slots."
        )
    hosts = {each["NodeID"]: each["NodeManagerAddress"] for each in _there()}
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return group, [_place(bundle, hosts[nodes[number]]) for number, bundle in enumerate(bundles)]


def _there() -> list[dict[str, Any]]:
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _here() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _place(bundle: Mapping[str, float], host: str) -> AgentPlace:
    if "GPU" not in bundle:
        return AgentPlace(host, int(bundle["CPU"]), "cpu")
    types = [name.removeprefix(_TYPE).lower() for name in bundle if name.startswith(_TYPE)]
    return AgentPlace(host, int(bundle["GPU"]), types[0] if types else UNTYPED)


class RayNodes:
    """Nodes of a placement group; bundle n is on node n. places: hosts and slots when the nodes were reserved."""

    def __init__(self, group: Any, places: list[AgentPlace], *, disconnect: bool) -> None:
        self.places, self.nodes = places, len(places)
        self._group, self._disconnect = group, disconnect
        self._actors: dict[int, Any] = {}
        self._ready: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}

    async def start(self, node: int, meeting: Meeting) -> None:
        """Starts a node's agent. If an earlier one was lost, waits until the new actor lives, on any Ray node."""
        import ray

        hosts = [place.host for place in self.places]
        _agents.require_reachable(meeting.url, hosts, {_here()})
        again = node in self._actors
        self._start(node, meeting)
        if not again:
            return
        until_s = time.monotonic() + _NOTICED_S
        while True:
            try:
                await self._ready[node]
                return
            except ray.exceptions.RayActorError as error:
                # Until Ray has noticed that a node is gone it still places actors there, and these die at once.
                if time.monotonic() > until_s:
                    where = self.places[node].host
                    raise InputError(f"Ray starts no actor for the agent on {where}: {error}") from error
                await asyncio.sleep(_AGAIN_S)
                self._start(node, meeting)

    def _start(self, node: int, meeting: Meeting) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if node in self._actors:  # otherwise the old actor would hold the resources that the new one needs
            ray.kill(self._actors[node])
        bundle = self._group.bundle_specs[node]
        actor_class = ray.remote(Supervisor).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, node),
        )
        actor: Any = actor_class.remote(node, self.places[node], str(_agents.log_of(node, meeting)))
        self._actors[node] = actor
        self._ready[node] = actor.ready.remote()
        self._ends[node] = actor.run.remote(meeting.url, meeting.token)

    def lost(self) -> dict[int, str]:
        """Nodes whose agent has exited or whose Ray actor is gone; it never waits."""
        if not self._ends:
            return {}
        import ray

        ended, _ = ray.wait(list(self._ends.values()), num_returns=len(self._ends), timeout=0)
        return {node: self._reason(node) for node, end in self._ends.items() if end in ended}

    def _reason(self, node: int) -> str:
        import ray

        try:
            return str(ray.get(self._ends[node]))
        except ray.exceptions.RayError as error:
            return f"the Ray actor on {self.places[node].host} is gone: {' '.join(str(error).split())}"

    async def stop(self) -> None:
        """Makes agents save and exit, gives the nodes back to Ray, and disconnects if `backend` had connected."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if not ray.is_initialized():
            return
        gone = self.lost()
        there = {node for node, ready in self._ready.items() if ray.wait([ready], timeout=0)[0]}
        leaving = [actor.leave.remote() for node, actor in self._actors.items() if node in there and node not in gone]
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVING_S + _ENDING_S)
        for actor in self._actors.values():
            ray.kill(actor)
        for each in (self._actors, self._ready, self._ends):
            each.clear()
        remove_placement_group(self._group)
        if self._disconnect:
            ray.shutdown()


class Supervisor:
    """The actor of one node. Ray sets the actor's CUDA_VISIBLE_DEVICES, which the agent inherits."""

    def __init__(self, node: int, place: AgentPlace, log: str) -> None:
        self._node, self._place, self._log = node, place, Path(log)
        self._agent: subprocess.Popen[bytes] | None = None

    async def ready(self) -> None:
        """Answers as soon as the actor lives."""

    async def run(self, url: str, token: str) -> str:
        """Starts the agent and waits for its end; returns why it ended."""
        # The kernel sends PDEATHSIG when the starting thread ends. The event loop's thread lives as long as the actor.
        command = [*_agents.command(self._node, self._place, url), f"--parent={os.getpid()}"]
        self._agent = _agents.started(command, _agents.environment(token), self._log)
        return _agents.farewell(await asyncio.to_thread(self._agent.wait), self._log)

    async def leave(self) -> None:
        """Makes the agent save and exit; returns when it is gone."""
        if self._agent is not None:
            await asyncio.to_thread(_agents.end, self._agent)
