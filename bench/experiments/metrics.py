"""How far intervals and the verdict `overloaded` can be trusted, and which windows of Philly queue: docs/metrics.md."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
from runner.experiment import Experiment, Result, Results, Simulation, measurement
from runner.tables import number, table

from experiments.decisions import CHANCES, GPUS, MAX_S, MEAN_LOG_S, SPREAD
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_core.units import DAY_S, HOUR_S, Floats
from synergy_runs.generators import generate
from synergy_runs.inputs.from_settings import cut
from synergy_runs.inputs.workload import Workload, from_rows, with_estimates
from synergy_runs.outputs.metrics import OVERLOAD_FRACTION, growth_until, job_table
from synergy_runs.outputs.numbers import Means, mean_jcts, ratio_of_means
from synergy_runs.traces.rows import TraceRows
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate


def _nodes(count: int) -> Cluster:
    return Cluster((NodeType("v100", "v100", count, 8),))


# How often an interval contains the truth

FIRST, OTHERS = "fifo", ("backfill", "easy", "srtf", "las")
WORKLOADS_DRAWN, DRAWS = (5, 20), 2_000


def window(days: int, nodes: int, seed: int) -> Result:
    """Offered load, and for every policy the arguments of `Means`, on one window like Philly's."""
    jobs = from_rows(generate("philly", window_s=days * DAY_S, seed=seed), name="philly")
    jobs = with_estimates(jobs, 4.0, np.random.default_rng(seed))
    cluster, model = _nodes(nodes), ExecutionModel(Costs(restart_s=0.0))
    jct_s = {name: job_table(simulate(jobs, cluster, get_policy(name), model)).jct_s for name in (FIRST, *OTHERS)}
    found: Result = {"load": jobs.offered_load_fraction(cluster.gpus)}
    for name in OTHERS:
        means_s = mean_jcts(jct_s[name], jct_s[FIRST])
        found[name] = [*means_s, max(means_s) - float(jobs.jobs["duration_s"].mean())]  # restarts cost nothing here
    return found


WINDOWS_DRAWN = {
    (days, nodes): [measurement(window, policies=(FIRST, *OTHERS), days=days, nodes=nodes, seed=seed) for seed in seeds]
    for days, nodes, seeds in ((14, 60, range(20)), (14, 48, range(20)), (7, 60, range(20)), (7, 80, range(20)))
}


def _covered(windows: list[Means], count: int) -> str:
    """Share of intervals over so many windows, drawn with replacement, that contain the ratio over all windows.

    If some intervals are not printed, the share that is, and the share of all that would contain it.
    """
    truth, random = ratio_of_means(windows).value, np.random.default_rng(count)
    drawn = [[windows[at] for at in random.integers(0, len(windows), count)] for _ in range(DRAWS)]
    shares, printed = {}, DRAWS
    for limits in (False, True):
        known = [each for means in drawn if math.isfinite((each := ratio_of_means(means, limits=limits)).low)]
        shares[limits] = f"{np.mean([each.low <= truth <= each.high for each in known]):.0%}" if known else "none"
        printed = min(printed, len(known))
    return shares[True] if printed == DRAWS else f"{shares[True]} ({printed / DRAWS:.0%}; {shares[False]})"


def _coverage_tables(results: Results) -> dict[str, str]:
    rows = []
    for ((days, nodes), runs), count in itertools.product(WINDOWS_DRAWN.items(), WORKLOADS_DRAWN):
        load = np.mean([results[run]["load"] for run in runs])
        cells = [_covered([Means(*results[run][name]) for run in runs], count) for name in OTHERS]
        rows.append([f"{days} d, {nodes} nodes, S = {len(runs)}", f"{load:.0%}", f"{count}", *cells])
    return {"intervals": table(("windows", "offered load", "n", *OTHERS), rows)}


COVERAGE = Experiment(
    lambda: list(itertools.chain(*WINDOWS_DRAWN.values())), _coverage_tables, reads=("traces/philly.json",)
)

# How often a run is called overloaded, by its load

HISTORY_S, LENGTHS_DAYS = 35 * DAY_S, (7, 14, 28)
LOADS, ORDERS = (0.8, 0.9, 0.95, 1.05, 1.1, 1.2), ("fifo", "srtf")


def poisson(load: float, seed: int, gpus: int) -> Workload:
    """Poisson arrivals of that load on average, and what was running when their window started."""

    def durations_s(random: np.random.Generator, jobs: int) -> Floats:
        return np.minimum(random.lognormal(MEAN_LOG_S, SPREAD, jobs), MAX_S)

    random = np.random.default_rng((seed, int(load * 100)))
    work_gpu_s = durations_s(np.random.default_rng(0), 400_000).mean() * np.dot(GPUS, CHANCES)
    length_s = max(LENGTHS_DAYS) * DAY_S + HISTORY_S
    jobs = random.poisson(load * gpus / work_gpu_s * length_s)
    rows = TraceRows(Path("generated"), "bench/experiments/metrics.py")
    rows.add(
        np.zeros(jobs),
        submit_s=np.sort(random.uniform(0, length_s, jobs)),
        duration_s=durations_s(random, jobs),
        gpus=random.choice(GPUS, jobs, p=CHANCES),
        job_name=[str(number) for number in range(jobs)],
    )
    return cut(from_rows(rows, name="poisson", first_s=HISTORY_S, before=True))


def verdicts(load: float, seed: int) -> Result:
    """For every policy and length of window, whether it is called overloaded. Later jobs do not change a window."""
    cluster, found = _nodes(60), {}
    work = poisson(load, seed, cluster.gpus)
    for policy in ORDERS:
        run = simulate(work, cluster, get_policy(policy))
        found[policy] = [min(growth_until(run, days * DAY_S)) >= OVERLOAD_FRACTION for days in LENGTHS_DAYS]
    return found


CALLED = {load: [measurement(verdicts, policies=ORDERS, load=load, seed=seed) for seed in range(4)] for load in LOADS}


def _overload_tables(results: Results) -> dict[str, str]:
    rows = []
    for policy, (at, days) in itertools.product(ORDERS, enumerate(LENGTHS_DAYS)):
        called = [f"{sum(results[run][policy][at] for run in runs)} of {len(runs)}" for runs in CALLED.values()]
        rows.append([policy, f"{days}", *called])
    return {"called": table(("policy", "days", *(f"load {load:g}" for load in LOADS)), rows)}


OVERLOAD = Experiment(lambda: list(itertools.chain(*CALLED.values())), _overload_tables)

# Which windows of Philly are overloaded

PHILLY = {
    start: [Simulation(policy, ("experiment=classical", f"trace.window={start}/14d")) for policy in ORDERS]
    for start in ("2017-10-02", "2017-10-16", "2017-10-30", "2017-11-13", "2017-11-27")
}


def _windows_tables(results: Results) -> dict[str, str]:
    rows = []
    for start, runs in PHILLY.items():
        found = [results[run] for run in runs]
        delays = [number(each["mean_queueing_delay_s"] / HOUR_S) + " !" * each["overloaded"] for each in found]
        rows.append([start, f"{found[0]['jobs']:,}", number(found[0]["offered_load_fraction"]), *delays])
    return {"waits": table(("14 days from", "jobs", "offered load", *(f"{policy}, h" for policy in ORDERS)), rows)}


WINDOWS = Experiment(lambda: list(itertools.chain(*PHILLY.values())), _windows_tables, needs=("data",))
