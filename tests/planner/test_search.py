"""The search against every plan there is, and what must hold of any table."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_setup import CONSTANTS, SOFTWARE, gpt, machine

from synergy_core.errors import InputError
from synergy_core.performance.planner.emitters import stages
from synergy_core.performance.planner.enumerate import candidates
from synergy_core.performance.planner.families import architecture_named, mixture, transformer
from synergy_core.performance.planner.machine import constants_for, machine_named, software_named, with_settings
from synergy_core.performance.planner.memory import memory
from synergy_core.performance.planner.plan import Plan, Recompute, plans_of
from synergy_core.performance.planner.search import MICRO_BATCHES, search
from synergy_core.performance.planner.step_time import step_time
from synergy_core.performance.planner.work import Limits, divisors

MACHINE = machine()


def found(architecture, on=MACHINE, **settings):
    return search(transformer, architecture, on, SOFTWARE, CONSTANTS, **settings)


def every_plan(architecture, gpus, batch, on):
    """All plans, by nested loops over the rules as documented; no ZeRO 2 or 3 with stages."""
    groups = int(architecture.groups)
    for tensor, pipeline, data in itertools.product(range(1, gpus + 1), repeat=3):
        if tensor * pipeline * data != gpus or batch % data or pipeline > architecture.layers:
            continue
        if architecture.heads % tensor or (groups % tensor and tensor % groups):
            continue
        if (on.gpus_per_node % tensor and gpus > on.gpus_per_node) or tensor > on.gpus_per_node:
            continue
        for micro, chunks in itertools.product(MICRO_BATCHES, range(1, 9)):
            if batch // data % micro:
                continue
            steps = batch // data // micro
            if chunks > 1 and (pipeline == 1 or architecture.layers % (pipeline * chunks) or steps % pipeline):
                continue
            for zero, recompute, sequence in itertools.product(range(4), range(3), (False, True)):
                if (zero and data == 1) or (zero > 1 and pipeline > 1) or (sequence and tensor == 1):
                    continue
                yield Plan(tensor, pipeline, 1, data, 1, chunks, micro, steps, zero, recompute, sequence)


def times_of(architecture, plans, on):
    work = transformer.work(architecture, plans, SOFTWARE)
    fits = np.broadcast_to(memory(work, plans, SOFTWARE).fits(on), len(plans))
    return np.where(fits, step_time(work, plans, on, SOFTWARE, CONSTANTS).total_s, np.inf)


@pytest.mark.parametrize("gpus", [1, 2, 6, 8, 12, 16, 32])
@pytest.mark.parametrize("memory_gb", [10, 24, 80])
@pytest.mark.parametrize("kv_heads", [0, 4])
def test_best_is_the_best_of_all_plans(gpus, memory_gb, kv_heads):
    small = machine(memory_bytes=memory_gb * 1e9)
    architecture = gpt(kv_heads=kv_heads)
    plans = plans_of(list(every_plan(architecture, gpus, 48, small)))
    exhaustive = times_of(architecture, plans, small).min()
    table = found(architecture, small, counts=[gpus], global_batch=48)
    if np.isinf(exhaustive):
        assert (table.plans.tensor > small.gpus_per_node).all()
        assert [each.factor for each in table.infeasible] == ["memory"] * (len(table) == 0)
    else:
        assert table.step_time_s[0] == pytest.approx(exhaustive, rel=1e-9)
        assert table.timed < len(plans)


@settings(max_examples=25)
@given(
    layers=st.integers(1, 24),
    heads=st.sampled_from([4, 7, 12, 25]),
    batch=st.integers(1, 96),
    counts=st.lists(st.integers(1, 64), min_size=1, max_size=12, unique=True),
    memory_gb=st.sampled_from([6, 16, 80]),
)
def test_any_table(layers, heads, batch, counts, memory_gb):
    architecture = gpt(layers=layers, heads=heads, hidden=128 * heads, ffn=512 * heads)
    small = machine(memory_bytes=memory_gb * 1e9)
    table = found(architecture, small, counts=counts, global_batch=batch, keep=3)
    plans = table.plans
    assert {*table.gpus.tolist(), *(each.gpus for each in table.infeasible)} == set(counts)
    assert not {*table.gpus.tolist()} & {each.gpus for each in table.infeasible}
    assert (plans.gpus == table.gpus).all()
    assert (plans.global_batch == batch).all()
    assert (heads % plans.tensor == 0).all()
    assert (plans.pipeline <= layers).all()
    assert ((plans.interleave == 1) | (plans.accumulation % plans.pipeline == 0)).all()
    assert ((plans.zero < 2) | (plans.pipeline == 1)).all()
    if len(table):
        assert np.isfinite(times_of(architecture, plans, small)).all(), "a plan that does not fit was proposed"
        same = np.diff(table.gpus) == 0
        assert (np.diff(table.step_time_s)[same] >= 0).all()
        assert (table.rank[np.append(True, ~same)] == 0).all()


@pytest.mark.parametrize(
    ("layers", "stages", "interleaves"),
    [(126, 16, [1, 2, 4, 8]), (94, 8, [1, 2, 3, 4, 6]), (61, 16, [1, 2]), (12, 5, [1]), (96, 8, [1, 2, 3, 4, 6])],
)
def test_three_interleaved_chunks_may_lack_a_layer(layers, stages, interleaves):
    """126, 94 and 61 layers are those of llama-3-405b, qwen3-235b and deepseek-v3."""

    def tried(short_chunks):
        limits, batch = Limits(layers, 8, 8, 4_096), 4 * stages
        software = with_settings(SOFTWARE, short_chunks=short_chunks)
        fixed = {"pipeline": stages}
        plans = candidates(limits, [stages], batch, software, micro_batches=(1,), max_tensor=1, fixed=fixed)
        return sorted({*plans.interleave.tolist()})

    assert tried(3) == interleaves
    assert all(layers % (stages * each) == 0 for each in tried(0) if each > 1)


def test_plan_that_meta_published_for_llama_3_405b_is_found_and_as_fast():
    """400 TFLOP/s on each of 16,384 H100, so 6.46 s a step (arXiv 2407.21783, table 4)."""
    family, architecture = architecture_named("llama-3-405b")
    h100, software = machine_named("h100"), software_named("meta-llama3")
    fixed = {"tensor": 8, "pipeline": 16, "context": 1, "data": 128}
    constants = constants_for(h100, software)
    table = search(family, architecture, h100, software, constants, counts=[16_384], global_batch=2_048, fixed=fixed)
    plan = table.plans.plan(0)
    assert (plan.interleave, plan.zero, plan.recompute) == (8, 2, Recompute.NONE)
    assert stages(126, plan) == [0, *[1] * 126, 0]
    assert table.step_time_s[0] == pytest.approx(6.46, rel=0.1)


def test_single_modules_are_recomputed_where_the_software_can_and_less_does_not_fit():
    """Between nothing and every layer: faster than the latter, on fewer bytes than the former."""
    small = machine(memory_bytes=40e9)
    fixed = {"tensor": 1, "micro_batch": 16, "zero": 0}

    def plan_of(*recomputes):
        software = with_settings(SOFTWARE, recomputes=recomputes)
        table = search(transformer, gpt(), small, software, CONSTANTS, counts=[1], global_batch=16, fixed=fixed)
        return table.plans.recompute.tolist(), table.step_time_s.tolist()

    assert plan_of("none") == ([], [])
    kinds, (some,) = plan_of("none", "modules", "full")
    assert kinds == [Recompute.MODULES]
    assert some < plan_of("none", "full")[1][0]
    with pytest.raises(InputError, match="recompute=4: test supports 0"):
        search(transformer, gpt(), small, with_settings(SOFTWARE, recomputes=("none", "full")), CONSTANTS,
               counts=[1], global_batch=16, fixed={"recompute": 4})  # fmt: skip


def test_experts_spread_over_tensor_parallel_ranks_where_the_software_keeps_them_whole():
    """tp2 pp8 with 16 replicas and 32 expert ranks, as qwen3-235b was trained on 256 GPUs."""
    limits = Limits(94, 64, 4, 4_096, experts=128)

    def tried(**options):
        fixed = {"tensor": 2, "pipeline": 8, "context": 1}
        software = with_settings(SOFTWARE, **options)
        plans = candidates(limits, [256], 128, software, micro_batches=(1,), max_tensor=8, fixed=fixed)
        return {*zip(plans.expert.tolist(), plans.sequence.tolist(), strict=True)}

    every = {(1 << each, sequence) for each in range(5) for sequence in (False, True)}
    in_sequence = {(expert, True) for expert, sequence in every if sequence}
    assert tried() == every
    assert tried(whole_experts=True) == in_sequence | {(32, True)}
    assert tried(plain_tensor=False) == in_sequence


def test_best_is_the_best_of_all_plans_with_experts_and_long_sequences():
    family, architecture = (
        mixture,
        mixture.Architecture(
            layers=4, hidden=1024, heads=8, ffn=4096, vocab=32000, seq_len=16384, experts=8, topk=2, expert_ffn=2048
        ),
    )
    plans = [
        replace(plan, data=data, context=context, accumulation=each, expert=expert, micro_batch=micro)
        for plan in every_plan(architecture, 8, 64, MACHINE)
        if plan.micro_batch == 1
        for context in (1, 2, 4)
        if plan.data % context == 0
        for data in [plan.data // context]
        for expert in divisors(8)
        if (data * context) % expert == 0
        for micro in MICRO_BATCHES
        if 64 // data % micro == 0
        for each in [64 // data // micro]
        if plan.interleave == 1 or each % plan.pipeline == 0
    ]
    columns = plans_of(list(dict.fromkeys(plans)))
    work = family.work(architecture, columns, SOFTWARE)
    seconds = step_time(work, columns, MACHINE, SOFTWARE, CONSTANTS).total_s
    exhaustive = np.where(memory(work, columns, SOFTWARE).fits(MACHINE), seconds, np.inf).min()
    table = search(family, architecture, MACHINE, SOFTWARE, CONSTANTS, counts=[8], global_batch=64)
    assert table.step_time_s[0] == pytest.approx(exhaustive, rel=1e-9)


def test_all_counts_at_once_are_what_each_gives_alone_and_efficient_ones_gain_from_each_gpu():
    together = found(gpt(), counts=range(1, 33), global_batch=96, keep=1)
    for gpus in (1, 6, 7, 24, 32):
        alone = found(gpt(), counts=[gpus], global_batch=96, keep=1)
        assert [*together.take(together.gpus == gpus).plans] == [*alone.plans]
    best = together.efficient()
    assert (np.diff(best.gpus) > 0).all()
    assert (np.diff(best.step_time_s) < 0).all()


def test_tensor_groups_cross_nodes_only_where_nothing_else_fits():
    wide = gpt(layers=2, hidden=16384, heads=128, ffn=65536)
    small = machine(memory_bytes=14e9)
    table = found(wide, small, counts=[16, 32], global_batch=1)
    assert [each > 8 for each in table.plans.tensor] == [False, True]
    roomy = found(wide, counts=[16, 32], global_batch=16)
    assert (roomy.plans.tensor <= 8).all()


def test_megatron_core_has_experts_under_tensor_parallelism_only_with_sequence_parallelism():
    """megatron/core/transformer/moe/moe_layer.py refuses to train otherwise, and --emit would refuse the plan."""
    family, architecture = architecture_named("mixtral-8x7b")
    told = (family, architecture, machine("h100"), software_named("megatron-core"), CONSTANTS)
    plans = search(*told, counts=[16], global_batch=64, keep=10_000).plans
    assert (plans.tensor > 1).any()
    assert (plans.sequence | (plans.tensor == 1)).all()


def test_long_sequences_may_be_split_and_short_ones_not():
    long = found(gpt(seq_len=131072), counts=[8], global_batch=1, keep=200)
    assert (long.plans.context > 1).any()
    assert (found(gpt(), counts=[8], global_batch=8, keep=200).plans.context == 1).all()


def test_reasons_name_the_factor():
    huge = gpt(layers=96, hidden=12288, heads=96, ffn=49152)
    (reason,) = found(huge, counts=[8], global_batch=64).infeasible
    assert reason.factor == "memory"
    assert reason.missing_bytes > 80e9
    (reason,) = found(gpt(), counts=[37], global_batch=64).infeasible
    assert (reason.factor, "batch=74" in reason.message) == ("batch", True)
    (reason,) = found(gpt(layers=2, heads=2), counts=[64], global_batch=4).infeasible
    assert "at least 16 replicas for a batch of 4" in reason.message


@pytest.mark.parametrize("name", ["test", "deepspeed-tf32", "megatron-tf32", "torchtitan", "meta-llama3"])
def test_a_batch_that_a_reason_advises_has_a_plan(name):
    software = SOFTWARE if name == "test" else software_named(name)
    told = (transformer, gpt(), machine("a10", memory_bytes=1e15), software, CONSTANTS)
    for gpus, batch in itertools.product((6, 24, 37), (1, 5, 64)):
        for reason in search(*told, counts=[gpus], global_batch=batch).infeasible:
            (advised,) = re.findall(r"use batch=(\d+)", reason.message)
            assert len(search(*told, counts=[gpus], global_batch=int(advised)))


@pytest.mark.parametrize(
    ("fixed", "says"),
    [
        ({"tensor": 5}, "does not divide the model's 16 heads; choose one of 1, 2, 4, 8, 16"),
        ({"pipeline": 13}, "12 layers"),
        ({"data": 5}, "choose batch=65"),
        ({"tenser": 2}, "Did you mean 'tensor'"),
        ({"zero": 4}, "0, 1, 2 or 3"),
        ({"recompute": 5}, "none, selective, full"),
        ({"tensor": -1}, "positive"),
    ],
)
def test_fixed_degrees_that_cannot_be(fixed, says):
    with pytest.raises(InputError, match=says):
        found(gpt(), counts=[16], global_batch=64, fixed=fixed)
    for counts in ([], [0], [-8]):
        with pytest.raises(InputError, match="positive whole"):
            found(gpt(), counts=counts, global_batch=64)


def test_fixed_degrees_hold():
    table = found(gpt(), counts=[16], global_batch=64, keep=20, fixed={"pipeline": 4, "micro_batch": 2, "zero": 1})
    assert (table.plans.pipeline == 4).all()
    assert (table.plans.micro_batch == 2).all()
    assert (table.plans.zero == 1).all()
    assert len(table) > 3


def test_small_nodes_do_not_keep_tensor_groups_small():
    """On nodes of two, 256 GPUs may split layers as 128 do: more GPUs are not slower."""
    deep = gpt(layers=80, hidden=12288, heads=96, ffn=49152)
    table = found(deep, machine("a10", memory_bytes=27e9), counts=[128, 256], global_batch=512).best()
    assert len(table) == 2
    assert table.step_time_s[1] <= 1.02 * table.step_time_s[0]
