"""`python -m synergy_sim.explain RUN JOB --at TIME` explains why a job ran or waited at an instant of a finished run.

Without an instant it prints the job's history, and with two runs where they part over it
(`synergy_runs.outputs.history`).
Ordering policies are explained from the stored run alone. For policies that share out CPUs and memory, the jobs are
also made again from the log, because the jobs' demands are not stored. For policies that solve a problem each round,
the simulation is repeated up to the decision in question: a run's configuration determines its decisions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import textwrap
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from synergy_core.cli import Parser, run
from synergy_core.errors import InputError
from synergy_core.performance.catalog import gpu_type_named
from synergy_core.scheduling.allocator import Explanation
from synergy_core.scheduling.decisions.queue import apply_jumps
from synergy_core.scheduling.decisions.reasons import (
    Reason,
    Snapshot,
    Stopped,
    Waiting,
    free_gpus,
    free_in_words,
    free_share,
)
from synergy_core.scheduling.jobs.cluster import BOARD_GPUS, Cluster, Share
from synergy_core.scheduling.jobs.record import Placed, Request
from synergy_core.scheduling.jobs.spec import JobSpec
from synergy_core.scheduling.policies import OrderingPolicy, Policy, SharingPolicy
from synergy_core.units import Floats, format_duration, format_gpus, format_instant, format_share, parse_duration_s
from synergy_runs.inputs.from_settings import cluster_of
from synergy_runs.inputs.keys import NodeTypeSettings, build
from synergy_runs.inputs.requested import policies_of
from synergy_runs.outputs.explained import explained as explanation_in
from synergy_runs.outputs.facts import AS_LOGGED, Kind
from synergy_runs.outputs.history import compared, history_of, job_numbered, parting_s
from synergy_runs.outputs.metrics import NO_NAME
from synergy_runs.outputs.stored import StoredRun, follow_latest, read_run
from synergy_runs.traces.rows import epoch_s
from synergy_sim.execution import ExecutionModel, SimulatedJob, TimedWork
from synergy_sim.hardware import speeds
from synergy_sim.jobs import jobs_of
from synergy_sim.prepare import execution_of, prepared_runs
from synergy_sim.settings import SimulatorSettings
from synergy_sim.simulate import Simulation

# The state of jobs at any time is computed from the run's stored events; no log is read again. All events of an active
# job are applied to it in order, as in the simulation, so that its attained service, its remaining time and its place
# in the queue are those that the policy saw.

NAMES = ("virtual_cluster", "user", "gpu_type", "model")
COLUMNS = (*NAMES, "job_name", "gpus", "submit_time_s", "duration_s", "estimate_s", "predicted_duration_s")
SLACK_S = 0.001
"""If the lengths of a job's runs add up to its logged run time within these seconds, its work is that run time."""
MAX_JOBS_NAMED = 3


class Turn(NamedTuple):
    """An event of a job: time, kind (`what`), GPUs, the jobs that caused the event (`by`), and the reason of a stop."""

    time_s: float
    what: str
    placed: Placed
    by: str
    why: Stopped | None = None

    def text(self, origin_s: float = 0.0) -> str:
        """Returns `started at 3.40 h on node 12: job 55 (8 GPUs) ended`. origin_s: see `format_instant`."""
        where = f" on {nodes_in_words(self.placed)}" if self.placed and self.what == "started" else ""
        causes = "; ".join(each for each in (self.by, self.why and self.why.text) if each)
        return f"{self.what} at {format_instant(self.time_s, origin_s)}{where}{': ' if causes else ''}{causes}"

    def as_dict(self) -> dict[str, Any]:
        """The event as plain values for JSON."""
        return {**self._asdict(), "placed": _pairs(self.placed), "why": self.why and self.why.name}


def _pairs(placed: Placed) -> list[dict[str, int]]:
    return [{"node": node, "gpu_mask": mask, "gpus": mask.bit_count()} for node, mask in placed]


