"""When jobs end under every ordering rule, quota, placement, cost and round, as a hand computes it."""

import pytest
from jobs import cluster, finish_s, workload

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_runs.outputs.invariants import check
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

LONE, PAIR = cluster(1, 1), cluster(1, 2)
LONG_THEN_TWO = [(0, 8, 8_000), (7_200, 4, 3_700), (7_200, 4, 3_700)]
TYPES = Cluster((NodeType("a", "a100", 1, 8), NodeType("t", "t4", 1, 8)))
QUOTAS = {"a": 8, "b": 8}


def lends(gpus, quotas, reclaim=None):
    """A single node whose tenants may borrow."""
    return Cluster((NodeType("n", "v100", 1, gpus),), quotas, borrowing=True, reclaim=reclaim, placement="spread")


FREE, SLOW = Costs(restart_s=0.0), Costs(launch_s=15.0, restart_s=15.0, exit_s=7.0)
TICK, HALF = {"round_s": 60.0}, {"round_s": 120.0, "decide_fraction": 0.5}
WIDE = [(0, 4, 1_000), (0, 4, 1_000), (0, 4, 1_000), (1, 16, 100), (2, 8, 500)]
APART = [(0, 5, 1_000), (0, 5, 1_000), (0, 5, 1_000), (1, 9, 100)]
LATE_S = 10.0 * 0.6931471805599453
OUTRUN = [(0, 4, 100_000), (0, 2, 1_000), (100, 4, 100), *[(500 * at, 2, 5_000) for at in range(1, 40)]]

