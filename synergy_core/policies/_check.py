"""What a policy must keep to, ours or a plug-in's, as far as its function alone can tell; put to work: `conformance`.

Cases are random and the same in every run. The error names the rule that was broken and the smallest case that breaks
it, made of the first that did by leaving out job after job. A plug-in is not tried when it is loaded, which happens in
every process: an order takes 20 ms, but a policy that solves or searches takes seconds. The command that tries it:
python -m synergy_core check NAME.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from synergy_core.errors import InputError
from synergy_core.policies._cases import NOW_S, Known, PolicyCase, random_cases, records, state_of
from synergy_core.policies._faults import in_words, place_of
from synergy_core.policies._registry import AllocationPolicy, Key, OrderingPolicy, PlainPolicy
from synergy_core.state import Allocations, ClusterState
from synergy_core.state.goodput_state import GoodputState
from synergy_core.units import TICK_S

LATER_S = (1.0, 500.0, 40_000.0)
"""After how long a key is asked for again, where nobody says when it changes."""
ROUNDING_S = 1e-6

RULES = {
    "answers": "it answers every case, and with the right kind of value",
    "comparable": "keys are tuples that can be put in order: comparable with each other, no NaN in them",
    "pure": "the same question has the same answer, whatever was asked in between",
    "reads": "it changes nothing of what it is shown",
    "foretold": "a key that changes by itself says when (next_change) or falls with the clock (falls_while_running)",
    "capacity": "no more GPUs are given out than there are, of any type, on any node",
    "quotas": "no tenant is given more than its quota, unless tenants may borrow",
    "types": "a job that asks for a GPU type is given that type",
    "whole": "a job of which nothing is known but its request is given that, or nothing",
    "stays": "a running job that may not be stopped keeps what it holds",
    "sizes": "no job is given fewer or more GPUs than it can train on",
    "order": "the order in which jobs are listed decides nothing; equals are told apart by job_id",
    "starts": "where nobody runs and somebody fits, somebody is given GPUs",
    "rank": "rank(state) is a finite number for every job",
    "ends": "put to work, every job ends: nobody starves under a finite load",
    "placed": "put to work, no GPU is held twice, nor by a job of another type, nor beyond a quota",
    "repeats": "put to work, the same jobs have the same schedule",
}
"""The rules, by name; the last three are checked by `synergy_core.conformance`."""


class BrokenRuleError(InputError):
    """A policy breaks a rule. rule: its name in `RULES`."""

    def __init__(self, policy: str, rule: str, what: str, case: object) -> None:
        what = what.removesuffix(".")  # of the message of another error
        super().__init__(f"policy {policy} breaks the rule '{rule}' ({RULES[rule]}): {what}. Smallest case: {case}.")
        self.rule = rule


class Broken(Exception):  # noqa: N818
    """A rule was broken within a case. Arguments: the rule's name, and what happened."""


class Tried(Protocol):
    """Something to try a policy on: some jobs, and whatever else it takes."""

    @property
    def jobs(self) -> Sequence[object]:
        """The jobs, of which some can be left out."""

    def without(self, at: int) -> Self:
        """The case less one job."""


class Named(Protocol):
    """A policy of any kind."""

    @property
    def name(self) -> str:
        """As it was typed."""


AnyCase = TypeVar("AnyCase", bound=Tried)
AnyPolicy = TypeVar("AnyPolicy", bound="Named")


def check(policy: PlainPolicy) -> None:
    """Tries the policy on random cases. Raises BrokenRuleError where it breaks one of `RULES`."""
    for case in random_cases():
        if isinstance(policy, OrderingPolicy):
            try_on(case, _ordering, policy)
        else:
            try_on(case, _allocation, policy)


def try_on(case: AnyCase, held: Callable[[AnyPolicy, AnyCase], None], policy: AnyPolicy) -> None:
    """Raises BrokenRuleError with the smallest such case where `held(policy, case)` raises Broken.

    Smallest: less every job without which the same rule is broken still.
    """
    found = _broken(held, policy, case)
    if found is None:
        return
    at = 0
    while at < len(case.jobs) and len(case.jobs) > 1:
        fewer = case.without(at)
        still = _broken(held, policy, fewer)
        if still is not None and still[0] == found[0]:
            case, found = fewer, still
        else:
            at += 1
    rule, what = found
    raise BrokenRuleError(policy.name, rule, what, case)