def nodes_in_words(placed: Placed) -> str:
    """Returns `node 12`, or `2 nodes: 3, 4 (8 + 8 GPUs)`."""
    if len(placed) == 1:
        return f"node {placed[0][0]}"
    names = ", ".join(str(node) for node, _ in placed[:6]) + (", …" if len(placed) > 6 else "")
    sizes = " + ".join(str(mask.bit_count()) for _, mask in placed[:6]) + (" + …" if len(placed) > 6 else "")
    return f"{len(placed)} nodes: {names} ({sizes} GPUs)"


class Facts:
    """The stored facts of a run: columns of its jobs, its events, and the state of jobs at any instant.

    submissions: each job's spec and requested share, for policies that share out CPUs and memory.
    timed_on: the GPU type on which run times were logged; "" if unknown, and run times are the same on all types.
    """

    def __init__(
        self,
        stored: StoredRun,
        policy: Policy,
        cluster: Cluster,
        execution: ExecutionModel,
        *,
        timed_on: str = "",
        submissions: Sequence[tuple[JobSpec | None, Share | None]] = (),
    ) -> None:
        self.policy = policy.of_records()
        self.cluster = cluster
        self.jobs = stored.jobs(*COLUMNS)
        self.events = stored.events()
        self.decided_s = stored.decisions("time_s")["time_s"]
        self.is_event_driven = execution.round_s is None and not policy.in_rounds
        self.origin_s = epoch_s(str(stored.summary["trace_start"]))
        self._execution = execution
        self._submissions = submissions
        self._speeds = speeds(cluster, np.unique(self.jobs["gpus"]).tolist(), timed_on)
        self._shares = stored.shares()

    @cached_property
    def _rows_of(self) -> dict[int, list[int]]:
        """The rows of each job's events, in order; a start on several nodes counts once, by its first row."""
        whole = np.flatnonzero(self.events.part == 0)
        rows: dict[int, list[int]] = {}
        for row, job_id in zip(whole.tolist(), self.events.job_id[whole].tolist(), strict=True):
            rows.setdefault(job_id, []).append(row)
        return rows

    def last_decision_s(self, time_s: float) -> float | None:
        """The instant of the last decision at or before `time_s`; None if there is none."""
        decided = int(np.searchsorted(self.decided_s, time_s, side="right"))
        return float(self.decided_s[decided - 1]) if decided else None

    def story(self, job_id: int) -> list[tuple[float, Kind, int]]:
        """(instant, kind, row) of all events of a job, in order."""
        events = self.events
        return [(float(events.time_s[row]), Kind(events.kind[row]), row) for row in self._rows_of.get(job_id, ())]

    def placed(self, row: int) -> Placed:
        """The GPUs that a job got at a start; its first event is at `row`."""
        events, last = self.events, row + 1
        while last < len(events.part) and events.part[last] > 0:
            last += 1
        held: dict[int, int] = {}
        for board, mask in zip(events.node[row:last].tolist(), events.gpu_mask[row:last].tolist(), strict=True):
            node, boards = self.cluster.boards[board][0], self.cluster.boards
            first = board - bisect_left(boards, (node, 0))
            held[node] = held.get(node, 0) | mask << first * BOARD_GPUS
        return tuple(held.items())

    def at(self, now_s: float) -> Snapshot[SimulatedJob]:
        """A snapshot of all jobs that waited or ran after the events of that instant."""
        rows = int(np.searchsorted(self.events.time_s, now_s, side="right"))
        kind, job_id = self.events.kind[:rows], self.events.job_id[:rows]
        active = np.setdiff1d(job_id[kind == Kind.SUBMIT], job_id[kind == Kind.FINISH])
        jobs = [self._job(each, now_s) for each in active.tolist()]
        return Snapshot(self.policy, self.cluster, jobs, now_s, self.origin_s)

    def _job(self, job_id: int, now_s: float) -> SimulatedJob:
        """The job in its state at `now_s`, from its events up to then."""
        job = self.submitted(job_id)
        for time_s, kind, row in self.story(job_id):
            if time_s > now_s:
                break
            if isinstance(self.policy, OrderingPolicy):
                apply_jumps(self.policy, job, job.service.settled_s, time_s)
            if kind == Kind.START:
                job.started(time_s, self.placed(row))
                job.work.carry_on(job, time_s)
            elif kind == Kind.STOP:
                job.stopped(time_s)
                job.work.break_off(job, time_s)
        if isinstance(self.policy, OrderingPolicy):
            apply_jumps(self.policy, job, job.service.settled_s, now_s)
        if job.running and (shares := self._shares) is not None:
            rows = np.flatnonzero((shares.job_id == job_id) & (shares.time_s <= now_s))
            if len(rows):
                job.share = Share(
                    float(shares.cpus[rows[-1]]) / job.gpus, float(shares.memory_bytes[rows[-1]]) / job.gpus
                )
        if self._submissions:  # set last, because the request must not change the run time of the stored events
            job.spec, share = self._submissions[job_id]
            job.request = job.request._replace(share=share)
        if self.policy.preemptive:
            job.settle(now_s)  # without preemption, reservations need the start of the run in `settled_s`
        return job

    def submitted(self, job_id: int) -> SimulatedJob:
        """The job as it arrived, with its logged run time and the speeds of GPU types.

        If its runs add up to another time, as those of training jobs do, that is its run time, on every GPU type.
        """
        columns = {name: column[job_id] for name, column in self.jobs.items()}
        names: dict[str, Any] = {name: "" if columns[name] == NO_NAME else str(columns[name]) for name in NAMES}
        costs, gpus, work_s = self._execution.costs_of(names.pop("model")), int(columns["gpus"]), columns["duration_s"]
        rates = None if names["gpu_type"] else self._speeds.get(gpus)
        done_s, trained_s, began_s, rate, runs = 0.0, 0.0, 0.0, 1.0, 0
        for time_s, kind, row in self.story(job_id):
            if kind == Kind.START:
                began_s, runs = time_s, runs + 1
                rate = rates[self.cluster.type_of(self.placed(row))] if rates else 1.0
            elif kind in (Kind.STOP, Kind.FINISH):
                held_s = time_s - began_s - (costs.restart_s if runs > 1 else costs.launch_s)
                ran_s = max(held_s - (costs.exit_s if kind == Kind.FINISH else 0.0), 0.0)
                trained_s, done_s = trained_s + ran_s, done_s + ran_s * rate
        if costs.checkpoint_interval_s == costs.exit_s == 0 and abs(done_s - work_s) > SLACK_S:
            work_s, rates = trained_s, None
        job = SimulatedJob(
            job_id,
            float(columns["submit_time_s"]),
            gpus,
            float(work_s),
            costs,
            TimedWork(float(work_s), self.cluster.node_type_of, rates),
            request=Request(estimate_s=float(columns["estimate_s"]), **names),
        )
        job.predicted_duration_s = float(columns["predicted_duration_s"])
        return job

    # The events of a job, the jobs that made room for it, and the jobs that took its GPUs

    def turns(self, job_id: int) -> list[Turn]:
        """The job's starts, stops and its end, in order."""
        result, placed = [], Placed()
        for time_s, kind, row in self.story(job_id):
            if kind == Kind.START:
                placed = self.placed(row)
                result.append(Turn(time_s, "started", placed, self._made_room(job_id, row, placed)))
            elif kind == Kind.STOP:
                others = self._at_once(job_id, row, placed)
                by = ""
                if takers := others[Kind.START, True]:
                    by = f"{_list(takers)} took its GPUs"
                elif started := others[Kind.START, False]:
                    by = f"{_list(started)} started"
                code = int(self.events.reason[row])
                result.append(Turn(time_s, "stopped", placed, by, Stopped(code) if code else None))
            elif kind == Kind.FINISH:
                result.append(Turn(time_s, "ended", placed, ""))
        return result

    def _at_once(self, job_id: int, row: int, placed: Placed) -> dict[tuple[Kind, bool], list[str]]:
        """Other jobs with an event at the time of `row`, by (kind of event, whether it concerns any of these GPUs)."""
        events, held = self.events, dict(placed)
        first, last = (int(events.time_s.searchsorted(events.time_s[row], side)) for side in ("left", "right"))
        found: dict[tuple[Kind, bool], list[str]] = defaultdict(list)
        for event in range(first, last):
            other, kind = int(events.job_id[event]), Kind(events.kind[event])
            if other == job_id or events.part[event] > 0 or kind == Kind.SUBMIT:
                continue
            start = [start for _, what, start in self.story(other) if what == Kind.START and start <= event][-1]
            shared = any(held.get(node, 0) & mask for node, mask in self.placed(start))
            found[kind, shared].append(f"job {other} ({format_gpus(int(self.jobs['gpus'][other]))})")
        return found

    def _made_room(self, job_id: int, row: int, placed: Placed) -> str:
        """Names the jobs that freed the GPUs of a start, else the jobs that ended on other GPUs at the same time."""
        others = self._at_once(job_id, row, placed)
        ended, stopped = others[Kind.FINISH, True], others[Kind.STOP, True]
        named = [f"{_list(ended)} ended"] if ended else []
        named += [f"{_list(stopped)} {'were' if len(stopped) > 1 else 'was'} stopped"] if stopped else []
        if named:
            return " and ".join(named)
        if float(self.events.time_s[row]) == float(self.jobs["submit_time_s"][job_id]):
            return "at once, on free GPUs"
        elsewhere = others[Kind.FINISH, False]
        return f"{_list(elsewhere)} ended elsewhere" if elsewhere else "on GPUs that were free"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - MAX_JOBS_NAMED} more" if len(names) > MAX_JOBS_NAMED else ""
    return ", ".join(names[:MAX_JOBS_NAMED]) + more


