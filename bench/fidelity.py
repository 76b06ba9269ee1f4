"""Measures how well the simulator predicts the executor: `python bench/fidelity.py` profiles this machine, runs the
demo for real, profiles again, and so on, simulates it with what was profiled, and writes docs/fidelity.md.

Finished runs and profiles are kept below --folder, by default results/fidelity/VERSION, and are not repeated; delete
the folder to start afresh. VERSION is the last commit that changed simulator or executor.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean

import executor
import numpy as np
from accuracy_runs import SIMULATED, commit, typed_command
from fits import demo
from scipy.stats import kendalltau

from synergy_core.jobs.testbed_profiles import NoiseFrom, Profile, ProfiledCosts, ProfiledModel, ProfiledRow
from synergy_core.planner.plan import Plan
from synergy_runs.files import atomic_file
from synergy_runs.inputs import read_profile, write_profile
from synergy_runs.stored import StoredRun, find_runs

ROOT = Path(__file__).resolve().parent.parent
RAN = (*SIMULATED, "synergy_exec")
PAGE = ROOT / "docs" / "fidelity.md"
POLICIES = ("fifo", "sia+plans", "synergy")
CROWDED = 20
"""Times as dense as in the trace: all of it within a few seconds."""
GOAL_MEAN, GOAL_JOB = 0.05, 0.10
SLOTS, PROFILE_S = 4, 400.0
"""Of the demo; and how long its models are measured each time, at most."""


@dataclass(frozen=True)
class Repeat:
    """One policy run for real, against its simulation; relative errors are predicted ÷ real − 1."""

    policy: str
    real_jct_s: float
    jct: float
    makespan: float
    job: np.ndarray
    tau: float
    restarts: int
    failed: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "results" / "fidelity" / commit(RAN))
    parser.add_argument("--trace", default="demo")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--simulate-only", action="store_true", help="with the runs that are there")
    parser.add_argument("--seconds", type=float, default=1.0, help="of training at each batch of each plan profiled")
    given = parser.parse_args()
    folder: Path = given.folder
    if not given.simulate_only:
        for repeat in range(given.repeats + 1):
            measure(profile_path(folder, repeat), given.seconds)
            for policy in given.policies if repeat < given.repeats else ():
                run_for_real(given.trace, policy, folder / f"real-{repeat}", profile_path(folder, repeat))
    done = [each for each in range(given.repeats) if profile_path(folder, each + 1).is_file()]
    profiles = [read_profile(profile_path(folder, each)) for each in [*done, len(done)]]
    found = []
    for repeat in done:
        between = folder / f"profile-{repeat}-{repeat + 1}.json"
        write_profile(mean_profile(profiles[repeat : repeat + 2]), between)
        simulated = simulate(given.trace, given.policies, between, folder / f"simulated-{repeat}")
        for policy in given.policies:
            found.append(compared(policy, newest(folder / f"real-{repeat}", policy), newest(simulated, policy)))
    alone = [
        simulate(given.trace, given.policies, profile_path(folder, each), folder / f"simulated-by-{each}")
        for each in range(len(profiles))
    ]
    guesses = {policy: [mean_jct_s(newest(each, policy)) for each in alone] for policy in given.policies}
    last, policy = done[-1], given.policies[-1]
    run_for_real(given.trace, policy, folder / "losses", profile_path(folder, last + 1))
    run_for_real(given.trace, policy, folder / "crowded", profile_path(folder, last + 1), f"load={CROWDED}")
    carried, trained, crowded = (
        folder / each / given.trace / "latest" / f"{policy}-0.work" for each in (f"real-{last}", "losses", "crowded")
    )
    text = page(found, given.policies, profiles, guesses, given.trace)
    text += "\n".join([*carried_out(carried, crowded), *losses(trained, folder / "verify.json"), ""])
    with atomic_file(given.page) as partial:
        partial.write_text(text, encoding="utf-8")
    print(given.page.read_text(encoding="utf-8"))
    return 0


def carried_out(work: Path, crowded: Path) -> list[str]:
    """What carrying the decisions of one run out cost; the controller's share where all jobs were there at once."""
    return [
        "",
        "## Overheads",
        "",
        f"These are the overheads of the last repeat under {work.stem.removesuffix('-0')}, as "
        "`python bench/executor.py` prints them.",
        "",
        "```text",
        *executor.table(executor.overheads(work)),
        "```",
        "",
        f"With load={CROWDED}, all jobs wait or run at the same time:",
        "",
        "```text",
        executor.table(executor.overheads(crowded))[-1],
        "```",
    ]