def _broken(held: Callable[[AnyPolicy, AnyCase], None], policy: AnyPolicy, case: AnyCase) -> tuple[str, str] | None:
    try:
        held(policy, case)
    except Broken as broken:
        rule, what = broken.args
        return rule, what
    return None


@contextmanager
def attributed(what: str, rule: str = "answers", of: Callable[..., Any] | None = None) -> Iterator[None]:
    """Whatever is raised within breaks that rule of the policy's. what: was done, the subject of `raised`. of: the
    function that was asked, whose line is named.
    """
    try:
        yield
    except Exception as error:
        raise Broken(rule, f"{what} raised {in_words(error, place_of(of)[0] if of else '')}") from error


# Orders


def _ordering(policy: OrderingPolicy, case: PolicyCase) -> None:
    of_records, jobs = policy.of_records(), records(case)
    before = [_fields(job) for job in jobs]
    keys = [_key(of_records, job) for job in jobs]
    for job in jobs:
        _asides(of_records, job)
    if [_fields(job) for job in jobs] != before:
        raise Broken("reads", "the job is another after it was asked about")
    again = [_key(of_records, job) for job in reversed(records(case))][::-1]
    for at, (key, other) in enumerate(zip(keys, again, strict=True)):
        if _differ(key, other):
            raise Broken("pure", f"the key of job {at} was {key}, then {other}")
    with attributed(f"putting keys {keys} in order", "comparable"):
        sorted(zip(keys, range(len(keys)), strict=True))
    for at in range(len(jobs)):
        _foretold(of_records, case, at, keys[at])


def _key(policy: OrderingPolicy, job: Known) -> Key:
    with attributed(f"the key of job {job.job_id}", of=policy.key):
        key: Any = policy.key(job)
    if not isinstance(key, tuple):
        raise Broken("comparable", f"the key of job {job.job_id} is {key!r}, expected a tuple")
    if any(isinstance(each, float) and math.isnan(each) for each in key):
        raise Broken("comparable", f"the key of job {job.job_id} is {key}")
    if policy.falls_while_running and not key:
        raise Broken("comparable", f"the key of job {job.job_id} is empty, expected a time that falls with the clock")
    return key


def _differ(key: Key, other: Key) -> bool:
    with attributed(f"comparing {key} with {other}", "comparable"):
        return key != other


def _asides(policy: OrderingPolicy, job: Known) -> None:
    """Checks that what the policy has beside its key answers with the right type."""
    for name, function, wanted in (("words", policy.words, str), ("begins_anew", policy.begins_anew, bool)):
        if function is not None:
            with attributed(f"{name} of job {job.job_id}"):
                said: Any = function(job)
            if not isinstance(said, wanted):
                raise Broken("answers", f"{name} of job {job.job_id} is {said!r}, expected a {wanted.__name__}")
    _due_s(policy, job)


def _due_s(policy: OrderingPolicy, job: Known) -> float | None:
    """The instant (s) at which the key changes next, as the policy says it; None: it says none."""
    if policy.next_change is None:
        return None
    with attributed(f"next_change of job {job.job_id}"):
        due_s: Any = policy.next_change(job, NOW_S)
    if due_s is not None and (not isinstance(due_s, int | float) or math.isnan(due_s)):
        raise Broken("answers", f"next_change of job {job.job_id} is {due_s!r}, expected seconds, or None")
    return due_s


