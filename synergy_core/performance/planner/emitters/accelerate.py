"""A configuration of `accelerate launch` (YAML), for FSDP, DeepSpeed or plain data parallelism.

Names: huggingface/accelerate, src/accelerate/commands/config/config_args.py and docs/source/usage_guides/fsdp.md, which
has the old and the new names of FSDP's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_core.performance.planner.emitters import PlannedLaunch, deepspeed
from synergy_core.performance.planner.options import Options, Stated, content_of, file_beside
from synergy_core.performance.planner.plan import Recompute

SUMMARY = "a configuration of accelerate launch (YAML)"
SOFTWARE = ("accelerate-fsdp", *deepspeed.SOFTWARE, "fsdp-bf16", "fsdp")


def emit(launch: PlannedLaunch) -> str:
    """Writes the configuration."""
    import yaml  # type: ignore[import-untyped]

    plan, software = launch.plan, launch.software
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if plan.gpus > 1 else "NO",
        "mixed_precision": "fp16" if software.precision == "fp16" else "bf16",
        "num_machines": -(-plan.gpus // launch.gpus_per_node),
        "num_processes": plan.gpus,
        "machine_rank": 0,
    }
    if software.name in deepspeed.SOFTWARE:
        content["distributed_type"], device = "DEEPSPEED", "nvme" if "nvme" in software.run.offload else "cpu"
        content["deepspeed_config"] = {
            "zero_stage": plan.zero,
            "gradient_accumulation_steps": plan.accumulation,
            "offload_optimizer_device": device if "optimizer" in software.run.offload else "none",
            "offload_param_device": device if "parameters" in software.run.offload else "none",
        }
    elif plan.zero:
        content["distributed_type"] = "FSDP"
        content["fsdp_config"] = {
            "fsdp_sharding_strategy": "FULL_SHARD" if plan.zero == 3 else "SHARD_GRAD_OP",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_offload_params": "parameters" in software.run.offload,
            "fsdp_activation_checkpointing": plan.recompute == Recompute.FULL,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    result: str = yaml.safe_dump(content, sort_keys=False)
    return result


def beside(launch: PlannedLaunch) -> str:
    """Says what the training script has to set."""
    plan = launch.plan
    return (
        f"the training script sets micro-batches of {plan.micro_batch}, {plan.accumulation} accumulated, and "
        f"{'' if plan.recompute else 'no '}gradient checkpointing"
    )


def recognises(text: str) -> bool:
    """Whether a text has `distributed_type` at its top."""
    return "distributed_type" in content_of(text)


def read(text: str, gpus: int, folder: Path) -> Stated:
    """Reads a configuration, with the DeepSpeed file that it may name."""
    content = content_of(text)
    options = Options(content, "accelerate")
    distributed, processes = str(content["distributed_type"]).upper(), options.whole("num_processes")
    if processes not in (None, gpus):
        raise InputError(f"num_processes: {processes} is not gpus={gpus}; type gpus={processes}, or change one.")
    precision = str(content.get("mixed_precision") or "no").lower()
    settings = options.settings()
    phrases = options.not_modelled()
    script: dict[str, tuple[int | None, str]] = {"micro_batch": (None, "the training script sets the micro-batch")}
    if distributed == "DEEPSPEED":
        if path := options.get("deepspeed_config.deepspeed_config_file"):
            return Stated({}, not_modelled=phrases).joined(deepspeed.stated(file_beside(folder, path)))
        zero: dict[str, Any] = {"stage": options.get("deepspeed_config.zero_stage", 2)}
        for option in deepspeed.OFFLOADS.values():
            zero[option] = {"device": options.get(f"deepspeed_config.{option}_device")}
        enabled = {name: {"enabled": precision == name} for name in ("bf16", "fp16")}
        steps = {deepspeed.STEPS: settings.get("accumulation")}
        found = deepspeed.stated({"zero_optimization": zero, **steps, **enabled})
        return Stated({}, assumed=script, not_modelled=phrases).joined(found)
    if distributed not in ("FSDP", "MULTI_GPU", "NO", "FALSE"):
        raise InputError(f"distributed_type: {distributed}; expected FSDP, DEEPSPEED, MULTI_GPU or NO.")
    if precision != "bf16":
        phrases += (f"mixed_precision: {precision}",)
    machines = options.whole("num_machines")
    found = (
        fsdp(content.get("fsdp_config") or {}, on_node=gpus // machines if machines else 0)
        if distributed == "FSDP"
        else Stated({"zero": 0}, SOFTWARE[0])
    )
    assumed = script | {"recompute": (None, deepspeed.RECOMPUTE)}
    if not settings:
        assumed["batch"] = (None, "the training script accumulates micro-batches, and 1 is assumed")
    return Stated(settings, assumed=assumed, not_modelled=phrases).joined(found)


def fsdp(table: Mapping[str, Any], strategy: str = "full_shard", *, offload: bool = False, on_node: int = 0) -> Stated:
    """What FSDP's options say, under their names with or without `fsdp_`. strategy, offload: unless the options do.

    on_node: processes on each machine, which share states out under HYBRID_SHARD; 0: unknown."""
    options = Options({key.removeprefix("fsdp_"): value for key, value in table.items()}, "fsdp")
    chosen = options.get("sharding_strategy", options.get("reshard_after_forward", strategy))
    word, stages = str(chosen).lower(), options.rules["stages"]
    if word not in stages:
        known = "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD"
        raise InputError(f"fsdp_sharding_strategy: {chosen}; expected {known}, or true or false of version 2.")
    settings: dict[str, Any] = {"zero": stages[word]}
    phrases: tuple[str, ...] = ()
    # Version 2 takes the words of version 1, but shards over all processes.
    if on_node and word in options.rules["in_nodes"] and str(options.get("version", 1)) == "1":
        settings["shards"] = on_node
        options.pop("sharding_strategy", None)
    if options.pop("offload_params", offload) is True:
        if settings["zero"] == 3:
            settings["offload"] = "optimizer,parameters"
        else:
            phrases = ("fsdp_offload_params: True",)  # weights that stay gathered
    if options.get("activation_checkpointing"):
        settings["recompute"] = Recompute.FULL.value
    return Stated(settings, SOFTWARE[0], not_modelled=phrases + options.not_modelled("fsdp_{}: {}"))
