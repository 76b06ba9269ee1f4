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
from synergy_core.planner.emitters import (
    PlannedLaunch,
    Stated,
    content_of,
    not_modelled,
    optimizer_in,
    table_in,
    whole_in,
)

SUMMARY = "a DeepSpeed configuration (JSON)"
SOFTWARE = ("deepspeed", "deepspeed-fp16")
RECOMPUTE = "the training script sets gradient checkpointing, so the search chooses it"
MICRO_BATCH, STEPS, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
_LIMITS = {
    "reduce_bucket_size": "bucket_elements",
    "stage3_max_live_parameters": "live_elements",
    "sub_group_size": "update_elements",
}
"""Fields of the software by the option of zero_optimization that sets them."""


def emit(launch: PlannedLaunch) -> str:
    """Writes the configuration."""
    plan, software = launch.plan, launch.software
    zero: dict[str, Any] = {"stage": plan.zero, "overlap_comm": True, "contiguous_gradients": True}
    zero |= {option: int(getattr(software, name)) for option, name in _LIMITS.items()}
    if software.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    content = {
        BATCH: plan.global_batch,
        MICRO_BATCH: plan.micro_batch,
        STEPS: plan.accumulation,
        "fp16" if software.precision == "fp16" else "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
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


def stated(content: Mapping[str, Any]) -> Stated:
    """What a parsed configuration says. Raises InputError for a value that is neither a number nor `auto`."""
    zero = table_in(content, "zero_optimization")
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise InputError(f"zero_optimization.stage: {zero['stage']}; expected a number from 0 to 3.")
    micro_batch, steps, batch = (whole_in(content, key) for key in (MICRO_BATCH, STEPS, BATCH))
    if batch and MICRO_BATCH not in content and STEPS not in content:
        steps = 1
    settings: dict[str, Any] = {
        "zero": int(zero.get("stage", 0)),
        "micro_batch": micro_batch,
        "accumulation": steps,
        "batch": batch,
    }
    assumed: dict[str, tuple[int | None, str]] = {"recompute": (None, RECOMPUTE)}
    if micro_batch is None:
        assumed["micro_batch"] = (None, f"{MICRO_BATCH} is {content.get(MICRO_BATCH, 'missing')}")
    settings |= optimizer_in(table_in(content, "optimizer"), "type")
    if not steps and not batch:
        assumed["batch"] = (None, f"{STEPS} is not set, and 1 is assumed")
    changed: dict[str, Any] = {}
    for option, name in _LIMITS.items():
        value = zero.get(option, zero.get(option.removeprefix("stage3_")))
        if isinstance(value, int | float):
            changed[name] = float(value or name == "update_elements")  # 0: parameters are updated one by one
        elif value == "auto" and name == "bucket_elements":
            changed[name] = _square_of_hidden
    if table_in(zero, "offload_optimizer").get("device") == "cpu" or zero.get("cpu_offload") is True:
        settings["offload"] = "optimizer"
    phrases = not_modelled(content, "deepspeed")
    if zero.get("overlap_comm") is False:
        phrases += ("zero_optimization.overlap_comm: false",)
    enabled = {name: table_in(content, name).get("enabled", False) for name in ("bf16", "bfloat16", "fp16")}
    if not any(enabled.values()):
        phrases += ("fp32, because neither bf16 nor fp16 is enabled",)
    is_fp16 = enabled["fp16"] is True or (enabled["fp16"] == "auto" and not (enabled["bf16"] or enabled["bfloat16"]))
    given = {key: value for key, value in settings.items() if value is not None}
    return Stated(given, "deepspeed-fp16" if is_fp16 else "deepspeed", changed, assumed, phrases)
