"""The answer to: why does this job run, or not, at that instant of a stored run, and what became of it?"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any, NamedTuple

from synergy_core.units import format_duration, format_gpus, format_instant
from synergy_sim.aftermath import Turn, nodes_in_words, turns
from synergy_sim.demand import Demand, demand
from synergy_sim.execution import SimulatedJob
from synergy_sim.facts import Facts, Moment
from synergy_sim.standing import Standing, free_gpus, in_words, standing, undecided, why_waiting

MOST_AHEAD = 5
WIDTH = 80


class Ahead(NamedTuple):
    """A job that comes before, and its key in words."""

    job_id: int
    gpus: int
    running: bool
    key: str


@dataclass(frozen=True)
class Answer:
    """What is told of one job at one instant. state: "waiting", "running" or "ended".

    decided_s: the instant as of which order and reasons stand: `time_s`, or the last decision where there are rounds.
    place, of: where it stands among those of its lane, from 1; 0 where it does not. preempts: whether running jobs have
    a place in that order too. ahead: the first of those before it; more_ahead, more_ahead_gpus: the rest.
    free: GPUs by node. demand: CPUs and memory, under a policy that shares them out. why: sentences. before, after:
    what had happened to it, and what did next. origin_s: seconds from 1970 to simulated time 0, see `format_instant`.
    """

    policy: str
    order: str
    job_id: int
    name: str
    gpus: int
    gpu_type: str
    tenant: str
    submit_time_s: float
    time_s: float
    state: str
    placed: tuple[tuple[int, int], ...]
    since_s: float
    decided_s: float
    key: str
    place: int
    of: int
    lane: str
    preempts: bool
    ahead: tuple[Ahead, ...]
    more_ahead: int
    more_ahead_gpus: int
    cluster_gpus: int
    free: dict[int, int]
    demand: Demand | None
    why: tuple[str, ...]
    before: tuple[Turn, ...]
    after: Turn | None
    origin_s: float

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain values, for JSON."""
        plain = {**vars(self), "ahead": [each._asdict() for each in self.ahead], "why": list(self.why)}
        plain["placed"] = _pairs(self.placed)
        plain["free"] = {str(node): gpus for node, gpus in self.free.items()}
        plain["demand"] = None if self.demand is None else self.demand.as_dict()
        plain["before"] = [_turn(each) for each in self.before]
        plain["after"] = _turn(self.after) if self.after else None
        return plain

    def text(self) -> str:
        """The answer as lines of at most 80 columns."""
        of_type = f", type {self.gpu_type}" if self.gpu_type else ""
        tenant = f", tenant {self.tenant}" if self.tenant else ""
        lines = [
            f"{self.policy} at {self._instant(self.time_s)}: {self.order}",
            f"job {self.job_id} ({self.name}): {format_gpus(self.gpus)}{of_type}{tenant}, submitted "
            f"at {self._instant(self.submit_time_s)}",
            self._state(),
            *(self.demand.text() if self.demand else ()),
        ]
        if self.place:
            lines += self._standing()
        lines += self.why
        if self.before:
            lines.append(f"before: {self._before()}.")
        if self.after is not None:
            lines.append(f"then: it {self.after.text(self.origin_s)}.")
        return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False) for line in lines)

    def _instant(self, time_s: float) -> str:
        return format_instant(time_s, self.origin_s)

    def _state(self) -> str:
        if self.state == "running":
            return f"runs since {self._instant(self.since_s)} on {nodes_in_words(self.placed)}"
        if self.state == "waiting":
            waited = format_duration(self.time_s - self.since_s)
            return f"waits since {self._instant(self.since_s)}, {waited} so far"
        return f"had ended at {self._instant(self.since_s)}"

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
        lines.append(f"free of {format_gpus(self.cluster_gpus)}: {in_words(self.free)}")
        return lines

    def _before(self) -> str:
        stops = sum(turn.what == "stopped" for turn in self.before)
        times = "once" if stops == 1 else f"{stops} times"
        first, last = (turn.text(self.origin_s) for turn in (self.before[0], self.before[-1]))
        if self.state == "ended" or len(self.before) == 1:
            return f"it {first}" + (f"; stopped {times}" if stops else "")
        return f"stopped {times}; last it {last}"


def _pairs(placed: tuple[tuple[int, int], ...]) -> list[dict[str, int]]:
    return [{"node": node, "gpu_mask": mask, "gpus": mask.bit_count()} for node, mask in placed]


def _turn(turn: Turn) -> dict[str, Any]:
    return {"time_s": turn.time_s, "what": turn.what, "placed": _pairs(turn.placed), "by": turn.by}


def answer(facts: Facts, job_id: int, at_s: float) -> Answer:
    """What the facts tell of a job at an instant, from its submission on."""
    jobs = facts.jobs
    submit_s = float(jobs["submit_time_s"][job_id])
    happened = turns(facts, job_id)
    before = tuple(turn for turn in happened if turn.time_s <= at_s)
    moment = facts.at(at_s)
    job = moment.waiting.get(job_id) or moment.running.get(job_id)
    ended = job is None
    job = facts.submitted(job_id) if job is None else job
    decided_s = at_s if facts.event_driven else facts.last_decision_s(at_s)
    seen = None if decided_s is None or ended else _seen(facts, moment, decided_s, job_id)
    at = Standing([], {}, -1, "") if seen is None else standing(facts, *seen)
    why: list[str] = []
    if not ended and not job.running:
        why = [undecided(facts, at_s)] if seen is None else why_waiting(facts, *seen, at)
    return Answer(
        policy=facts.policy.name,
        order=facts.policy.summary,
        job_id=job_id,
        name=str(jobs["job_name"][job_id]),
        gpus=job.gpus,
        gpu_type=job.gpu_type,
        tenant=job.virtual_cluster,
        submit_time_s=submit_s,
        time_s=at_s,
        state="ended" if ended else "running" if job.running else "waiting",
        placed=job.placement,
        since_s=before[-1].time_s if before else submit_s,
        decided_s=at_s if seen is None else seen[0].now_s,
        key=at.words.get(job_id, ""),
        cluster_gpus=facts.cluster.gpus,
        free=free_gpus(moment.placement),
        demand=None if ended else demand(facts, moment, job),
        why=tuple(why),
        before=before,
        after=next((turn for turn in happened if turn.time_s > at_s), None),
        origin_s=facts.origin_s,
        **_order(facts, job, at),
    )


def _seen(facts: Facts, moment: Moment, decided_s: float, job_id: int) -> tuple[Moment, SimulatedJob] | None:
    """What the scheduler went by, and the job in it; None if it did not know of the job yet."""
    seen = moment if decided_s == moment.now_s else facts.at(decided_s)
    job = seen.waiting.get(job_id) or seen.running.get(job_id)
    return None if job is None else (seen, job)


def _order(facts: Facts, job: SimulatedJob, at: Standing) -> dict[str, Any]:
    """Where it stands; a running job of a policy that stops nobody has no place among those that wait."""
    preempts = facts.policy.preemptive
    stands = at.place >= 0 and (preempts or not job.running)
    ahead = at.order[: at.place] if stands else []
    shown = [Ahead(each.job_id, each.gpus, each.running, at.words[each.job_id]) for each in ahead[:MOST_AHEAD]]
    return {
        "place": at.place + 1 if stands else 0,
        "of": len(at.order),
        "lane": at.lane,
        "preempts": preempts,
        "ahead": tuple(shown),
        "more_ahead": len(ahead) - len(shown),
        "more_ahead_gpus": sum(each.gpus for each in ahead[MOST_AHEAD:]),
    }
