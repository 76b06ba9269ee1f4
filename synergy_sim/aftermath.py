"""What became of a job: when it next started, stopped or ended, who made room for it, and who took its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from synergy_core.jobs.record import Placed
from synergy_core.units import format_gpus, format_instant
from synergy_runs.log import Kind
from synergy_sim.facts import Facts

MOST_NAMED = 3


@dataclass(frozen=True)
class Turn:
    """One thing that happened to a job: when, what, on which GPUs, and by whom."""

    time_s: float
    what: str
    placed: Placed
    by: str

    def text(self, origin_s: float = 0.0) -> str:
        """`started at 3.40 h on node 12: job 55 (8 GPUs) ended`. origin_s: see `format_instant`."""
        where = f" on {nodes_in_words(self.placed)}" if self.placed and self.what == "started" else ""
        return f"{self.what} at {format_instant(self.time_s, origin_s)}{where}{': ' if self.by else ''}{self.by}"


def nodes_in_words(placed: Placed) -> str:
    """`node 12`, or `nodes 3, 4 (8 + 8 GPUs)`."""
    if len(placed) == 1:
        return f"node {placed[0][0]}"
    names = ", ".join(str(node) for node, _ in placed[:6]) + (", …" if len(placed) > 6 else "")
    sizes = " + ".join(str(mask.bit_count()) for _, mask in placed[:6]) + (" + …" if len(placed) > 6 else "")
    return f"{len(placed)} nodes: {names} ({sizes} GPUs)"


def turns(facts: Facts, job_id: int) -> list[Turn]:
    """All that happened to the job after its submission, in order."""
    result = []
    placed: Placed = ()
    for time_s, kind, row in facts.story(job_id):
        if kind == Kind.START:
            placed = facts.placed(row)
            result.append(Turn(time_s, "started", placed, _made_room(facts, job_id, row, placed)))
        elif kind == Kind.STOP:
            result.append(Turn(time_s, "stopped", placed, _took(facts, job_id, row, placed)))
        elif kind == Kind.FINISH:
            result.append(Turn(time_s, "ended", placed, ""))
    return result


def _at_once(facts: Facts, row: int) -> range:
    """The rows of the instant of `row`."""
    time_s = facts.events.time_s
    return range(int(time_s.searchsorted(time_s[row])), facts.rows_until(float(time_s[row])))


def _overlap(one: Placed, other: Placed) -> bool:
    held = dict(one)
    return any(held.get(node, 0) & mask for node, mask in other)


def _held_before(facts: Facts, job_id: int, row: int) -> Placed:
    """The GPUs of the job's last start before `row`."""
    starts = [at for _, kind, at in facts.story(job_id) if kind == Kind.START and at < row]
    return facts.placed(starts[-1]) if starts else ()


def _made_room(facts: Facts, job_id: int, row: int, placed: Placed) -> str:
    """Who left the GPUs that a start took, or what else happened at its instant."""
    events = facts.events
    ended: list[str] = []
    stopped: list[str] = []
    beside: list[str] = []
    for at in _at_once(facts, row):
        other, kind = int(events.job_id[at]), events.kind[at]
        if other == job_id or kind not in (Kind.STOP, Kind.FINISH):
            continue
        name = _job(facts, other)
        if _overlap(_held_before(facts, other, at), placed):
            (ended if kind == Kind.FINISH else stopped).append(name)
        elif kind == Kind.FINISH:
            beside.append(name)
    named = [f"{_list(ended)} ended"] if ended else []
    named += [f"{_list(stopped)} {'were' if len(stopped) > 1 else 'was'} stopped"] if stopped else []
    if named:
        return " and ".join(named)
    if float(events.time_s[row]) == float(facts.jobs["submit_time_s"][job_id]):
        return "at once, on free GPUs"
    return f"{_list(beside)} ended elsewhere" if beside else "on GPUs that were free"


def _took(facts: Facts, job_id: int, row: int, placed: Placed) -> str:
    """Who started on the GPUs that a stop freed; else who started at its instant."""
    events = facts.events
    takers: list[str] = []
    others: list[str] = []
    for at in _at_once(facts, row):
        other = int(events.job_id[at])
        if events.kind[at] == Kind.START and events.part[at] == 0 and other != job_id:
            (takers if _overlap(facts.placed(at), placed) else others).append(_job(facts, other))
    if takers:
        return f"{_list(takers)} took its GPUs"
    return f"{_list(others)} started" if others else ""


def _job(facts: Facts, job_id: int) -> str:
    return f"job {job_id} ({format_gpus(int(facts.jobs['gpus'][job_id]))})"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
