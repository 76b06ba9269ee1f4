"""Iteration times of Rubick (MLSys 2025): seven models under many plans on A800 GPUs, on whole and on shared nodes.

Columns: model, plan (3d, ga, gc, zero-dp, zero-offload), pp, tp, dp (of 3d), gpus_per_node_used (one digit per node),
gpus, nodes, iter_time_s. The artifact (AlibabaPAI/reconfigurable-dl-scheduler) fixes what the file does not state:

- Everything is in fp32 with products in TF32; attention and softmax are not fused (its training logs).
- 3d is Megatron-LM. A replica's batch is a single micro-batch (its performance model: local batch ÷ dp), so pipeline
stages wait for each other.
- ga, gc, zero-dp and zero-offload are DeepSpeed's, with the fewest micro-batches that fit into memory. gc recomputes
  every layer. Offloading has its own constants (`step_time`), so its rows have no weight in a fit. llama7 does not fit
  even with offloading: its weights must have been on the host too, which is not modelled, so it is not predicted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil
from typing import Any

from synergy_core.commands.measurements._rows import Setting, family_of
from synergy_core.commands.measurements._table import Table, TableRow
from synergy_core.commands.measurements.training_times import TrainingStep, TrainingTimes
from synergy_core.performance.planner.families import architecture_named
from synergy_core.performance.planner.machine import Machine, machine_named, software_named, with_settings
from synergy_core.performance.planner.memory import memory
from synergy_core.performance.planner.plan import Plan, Recompute, plans_of

DESCRIPTION = "Rubick's iteration times (model, plan, pp, tp, dp, gpus_per_node_used, gpus, iter_time_s)"

MODELS = {
    "bert": ("bert-large", 512, 32),
    "roberta": ("roberta-large", 512, 64),
    "gpt2": ("gpt2-xl", 1024, 16),
    "t5": ("mt5-large", 512, 16),
    "vit": ("vit-base", 197, 64),
    "llama7": ("llama-2-7b", 2048, 8),
    "llama30": ("llama-30b", 2048, 4),
}
"""The catalog's architecture, tokens per sequence, and sequences per step, by model. Source: the artifact's
validate_*.py; the sequence lengths of RoBERTa and ViT follow from the tokenizer and the patches."""
UNACCUMULATED = ("roberta", "vit")
"""Models that the artifact trains without gradient accumulation (morphlingjob.yaml), so that a step has only as many
sequences as fit into memory. RoBERTa on one GPU takes as long as on two."""
ZERO = {"ga": 0, "gc": 0, "zero-dp": 2, "zero-offload": 2}
CARDS, CARD_BYTES_PER_S = 4, 25e9
"""A node has four network cards, each shared by two neighbouring GPUs: 100 GB/s in all (the artifact's README)."""


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a file with these columns has this format."""
    return "gpus_per_node_used" in columns and "plan" in columns


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> TrainingTimes:
    """Parses the rows of `table`. model, gpu_type: keep only these. Raises InputError for impossible cells."""
    table.need("model", "plan", "pp", "tp", "dp", "gpus_per_node_used", "gpus", "iter_time_s")
    shapes = table.shapes("gpus_per_node_used")
    rows = tuple(_step(row, shape) for row, shape in zip(table.rows, shapes, strict=True))
    return TrainingTimes(table.path, rows).only(model, gpu_type)


@cache
def machine_of(shape: tuple[int, ...]) -> Machine:
    """The machine that stands for a placement in predictions. shape: number of GPUs in use on each node.

    Its nodes have as many GPUs as the placement uses per node on average. A GPU can use only the network cards next to
    it, so the node with the fewest GPUs in use is the slowest, and its bandwidth is that of every node.
    """
    gpus, used = sum(shape), max(round(sum(shape) / len(shape)), 1)
    per_node = gpus / ceil(gpus / used)
    return machine_named("a800", used, CARD_BYTES_PER_S * min(ceil(min(shape) / 2), CARDS) / per_node)


def _step(row: TableRow, shape: tuple[int, ...]) -> TrainingStep:
    gpus, seconds, plan = row.whole("gpus") or 1, row.number("iter_time_s"), row.text("plan")
    if sum(shape) != gpus or seconds is None:
        row.refuse("gpus", f"the sum of gpus_per_node_used, {sum(shape)}, and a time")
    if row.text("model") not in MODELS:
        row.refuse("model", f"one of {', '.join(MODELS)}")
    name, seq_len, batch = MODELS[row.text("model")]
    architecture: Any = architecture_named(name)[1]
    architecture = replace(architecture, seq_len=seq_len)
    machine = machine_of(shape)
    failure = ""
    if plan not in ("3d", *ZERO):
        row.refuse("plan", f"3d, {', '.join(ZERO)}")
    if plan == "3d":
        pipeline, tensor, data = (row.whole(each) or 1 for each in ("pp", "tp", "dp"))
        degrees = Plan(tensor=tensor, pipeline=pipeline, data=data, micro_batch=batch // data)
        setting = Setting(architecture, degrees, machine, software_named("megatron-tf32"))
    else:
        setting, fits = _replicas(architecture, machine, gpus, batch, plan)
        if row.text("model") in UNACCUMULATED:
            setting = replace(setting, plan=replace(setting.plan, accumulation=1))
            batch = setting.plan.global_batch
        if setting.software.run.offload and not fits:
            failure = "it does not fit with the optimizer offloaded, and offloaded weights are not modelled"
    found = setting.plan
    if found.gpus != gpus:
        row.fail(f"got gpus {gpus}, expected pp · tp · dp = {found.gpus}.")
    return TrainingStep(
        line=row.line,
        model=row.text("model"),
        gpu_type=machine.gpu.name,
        gpus=gpus,
        tensor=found.tensor,
        pipeline=found.pipeline,
        global_batch=batch,
        iter_time_s=seconds,
        weight=0.0 if setting.software.run.offload else 1.0,
        settings=() if failure else (setting,),
        failure=failure,
    )


def _replicas(architecture: Any, machine: Machine, gpus: int, batch: int, plan: str) -> tuple[Setting, bool]:
    """The data-parallel plan with the fewest micro-batches that fits, else with micro-batch 1; and whether it fits."""
    software, per_gpu = software_named("deepspeed-tf32"), batch // gpus
    software = with_settings(software, offload=("optimizer",) if plan == "zero-offload" else ())
    recompute = Recompute.FULL if plan == "gc" else Recompute.NONE
    sizes = [size for size in range(per_gpu, 0, -1) if per_gpu % size == 0]
    tried = [
        Plan(data=gpus, micro_batch=size, accumulation=per_gpu // size, zero=ZERO[plan], recompute=recompute.value)
        for size in sizes
    ]
    plans = plans_of(tried)
    fits = memory(family_of(architecture).work(architecture, plans, software), plans, software).fits(machine)
    found = replace(tried[int(fits.argmax()) if fits.any() else -1], offload=bool(software.run.offload))
    return Setting(architecture, found, machine, software), bool(fits.any())
