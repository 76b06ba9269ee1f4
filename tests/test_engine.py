"""The engine against closed forms, and by queueing theory; determinism in another process."""

from math import factorial

import numpy as np
import pytest
from hash_seeds import printed_with
from jobs import cluster, facts, finish_s, workload

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate


def run(work, machines, policy, **costs):
    return simulate(work, machines, get_policy(policy), ExecutionModel(Costs(**costs)))


def erlang_c(servers, offered):
    """Probability of waiting in M/M/c (Erlang's second formula)."""
    top = offered**servers / factorial(servers) * servers / (servers - offered)
    return top / (sum(offered**k / factorial(k) for k in range(servers)) + top)


def test_waiting_time_equals_mmc():
    servers, load = 8, 0.7
    jobs, mean_s = 50_000, 100.0
    random = np.random.default_rng(servers)
    submit = np.cumsum(random.exponential(mean_s / (servers * load), jobs))
    work = workload(list(zip(submit, np.ones(jobs, dtype=int).tolist(), random.exponential(mean_s, jobs), strict=True)))
    done = run(work, cluster(1, servers), "fifo")
    wait_s = (finish_s(done) - work.jobs["submit_time_s"] - work.jobs["duration_s"]).mean()
    expected_s = erlang_c(servers, servers * load) * mean_s / (servers * (1 - load))
    assert wait_s == pytest.approx(expected_s, rel=0.05)


def test_preempted_job_pays_to_resume():
    work = workload([(0, 1, 1_000), (100, 1, 50)])
    assert facts(run(work, cluster(1, 1), "srtf", restart_s=30.0)) == [
        (0, "start", 0),
        (100, "start", 1),
        (100, "stop", 0),
        (150, "finish", 1),
        (150, "start", 0),
        (1_080, "finish", 0),
    ]


def test_costs_by_model_replace_the_default():
    work = workload([(0, 1, 100), (0, 1, 100)], models=["slow", "other"])
    execution = ExecutionModel(Costs(), costs_by_model={"slow": Costs(launch_s=40.0)})
    assert finish_s(simulate(work, cluster(1), get_policy("fifo"), execution)).tolist() == [140, 100]


@pytest.mark.parametrize(
    ("gpus", "kind", "facts"),
    [(16, "", "job job-0: requests 16 GPUs; this cluster has at most 8"), (1, "a100", "1 a100; this cluster has none")],
)
def test_job_that_can_never_run_is_named(gpus, kind, facts):
    machines = Cluster((NodeType("t4", "t4", 1, 8),))
    with pytest.raises(InputError, match=facts):
        run(workload([(0, gpus, 100)], kinds=[kind]), machines, "fifo")


SCRIPT = """
import planned_models
from jobs import RIGID, cluster, random_workload
from synergy_core.scheduling.policies import get_policy
from synergy_sim.simulate import simulate
from test_planned_jobs import BLURRED, MACHINES, some
from training_jobs import READERS, random_training, run, three_types

for name in RIGID:
    print(name, simulate(random_workload(4, 60), cluster(5), get_policy(name)).events.digest())
for name in READERS:
    made = random_training(3, 6, three_types())
    print(name, run(made, three_types(), name, information="all").events.digest())
planned_models.install()
for name in ("sia", "sia+plans", "crius", "synergy"):
    print(name, run(some(jobs=6), MACHINES, name, truth=BLURRED).events.digest())
"""


def test_event_log_is_the_same_in_another_process_with_another_hash_seed():
    assert len(printed_with(SCRIPT, "0", "1")) == 1
