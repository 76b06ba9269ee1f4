"""Compares runs of the executor with simulations, and measures delays of carrying out decisions: docs/fidelity.md."""

from __future__ import annotations

import contextlib
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
from runner.tables import each, met, number, percent, table

from synergy_exec.controller.execution import STARTED_PARTS
from synergy_exec.controller.journal import open_journal
from synergy_runs.outputs.facts import Kind
from synergy_runs.outputs.stored import find_runs

POLICIES = ("fifo", "sia+plans", "synergy")
MODELS = ("cnn", "gpt", "mlp", "texts")
"""The models of the demo."""
SLOTS, PROFILE_S = 4, 150.0
MAX_MEAN_ERROR, MAX_JOB_ERROR = 0.05, 0.10
"""Goals for the errors of predictions."""


def both_ways(names: Sequence[str], models: Sequence[str], slots: int, profile_s: float) -> Result:
    """Profiles the demo before and after real runs under each policy, and simulates these with either profile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiles = folder / "before.json", folder / "after.json"
        common = ("+trace=demo", f"policy=[{','.join(names)}]", "figures=false")
        for profile in profiles:
            measured = ("--seconds", 1.0, f"backend.options.slots={slots}", f"profile_s={profile_s}")
            _type("synergy_exec", "profile", *models, "--out", profile, *measured)
            if profile == profiles[0]:
                _type("synergy_exec", *common, f"profile={profile}", f"results_dir={folder / 'real'}")
        testbed = ("testbed=executor", "cluster.gpu_type=cpu", "cluster.max_wait=2", "same_information=false")
        for profile in profiles:
            into = f"results_dir={folder / profile.stem}"
            _type("synergy_sim", *common, *testbed, f"truth.profile={profile}", into)
        work = folder / "real" / "demo" / "latest" / f"{names[-1]}-0.work"
        return {
            "policies": {policy: _compared(folder, policy) for policy in names},
            "overheads": overheads(work),
            "verified": _type("synergy_exec", "verify", work, accepts=(0, 1)),
        }


def _type(module: str, *arguments: object, accepts: Sequence[int] = (0,)) -> str:
    """Runs `python -m module …` as a person would, and returns what it prints. Raises CalledProcessError."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode not in accepts:
        done.check_returncode()
    return done.stdout


def _compared(folder: Path, policy: str) -> dict[str, Any]:
    """Compares the real run of a policy with its simulations, which have the profiles before and after it."""
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


def overheads(work: Path) -> dict[str, list[float]]:
    """Collects the seconds that it took to carry out decisions of a run, by kind of delay. Raises InputError."""
    with contextlib.closing(open_journal(work)) as journal:
        runs, timings = journal.runs(), journal.timings()
        spans = _spans(runs, journal.facts())
        decisions_s = journal.decisions().decisions().decision_s.tolist()
    started = {each.run: each for each in timings if each.kind == "started"}
    found: dict[str, list[float]] = defaultdict(list)
    seen: set[int] = set()
    for run in (run for run in runs if run.run in spans):
        kind = "restart" if run.job in seen else "first start"
        seen.add(run.job)
        if run.run in started:
            first, total_s = started[run.run], started[run.run].time_s - run.decided_s
            parts_s = {"waiting for the slots": spans[run.run][0] - run.decided_s}
            parts_s |= {name.removesuffix("_s").replace("_", " "): first.parts[name] for name in STARTED_PARTS}
            parts_s["messages and all else"] = total_s - sum(parts_s.values())
            for name, seconds in {"decision to end of first step": total_s, **parts_s}.items():
                found[f"{kind}: {name}"].append(seconds)
    stops = {each.run: each.time_s for each in reversed(timings) if each.kind == "stop"}
    # A run that was stopped before its launch held no slots.
    found["stop decided until slots are free"] = [spans[run][1] - at_s for run, at_s in stops.items() if run in spans]
    found["saving, as it delayed training"] = [each.parts["save_s"] for each in timings if each.kind == "saved"]
    return found | {"computing a decision": decisions_s}


def _spans(runs: Iterable[Any], facts: Iterable[Any]) -> dict[int, tuple[float, float]]:
    """Finds when each launched run was launched and when it had left (infinite if it had not), by its number."""
    at_s: dict[int, list[float]] = defaultdict(list)  # by job; its runs are launched and leave one after the other
    for fact in facts:
        if fact.kind in (Kind.START, Kind.STOP, Kind.FINISH):
            at_s[fact.job].append(fact.time_s)
    spans = {}
    for run in (run for run in runs if run.launched):
        launched_s, left_s, *at_s[run.job] = *at_s[run.job], math.inf
        spans[run.run] = launched_s, left_s
    return spans


TASK = measurement(
    both_ways,
    policies=POLICIES,
    is_timed=True,
    names=POLICIES,
    models=MODELS,
    slots=SLOTS,
    profile_s=PROFILE_S,
)


def _tables(results: Results) -> dict[str, str]:
    found = results[TASK]
    overheads = []
    for what, seconds in found["overheads"].items():
        quantiles = np.quantile(seconds, (0.5, 0.9, 1.0)).tolist() if seconds else [math.nan] * 3
        overheads.append([what, str(len(seconds)), *(number(each, 4) for each in quantiles)])
    return {
        "errors": _errors_table(found["policies"]),
        "pairs": _pairs_table(found["policies"]),
        "overheads": table(("seconds", "times", "median", "p90", "max"), overheads),
        "losses": f"```text\n{found['verified'].rstrip()}\n```",
    }


def _errors_table(policies: dict[str, Any]) -> str:
    from scipy.stats import kendalltau

    def judged(error: float, limit: float, sign: str = "+") -> str:
        return f"{percent(error, sign=sign)} ({met(abs(error) <= limit)})"

    rows = []
    for policy, found in policies.items():
        real_s, both_s = np.array(found["real_jct_s"]), np.array(found["predicted_jct_s"])
        predicted_s = both_s.mean(axis=0)
        errors = predicted_s / real_s - 1
        rows.append([
            policy,
            f"{real_s.mean():.1f} s",
            each(both_s.mean(axis=1), lambda mean_s: f"{mean_s:.1f} s", ", "),
            judged(predicted_s.mean() / real_s.mean() - 1, MAX_MEAN_ERROR),
            judged(found["makespan_error"], MAX_MEAN_ERROR),
            judged(float(np.median(np.abs(errors))), MAX_JOB_ERROR, ""),
            percent(np.quantile(np.abs(errors), 0.9)),
            percent(np.median(errors), sign="+"),
            number(float(kendalltau(predicted_s, real_s).statistic)),
            str(found["restarts"]),
            str(found["failed"]),
            f"{percent(found['controller_cores'], 2)} of a core",
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
        error = percent(predicted / real - 1, sign="+")
        rows.append([f"{a} ÷ {b}", number(real, 3), number(predicted, 3), error])
    return table(("pair", "real ratio of mean JCT", "predicted", "error"), rows)


FIDELITY = Experiment(lambda: [TASK], _tables)
