"""Kernels, the step and the constants: closed forms, a schedule played out event by event, and a fit that finds again
what was planted."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_core.commands._scoring import fit
from synergy_core.commands.measurements.training_times import Case
from synergy_core.performance.planner.communication import all_gather_s, all_reduce_s
from synergy_core.performance.planner.families import architecture_named
from synergy_core.performance.planner.machine import (
    Constants,
    Software,
    constants_for,
    has_same_chip,
    links_for,
    machine_named,
    software_named,
    transferred,
    with_settings,
)
from synergy_core.performance.planner.plan import Plan, plans_of
from synergy_core.performance.planner.step_time import HOST_COPY_EFFICIENCY, HOST_UPDATE_S, StepTime, step_time
from synergy_core.performance.planner.work import Attention, Block, Gemm, Layers, Work, attention_s, gemm_s

A100 = machine_named("a100-80gb")
FLASH = Software("any")
PLAIN = Constants(
    kernel_s=1e-12,
    host_s=1e-12,
    step_s=1e-9,
    data_overlap=0.0,
    data_exposed=1.0,
    memory_efficiency=1.0,
    gemm_depth=1e-3,
)
"""Nothing but work: no launches, no fixed costs, nothing hidden."""
GIGABYTE_S = 1e9 / A100.gpu.memory_bandwidth_bytes_per_s


def parts_of(time: StepTime) -> dict[str, np.ndarray]:
    return {each.name: getattr(time, each.name) for each in fields(StepTime) if each.name != "total_s"}


def traffic(layers: int, *, before: float = 0.0, after: float = 0.0, **fields_of_layer: float) -> Work:
    """A model whose layers move one gigabyte forward, the ends as many as told: seconds are known."""
    return Work(
        before=Block("embedding", replicated_bytes=before * 1e9),
        layers=(Layers(Block("layer", replicated_bytes=1e9, **fields_of_layer), float(layers)),),
        after=Block("logits", replicated_bytes=after * 1e9),
    )


def timed(work: Work, *plans: Plan, constants: Constants = PLAIN, software: Software = FLASH) -> StepTime:
    return step_time(work, plans_of(plans), A100, software, constants)


def test_a_large_product_runs_at_the_rate_that_is_left_of_the_peak():
    seconds = gemm_s(16384, 16384, 16384, 1, A100, FLASH, replace(PLAIN, wave_loss=0.0))
    assert seconds == pytest.approx(2 * 16384**3 / (312e12 * PLAIN.gemm_efficiency), rel=1e-6)


def test_a_thin_product_waits_for_memory():
    seconds = gemm_s(8, 16384, 16384, 1, A100, FLASH, PLAIN)
    assert seconds == pytest.approx(2 * (8 * 16384 * 2 + 16384**2) / A100.gpu.memory_bandwidth_bytes_per_s, rel=1e-6)


def test_one_tile_more_than_the_multiprocessors_starts_another_wave():
    def seconds(columns: int, loss: float) -> float:
        return gemm_s(3072, columns, 65536, 1, A100, FLASH, replace(PLAIN, wave_loss=loss)).item()

    full, over = seconds(1152, 1.0), seconds(1280, 1.0)  # 12 × 9 = 108 tiles of 256 × 128 rows and columns, 12 × 10
    assert 1.15 * full < over < 1.25 * full  # 10/9, and what smaller tiles in four parts cannot save
    assert seconds(1280, 0.0) == pytest.approx(seconds(1152, 0.0) * 10 / 9)


def test_scale_mask_and_softmax_are_one_kernel_only_for_a_multiple_of_four_heads():
    """Megatron-LM's fused softmax; apart, they move scores in fp32 and convert them from 16 bits and back."""
    software = replace(FLASH, flash=False, softmax_heads=4)
    constants = replace(PLAIN, score_passes=1.0)
    seconds = {}
    for heads in (1.0, 4.0):
        a = Attention(heads, 1024, 1024, 64, 64)
        of_products = 2.0 * gemm_s(1024, 1024, 64, heads, A100, software, constants, core=True)
        seconds[heads] = (attention_s(a, A100, software, constants)[0] - of_products) / heads
    assert seconds[1.0] / seconds[4.0] == pytest.approx(36.0 / 4.0, rel=1e-3)


