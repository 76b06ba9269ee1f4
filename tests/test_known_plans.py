"""What the planner tells schedulers: the best plan, one plan in replicas, and true step times where it knows them."""

import numpy as np

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.planned import PlannedSpeeds
from synergy_sim.truth.planned import PlanErrors, PlannedApplication, PlannedTruth

NODE_GPUS = {"a100": 8}
CLUSTER = Cluster([NodeType("box", "a100", 4, 8)])


def test_one_plan_in_replicas_has_the_same_degrees_everywhere_and_is_never_faster_than_the_best():
    counts = (1, 8, 16, 32)
    best, fixed = (
        PlannedSpeeds(CLUSTER, plans=plans).fastest("gpt-6.7b", 128, "a100", counts) for plans in (True, False)
    )
    assert all(fixed[gpus][0] >= best[gpus][0] for gpus in counts)
    assert any(fixed[gpus][0] > best[gpus][0] for gpus in counts)
    fitting = [plan for step_s, plan in fixed.values() if step_s < np.inf]
    assert len({(plan.tensor, plan.pipeline, plan.context) for plan in fitting}) == 1 < len(fitting)


def test_who_knows_the_truth_runs_a_plan_at_least_as_fast_and_often_a_faster_one():
    wrong, right = (PlannedTruth(plan_error=0.2, known=known) for known in (False, True))
    ratios = []
    for seed in range(12):
        believed, known = (PlannedApplication("gpt-2.7b", 128, NODE_GPUS, each, seed) for each in (wrong, right))
        ratios.append(known.step_s("a100", (8, 8), 128) / believed.step_s("a100", (8, 8), 128))
    assert max(ratios) <= 1.0
    assert np.mean(ratios) < 0.97


def test_beliefs_and_truth_agree_where_the_truth_is_known():
    truth = PlannedTruth(plan_error=0.2, known=True)
    speeds = PlannedSpeeds(CLUSTER, plans=True, errors=PlanErrors(truth, 5))
    app = PlannedApplication("gpt-2.7b", 128, NODE_GPUS, truth, 5)
    for gpus, node_gpus in ((8, (8,)), (16, (8, 8))):
        step_s, plan = speeds.fastest("gpt-2.7b", 128, "a100", [gpus])[gpus]
        assert app.step_s("a100", node_gpus, 128) == step_s
        assert app.as_requested("a100", node_gpus, 128) == plan
