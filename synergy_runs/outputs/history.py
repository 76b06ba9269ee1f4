"""What one job of a stored run went through: when it waited, on which GPUs and with which batch it ran, and why not on.

`python -m synergy_sim.explain RUN JOB` prints it. The report shows the same rows (`Held`) for every policy.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from synergy_core.errors import InputError, unknown
from synergy_core.scheduling.decisions.reasons import Stopped
from synergy_core.units import HOUR_S, format_duration, format_gpus, format_instant
from synergy_runs.outputs.facts import AS_LOGGED
from synergy_runs.outputs.metrics import NO_NAME
from synergy_runs.outputs.numbers import three_digits, unit_of_times
from synergy_runs.outputs.report.excerpt import boards_of, held_by_node
from synergy_runs.outputs.stored import StoredRun, follow_latest, read_run
from synergy_runs.traces.rows import epoch_s

WIDTH = 80
MAX_ROWS = 60
"""Maximum number of stretches that are printed; of more, the first and the last."""
MIN_DIGITS_OF_HOURS, MAX_DIGITS_OF_HOURS = 2, 5
EXPLAIN = "python -m synergy_sim.explain"


class Stretch(NamedTuple):
    """A time in which a job waited (gpus 0) or held the same GPUs.

    gpu_type: "" if unknown. nodes: as in the event log. first_batch, last_batch: see `Held`. reason: why it was stopped
    at the end; None if it was not.
    """

    start_s: float
    end_s: float
    gpus: int = 0
    gpu_type: str = ""
    nodes: tuple[int, ...] = ()
    first_batch: int = 0
    last_batch: int = 0
    reason: Stopped | None = None

    @property
    def lasted_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def words(self) -> str:
        """What the job had: `4 × v100 on 2 nodes, batch 128 → 256`; "" while it waited."""
        if not self.gpus:
            return ""
        on = f" on {len(self.nodes)} nodes" if len(self.nodes) > 1 else ""
        changed = f" → {self.last_batch}" if self.last_batch != self.first_batch else ""
        batch = f", batch {self.first_batch}{changed}" if self.first_batch else ""
        return f"{f'{self.gpus} × {self.gpu_type}' if self.gpu_type else format_gpus(self.gpus)}{on}{batch}"

    def as_dict(self) -> dict[str, Any]:
        """The stretch as plain values, for JSON."""
        return {**self._asdict(), "reason": self.reason and self.reason.name}


@dataclass(frozen=True)
class History:
    """A job under one policy, from its submission to its end.

    folder: as typed. label: the policy. is_decided: whether a policy of the simulator decided, which can be explained.
    is_carried: whether the job was running when the window started. finish_s: NaN if it did not finish. origin_s: see
    `format_instant`.
    """

    folder: Path
    label: str
    is_decided: bool
    job_id: int
    name: str
    gpus: int
    tenant: str
    submit_s: float
    is_carried: bool
    finish_s: float
    stretches: tuple[Stretch, ...]
    origin_s: float

    @property
    def runs(self) -> list[Stretch]:
        return [each for each in self.stretches if each.gpus]

    @property
    def waits(self) -> list[Stretch]:
        return [each for each in self.stretches if not each.gpus]

    @property
    def heading(self) -> str:
        """The job in one sentence."""
        tenant = f", tenant {self.tenant}" if self.tenant else ""
        began = "running when the window started," if self.is_carried else "submitted at"
        instant = format_instant(self.submit_s, self.origin_s)
        return f"job {self.job_id} ({self.name}): {format_gpus(self.gpus)}{tenant}, {began} {instant}"

    @property
    def summary(self) -> str:
        """JCT, wait and stops in one sentence."""
        stops, waited_s = sum(each.reason is not None for each in self.stretches), sum(w.lasted_s for w in self.waits)
        times = {0: "never stopped", 1: "stopped once"}.get(stops, f"stopped {stops} times")
        took = f"{'ended after' if self.is_carried else 'JCT'} {format_duration(self.finish_s - self.submit_s)}"
        ended = "not finished" if math.isnan(self.finish_s) else took
        return f"{self.label}: {ended}, waited {format_duration(waited_s)}, {times}"

    def worth_asking(self) -> Iterator[tuple[float, str]]:
        """(instant, what happened then) of the longest wait and of the first stop by which the job lost its GPUs."""
        if self.waits:
            longest = max(self.waits, key=lambda each: each.lasted_s)
            # In the middle, because a job that has just come or stopped waits for the next round in any case.
            middle_s = math.floor(longest.start_s + longest.lasted_s / 2)
            yield max(middle_s, longest.start_s), f"its longest wait, {format_duration(longest.lasted_s)}"
        stops = [(each.end_s, each.reason) for each in self.stretches if each.reason is not None]
        gone = (Stopped.OUTRANKED, Stopped.EVICTED, Stopped.CONTROLLER_ENDED)
        lost = [(end_s, reason) for end_s, reason in stops if reason in gone]
        for end_s, reason in (lost or stops)[:1]:
            yield math.ceil(end_s), f"its first stop: {reason.name.lower()}"
        if not (self.waits or stops):
            yield self.submit_s, "its start"

    def commands(self, instants: Sequence[tuple[float, str]]) -> list[str]:
        """Commands that explain the decisions at these instants; none if no policy of the simulator decided."""
        if not self.is_decided:
            return []
        typed = shlex.join([str(self.folder), self.name])
        return [f"{EXPLAIN} {typed} --at {at_s:.15g}s{f'    # {what}' if what else ''}" for at_s, what in instants]

    def text(self) -> str:
        """The stretches as a table, in hours since the window's start, and the instants that are worth asking for."""
        digits = self._digits()
        scale_s, unit = unit_of_times(each.lasted_s for each in self.stretches)
        rows = [("from, h", "to, h", f"lasted, {unit}", "")]
        for each in self.stretches:
            then = f"; then {each.reason.name.lower()}" if each.reason else ""
            at = [f"{time_s / HOUR_S:.{digits}f}" for time_s in each[:2]]
            rows.append((at[0], at[1], three_digits(each.lasted_s / scale_s), f"{each.words or 'waited'}{then}"))
        if (more := len(rows) - MAX_ROWS) > 1:
            half = MAX_ROWS // 2
            rows[half + 1 : -half] = [("…", "…", "…", f"{more - 1} more; --json FILE writes all")]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:3]
        table = ["  ".join([*map(str.rjust, row[:3], widths), row[3]]).rstrip() for row in rows]
        asked = self.commands(list(self.worth_asking()))
        below = ["", "worth asking:", *(f"  {each}" for each in asked)] if asked else []
        return "\n".join([_filled(self.heading), _filled(self.summary), "", *table, *below])

    def _digits(self) -> int:
        """Decimals of hours with which the ends of every stretch differ."""
        shortest_s = min((each.lasted_s for each in self.stretches if each.lasted_s > 0), default=HOUR_S)
        digits = math.ceil(-math.log10(shortest_s / HOUR_S))
        return min(max(digits, MIN_DIGITS_OF_HOURS), MAX_DIGITS_OF_HOURS)

    def at(self, time_s: float) -> Stretch | None:
        """The stretch from that instant on; None before the submission and after the end."""
        return next((each for each in self.stretches if each.start_s <= time_s < each.end_s), None)

    def as_dict(self) -> dict[str, Any]:
        """The history as plain values, for JSON."""
        names = ("job_id", "name", "gpus", "tenant", "submit_s", "finish_s", "origin_s")
        facts = {name: getattr(self, name) for name in names}
        finish_s = None if math.isnan(self.finish_s) else self.finish_s
        stretches = [each.as_dict() for each in self.stretches]
        return {"policy": self.label, **facts, "finish_s": finish_s, "stretches": stretches}


