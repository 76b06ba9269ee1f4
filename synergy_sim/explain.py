"""`python -m synergy_sim.explain RUN JOB`: why a job got what it got at an instant of a finished run.

Policies that order jobs are answered for from the stored run alone; for those that share out CPUs and memory, jobs are
made once more too, since what they could use is not stored. Policies that solve a problem each round are asked again: a
run is determined by its configuration, so its decisions are taken once more, up to the one in question.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from synergy_core.allocator import Explanation
from synergy_core.catalog.sheets import gpu_type_named
from synergy_core.cluster import Share
from synergy_core.errors import InputError, unknown
from synergy_core.exits import run
from synergy_core.jobs.spec import JobSpec
from synergy_core.parser import Parser
from synergy_core.policies import Policy, SharingPolicy
from synergy_core.units import format_instant, parse_duration_s
from synergy_runs.as_logged import AS_LOGGED
from synergy_runs.asked import policies_of
from synergy_runs.explained import explained as explanation_in
from synergy_runs.machines import cluster_of
from synergy_runs.settings import NodeTypeSettings, build
from synergy_runs.stored import StoredRun, followed, read_run
from synergy_runs.traces.times import epoch_s
from synergy_sim.answer import Answer, answer
from synergy_sim.facts import COLUMNS, Facts
from synergy_sim.hardware import speeds
from synergy_sim.jobs import Jobs
from synergy_sim.prepare import execution_of, prepared_runs
from synergy_sim.settings import Settings
from synergy_sim.simulate import Simulation

BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one explanation; the exit status is 0 or 2 for what the user can mend."""
    parser = Parser(
        prog="python -m synergy_sim.explain", description="Why a job got what it got at an instant of a finished run."
    )
    parser.add_argument("run", type=Path, help="a policy's folder of a run, such as results/philly/latest/fifo-0")
    parser.add_argument("job", help="the job's name in its log, or its number")
    parser.add_argument(
        "--at", default=None, metavar="TIME", help="simulated time, such as 2h; default: when it was submitted"
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write it there too")
    given = parser.parse_args(arguments)
    try:
        found, at_s, origin_s = explained(followed(given.run), given.job, given.at)
        if isinstance(found, Explanation):
            print(f"round at {format_instant(at_s, origin_s)} of {given.run}")
        print(found.text())
        if given.json is not None:
            given.json.write_text(json.dumps({"time_s": at_s, **found.as_dict()}, indent=1) + "\n", encoding="utf-8")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        raise  # its reader has left: `exits.run` ends it
    except OSError as error:
        print(f"error: {given.json}: {error.strerror}.", file=sys.stderr)
        return BAD_INPUT
    return 0


def explained(folder: Path, name: str, at: str | None) -> tuple[Explanation | Answer, float, float]:
    """The explanation, its instant, and the seconds from 1970 to simulated time 0.

    Raises InputError where the run, the job or the instant cannot be found.
    """
    settings = settings_of(folder)
    if settings.policy == [AS_LOGGED]:
        raise InputError(
            f"{folder}: the log's own starts, which nobody here decided. Name the folder of a policy's run."
        )
    (policy,) = policies_of(settings.policy, settings.parameters, settings.information, settings.input).values()
    if policy.reads_goodput:
        return _asked_again(settings, name, at)
    facts = facts_of(read_run(folder), settings, policy)
    job = _job_number(facts.jobs["job_name"].tolist(), name)
    at_s = _instant_s(at, name, float(facts.jobs["submit_time_s"][job]))
    return answer(facts, job, at_s), at_s, facts.origin_s


def settings_of(folder: Path) -> Settings:
    """The configuration of the run in that folder. Raises InputError where there is none."""
    import yaml  # type: ignore[import-untyped]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path = folder / "config.yaml"
    if not path.is_file():
        raise InputError(f"{folder}: expected the folder of a finished run, with config.yaml in it.")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException):
        raise InputError(f"{path}: is no configuration of a run. Run that policy again.") from None
    if not isinstance(values, dict) or not {"policy", "seed"} <= set(values):
        raise InputError(f"{path}: is no configuration of a run. Run that policy again.")
    values.pop("compared_with", None)
    return build(Settings, {**values, "policy": [values["policy"]], "seed": [values["seed"]]})


