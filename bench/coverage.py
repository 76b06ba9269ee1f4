"""How often the interval of a ratio of mean JCTs covers the truth, on generated logs whose jobs queue.

    python bench/coverage.py [--days 28] [--nodes 60 48] [--seeds 40] [--placement RULE] [--json FILE]

Philly-like windows of so many days on nodes of 8 GPUs, one per seed, under fifo, backfill, easy, srtf and las. The
truth is the ratio over all seeds: Σ of mean JCTs ÷ Σ of mean JCTs. Three parts per cluster:

    spread      the ratio of single runs: least, median, most; the longest queue of a run, and how many of its busy
                periods have the wait (1: one has it all). Why one run cannot tell.
    one run     what blocks of it would cover: 4 or 28 equal parts of the window, or busy periods (from an instant at
                which nobody waits under either policy to the next that is a day later), also of those runs alone that
                have two effective periods. The tables print none of these.
    n seeds     what `synergy_runs.numbers` covers, over 2,000 draws of n seeds, with replacement: the seeds stand for
                all there are, so the truth is known exactly. As printed: with its limits; all: without them.

Beside each coverage, the median of high ÷ low. A simulated window takes about a second; nothing is written but --json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synergy_core.cluster import Cluster, NodeType
from synergy_core.policies import get_policy
from synergy_core.units import DAY_S, HOUR_S, Floats
from synergy_runs.facts import waiting_jobs
from synergy_runs.generators import generate
from synergy_runs.metrics import job_table, summarise
from synergy_runs.numbers import Means, Ratio, mean_jcts, ratio_of_means
from synergy_runs.workload import from_rows, with_estimates
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

FIRST = "fifo"
POLICIES = ("backfill", "easy", "srtf", "las")
SEEDS_DRAWN = (5, 10, 20)
DRAWS = 2_000


@dataclass(frozen=True, slots=True)
class Window:
    """One seed. empty_s: per policy, intervals (start, end) in which nobody waited. overloaded: under which it was."""

    submit_s: Floats
    duration_s: Floats
    load: float
    jct_s: dict[str, Floats]
    empty_s: dict[str, Floats]
    overloaded: frozenset[str]

    def means(self, policy: str) -> Means:
        """Mean JCT under the policy and under the first."""
        policy_s, first_s = mean_jcts(self.jct_s[policy], self.jct_s[FIRST])
        waiting_s = max(policy_s, first_s) - float(self.duration_s.mean())  # restarts cost nothing here
        return Means(policy_s, first_s, waiting_s)


def window(seed: int, days: float, cluster: Cluster) -> Window:
    """Simulates all policies on one seed's jobs."""
    jobs = from_rows(generate("philly", window_s=days * DAY_S, seed=seed), name="philly")
    jobs = with_estimates(jobs, 4.0, np.random.default_rng(seed))
    jct_s, empty_s, overloaded = {}, {}, set()
    for policy in (FIRST, *POLICIES):
        run = simulate(jobs, cluster, get_policy(policy), ExecutionModel(Costs(restart_s=0.0)))
        table = job_table(run)
        jct_s[policy] = table.jct_s
        if summarise(run, table).get("overloaded", False):
            overloaded.add(policy)
        time_s, queue = waiting_jobs(run.events)
        empty_s[policy] = np.stack((time_s, np.append(time_s[1:], np.inf)))[:, queue == 0]
    return Window(
        jobs.submit_time_s,
        jobs.duration_s,
        jobs.offered_load_fraction(cluster.gpus),
        jct_s,
        empty_s,
        frozenset(overloaded),
    )


def equal_parts(parts: int) -> Callable[[Window, str], Floats]:
    """Cuts the window into so many."""
    return lambda of, _: np.linspace(0.0, of.submit_s[-1], parts + 1)[1:-1]


def nobody_waits(of: Window, policy: str) -> Floats:
    """The intervals (start, end), while jobs arrive, in which nobody waits under either policy; shape (n, 2)."""
    left, right, i, j, found = of.empty_s[FIRST], of.empty_s[policy], 0, 0, [(0.0, 0.0)]
    while i < left.shape[1] and j < right.shape[1]:
        start_s, end_s = max(left[0, i], right[0, j]), min(left[1, i], right[1, j], of.submit_s[-1])
        if start_s < end_s:
            found.append((start_s, end_s))
        i, j = (i + 1, j) if left[1, i] < right[1, j] else (i, j + 1)
    return np.array(found)


def longest_queue_d(of: Window, policy: str) -> float:
    """The longest time, in days, in which always somebody waits under one policy or the other."""
    empty = nobody_waits(of, policy)
    return float((np.append(empty[1:, 0], of.submit_s[-1]) - empty[:, 1]).max() / DAY_S)


def busy_periods(of: Window, policy: str) -> Floats:
    """Cuts where nobody waits under either policy, a day or more apart."""
    cuts = [0.0]
    for start_s, end_s in nobody_waits(of, policy):
        first_s = max(start_s, cuts[-1] + DAY_S)
        cuts += np.arange(first_s, end_s, DAY_S).tolist()
    return np.array(cuts[1:])


def effective_periods(of: Window, policy: str) -> float:
    """(Σ w)² ÷ Σ w² of the wait w of the jobs of each busy period under both: 1 if one of them has all of it."""
    cuts = busy_periods(of, policy)
    period = np.searchsorted(cuts, of.submit_s, side="right")
    wait_s = np.bincount(period, weights=of.jct_s[policy] + of.jct_s[FIRST] - 2 * of.duration_s)
    return float(wait_s.sum() ** 2 / (wait_s**2).sum()) if wait_s.any() else 0.0