def history_of(folder: Path, job: str) -> History:
    """The history of a job, by name or number, in a policy's folder of a run. Raises InputError if there is none."""
    place = follow_latest(folder)
    if not (place / "summary.json").is_file():
        raise InputError(f"{place}: expected the folder of a finished run, with summary.json in it.")
    run = read_run(place)
    jobs = run.jobs("job_name", "gpus", "virtual_cluster", "submit_time_s", "carried", "finish_s")
    job_id = job_numbered(jobs["job_name"].tolist(), job)
    name, gpus, tenant, submit_s, carried, finish_s = (column[job_id] for column in jobs.values())
    decided = run.policy != AS_LOGGED and (run.record is None or "synergy_exec" not in run.record.command)
    return History(
        folder=folder,
        label=run.label,
        is_decided=decided,
        job_id=job_id,
        name=str(name),
        gpus=int(gpus),
        tenant="" if tenant == NO_NAME else str(tenant),
        submit_s=float(submit_s),
        is_carried=bool(carried),
        finish_s=float(finish_s),
        stretches=tuple(_stretches(run, job_id, float(submit_s))),
        origin_s=epoch_s(str(run.summary["trace_start"])),
    )


def job_numbered(names: Sequence[str], wanted: str) -> int:
    """The number of the job that has this name, else this number. Raises InputError if there is none."""
    if wanted in names:
        return names.index(wanted)
    if wanted.isdigit() and int(wanted) < len(names):
        return int(wanted)
    raise unknown("job", wanted, names, hint=f"A number from 0 to {len(names) - 1} is possible too.")


