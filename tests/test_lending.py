"""Quotas under every policy: what is within a quota comes before what is borrowed, and borrowed GPUs come back.

`python bench/fuzz.py --quotas 0 1000` tries more cases.
"""

from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.checking.cases import JobCase, PolicyCase
from synergy_core.checking.conformance import carried_out, with_hosts
from synergy_core.checking.rules import try_on
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.quotas import Quotas, fewest
from synergy_core.scheduling.policies import SharingPolicy, get_policy, policy_names

NAMES = [*policy_names(), "fifo+proportional", "las+tune", "srtf+greedy", "themis+proportional"]
STARTS_ON_ITS_ROWS_ONLY = {("crius", 958)}
"""Exceptions: crius starts a job only on as many GPUs as its table has, and the idle type has no such row."""


def random_case(number):
    """Up to eleven jobs of two tenants on one or two GPU types, with quotas that may be 0 or leave GPUs over."""
    random = np.random.default_rng((7, number))
    kinds = ["v100"] if random.random() < 0.6 else ["v100", "t4"]
    types = tuple(NodeType(each, each, int(random.integers(1, 4)), int(random.choice([1, 2, 4, 8]))) for each in kinds)
    total = sum(each.gpus for each in types)
    first = int(random.integers(0, total + 1))
    second = int(random.integers(0, total - first + 1)) if random.random() < 0.5 else total - first
    borrowing, reclaim = bool(random.random() < 0.75), [None, "any", "never"][int(random.integers(3))]
    placement = str(random.choice(["spread", "even", "most_free"]))
    cluster = Cluster(types, {"a": first, "b": second}, borrowing=borrowing, reclaim=reclaim, placement=placement)
    jobs = []
    for _ in range(int(random.integers(2, 12))):
        tenant, gpu_type = str(random.choice(["a", "b"])), str(random.choice(["", *kinds])) if len(kinds) > 1 else ""
        if most := cluster.most_gpus_for(gpu_type, tenant):
            submit_s, gpus = float(random.integers(0, 1500)), min(int(random.choice([1, 1, 2, 3, 4, 8])), most)
            jobs.append(JobCase(submit_s, gpus, float(random.integers(1, 4000)), gpu_type, tenant))
    return PolicyCase(cluster, tuple(sorted(jobs)), 0.0)


def examine(name, number):
    """Runs the policy on that case; raises BrokenRuleError if it breaks a rule."""
    policy, case = get_policy(name), random_case(number)
    if name == "pollux":
        policy = policy.with_parameters(population=20, generations=10)
    if isinstance(policy, SharingPolicy):
        case = case._replace(machines=with_hosts(case.machines))
    if case.jobs and (name, number) not in STARTS_ON_ITS_ROWS_ONLY:
        try_on(case, carried_out, policy)


@pytest.mark.parametrize("cases", [8, pytest.param(60, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", NAMES)
def test_no_job_within_its_quota_waits_for_gpus_that_are_idle_or_lent(name, cases):
    for number in range(cases):
        examine(name, number)


@given(st.lists(st.integers(1, 8), max_size=7), st.integers(1, 20))
def test_the_fewest_gpus_that_suffice_are_found_and_of_equal_sets_the_last(gpus, short):
    sets = [each for size in range(1, len(gpus) + 1) for each in combinations(range(len(gpus)), size)]
    enough = [each for each in sets if sum(gpus[at] for at in each) >= short]
    found = next(fewest(gpus, short), None)
    if not enough:
        assert found is None
        return
    least = min(sum(gpus[at] for at in each) for each in enough)
    alike = [sorted(each, reverse=True) for each in enough if sum(gpus[at] for at in each) == least]
    assert found == max(alike)


@given(st.integers(0, 10_000))
def test_borrowed_gpus_are_shared_equally_while_every_tenant_asks(seed):
    random = Random(seed)
    quotas = Quotas({"a": random.randint(0, 3), "b": random.randint(0, 3), "c": 0})
    lent = dict.fromkeys("abc", 0)
    for tenant in ("a", "b"):
        quotas.use(tenant, quotas.left(tenant))
    asks = [(random.choice("abc"), at) for at in range(30)]
    asks += [(tenant, at) for tenant in "abc" for at in range(30, 40)]
    tenant_of = dict(enumerate(tenant for tenant, _ in asks))
    for at in quotas.in_turn([(tenant, position) for position, (tenant, _) in enumerate(asks)]):
        quotas.use(tenant_of[at], 1)
        lent[tenant_of[at]] += 1
        assert max(lent.values()) - min(lent.values()) <= 1
        if sum(lent.values()) == 24:
            break
