"""The tables of a torchtitan TOML that define how training is split: `[training]`, `[parallelism]`,
`[activation_checkpoint]`.

Names and rules: torchtitan 0.2.2, torchtitan/config/job_config.py, the last release that reads TOML. ZeRO 3 is its FSDP
that gathers weights again for each pass, ZeRO 2 its FSDP that keeps them, ZeRO 0 its DDP, which supports no other
parallelism; there is no ZeRO 1. Stages are lists of module names of its models `llama3`, `qwen3` and similar.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_core.performance.planner.emitters import PlannedLaunch, stages
from synergy_core.performance.planner.families import transformer
from synergy_core.performance.planner.options import Options, Stated, whole_plan
from synergy_core.performance.planner.plan import Recompute

SUMMARY = "tables of a torchtitan TOML (0.1 to 0.2)"
SOFTWARE = ("torchtitan", "torchtitan-fp8")
_RESHARDS = {2: "never", 3: "always"}
_RECOMPUTES = {
    Recompute.NONE: {"mode": "none"},
    Recompute.FULL: {"mode": "full"},
    Recompute.OPERATORS: {"mode": "selective", "selective_ac_option": "op"},
}
_SHARDS = "parallelism.data_parallel_shard_degree"
_COPIES = "parallelism.data_parallel_replicate_degree"
Tables = dict[str, dict[str, Any]]


def emit(launch: PlannedLaunch) -> str:
    """Writes the tables as TOML. Raises InputError for plans and models that torchtitan does not run."""
    return "\n".join(
        # Strings, numbers and lists are written alike in TOML and JSON.
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables(launch).items()
    )


def beside(launch: PlannedLaunch) -> str:
    """Says what the user has to add to the tables."""
    return (
        "[model], data, [optimizer] and [lr_scheduler] are yours to add, and [compile] enable = true, which the "
        "planner's times assume; for torchtitan up to 0.2, because 0.3 is configured in Python"
    )


def tables(launch: PlannedLaunch) -> Tables:
    """The tables by name. Raises InputError as `emit`."""
    a, plan = launch.architecture, launch.plan
    if not isinstance(a, transformer.Architecture) or not a.causal:
        raise InputError(f"--emit torchtitan: torchtitan trains decoders; {launch.model} is not one.")
    shards = (
        max(math.gcd(plan.data * plan.context, launch.software.communication.shard_ranks) // plan.context, 1)
        if plan.zero
        else 1
    )
    share = plan.micro_batch * (plan.accumulation if plan.pipeline > 1 else 1)
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.data // shards,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": plan.tensor,
        "context_parallel_degree": plan.context,
        "expert_parallel_degree": plan.expert,
        "expert_tensor_parallel_degree": plan.tensor if plan.expert > 1 else 1,
        "pipeline_parallel_degree": plan.pipeline,
    }
    if plan.zero:
        parallelism["fsdp_reshard_after_forward"] = _RESHARDS[plan.zero]
    if plan.pipeline > 1:
        parallelism["pipeline_parallel_schedule"] = "Interleaved1F1B" if plan.interleave > 1 else "1F1B"
        parallelism["pipeline_parallel_microbatch_size"] = plan.micro_batch
        cuts = list(accumulate(stages(int(a.layers), plan), initial=0))
        modules = [[f"layers.{each}" for each in range(*cut)] for cut in pairwise(cuts)]
        modules[0].insert(0, "tok_embeddings")
        modules[-1] += ["norm", "output"]
        parallelism["module_fqns_per_model_part"] = modules
    return {
        "training": {"seq_len": int(a.seq_len), "local_batch_size": share, "global_batch_size": plan.global_batch},
        "parallelism": parallelism,
        "activation_checkpoint": dict(_RECOMPUTES[Recompute(plan.recompute)]),
    }


def recognises(text: str) -> bool:
    """Whether a text has one of the tables."""
    return bool(re.search(r"^\s*\[(training|parallelism|activation_checkpoint)\]", text, re.MULTILINE))


def read(text: str, gpus: int, folder: Path) -> Stated:
    """Reads a TOML. Missing keys have torchtitan's defaults."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"is not TOML ({error}).") from None
    return plan_of(content, gpus)


def plan_of(content: Mapping[str, Any], gpus: int) -> Stated:
    """Reads the plan in parsed tables. Raises InputError if the plan is not for this number of GPUs."""
    options = Options(content, "torchtitan")
    for name in (_SHARDS, "training.global_batch_size"):
        if options.get(name) == -1:
            options[name] = "auto"
    settings = options.settings()
    copies, shards, expert_tensor = map(options.whole, (_COPIES, _SHARDS, "parallelism.expert_tensor_parallel_degree"))
    share = options.whole("training.local_batch_size") or 8
    stage_batch = options.whole("parallelism.pipeline_parallel_microbatch_size") or 1
    tensor, pipeline, context = (settings.get(name, 1) for name in ("tensor", "pipeline", "context"))
    copies = copies or 1
    shards = shards or max(gpus // (copies * tensor * pipeline * context), 1)
    if (product := copies * shards * tensor * pipeline * context) != gpus:
        raise InputError(
            f"replicate {copies} × shard {shards} × tensor {tensor} × pipeline {pipeline} × context {context} = "
            f"{product} GPUs, not gpus={gpus}."
        )
    if settings.get("expert", 1) > 1 and (expert_tensor or 1) != tensor:
        raise InputError(
            "whole experts on tensor-parallel ranks, torchtitan's default, are not planned; expected "
            f"expert_tensor_parallel_degree = {tensor}."
        )
    parts = options.get("parallelism.module_fqns_per_model_part")
    zero = _zero(options, shards * context, pipeline)
    phrases = options.not_modelled()
    if options.get("compile.enable") is not True:
        phrases += ("[compile] enable is not true",)
    plan = whole_plan(
        gpus,
        **{"seq_len": 2048, "batch": share * copies * shards, **settings},
        micro_batch=stage_batch if pipeline > 1 else share,
        interleave=len(parts) // pipeline if parts and pipeline > 1 else 1,
        zero=zero,
        recompute=_recompute(options).value,
        sequence=tensor > 1,
        shards=shards * context if copies > 1 and zero else None,  # HSDP
    )
    is_fp8 = "float8" in str(options.get("model.converters"))
    return Stated(plan, "torchtitan-fp8" if is_fp8 else "", not_modelled=phrases)


def _zero(options: Options, shards: int, pipeline: int) -> int:
    """ZeRO's stage. By default torchtitan gathers weights again for the backward pass, except with pipeline stages."""
    policy = options.get("parallelism.fsdp_reshard_after_forward", "default")
    stages_by_policy = {"default": 2 if pipeline > 1 else 3, **{name: stage for stage, name in _RESHARDS.items()}}
    if shards > 1 and policy not in stages_by_policy:
        raise InputError(f"parallelism.fsdp_reshard_after_forward = {policy}: expected default, always or never.")
    return stages_by_policy[policy] if shards > 1 else 0


def _recompute(options: Options) -> Recompute:
    mode = options.get("activation_checkpoint.mode", "selective")
    option = str(options.get("activation_checkpoint.selective_ac_option", "2"))
    for mode_found, settings in _RECOMPUTES.items():
        if settings["mode"] == mode and (mode != "selective" or option == "op"):
            return mode_found
    raise InputError(
        f"activation_checkpoint: mode {mode}, option {option}: expected mode none, full, or selective with "
        'selective_ac_option = "op".'
    )
