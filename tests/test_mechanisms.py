"""Mechanisms that share out CPUs and memory: what each guarantees, on random rounds and put to work."""

import re
from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_core.checking.conformance import conforms
from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType, Share
from synergy_core.scheduling.policies import AllocationPolicy, get_policy, policy_names
from synergy_core.scheduling.policies.mechanisms import get_mechanism, mechanism_names
from synergy_core.scheduling.policies.mechanisms._round import CHECKED, Applicant, Grant, Hosts, SharingRound, least
from synergy_core.scheduling.policies.mechanisms.opt import total_speed
from synergy_core.units import GB

ORDERS = sorted(
    name
    for name in policy_names()
    if not isinstance(get_policy(name), AllocationPolicy) or get_policy(name).line is not None
)
NODES = (
    (NodeType("v", "v100", 3, 4, 12.0, 250 * GB),),
    (NodeType("v", "v100", 2, 8, 24.0, 500 * GB), NodeType("t", "t4", 3, 2, 12.0, 64 * GB)),
    (NodeType("v", "v100", 1, 8, 24.0, 500 * GB), NodeType("w", "v100", 2, 4, 24.0, 100 * GB)),
)


@st.composite
def rounds(draw):
    """Jobs that gain from CPUs, from memory, from both or from neither; some run where they fit."""
    cluster = Cluster(draw(st.sampled_from(NODES)), virtual_clusters=draw(st.sampled_from(({}, {"a": 6, "b": 4}))))
    kinds = len(cluster.gpu_types)
    jobs, held = [], Hosts(SharingRound([], cluster, _quotas(cluster), True))
    for _ in range(draw(st.integers(1, 14))):
        gpus = draw(st.sampled_from((1, 1, 1, 2, 3, 4, 8)))
        asked = draw(st.integers(-1, kinds - 1))
        wanted = tuple(_wanted(draw, each, gpus) for each in _alike(cluster))
        applicant = Applicant(
            gpus,
            (asked,) if asked >= 0 else tuple(range(kinds)),
            wanted,
            tuple(map(least, wanted, cluster.proportional)),
            draw(st.integers(0, len(_quotas(cluster)) - 1)),
            (),
            None,
            _speed(wanted, cluster.proportional),
        )
        if draw(st.booleans()):
            applicant = _running(held, applicant)
        jobs.append(applicant)
    order = draw(st.permutations(jobs))
    return SharingRound(order, cluster, _quotas(cluster), draw(st.booleans()))


def _quotas(cluster):
    return list(map(float, cluster.virtual_clusters.values())) or [float("inf")]


def _alike(cluster):
    """For each GPU type, the node with the fewest CPUs and least memory per GPU."""
    return [
        min((each for each in cluster.node_types if each.gpu_type == kind), key=lambda each: each.proportional)
        for kind in cluster.gpu_types
    ]


def _wanted(draw, node, gpus):
    most = min(gpus, node.gpus_per_node)
    cpus = draw(st.sampled_from((0.3, 0.5, 1.0, 1.5, 3.0, 8.0))) * node.proportional.cpus
    memory = draw(st.sampled_from((0.1, 0.5, 1.0, 2.0, 3.0))) * node.proportional.memory_bytes
    return Share(min(cpus, node.cpus / most), min(memory, node.memory_bytes / most))


def _speed(wanted, proportional):
    def rate(kind, share):
        want = wanted[kind]
        return min(1.0, share.cpus / want.cpus, share.memory_bytes / want.memory_bytes)

    return lambda kind, share: rate(kind, share) / rate(kind, proportional[kind])


def _running(hosts, applicant):
    """The applicant where it runs, with its proportional share, if there is room."""
    for kind in applicant.kinds:
        on = hosts.find(applicant, kind, None)
        if on and applicant.gpus <= hosts.quotas.left(applicant.tenant):
            share = hosts.proportional(on)
            hosts.take(applicant, Grant(on, share))
            kinds = (kind, *(each for each in applicant.kinds if each != kind))
            return replace(applicant, held=on, share=share, kinds=kinds)
    return applicant


