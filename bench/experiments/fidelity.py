"""Runs of the executor against their simulation, and what carrying decisions out cost in them: docs/fidelity.md."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from runner.experiment import ROOT, Experiment, Result, Results, measurement
from runner.tables import met, number, table

from synergy_runs.stored import find_runs

POLICIES = ("fifo", "sia+plans", "synergy")
MODELS = ("cnn", "gpt", "mlp", "texts")
"""Of the demo."""
SLOTS, PROFILE_S = 4, 150.0
MAX_MEAN_ERROR, MAX_JOB_ERROR = 0.05, 0.10
"""The goals."""


def compare(names: Sequence[str], models: Sequence[str], slots: int, profile_s: float) -> Result:
    """The demo profiled, run for real under each policy, profiled again, and simulated with either profile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiles = folder / "before.json", folder / "after.json"
        common = ("+trace=demo", f"policy=[{','.join(names)}]", "figures=false")
        for profile in profiles:
            measured = ("--seconds", 1.0, f"backend.options.slots={slots}", f"profile_s={profile_s}")
            _type("synergy_exec", "profile", *models, "--out", profile, *measured)
            if profile == profiles[0]:
                _type("synergy_exec", *common, f"profile={profile}", f"results_dir={folder / 'real'}")
        testbed = ("testbed=executor", "cluster.gpu_type=cpu", "same_information=false")
        for profile in profiles:
            into = f"results_dir={folder / profile.stem}"
            _type("synergy_sim", *common, *testbed, f"truth.profile={profile}", into)
        work = folder / "real" / "demo" / "latest" / f"{names[-1]}-0.work"
        return {
            "policies": {policy: _compared(folder, policy) for policy in names},
            "overheads": overheads(work),
            "losses": _verified(work, folder / "verify.json"),
        }


def _type(module: str, *arguments: object, accepts: Iterable[int] = (0,)) -> None:
    """Runs `python -m module …` as a person would. Raises CalledProcessError."""
    done = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode not in accepts:
        done.check_returncode()


def _compared(folder: Path, policy: str) -> dict[str, Any]:
    """The real run of a policy, and its simulations with the profiles before and after."""
    real, *simulated = (
        next(run for run in find_runs(folder / each) if run.policy == policy) for each in ("real", "before", "after")
    )
    return {
        "real_jct_s": real.jobs("jct_s")["jct_s"].tolist(),
        "predicted_jct_s": [each.jobs("jct_s")["jct_s"].tolist() for each in simulated],
        "makespan_error": mean(each.summary["makespan_s"] for each in simulated) / real.summary["makespan_s"] - 1,
        "restarts": int(real.jobs("restarts")["restarts"].sum()),
        "failed": int(real.summary["jobs_failed"]),
        "controller_cores": real.summary["simulation_cpu_s"] / real.summary["makespan_s"],
    }


def _verified(work: Path, out: Path) -> list[dict[str, Any]]:
    _type("synergy_exec", "verify", work, "--json", out, accepts=(0, 1))
    found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["jobs"]
    return found


def overheads(work: Path) -> dict[str, list[float]]:
    """Seconds that carrying decisions out took in a run, each time, by what it was. Raises InputError."""
    from synergy_exec.controller.execution import STARTED_PARTS
    from synergy_exec.controller.journal import open_journal

    with contextlib.closing(open_journal(work)) as journal:
        runs, timings = journal.runs(), journal.timings()
        spans = _spans(runs, journal.facts())
        decisions_s = journal.decisions().decisions().decision_s.tolist()
    started = {each.run: each for each in timings if each.kind == "started"}
    found: dict[str, list[float]] = defaultdict(list)
    seen: set[int] = set()
    for run in runs:
        if run.run not in spans:
            continue
        kind = "restart" if run.job in seen else "first start"
        seen.add(run.job)
        if run.run in started:
            first, (launched_s, _) = started[run.run], spans[run.run]
            waited_s, total_s = launched_s - run.decided_s, first.time_s - run.decided_s
            parts = {name: first.parts[name] for name in STARTED_PARTS}
            found[f"{kind}: decision to end of first step"].append(total_s)
            found[f"{kind}: waiting for the slots"].append(waited_s)
            for name, seconds in parts.items():
                found[f"{kind}: {name.removesuffix('_s').replace('_', ' ')}"].append(seconds)
            found[f"{kind}: messages and all else"].append(total_s - waited_s - sum(parts.values()))
    stops = {each.run: each.time_s for each in reversed(timings) if each.kind == "stop"}
    # A run that was stopped before its launch held no slots.
    found["stop decided until slots are free"] = [spans[run][1] - at_s for run, at_s in stops.items() if run in spans]
    found["saving, as it delayed training"] = [each.parts["save_s"] for each in timings if each.kind == "saved"]
    return found | {"computing a decision": decisions_s}


