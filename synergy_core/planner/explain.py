"""Why a plan loses to another, in a sentence; and what share of the GPUs' peak a step uses."""

from __future__ import annotations

import numpy as np

from synergy_core.planner.architecture import Architecture, Family
from synergy_core.planner.machine import Machine
from synergy_core.planner.plan import Plan, Recompute, plans_of
from synergy_core.planner.plan_table import PlanTable
from synergy_core.planner.software import Software

PARTS = {
    "compute_s": "compute",
    "recompute_s": "recompute",
    "bubble_s": "bubble",
    "tensor_s": "TP",
    "context_s": "CP",
    "expert_s": "EP",
    "pipeline_s": "PP",
    "data_s": "DP",
    "optimizer_s": "optimizer",
    "other_s": "other",
}
"""Columns of a step time, with the names that are printed."""


def why(table: PlanTable, row: int, best: int) -> str:
    """What costs the plan in `row` most beside the one in `best`: `TP 16 leaves the node: all-reduces +4.1 s`."""
    extra = {name: float(getattr(table.parts, name)[row] - getattr(table.parts, name)[best]) for name in PARTS}
    worst = max(extra, key=lambda name: extra[name])
    loser, winner = table.plans.plan(row), table.plans.plan(best)
    reason = _reason(worst, loser, winner, table.machine)
    return f"{reason} +{seconds(extra[worst])}"


def seconds(value: float) -> str:
    """Three digits: `4.10 s`, `85.0 ms`."""
    size, unit = (value, "s") if value >= 1.0 else (value * 1e3, "ms")
    return f"{size:.{max(0, 2 - int(np.log10(max(size, 1.0))))}f} {unit}"


def model_flops(family: Family, architecture: Architecture, software: Software) -> float:
    """FLOPs of one sample, forward and backward (3 × forward), no recomputation; causal attention counted by half."""
    work = family.work(architecture, plans_of([Plan()]), software)
    flops = work.before.forward_flops + work.after.forward_flops
    for run in work.layers:
        flops = flops + run.block.forward_flops * run.count
    return 3.0 * float(np.max(flops))


def _reason(part: str, loser: Plan, winner: Plan, machine: Machine) -> str:
    if part == "tensor_s":
        if loser.tensor > machine.gpus_per_node >= winner.tensor:
            return f"TP {loser.tensor} leaves the node: all-reduces"
        return f"TP {loser.tensor}, micro-batch {loser.micro_batch}: all-reduces"
    if part == "bubble_s":
        return f"{loser.pipeline} stages, {loser.accumulation} micro-batches: bubble"
    if part == "recompute_s":
        return f"recomputes {Recompute(loser.recompute).again}:"
    if part == "data_s":
        if loser.zero == 3:
            return "ZeRO 3 gathers weights for every micro-batch:"
        return f"{loser.data * loser.context} replicas: gradients"
    if part == "pipeline_s":
        return f"{loser.pipeline * loser.interleave} pieces of the pipeline: transfers"
    if part == "optimizer_s":
        return "optimizer state is not sharded:" if loser.zero < winner.zero else "more state per GPU: optimizer"
    if part == "compute_s":
        return _slower_compute(loser, winner)
    return {
        "context_s": f"CP {loser.context}: keys and values",
        "expert_s": f"EP {loser.expert}: all-to-alls",
        "other_s": "fixed costs",
    }[part]


def _slower_compute(loser: Plan, winner: Plan) -> str:
    """More seconds for the same products: repeated work, or smaller ones."""
    if winner.sequence and not loser.sequence and loser.tensor > 1:
        return "without sequence parallelism norms are repeated:"
    if loser.micro_batch < winner.micro_batch:
        return f"micro-batch {loser.micro_batch} makes smaller products: compute"
    if loser.tensor > winner.tensor:
        return f"TP {loser.tensor} makes smaller products: compute"
    if loser.pipeline > winner.pipeline:
        return f"{loser.pipeline} stages are less even, the last has the logits: compute"
    return "compute"
