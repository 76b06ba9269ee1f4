"""The published experiments, run as their commands run them: `experiment=pollux_osdi21` and `experiment=sia_sosp23`."""

import csv
import functools
import os
from pathlib import Path

import numpy as np
import pytest
from composed import composed
from jobs import finish_s

from synergy_runs.inputs.from_settings import cluster_of, workload_of
from synergy_runs.inputs.requested import policies_of
from synergy_runs.outputs.invariants import check
from synergy_sim.prepare import execution_of, trained, truth_of
from synergy_sim.simulate import simulate

WORKLOADS = Path(os.environ.get("SYNERGY_DATA") or "/nowhere") / "workloads"
pytestmark = pytest.mark.skipif(not WORKLOADS.is_dir(), reason="SYNERGY_DATA has no workloads/")


@functools.cache
def jct_s(experiment, file, policy, *overrides):
    """Completion times by job name, and the whole run."""
    path = WORKLOADS / file
    settings = composed(f"experiment={experiment}", f"trace.path={path}", f"policy={policy}", *overrides)
    workload = workload_of(settings.trace, settings.cluster, 0)
    cluster, truth = cluster_of(settings.cluster, settings.trace, workload), truth_of(settings, 0)
    policies = policies_of(settings.policy, settings.parameters, settings.information)
    workload = trained(settings, workload, cluster, truth, policies.values(), 0)
    done = simulate(workload, cluster, policies[policy], execution_of(settings), truth=truth)
    check(done)
    return dict(zip(workload.jobs["job_name"], finish_s(done) - workload.jobs["submit_time_s"], strict=True))


def mean_h(*arguments):
    return float(np.mean(list(jct_s(*arguments).values()))) / 3_600.0


def published(policy, workload):
    with (WORKLOADS / "pollux" / "published_job_jct.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["policy"] == policy and row["workload"] == workload]
    return {row["job"]: float(row["jct_s"]) for row in rows}


@pytest.mark.parametrize("number", [1, *(pytest.param(each, marks=pytest.mark.thorough) for each in (2, 3, 4))])
@pytest.mark.parametrize("policy", ["tiresias", "optimus"])
def test_every_published_completion_time_is_met_to_the_second(policy, number):
    expected = published(policy, f"workload-{number}")
    assert len(expected) == 160
    assert jct_s("pollux_osdi21", f"pollux/workload-{number}.csv", policy) == expected


def test_sia_is_within_five_percent_of_what_its_own_code_gives():
    assert mean_h("sia_sosp23", "sia/philly/workload-1.csv", "sia") == pytest.approx(0.542, rel=0.05)


@pytest.mark.parametrize(("family", "low_h", "high_h"), [("philly", 1.6, 2.2), ("saturn", 1.6, 3.4)])
def test_gavel_is_in_the_published_interval(family, low_h, high_h):
    files = [f"sia/{family}/workload-{number}.csv" for number in (1, 2)]
    assert low_h <= np.mean([mean_h("sia_sosp23", file, "gavel") for file in files]) <= high_h


def test_synergy_is_below_sia_also_where_sia_knows_as_much():
    synergy_h, sia_h, informed_h = (
        mean_h("sia_sosp23", "sia/philly/workload-1.csv", *each)
        for each in (("synergy",), ("sia",), ("sia", "information=all"))
    )
    assert synergy_h < min(sia_h, informed_h)
    assert synergy_h <= 0.85 * sia_h


def test_a_policys_companions_do_not_change_its_result():
    """Truth and specs are shared by all policies of a run; nothing of one may reach the next."""
    file = "pollux/workload-1.csv"
    settings = composed("experiment=pollux_osdi21", f"trace.path={WORKLOADS / file}", "policy=[tiresias,optimus]")
    workload = workload_of(settings.trace, settings.cluster, 0)
    cluster, truth = cluster_of(settings.cluster, settings.trace, workload), truth_of(settings, 0)
    policies = policies_of(settings.policy, settings.parameters, settings.information)
    workload = trained(settings, workload, cluster, truth, policies.values(), 0)
    for name in ("optimus", "tiresias"):
        done = simulate(workload, cluster, policies[name], execution_of(settings), truth=truth)
        ends = dict(zip(workload.jobs["job_name"], finish_s(done) - workload.jobs["submit_time_s"], strict=True))
        assert ends == jct_s("pollux_osdi21", file, name)