# CPUs and memory: a job's demand, its share, its speed with that share, and the resource that limits its speed.

UNLIMITED = float("inf")
FASTER = 1.0 + 1e-6
"""Smaller speed-ups do not count, because the shares that jobs get are only accurate within a tolerance."""


@dataclass(frozen=True)
class Demand:
    """A job's demand for CPUs and memory. Speeds are relative to the speed with its proportional share."""

    gpu_type: str
    """The job's present GPU type; if it waits, the first type that it may run on."""
    gpus: int
    """Number of GPUs that it requests."""
    wanted: Share
    """The smallest share per GPU with which the job is fastest on `gpu_type`, at most what a node can give."""
    proportional: Share
    """The proportional share per GPU on `gpu_type`."""
    most_speed: float
    """Speed with `wanted`."""
    known: bool
    """Whether its speed as a function of its share is known."""
    has: Share | None = None
    """Its present share per GPU; None if it does not run, or has no share."""
    speed: float = float("nan")
    """Speed with `has`; NaN without a present share."""
    bound_by: str = ""
    """The resource that limits its speed, a key of `_BOUND`; "" without a present share."""
    free: Share | None = None
    """Unused CPUs and memory of its nodes together; None if nodes are pooled, or without a present share."""

    def as_dict(self) -> dict[str, Any]:
        """The demand as plain values for JSON; unknown values are null."""
        return {
            name: each._asdict() if isinstance(each, Share) else None if each != each else each
            for name, each in vars(self).items()
        }

    def text(self) -> list[str]:
        """The demand as sentences."""
        own = f"its proportional share is {format_share(*self.proportional)} on {self.gpu_type}"
        has = "" if self.has is None else f"has {format_share(*self.has)} per GPU; "
        if not self.known:
            return [f"{has}its speed by CPUs and memory is not known ({own})"]
        uses = f"{has}uses up to {format_share(*self.wanted)}{'' if has else ' per GPU'} ({own})"
        if not has:
            return [uses, f"speed with that: {self.most_speed:.2f} × its speed with the proportional share"]
        speed = f"speed: {self.speed:.2f} × its speed with the proportional share, at most {self.most_speed:.2f} ×"
        free = (
            "" if self.bound_by == "GPUs" or self.free is None else f" Free on its nodes: {format_share(*self.free)}."
        )
        return [uses, speed, f"bound by: {_BOUND[self.bound_by]}{free}"]


