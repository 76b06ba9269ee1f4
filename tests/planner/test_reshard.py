"""Re-sharding against a simulation that moves every small piece of every block by itself."""

import itertools
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_setup import SOFTWARE

from synergy_core.planner.families import transformer
from synergy_core.planner.plan import Plan
from synergy_core.planner.reshard import Shards, holdings, moved_bytes

LAYERS = 5
DENSE = np.array([7.0, *[3.0] * LAYERS, 2.0])
EXPERTS = np.array([0.0, *[8.0] * LAYERS, 0.0])
HELD = Shards(DENSE, EXPERTS, weight_bytes=2.0, optimizer_bytes=12.0)
degrees = st.sampled_from([1, 2, 3, 4])


@st.composite
def plans(draw):
    pipeline, data, context = draw(degrees), draw(degrees), draw(st.sampled_from([1, 2]))
    expert = draw(st.sampled_from([each for each in (1, 2, 4) if (data * context) % each == 0]))
    interleave = draw(st.sampled_from([1, 2])) if pipeline < 3 else 1
    return Plan(
        tensor=draw(st.sampled_from([1, 2, 3])),
        pipeline=pipeline,
        context=context,
        data=data,
        expert=expert,
        interleave=interleave,
        zero=draw(st.sampled_from([0, 1, 2, 3])),
    )


def pieces(plan, rank, kind, grid):
    """Pieces that a rank holds, as (block, expert piece, inner piece); kind: weights or optimizer, dense or experts."""
    state, axis = kind
    tensor = rank % plan.tensor
    replica = rank // plan.tensor % (plan.context * plan.data)
    stage = rank // (plan.tensor * plan.context * plan.data)
    chunks = plan.pipeline * plan.interleave
    of_layer = [
        chunk % plan.pipeline for chunk, part in enumerate(np.array_split(np.arange(LAYERS), chunks)) for _ in part
    ]
    stages = [0, *of_layer, plan.pipeline - 1]
    outer_grid, inner_grid = grid
    spread = plan.expert if axis == "experts" else 1
    expert, shard = replica % spread, replica // spread
    shards = plan.context * plan.data // spread
    outer = [at for at in range(outer_grid) if at * spread // outer_grid == expert]
    inner = [at for at in range(inner_grid) if at * plan.tensor // inner_grid == tensor]
    if plan.zero >= (3 if state == "weights" else 1):
        inner = [piece for at, piece in enumerate(inner) if at * shards // len(inner) == shard]
    return {
        (block, *each)
        for block in range(len(stages))
        if stages[block] == stage
        for each in itertools.product(outer, inner)
    }


def simulated(before, after, ids_before, ids_after):
    outer = lcm(before.expert, after.expert)
    inner = lcm(*(each.tensor * each.context * each.data for each in (before, after)))
    grid = (outer, inner)
    result = np.zeros(after.gpus)
    for rank, gpu in enumerate(ids_after):
        for state, axis in itertools.product(("weights", "optimizer"), ("dense", "experts")):
            need = pieces(after, rank, (state, axis), grid)
            if gpu in ids_before:
                need = need - pieces(before, ids_before.index(gpu), (state, axis), grid)
            sizes = DENSE if axis == "dense" else EXPERTS
            each = {"weights": 2.0, "optimizer": 12.0}[state] / (outer * inner)
            result[rank] += sum(sizes[block] * each for block, _, _ in need)
    return result


@settings(max_examples=60, deadline=None)
@given(before=plans(), after=plans(), shift=st.integers(0, 5))
def test_as_moving_every_piece(before, after, shift):
    ids_before, ids_after = list(range(before.gpus)), list(range(shift, shift + after.gpus))
    got = moved_bytes(HELD, before, after, gpus_before=np.array(ids_before), gpus_after=np.array(ids_after))
    assert got == pytest.approx(simulated(before, after, ids_before, ids_after), abs=1e-9)


@given(plan=plans())
def test_nothing_moves_to_the_same_plan(plan):
    assert moved_bytes(HELD, plan, plan) == pytest.approx(np.zeros(plan.gpus), abs=1e-9)


@given(plan=plans())
def test_everything_moves_to_new_gpus(plan):
    fresh = moved_bytes(HELD, plan, plan, gpus_after=np.arange(plan.gpus) + plan.gpus)
    assert fresh == pytest.approx(moved_bytes(HELD, None, plan))
    if plan.zero == 3:
        assert fresh.sum() == pytest.approx(HELD.state_bytes)


def test_one_more_replica_receives_the_weights():
    before, after = Plan(data=2), Plan(data=3)
    moved = moved_bytes(HELD, before, after)
    assert moved[:2] == pytest.approx(0.0)
    assert moved[2] == pytest.approx(HELD.state_bytes)


def test_the_state_of_a_model():
    gpt = transformer.Architecture(layers=4, hidden=512, heads=8, ffn=2048, vocab=50257, seq_len=1024)
    held = holdings(transformer, gpt, SOFTWARE)
    assert len(held.dense) == 6
    assert held.state_bytes / 14.0 == pytest.approx(gpt.parameters(), rel=0.01)