def _foretold(policy: OrderingPolicy, case: PolicyCase, at: int, key: Key) -> None:
    """Checks that a key stays until its next change is due, or falls with the clock where the policy says it does.

    Only of jobs that wait or may be stopped: other keys order nothing.
    """
    job = records(case)[at]
    if job.running and not policy.preemptive:
        return
    due_s = _due_s(policy, job)
    later_s = LATER_S if due_s is None else ((due_s - NOW_S) / 2,)
    for then_s in later_s:
        if then_s <= 0 or then_s == math.inf or (job.running and then_s >= job.remaining_s):
            continue
        then = _key(policy, records(case, then_s=then_s)[at])
        falls = policy.falls_while_running and job.running
        numbers = falls and all(isinstance(each, int | float) for each in (key[0], then[0]))
        if numbers and abs(then[0] - (key[0] - then_s)) <= ROUNDING_S:
            then = (key[0], *then[1:])
        if _differ(then, key):
            raise Broken("foretold", f"the key of job {at} was {key}, and {then} after {then_s:g} s without an event")


def _fields(job: Known) -> dict[str, Any]:
    return {name: getattr(job, name) for type_ in type(job).__mro__ for name in getattr(type_, "__slots__", ())}


# Allocations


def _allocation(policy: AllocationPolicy, case: PolicyCase) -> None:
    round_s: Any = policy.round_s
    if not isinstance(round_s, int | float) or not TICK_S <= round_s < math.inf:
        raise Broken("answers", f"round_s is {round_s!r}, expected seconds, at least {TICK_S:.0e}")
    state = state_of(case, policy)
    answer = _answer(policy, state)
    _within(case, state, answer)
    if not policy.reads_goodput and not np.isin(answer.gpus / state.gpus, (0.0, 1.0)).all():
        raise Broken("whole", f"{_given(state, answer)} of {state.gpus.tolist()} requested")
    if not answer.gpus.any() and not state.held_gpus.any():
        raise Broken("starts", "nobody was given a GPU")
    _ranked(policy, state)
    _limits_kept(policy, case)
    if len(state) > 1:  # what it keeps of another state would show in the answers below
        _answer(policy, state_of(case.without(0), policy))
    _alike(state, answer, state, _answer(policy, state), "pure", "asked again")
    fresh = state_of(case, policy)
    _alike(state, answer, fresh, _answer(policy, fresh), "pure", "asked on a state that is the same")
    if not policy.reads_goodput:  # equally good optima are told apart by the order of jobs
        turned = state_of(case, policy, range(len(state))[::-1])
        _alike(state, answer, turned, _answer(policy, turned), "order", "with the jobs listed the other way round")


def _answer(policy: AllocationPolicy, state: ClusterState) -> Allocations:
    try:
        answer: Any = policy.allocate(state)
    except ValueError as error:
        if "read-only" in str(error):
            raise Broken("reads", f"it writes to the state: {error}") from error
        raise Broken("answers", f"it raised {in_words(error, place_of(policy.allocate)[0])}") from error
    except Exception as error:
        raise Broken("answers", f"it raised {in_words(error, place_of(policy.allocate)[0])}") from error
    if not isinstance(answer, Allocations):
        raise Broken("answers", f"it answered {answer!r}, expected Allocations")
    for name in ("gpus", "gpu_type"):
        column = getattr(answer, name)
        if not isinstance(column, np.ndarray) or column.shape != (len(state),) or column.dtype.kind != "i":
            raise Broken("answers", f"{name} is {column!r}, expected {len(state)} integers, one per job")
    on_nodes = len(state), state.cluster.nodes
    if answer.node_gpus is not None and np.shape(answer.node_gpus) != on_nodes:
        raise Broken("answers", f"node_gpus is {np.shape(answer.node_gpus)}, expected {on_nodes}: jobs, nodes")
    if answer.gpus.min() < 0 or answer.gpu_type.min() < -1 or answer.gpu_type.max() >= len(state.cluster.gpu_types):
        raise Broken("answers", f"it gave {_given(state, answer)}: numbers of GPUs are ≥ 0, types −1 or an index")
    return answer