def test_a_long_sum_of_few_elements_fills_every_multiprocessor():
    """As of weight gradients of convolutions: 64 × 64 weights, summed over the pixels of a batch."""
    pixels = 2**22
    ideal = 2 * 64 * 64 * pixels / (312e12 * PLAIN.gemm_efficiency)
    assert ideal < gemm_s(64, 64, pixels, 1, A100, FLASH, replace(PLAIN, memory_efficiency=1e3)) < 2 * ideal


def test_rows_that_are_not_aligned_run_at_half_the_rate():
    whole, odd = (gemm_s(8192, 8192, k, 1, A100, FLASH, replace(PLAIN, wave_loss=0.0)) for k in (8192, 8193))
    assert odd / whole == pytest.approx(2 * 8193 / 8192)


def test_rows_of_tokens_need_no_alignment_where_they_are_summed_over():
    """In products for weight gradients, as for experts, which get any number of rows."""
    odd, even = (gemm_s(4096.0, 14336.0, rows, 1.0, A100, FLASH, PLAIN, transposed=True) for rows in (8377.0, 8376.0))
    assert odd == pytest.approx(even, rel=1e-3)
    assert gemm_s(4096.0, 14336.0, 8377.0, 1.0, A100, FLASH, PLAIN) == pytest.approx(2.0 * odd)


def test_the_causal_half_is_skipped_and_eight_bits_do_not_speed_up_attention():
    def seconds(causal: bool, precision: str = "bf16") -> float:
        one = Attention(count=16, queries=4096, keys=4096, width=128, value_width=128, causal=causal)
        return attention_s(one, machine_named("h100"), replace(FLASH, precision=precision), PLAIN)[0].item()

    assert seconds(False) == 2 * seconds(True)
    assert seconds(True, "fp8") == seconds(True)


def test_a_step_is_forward_and_backward_of_every_micro_batch():
    time = timed(traffic(10, before=2, after=3), Plan(accumulation=7))
    assert time.total_s[0] == pytest.approx(7 * 15 * (1 + PLAIN.backward_traffic) * GIGABYTE_S + PLAIN.step_s)


@pytest.mark.parametrize("host_s", [1e-6, 1.0])
def test_a_pass_takes_the_longer_of_the_work_on_the_gpu_and_the_launches(host_s):
    constants = replace(PLAIN, host_s=host_s)
    layer = timed(traffic(2, kernels=4.0), Plan(), constants=constants).total_s[0]
    layer = (layer - timed(traffic(1, kernels=4.0), Plan(), constants=constants).total_s[0]).item()
    passes = ((GIGABYTE_S, 4.0), (PLAIN.backward_traffic * GIGABYTE_S, 4.0 * PLAIN.backward_kernels))
    assert layer == pytest.approx(sum(max(seconds, kernels * host_s) for seconds, kernels in passes))


def test_full_recomputation_is_one_more_forward_pass_of_the_layers():
    none, full = timed(traffic(10, before=2, after=3), Plan(), Plan(recompute=2)).total_s
    assert full - none == pytest.approx(10 * GIGABYTE_S)


def test_an_offloaded_step_updates_a_share_on_the_cpus_and_moves_every_gradient():
    work = replace(traffic(1), layers=(Layers(Block("layer", parameters=8e9), 1.0),))
    plans = plans_of([Plan(data=each, zero=2) for each in (1, 2, 4)])
    stack, share = with_settings(FLASH, offload=("optimizer",)), 8e9 / np.array([1, 2, 4])
    per_gradient_s = FLASH.gradient_bytes / A100.gpu.pcie_bytes_per_s / HOST_COPY_EFFICIENCY
    of_deepspeed, others = (
        step_time(work, plans, A100, each, PLAIN).optimizer_s
        for each in (with_settings(stack, bucket_elements=1.0), stack)
    )
    assert of_deepspeed == pytest.approx(share * HOST_UPDATE_S + 8e9 * per_gradient_s)
    assert others == pytest.approx(share * (HOST_UPDATE_S + per_gradient_s))


