"""Data sheets, node types and training software: consistent with one another, found by name."""

from __future__ import annotations

import math

import pytest

from synergy_core.errors import InputError
from synergy_core.performance.catalog import gpu_sheet, gpu_sheets, node_sheets
from synergy_core.performance.planner.machine import machine_named, software_named, software_names

# fp16 FLOPs per cycle and multiprocessor, dense, fp32 accumulation (NVIDIA's architecture whitepapers).
PER_CYCLE = {
    "pascal": 256,
    "volta": 1024,
    "turing": 1024,
    "ampere": 2048,
    "hopper": 4096,
    "ada": 1024,
    "blackwell": 8192,
}
GEFORCE_HALVED = {
    **dict.fromkeys(("rtx2080ti", "rtx3090", "rtx3060", "rtx4080", "rtx4090", "rtx5090", "l20", "l40"), 512),
    **dict.fromkeys(("a40", "a10", "rtxa6000", "h20"), 1024),
}


@pytest.mark.parametrize("name", sorted(gpu_sheets()))
def test_peak_follows_from_multiprocessors_and_clock(name):
    sheet = gpu_sheets()[name]
    each = sheet.tensor_flops_per_s["fp16"] / (sheet.multiprocessors * sheet.clock_hz)
    known = GEFORCE_HALVED.get(name, PER_CYCLE.get(sheet.architecture))
    assert each == pytest.approx(known or 2.0 ** round(math.log2(each)), rel=0.02)  # a power of two, of any generation
    assert 1e10 < sheet.pcie_bytes_per_s < (5e11 if name == "gh200" else 1e11)  # a GH200's host is on NVLink-C2C


@pytest.mark.parametrize("name", sorted(gpu_sheets()))
def test_narrower_types_are_never_slower(name):
    sheet = gpu_sheets()[name]
    peaks = [sheet.matrix_flops_per_s(each) for each in ("fp32", "tf32", "bf16", "fp8", "fp4")]
    assert peaks == sorted(peaks)
    assert sheet.matrix_flops_per_s("fp16") == sheet.tensor_flops_per_s["fp16"]


def test_a_precision_that_a_gpu_lacks():
    v100, a100 = gpu_sheets()["v100"], gpu_sheets()["a100"]
    assert v100.matrix_flops_per_s("bf16") == v100.matrix_flops_per_s("tf32") == v100.fp32_flops_per_s
    assert v100.matrix_flops_per_s("fp8") == v100.tensor_flops_per_s["fp16"]
    assert a100.matrix_flops_per_s("fp8") == a100.tensor_flops_per_s["bf16"]


def test_every_gpu_is_known_by_one_name_only():
    names = [each for sheet in gpu_sheets().values() for each in (sheet.name, *sheet.aliases)]
    assert len(names) == len(set(names))
    assert gpu_sheet("A100-80").name == "a100-80gb"


@pytest.mark.parametrize("name", sorted(node_sheets()))
def test_node_types_are_of_known_gpus_and_links(name):
    node = node_sheets()[name]
    machine = machine_named(name)
    assert node.gpu in gpu_sheets()
    assert (machine.gpu.name, machine.gpus_per_node, machine.link) == (node.gpu, node.gpus_per_node, node.link)
    assert machine.link_group == node.link_group
    assert machine.link_bytes_per_s > 0
    assert machine.network_bytes_per_s * node.gpus_per_node == pytest.approx(node.network_bytes_per_s)


def test_one_node_type_is_usual_for_each_gpu():
    usual = [each.gpu for each in node_sheets().values() if each.usual]
    assert len(usual) == len(set(usual))
    assert set(usual) == {each.gpu for each in node_sheets().values()}


def test_machines_by_gpu():
    a100 = machine_named("a100-80gb")
    assert (a100.gpus_per_node, a100.link, a100.link_group) == (8, "nvswitch", 8)
    assert a100.network_bytes_per_s == pytest.approx(25e9)
    assert a100.memory_bytes == pytest.approx(80e9)
    assert machine_named("dgx").gpu.name == "a100"
    assert machine_named("v100-32gb", 16).link == "nvswitch"
    assert machine_named("v100-32gb").link == "nvlink"


def test_machines_with_another_number_network_or_link():
    half = machine_named("a100-80gb", 4, 12.5e9)
    assert (half.gpus_per_node, half.link_group, half.network_bytes_per_s) == (4, 4, 12.5e9)
    assert machine_named("h100-pcie", 8).link_group == 2
    bridged = machine_named("a40", link="nvlink")
    assert (bridged.link_group, bridged.link_bytes_per_s) == (2, 56.25e9)
    assert machine_named("titan_rtx", 2, 1.25e9).link == "pcie"


def test_machines_that_cannot_be():
    with pytest.raises(InputError, match="Did you mean 'a100-80gb'"):
        machine_named("a100-80g")
    with pytest.raises(InputError, match="at least 1"):
        machine_named("a100", 0)
    with pytest.raises(InputError, match="no node type of GPU 'titan_rtx'"):
        machine_named("titan_rtx", 2)
    with pytest.raises(InputError, match="no NVLink"):
        machine_named("t4", link="nvlink")
    with pytest.raises(InputError, match=r"unknown link 'nvlnk'\. Did you mean 'nvlink'"):
        machine_named("a100", link="nvlnk")


@pytest.mark.parametrize("name", software_names())
def test_software_is_consistent(name):
    software = software_named(name)
    assert software.precision in {"fp32", "tf32", "fp16", "bf16", "fp8"}
    assert software.source
    # Two moments, and an fp32 master copy unless the weights are it; all in fp32 or all in 16 bits.
    assert software.optimizer_bytes + software.weight_bytes >= (6 if name.startswith("fsdp-bf16") else 12)


def test_unknown_software_is_met_with_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'megatron-core'"):
        software_named("megatron-cor")
