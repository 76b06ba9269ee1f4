"""Which windows of a log are contended, and which are overloaded: loads and mean waits by week.

    python bench/windows.py [--trace FILE] [--days 7 14 28] [--nodes 60] [--placement consolidate] [--load 1.0]
    python bench/windows.py --windows 2017-10-02/28d 2017-11-06/28d

Windows of each length, one after another from the log's first Monday, with what was running at their start carried in:
offered load of the window's own jobs, the same share for what was carried in, and under fifo, backfill and srtf the
mean wait to the first start, hours, of the jobs submitted in each week. "!": overloaded, the queue was still growing
when arrivals ended (docs/metrics.md).
"""

from __future__ import annotations

import argparse

import numpy as np

from synergy_core.cluster import Cluster, NodeType
from synergy_core.policies import get_policy
from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.inputs import cut
from synergy_runs.metrics import job_table, overloaded
from synergy_runs.traces import read_trace
from synergy_runs.traces._download import find_philly
from synergy_runs.traces.rows import iso
from synergy_runs.workload import Workload, from_rows, scaled
from synergy_sim.simulate import simulate

WEEK_S = 7 * DAY_S
THURSDAY_S = 3 * DAY_S
"""1970-01-01 was a Thursday."""
POLICIES = ("fifo", "backfill", "srtf")


def whole_windows(rows, days: int):
    """Every whole window of that length."""
    submit_s = np.asarray(rows.submit_s)
    monday_s = np.ceil((submit_s.min() + THURSDAY_S) / WEEK_S) * WEEK_S - THURSDAY_S
    for start_s in np.arange(monday_s, submit_s.max() - days * DAY_S, days * DAY_S):
        yield f"{iso(float(start_s))[:10]}/{days}d"


def waits_by_week(work: Workload, machines: Cluster, policy: str) -> str:
    """Hours, week by week, and the mark."""
    run = simulate(work, machines, get_policy(policy))
    waiting_s = job_table(run).waiting_s
    week = np.where(work.carried, -1, work.submit_time_s // WEEK_S)
    means = [np.nanmean(waiting_s[week == each]) / HOUR_S for each in np.unique(week[week >= 0])]
    return " ".join(f"{each:.3g}" for each in means) + " !" * overloaded(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default=None, help="a job log; default: the real Philly")
    parser.add_argument("--days", type=int, nargs="+", default=[7, 14, 28])
    parser.add_argument("--windows", nargs="+", default=None, metavar="DATE/LENGTH", help="these instead")
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--placement", default=None, help="as cluster.placement; default: the cluster's own")
    parser.add_argument("--load", type=float, default=1.0, help="as cluster.load")
    chosen = parser.parse_args()
    rows = read_trace(chosen.trace or find_philly())
    more = {"placement": chosen.placement} if chosen.placement else {}
    machines = Cluster((NodeType("v100", "v100", chosen.nodes, chosen.gpus_per_node),), **more)
    print("  ".join((f"{'window':>14}", "  jobs", "  load", "+carried", *(f"{each:>28}" for each in POLICIES))))
    for window in chosen.windows or [each for days in chosen.days for each in whole_windows(rows, days)]:
        work = cut(scaled(from_rows(rows, name="log", window=window, before=True), chosen.load))
        own = int((~work.carried).sum())
        carried_gpu_s = float((work.duration_s * work.gpus)[work.carried].sum())
        carried = carried_gpu_s / (machines.gpus * work.arrival_window_s)
        load = work.offered_load_fraction(machines.gpus)
        waits = [f"{waits_by_week(work, machines, each):>28}" for each in POLICIES]
        print(f"{window:>14} {own:>7} {load:>7.2f} {carried:>9.2f}  " + "  ".join(waits), flush=True)


if __name__ == "__main__":
    main()
