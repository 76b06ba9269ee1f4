"""Every policy × execution model × truth: random small cases (more: bench/fuzz.py), and the smallest that failed."""

from dataclasses import replace
from random import Random

import planned_models
import pytest
from case_checks import examine, prepared_case, simulated
from cases import PATIENCE_S, POLICIES, TRUTHS, Case, random_case, smaller, typed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jobs import WALKING, cluster, facts, finish_s, workload

from synergy_core.scheduling.policies import get_policy
from synergy_runs.inputs.command_line import composed
from synergy_runs.inputs.keys import build
from synergy_runs.outputs.invariants import check
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.prepare import prepared_runs
from synergy_sim.settings import SIMULATOR, SimulatorSettings
from synergy_sim.simulate import simulate

TIMES = ("submit_time", "duration_s", "gpus")
WIDE = ("submit_s", "gpus", "model", "iterations", "global_batch")
ONE_GPU = [{"gpu_type": "v100", "nodes": 1, "gpus_per_node": 1}]
TWO_T4 = [{"gpu_type": "t4", "nodes": 1, "gpus_per_node": 2}]
HALF_ROUND = {"round_s": 120.0, "testbed.decide_fraction": 0.5}


@pytest.fixture(autouse=True)
def _roofline(monkeypatch):
    planned_models.install(monkeypatch.setattr)


def case(truth, rows, policy, nodes, *, columns=TIMES, models=None, **keys):
    named = {"policy": policy, "trace.models": models or truth, "truth.measured": False, "cluster.node_types": nodes}
    return Case(truth, columns, tuple(rows), named | keys)


@settings(max_examples=100, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=0)
def test_random_case_ends_with_a_log_that_can_be_true(seed):
    made = random_case(Random(seed))
    try:
        examine(made)
    except Exception as error:
        error.add_note(str(made))
        raise


def test_random_cases_are_of_every_kind():
    made = [random_case(Random(seed)) for seed in range(600)]
    assert {each.truth for each in made} == set(TRUTHS)
    assert {each.keys["policy"] for each in made} == set(POLICIES)
    assert {each.keys["cluster.placement"] for each in made} >= {"consolidate", "relax", "spread", "even", "most_free"}
    assert {each.keys.get("cluster.patience_s") for each in made} >= set(PATIENCE_S)


def test_what_is_printed_of_a_case_reproduces_it(tmp_path):
    made = next(each for each in map(random_case, map(Random, range(50))) if each.truth == "mix" and len(each.rows) > 4)
    log = tmp_path / "jobs.csv"
    log.write_text(made.log)
    words = [word.strip("'") for word in typed(made.keys).split("' '")]
    values = composed(SIMULATOR, ["+trace=file", f"trace.path={log}", *words])
    (typed_run,) = prepared_runs(build(SimulatorSettings, values))
    assert simulated(typed_run).events.digest() == simulated(prepared_case(made)).events.digest()


def test_smaller_cases_have_one_job_or_one_key_less():
    made = case("mix", [(0, 60, 1), (5, 7, 1)], "srtf", ONE_GPU, seed=3)
    assert [len(each.rows) + len(each.keys) for each in smaller(made)] == [6, 6]


# The smallest cases of defects


@pytest.mark.parametrize("seed", range(3))
def test_remaining_times_that_differ_by_rounding_keep_their_order(seed):
    rows = [(0, 1, 1), (100_000, 201, 1), (100_183, 17, 1), (100_199, 48, 1)]
    examine(case("mix", rows, "srtf", ONE_GPU, seed=seed))


@pytest.mark.parametrize("seed", [2, 5, 6])
def test_job_whose_end_was_rounded_onto_the_decision_ends_before_its_successor_starts(seed):
    rows = [(0, 60, 2), (30, 1_200, 1), (90, 90, 2)]
    examine(case("mix", rows, "themis", TWO_T4, seed=seed, restart_s=30.0, **HALF_ROUND))


@pytest.mark.parametrize("seed", range(8))
def test_job_whose_end_was_rounded_onto_the_decision_leaves_its_tenants_quota_first(seed):
    rows = [(0, 60, 1, "a"), (30, 1_200, 1, "a"), (90, 90, 1, "a"), (90, 60, 1, "b")]
    quotas = {"cluster.virtual_clusters": {"a": 1, "b": 1}}
    columns = (*TIMES, "virtual_cluster")
    examine(case("mix", rows, "themis", TWO_T4, columns=columns, seed=seed, **HALF_ROUND, **quotas))


