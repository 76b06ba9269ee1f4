"""A policy sees what its annotation declares, and nothing else: truth and estimates are not there to be read."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from jobs import cluster, workload
from training_jobs import CATALOG, policy_named, three_types, training

from synergy_core.checking.conformance import conforms
from synergy_core.errors import InputError
from synergy_core.scheduling import policies
from synergy_core.scheduling.jobs.record import Job, Request
from synergy_core.scheduling.jobs.views import (
    JOB_VIEWS,
    Allocations,
    ClusterState,
    EstimatedClusterState,
    EstimatedJobView,
    GoodputState,
    JobView,
    OracleJobView,
    PredictedClusterState,
    PredictedJobView,
    PriorityClusterState,
    shown_by,
    through,
)
from synergy_core.scheduling.policies import (
    AllocationPolicy,
    OrderingPolicy,
    allocation_policy,
    get_policy,
    ordering_policy,
    policy_names,
)
from synergy_sim.execution import Costs, ExecutionModel, SimulatedJob, TimedWork
from synergy_sim.simulate import Simulation, simulate

MACHINES = three_types()
ORDERING = [name for name in policy_names() if isinstance(get_policy(name), OrderingPolicy)]
ALLOCATION = [name for name in policy_names() if isinstance(get_policy(name), AllocationPolicy)]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Removes what a test has registered."""
    policy_names()
    monkeypatch.setattr(policies, "_found", dict(policies._found))


def seen(view):
    """A view of a job that knows the truth."""
    return through(view, lambda job: job)(
        SimulatedJob(1, 0.0, 2, 600.0, Costs(), TimedWork(600.0), request=Request(estimate_s=900.0))
    )


@pytest.mark.parametrize("view", JOB_VIEWS)
def test_a_view_shows_its_own_names_and_no_other_attribute_of_the_record(view):
    job = seen(view)
    own = shown_by(view)
    assert all(hasattr(job, name) for name in own)
    others = shown_by(SimulatedJob) | {name for each in JOB_VIEWS for name in shown_by(each)}
    for name in others - own:
        with pytest.raises(InputError, match=name):
            getattr(job, name)
    with pytest.raises(AttributeError):
        job.gpus = 8


@pytest.mark.parametrize("name", ORDERING)
def test_ordering_policy_is_given_a_view_never_the_record(name, monkeypatch):
    policy, given = get_policy(name), []

    def key(job):
        given.append(type(job))
        return policy.key(job)

    simulate(workload([(0, 8, 60), (1, 8, 60)]), cluster(1), dataclasses.replace(policy, key=key))
    assert set(given) == {policy.view}


KEPT = []


def _keeps(job):
    KEPT.append(job)
    return (job.gpus,)


@pytest.mark.parametrize("key", [_keeps, lambda job: _keeps(job), lambda job: (job._secret,)])
def test_a_key_that_may_read_more_than_its_view_shows_is_given_a_view(key):
    policy = dataclasses.replace(get_policy("fifo"), key=key)
    assert policy.of_records().key is not key


def test_a_replaced_key_that_reads_more_than_its_view_shows_is_given_the_view():
    def oracle(job):
        return (job.duration_s,)

    policy = dataclasses.replace(get_policy("fifo"), key=oracle)
    with pytest.raises(InputError, match="duration_s"):
        simulate(workload([(0, 8, 60), (1, 8, 60)]), cluster(1), policy)


@pytest.mark.parametrize("information", ["own", "all"])
@pytest.mark.parametrize("name", ALLOCATION)
def test_no_plain_attribute_of_a_state_leads_to_the_truth(name, information):
    policy = policy_named(name)
    if policy.reads_goodput:
        policy = dataclasses.replace(policy, information=information)
    work = training([(0, 2, 3_600, "bert"), (10, 1, 1_800, "cifar10")], MACHINES)
    simulation = Simulation(work, MACHINES, policy, ExecutionModel(round_s=60.0), CATALOG)
    simulation.run()
    state = simulation.scheduler.last[0]
    found = list(reachable(state))
    assert len(found) > 3
    if not policy.oracle:
        # What a job reports is a tuple of the simulator's; all else of it is the truth.
        found = [each for each in found if not isinstance(each, tuple)]
        assert not [each for each in found if isinstance(each, Job) or type(each).__module__.startswith("synergy_sim")]
    if policy.reads_goodput and information == "own":
        assert {task.spec.declared_work for task in state.tasks} == {float("inf")}


def reachable(start):
    """Everything that plain attributes and the members of collections lead to."""
    todo, known = [start], {}
    while todo:
        each = todo.pop()
        if id(each) in known or isinstance(each, str | int | float | bytes | type(None) | type) or callable(each):
            continue
        known[id(each)] = each
        yield each
        if isinstance(each, dict):
            todo += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            todo += each
        elif type(each).__module__.startswith("synergy"):
            todo += [getattr(each, name) for name in shown_by(type(each)) | set(getattr(each, "__dict__", ()))
                     if not name.startswith("_")]  # fmt: skip


def refused(action, *facts):
    """Runs an action that must fail with an InputError which names these facts."""
    with pytest.raises(InputError) as caught:
        action()
    assert all(fact in str(caught.value) for fact in facts), caught.value


def _of_a_helper(anything, job):
    return job.predicted_duration_s


def _reads_the_future(job, now_s):
    return now_s + job.remaining_s


