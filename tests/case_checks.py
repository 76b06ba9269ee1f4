"""What must hold of every random case (tests/cases.py), and the same case decided by plainer means."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from cases import Case
from hydra import compose, initialize_config_dir
from jobs import WALKING, facts
from naive import Naive, NaiveJob
from omegaconf import OmegaConf
from test_profiled_jobs import PROFILE

from synergy_core.policies import OrderingPolicy, get_policy
from synergy_runs.command_line import prepared
from synergy_runs.facts import Run
from synergy_runs.files import conf_folder
from synergy_runs.inputs import write_profile
from synergy_runs.invariants import check
from synergy_runs.settings import build
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.prepare import PreparedRun, prepared_runs
from synergy_sim.settings import SIMULATOR, Settings
from synergy_sim.simulate import simulate

SCANNED = ("fifo", "backfill", "easy", "sjf", "srtf", "las", "mlfq", "tiresias")
"""Orders that tests/naive.py knows."""
BY_COUNTS = ("spread", "even", "most_free")
"""Rules of placement under which any free GPUs do."""


def examine(case: Case) -> tuple[str, ...]:
    """Simulates the case; returns what it was compared with, "walk" and "scan" where these apply.

    Raises what the simulator raises, InvariantError, or AssertionError for other decisions than theirs.
    """
    made = prepared_case(case)
    done = simulated(made)
    check(done)
    compared = []
    if _walks(made):
        compared.append("walk")
        assert facts(done) == facts(simulated(made, make_scheduler=WALKING)), (
            "the queue and the walk over all jobs decide differently"
        )
    if _scans(made):
        compared.append("scan")
        assert facts(done) == scanned(made), "the queue and a naive scan decide differently"
    return tuple(compared)


def simulated(made: PreparedRun, **more: Any) -> Run:
    """One simulation of it."""
    return simulate(made.workload, made.cluster, made.policy, made.execution, truth=made.truth, seed=made.seed, **more)


def prepared_case(case: Case) -> PreparedRun:
    """What the command line would run."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "jobs.csv"
        log.write_text(case.log, encoding="utf-8")
        keys = {**case.keys, "trace.path": str(log)}
        if case.truth == "profiled":
            keys["truth.profile"] = str(Path(folder) / "profile.json")
            write_profile(PROFILE, Path(keys["truth.profile"]))
        (made,) = prepared_runs_of("file", keys)
    return made


def prepared_runs_of(trace: str, keys: Mapping[str, Any]) -> Iterator[PreparedRun]:
    """What `python -m synergy_sim +trace=…` would run with these keys."""
    values = _composed(trace, keys.get("testbed", "ideal")).copy()
    for key, value in keys.items():
        if key != "testbed":
            OmegaConf.update(values, key, value, merge=False, force_add=True)
    return prepared_runs(build(Settings, OmegaConf.to_container(values, resolve=True)))


@cache
def _composed(trace: str, testbed: str) -> Any:
    """The configuration; read it, change a copy."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return compose("config", overrides=prepared([f"+trace={trace}", f"testbed={testbed}"], SIMULATOR))


def _walks(made: PreparedRun) -> bool:
    """Whether the walk over all jobs must decide as the quicker queue does, event for event.

    Where counts decide, both let the same jobs run, but not on the same GPUs. That makes a difference where speeds
    depend on the nodes, and where GPUs are handed over later than it is decided.
    """
    cluster, execution = made.cluster, made.execution
    measured = () if made.truth is None else (each.costs for each in made.truth.profile.values())
    if not isinstance(made.policy, OrderingPolicy) or len(cluster.gpu_types) > 1 or cluster.borrowing:
        return False
    if cluster.scatter_after_s > 0:
        return True
    trained = np.isfinite(made.workload.work_scale).any()
    nodes_matter = trained and cluster.nodes > 1 and max(cluster.largest_nodes.values()) > 1
    return (
        not nodes_matter
        and not any(costs.exit_s for costs in (execution.costs, *measured))
        and (execution.round_s is None or execution.decide_fraction == 1)
    )


def _scans(made: PreparedRun) -> bool:
    """Whether tests/naive.py knows all that this case is about."""
    return (
        made.policy.name in SCANNED
        and not made.policy.parameters
        and made.policy.backfill == get_policy(made.policy.name).backfill
        and made.execution == ExecutionModel(Costs(restart_s=made.execution.costs.restart_s))
        and not np.isfinite(made.workload.work_scale).any()
        and len(made.cluster.gpu_types) == 1
        and not made.cluster.virtual_clusters
        and (made.cluster.nodes == 1 or (made.cluster.placement in BY_COUNTS))
    )


def scanned(made: PreparedRun) -> list[tuple[float, str, int]]:
    """The facts of a scan of the whole queue at every instant."""
    work = made.workload
    columns = (work.submit_time_s, work.gpus, work.duration_s, work.estimate_s)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    jobs = [NaiveJob(job_id, *row) for job_id, row in enumerate(rows)]
    return Naive(jobs, [made.cluster.gpus], made.policy.name, made.execution.costs.restart_s).run()
