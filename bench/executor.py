"""What carrying decisions out cost in a finished run: `python bench/executor.py results/demo/latest/synergy-0.work`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from synergy_core.errors import InputError
from synergy_exec.commands.tensorboard import FirstStep, Overheads, overheads
from synergy_exec.controller.execution import STARTED_PARTS
from synergy_runs.files import atomic_file

GOAL_CPU_FRACTION = 0.01
GOAL_JOBS = 20
"""The controller's goal: at most so much of a core, with so many jobs at once."""


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
    lines = [f"{'seconds':42} {'times':>6} {'median':>9} {'p90':>9} {'max':>9}"]
    for name, fresh in (("first start of a job", True), ("restart", False)):
        starts = [each for each in found.starts if each.fresh is fresh]
        lines.append(_line(f"{name}: decision → first step", [each.total_s for each in starts]))
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
        return f"{name:42} {0:6}"
    numbers = (np.median(seconds), np.quantile(seconds, 0.9), np.max(seconds))
    return f"{name:42} {len(seconds):6} " + " ".join(f"{each:9.4f}" for each in numbers)


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
