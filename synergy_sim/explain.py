"""`python -m synergy_sim.explain RUN JOB`: why a job got what it got in a round, found by running up to it again.

A run is determined by its configuration, so nothing need be kept of each round: the same decisions are taken again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from synergy_core.allocator import Explanation
from synergy_core.errors import InputError, unknown
from synergy_core.policies import AllocationPolicy
from synergy_core.units import parse_duration_s
from synergy_runs.explained import explained as explanation_in
from synergy_runs.settings import build
from synergy_sim.engine import Simulation
from synergy_sim.prepare import prepared_runs
from synergy_sim.settings import Settings

BAD_INPUT = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one explanation; the exit status is 0, 2 for what the user can mend, or 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m synergy_sim.explain", description="Why a job got what it got in a round of a finished run."
    )
    parser.add_argument("run", type=Path, help="a run's folder, such as results/sia_sosp23/synergy-0")
    parser.add_argument("job", help="the job's name in its log, or its number")
    parser.add_argument(
        "--at", default=None, metavar="TIME", help="simulated time, such as 2h; default: its first round"
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write it there too")
    given = parser.parse_args(arguments)
    try:
        found, at_s = explained(given.run, given.job, given.at)
        print(f"round at {at_s:.0f} s of {given.run}\n{found.text()}")
        if given.json is not None:
            given.json.write_text(json.dumps({"time_s": at_s, **found.as_dict()}, indent=1) + "\n", encoding="utf-8")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def explained(folder: Path, name: str, at: str | None) -> tuple[Explanation, float]:
    """The explanation, and the round's time. Raises InputError where the run, the job or the round cannot be found."""
    from omegaconf import OmegaConf

    path = folder / "config.yaml"
    if not path.is_file():
        raise InputError(f"{folder}: expected the folder of a finished run, with config.yaml in it.")
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    values.pop("compared_with", None)
    settings = build(Settings, {**values, "policy": [values["policy"]], "seed": [values["seed"]]})
    (run,) = prepared_runs(settings)
    if not isinstance(run.policy, AllocationPolicy):
        raise InputError(f"policy {run.policy.name} orders jobs by a key; only policies that allocate are explained.")
    workload = run.workload
    job = _job_number(workload.job_name, name)
    submit_s = float(workload.submit_time_s[job])
    try:
        at_s = submit_s if at is None else parse_duration_s(at)
    except ValueError:
        raise InputError(f"--at {at}: expected a length of time such as 90s, 30m or 2h.") from None
    if at_s < submit_s:
        raise InputError(f"--at {at}: job {name} was only submitted at {submit_s:.0f} s.")
    simulation = Simulation(workload, run.cluster, run.policy, run.execution, run.truth)
    last = simulation.run_until(at_s, job)
    if last is None:
        raise InputError(f"job {name} was not active in any round at or after {at_s:.0f} s: it had ended.")
    label = f"job {workload.job_name[job]}"
    return explanation_in(last, run.cluster, run.policy.name, job, label), last[0].now_s


def _job_number(names: list[str], wanted: str) -> int:
    if wanted in names:
        return names.index(wanted)
    if wanted.isdigit() and int(wanted) < len(names):
        return int(wanted)
    raise unknown("job", wanted, names, hint=f"Or a number from 0 to {len(names) - 1}.")


if __name__ == "__main__":
    sys.exit(main())
