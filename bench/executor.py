"""What carrying decisions out cost in a finished run: `python bench/executor.py results/demo/latest/synergy-0.work`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from synergy_core.errors import InputError
from synergy_exec.controller.execution import STARTED_PARTS
from synergy_exec.controller.journal import Fact, Journal, RunRow, Timing, open_journal
from synergy_runs.facts import Kind
from synergy_runs.files import atomic_file

GOAL_CPU_FRACTION = 0.01
GOAL_JOBS = 20
"""The controller's goal: at most so much of a core, with so many jobs at once."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """A run from the decision to its first step.

    fresh: the first of its job. waited_s: until it was launched, which is when the slots were free. told_s: of the
    first step's `total_s`, what launch, build, load and first step (`parts`) do not account for: messages on their way.
    """

    run: int
    fresh: bool
    total_s: float
    waited_s: float
    parts: dict[str, float]
    told_s: float


@dataclass(frozen=True, slots=True)
class Overheads:
    """What carrying out decisions cost in one run of a trace.

    freed_s: from the decision that stops a run until its slots are free, saving included. saved_s: how long saving
    held training up. decided_s: computing a decision. clock_s: what the controller's clock went through.
    cpu_s: CPU of the controller's process, None while no results are written. resumed: a later controller went on.
    """

    jobs: int
    most_at_once: int
    starts: tuple[FirstStep, ...]
    freed_s: tuple[float, ...]
    saved_s: tuple[float, ...]
    decided_s: tuple[float, ...]
    clock_s: float
    cpu_s: float | None
    resumed: bool

    @property
    def cpu_fraction(self) -> float | None:
        """The share of one core that the controller used; None where that is not known, as of a resumed run."""
        if self.cpu_s is None or self.resumed or self.clock_s <= 0:
            return None
        return self.cpu_s / self.clock_s


def overheads(work: Path) -> Overheads:
    """The overheads of the run in `<policy>-<seed>.work`, whose results are beside it. Raises InputError."""
    journal = open_journal(work)
    try:
        return _overheads(journal, work)
    finally:
        journal.close()


def _overheads(journal: Journal, work: Path) -> Overheads:
    runs, facts, timings = journal.runs(), journal.facts(), journal.timings()
    spans = spans_of(runs, facts)
    return Overheads(
        jobs=len(journal.jobs()),
        most_at_once=_most_at_once(facts),
        starts=tuple(_starts(runs, spans, timings)),
        freed_s=tuple(_freed(spans, timings)),
        saved_s=tuple(each.parts["save_s"] for each in timings if each.kind == "saved"),
        decided_s=tuple(journal.decisions().decisions().decision_s.tolist()),
        clock_s=journal.last_s(),
        cpu_s=_controller_cpu_s(work.with_suffix("")),
        resumed=any(run.reason == "the controller was restarted" for run in runs),
    )


def spans_of(runs: Iterable[RunRow], facts: Iterable[Fact]) -> dict[int, tuple[float, float]]:
    """When each launched run was launched and when it had left, by its number; infinite while it had not.

    A job's runs are launched one after the other, so its n-th start and its n-th end are the n-th launched run's.
    """
    launched: dict[int, list[float]] = {}
    left: dict[int, list[float]] = {}
    for fact in facts:
        if fact.kind == Kind.START:
            launched.setdefault(fact.job, []).append(fact.time_s)
        elif fact.kind in (Kind.STOP, Kind.FINISH):
            left.setdefault(fact.job, []).append(fact.time_s)
    spans: dict[int, tuple[float, float]] = {}
    turn: dict[int, int] = {}
    for run in runs:
        if not run.launched:
            continue
        at = turn[run.job] = turn.get(run.job, -1) + 1
        ends = left.get(run.job, [])
        spans[run.run] = launched[run.job][at], ends[at] if at < len(ends) else float("inf")
    return spans


def _starts(
    runs: Iterable[RunRow], spans: dict[int, tuple[float, float]], timings: Iterable[Timing]
) -> Iterable[FirstStep]:
    told = {each.run: each for each in timings if each.kind == "started"}
    seen: set[int] = set()
    for run in runs:
        fresh = run.job not in seen
        if run.run in spans:
            seen.add(run.job)
        if run.run not in told or run.run not in spans:
            continue
        first = told[run.run]
        launched_s, _ = spans[run.run]
        parts = {name: first.parts[name] for name in STARTED_PARTS}
        total_s, waited_s = first.time_s - run.decided_s, launched_s - run.decided_s
        yield FirstStep(run.run, fresh, total_s, waited_s, parts, total_s - waited_s - sum(parts.values()))


def _freed(spans: dict[int, tuple[float, float]], timings: Iterable[Timing]) -> Iterable[float]:
    told: dict[int, float] = {}
    for each in timings:
        if each.kind == "stop":
            told.setdefault(each.run, each.time_s)
    for run, told_s in told.items():
        # A run that was told to leave before its launch held no slots.
        if run in spans:
            yield spans[run][1] - told_s


def _most_at_once(facts: Iterable[Fact]) -> int:
    there, most = 0, 0
    for fact in facts:
        there += {int(Kind.SUBMIT): 1, int(Kind.FINISH): -1}.get(fact.kind, 0)
        most = max(most, there)
    return most


def _controller_cpu_s(results: Path) -> float | None:
    path = results / "summary.json"
    if not path.is_file():
        return None
    return float(json.loads(path.read_text(encoding="utf-8"))["simulation_cpu_s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, metavar="RUN.work")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write every single time, too")
    given = parser.parse_args()
    try:
        found = overheads(given.work)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(table(found)))
    if given.json is not None:
        values = {**dataclasses.asdict(found), "cpu_fraction": found.cpu_fraction}
        with atomic_file(given.json) as partial:
            partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return 0


def table(found: Overheads) -> list[str]:
    """Everything with count, median, p90 and maximum, and the controller's CPU against its goal."""
    lines = [f"{'seconds':49} {'times':>6} {'median':>9} {'p90':>9} {'max':>9}"]
    for name, fresh in (("first start of a job", True), ("restart", False)):
        starts = [each for each in found.starts if each.fresh is fresh]
        begun = [each.total_s - each.parts["first_step_s"] for each in starts]
        lines.append(_line(f"{name}: decision → first step begun", begun))
        lines.append(_line(f"{name}: decision → first step done", [each.total_s for each in starts]))
        lines += _parts(starts)
    lines += [
        _line("stop decided → slots free", found.freed_s),
        _line("save, as it held training up", found.saved_s),
        _line("computing a decision", found.decided_s),
    ]
    return [*lines, _controller(found)]


