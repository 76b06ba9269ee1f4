"""Measured best plans: what Alpa may choose from, where it ran, rows without a plan, and how well the times hold."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from synergy_core.commands._scoring import scored
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements.best_plans import candidates, machine_of, plans_for, search_loss
from synergy_core.performance.catalog import gpu_sheet
from synergy_core.performance.planner.machine import Constants, constants_for, machine_named, software_named
from synergy_core.performance.planner.work import gemm_s

DATA = os.environ.get("SYNERGY_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="needs the measured tables: set SYNERGY_DATA to their folder")
HEADER = "model_family,model_size,global_batch,gpu,n_nodes,gpus_per_node,n_gpus,iter_time_s"


def rows(tmp_path, *lines):
    path = tmp_path / "best.csv"
    path.write_text("\n".join((HEADER, *lines)) + "\n")
    return read(path).rows


def test_alpa_accumulates_sixteen_micro_batches_and_recomputes_every_layer(tmp_path):
    (row,) = rows(tmp_path, "bert,1.3B,256,A40,4,2,8,10.0")
    plans = list(plans_for(row))
    assert {each.accumulation for each in plans} == {16}
    assert {each.recompute for each in plans} == {2}
    assert {each.gpus for each in plans} == {8}
    assert {each.global_batch for each in plans} == {256}
    assert not any(each.sequence or each.interleave > 1 for each in plans)
    assert {(each.tensor, each.pipeline) for each in plans} >= {(1, 1), (8, 1), (1, 8), (2, 2)}


def test_a_batch_that_sixteen_does_not_divide_has_fewer_micro_batches(tmp_path):
    (row,) = rows(tmp_path, "bert,760M,24,V100,1,2,2,10.0")
    assert {each.accumulation for each in plans_for(row)} == {8}


def test_experts_spread_over_replicas_only(tmp_path):
    (row,) = rows(tmp_path, "moe,690M,256,V100,1,4,4,10.0")
    plans = list(plans_for(row))
    assert max(each.expert for each in plans) == 4
    assert all(each.data % each.expert == 0 for each in plans)


def test_one_gpu_on_each_of_two_nodes_has_the_whole_network_and_no_neighbour(tmp_path):
    alone, pair = rows(tmp_path, "bert,760M,128,A40,2,1,2,7.0", "bert,760M,128,A40,1,2,2,7.0")
    assert machine_of(alone).gpus_per_node == 1
    assert machine_of(alone).network_bytes_per_s == pytest.approx(2 * machine_of(pair).network_bytes_per_s)


def test_v100_rows_run_on_sixteen_with_32_gb_and_h100_rows_on_no_other_chip(tmp_path):
    v100, h100 = rows(tmp_path, "bert,760M,128,V100,1,2,2,7.0", "bert,1.3B,256,H100,1,4,4,7.0")
    assert (machine_of(v100).gpus_per_node, machine_of(v100).memory_bytes) == (16, 32e9)
    assert machine_of(h100).gpu.name == "h100"


def test_rows_without_a_plan_are_explained(tmp_path):
    odd = rows(
        tmp_path,
        "bert,999B,128,A40,1,2,2,7.0",
        "bert,1.3B,128,nonesuch,1,2,2,7.0",
        "bert,1.3B,1,A40,1,2,2,7.0",
        "bert,1.3B,128,A40,1,3,3,7.0",
        "bert,39B,128,A40,1,2,2,7.0",
    )
    found, reasons = candidates(odd)
    assert "no architecture of bert-999B" in reasons[0]
    assert "nonesuch" in reasons[1]
    assert "fits; the one that needs least memory is timed" in reasons[4]
    assert "3 GPUs" in reasons[3]
    timed = np.concatenate([each.rows for each in found]).tolist()
    assert 4 in timed
    assert not {0, 1, 3} & set(timed)


def test_plans_that_do_not_fit_are_left_out(tmp_path):
    found, reasons = candidates(rows(tmp_path, "bert,6.7B,128,V100,1,8,8,17.0"))
    assert not reasons
    (each,) = found
    assert not ((each.plans.data == 8) & (each.plans.zero == 0)).any()


def test_the_best_of_each_row_is_the_least_of_its_own_plans(tmp_path):
    found, _ = candidates(rows(tmp_path, "bert,760M,128,V100,1,2,2,7.0", "bert,1.3B,128,V100,1,4,4,7.0"))
    (each,) = found
    c = Constants()
    seconds, which = each.best(c, 0.0)
    assert each.plans.gpus[which].tolist() == [2, 4]
    lossy, same = each.best(c, 0.5)
    assert (same == which).all()
    assert lossy == pytest.approx(seconds * np.sqrt([2.0, 4.0]))


def test_half_of_the_lanes_count_in_fp32_where_integers_share_them():
    for name, share in (("a40", 0.5), ("l20", 0.5), ("a100", 1.0), ("v100", 1.0), ("h100", 1.0)):
        sheet = gpu_sheet(name)
        assert sheet.matrix_flops_per_s("fp32") == share * sheet.fp32_flops_per_s


def test_fp32_efficiency_is_not_lowered_for_stronger_tensor_cores(tmp_path):
    resnet, bert = rows(tmp_path, "wide_resnet,1B,256,H100,1,8,8,7.0", "bert,1.3B,256,H100,1,8,8,7.0")
    found, _ = candidates([resnet, bert])
    by_name = {each.software.name: constants_for(each.machine, each.software) for each in found}
    measured = {
        each.software.name: constants_for(each.machine, each.software)
        for each in candidates([replace(row, gpu_type="v100", gpus_per_node=16) for row in (resnet, bert)])[0]
    }
    assert by_name["alpa-fp32"].gemm_efficiency == measured["alpa-fp32"].gemm_efficiency
    assert by_name["alpa"].gemm_efficiency < measured["alpa"].gemm_efficiency


@needs_data
def test_arena_is_predicted_as_well_as_was_fitted():
    groups = {each.name: each.score for each in scored(read(Path(DATA) / "arena" / "best_plan_iteration_time.csv"))}
    assert groups["all"].n == 193
    assert groups["all"].mape < 0.15
    assert groups["all"].spearman > 0.95
    assert search_loss("alpa") < search_loss("alpa-fp32") < 0.5
    assert search_loss("megatron") == 0.0


def test_products_on_fp32_lanes_reach_their_rate_whatever_the_tile():
    machine, c = machine_named("dgx-2"), Constants(gemm_efficiency=1.0, memory_efficiency=1.0)
    lanes, cores = software_named("alpa-fp32"), software_named("alpa")
    shape = (16384.0, 64.0, 1024.0, 1.0)
    flops = 2.0 * 16384 * 64 * 1024
    on_lanes = flops / gemm_s(*shape, machine, lanes, c) / machine.gpu.matrix_flops_per_s("fp32")
    on_cores = flops / gemm_s(*shape, machine, cores, c) / machine.gpu.matrix_flops_per_s("fp16")
    assert 0.75 < on_lanes <= 1.0
    assert on_cores < on_lanes