def test_recomputed_modules_are_their_products_traffic_and_all_reduces_once_more():
    block = Block(
        "layer",
        gemms=(Gemm(4096, 4096, 4096, again=True), Gemm(4096, 1024, 4096)),
        again_bytes=1e9,
        again_count=1.0,
        tensor_bytes=1e8,
        tensor_count=2.0,
    )
    work = Work(Block("before"), (Layers(block, 3.0),), Block("after"))
    once = gemm_s(4096, 4096, 4096, 1.0, A100, FLASH, PLAIN) + 1e9 / A100.gpu.memory_bandwidth_bytes_per_s
    reduced = all_reduce_s(1e8, 2, 2, links_for(A100)) / PLAIN.tensor_efficiency
    for tensor in (1, 2):
        plan = Plan(tensor=tensor, recompute=4)
        again = step_time(work, plans_of([plan]), A100, FLASH, PLAIN).recompute_s
        assert again[0] == pytest.approx(float(3.0 * (once + (tensor > 1) * reduced)))


@given(stages=st.integers(2, 6), layers_each=st.integers(1, 5), micro=st.integers(1, 20), logits=st.floats(0, 6))
@settings(max_examples=60)
def test_the_pipeline_takes_as_long_as_its_schedule_played_out(stages, layers_each, micro, logits):
    """1F1B event by event, with a last stage that is as heavy as the others or heavier."""
    work = traffic(stages * layers_each, after=logits)
    time = timed(work, Plan(pipeline=stages, accumulation=micro))
    seconds = [layers_each + (at == stages - 1) * logits for at in range(stages)]
    played = one_forward_one_backward([each * GIGABYTE_S for each in seconds], PLAIN.backward_traffic, micro)
    assert (time.total_s - time.pipeline_s - time.other_s)[0] == pytest.approx(played)


def one_forward_one_backward(forward: list[float], ratio: float, micro: int) -> float:
    """When the last backward pass ends: each stage runs a forward pass per stage that follows it, then one of each."""
    stages = len(forward)
    orders = []
    for at in range(stages):
        warm = min(stages - at - 1, micro)
        order = [("f", each) for each in range(warm)]
        for each in range(micro - warm):
            order += [("f", warm + each), ("b", each)]
        orders.append(order + [("b", each) for each in range(micro - warm, micro)])
    done: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * stages, [0] * stages
    while any(position[at] < len(orders[at]) for at in range(stages)):
        for at in range(stages):
            if position[at] == len(orders[at]):
                continue
            kind, batch = orders[at][position[at]]
            needs = ("f", at - 1, batch) if kind == "f" else ("b", at + 1, batch)
            first = (kind == "f" and at == 0) or (kind == "b" and at == stages - 1)
            if not first and needs not in done:
                continue
            start = max(clock[at], 0.0 if first else done[needs])
            clock[at] = start + forward[at] * (1.0 if kind == "f" else ratio)
            done[kind, at, batch] = clock[at]
            position[at] += 1
    return max(clock)


def test_interleaving_divides_the_bubble():
    plan = Plan(pipeline=8, accumulation=8)
    plain, four = timed(traffic(32), plan, replace(plan, interleave=4)).bubble_s
    assert plain / four == pytest.approx(4.0)


def test_tensor_parallelism_reduces_twice_as_often_with_the_backward_pass():
    work = traffic(10, tensor_bytes=64e6, tensor_count=2.0)
    time = timed(work, Plan(tensor=8, accumulation=3))
    one = all_reduce_s(64e6, 8, 8, links_for(A100)) / PLAIN.tensor_efficiency
    assert time.tensor_s[0] == pytest.approx(3 * 10 * 2 * 2 * one)


def test_reductions_of_input_gradients_hide_behind_the_products_for_weight_gradients():
    product = Block("layer", gemms=(Gemm(65536.0, 8192.0, 8192.0),), tensor_bytes=1e9, tensor_count=1.0)
    work = Work(Block("embedding"), (Layers(product, 4.0),), Block("logits"))
    plans = Plan(tensor=8), Plan(tensor=8, sequence=True)
    plain, hiding = (
        timed(work, *plans, software=with_settings(FLASH, async_tensor=each)).tensor_s for each in (False, True)
    )
    assert hiding == pytest.approx(plain * [0.5, 0.75])


