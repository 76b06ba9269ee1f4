"""An Axolotl configuration (YAML), whose options are those of the Hugging Face Trainer, some under names of its own.

Names: axolotl-ai-cloud/axolotl, src/axolotl/utils/schemas.
"""

from __future__ import annotations

from pathlib import Path

from synergy_core.performance.planner.emitters import trainer
from synergy_core.performance.planner.options import Stated, content_of

SUMMARY = "an Axolotl configuration (YAML)"
SOFTWARE = trainer.SOFTWARE


def recognises(text: str) -> bool:
    """Whether a text has one of Axolotl's names at its top."""
    keys = content_of(text).keys()
    return bool({"base_model", "sequence_len"} & keys) and "distributed_type" not in keys


def read(text: str, gpus: int, folder: Path) -> Stated:
    """Reads a configuration, with the DeepSpeed file that it may name."""
    content = content_of(text)
    if content.get("fsdp_config") and not content.get("fsdp"):
        content["fsdp"] = "full_shard"
    return trainer.stated(content, gpus, folder, "axolotl")
