"""Shares that mechanisms decide, carried out: nodes are never overdrawn, however slowly jobs come and go."""

from random import Random

import pytest
from jobs import facts
from training_jobs import CATALOG, random_training, training

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_core.units import GB
from synergy_runs.outputs.invariants import check
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate


def scarce(random):
    """Nodes with so few CPUs, so little memory or such slow storage that jobs wait for their input."""
    host = random.choice((0.3, 1.0, 4.0)), random.choice((1, 20, 100)) * GB, random.choice((1e6, 1e7, 1e8))
    double = 2 * host[0], 2 * host[1], host[2]
    nodes = (NodeType("t", "t4", 2, 8, *double), NodeType("a", "a100", 2, 4, *host))
    return Cluster(
        random.choice(((NodeType("t", "t4", 3, 4, *host),), nodes)),
        placement=random.choice(("consolidate", "spread", "relax")),
    )


def slow(random):
    """Jobs that take time to leave and to launch, decided on before they do; or whole iterations in plain rounds."""
    costs = Costs(
        launch_s=random.choice((0, 10)),
        restart_s=random.choice((0, 10)),
        exit_s=random.choice((0, 7, 12, 150)),
        checkpoint_interval_s=random.choice((0, 20)),
    )
    round_s = random.choice((60.0, 120.0, 300.0))
    if random.random() < 0.3:
        return ExecutionModel(costs, round_s=round_s, whole_rounds=True, free_moves=random.random() < 0.5)
    return ExecutionModel(
        costs,
        round_s=round_s,
        own_rounds=random.random() < 0.2,
        decide_fraction=random.choice((1.0, 0.5, 0.9)),
        stretch=random.choice(("none", "log")),
        stretch_s=6.3,
        start_delay_s=random.choice((0.0, 10.0)),
        early_launch=random.random() < 0.7,
        free_moves=random.random() < 0.5,
    )


LAST_STEP_WITH_THE_ROUND = (160, 272)
"""A job is stopped at the very instant of its last step, but for a rounding."""


@pytest.mark.parametrize(
    "seeds", [(*range(6), *LAST_STEP_WITH_THE_ROUND), pytest.param(range(6, 50), marks=pytest.mark.thorough)]
)
def test_nodes_are_never_overdrawn_while_shares_change_hands(seeds):
    for seed in seeds:
        random = Random(seed)
        machines = scarce(random)
        gap_s = random.choice((30, 90, 300))
        work = random_training(seed, random.randint(5, 15), machines, mean_gap_s=gap_s, mean_s=300)
        mechanism = random.choice(("tune", "tune", "greedy", "proportional", "opt"))
        policy = get_policy(f"{random.choice(('fifo', 'las', 'srtf', 'ftf'))}+{mechanism}")
        policy = policy.with_parameters(sticky=random.random() < 0.6)
        if seed % 8 == 0:
            policy = get_policy("synergy")
        check(simulate(work, machines, policy, slow(random), truth=CATALOG))


def test_what_a_job_gives_up_is_had_once_it_has_left():
    """Decided at 90 s: job 1 stops at 120 s, the round's end, and has left at 127 s. Job 2 has its GPUs from then on,
    and job 0 its CPUs, for job 2 needs few.
    """
    machines = Cluster((NodeType("t", "t4", 1, 4, 0.4, 1000 * GB),))
    work = training([(0, 2, 2_000, "cifar10"), (0, 2, 3_000, "cifar10"), (40, 2, 600, "ncf")], machines)
    execution = ExecutionModel(Costs(restart_s=0, exit_s=7), round_s=60.0, decide_fraction=0.5)
    run = simulate(work, machines, get_policy("srtf+tune"), execution, truth=CATALOG)
    check(run)
    columns = run.shares.time_s, run.shares.job_id, run.shares.cpus.round(6)
    rows = list(zip(*(each.tolist() for each in columns), strict=True))
    assert rows[:2] == [(0, 0, 0.2), (0, 1, 0.2)]
    assert sorted(each[:2] for each in rows[2:4]) == [(127, 0), (127, 2)]
    assert dict(each[1:] for each in rows[2:4])[0] > 0.2


@pytest.mark.parametrize("sticky", [True, False])
@pytest.mark.parametrize("policy", ["srtf+tune", "srtf+greedy", "srtf+proportional", "las+tune", "fifo+tune"])
def test_jobs_that_take_longer_than_a_round_to_leave_put_off_nobody_for_ever(policy, sticky):
    """Two jobs on a GPU with few CPUs, for either of which less remains while it waits, for that counts the share that
    it asked for: each round one gives way to the other, which had its GPU only 150 s, two rounds and a half, later.
    """
    machines = Cluster((NodeType("t", "t4", 1, 1, 0.4, 1000 * GB),))
    work = training([(0, 1, 300, "deepspeech2"), (0, 1, 600, "deepspeech2")], machines)
    execution = ExecutionModel(Costs(restart_s=20, exit_s=150), round_s=60.0)
    chosen = get_policy(policy).with_parameters(sticky=sticky)
    run = simulate(work, machines, chosen, execution, truth=CATALOG)
    check(run)
    started = {}
    for time_s, kind, job in facts(run):
        if kind == "start":
            started[job] = time_s
        elif kind == "stop":
            assert time_s > started[job] + 150, "it was stopped before it had done anything"


@pytest.mark.parametrize(
    "odd", [{"decide_fraction": 0.5}, {"stretch": "log"}, {"start_delay_s": 5.0}, {"own_rounds": True}]
)
def test_whole_rounds_are_plain_rounds(odd):
    """A job that ends at a multiple of a round would be stopped in between, with nothing left to do, for ever."""
    with pytest.raises(InputError, match="expected own_rounds=false, decide_fraction=1"):
        ExecutionModel(round_s=60.0, whole_rounds=True, **odd)