BLOCKS: dict[str, Callable[[Window, str], Floats]] = {
    "4 parts": equal_parts(4),
    "28 parts": equal_parts(28),
    "busy periods": busy_periods,
}


def of_blocks(of: Window, policy: str, cut: Callable[[Window, str], Floats]) -> Ratio:
    """The interval that blocks of one run would give, whatever they are."""
    cuts = cut(of, policy)
    block = np.searchsorted(cuts, of.submit_s, side="right")
    top, bottom = (np.bincount(block, weights=of.jct_s[name], minlength=len(cuts) + 1) for name in (policy, FIRST))
    blocks = [Means(float(a), float(b), waiting_s=0.0) for a, b in zip(top, bottom, strict=True)]
    return ratio_of_means(blocks, limits=False)


def of_seeds(windows: Sequence[Window], policy: str, count: int, *, limits: bool) -> Iterator[Ratio]:
    """The intervals of so many seeds, drawn with replacement."""
    random = np.random.default_rng(count)
    means = [each.means(policy) for each in windows]
    for _ in range(DRAWS):
        yield ratio_of_means([means[pick] for pick in random.integers(0, len(means), count)], limits=limits)


def coverage(ratios: Sequence[Ratio], truth: float) -> dict[str, float]:
    """Of those that have an interval: how many there are, which share holds the truth, and the median of high ÷ low."""
    shown = [each for each in ratios if math.isfinite(each.low)]
    return {
        "printed": len(shown),
        "covered_fraction": float(np.mean([each.low <= truth <= each.high for each in shown])) if shown else math.nan,
        "median_high_over_low": float(np.median([each.high / each.low for each in shown])) if shown else math.nan,
    }


def rows(windows: Sequence[Window]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row per kind of interval, a cell per policy."""
    means = {policy: [each.means(policy) for each in windows] for policy in POLICIES}
    truth = {policy: ratio_of_means(means[policy]).value for policy in POLICIES}
    yield "truth", truth
    alone = {policy: [ratio_of_means([each]) for each in means[policy]] for policy in POLICIES}
    spread = {policy: np.quantile([each.value for each in alone[policy]], (0, 0.5, 1)) for policy in POLICIES}
    yield "spread", {policy: spread[policy].tolist() for policy in POLICIES}
    for name, measure in (("longest queue, days", longest_queue_d), ("effective periods", effective_periods)):
        found = {policy: [measure(each, policy) for each in windows] for policy in POLICIES}
        yield name, {policy: np.quantile(found[policy], (0, 0.5, 1)).tolist() for policy in POLICIES}
    late = {
        policy: float(np.mean([bool({policy, FIRST} & each.overloaded) for each in windows])) for policy in POLICIES
    }
    yield "overloaded_fraction", late
    yield "one run, as printed", {policy: coverage(alone[policy], truth[policy]) for policy in POLICIES}
    for name, cut in BLOCKS.items():
        found = {policy: [of_blocks(each, policy, cut) for each in windows] for policy in POLICIES}
        yield f"one run, {name}", {policy: coverage(found[policy], truth[policy]) for policy in POLICIES}
    many = {policy: [each for each in windows if effective_periods(each, policy) >= 2] for policy in POLICIES}
    found = {policy: [of_blocks(each, policy, busy_periods) for each in many[policy]] for policy in POLICIES}
    yield "  if 2 are effective", {policy: coverage(found[policy], truth[policy]) for policy in POLICIES}
    for count, limits in itertools.product(SEEDS_DRAWN, (True, False)):
        drawn = {policy: list(of_seeds(windows, policy, count, limits=limits)) for policy in POLICIES}
        name = f"{count} seeds, {'as printed' if limits else 'all'}"
        yield name, {policy: coverage(drawn[policy], truth[policy]) for policy in POLICIES}


def text(cell: Any) -> str:
    """`93% of 40 ×1.9`, `none printed`, `0.06 0.24 0.65`, `0.172`."""
    if isinstance(cell, dict):
        if not cell["printed"]:
            return "none printed"
        return f"{cell['covered_fraction']:.0%} of {cell['printed']:,} ×{cell['median_high_over_low']:.3g}"
    return " ".join(f"{each:.2f}" for each in cell) if isinstance(cell, list) else f"{cell:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=28)
    parser.add_argument("--nodes", type=int, nargs="+", default=[60, 48])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--placement", help="cluster.placement; without it, the default")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    chosen = parser.parse_args()
    told = []
    for nodes in chosen.nodes:
        more = {"placement": chosen.placement} if chosen.placement else {}
        cluster = Cluster((NodeType("v100", "v100", nodes, 8),), **more)
        windows = [window(seed, chosen.days, cluster) for seed in range(chosen.seeds)]
        load = np.mean([each.load for each in windows])
        jct_h = np.mean([each.jct_s[FIRST].mean() for each in windows]) / HOUR_S
        head = f"{chosen.seeds} windows of {chosen.days:g} days on {nodes} × 8 GPUs, {cluster.placement}"
        print(f"{head}: offered load {load:.0%}, mean JCT under {FIRST} {jct_h:.1f} h")
        print(f"{'':22}" + "".join(f"{policy:>22}" for policy in POLICIES))
        for name, cells in rows(windows):
            print(f"{name:22}" + "".join(f"{text(cells[policy]):>22}" for policy in POLICIES), flush=True)
            told.append({"days": chosen.days, "nodes": nodes, "placement": cluster.placement, "row": name, **cells})
        print()
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as stream:
            json.dump(told, stream, indent=1)


if __name__ == "__main__":
    main()