def test_four_bytes_and_unfused_kernels_move_more():
    family, architecture = architecture_named("gpt-1.3b")
    half = Software("half", precision="fp16", flash=False, dropout=True)
    whole = replace(half, precision="tf32")
    (small, large, apart) = (
        family.work(architecture, plans_of([Plan(tensor=2)]), each).layers[0].block
        for each in (half, whole, replace(whole, fused=False))
    )
    assert large.boundary_bytes == pytest.approx(2.0 * small.boundary_bytes)
    assert large.tensor_bytes == pytest.approx(2.0 * small.tensor_bytes)
    assert apart.replicated_bytes > 1.5 * large.replicated_bytes
    core = Attention(16.0, 2048.0, 2048.0, 64.0, 64.0)
    fused, unfused = (attention_s(core, A100, each, PLAIN)[0] for each in (whole, replace(whole, fused=False)))
    assert unfused > 1.2 * fused


def test_gradients_are_reduced_once_a_step_and_gathered_weights_in_every_micro_batch():
    work = traffic(10, parameters=1e8)
    one, three = timed(work, Plan(data=16, accumulation=4), Plan(data=16, accumulation=4, zero=3)).data_s
    links = links_for(A100)
    assert one == pytest.approx(all_reduce_s(10 * 1e8 * 4, 16, 8, links) / PLAIN.network_efficiency)
    gather, scatter = (all_gather_s(1e8 * size, 16, 8, links) / PLAIN.network_efficiency for size in (2, 4))
    assert three == pytest.approx(4 * (10 * (2 * gather + scatter) + 2 * gather))


def test_tokens_go_to_the_nodes_of_few_groups_of_experts():
    """DeepSeek-V3's experts lie in 8 groups, those of a token in 4. Within a node that saves nothing."""
    family, architecture = architecture_named("deepseek-v3")
    plans = plans_of([Plan(data=64, expert=64, zero=1), Plan(data=8, expert=8, zero=1)])
    software, seconds = with_settings(FLASH, sends_once=True), []
    for groups in (4, 8):
        work = family.work(replace(architecture, groups_per_token=groups), plans, software)
        seconds.append(step_time(work, plans, machine_named("h100"), software, PLAIN).expert_s)
    (limited, limited_inside), (free, free_inside) = seconds
    assert 0.5 * free < limited < 0.9 * free
    assert limited_inside == free_inside


def test_experts_are_gathered_too_and_what_hides_behind_computation_costs_nothing():
    plan = Plan(data=16, zero=3)
    without, with_experts = (
        timed(traffic(4, parameters=1e7, expert_parameters=each), plan).data_s[0] for each in (0.0, 1e9)
    )
    assert with_experts > 20 * without
    work, hiding = traffic(100, parameters=1e6), replace(PLAIN, data_overlap=1.0, data_exposed=1e-9)
    assert timed(work, Plan(data=16), constants=hiding).data_s[0] < 1e-6 * timed(work, Plan(data=16)).data_s[0]


def test_what_never_overlaps_of_gathered_weights_costs_no_more_if_ranks_have_one_network_card_each():
    work, hiding = traffic(1000, parameters=1e8), replace(PLAIN, data_overlap=1e3, data_exposed=0.5)  # all may overlap
    whole_nodes, one_card = timed(work, Plan(data=16, zero=3), Plan(tensor=8, data=16, zero=3), constants=hiding).data_s
    assert one_card == pytest.approx(whole_nodes, rel=0.05)  # but for the first layer, which nothing hides
    shown = timed(work, Plan(data=16, zero=3), Plan(tensor=8, data=16, zero=3)).data_s  # nothing overlaps
    assert shown[1] > 4 * shown[0]
    assert shown[0] == pytest.approx(2 * whole_nodes, rel=0.05)


@pytest.mark.parametrize("name", ["gpt-175b", "llama-3-8b", "mixtral-8x7b", "resnet-50"])
def test_parts_are_positive_and_add_up(name):
    family, architecture = architecture_named(name)
    deep = 1 if name == "resnet-50" else 4
    plans = plans_of(
        [Plan(), Plan(data=16, zero=1), Plan(pipeline=deep, data=4, accumulation=8), Plan(recompute=2, zero=3, data=8)]
    )
    software = software_named("megatron-core")
    work = family.work(architecture, plans, software)
    time = step_time(work, plans, A100, software, constants_for(A100, software))
    assert all(np.all(each >= 0) and each.shape == (4,) for each in parts_of(time).values())
    assert sum(parts_of(time).values()) == pytest.approx(time.total_s)