_BOUND = {
    "GPUs": "its GPUs. More CPUs or memory would not make it faster.",
    "CPUs": "CPUs. They prepare input more slowly than its GPUs could process it.",
    "memory": "memory. Data that is not cached in it is read more slowly than its GPUs could process it.",
    "CPUs or memory": "CPUs and memory. More of either would make it faster.",
    "CPUs and memory": "CPUs and memory. Only more of both would make it faster.",
}


def demand(seen: Snapshot[SimulatedJob], job: SimulatedJob) -> Demand | None:
    """The job's demand at that instant; None under a policy that does not share out CPUs and memory."""
    if not isinstance(seen.policy, SharingPolicy):
        return None
    applicant = seen.needs.asked(job)
    kind = applicant.kinds[0]
    wanted = applicant.wanted[kind]
    wants = Demand(
        seen.cluster.gpu_types[kind],
        job.gpus,
        wanted,
        seen.cluster.proportional[kind],
        applicant.speed(kind, wanted),
        known=job.request.share is not None or seen.needs.profile(job) is not None,
    )
    has, free = job.share, None
    if not job.running or has is None:
        return wants
    if not seen.policy.mechanism.pooled:
        hosts = seen.hosts(seen.running)
        each = [free_share(hosts, node) for node, _ in applicant.held]
        free = Share(sum(one.cpus for one in each), sum(one.memory_bytes for one in each))

    def is_faster(cpus: float, memory_bytes: float) -> bool:
        return applicant.speed(kind, Share(cpus, memory_bytes)) > applicant.speed(kind, has) * FASTER

    more_cpus, more_memory = is_faster(UNLIMITED, has.memory_bytes), is_faster(has.cpus, UNLIMITED)
    bound_by = " or ".join(["CPUs"] * more_cpus + ["memory"] * more_memory)
    if not bound_by:
        bound_by = "CPUs and memory" if is_faster(UNLIMITED, UNLIMITED) else "GPUs"
    return replace(wants, has=has, speed=applicant.speed(kind, has), bound_by=bound_by, free=free)