def test_keys_off_the_grid_are_compared_alike_before_and_after_the_clock_is_added():
    """A policy of one's own need not know of the grid."""
    like = get_policy("srtf")
    guess = replace(like, name="guess", key=lambda job: (job.remaining_s * (1 + job.job_id * 1e-15), job.submit_time_s))
    rows = [(0, 1, 1)] + [(100_000 + 3 * i, 1, 40 - 3 * (i % 5)) for i in range(60)]
    what = (workload(rows), cluster(1, 1), guess, ExecutionModel(Costs(restart_s=0.0)))
    done = simulate(*what)
    check(done)
    assert facts(simulate(*what, make_scheduler=WALKING)) == facts(done)


def test_profiled_job_trains_under_its_old_plan_until_its_lease_ends():
    rows = [(0, 2, "wide", 652, 8), (10, 1, "wide", 853, 8), (97, 2, "wide", 654, 8)]
    rows += [(110, 1, "wide", 479, 8), (110, 2, "wide", 478, 8)]
    keys = {"round_s": 60.0, "testbed.decide_fraction": 0.5, "testbed.stretch": "log", "testbed.stretch_s": 100.0}
    nodes = [{"gpu_type": "cpu", "nodes": 1, "gpus_per_node": 4}]
    made = case("profiled", rows, "optimus", nodes, columns=WIDE, models="as_given", **keys)
    assert finish_s(simulated(prepared_case(made))).max() < 1_000


@pytest.mark.parametrize("policy", ["optimus", "optimus+plans", "pollux", "pollux+plans"])
def test_jobs_with_plans_are_given_numbers_of_gpus_on_which_one_fits(policy):
    nodes = [{"gpu_type": "rtx2080ti", "nodes": 1, "gpus_per_node": 8}]
    keys = {"trace.llm_gpus": 1, "cluster.virtual_clusters": {"a": 3}}
    if "pollux" in policy:
        keys |= {f"parameters.{policy}.generations": 5, f"parameters.{policy}.population": 10}
    rows = [(0, 600, 1, "a"), (900, 900, 2, "a")]
    examine(case("llm", rows, policy, nodes, columns=(*TIMES, "virtual_cluster"), **keys))


def test_pollux_lets_jobs_of_one_tenant_run_one_after_another():
    nodes = [{"gpu_type": "rtx2080ti", "nodes": 2, "gpus_per_node": 1}]
    keys = {"trace.llm_gpus": 1, "cluster.virtual_clusters": {"a": 1}, "parameters.pollux.generations": 2}
    rows = [(0, 330, 1, "a"), (450, 150, 1, "a"), (450, 240, 1, "a")]
    made = case("llm", rows, "pollux", nodes, columns=(*TIMES, "virtual_cluster"), **keys)
    assert finish_s(simulated(prepared_case(made))).max() < 2_000


def test_gavel_gives_a_slow_job_time_where_it_can_run():
    kinds = (("t4", 3, 1), ("rtx2080ti", 2, 1), ("a100", 2, 4))
    nodes = [{"gpu_type": kind, "nodes": count, "gpus_per_node": gpus} for kind, count, gpus in kinds]
    made = case("llm", [(0, 3, 1), (3, 200, 4)], "gavel", nodes, seed=74, **{"trace.llm_gpus": 1})
    assert finish_s(simulated(prepared_case(made))).max() < 10_000


def test_walk_is_not_repeated_once_nobody_waits():
    rows = [(0, 66.196, 1, "c"), (223.2, 149.449, 2, "b"), (695.222, 235.558, 2, "b")]
    keys = {"cluster.virtual_clusters": {"b": 2, "c": 2}, "testbed.exit_s": 1_000 / 3}
    keys["parameters.mlfq.demote_after_gpu_s"] = 36.0
    nodes = [{"gpu_type": "t4", "nodes": 2, "gpus_per_node": 3}]
    examine(case("none", rows, "mlfq", nodes, columns=(*TIMES, "virtual_cluster"), **keys))


def test_walk_enters_jumps_between_rounds_as_of_their_instants():
    rows = [(0, 1_600, 1), (90, 1_200, 1), (390, 4_000, 1), (630, 4_600, 2)]
    keys = {"testbed": "shockwave_v100", "parameters.tiresias.queue_limits_gpu_s": [325.0, 720.0]}
    nodes = [{"gpu_type": "t4", "nodes": 1, "gpus_per_node": 4}]
    examine(case("none", rows, "tiresias", nodes, **keys))


def test_wide_job_lies_together_on_nodes_of_unequal_sizes_under_rounds():
    nodes = [{"gpu_type": "t4", "nodes": 2, "gpus_per_node": 1}, {"gpu_type": "t4", "nodes": 2, "gpus_per_node": 2}]
    made = case("none", [(0, 60, 6), (0, 60, 5)], "themis", nodes, **{"cluster.placement": "consolidate"})
    assert finish_s(simulated(prepared_case(made))).max() < 1_000