def _stretches(run: StoredRun, job_id: int, submit_s: float) -> Iterator[Stretch]:
    """The job's waits and runs in order; a wait of no length is none."""
    held = held_by_node(run.events(), run.training())
    held = held.take(held.job_id == job_id)
    types = [board["gpu_type"] for board in boards_of(run.summary) for _ in range(board["nodes"])]
    since_s = submit_s
    for start_s in np.unique(held.start_s):
        rows = np.flatnonzero(held.start_s == start_s).tolist()
        first, nodes = rows[0], tuple(held.node[rows].tolist())
        if start_s > since_s:
            yield Stretch(since_s, float(start_s))
        since_s = float(held.end_s[first])
        yield Stretch(
            float(start_s),
            since_s,
            int(held.gpus[first]),
            types[nodes[0]] if nodes[0] >= 0 else "",
            nodes if nodes[0] >= 0 else (),
            int(held.first_batch[first]),
            int(held.last_batch[first]),
            Stopped(code) if (code := int(held.reason[first])) else None,
        )


def parting_s(one: History, other: History) -> float | None:
    """The first instant at which two runs treat the job differently; None if there is none.

    They differ where one waits and the other runs, in the GPUs (number, type and nodes), in the batch with which they
    start if both are known, and where only one stops or moves the job.
    """
    changes = sorted({time_s for each in (one, other) for stretch in each.stretches for time_s in stretch[:2]})
    return next((time_s for time_s in changes if _differs(one, other, time_s)), None)


def _differs(one: History, other: History, time_s: float) -> bool:
    here, there = one.at(time_s), other.at(time_s)
    if here is None or there is None:
        return here is not there
    begun = [sum(each.start_s <= time_s for each in history.runs) for history in (one, other)]
    batches = {each.first_batch for each in (here, there)}
    alike = (here.gpus, here.gpu_type, len(here.nodes)) == (there.gpus, there.gpu_type, len(there.nodes))
    return not alike or begun[0] != begun[1] or (0 not in batches and len(batches) > 1)


def compared(one: History, other: History) -> str:
    """Says where two runs part over a job, and how. Raises InputError if the jobs are not the same."""
    for what in ("submit_s", "gpus", "origin_s"):
        if getattr(one, what) != getattr(other, what):
            values = [f"{getattr(each, what):g} in {each.folder}" for each in (one, other)]
            raise InputError(f"job {one.name}: {what} is {' and '.join(values)}; expected two runs of the same jobs.")
    labels = [each.label for each in (one, other)]
    if labels[0] == labels[1]:
        labels = [str(each.folder) for each in (one, other)]
    lines = [one.heading, *(each.summary for each in (one, other)), ""]
    time_s = parting_s(one, other)
    if time_s is None:
        return "\n".join(map(_filled, [*lines, "Both treat it alike from its submission to its end."]))
    instant = format_instant(time_s, one.origin_s)
    at_once = time_s == one.submit_s
    lines.append(
        f"They part at its submission, {instant}:" if at_once else f"They treat it alike until {instant}. Then:"
    )
    wide = max(map(len, labels))
    for label, history in zip(labels, (one, other), strict=True):
        stretch = history.at(time_s)
        does = "it has ended"
        if stretch is not None:
            until = format_instant(stretch.end_s)
            began = "" if stretch.start_s == time_s else f" since {format_instant(stretch.start_s)}"
            does = f"{f'runs on {stretch.words},' if stretch.gpus else 'waits'}{began} until {until}"
        lines.append(f"  {label:<{wide}}  {does}")
    asked = [each for history in (one, other) for each in history.commands([(math.ceil(time_s), "")])]
    return "\n".join([*map(_filled, lines), *(["", *asked] if asked else [])])


def _filled(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False)