# The answer: the job's state, its place in the policy's order, and the reasons why it waits

MAX_AHEAD = 5
WIDTH = 80


class Ahead(NamedTuple):
    """A job that comes before the explained job in the policy's order. key: its sort key in words."""

    job_id: int
    gpus: int
    running: bool
    key: str


class Answer:
    """The state of one job at an instant, and the reasons why it waits. state: "waiting", "running" or "ended".

    decided_s: time of the order and reasons: `time_s` or, in rounds, the last decision. lane: tenant whose quota the
    job competes for, "" for none. place, of: its position, from 1, among the jobs that compete for the same GPUs,
    and their number; place 0: no position. preempts: whether running jobs are among them. ahead: the first jobs before
    it; more_ahead, more_ahead_gpus: number and GPUs of the others. free: free GPUs by node. demand: None if the policy
    shares out no CPUs and memory. before, after: events up to `time_s`, and the next. origin_s: see `format_instant`.
    """

    def __init__(self, facts: Facts, job_id: int, at_s: float) -> None:
        now = facts.at(at_s)
        active = _job_in(now, job_id)
        job = active or facts.submitted(job_id)
        # The scheduler used the state at its last decision, when the job may not have arrived yet.
        decided_s = at_s if facts.is_event_driven else facts.last_decision_s(at_s)
        seen = now if decided_s is None or decided_s == at_s or active is None else facts.at(decided_s)
        known = None if decided_s is None or active is None else _job_in(seen, job_id)
        line = seen.line(known) if known else []
        turns = facts.turns(job_id)
        self.policy = facts.policy.name
        self.order = facts.policy.summary
        self.job_id = job_id
        self.name = str(facts.jobs["job_name"][job_id])
        self.gpus = job.gpus
        self.gpu_type = job.request.gpu_type
        self.tenant = job.request.virtual_cluster
        self.submit_time_s = job.submit_time_s
        self.time_s = at_s
        self.state = "running" if job.running else "waiting" if active else "ended"
        self.placed = job.placement
        self.before = [turn for turn in turns if turn.time_s <= at_s]
        self.after = next((turn for turn in turns if turn.time_s > at_s), None)
        self.since_s = self.before[-1].time_s if self.before else job.submit_time_s
        self.decided_s = seen.now_s if known else at_s
        self.key = seen.key_words.get(job_id, "") if known else ""
        # Under a policy that never stops jobs, a running job has no place in the order.
        self.place = line.index(known) + 1 if known in line else 0
        self.of = len(line)
        self.lane = seen.lane(known) if known else ""
        self.preempts = facts.policy.preemptive
        ahead = line[: max(self.place - 1, 0)]
        self.ahead = [Ahead(job.job_id, job.gpus, job.running, seen.key_words[job.job_id]) for job in ahead[:MAX_AHEAD]]
        self.more_ahead = max(0, len(ahead) - MAX_AHEAD)
        self.more_ahead_gpus = sum(each.gpus for each in ahead[MAX_AHEAD:])
        self.cluster_gpus = facts.cluster.gpus
        self.free = free_gpus(now.placement)
        self.demand = demand(now, active) if active else None
        self.reasons: list[Reason] = []
        if self.state == "waiting":
            self.reasons = (seen.why(known) if known else []) or [_next_decision(facts, self.decided_s)]
        self.origin_s = facts.origin_s

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain values, for JSON."""
        return {
            **vars(self),
            "ahead": [each._asdict() for each in self.ahead],
            "why": [reason.text for reason in self.reasons],
            "reasons": [reason.kind.name for reason in self.reasons],
            "placed": _pairs(self.placed),
            "free": {str(node): gpus for node, gpus in self.free.items()},
            "demand": self.demand and self.demand.as_dict(),
            "before": [turn.as_dict() for turn in self.before],
            "after": self.after and self.after.as_dict(),
        }

    def text(self) -> str:
        """The answer as lines of at most 80 columns."""
        of_type = f", type {self.gpu_type}" if self.gpu_type else ""
        tenant = f", tenant {self.tenant}" if self.tenant else ""
        since = self._instant(self.since_s)
        state = {
            "running": f"has run since {since} on {nodes_in_words(self.placed)}",
            "waiting": f"has waited since {since}, {format_duration(self.time_s - self.since_s)} so far",
            "ended": f"had ended at {since}",
        }
        lines = [
            f"{self.policy} at {self._instant(self.time_s)}: {self.order}",
            f"job {self.job_id} ({self.name}): {format_gpus(self.gpus)}{of_type}{tenant}, submitted "
            f"at {self._instant(self.submit_time_s)}",
            state[self.state],
            *(self.demand.text() if self.demand else ()),
            *(self._standing() if self.place else ()),
            *(reason.text for reason in self.reasons),
        ]
        if self.before:
            first, last = (turn.text(self.origin_s) for turn in (self.before[0], self.before[-1]))
            stops = sum(turn.what == "stopped" for turn in self.before)
            times = "once" if stops == 1 else f"{stops} times"
            if self.state == "ended" or len(self.before) == 1:
                lines.append(f"before: it {first}{f'; stopped {times}' if stops else ''}.")
            else:
                lines.append(f"before: stopped {times}; last it {last}.")
        if self.after is not None:
            lines.append(f"then: it {self.after.text(self.origin_s)}.")
        return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False) for line in lines)

    def _instant(self, time_s: float) -> str:
        return format_instant(time_s, self.origin_s)

    def _standing(self) -> list[str]:
        among = "jobs that wait or run" if self.preempts else "jobs that wait"
        whose = f" of tenant {self.lane}" if self.lane else ""
        as_of = f" in the round of {self._instant(self.decided_s)}" if self.decided_s != self.time_s else ""
        lines = [f"place {self.place} of {self.of} {among}{whose}{as_of}: {self.key}"]
        digits = max((len(str(each.job_id)) for each in self.ahead), default=0)
        for each in self.ahead:
            does = "runs " if each.running else "waits"
            lines.append(f"  job {each.job_id:>{digits}}  {format_gpus(each.gpus):>7}  {does}  {each.key}")
        if self.more_ahead:
            lines.append(f"  and {self.more_ahead} more ahead of it, {format_gpus(self.more_ahead_gpus)}")
        return [*lines, f"free of {format_gpus(self.cluster_gpus)}: {free_in_words(self.free)}"]


def _job_in(snapshot: Snapshot[SimulatedJob], job_id: int) -> SimulatedJob | None:
    return next((job for job in snapshot.jobs if job.job_id == job_id), None)


def _next_decision(facts: Facts, now_s: float) -> Reason:
    last_s = facts.last_decision_s(now_s)
    last = "none was made before"
    if last_s is not None:
        last = f"the last was made at {format_instant(last_s, facts.origin_s)}"
    text = f"Decisions are made once per round; {last}, and the job waits for the next."
    if facts.is_event_driven:
        text = f"Nothing in the stored run prevents it from starting at the next decision; {last}."
    return Reason(Waiting.NEXT_DECISION, text)


BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one explanation; returns exit status 0, or 2 for an error that the user can fix."""
    parser = Parser(
        prog="python -m synergy_sim.explain",
        description="Prints what a job of a finished run went through, explains with --at why it ran or waited at an "
        "instant, and says with --job where two runs part over a job.",
    )
    parser.add_argument("run", type=Path, help="a policy's folder of a run, such as results/philly/latest/fifo-0")
    parser.add_argument("job", help="the job's name in its log, or its number; with --job, the folder of another run")
    parser.add_argument("--job", dest="compared", metavar="JOB", help="say where the two runs part over this job")
    parser.add_argument(
        "--at",
        metavar="TIME",
        help="time since the window's start, such as 2h; without it, all that the job went through",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it to this file")
    options = parser.parse_args(arguments)
    try:
        text, values = _answer(options.run, options.job, options.compared, options.at)
        print(text)
        if options.json is not None:
            options.json.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        raise  # the reader of the output has closed it; `cli.run` handles that
    except OSError as error:
        print(f"error: {options.json}: {error.strerror}.", file=sys.stderr)
        return BAD_INPUT
    return 0


def _answer(run: Path, second: str, compared_job: str | None, at: str | None) -> tuple[str, dict[str, Any]]:
    """The answer as text and as plain values. second: the job or, with `compared_job`, the folder of the other run."""
    if compared_job is not None:
        if at is not None:
            raise InputError("--at and --job: give --at with one run and its job.")
        one, other = (history_of(folder, compared_job) for folder in (run, Path(second)))
        return compared(one, other), {"parts_at_s": parting_s(one, other), "runs": [one.as_dict(), other.as_dict()]}
    if at is None:
        history = history_of(run, second)
        return history.text(), history.as_dict()
    found, at_s, origin_s = explained(follow_latest(run), second, at)
    heading = f"round at {format_instant(at_s, origin_s)} of {run}\n" if isinstance(found, Explanation) else ""
    return heading + found.text(), {"time_s": at_s, **found.as_dict()}


def explained(folder: Path, name: str, at: str) -> tuple[Explanation | Answer, float, float]:
    """Returns the explanation, the simulated time that it is about, and the seconds from 1970 to simulated time 0.

    Raises InputError if the run, the job or the instant cannot be found.
    """
    settings = settings_of(folder)
    if settings.policy == [AS_LOGGED]:
        raise InputError(
            f"{folder}: this is the log's own schedule, which no policy decided. Give the folder of a policy's run."
        )
    (policy,) = policies_of(settings.policy, settings.parameters, settings.information, settings.input).values()
    if not policy.reads_goodput:
        facts = facts_of(read_run(folder), settings, policy)
        job, at_s = _asked(facts.jobs["job_name"].tolist(), facts.jobs["submit_time_s"], name, at)
        return Answer(facts, job, at_s), at_s, facts.origin_s
    (run,) = prepared_runs(settings)
    workload = run.workload
    job, at_s = _asked(workload.jobs["job_name"].tolist(), workload.jobs["submit_time_s"], name, at)
    last = Simulation(workload, run.cluster, run.policy, run.execution, run.truth).run_until(at_s, job)
    if last is None:
        raise InputError(f"job {name} was not active in any round at or after {at_s:.0f} s, because it had ended.")
    label = f"job {workload.jobs['job_name'][job]}"
    return explanation_in(last, run.cluster, run.policy.name, job, label), last[0].now_s, workload.origin_s


def _asked(names: list[str], submit_time_s: Floats, wanted: str, at: str) -> tuple[int, float]:
    """Returns the number of the job named `wanted`, and the time `at` in seconds."""
    job = job_numbered(names, wanted)
    submit_s = float(submit_time_s[job])
    try:
        at_s = parse_duration_s(at)
    except ValueError:
        raise InputError(f"--at {at}: expected a time since the start, such as 90s, 30m or 2h.") from None
    if at_s < submit_s:
        raise InputError(f"--at {at}: job {wanted} was submitted later, at {submit_s:.0f} s.")
    return job, at_s


def settings_of(folder: Path) -> SimulatorSettings:
    """Reads the configuration of the run in that folder. Raises InputError if there is none."""
    import yaml  # type: ignore[import-untyped]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path = folder / "config.yaml"
    if not path.is_file():
        raise InputError(f"{folder}: expected the folder of a finished run, with config.yaml in it.")
    values: Any = None
    with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException):
        values = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(values, dict) or not {"policy", "seed"} <= set(values):
        raise InputError(f"{path}: is not the configuration of a run. Run that policy again.")
    values.pop("compared_with", None)
    return build(SimulatorSettings, {**values, "policy": [values["policy"]], "seed": [values["seed"]]})