def losses(work: Path, into: Path) -> list[str]:
    """Whether its jobs' losses go on over every change of plan."""
    command = [sys.executable, "bench/verify.py", str(work), "--json", str(into)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.rstrip().splitlines()
    return [
        "",
        "## Losses over changes of plan",
        "",
        "The jobs of another run were trained again, each in one process without interruption",
        "(`python bench/verify.py RUN.work`).",
        "",
        "```text",
        *said,
        "```",
    ]


def profile_path(folder: Path, repeat: int) -> Path:
    """What was measured before that repeat; one more was after the last."""
    return folder / f"profile-{repeat}.json"


def measure(path: Path, seconds: float) -> None:
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        longest = (f"backend.options.slots={SLOTS}", f"profile_s={PROFILE_S}")
        typed("synergy_exec", "profile", *demo.STEP_S, "--out", path, "--seconds", seconds, *longest)


def simulate(trace: str, policies: list[str], profile: Path, into: Path) -> Path:
    """The folder of its runs."""
    typed(
        "synergy_sim",
        f"+trace={trace}",
        "same_information=false",
        "testbed=executor",
        f"truth.profile={profile}",
        "cluster.gpu_type=cpu",
        f"policy=[{','.join(policies)}]",
        f"results_dir={into}",
        "figures=false",
    )
    return into


def newest(folder: Path, policy: str) -> StoredRun:
    """The newest run of the policy below the folder."""
    return next(run for run in find_runs(folder) if run.policy == policy)


def mean_profile(profiles: list[Profile]) -> Profile:
    """Everything averaged; what some of them lack, over those that have it."""
    first = profiles[0]
    models = {name: _mean_model([each[name] for each in profiles if name in each]) for name in first}
    dates = " and ".join(each.date for each in profiles)
    return Profile(models, first.machine, dates)


def _mean_model(models: list[ProfiledModel]) -> ProfiledModel:
    rows: dict[tuple[str, int, Plan], list[ProfiledRow]] = {}
    noise: dict[float, list[float]] = {}
    for model in models:
        for row in model.rows:
            rows.setdefault((row.gpu_type, row.nodes, row.plan), []).append(row)
        for each in model.noise:
            noise.setdefault(each.work, []).append(each.ratio)
    costs = [dataclasses.astuple(model.costs) for model in models]
    return dataclasses.replace(
        models[0],
        costs=ProfiledCosts(*(mean(each) for each in zip(*costs, strict=True))),
        noise=tuple(NoiseFrom(work, mean(noise[work])) for work in sorted(noise)),
        rows=tuple(dataclasses.replace(same[0], step_s=mean(row.step_s for row in same)) for same in rows.values()),
    )


def typed(module: str, *arguments: object) -> None:
    """Runs `python -m module …` as a person would."""
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True, cwd=ROOT)


def run_for_real(trace: str, policy: str, into: Path, profile: Path, *more: str) -> None:
    if into.is_dir() and any(into.rglob(f"{policy}-0/summary.json")):
        return
    typed(
        "synergy_exec",
        f"+trace={trace}",
        f"policy=[{policy}]",
        f"profile={profile}",
        f"results_dir={into}",
        "figures=false",
        *more,
    )


def mean_jct_s(run: StoredRun) -> float:
    return float(run.jobs("jct_s")["jct_s"].mean())


def compared(policy: str, real: StoredRun, predicted: StoredRun) -> Repeat:
    """One real run beside the simulation of its policy."""
    jct, guess = real.jobs("jct_s")["jct_s"], predicted.jobs("jct_s")["jct_s"]
    return Repeat(
        policy,
        real_jct_s=float(jct.mean()),
        jct=float(guess.mean() / jct.mean() - 1),
        makespan=float(predicted.summary["makespan_s"] / real.summary["makespan_s"] - 1),
        job=guess / jct - 1,
        tau=float(kendalltau(guess, jct).statistic),
        restarts=int(real.jobs("restarts")["restarts"].sum()),
        failed=int(real.summary["jobs_failed"]),
    )


