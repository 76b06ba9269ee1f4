"""Arguments of the Hugging Face Trainer: `TrainingArguments` (JSON), or LLaMA-Factory's file of them (YAML).

Names and defaults: huggingface/transformers, src/transformers/training_args.py; hiyouga/LLaMA-Factory,
src/llamafactory/hparams, which checkpoints gradients unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synergy_core.planner.emitters import (
    Stated,
    accelerate,
    content_of,
    deepspeed,
    file_beside,
    not_modelled,
    optimizer_in,
    table_in,
    whole_in,
)
from synergy_core.planner.plan import Recompute

SUMMARY = "arguments of the Hugging Face Trainer (JSON), or of LLaMA-Factory (YAML)"
SOFTWARE = accelerate.SOFTWARE
MICRO_BATCH, STEPS, TOKENS = "per_device_train_batch_size", "gradient_accumulation_steps", "cutoff_len"
DEFAULT_MICRO_BATCH, DEFAULT_RANK, DEFAULT_TRAINABLE = 8, 8, 2
_BITS = {"load_in_4bit": 4, "load_in_8bit": 8, "quantization_bit": 0}
_PACKED = ("packing", "neat_packing", "sample_packing")


def recognises(text: str) -> bool:
    """Whether a text has one of the arguments at its top, and nothing of Axolotl's."""
    keys = content_of(text).keys()
    return bool({MICRO_BATCH, "num_train_epochs", "finetuning_type"} & keys) and "base_model" not in keys


def read(text: str, gpus: int, folder: Path) -> Stated:
    """Reads arguments, with the DeepSpeed or FSDP file that they may name."""
    content = content_of(text)
    is_factory = bool({"finetuning_type", TOKENS, "template"} & content.keys())
    if is_factory and not content.get("disable_gradient_checkpointing"):
        content.setdefault("gradient_checkpointing", True)
    return stated(content, gpus, folder, "trainer")


def stated(content: Mapping[str, Any], gpus: int, folder: Path, *lists: str) -> Stated:
    """What arguments say. lists: of `not_modelled`."""
    kind = content.get("finetuning_type", content.get("adapter", "lora" if content.get("use_peft") else None))
    words = content.get("fsdp") or ""
    words = " ".join(map(str, words)) if isinstance(words, list) else str(words)
    options = (words and content.get("fsdp_config")) or {}
    table = options if isinstance(options, Mapping) else file_beside(folder, str(options))
    read = ("deepspeed", *(_BITS if kind in ("lora", "qlora") else ()))
    phrases = not_modelled({key: value for key, value in content.items() if key not in read}, *lists)
    settings: dict[str, Any] = {}
    assumed: dict[str, tuple[int | None, str]] = {}
    for key, names in {
        "micro_batch": (MICRO_BATCH,),
        "accumulation": (STEPS,),
        "seq_len": (TOKENS, "max_seq_length", "max_length"),
    }.items():
        values = [value for name in names if (value := whole_in(content, name))]
        settings |= {key: values[0]} if values else {}
    if "micro_batch" not in settings:
        assumed["micro_batch"] = (DEFAULT_MICRO_BATCH, f"{MICRO_BATCH} is missing, and its default is taken")
    is_again = content.get("gradient_checkpointing") or any(table.get(name) for name in accelerate.AGAIN)
    settings["recompute"] = (Recompute.FULL if is_again else Recompute.NONE).value
    settings |= optimizer_in(content, "optim")
    if kind in ("lora", "qlora"):
        stated_bits = (bits for key, bits in _BITS.items() if content.get(key))
        bits = whole_in(content, "quantization_bit") or next(stated_bits, 4 if kind == "qlora" else None)
        settings["lora"] = whole_in(content, "lora_rank") or whole_in(content, "lora_r") or DEFAULT_RANK
        settings |= {"quantize": bits} if bits else {}
    if kind == "freeze":
        settings["trainable_layers"] = whole_in(content, "freeze_trainable_layers") or DEFAULT_TRAINABLE
    if any(content.get(each) for each in _PACKED[1:]):
        assumed["mean_len"] = (None, "packed samples count as one, because the file does not say how long they are")
    if content.get("freeze_vision_tower"):
        assumed["image_tokens"] = (None, "the frozen vision tower is left out")
    if "seq_len" in settings and not any(content.get(each) for each in _PACKED):
        phrases += ("samples shorter than seq_len (nothing packs them)",)
    precision = next((each for each in ("bf16", "fp16") if content.get(each) in (True, "auto", "full")), "")
    own = Stated(settings, "", {}, assumed, phrases)
    if configuration := content.get("deepspeed"):
        table = configuration if isinstance(configuration, Mapping) else file_beside(folder, str(configuration))
        filled = {key: value for key, value in table.items() if key not in ("bf16", "fp16", "bfloat16")}
        for name in ("bf16", "fp16"):
            is_on = table_in(table, name).get("enabled", False)
            filled[name] = {"enabled": precision == name if is_on == "auto" else is_on}
        return own.joined(deepspeed.stated(filled))
    if precision != "bf16":
        own = own.joined(Stated({}, not_modelled=(precision or "fp32, because neither bf16 nor fp16 is set",)))
    if not words:
        why = "neither deepspeed nor fsdp is set, and plain data parallelism is assumed"
        return own.joined(Stated({}, accelerate.SOFTWARE[0], {}, {"zero": (0, why)} if gpus > 1 else {}))
    strategy, *others = words.split()
    strategy = "full_shard" if strategy == "True" else strategy
    named = tuple(f"fsdp: {each}" for each in others if each not in ("auto_wrap", "offload"))
    named += (f"fsdp: {strategy}",) if strategy.startswith("hybrid") else ()
    return own.joined(Stated({}, not_modelled=named)).joined(
        accelerate.fsdp(table, strategy, offload="offload" in others)
    )
