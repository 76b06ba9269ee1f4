"""What stages exchange and under which compressors: conservation, closed forms, and brute force over stages."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.performance.catalog import gpu_sheet
from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.goodput.compression._compressor import Gradients
from synergy_core.performance.goodput.efficiency import along_frontier
from synergy_core.performance.goodput.layerwise import frontier, least_of_slowest
from synergy_core.performance.planner.communication import held
from synergy_core.performance.planner.compressed import CompressedSearch, every_offer, gradients_of, stages_of
from synergy_core.performance.planner.families import architecture_named
from synergy_core.performance.planner.machine import constants_for, machine_named, software_named
from synergy_core.performance.planner.plan import Plan, plans_of
from synergy_core.performance.planner.search import Model, search
from synergy_core.performance.planner.step_time import step_time

SOFTWARE = software_named("megatron-core")
LAYERWISE = compressor_named("powersgd-4")


def model(name):
    family, architecture = architecture_named(name)
    return Model(family, architecture, SOFTWARE)


@pytest.mark.parametrize("name", ["gpt-1.3b", "mixtral-8x7b", "arena-moe-2.4b", "resnet-50"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 4)])
def test_stages_hold_the_parameters_of_the_model(name, tensor, pipeline):
    """All stages together, and the fullest one as the planner counts it for its time."""
    own, plans = model(name), plans_of([Plan(tensor=tensor, pipeline=pipeline, data=2)])
    work = own.work(plans)
    stages = stages_of(work, pipeline, 0)
    assert sum(each.stages for each in stages) == pipeline
    blocks = [(work.before, 1.0), *((each.block, each.count) for each in work.layers), (work.after, 1.0)]
    wanted = sum(np.asarray(times) * (block.parameters + block.expert_parameters) for block, times in blocks)
    assert sum(each.stages * each.numbers for each in stages) == pytest.approx(float(np.ravel(wanted)[0]), rel=1e-4)
    dense, expert = held(work, plans, SOFTWARE)
    if pipeline == 1 or name != "resnet-50":  # of which later stages hold most, and the planner takes the mean
        assert max(each.numbers for each in stages) == pytest.approx(float(dense[0] + expert[0]), rel=1e-4)
    assert any(each.expert.any() for each in stages) == bool(expert[0])


@given(
    st.integers(1, 3).flatmap(
        lambda stages: st.tuples(
            st.lists(
                st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=2, max_size=3),
                min_size=stages,
                max_size=stages,
            ),
            st.lists(st.integers(1, 3), min_size=stages, max_size=stages),
        )
    ),
    st.floats(0.0, 200.0),
)
def test_the_stage_that_sends_most_sends_as_little_as_it_can(case, budget):
    """One layer a stage: every combination of points of the stages' curves is tried."""
    layers, counts = case
    curves = [frontier(*(np.array([column], dtype=float) for column in zip(*each, strict=True))) for each in layers]
    (chosen,) = least_of_slowest(curves, counts, [budget])
    found = [
        (max(curve.sent_bytes[at] for curve, at in zip(curves, points, strict=True)), error)
        for points in product(*(range(each.errors.size) for each in curves))
        if (error := sum(n * curve.errors[at] for n, curve, at in zip(counts, curves, points, strict=True))) <= budget
    ]
    sent = max(curve.sent_bytes[at] for curve, at in zip(curves, chosen, strict=True))
    error = sum(n * curve.errors[at] for n, curve, at in zip(counts, curves, chosen, strict=True))
    if found:
        assert sent == min(found)[0]
        assert error == pytest.approx(min(each for most, each in found if most == sent))
    else:
        assert error == pytest.approx(sum(n * each.errors[0] for n, each in zip(counts, curves, strict=True)))


def test_one_stage_chooses_as_data_parallel_jobs_do():
    own = model("gpt-125m")
    (stage,) = stages_of(own.work(plans_of([Plan(data=4)])), 1, 0)
    known = [compressor_named(f"powersgd-{rank}") for rank in (1, 2, 4, 8, 16, 32)]
    plain = {each.name: each for each in along_frontier(known, stage.layers, Gradients())}
    staged = {each.name: each for each in every_offer(LAYERWISE)((stage,), Gradients()) if each.name in plain}
    assert staged
    for name, offer in staged.items():
        assert (offer.offers[0].choice == plain[name].choice).all()
        assert offer.errors.signal == pytest.approx(plain[name].errors.signal)


def test_terms_are_bytes_over_bytes():
    """bf16 halves fp32 and leaves 16-bit gradients as they are; state of error feedback is a gradient's and more."""
    own = model("gpt-125m")
    (stage,) = stages_of(own.work(plans_of([Plan(data=4)])), 1, 0)
    offers = {each.name: each for each in every_offer(LAYERWISE)((stage,), Gradients())}
    sheet = gpu_sheet("a100")
    assert offers["bf16"].terms(8, 4.0, sheet, expert=False).sent == pytest.approx(0.5)
    assert offers["bf16"].terms(8, 2.0, sheet, expert=False).sent == pytest.approx(1.0)
    assert offers["q4"].terms(8, 2.0, sheet, expert=False).sent == pytest.approx(0.25, rel=0.1)
    assert offers["q4"].state_bytes == 0.0
    assert 4 * stage.numbers * 0.9 < offers["topk-0.01"].state_bytes < 4 * stage.numbers * 1.1


@pytest.mark.parametrize(("name", "gpus"), [("gpt-1.3b", 8), ("mixtral-8x7b", 16)])
def test_without_a_compressor_the_plan_is_the_planners(name, gpus):
    own, machine = model(name), machine_named("a100-80gb", network_bytes_per_s=1.25e9)
    constants = constants_for(machine, SOFTWARE)
    found = CompressedSearch(own, gradients_of(own), every_offer(LAYERWISE)).plans(machine, constants, gpus, 64)
    best = search(own.family, own.architecture, machine, SOFTWARE, constants, counts=[gpus], global_batch=64)
    assert found.plans[0] == best.plans.plan(0)
    assert found.step_s[0] == pytest.approx(best.step_time_s[0])
    for plan, zero_only in zip(found.plans, ~found.errors.unbiased, strict=True):
        assert not zero_only or plan.zero == 0
        again = plans_of([plan])
        plain_s = step_time(own.work(again), again, machine, SOFTWARE, constants)
        assert plain_s.total_s[0] - plain_s.data_s[0] <= found.step_s[list(found.plans).index(plan)]


def test_a_slow_network_makes_a_step_shorter_with_fewer_bytes():
    own, machine = model("gpt-125m"), machine_named("a100", gpus_per_node=1, network_bytes_per_s=1.25e8)
    found = CompressedSearch(own, gradients_of(own), every_offer(LAYERWISE)).plans(
        machine, constants_for(machine, SOFTWARE), 2, 64
    )
    steps = {plan.compressor: step_s for plan, step_s in zip(found.plans, found.step_s, strict=True) if plan.data == 2}
    assert steps["bf16"] > steps["q8"] > steps["q4"] > steps["q2"]
    assert steps["powersgd-32"] > steps["powersgd-4"] > steps["powersgd-1"]
