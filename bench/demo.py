"""What the executor's demo shows: `python bench/demo.py results/demo/latest/synergy-0.work` reads a finished run of it.

Which kinds of plan its jobs trained under (DDP, FSDP2, TP, PP; a plan can be of several), how often a job went from one
kind to another, and how far its losses lie from those of one process without a break (`verify`). Exit code 1 where a
goal is missed: each kind runs, at least five changes between kinds, at least 20 jobs, all done, losses that go on.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.controller.journal import open_journal

KINDS = ("DDP", "FSDP2", "TP", "PP")
FEWEST_JOBS, FEWEST_CHANGES = 20, 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="RUN.work")
    parser.add_argument("--no-losses", action="store_true", help="train nothing again")
    given = parser.parse_args()
    try:
        journal = open_journal(given.work)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    names = {job.job: (job.name, job.state) for job in journal.jobs()}
    plans: dict[int, list[frozenset[str]]] = {job: [] for job in names}
    started = {each.run for each in journal.timings() if each.kind == "started"}
    for run in journal.runs():
        if run.run in started:
            plans[run.job].append(kinds(run.plan))
    journal.close()
    for job, (name, state) in names.items():
        print(f"{name:10} {state:9} {' → '.join('+'.join(sorted(each)) or 'alone' for each in plans[job])}")
    found = missed(names, plans)
    if (
        not given.no_losses
        and subprocess.run([sys.executable, Path(__file__).with_name("verify.py"), given.work]).returncode
    ):
        found.append("losses do not go on: see above")
    print(*(found or ["every goal is met"]), sep="\n")
    return 1 if found else 0


def missed(names: Mapping[int, tuple[str, str]], plans: Mapping[int, Sequence[frozenset[str]]]) -> list[str]:
    """Prints how much of each kind there was; the goals that are missed.

    names: by job, its name and its state. plans: by job, the kinds of each of its runs that trained.
    """
    runs = Counter(kind for each in plans.values() for plan in each for kind in plan)
    jobs = Counter(kind for each in plans.values() for kind in frozenset().union(*each))
    moved = changes(plans)
    print(", ".join(f"{kind}: {runs[kind]} runs of {jobs[kind]} jobs" for kind in KINDS))
    print(f"changes between kinds: {sum(moved.values())}")
    print(*(f"  {count} × {change}" for change, count in moved.most_common()), sep="\n")
    found = [f"nothing trained under {kind}" for kind in KINDS if not runs[kind]]
    if sum(moved.values()) < FEWEST_CHANGES:
        found.append(f"{sum(moved.values())} changes between kinds, expected {FEWEST_CHANGES}")
    if len(names) < FEWEST_JOBS:
        found.append(f"{len(names)} jobs, expected {FEWEST_JOBS}")
    return found + [f"{name} is {state}" for name, state in names.values() if state != "done"]


def kinds(plan: Mapping[str, Any]) -> frozenset[str]:
    """What a plan is made of, beside one slot alone."""
    parts = {
        "DDP": plan["data"] > 1 and not plan["zero"],
        "FSDP2": plan["data"] > 1 and plan["zero"],
        "TP": plan["tensor"] > 1,
        "PP": plan["pipeline"] > 1,
    }
    return frozenset(kind for kind, there in parts.items() if there)


def changes(plans: Mapping[int, Sequence[frozenset[str]]]) -> Counter[str]:
    """How often jobs went from some kinds to others; a slot alone is none, and no change."""
    found: Counter[str] = Counter()
    for each in plans.values():
        split = [plan for plan in each if plan]
        for before, after in itertools.pairwise(split):
            if before != after:
                found[f"{'+'.join(sorted(before))} → {'+'.join(sorted(after))}"] += 1
    return found


if __name__ == "__main__":
    sys.exit(main())