def page(
    found: list[Repeat], policies: list[str], profiles: list[Profile], guesses: dict[str, list[float]], trace: str
) -> str:
    """docs/fidelity.md."""
    lines = [
        "# Fidelity",
        "",
        "This page compares the simulator's predictions with real runs of the executor.",
        f"Generated by `{typed_command()}` (minutes: 40, as all commands here). In each repeat,",
        f"`python -m synergy_exec profile` measures a profile, and `python -m synergy_exec` runs the trace `{trace}`",
        "under each policy; a last profile follows. `python -m synergy_sim` simulates each repeat with only the mean",
        "of the profiles before and after it. No constant was fitted to the runs.",
        "",
        f"Machine: {machine()}. Profiled ({profiles[0].machine}) from {profiles[0].date} to {profiles[-1].date}. "
        f"Page written {datetime.datetime.now():%Y-%m-%d %H:%M}. Errors are predicted ÷ real − 1.",
        "",
        "| policy | repeat | mean JCT, real | mean JCT | makespan | per job: median of absolute | p90 | signed median "
        "| Kendall τ | restarts, real | failed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in policies:
        for number, each in enumerate(row for row in found if row.policy == policy):
            off = np.abs(each.job)
            lines.append(
                f"| {policy} | {number + 1} | {each.real_jct_s:.1f} s | {each.jct:+.1%} | {each.makespan:+.1%} | "
                f"{np.median(off):.1%} | {np.quantile(off, 0.9):.1%} | {np.median(each.job):+.1%} | {each.tau:.2f} | "
                f"{each.restarts} | {each.failed} |"
            )
    lines += [
        "",
        "| policy | mean JCT error, mean of repeats | spread of real mean JCT | goal 5 % | makespan | per job |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for policy in policies:
        rows = [row for row in found if row.policy == policy]
        if rows:
            lines.append(_summary(policy, rows))
    lines += ["", *_ranking(found, policies), "", *_drift(policies, profiles, guesses), ""]
    return "\n".join(lines)


def _summary(policy: str, rows: list[Repeat]) -> str:
    real = np.array([row.real_jct_s for row in rows])
    jct = float(np.mean([row.jct for row in rows]))
    makespan = float(np.mean([row.makespan for row in rows]))
    job = float(np.mean([np.median(np.abs(row.job)) for row in rows]))
    spread = f"{np.ptp(real) / real.mean():.1%} of the mean, {len(rows)} runs" if len(rows) > 1 else "– (one run)"
    return (
        f"| {policy} | {jct:+.1%} | {spread} | "
        f"{_met(abs(jct) <= GOAL_MEAN)} | {makespan:+.1%} ({_met(abs(makespan) <= GOAL_MEAN)}) | "
        f"{job:.1%} ({_met(job <= GOAL_JOB)}) |"
    )


def _met(yes: bool) -> str:
    return "met" if yes else "missed"


def _ranking(found: list[Repeat], policies: list[str]) -> list[str]:
    """Policies against each other: pairwise ratios of mean JCTs first, the order second.

    The order alone proves little: of Shockwave's published runs (NSDI 2023) it is right even without any overheads.
    """
    real = {policy: np.mean([row.real_jct_s for row in found if row.policy == policy]) for policy in policies}
    guess = {
        policy: np.mean([row.real_jct_s * (1 + row.jct) for row in found if row.policy == policy])
        for policy in policies
    }
    lines = ["| pair | real ratio of mean JCT | predicted | error |", "|---|---|---|---|"]
    for a, b in combinations(policies, 2):
        truth, predicted = real[a] / real[b], guess[a] / guess[b]
        lines.append(f"| {a} ÷ {b} | {truth:.3f} | {predicted:.3f} | {predicted / truth - 1:+.1%} |")
    order, other = sorted(policies, key=real.__getitem__), sorted(policies, key=guess.__getitem__)
    same = "the same" if order == other else ", ".join(other)
    return [*lines, "", f"Order by real mean JCT, best first: {', '.join(order)}; predicted: {same}."]


def _drift(policies: list[str], profiles: list[Profile], guesses: dict[str, list[float]]) -> list[str]:
    """How far this machine is from itself: no prediction can be surer than that."""
    lines = [
        "This machine is shared, and its speed drifts. The ratios are step times of a profile ÷ those of the profile "
        "before:",
        "",
        "| profile | date | median ratio | 10 % and 90 % quantile | "
        + " | ".join(f"{each}: mean JCT" for each in policies)
        + " |",
        "|---|---|---|---|" + "---|" * len(policies),
    ]
    for number, profile in enumerate(profiles):
        ratios = _ratios(profiles[number - 1], profile) if number else None
        cells = (
            ["–", "–"]
            if ratios is None
            else [f"{np.median(ratios):.3f}", f"{np.quantile(ratios, 0.1):.2f}, {np.quantile(ratios, 0.9):.2f}"]
        )
        seconds = [f"{guesses[policy][number]:.1f} s" for policy in policies]
        lines.append(f"| {number + 1} | {profile.date} | {' | '.join(cells)} | {' | '.join(seconds)} |")
    return [*lines, "", "The mean JCTs are simulated with that profile alone."]


def _ratios(before: Profile, after: Profile) -> np.ndarray:
    """Step time ÷ step time, of every plan in both."""
    old = {(name, row.gpu_type, row.nodes, row.plan): row.step_s for name in before for row in before[name].rows}
    keyed = ((name, row) for name in after for row in after[name].rows)
    return np.array(
        [row.step_s / old[key] for name, row in keyed if (key := (name, row.gpu_type, row.nodes, row.plan)) in old]
    )


def machine() -> str:
    """Processor and cores that this process may use."""
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores, {platform.system()}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


if __name__ == "__main__":
    raise SystemExit(main())