def test_a_memory_size_of_a_chip_shares_its_constants_and_another_chip_is_less_efficient_where_it_does_more():
    software = software_named("fsdp")
    assert constants_for(machine_named("a100"), software) == constants_for(A100, software)
    h100, b200 = (constants_for(machine_named(each), software) for each in ("h100", "b200"))
    assert b200.gemm_efficiency < h100.gemm_efficiency < constants_for(A100, software).gemm_efficiency
    assert transferred(PLAIN, A100.gpu, machine_named("v100").gpu) == PLAIN  # which does less per clock
    software = software_named("megatron-core")
    assert constants_for(machine_named("h100"), replace(software, precision="fp8")) != constants_for(
        machine_named("h100"), software
    )


@pytest.mark.parametrize("name", ["fsdp", "torchtitan", "megatron-core-fp8", "megatron-v3", "megatron"])
def test_h200_and_gh200_run_kernels_as_the_measured_h100_does_and_a_cut_down_chip_does_not(name):
    """Their data sheets: as many multiprocessors at the same clock; an H20 has fewer, at a seventh of the FLOP/s."""
    h100, *same = (constants_for(machine_named(each), software_named(name)) for each in ("h100", "h200", "gh200"))
    assert same == [h100, h100]
    sheet = machine_named("h100").gpu
    slower = {each: rate / 2 for each, rate in sheet.tensor_flops_per_s.items()}
    assert has_same_chip(sheet, machine_named("h200").gpu)
    assert not any(
        has_same_chip(sheet, each)
        for each in (
            machine_named("h20").gpu,
            replace(sheet, tensor_flops_per_s=slower),
            replace(sheet, compute_capability=8.0),
        )
    )


def test_software_never_measured_on_a_gpu_type_is_no_more_efficient_than_what_was_measured_there():
    core, megatron = (constants_for(A100, software_named(each)) for each in ("megatron-core", "megatron-v3"))
    assert core.gemm_efficiency == megatron.gemm_efficiency
    assert core.tensor_efficiency <= megatron.tensor_efficiency
    assert core.attention_efficiency == constants_for(A100, software_named("fsdp")).attention_efficiency
    titan, fsdp = (constants_for(A100, software_named(each)) for each in ("torchtitan", "fsdp"))
    assert titan.memory_efficiency < fsdp.memory_efficiency


@pytest.mark.parametrize("name", ["l40s", "rtx3090", "a40"])
def test_over_pcie_tensor_parallelism_is_no_faster_than_its_collectives_alone(name):
    machine = machine_named(name, link="pcie")
    assert all(constants_for(machine, software_named(each)).tensor_efficiency <= 1.0 for each in ("megatron", "fsdp"))


def test_a_fit_finds_again_what_was_planted_and_one_wrong_row_does_not_bend_it():
    family, architecture = architecture_named("gpt-6.7b")
    degrees = product((1, 2, 8), (1, 2), (1, 8), (1, 4), (0, 2))
    plans = plans_of([Plan(t, p, 1, d, micro_batch=b, accumulation=4, recompute=r) for t, p, d, b, r in degrees])
    work = family.work(architecture, plans, FLASH)
    truth = replace(Constants(), gemm_efficiency=0.7, tensor_efficiency=0.75, memory_efficiency=0.8)
    noise = np.exp(0.01 * np.random.default_rng(0).normal(size=len(plans)))
    measured = step_time(work, plans, A100, FLASH, truth).total_s * noise
    measured[5] *= 3.0
    group = Case(None, work, plans, A100, FLASH, np.arange(len(plans)), measured, np.ones(len(plans)), "any")
    names = ("gemm_efficiency", "tensor_efficiency", "memory_efficiency")
    found = fit([group], (), {"any": names}, {"any": Constants()}).constants["any"]
    off = np.abs(np.exp(group.residuals(found)) - 1.0)
    assert np.median(off) < 0.02
    for name in names:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.06)