@pytest.mark.parametrize(
    ("read", "next_change", "facts"),
    [
        (lambda job: job.duration_s, None, ("duration_s", "OracleJobView")),
        (lambda job: _of_a_helper(1, job), None, ("predicted_duration_s", "PredictedJobView")),
        (lambda job: getattr(job, "remaining" + "_s", 0.0), None, ("remaining_s", "OracleJobView")),
        (lambda job: job.submit_times_s, None, ("'submit_times_s'", "'submit_time_s'")),
        (lambda job: job.submit_time_s, _reads_the_future, ("remaining_s",)),
    ],
    ids=["truth", "in a helper", "a name made at run time", "a misspelt name", "in the change function"],
)
def test_a_policy_that_reads_what_its_view_lacks_is_refused_when_it_is_registered(read, next_change, facts):
    def register():
        @ordering_policy(preemptive=True, next_change=next_change)
        def sly(job: JobView) -> tuple[float]:
            return (read(job),)

    refused(register, "policy sly", *facts)


def test_a_branch_that_no_trial_takes_is_refused_when_a_job_takes_it():
    @ordering_policy()
    def sly(job: JobView) -> tuple[float]:
        return (job.estimate_s,) if job.gpus > 4 else (job.submit_time_s,)  # type: ignore[attr-defined]

    simulate(workload([(0, 4, 60)]), cluster(1), get_policy("sly"))
    refused(lambda: simulate(workload([(0, 8, 60)]), cluster(1), get_policy("sly")), "estimate_s", "EstimatedJobView")


@pytest.mark.parametrize(
    ("read", "declared"),
    [
        ("estimate_s", "EstimatedClusterState"),
        ("predicted_duration_s", "PredictedClusterState"),
        ("priority", "PriorityClusterState"),
        ("duration_s", "OracleClusterState"),
        ("done_work", "GoodputState"),
    ],
)
def test_an_allocation_that_reads_what_its_state_lacks_is_refused_when_it_decides(read, declared):
    @allocation_policy(round_s=60.0)
    def sly(state: ClusterState) -> Allocations:
        return state.in_order(getattr(state, read).argsort())

    refused(lambda: simulate(workload([(0, 8, 60)]), cluster(1), get_policy("sly")), read, declared)


def test_views_can_be_combined():
    class Both(EstimatedJobView, PredictedJobView):
        __slots__ = ()

    @dataclass(frozen=True)
    class Known(EstimatedClusterState, PredictedClusterState, GoodputState):
        pass

    globals().update(Both=Both, Known=Known)

    @ordering_policy()
    def both(job: "Both") -> tuple[float]:
        return (min(job.estimate_s, job.predicted_duration_s),)

    @allocation_policy(round_s=60.0, keeps_gpus=True)
    def known(state: "Known") -> Allocations:
        return state.in_order(np.minimum(state.estimate_s, state.predicted_duration_s).argsort())

    for policy in map(get_policy, ("both", "known")):
        assert (policy.predicted, policy.reads_estimates, policy.oracle) == (True, True, False)
    assert get_policy("known").reads_goodput
    conforms(get_policy("known"))


def test_an_allocation_is_given_the_same_predictions_users_and_priorities_as_an_order():
    seen = {}

    @dataclass(frozen=True)
    class Known(PredictedClusterState, PriorityClusterState):
        pass

    globals().update(Known=Known)

    @allocation_policy(round_s=60.0)
    def known(state: "Known") -> Allocations:
        users = [state.users[each] for each in state.user]
        columns = state.job_id.tolist(), state.predicted_duration_s.tolist(), state.priority.tolist(), users
        seen.update({job: rest for job, *rest in zip(*columns, strict=True)})
        return state.in_order(state.predicted_duration_s.argsort())

    rows = [(60.0 * at, 1, 30.0 + 7 * at) for at in range(40)]
    jobs = workload(rows).with_columns(user=[("ann", "bob", "cy")[row % 3] for row in range(40)])
    done = [simulate(jobs, cluster(1), get_policy(name), ExecutionModel(round_s=60.0)) for name in ("qssf", "known")]
    expected, given = (each.predicted_duration_s.tolist() for each in done)
    assert expected == given
    assert len(set(given)) > 10
    assert seen == {at: [given[at], 0, ("ann", "bob", "cy")[at % 3]] for at in range(40)}
    assert get_policy("known").reads_priority
    assert get_policy("known").keeps_gpus


def test_a_class_that_shows_more_than_the_views_is_no_annotation():
    class More(JobView):
        __slots__ = ()

        @property
        def truth(self):
            return self._job.duration_s

    globals().update(More=More)

    def register():
        @ordering_policy()
        def sly(job: "More") -> tuple[float]:
            return (job.truth,)

    refused(register, "policy sly", "JobView", "More")


def test_who_reads_estimates_is_found_out():
    names = [name for name in policy_names() if get_policy(name).reads_estimates]
    assert {"easy", "themis"} <= set(names)
    assert not {"fifo", "backfill", "srtf", "sjf", "las", "tiresias", "qssf"} & set(names)
    assert get_policy("fifo").with_parameters(backfill="easy").reads_estimates
    assert not get_policy("easy").with_parameters(backfill="none").reads_estimates


def test_an_oracle_in_a_place_without_truth_says_so():
    job = Job(1, 0.0, 2)
    with pytest.raises(InputError, match="only simulations know true run times"):
        _ = through(OracleJobView, lambda view: view.remaining_s)(job)


def test_only_policies_that_declare_it_are_given_the_truth():
    assert {name for name in ALLOCATION if get_policy(name).oracle} == {"optimus"}