def _taken(round, answer):
    """The resources left after all grants; fails if a grant does not fit."""
    hosts = Hosts(round, CHECKED)
    for job, grant in zip(round.jobs, answer, strict=True):
        if grant is not None:
            assert sum(gpus for _, gpus in grant.on) == job.gpus
            assert job.gpus <= hosts.quotas.left(job.tenant)
            assert hosts.room(grant.on, grant.share)
            assert round.kind_of_node[grant.on[0][0]] in job.kinds
            hosts.take(job, grant)
    return hosts


ways = st.fixed_dictionaries({"sticky": st.booleans(), "hand_out": st.booleans()})


@given(rounds(), ways)
def test_tune_makes_nobody_slower_than_its_proportional_share(round, how):
    answer = get_mechanism("tune").with_parameters(**how).share_out(round)
    for job, grant in zip(round.jobs, answer, strict=True):
        if grant is not None:
            assert job.speed(round.kind_of_node[grant.on[0][0]], grant.share) >= 1.0 - 1e-9


@given(rounds(), ways)
def test_tune_leaves_no_gpu_idle_for_want_of_cpus_or_memory(round, how):
    answer = get_mechanism("tune").with_parameters(**how).share_out(round)
    hosts = _taken(round, answer)
    for job, grant in zip(round.jobs, answer, strict=True):
        if grant is None and job.gpus <= hosts.quotas.left(job.tenant):
            assert not any(hosts.find(job, kind, None) for kind in job.kinds)


@given(rounds(), st.booleans())
def test_handing_out_makes_nobody_slower(round, sticky):
    without, with_rest = (
        get_mechanism("tune").with_parameters(sticky=sticky, hand_out=each).share_out(round) for each in (False, True)
    )
    for job, before, after in zip(round.jobs, without, with_rest, strict=True):
        assert (before is None) == (after is None)
        if before is not None:
            kind = round.kind_of_node[before.on[0][0]]
            assert after.on == before.on
            assert job.speed(kind, after.share) >= job.speed(kind, before.share)


@given(rounds(), st.sampled_from(["greedy", "proportional"]), st.booleans())
def test_who_gets_nothing_fits_nowhere_with_the_share_that_the_mechanism_gives(round, name, sticky):
    """greedy: all that a job can use, or nothing; proportional: what GPUs bring, and they alone must fit."""
    answer = get_mechanism(name).with_parameters(sticky=sticky).share_out(round)
    hosts = _taken(round, answer)
    for job, grant in zip(round.jobs, answer, strict=True):
        if grant is not None:
            own = hosts.proportional(grant.on)
            assert grant.share == (job.wanted[round.kind_of_node[grant.on[0][0]]] if name == "greedy" else own)
        elif job.gpus <= hosts.quotas.left(job.tenant):
            assert not any(hosts.find(job, kind, job.wanted[kind] if name == "greedy" else None) for kind in job.kinds)


@given(rounds(), st.sampled_from(["tune", "proportional"]))
def test_where_everybody_runs_already_and_has_room_nobody_moves(round, name):
    round = replace(round, jobs=[job for job in round.jobs if job.held])
    answer = get_mechanism(name).share_out(round)
    if all(grant is not None for grant in answer):
        assert [grant.on for grant in answer] == [job.held for job in round.jobs]


@settings(max_examples=25)  # integer programmes
@given(rounds(), st.booleans(), st.booleans())
def test_the_upper_bound_is_no_slower_than_any_other_mechanism(round, sticky, hand_out):
    bound = total_speed(round, get_mechanism("opt").with_parameters(sticky=sticky).share_out(round))
    for name in ("proportional", "greedy", "tune"):
        how = {"sticky": sticky} | ({"hand_out": hand_out} if name == "tune" else {})
        other = get_mechanism(name).with_parameters(**how).share_out(round)
        assert bound >= total_speed(round, other) * (1 - 1e-9)


