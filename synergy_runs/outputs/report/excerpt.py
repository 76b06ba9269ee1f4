"""The GPUs that each job held over time, what a job went through, and the busiest time of a run.

These are the data of Gantt charts, of Chrome traces, and of what the report and `explain` tell about one job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.scheduling.jobs.cluster import BOARD_GPUS
from synergy_core.units import DAY_S, HOUR_S, Floats
from synergy_runs.outputs.facts import (
    Events,
    Kind,
    Training,
    batches_in,
    binned_mean,
    gpus_in_use,
    holdings,
    waiting_jobs,
)
from synergy_runs.outputs.metrics import Summary

_LENGTHS_S = (60.0, 600.0, HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S, DAY_S, 2 * DAY_S, 4 * DAY_S, 7 * DAY_S)
_STRETCHES = 400


@dataclass(frozen=True, slots=True)
class Held:
    """Intervals in which jobs held GPUs: one row per start of a job and node, in order of start.

    reason: why the job was stopped. first_batch, last_batch: the job's global batch at the start and at the end of the
    interval; 0 if unknown.
    """

    job_id: NDArray[np.int32]
    gpus: NDArray[np.int32]
    node: NDArray[np.int32]
    gpu_mask: NDArray[np.uint64]
    start_s: Floats
    end_s: Floats
    reason: NDArray[np.uint8]
    first_batch: NDArray[np.int32]
    last_batch: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.job_id)

    @property
    def placed(self) -> bool:
        """Whether the nodes of all jobs are known; for the schedule in a log they are not."""
        return not len(self) or bool(self.node.min() >= 0)

    def take(self, keep: NDArray[Any]) -> Held:
        """Returns the rows that `keep` selects."""
        return Held(*(getattr(self, name)[keep] for name in self.__slots__))


def held_by_node(events: Events, training: Training | None = None) -> Held:
    """Splits each interval in which a job held GPUs into one row per node."""
    held = holdings(events)
    first, last = batches_in(held, training)
    rows = np.flatnonzero(events.kind == Kind.START)
    interval = np.cumsum(events.part[rows] == 0) - 1
    return Held(
        job_id=held.job_id[interval],
        gpus=held.gpus[interval],
        node=events.node[rows],
        gpu_mask=events.gpu_mask[rows],
        start_s=held.start_s[interval],
        end_s=held.end_s[interval],
        reason=np.append(events.reason, np.uint8(0))[held.end_row[interval]],
        first_batch=first[interval],
        last_batch=last[interval],
    )


def overlapping(held: Held, start_s: float, end_s: float) -> Held:
    """The rows that overlap the time from `start_s` to `end_s`."""
    return held.take((held.end_s > start_s) & (held.start_s < end_s))


def busy_stretch(events: Events, *, most_starts: int) -> tuple[float, float]:
    """(start, end), seconds, of the busiest stretch: the longest of `_LENGTHS_S` with at most `most_starts` starts.

    It is centred where the queue is longest or, if no job waits, where most GPUs are used; at least `_LENGTHS_S[0]`.
    """
    if not len(events.time_s):
        return 0.0, 1.0
    first_s, last_s = float(events.time_s[0]), float(events.time_s[-1])
    if last_s <= first_s:
        return first_s, first_s + 1.0
    edges = np.linspace(first_s, last_s, _STRETCHES + 1)
    load = binned_mean(*waiting_jobs(events), edges)
    if not load.max() > 0:
        load = binned_mean(*gpus_in_use(events), edges)
    at = int(np.argmax(load))
    middle_s = float(edges[at] + edges[at + 1]) / 2
    starts_s = events.time_s[(events.kind == Kind.START)]
    stretch = first_s, last_s
    if len(starts_s) <= most_starts and last_s - first_s <= _LENGTHS_S[-1]:
        return stretch
    for length_s in _LENGTHS_S:
        low = min(max(middle_s - length_s / 2, first_s), max(last_s - length_s, first_s))
        within = np.searchsorted(starts_s, (low, low + length_s))
        if length_s > _LENGTHS_S[0] and within[1] - within[0] > most_starts:
            break
        stretch = low, min(low + length_s, last_s)
    return stretch


def gpus_of_nodes(summary: Summary) -> list[int]:
    """The number of GPUs of every node, by its number in the event log (`Cluster.boards`)."""
    return [each["gpus_per_node"] for each in boards_of(summary) for _ in range(each["nodes"])]


def boards_of(summary: Summary) -> list[dict[str, Any]]:
    """(gpu_type, nodes, gpus_per_node) of each node type; nodes of more than `BOARD_GPUS` GPUs count as several."""
    found = []
    for each in summary["node_types"]:
        size, kind = each["gpus_per_node"], {"gpu_type": each["gpu_type"]}
        whole, rest = divmod(size, BOARD_GPUS)
        parts = [(whole, BOARD_GPUS), (1, rest)] * each["nodes"] if size > BOARD_GPUS else [(each["nodes"], size)]
        found += [kind | {"nodes": nodes, "gpus_per_node": gpus} for nodes, gpus in parts if gpus]
    return found


def unit_words(summary: Summary) -> tuple[str, str]:
    """Singular and plural of a node's slots: GPUs, or CPU cores for an executor without GPUs."""
    on_cores = [each["gpu_type"] == "cpu" for each in summary["node_types"]]
    if all(on_cores):
        return "CPU core", "CPU cores"
    return ("slot", "slots") if any(on_cores) else ("GPU", "GPUs")