# What it shows: rows, policy (with parameters), cluster, ends in seconds (of the first jobs); costs and rounds; columns
CASES = {
    "mlfq: a demoted job waits for a young one": ([(0, 8, 2_000), (1_000, 8, 100)], "mlfq", cluster(1), [2_100, 1_100]),
    # At 8,000 s the first has held 8 × 8,000 GPU-s, the second 4 × 3,600: two queues go by arrival.
    "las: whoever has held least runs": (LONG_THEN_TWO, "las", cluster(1), [11_700, 10_900, 10_900]),
    "mlfq: within a queue, jobs go by arrival": (LONG_THEN_TWO, "mlfq", cluster(1), [8_900, 11_700, 11_700]),
    "las: jobs that have held the same take turns": (
        [(0, 8, 300), (0, 8, 300)], ("las", {"quantum_s": 100.0}), cluster(1), [500, 600],
    ),
    "easy: a gap is filled by who ends before the reservation": (
        [(0, 4, 100), (1, 8, 100), (2, 4, 200), (3, 4, 97)], "easy", cluster(1), [100, 200, 400, 100],
    ),
    # Half the node is due at 10 s and ends at 100,000 s; by what it promised, every other GPU was there to fill.
    "easy: nobody waits for ever for a job that has outrun its estimate": (
        OUTRUN, "easy", cluster(1), [100_000, 1_000, 6_100], {"estimates": [10, *[row[2] for row in OUTRUN[1:]]]},
    ),
    "easy: who fits behind a head that must borrow fills": (
        [(0, 4, 1_000), (1, 8, 100), (2, 2, 50)], "easy", cluster(1, virtual_clusters={"a": 4, "b": 4}, borrowing=True),
        [1_000, 1_100, 52], {"tenants": ["b", "a", "a"]},
    ),
    # A short job is soon late by a multiple of its run time: it stops the first, and the longest comes last.
    "themis: the worst off goes first": (
        [(0, 8, 1_000), (10, 8, 5_000), (20, 8, 300)], "themis", cluster(1), [1_360, 6_440, 660],
    ),
    "themis: a running job moves to the type that it is given": (
        [(0, 8, 5_000), (400, 8, 100)], "themis", TYPES, [5_000, 820], {"kinds": ["", "a100"]},
    ),
    "a tenant borrows idle GPUs": (
        [(0, 16, 1_000), (100, 8, 100)], "backfill", cluster(2, virtual_clusters=QUOTAS, borrowing=True),
        [1_000, 1_100], {"tenants": "ab"},
    ),
    "a borrower gives GPUs back to an owner who preempts": (
        [(0, 16, 1_000), (100, 8, 100)], "mlfq", cluster(2, virtual_clusters=QUOTAS, borrowing=True),
        [1_100, 200], {"tenants": "ab"},
    ),
    "without borrowing a tenant stays within its quota": (
        [(0, 8, 1_000), (0, 8, 1_000)], "backfill", cluster(2, virtual_clusters=QUOTAS), [1_000, 2_000],
        {"tenants": "aa"},
    ),
    "several heads of one tenant borrow at once": (
        [(0, 8, 100)] * 3, "fifo", cluster(3, virtual_clusters={"a": 8, "b": 16}, borrowing=True), [100] * 3,
        {"tenants": "aaa"},
    ),
    **{
        f"{policy}: a tenant without a quota only borrows": (
            [(0, 8, 100), (0, 8, 100)], policy, cluster(1, virtual_clusters={"a": 8}, borrowing=True), [None, 100],
            {"tenants": "za"},
        )
        for policy in ("fifo", "backfill", "easy", "srtf", "las", "themis")
    },
    **{
        f"{policy}, {reclaim}: a borrower gives back what it must": (
            [(0, 2, 10_000), (100, 1, 100)], policy, lends(2, {"a": 1, "b": 1}, reclaim), ends, {"tenants": "ab"},
        )
        for policy, reclaim, ends in (
            ("fifo", None, [10_000, 10_100]), ("fifo", "any", [10_100, 200]), ("easy", "any", [10_100, 200]),
            ("sjf", "any", [10_100, 200]), ("mlfq", None, [10_100, 200]), ("srtf", "any", [10_100, 200]),
            ("mlfq", "never", [10_100, 1_900]),
        )
    },
    "of two borrowers, the one that suffices gives back": (
        [(0, 6, 1_000), (0, 3, 1_000), (100, 3, 100)], "mlfq", lends(9, {"a": 0, "b": 3}), [1_000, 1_100, 200],
        {"tenants": "aab"},
    ),
    **{
        f"{policy}: tenants borrow in turn": (
            [(0, 1, 100)] * 6, policy, lends(4, {"x": 4}), [100, 100, 200, 200, 100, 100], {"tenants": "yyyyzz"},
        )
        for policy in ("fifo", "backfill", "easy", "sjf", "mlfq", "srtf")
    },
    "fifo: of those who borrow none overtakes another": (
        [(0, 1, 100), (1, 2, 100), (2, 1, 50)], "fifo", lends(2, {"a": 2}), [100, 200, 250], {"tenants": "azy"},
    ),
    "backfill: of those who borrow some overtake others": (
        [(0, 1, 100), (1, 2, 100), (2, 1, 50)], "backfill", lends(2, {"a": 2}), [100, 200, 52], {"tenants": "azy"},
    ),
    "a wide job takes whole nodes": (WIDE, "backfill", cluster(4, placement="consolidate"), [1_000] * 3 + [101]),
    "a wide job takes what is left of several nodes": (APART, "backfill", cluster(3), [1_000] * 3 + [101]),
    "a wide job that must lie together waits": (
        APART, "backfill", cluster(3, placement="consolidate"), [1_000] * 3 + [1_100],
    ),
    "a job that finds no single node is spread": (
        [(0, 5, 100), (0, 5, 100), (1, 6, 10)], "fifo", cluster(2), [100, 100, 11],
    ),
    "launch and exit hold GPUs": (
        [(0, 1, 100), (0, 1, 100)], "fifo", LONE, [115, 230], {"costs": Costs(launch_s=10.0, exit_s=5.0)},
    ),
    "a newcomer waits until the job that it displaces has left": (
        [(0, 1, 1_000), (100, 1, 50)], "srtf", LONE, [160 + 30 + 900 + 5, 100 + 5 + 50 + 5],
        {"costs": Costs(restart_s=30.0, exit_s=5.0)},
    ),
    "without a save, a job falls back to its last checkpoint": (
        [(0, 1, 1_000), (250, 1, 50)], "srtf", LONE, [300 + 800, 300],
        {"costs": Costs(restart_s=0.0, checkpoint_interval_s=100.0)},
    ),
    "a job of zero seconds ends when it starts": ([(0, 1, 0), (0, 1, 0)], "fifo", LONE, [0, 0]),
    "rounds: a tick decides, jobs end in between": ([(10, 1, 100), (20, 1, 100)], "fifo", LONE, [160, 280], TICK),
    "rounds: a lease that extends costs nothing": (
        [(0, 1, 1_000)], "las", LONE, [1_000], {"costs": Costs(restart_s=50.0), **TICK},
    ),
    "rounds: idle ones keep the grid": ([(0, 1, 10), (1_234, 1, 10)], "fifo", LONE, [10, 1_270], TICK),
    "rounds: a job that is decided on within one starts early on idle GPUs": (
        [(0, 1, 500), (30, 1, 100)], "fifo", PAIR, [500, 160], HALF,
    ),
    "rounds: without early launch it starts at the end": (
        [(0, 1, 500), (30, 1, 100)], "fifo", PAIR, [500, 220], {**HALF, "early_launch": False},
    ),
    # Decided at 60; the lease ends at 120, its GPU is free at 127; 15 s launch, 50 s of work, 7 s exit. 120 − 15 s of
    # the first one's work are done; at 180 the GPU is held until 199, so the next decision, at 300, resumes it.
    "rounds: an ended lease saves and leaves before the next job launches": (
        [(0, 1, 1_000), (10, 1, 50)], "srtf", LONE, [300 + 15 + (1_000 - 105) + 7, 127 + 15 + 50 + 7],
        {"costs": SLOW, **HALF},
    ),
    **{
        f"rounds: one waits for ended leases, stretch={stretch}": (
            [(0, 1, 300), (10, 1, 50)], "srtf", LONE, [None, 120 + late_s + 50],
            {**HALF, "stretch": stretch, "stretch_s": 10.0, "early_launch": False},
        )
        for stretch, late_s in (("none", 0.0), ("log", LATE_S), ("linear", 10.0))
    },
    "rounds: a job that ends before its lease is not stopped": (
        [(0, 1, 100), (10, 1, 5)], "srtf", LONE, [100, 105], HALF,
    ),
    "rounds: GPUs that an end frees wait for the next round": (
        [(0, 1, 130.5), (10, 1, 50), (70, 1, 20)], "fifo", LONE, [130.5, 230, 260], TICK,
    ),
    "rounds: with refills GPUs that an end frees are given away at once": (
        [(0, 1, 130.5), (10, 1, 50), (70, 1, 20)], "fifo", LONE, [130.5, 181, 201], {**TICK, "refill_s": 1.0},
    ),
}  # fmt: skip
COLUMNS = ("tenants", "kinds", "estimates")


@pytest.mark.parametrize("case", CASES)
def test_jobs_end_when_a_hand_computes(case):
    rows, policy, machines, ends_s, *more = CASES[case]
    how = {"costs": FREE, **(more[0] if more else {})}
    columns = {name: how.pop(name) for name in COLUMNS if name in how}
    name, parameters = policy if isinstance(policy, tuple) else (policy, {})
    model = ExecutionModel(how.pop("costs"), **how)
    done = simulate(workload(rows, **columns), machines, get_policy(name).with_parameters(**parameters), model)
    check(done)
    for found_s, wanted_s in zip(finish_s(done).tolist(), ends_s, strict=False):
        assert wanted_s is None or found_s == pytest.approx(wanted_s, abs=1e-5)
