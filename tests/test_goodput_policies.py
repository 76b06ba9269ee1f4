"""What every policy that reads goodput keeps to, on every kind of machine."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from jobs import finish_s, workload
from training_jobs import CATALOG, READERS, given, policy_named, random_training, run, t4s, three_types, training

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.spec import powers_and_whole_nodes
from synergy_core.scheduling.policies import get_policy
from synergy_runs.outputs.facts import Kind
from synergy_runs.outputs.metrics import job_table
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate
from synergy_sim.truth import Truth
from synergy_sim.truth.application import Disturbance

MACHINES = {
    "three-types": three_types(),
    "sizes": Cluster((NodeType("x", "t4", 1, 8), NodeType("y", "t4", 2, 4))),
    "six-gpu-nodes": t4s(3, 6),
    "quotas": t4s(virtual_clusters={"a": 8, "b": 8}),
    "no-data-sheet": Cluster((NodeType("z", "z9000", 2, 8),)),
}
PHYSICAL = {
    "costs": Costs(15.0, 70.0, 7.0, 10.0),
    **{"round_s": 119.7, "decide_fraction": 0.5, "stretch": "log", "stretch_s": 6.3},
}
BLURRED = Truth(None, disturbance=Disturbance(0.1, 0.2, 2.0, seed=3))


def jobs_for(machine, seed=3, count=14, truth=CATALOG, **more):
    tenants = [("a", "b")[at % 2] for at in range(count)]
    return random_training(seed, count, machine, sizes=(1, 2, 4, 8), truth=truth, tenants=tenants, **more)


@pytest.mark.parametrize("name", READERS)
def test_every_job_ends_on_gpus_without_a_data_sheet(name):
    """Other machines, costs and levels of information: the random cases of test_cases.py."""
    machine = MACHINES["no-data-sheet"]
    made = jobs_for(machine, truth=BLURRED)
    assert np.isfinite(finish_s(run(made, machine, name, truth=BLURRED, **PHYSICAL))).all()


def watched(policy):
    """The policy, and a list of every decision's state and answer, which grows as it is asked."""
    seen = []

    def allocate(state):
        answer = policy.allocate(state)
        seen.append((state, answer))
        return answer

    return replace(policy, allocate=allocate), seen


@pytest.mark.parametrize(
    ("name", "machine"), [("sia", "three-types"), ("sia", "quotas"), ("synergy", "sizes"), ("synergy", "six-gpu-nodes")]
)
def test_job_under_restart_keeps_what_it_holds(name, machine):
    policy, seen = watched(policy_named(name))
    run(jobs_for(MACHINES[machine]), MACHINES[machine], policy, Costs(250.0, 250.0))
    kept_rows = 0
    for state, answer in seen:
        kept = (answer.gpus == state.held_gpus) & (answer.gpu_type == state.held_type)
        assert kept[state.keeps_row].all()
        kept_rows += int(state.keeps_row.sum())
    assert kept_rows > 20


@pytest.mark.parametrize("name", ["sia", "synergy", "optimus"])
def test_no_job_outgrows_its_limit(name):
    truth = Truth(None, most_gpus=4)
    made = random_training(6, 12, t4s(), truth=truth, sizes=(1, 2), mean_s=5_000.0)
    done = run(made, t4s(), name, truth=truth)
    assert done.events.gpus[done.events.kind == Kind.START].max() <= 4


def test_moving_at_no_cost_loses_no_time_and_no_progress():
    """A job that only has to make room goes on as it was, also when it moves during its restart."""
    machine = t4s(2, 4)
    made = training([(0, 2, 10_000, "bert"), (0, 2, 1, "cifar10"), (0, 4, 10_000, "ncf")], machine)
    want = given(lambda state: np.minimum(state.gpus, 4), tunes_batch=False)
    costs = Costs(100.0, 100.0)
    plain = finish_s(run(made, machine, want, costs))
    moving = finish_s(run(made, machine, want, costs, free_moves=True))
    np.testing.assert_allclose(plain, moving, atol=1e-3)


@pytest.mark.parametrize("name", ["sia", "synergy"])
def test_undeclared_work_moves_no_decision(name):
    """At level own, a job's declared work may be anything."""
    made = random_training(8, 10, t4s())
    first, second = (
        run(made, t4s(), name, truth=Truth(None, declared_error=error), information="own") for error in (0.0, 2.0)
    )
    assert first.events.digest() == second.events.digest()


def test_wrong_declarations_are_survived():
    truth = Truth(None, declared_error=3.0)
    made = random_training(8, 16, t4s(), truth=truth)
    assert np.isfinite(finish_s(run(made, t4s(), "synergy", truth=truth, information="all"))).all()


@pytest.mark.parametrize("name", READERS)
def test_job_that_arrives_at_a_decision_and_restarts_for_nothing_has_a_worth(name):
    made = training([(0, 1, 100, "bert"), (60, 1, 100, "bert")], t4s())
    assert np.isfinite(finish_s(run(made, t4s(), name, Costs(restart_s=0.0)))).all()


def test_job_whose_start_takes_longer_than_its_work_starts_on_fewer_gpus():
    """A start takes as long on many GPUs as on few."""
    rows = [(0, 4, 3_000, "bert"), (600, 4, 20, "bert"), (600, 4, 3_000, "bert"), (600, 4, 3_000, "bert")]
    for start_s, expected in ((0.0, 4), (300.0, 2)):
        policy, seen = watched(get_policy("synergy"))
        run(training(rows, t4s()), t4s(), policy, Costs(launch_s=start_s, restart_s=start_s))
        given = [int(answer.gpus[state.job_id == 1].sum()) for state, answer in seen]
        assert next(filter(None, given)) == expected