def facts_of(run: StoredRun, settings: Settings, policy: Policy) -> Facts:
    """What was stored of the run. Raises InputError where another version left out what is needed."""
    if "quotas" not in run.summary:
        raise InputError(f"{run.folder}: another version wrote it, without its tenants' quotas. Run that policy again.")
    wanted = dataclasses.replace(settings.cluster, virtual_clusters=run.summary["quotas"] or None)
    if wanted.node_types is None:  # the nodes that there were, whatever the log would show today
        kept = ("gpu_type", "nodes", "gpus_per_node")
        there = [NodeTypeSettings(**{key: each[key] for key in kept}) for each in run.summary["node_types"]]
        wanted = dataclasses.replace(wanted, node_types=there, add_nodes=0)
    execution = execution_of(settings)
    cluster, jobs = cluster_of(wanted, settings.trace, None), run.jobs(*COLUMNS)
    timed_on = run.summary.get("run_times_on", settings.trace.gpu_type)
    return Facts(
        policy=policy.of_records(),
        cluster=cluster,
        jobs=jobs,
        events=run.events(),
        decided_s=run.decisions("time_s")["time_s"],
        costs_of=execution.costs_of,
        event_driven=execution.round_s is None and not policy.in_rounds,
        shares=run.shares(),
        submissions=_submissions(run, settings) if isinstance(policy, SharingPolicy) else (),
        speeds=speeds(cluster, np.unique(jobs["gpus"]).tolist(), timed_on and gpu_type_named(timed_on)),
        origin_s=epoch_s(str(run.summary["trace_start"])),
    )


def _submissions(run: StoredRun, settings: Settings) -> list[tuple[JobSpec | None, Share | None]]:
    """What each job was submitted with beside its GPUs. Raises InputError where other jobs are made than the run's.

    Which rows become training jobs hangs on all policies of the command that made the run.
    """
    together = dataclasses.replace(settings, policy=run.asked_policies())
    made = next(each for each in prepared_runs(together) if each.asked == settings.policy[0])
    workload, stored = made.workload, run.summary
    for then, now in (
        (stored["trace_sha256"], workload.sha256),
        (stored["jobs"] + stored["jobs_carried_in"], len(workload)),
        (list(stored["trace_notes"]), list(workload.notes)),
    ):
        if then != now:
            raise InputError(
                f"{run.folder}: its jobs cannot be made once more: {then} then, {now} now. Set SYNERGY_DATA as it was, "
                "or run that policy again."
            )
    jobs = Jobs(workload, made.cluster, made.execution, made.truth, tunes_batch=False)
    return [(job.spec, job.requested) for job in jobs.each()]


def _instant_s(at: str | None, name: str, submit_s: float) -> float:
    try:
        at_s = submit_s if at is None else parse_duration_s(at)
    except ValueError:
        raise InputError(f"--at {at}: expected a length of time such as 90s, 30m or 2h.") from None
    if at_s < submit_s:
        raise InputError(f"--at {at}: job {name} was only submitted at {submit_s:.0f} s.")
    return at_s


def _asked_again(settings: Settings, name: str, at: str | None) -> tuple[Explanation, float, float]:
    """The policy's own account of the round, which it is asked for once more."""
    (run,) = prepared_runs(settings)
    workload = run.workload
    job = _job_number(workload.job_name, name)
    at_s = _instant_s(at, name, float(workload.submit_time_s[job]))
    simulation = Simulation(workload, run.cluster, run.policy, run.execution, run.truth)
    last = simulation.run_until(at_s, job)
    if last is None:
        raise InputError(f"job {name} was not active in any round at or after {at_s:.0f} s: it had ended.")
    label = f"job {workload.job_name[job]}"
    return explanation_in(last, run.cluster, run.policy.name, job, label), last[0].now_s, workload.origin_s


def _job_number(names: list[str], wanted: str) -> int:
    if wanted in names:
        return names.index(wanted)
    if wanted.isdigit() and int(wanted) < len(names):
        return int(wanted)
    raise unknown("job", wanted, names, hint=f"Or a number from 0 to {len(names) - 1}.")


if __name__ == "__main__":
    run("error", main, interrupted="nothing was changed.")
