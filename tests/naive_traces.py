"""Random traces with tenants under any ordering policy, quotas and placement, and what tests/naive.py makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from jobs import WALKING, facts, workload
from naive import POLICIES, Naive, NaiveJob

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.record import NEVER
from synergy_core.scheduling.policies import Policy, get_policy
from synergy_runs.inputs.workload import Workload
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

PLACEMENTS = ("consolidate", "relax", "spread", "even", "most_free")
NODES = ((8,), (4, 4), (8, 8), (8, 8, 8), (8, 4), (4, 8, 8), (8, 2, 2, 4), (2, 3, 16), (1, 1, 1, 1))
SIZES = (1, 1, 1, 2, 2, 3, 4, 4, 5, 6, 8, 12, 16)
RESTARTS_S = (0.0, 30.0, 300.0)


@dataclass(frozen=True)
class Trace:
    """A few jobs of tenants, the cluster they run on, and what a restart costs."""

    work: Workload
    cluster: Cluster
    restart_s: float

    def rows(self) -> list[tuple[float, int, float, float, str]]:
        """Submission, GPUs, run time, estimate and tenant of each job."""
        work = self.work
        columns = (work.jobs["submit_time_s"], work.jobs["gpus"], work.jobs["duration_s"], work.jobs["estimate_s"])
        tenants = list(work.jobs["virtual_cluster"])
        return list(zip(*(column.tolist() for column in columns), tenants, strict=True))

    def __str__(self) -> str:
        head = [f"{self.cluster}, restart_s={self.restart_s:g}", "submit_s,gpus,run_s,estimate_s,tenant"]
        return "\n".join([*head, *(",".join(map(str, row)) for row in self.rows())])


def random_trace(random: Random) -> Trace:
    """Times are whole seconds, beats of a minute, or off any beat; estimates exact, too short or too long."""
    sizes = random.choice(NODES)
    total = sum(sizes)
    tenants = "abc"[: random.randint(1, 3)]
    quotas: dict[str, int] = {}
    if random.random() < 0.6 and total >= len(tenants):
        cuts = sorted(random.sample(range(1, total + 1), len(tenants)))
        quotas = {tenant: high - low for tenant, low, high in zip(tenants, [0, *cuts], cuts, strict=False)}
    cluster = Cluster(
        tuple(NodeType(f"n{at}", "v100", 1, gpus) for at, gpus in enumerate(sizes)),
        quotas,
        borrowing=bool(quotas) and random.random() < 0.5,
        reclaim=random.choice((None, "any", "never")),
        placement=random.choice(PLACEMENTS),
        patience_s=random.choice((60.0, 700.0, 5_000.0)),
    )
    beat_s, gap, length = random.choice(((1.0, 300, 9_000), (60.0, 6, 120), (1 / 7, 3_000, 60_000)))
    rows, owners, estimates = [], [], []
    submit_s = 0.0
    for _ in range(random.randint(3, 25)):
        submit_s += beat_s * random.randint(0, gap) * (random.random() < 0.7)
        owner = random.choice(tenants)
        gpus = min(random.choice(SIZES), cluster.most_gpus_for("", owner))
        run_s = beat_s * random.randint(0, length)
        rows.append((submit_s, gpus, run_s))
        owners.append(owner)
        estimates.append(run_s * random.choice((1.0, 1.0, 1.0, 0.0, 0.3, 3.0)))
    return Trace(workload(rows, tenants=owners, estimates=estimates), cluster, random.choice(RESTARTS_S))


def simulated(trace: Trace, policy: str | Policy, **more: Any) -> list[tuple[float, str, int]]:
    """Starts, stops and ends as the simulator has them; more: such as `make_scheduler`."""
    policy = get_policy(policy) if isinstance(policy, str) else policy
    execution = ExecutionModel(Costs(restart_s=trace.restart_s))
    return facts(simulate(trace.work, trace.cluster, policy, execution, **more))


def by_definition(trace: Trace, policy: str, **more: Any) -> list[tuple[float, str, int]]:
    """Starts, stops and ends as tests/naive.py has them."""
    cluster = trace.cluster
    jobs = [NaiveJob(job_id, *row) for job_id, row in enumerate(trace.rows())]
    together_s = {"consolidate": NEVER, "relax": cluster.patience_s}.get(cluster.placement, 0.0)
    sizes = [each.gpus_per_node for each in cluster.node_types for _ in range(each.nodes)]
    return Naive(
        jobs, sizes, policy, trace.restart_s, together_s=together_s, quotas=cluster.virtual_clusters,
        borrowing=cluster.borrowing, reclaim=cluster.reclaim, **more,
    ).run()  # fmt: skip


def differing(trace: Trace) -> list[str]:
    """The ordering policies under which the definitions and the simulator disagree, with its queues or with walks over
    all jobs (which it does anyway where tenants borrow).
    """
    ways: list[dict[str, Any]] = [{}] if trace.cluster.borrowing else [{}, {"make_scheduler": WALKING}]
    wanted = {policy: by_definition(trace, policy) for policy in POLICIES}
    return [policy for policy in POLICIES if any(simulated(trace, policy, **how) != wanted[policy] for how in ways)]
