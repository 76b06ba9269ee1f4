"""A roofline in place of the planner's step time, memory and constants: simple, quick, and with the same shape.

It has each effect that plans trade against each other, so that a search has something to choose; not their sizes.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import numpy as np

from synergy_core.catalog.sheets import gpu_sheet
from synergy_core.planner.machine import Machine


@dataclass(frozen=True)
class Constants:
    efficiency: float = 0.5


@dataclass(frozen=True, slots=True)
class StepTime:
    total_s: np.ndarray
    compute_s: np.ndarray
    recompute_s: np.ndarray
    bubble_s: np.ndarray
    tensor_s: np.ndarray
    context_s: np.ndarray
    expert_s: np.ndarray
    pipeline_s: np.ndarray
    data_s: np.ndarray
    optimizer_s: np.ndarray
    other_s: np.ndarray


@dataclass(frozen=True, slots=True)
class Memory:
    total: np.ndarray

    @property
    def device_total(self):
        return self.total

    def fits(self, machine):
        return self.total <= machine.memory_bytes


def memory(work, plans, software):
    layer = work.layers[0].block
    per_stage = np.ceil(work.layer_count / plans.pipeline)
    ends = np.maximum(work.before.parameters, work.after.parameters) + np.where(
        plans.pipeline == 1, np.minimum(work.before.parameters, work.after.parameters), 0.0
    )
    held = per_stage * (layer.parameters + layer.expert_parameters) + ends
    replicas = plans.data * plans.context

    def shard(stage):
        return np.where(plans.zero >= stage, replicas, 1)

    static = held * (
        software.weight_bytes / shard(3) + software.gradient_bytes / shard(2) + software.optimizer_bytes / shard(1)
    )
    kept = np.choose(plans.recompute, [layer.saved_bytes, layer.selective_bytes, layer.input_bytes])
    in_flight = np.minimum(plans.accumulation, plans.pipeline) * (
        1 + np.where(plans.interleave > 1, (plans.pipeline - 1) / (plans.pipeline * plans.interleave), 0.0)
    )
    gathered = np.where(plans.zero == 3, 2 * layer.parameters * software.weight_bytes, 0.0)
    total = static + gathered + kept * per_stage * in_flight + layer.live_bytes + work.after.live_bytes + 1e9
    return Memory(total)


def step_time(work, plans, machine, software, constants):
    layer = work.layers[0].block
    peak = machine.gpu.fp32_flops_per_s * 16 * constants.efficiency
    hbm = machine.gpu.memory_bandwidth_bytes_per_s * 0.8
    t, p, d, m = plans.tensor, plans.pipeline, plans.data * plans.context, plans.accumulation
    per_stage = np.ceil(work.layer_count / p)

    def seconds(block):
        flops = sum((gemm.flops for gemm in block.gemms), np.zeros(len(plans)))
        for each in block.attention:
            flops = flops + 2 * each.count * each.queries * each.keys * each.width * (0.5 if each.causal else 1) * 2
        return flops / peak + (block.replicated_bytes + block.split_bytes) / hbm + 1e-5 * np.asarray(block.kernels)

    forward = seconds(layer) * per_stage
    again = np.choose(plans.recompute, [0.0 * forward, 0.1 * forward, forward])
    ends = np.where(p > 1, seconds(work.after), seconds(work.after) + seconds(work.before))
    compute = 3.0 * (forward + ends)
    link = np.where(t <= machine.gpus_per_node, machine.link_bytes_per_s, machine.network_bytes_per_s)
    rounds = per_stage * layer.tensor_count * np.where(plans.recompute == 2, 3, 2) * 2
    tensor = rounds * np.where(t > 1, 2 * (t - 1) / t * layer.tensor_bytes / link + 1e-5, 0.0)
    ring = per_stage * 3 * layer.context_bytes * (plans.context - 1) / machine.network_bytes_per_s
    away = per_stage * 4 * np.asarray(layer.expert_bytes) * layer.expert_count / machine.network_bytes_per_s
    stage = compute + again + tensor + ring + away
    hops = np.where(p > 1, 2 * m * plans.interleave * layer.boundary_bytes / machine.network_bytes_per_s, 0.0)
    bubble = (p - 1) / plans.interleave * stage
    parameters = per_stage * (layer.parameters + layer.expert_parameters) + work.after.parameters
    wire = machine.network_bytes_per_s
    reduced = 2 * (d - 1) / d * software.gradient_bytes * parameters / wire
    gathered = np.where(plans.zero == 3, 4 * m * parameters * (d - 1) / d / wire, 0.0)
    data = np.maximum(reduced - 0.5 * stage, 0.1 * reduced) + gathered
    optimizer = parameters * 20 / np.where(plans.zero > 0, d, 1) / hbm
    none = np.zeros(len(plans))
    parts = (m * compute, m * again, bubble, m * tensor, m * ring, m * away, hops, data, optimizer, none + 1e-3)
    return StepTime(sum(parts), *(none + each for each in parts))


def install():
    """Makes the planner import the roofline where its own modules are not there yet."""
    for name, content in (
        ("memory", {"memory": memory, "Memory": Memory, "MARGIN": 0.0, "USABLE": 1.0}),
        ("step_time", {"step_time": step_time, "StepTime": StepTime}),
        ("constants", {"Constants": Constants, "constants_for": lambda machine, software: Constants()}),
    ):
        full = f"synergy_core.planner.{name}"
        if full not in sys.modules and find_spec(full) is None:
            module = ModuleType(full)
            module.__dict__.update(content)
            sys.modules[full] = module


def machine(name="a100", memory_bytes=80e9, node=8):
    sheet = gpu_sheet(name)
    return Machine(
        gpu=sheet,
        gpus_per_node=node,
        link="nvswitch",
        link_bytes_per_s=300e9,
        link_group=node,
        network_bytes_per_s=25e9,
        memory_bytes=memory_bytes,
    )


def constants(machine, software):
    """What the planner's own function gives for them."""
    from synergy_core.planner.constants import constants_for

    return constants_for(machine, software)
