"""Arguments of the Hugging Face Trainer: `TrainingArguments` (JSON), or LLaMA-Factory's file of them (YAML).

Names and defaults: huggingface/transformers, src/transformers/training_args.py; hiyouga/LLaMA-Factory,
src/llamafactory/hparams, which checkpoints gradients unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synergy_core.performance.planner.emitters import accelerate, deepspeed
from synergy_core.performance.planner.options import Options, Stated, content_of, file_beside
from synergy_core.performance.planner.plan import Recompute

SUMMARY = "arguments of the Hugging Face Trainer (JSON), or of LLaMA-Factory (YAML)"
SOFTWARE = accelerate.SOFTWARE
DEFAULT_MICRO_BATCH, DEFAULT_RANK, DEFAULT_TRAINABLE = 8, 8, 2
_BITS = {"load_in_4bit": 4, "load_in_8bit": 8}
_PACKED = ("packing", "neat_packing", "sample_packing")


def recognises(text: str) -> bool:
    """Whether a text has one of the arguments at its top, and nothing of Axolotl's."""
    keys = content_of(text).keys()
    named = {"per_device_train_batch_size", "num_train_epochs", "finetuning_type"} & keys
    return bool(named) and "base_model" not in keys


def read(text: str, gpus: int, folder: Path) -> Stated:
    """Reads arguments, with the DeepSpeed or FSDP file that they may name."""
    content = content_of(text)
    is_factory = bool({"finetuning_type", "cutoff_len", "template"} & content.keys())
    if is_factory and not content.get("disable_gradient_checkpointing"):
        content.setdefault("gradient_checkpointing", True)
    return stated(content, gpus, folder, "trainer")


def stated(content: Mapping[str, Any], gpus: int, folder: Path, form: str) -> Stated:
    """What arguments say. form: whose names they have."""

    def table_at(name: str) -> Mapping[str, Any]:
        """The table that an argument is or names."""
        value = content.get(name) or {}
        return value if isinstance(value, Mapping) else file_beside(folder, str(value))

    options = Options({key: value for key, value in content.items() if key != "deepspeed"}, form)
    settings = options.settings()
    method = content.get("finetuning_type", content.get("adapter", "lora" if content.get("use_peft") else None))
    if method in ("lora", "qlora"):
        flags = [bits for name, bits in _BITS.items() if options.pop(name, None)]
        default = flags[0] if flags else 4 if method == "qlora" else None
        bits = options.whole("quantization_bit") or default
        ranks = map(options.whole, ("lora_rank", "lora_r"))
        settings |= {"lora": next(filter(None, ranks), DEFAULT_RANK)} | ({"quantize": bits} if bits else {})
    if method == "freeze":
        settings["trainable_layers"] = options.whole("freeze_trainable_layers") or DEFAULT_TRAINABLE
    phrases = options.not_modelled()
    if "seq_len" in settings and not any(content.get(each) for each in _PACKED):
        phrases += ("samples shorter than seq_len (nothing packs them)",)
    assumed: dict[str, tuple[int | None, str]] = {}
    if "micro_batch" not in settings:
        (name,) = options.rules["settings"]["micro_batch"]
        assumed["micro_batch"] = (DEFAULT_MICRO_BATCH, f"{name} is missing, and its default is taken")
    if any(content.get(each) for each in _PACKED[1:]):
        assumed["mean_len"] = (None, "packed samples count as one, because the file does not say how long they are")
    if content.get("freeze_vision_tower"):
        assumed["image_tokens"] = (None, "the frozen vision tower is left out")
    precision = next((each for each in ("bf16", "fp16") if content.get(each) in (True, "auto", "full")), "")
    strategy = content.get("fsdp") or ""
    words = list(map(str, strategy)) if isinstance(strategy, list) else str(strategy).split()
    if content.get("deepspeed"):
        found = deepspeed.stated(table_at("deepspeed"), precision)
    else:
        phrases += () if precision == "bf16" else (precision or "fp32, because neither bf16 nor fp16 is set",)
        if words:
            first, *others = ("full_shard" if each == "True" else each for each in words)
            named = [each for each in others if each not in ("auto_wrap", "offload")]
            named += [first] if first.startswith("hybrid") else []
            phrases += tuple(f"fsdp: {each}" for each in named)
            found = accelerate.fsdp(table_at("fsdp_config"), first, offload="offload" in others)
        else:
            why = "neither deepspeed nor fsdp is set, and plain data parallelism is assumed"
            found = Stated({}, SOFTWARE[0], assumed={"zero": (0, why)} if gpus > 1 else {})
    is_again = content.get("gradient_checkpointing") or "recompute" in found.settings
    settings["recompute"] = (Recompute.FULL if is_again else Recompute.NONE).value
    return Stated(settings, assumed=assumed, not_modelled=phrases).joined(found)