RESTARTS = Costs(30.0, 30.0)


def test_no_job_waits_very_long_while_others_come_and_go():
    """The first job always has most time left, so it is always worth least, but there are fewer jobs than GPUs."""
    rows = [(0, 2, 3_000, "imagenet"), *((60 + 30 * at, 2, 240, "bert") for at in range(150))]
    longest_s = []
    for patience_s in (600.0, 1e9):
        policy = get_policy("synergy").with_parameters(patience_s=patience_s)
        longest_s.append(job_table(run(training(rows, t4s(2, 8)), t4s(2, 8), policy, RESTARTS)).waiting_s.max())
    assert longest_s[0] < 2_400.0 < 3_600.0 < longest_s[1]


def test_job_that_was_restarted_often_is_restarted_less():
    """Short jobs come and go beside a long one that could use their GPUs in between."""
    rows = [(0, 8, 40_000, "imagenet"), *((300 + 300 * at, 4, 200, "bert") for at in range(120))]
    most = []
    for interval_s in (3_600.0, 0.0):
        policy = get_policy("synergy").with_parameters(restart_interval_s=interval_s)
        most.append(job_table(run(training(rows, t4s(1, 8)), t4s(1, 8), policy, RESTARTS)).restarts.max())
    assert most[0] < most[1] / 2


def test_job_under_restart_does_not_move_to_make_room():
    """When the last job comes, one of two jobs of 2 GPUs has to move to the other's node; one is just being started."""
    ended = [(0, 4, 1, "cifar10"), (0, 2, 60, "cifar10")]
    rows = [*ended, (0, 2, 90_000, "ncf"), (530, 2, 90_000, "ncf"), (680, 4, 90_000, "ncf")]
    machine = t4s(2, 4)
    want = given(lambda state: state.gpus, tunes_batch=False)
    events = run(training(rows, machine), machine, want, Costs(500.0, 500.0)).events
    stops = events.job_id[events.kind == Kind.STOP].tolist()
    assert stops == [2]


def test_job_without_a_known_model_is_refused_with_what_to_type():
    with pytest.raises(InputError, match=r"trace\.models=mix"):
        run(workload([(0, 1, 100)]), t4s(), "sia")


def test_greedy_plug_in_is_caught():
    with pytest.raises(InputError, match=r"32 GPUs.* 16"):
        run(training([(0, 1, 100, "bert")], t4s()), t4s(), given(lambda state: [32]))


def test_launches_wait_for_the_gpus_of_jobs_that_end_by_themselves():
    """A completion that is rounded down to the clock's grid still comes before the launch on its GPUs."""
    run(random_training(0, 25, t4s(), truth=BLURRED), t4s(), "synergy", truth=BLURRED, **PHYSICAL)


def test_gpus_given_are_gpus_held():
    """What the policy answered is what every job holds at the next decision, or it has ended."""
    policy, seen = watched(get_policy("synergy"))
    simulate(jobs_for(three_types()), three_types(), policy, ExecutionModel(), truth=CATALOG)
    held = 0
    for (state, answer), (after, _) in pairwise(seen):
        given = dict(zip(state.job_id.tolist(), answer.gpus.tolist(), strict=True))
        for job_id, gpus in zip(after.job_id.tolist(), after.held_gpus.tolist(), strict=True):
            assert gpus == given.get(job_id, 0)
            held += gpus
    assert held > 500


def test_rows_of_a_type_whose_nodes_differ_reach_over_the_smaller_ones():
    """Else a job larger than the large nodes together would wait for ever."""
    mixed = Cluster((NodeType("small", "t4", 3, 2), NodeType("large", "t4", 2, 4), NodeType("other", "a100", 1, 8)))
    rows = powers_and_whole_nodes(mixed)
    of_t4 = rows.gpu_type == mixed.gpu_types.index("t4")
    assert rows.gpus[of_t4].tolist() == [1, 2, 4, 8, 10, 12, 14]
    assert rows.nodes[of_t4].tolist() == [1, 1, 1, 2, 3, 4, 5]


def test_gavel_counts_half_of_the_round_it_decides_in_as_received():
    policy, seen = watched(get_policy("gavel"))
    run(training([(0, 1, 100, "bert")], t4s()), t4s(), policy, round_s=90.0)
    assert {state.round_s for state, _ in seen} == {90.0}


@pytest.mark.parametrize("name", ["synergy", "sia", "ftf"])
def test_choice_that_a_policy_does_not_have_is_refused_before_the_first_job(name):
    with pytest.raises(InputError, match=f"method of policy {name} 'greedy'"):
        get_policy(name).with_parameters(method="greedy")
    assert get_policy(name).with_parameters(method="steps").parameters["method"] == "steps"


def test_jobs_that_can_run_nowhere_get_nothing_the_moment_they_come(monkeypatch):
    policy, seen = watched(policy_named("synergy"))
    run(jobs_for(t4s(), count=3), t4s(), policy)
    state = replace(seen[0][0], submit_time_s=np.full(len(seen[0][0].submit_time_s), seen[0][0].now_s))
    goodput, unknown, valid = state.runnable(state.rows(), growth=4.0, first_gpus=4, batch="max")
    monkeypatch.setattr(type(state), "runnable", lambda *_, **__: (goodput * 0.0, unknown, valid & False))
    assert not policy_named("synergy").allocate(state).gpus.any()