def facts_of(run: StoredRun, settings: SimulatorSettings, policy: Policy) -> Facts:
    """The stored facts of a run. Raises InputError if another version wrote it without its tenants' quotas."""
    if "quotas" not in run.summary:
        raise InputError(f"{run.folder}: another version wrote it without its tenants' quotas. Run that policy again.")
    wanted = dataclasses.replace(settings.cluster, virtual_clusters=run.summary["quotas"] or None)
    if wanted.node_types is None:  # take the nodes of the run; the log might give others today
        kept = ("gpu_type", "nodes", "gpus_per_node")
        there = [NodeTypeSettings(**{key: each[key] for key in kept}) for each in run.summary["node_types"]]
        wanted = dataclasses.replace(wanted, node_types=there, add_nodes=0)
    timed_on = run.summary.get("run_times_on", settings.trace.gpu_type)
    return Facts(
        run,
        policy,
        cluster_of(wanted, settings.trace, None),
        execution_of(settings),
        timed_on=gpu_type_named(timed_on) if timed_on else "",
        submissions=_submissions(run, settings) if isinstance(policy, SharingPolicy) else (),
    )


def _submissions(run: StoredRun, settings: SimulatorSettings) -> list[tuple[JobSpec | None, Share | None]]:
    """Each job's spec and requested share. Raises InputError if the jobs differ from those of the run.

    Which rows become training jobs depends on all policies of the command that made the run.
    """
    together = dataclasses.replace(settings, policy=run.requested_policies())
    made = next(each for each in prepared_runs(together) if each.asked == settings.policy[0])
    workload, stored = made.workload, run.summary
    for then, now in (
        (stored["trace_sha256"], workload.sha256),
        (stored["jobs"] + stored["jobs_carried_in"] + stored.get("jobs_running", 0), len(workload)),
        (list(stored["trace_notes"]), list(workload.notes)),
    ):
        if then != now:
            raise InputError(
                f"{run.folder}: its jobs cannot be made again: the run had {then}, now there is {now}. Set "
                "SYNERGY_DATA as it was, or run that policy again."
            )
    jobs = jobs_of(workload, made.cluster, made.execution, made.truth, tunes_batch=False)
    return [(job.spec, job.request.share) for job in jobs]


if __name__ == "__main__":
    run("error", main, interrupted="nothing was changed.")
