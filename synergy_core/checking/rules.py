"""The rules that every policy keeps, and the trial of a policy's functions on cases that are the same every time.

The error names the broken rule and the smallest case that breaks it. Plug-ins are not tried when they are loaded,
because every process loads them, and trying a policy that optimises takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from synergy_core.checking.cases import NOW_S, PolicyCase, random_cases, records, state_of
from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.samples import TrialJob
from synergy_core.scheduling.jobs.views import Allocations, ClusterState, GoodputState
from synergy_core.scheduling.policies import (
    AllocationPolicy,
    Key,
    OrderingPolicy,
    PlainPolicy,
    describe_error,
    place_of,
)
from synergy_core.units import TICK_S

LATER_INSTANTS_S = (1.0, 500.0, 40_000.0)
"""Seconds after which a key is computed again if the policy does not say when the key changes."""
ROUNDING_S = 1e-6

RULES = {
    "answers": "it answers every case, with the right kind of value",
    "comparable": "keys are tuples that can be sorted: comparable with each other and free of NaN",
    "pure": "the same input has the same answer, whatever was computed in between",
    "reads": "it does not modify what it reads",
    "foretold": "if a key changes by itself, next_change says when, or it falls with the clock (falls_while_running)",
    "capacity": "no more GPUs are given out than exist, of any type and on any node",
    "quotas": "no tenant gets more GPUs than `quotas_left` says",
    "types": "a job that requests a GPU type gets that type",
    "whole": "a policy that does not read goodput gives each job exactly its request, or nothing",
    "stays": "a running job that may not be stopped keeps what it holds",
    "sizes": "no job gets fewer or more GPUs than it can train on",
    "order": "the order in which jobs are listed does not matter; job_id breaks ties",
    "starts": "if no job runs and some job fits, some job gets GPUs",
    "rank": "rank(state) is a finite number for every job",
    "ends": "in a whole run, every job ends, and none waits beyond the bound of `Cluster.max_wait`",
    "placed": "in a whole run, no GPU is held twice, by a job that requested another type, or beyond a quota",
    "entitled": "in a whole run, no job within its quota waits for GPUs that are idle or lent to another tenant",
    "repeats": "in a whole run, the same jobs have the same schedule",
}
"""The rules, by name; the last four are checked by `conformance`."""


class BrokenRuleError(InputError):
    """A policy breaks a rule. rule: its name in `RULES`."""

    def __init__(self, policy: str, rule: str, finding: str, case: object) -> None:
        finding = finding.removesuffix(".")  # the message of another error may end in a full stop
        super().__init__(f"policy {policy} breaks the rule '{rule}' ({RULES[rule]}): {finding}. Smallest case: {case}.")
        self.rule = rule


class Broken(Exception):  # noqa: N818
    """A rule was broken in a case. Arguments: the rule's name, and a text that says what happened."""


def check(policy: PlainPolicy) -> None:
    """Tries the policy on random cases. Raises BrokenRuleError if it breaks one of `RULES`."""
    for case in random_cases():
        if isinstance(policy, OrderingPolicy):
            try_on(case, _ordering, policy)
        else:
            try_on(case, _allocation, policy)


def try_on(case: Any, check_rules: Callable[[Any, Any], None], policy: Any) -> None:
    """If `check_rules(policy, case)` raises Broken, raises BrokenRuleError with the smallest case that breaks the rule.

    Jobs are left out (`case.without`) as long as the same rule is still broken without them.
    """
    found = _broken(check_rules, policy, case)
    if found is None:
        return
    number = 0
    while number < len(case.jobs) and len(case.jobs) > 1:
        smaller = case.without(number)
        still = _broken(check_rules, policy, smaller)
        if still is not None and still[0] == found[0]:
            case, found = smaller, still
        else:
            number += 1
    rule, finding = found
    raise BrokenRuleError(policy.name, rule, finding, case)


def _broken(check_rules: Callable[[Any, Any], None], policy: Any, case: Any) -> tuple[str, str] | None:
    try:
        check_rules(policy, case)
    except Broken as broken:
        rule, finding = broken.args
        return rule, finding
    return None