def _parts(starts: Sequence[FirstStep]) -> list[str]:
    if not starts:
        return []
    rows = [_line("  waiting for the slots", [each.waited_s for each in starts])]
    rows += [_line(f"  {name[:-2].replace('_', ' ')}", [each.parts[name] for each in starts]) for name in STARTED_PARTS]
    return [*rows, _line("  messages, and what else", [each.told_s for each in starts])]


def _line(name: str, seconds: Sequence[float]) -> str:
    if not seconds:
        return f"{name:49} {0:6}"
    numbers = (np.median(seconds), np.quantile(seconds, 0.9), np.max(seconds))
    return f"{name:49} {len(seconds):6} " + " ".join(f"{each:9.4f}" for each in numbers)


def _controller(found: Overheads) -> str:
    at_once = f"{found.jobs} jobs, at most {found.most_at_once} at once"
    if found.cpu_fraction is None:
        why = "an earlier controller's is not known" if found.resumed else "there is no summary.json beside it"
        return f"controller: CPU share not known ({why}); {at_once}"
    goal = f"goal < {GOAL_CPU_FRACTION:.0%} with {GOAL_JOBS} jobs"
    judged = found.most_at_once >= GOAL_JOBS or found.cpu_fraction >= GOAL_CPU_FRACTION
    verdict = ("met" if found.cpu_fraction < GOAL_CPU_FRACTION else "missed") if judged else "not judged: fewer jobs"
    return (
        f"controller: {found.cpu_s:.2f} s CPU ÷ {found.clock_s:.1f} s = {found.cpu_fraction:.2%} of a core; "
        f"{at_once}; {goal}: {verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