def _spans(runs: Iterable[Any], facts: Iterable[Any]) -> dict[int, tuple[float, float]]:
    """When each launched run was launched and when it had left, by its number; infinite while it had not.

    A job's runs are launched one after the other, so its n-th start and its n-th end belong to its n-th launched run.
    """
    from synergy_runs.facts import Kind

    starts, ends = defaultdict(list), defaultdict(list)
    for fact in facts:
        if fact.kind == Kind.START:
            starts[fact.job].append(fact.time_s)
        elif fact.kind in (Kind.STOP, Kind.FINISH):
            ends[fact.job].append(fact.time_s)
    left = {job: iter([*times_s, math.inf]) for job, times_s in ends.items()}
    began = {job: iter(times_s) for job, times_s in starts.items()}
    launched = (run for run in runs if run.launched)
    return {run.run: (next(began[run.job]), next(left.get(run.job, iter(())), math.inf)) for run in launched}


TASK = measurement(
    compare, policies=POLICIES, is_timed=True, names=POLICIES, models=MODELS, slots=SLOTS, profile_s=PROFILE_S
)


def _tables(results: Results) -> dict[str, str]:
    found = results[TASK]
    return {
        "errors": _errors_table(found["policies"]),
        "pairs": _pairs_table(found["policies"]),
        "overheads": _overheads_table(found["overheads"]),
        "losses": _losses_table(found["losses"]),
    }


def _goal(error: float, limit: float, shown: str) -> str:
    return f"{shown} ({met(abs(error) <= limit)})"


def _errors_table(policies: dict[str, Any]) -> str:
    from scipy.stats import kendalltau

    rows = []
    for policy, each in policies.items():
        real_s, both_s = np.array(each["real_jct_s"]), np.array(each["predicted_jct_s"])
        predicted_s, makespan_error = both_s.mean(axis=0), each["makespan_error"]
        mean_error, errors = predicted_s.mean() / real_s.mean() - 1, predicted_s / real_s - 1
        median = float(np.median(np.abs(errors)))
        rows.append([
            policy,
            f"{real_s.mean():.1f} s",
            f"{both_s[0].mean():.1f} s, {both_s[1].mean():.1f} s",
            *(_goal(error, MAX_MEAN_ERROR, f"{error:+.1%}") for error in (mean_error, makespan_error)),
            _goal(median, MAX_JOB_ERROR, f"{median:.1%}"),
            f"{np.quantile(np.abs(errors), 0.9):.1%}",
            f"{np.median(errors):+.1%}",
            number(float(kendalltau(predicted_s, real_s).statistic)),
            str(each["restarts"]),
            str(each["failed"]),
            f"{each['controller_cores']:.2%} of a core",
        ])  # fmt: skip
    header = ("policy", "mean JCT, real", "predicted", "error (goal: 5 %)", "makespan (5 %)",
              "per job, median of absolute (10 %)", "p90", "signed median", "Kendall τ", "restarts, real",
              "failed", "controller's CPU")  # fmt: skip
    return table(header, rows)


def _pairs_table(policies: dict[str, Any]) -> str:
    rows = []
    for a, b in combinations(policies, 2):
        real, predicted = (
            np.mean(policies[a][of]) / np.mean(policies[b][of]) for of in ("real_jct_s", "predicted_jct_s")
        )
        rows.append([f"{a} ÷ {b}", number(real, 3), number(predicted, 3), f"{predicted / real - 1:+.1%}"])
    return table(("pair", "real ratio of mean JCT", "predicted", "error"), rows)


def _overheads_table(found: dict[str, list[float]]) -> str:
    rows = []
    for what, seconds in found.items():
        quantiles = np.quantile(seconds, (0.5, 0.9, 1.0)).tolist() if seconds else [math.nan] * 3
        rows.append([what, str(len(seconds)), *(number(each, 4) for each in quantiles)])
    return table(("seconds", "times", "median", "p90", "max"), rows)


def _losses_table(jobs: list[dict[str, Any]]) -> str:
    rows = []
    for each in jobs:
        verdict = f"{each['verdict']} ({each['remark']})" if each["remark"] else each["verdict"]
        apart = (f"{each[name]:.2g}".replace("nan", "–") for name in ("largest", "after_changes", "weights"))
        rows.append([each["job"], each["optimizer"], " → ".join(each["plans"]), verdict, str(each["steps"]), *apart])
    header = ("job", "optimizer", "plans", "verdict", "steps", "loss", "after changes", "weights")
    return table(header, rows, 4)


FIDELITY = Experiment(lambda: [TASK], _tables)