@contextmanager
def attributed(action: str, rule: str = "answers", function: Callable[..., Any] | None = None) -> Iterator[None]:
    """Turns any exception of the `with` block into Broken. function: the message shows the last line in its file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and "read-only" in str(error):
            raise Broken("reads", f"{action} writes to the state: {error}") from error
        file = place_of(function)[0] if function else ""
        raise Broken(rule, f"{action} raised {describe_error(error, file)}") from error


def _ordering(policy: OrderingPolicy, case: PolicyCase) -> None:
    viewed, jobs = policy.of_views(), records(case)
    before = [_fields(job) for job in jobs]
    keys = [_key(viewed, job) for job in jobs]
    for job in jobs:
        for name, function, expected in (("words", viewed.words, str), ("begins_anew", viewed.begins_anew, bool)):
            if function is not None:
                with attributed(f"{name} of job {job.job_id}"):
                    value: Any = function(job)
                if not isinstance(value, expected):
                    raise Broken("answers", f"{name} of job {job.job_id} is {value!r}, expected a {expected.__name__}")
        _due_s(viewed, job)
    if [_fields(job) for job in jobs] != before:
        raise Broken("reads", "the job's record has changed")
    again = [_key(viewed, job) for job in reversed(records(case))][::-1]
    for number, (key, other) in enumerate(zip(keys, again, strict=True)):
        if _differ(key, other):
            raise Broken("pure", f"the key of job {number} was {key}, then {other}")
    with attributed(f"sorting keys {keys}", "comparable"):
        sorted(zip(keys, range(len(keys)), strict=True))
    for number in range(len(jobs)):
        _foretold(viewed, case, number, keys[number])


def _fields(job: TrialJob) -> list[Any]:
    """The values of all fields of the record and of its parts that change."""
    parts = (job, job.service, job.instants)
    slots = [(part, name) for part in parts for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    return [getattr(part, name) for part, name in slots]


def _key(policy: OrderingPolicy, job: TrialJob) -> Key:
    with attributed(f"the key of job {job.job_id}", function=policy.key):
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


def _due_s(policy: OrderingPolicy, job: TrialJob) -> float | None:
    """The instant (s) at which the key changes next, by `next_change`; None if the policy names no instant."""
    if policy.next_change is None:
        return None
    with attributed(f"next_change of job {job.job_id}"):
        due_s: Any = policy.next_change(job, NOW_S)
    if due_s is not None and (not isinstance(due_s, int | float) or math.isnan(due_s)):
        raise Broken("answers", f"next_change of job {job.job_id} is {due_s!r}, expected seconds, or None")
    return due_s


def _foretold(policy: OrderingPolicy, case: PolicyCase, number: int, key: Key) -> None:
    """Checks that a key stays the same until its next change is due, or falls with the clock if the policy says so.

    Only jobs that wait or may be stopped are checked, because the keys of other jobs have no effect.
    """
    job = records(case)[number]
    if job.running and not policy.preemptive:
        return
    due_s = _due_s(policy, job)
    for then_s in LATER_INSTANTS_S if due_s is None else ((due_s - NOW_S) / 2,):
        if then_s <= 0 or then_s == math.inf or (job.running and then_s >= job.remaining_s):
            continue
        then = _key(policy, records(case, then_s=then_s)[number])
        falls = policy.falls_while_running and job.running
        numbers = falls and all(isinstance(each, int | float) for each in (key[0], then[0]))
        if numbers and abs(then[0] - (key[0] - then_s)) <= ROUNDING_S:
            then = (key[0], *then[1:])
        if _differ(then, key):
            raise Broken("foretold", f"the key of job {number} was {key}, and {then} {then_s:g} s later without events")


def _allocation(policy: AllocationPolicy, case: PolicyCase) -> None:
    round_s: Any = policy.round_s
    if not isinstance(round_s, int | float) or not TICK_S <= round_s < math.inf:
        raise Broken("answers", f"round_s is {round_s!r}, expected seconds, at least {TICK_S:.0e}")
    state = state_of(case, policy)
    answer = _answer(policy, state)
    _within(case, state, answer)
    if not policy.reads_goodput and not np.isin(answer.gpus / state.gpus, (0.0, 1.0)).all():
        raise Broken("whole", f"it gave {_given(state, answer)}; requested were {state.gpus.tolist()}")
    if not answer.gpus.any() and not state.held_gpus.any():
        raise Broken("starts", "no job got a GPU")
    if policy.rank is not None:
        with attributed("rank"):
            rank: Any = np.asarray(policy.rank(state))
        if rank.shape != (len(state),) or rank.dtype.kind not in "biuf" or not np.isfinite(rank).all():
            raise Broken("rank", f"rank(state) is {rank.tolist()}")
    _limits_kept(policy, case)
    if len(state) > 1:  # if the policy remembers this other state, the answers below differ
        _answer(policy, state_of(case.without(0), policy))
    others = [("pure", "called again", state), ("pure", "called with an equal state", state_of(case, policy))]
    if not policy.reads_goodput:  # the order of jobs may choose among equally good optima
        reverse = state_of(case, policy, range(len(state))[::-1])
        others.append(("order", "with the jobs listed in reverse", reverse))
    for rule, when, other in others:
        other_answer = _answer(policy, other)
        if _by_job(state, answer) != _by_job(other, other_answer):
            raise Broken(rule, f"it gave {_given(state, answer)}, and {when}, {_given(other, other_answer)}")


def _answer(policy: AllocationPolicy, state: ClusterState) -> Allocations:
    with attributed("it", function=policy.allocate):
        answer: Any = policy.allocate(state)
    if not isinstance(answer, Allocations):
        raise Broken("answers", f"it answered {answer!r}, expected Allocations")
    for name in ("gpus", "gpu_type"):
        column = getattr(answer, name)
        if not isinstance(column, np.ndarray) or column.shape != (len(state),) or column.dtype.kind != "i":
            raise Broken("answers", f"{name} is {column!r}, expected {len(state)} integers, one per job")
    shape = len(state), state.cluster.nodes
    if answer.node_gpus is not None and np.shape(answer.node_gpus) != shape:
        raise Broken("answers", f"node_gpus has shape {np.shape(answer.node_gpus)}, expected (jobs, nodes) = {shape}")
    if answer.stays is not None and np.shape(answer.stays) != shape[:1]:
        raise Broken("answers", f"stays has shape {np.shape(answer.stays)}, expected (jobs,) = {shape[:1]}")
    if answer.gpus.min() < 0 or answer.gpu_type.min() < -1 or answer.gpu_type.max() >= len(state.cluster.gpu_types):
        raise Broken("answers", f"it gave {_given(state, answer)}, expected GPUs ≥ 0 and types that are −1 or an index")
    return answer


def _within(case: PolicyCase, state: ClusterState, answer: Allocations) -> None:
    """Checks that the answer respects capacities, types and quotas."""
    machines, given = case.machines, _given(state, answer)
    got = answer.gpus > 0
    kind = np.where(answer.gpu_type >= 0, answer.gpu_type, state.gpu_type)
    for index, name in enumerate(machines.gpu_types):
        if answer.gpus[kind == index].sum() > machines.gpus_of(name):
            raise Broken("capacity", f"it gave {given}; there are {machines.gpus_of(name)} of {name}")
    if answer.gpus.sum() > machines.gpus:
        raise Broken("capacity", f"it gave {given}; there are {machines.gpus}")
    if answer.node_gpus is not None:
        sizes = [each.gpus_per_node for each in machines.node_type_of]
        if (answer.node_gpus.sum(axis=0) > sizes).any() or (answer.node_gpus.sum(axis=1) != answer.gpus).any():
            raise Broken("capacity", f"on nodes, by job, it gave {answer.node_gpus.tolist()}; nodes have {sizes}")
    if (got & (state.gpu_type >= 0) & (kind != state.gpu_type)).any():
        raise Broken("types", f"it gave {given} of types {answer.gpu_type.tolist()}")
    for tenant, quota in enumerate(state.quotas_left()):
        if answer.gpus[state.virtual_cluster == tenant].sum() > quota:
            name = state.virtual_clusters[tenant]
            raise Broken("quotas", f"it gave {given}; tenant {name} has a quota of {quota:g}")


def _limits_kept(policy: AllocationPolicy, case: PolicyCase) -> None:
    """Checks the answer if some running jobs may not be stopped, and some jobs train on only one number of GPUs."""
    state = state_of(case, policy, limited=True)
    answer = _answer(policy, state)
    _within(case, state, answer)
    kept = (answer.gpus == state.held_gpus) & ((answer.gpu_type < 0) | (answer.gpu_type == state.held_type))
    if answer.node_gpus is not None and isinstance(state, GoodputState):
        held = np.zeros_like(answer.node_gpus)
        for job, placed in enumerate(state.held_placement):
            for node, mask in placed:
                held[job, node] = mask.bit_count()
        kept &= (answer.node_gpus == held).all(axis=1)
    if not kept[state.must_stay].all():
        must = ", ".join(map(str, state.job_id[state.must_stay].tolist()))
        raise Broken("stays", f"jobs {must} must keep {state.held_gpus.tolist()}; it gave {_given(state, answer)}")
    for job, gpus in enumerate(answer.gpus.tolist()):
        if isinstance(state, GoodputState) and gpus:
            spec = state.tasks[job].spec
            if not spec.min_gpus <= gpus <= spec.most_gpus:
                limits = f"{spec.min_gpus} to {spec.most_gpus}"
                raise Broken(
                    "sizes", f"job {state.job_id[job]} trains on {limits} GPUs; it gave {_given(state, answer)}"
                )


def _by_job(state: ClusterState, answer: Allocations) -> dict[int, Sequence[Any]]:
    nodes: list[Any] = [()] * len(state) if answer.node_gpus is None else answer.node_gpus.tolist()
    given = zip(answer.gpus.tolist(), answer.gpu_type.tolist(), nodes, strict=True)
    return dict(zip(state.job_id.tolist(), given, strict=True))


def _given(state: ClusterState, answer: Allocations) -> str:
    gpus = zip(state.job_id.tolist(), answer.gpus.tolist(), strict=True)
    return ", ".join(f"{count} to job {job_id}" for job_id, count in gpus)
