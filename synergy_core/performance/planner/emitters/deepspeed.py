"""A DeepSpeed configuration (JSON), alone or under the Hugging Face Trainer, which fills in values that are `auto`.

Names and rules: deepspeedai/DeepSpeed, docs/_pages/config-json.md, and runtime/config.py: of a step's batch, the
micro-batch and the accumulated micro-batches, any two give the third.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_core.performance.planner.emitters import PlannedLaunch
from synergy_core.performance.planner.machine import GRADIENT_BYTES
from synergy_core.performance.planner.options import Options, Stated, content_of, rules

SUMMARY = "a DeepSpeed configuration (JSON)"
SOFTWARE = ("deepspeed", "deepspeed-fp16")
RECOMPUTE = "the training script sets gradient checkpointing, so the search chooses it"
MICRO_BATCH, STEPS, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
OFFLOADS = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
"""The option of zero_optimization by the word of `offload=`."""


def emit(launch: PlannedLaunch) -> str:
    """Writes the configuration."""
    plan, software = launch.plan, launch.software
    zero: dict[str, Any] = {"stage": plan.zero, "overlap_comm": True, "contiguous_gradients": True}
    for name, (option, *_) in rules("deepspeed")["limits"].items():
        zero[option.removeprefix("zero_optimization.")] = int(getattr(software.memory, name))
    for what, option in OFFLOADS.items():
        if what in software.run.offload:
            zero[option] = {"device": "nvme" if "nvme" in software.run.offload else "cpu", "pin_memory": True}
    content: dict[str, Any] = {
        BATCH: plan.global_batch,
        MICRO_BATCH: plan.micro_batch,
        STEPS: plan.accumulation,
        "fp16" if software.precision == "fp16" else "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    if software.gradient_bytes == GRADIENT_BYTES["fp32"]:
        content["data_types"] = {"grad_accum_dtype": "fp32"}
    return json.dumps(content, indent=2) + "\n"


def beside(launch: PlannedLaunch) -> str:
    """Says what the user has to add to the configuration."""
    checkpoints = "with" if launch.plan.recompute else "without"
    return f"the training script runs {checkpoints} gradient checkpointing; optimizer and scheduler are yours to add"


def _square_of_hidden(architecture: Any) -> float:
    """What the Trainer fills in for reduce_bucket_size (huggingface/transformers, integrations/deepspeed.py)."""
    return float(getattr(architecture, "hidden", 0)) ** 2


def recognises(text: str) -> bool:
    """Whether a text has one of the configuration's keys at its top."""
    return bool({"zero_optimization", MICRO_BATCH} & content_of(text).keys())


def read(text: str, gpus: int, folder: Path) -> Stated:
    """Reads a configuration."""
    return stated(content_of(text))


def stated(content: Mapping[str, Any], precision: str | None = None) -> Stated:
    """What a parsed configuration says. precision: what the Trainer puts in the place of `auto`; None: unknown.

    Raises InputError for a value that is neither a number nor `auto`."""
    options = Options(content, "deepspeed")
    stage = options.pop("zero_optimization.stage", 0)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"zero_optimization.stage: {stage}; expected a number from 0 to 3.")
    settings = {"zero": int(stage), **options.settings()}
    assumed: dict[str, tuple[int | None, str]] = {"recompute": (None, RECOMPUTE)}
    if "micro_batch" not in settings:
        assumed["micro_batch"] = (None, f"{MICRO_BATCH} is {content.get(MICRO_BATCH, 'missing')}")
    if "batch" in settings and not {MICRO_BATCH, STEPS} & content.keys():
        settings["accumulation"] = 1
    if not {"accumulation", "batch"} & settings.keys():
        assumed["batch"] = (None, f"{STEPS} is not set, and 1 is assumed")
    changed: dict[str, Any] = {}
    for name, limits in options.rules["limits"].items():
        value = next((options[each] for each in limits if each in options), None)
        if isinstance(value, int | float):
            changed[name] = float(value or name == "update_elements")  # 0: parameters are updated one by one
        elif value == "auto" and name == "bucket_elements":
            changed[name] = _square_of_hidden
    # Stage 0 offloads nothing, and below stage 3 weights stay.
    known = {0: (), 3: ("optimizer", "parameters")}.get(settings["zero"], ("optimizer",))
    devices = {what: options.get(f"zero_optimization.{OFFLOADS[what]}.device") for what in known}
    devices |= {"optimizer": "cpu"} if options.get("zero_optimization.cpu_offload") is True else {}
    words = [what for what, device in devices.items() if device in ("cpu", "nvme")]
    is_on_drives = "nvme" in devices.values()
    if words:
        settings["offload"] = ",".join(["nvme"] * is_on_drives + words)
    phrases = options.not_modelled()
    if is_on_drives and "cpu" in devices.values():
        phrases += ("devices of offload_optimizer and offload_param that differ (both are taken to be nvme)",)
    if options.get("zero_optimization.overlap_comm") is False:
        phrases += ("zero_optimization.overlap_comm: false",)
    enabled = {name: options.get(f"{name}.enabled", False) for name in ("bf16", "bfloat16", "fp16")}
    if precision is not None:
        enabled = {name: precision == name if is_on == "auto" else is_on for name, is_on in enabled.items()}
    if not any(enabled.values()):
        phrases += ("fp32, because neither bf16 nor fp16 is enabled",)
    is_fp16 = enabled["fp16"] is True or (enabled["fp16"] == "auto" and not (enabled["bf16"] or enabled["bfloat16"]))
    if options.get("data_types.grad_accum_dtype") == "fp32" and not is_fp16:
        settings["gradients"] = "fp32"
    return Stated(settings, "deepspeed-fp16" if is_fp16 else "deepspeed", changed, assumed, phrases)