def _within(case: PolicyCase, state: ClusterState, answer: Allocations) -> None:
    """Checks that the answer keeps to capacities, types and quotas."""
    machines, given = case.machines, _given(state, answer)
    got = answer.gpus > 0
    kind = np.where(answer.gpu_type >= 0, answer.gpu_type, state.gpu_type)
    for index, name in enumerate(machines.gpu_types):
        if answer.gpus[kind == index].sum() > machines.gpus_of(name):
            raise Broken("capacity", f"it gave {given}; there are {machines.gpus_of(name)} of {name}")
    if answer.gpus.sum() > machines.gpus:
        raise Broken("capacity", f"it gave {given}; there are {machines.gpus}")
    if answer.node_gpus is not None:
        most = [each.gpus_per_node for each in machines.node_types for _ in range(each.nodes)]
        if (answer.node_gpus.sum(axis=0) > most).any() or (answer.node_gpus.sum(axis=1) != answer.gpus).any():
            raise Broken("capacity", f"on nodes, by job, it gave {answer.node_gpus.tolist()}; nodes have {most}")
    if (got & (state.gpu_type >= 0) & (kind != state.gpu_type)).any():
        raise Broken("types", f"it gave {given} of types {answer.gpu_type.tolist()}")
    for tenant, most_gpus in enumerate(state.quotas_left()):
        if answer.gpus[state.virtual_cluster == tenant].sum() > most_gpus:
            name = state.virtual_clusters[tenant]
            raise Broken("quotas", f"it gave {given}; tenant {name} has a quota of {most_gpus:g}")


def _limits_kept(policy: AllocationPolicy, case: PolicyCase) -> None:
    """Checks an answer where some running jobs may not be stopped, and some jobs train on one number of GPUs only."""
    state = state_of(case, policy, limited=True)
    answer = _answer(policy, state)
    _within(case, state, answer)
    kept = (answer.gpus == state.held_gpus) & ((answer.gpu_type < 0) | (answer.gpu_type == state.held_type))
    if answer.node_gpus is not None and isinstance(state, GoodputState):
        held = np.zeros_like(answer.node_gpus)
        for at, placed in enumerate(state.held_placement):
            for node, mask in placed:
                held[at, node] = mask.bit_count()
        kept &= (answer.node_gpus == held).all(axis=1)
    if not kept[state.must_stay].all():
        must = ", ".join(map(str, state.job_id[state.must_stay].tolist()))
        raise Broken("stays", f"jobs {must} must keep {state.held_gpus.tolist()}; it gave {_given(state, answer)}")
    for at, each in enumerate(answer.gpus.tolist()):
        if isinstance(state, GoodputState) and each:
            spec = state.tasks[at].spec
            if not spec.min_gpus <= each <= spec.most_gpus:
                limits = f"{spec.min_gpus} to {spec.most_gpus}"
                raise Broken(
                    "sizes", f"job {state.job_id[at]} trains on {limits} GPUs; it gave {_given(state, answer)}"
                )


def _ranked(policy: AllocationPolicy, state: ClusterState) -> None:
    if policy.rank is None:
        return
    with attributed("rank"):
        rank: Any = np.asarray(policy.rank(state))
    if rank.shape != (len(state),) or rank.dtype.kind not in "biuf" or not np.isfinite(rank).all():
        raise Broken("rank", f"it is {rank.tolist()}")


def _alike(
    state: ClusterState, answer: Allocations, other_state: ClusterState, other: Allocations, rule: str, when: str
) -> None:
    """Checks that both answers give every job the same."""
    if _by_job(state, answer) != _by_job(other_state, other):
        raise Broken(rule, f"it gave {_given(state, answer)}, and {when} {_given(other_state, other)}")


def _by_job(state: ClusterState, answer: Allocations) -> dict[int, Sequence[Any]]:
    nodes: list[Any] = [()] * len(state) if answer.node_gpus is None else answer.node_gpus.tolist()
    given = zip(answer.gpus.tolist(), answer.gpu_type.tolist(), nodes, strict=True)
    return dict(zip(state.job_id.tolist(), given, strict=True))


def _given(state: ClusterState, answer: Allocations) -> str:
    gpus = zip(state.job_id.tolist(), answer.gpus.tolist(), strict=True)
    return ", ".join(f"{each} to job {job_id}" for job_id, each in gpus)
