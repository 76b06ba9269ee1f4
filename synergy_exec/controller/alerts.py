"""What somebody should look at, a sentence each; nothing, as long as all is well."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from synergy_core.units import format_duration
from synergy_exec.alert_limits import AlertLimits
from synergy_exec.controller.execution import Execution
from synergy_exec.nodes.agents import Agents
from synergy_exec.plain import plain


def alerts(execution: Execution, agents: Agents, now_s: float, limits: AlertLimits) -> list[str]:
    """All of it, the cluster before its jobs."""
    return [
        *_of_nodes(agents),
        *_of_slots(execution),
        *_of_disk(execution, limits),
        *_of_jobs(execution, now_s, limits),
    ]


def _of_nodes(agents: Agents) -> Iterator[str]:
    for node in range(agents.backend.nodes):
        times = agents.lost_lately(node)
        if node not in agents.links:
            yield f"node {node} has no agent; lost within an hour: {times}"
        elif times:
            yield f"node {node}: agents lost within an hour: {times}"


def _of_slots(execution: Execution) -> Iterator[str]:
    for (node, slot), why in execution.decider.aside.slots.items():
        yield f"node {node}, slot {slot} is set aside: {why}"


def _of_disk(execution: Execution, limits: AlertLimits) -> Iterator[str]:
    disk = shutil.disk_usage(execution.folder)
    if disk.free < limits.free_fraction * disk.total:
        yield f"{execution.folder}: {disk.free / 1e9:.1f} GB of {disk.total / 1e9:.1f} GB are free"


def _of_jobs(execution: Execution, now_s: float, limits: AlertLimits) -> Iterator[str]:
    for job in execution.jobs.values():
        since_s = now_s - job.moved_s
        named = f"job {job.job_id} ({plain(job.name)})"
        if job.state == "failed" and since_s <= limits.failed_s:
            yield f"{named} failed {format_duration(since_s)} ago: {plain(job.reason)}"
        elif job.held_gpus and since_s > limits.silent_s:
            yield f"{named} has trained no step for {format_duration(since_s)}; slots that it holds: {job.held_gpus}"