@settings(max_examples=15)  # an integer programme each
@given(rounds())
def test_the_upper_bound_is_one_where_all_nodes_of_a_type_are_alike(round):
    """No more is given out than all nodes have, and nobody is slower than with its proportional share."""
    opt = get_mechanism("opt").share_out(round)
    pooled = {}
    for job, grant in zip(round.jobs, opt, strict=True):
        if grant is not None:
            kind = round.kind_of_node[grant.on[0][0]]
            cpus, memory = pooled.get(kind, (0.0, 0.0))
            pooled[kind] = (cpus + job.gpus * grant.share.cpus, memory + job.gpus * grant.share.memory_bytes)
            assert job.speed(kind, grant.share) >= 1.0 - 1e-9
    for kind, (cpus, memory) in pooled.items():
        nodes = [each for each in round.cluster.node_types if each.gpu_type == round.cluster.gpu_types[kind]]
        assert cpus <= sum(each.nodes * each.cpus for each in nodes) * (1 + 1e-6)
        assert memory <= sum(each.nodes * each.memory_bytes for each in nodes) * (1 + 1e-6)


@given(rounds(), st.sampled_from(sorted(mechanism_names())), st.booleans(), st.data())
def test_pinned_jobs_keep_what_they_were_given_whoever_else_comes(round, name, sticky, data):
    share_out = get_mechanism(name).with_parameters(sticky=sticky).share_out
    kinds, pinned, others = round.kind_of_node, [], []
    for job, grant in zip(round.jobs, share_out(round), strict=True):
        if grant is None:
            others.append(replace(job, held=(), share=None))
            continue
        kind = kinds[grant.on[0][0]]
        order = (kind, *(each for each in job.kinds if each != kind))
        ran = replace(job, kinds=order, held=grant.on, share=grant.share, pinned=data.draw(st.booleans()))
        (pinned if ran.pinned else others).append(ran)
    jobs = data.draw(st.permutations(pinned)) + data.draw(st.permutations(others))
    answer = share_out(replace(round, jobs=jobs))
    assert [grant and grant.on for grant in answer[: len(pinned)]] == [job.held for job in jobs[: len(pinned)]]
    if not get_mechanism(name).pooled:
        _taken(replace(round, jobs=jobs), answer)


@pytest.mark.parametrize(("order", "name"), list(zip(ORDERS, cycle(sorted(mechanism_names())), strict=False)))
def test_every_order_goes_with_mechanisms(order, name, monkeypatch):
    monkeypatch.setattr("synergy_core.checking.conformance.JOBS", (6,))
    conforms(get_policy(f"{order}+{name}"))


@pytest.mark.parametrize("name", sorted(mechanism_names()))
def test_whoever_does_not_fit_is_overtaken(name):
    cluster = Cluster((NodeType("v", "v100", 1, 8, 24.0, 500 * GB),))
    own = cluster.proportional
    jobs = [Applicant(gpus, (0,), own, own, 0, (), None, lambda kind, share: 1.0) for gpus in (6, 8, 1)]
    answer = get_mechanism(name).share_out(SharingRound(jobs, cluster, [float("inf")], False))
    assert [each is not None for each in answer] == [True, False, True]


@pytest.mark.parametrize(("name", "fact"), [("sia+tune", "fifo+tune"), ("fifo+tun", "'tune'")])
def test_what_is_no_order_with_a_mechanism_is_refused_with_what_to_type(name, fact):
    with pytest.raises(InputError, match=re.escape(fact)):
        get_policy(name)


def test_parameters_go_to_the_order_or_to_the_mechanism():
    policy = get_policy("las+tune").with_parameters(quantum_s=60.0, hand_out=False)
    assert policy.order.parameters["quantum_s"] == 60.0
    assert policy.mechanism.parameters == {"sticky": True, "hand_out": False}
    with pytest.raises(InputError, match="sticky"):
        get_policy("fifo+tune").with_parameters(sticky="no")
