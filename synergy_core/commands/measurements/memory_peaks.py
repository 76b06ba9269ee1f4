"""Measured memory of small training runs, such as Megatron's own tests.

Columns: those of `training_times` for model and plan; `platform` for the GPU; `dist_opt` and `zero3_fsdp` for the
sharding; `untied_embed`, `fp8`, `attn_backend`; `mem_allocated_gib` (between steps) and `mem_max_gib` (the peak), both
on the last rank, which writes the log. Step times are ignored, because the runs are tests.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from synergy_core.commands.measurements._table import Table, TableRow
from synergy_core.commands.measurements.training_times import GIB, TrainingStep, TrainingTimes, step
from synergy_core.performance.catalog import gpu_sheet
from synergy_core.performance.planner.machine import with_settings

DESCRIPTION = "memory of training runs (layers, hidden, …, tp, pp, …, mem_allocated_gib, mem_max_gib)"

DEFAULT_GPUS = "8"
"""Assumed number of GPUs if n_gpus is not stated: one node."""

MIB = 2**20

_UNMODELLED_OPTION = re.compile(r"multi-latent-attention|mtp-num-layers|moe-shared-expert")


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a file with these columns has this format."""
    return "mem_max_gib" in columns or "mem_allocated_gib" in columns


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> TrainingTimes:
    """Parses the rows of `table`, all under one model name. Raises InputError as `training_times.read`."""
    table.need("layers", "hidden", "heads", "seq_len", "micro_batch", "global_batch", "tp", "pp", "mem_max_gib")
    steps = tuple(_step(row, model or "test models") for row in table.rows)
    return TrainingTimes(table.path, steps).only(None, gpu_type)


def _step(row: TableRow, model: str) -> TrainingStep:
    ffn, vocab = (re.search(r"[0-9]{4,}", row.text(name)) for name in ("ffn", "vocab"))
    has_engine = "te_" in row.text("test") or "_te" in row.text("test")
    ignored = dict.fromkeys(("dp", "grad_accum", "notes", "iter_time_s"), "")
    renamed = row.changed(
        **ignored,
        model=model,
        gpu=row.text("platform") or "h100",
        gpu_mem_gb=row.text("gpu_mem_gb") or ("80" if row.text("platform") == "a100" else ""),
        gpus_per_node=row.text("gpus_per_node") or "8",
        n_gpus=row.text("n_gpus") or DEFAULT_GPUS,
        ffn=ffn[0] if ffn else 4 * (row.whole("hidden") or 0),
        vocab=vocab[0] if vocab else "",
        zero=3 if row.flag("zero3_fsdp") else 1 if row.flag("dist_opt") else 0,
        dtype="fp8" if row.text("fp8") else row.text("dtype"),
        attn_impl=row.text("attn_backend") or ("flash" if has_engine else "unfused"),
        source="megatron-core",
        peak_mem_gib=row.text("mem_max_gib"),
        mem_kind="torch peak allocated",
    )
    found = step(renamed, untied=row.flag("untied_embed") or False)
    held_gib, sheet = row.number("mem_allocated_gib"), gpu_sheet(found.gpu_type)
    # cuBLAS's workspace takes 32 MiB since Hopper and 8 before (PyTorch); Transformer Engine's takes 64 more.
    is_hopper = sheet is not None and sheet.since_hopper
    workspace = (32 if is_hopper else 8) * MIB + (64 * MIB if has_engine else 0)
    # No column states whether the experts' matrix products are grouped in four streams, each with a workspace.
    grouped = (0.0, 4.0 * (32 if is_hopper else 4) * MIB) if row.text("n_experts") else (0.0,)
    is_whole = row.whole("etp") == 1  # Megatron splits experts like other layers by default.
    options: dict[str, Any] = {"dropout": True, "workspace_bytes": float(workspace), "whole_experts": is_whole}
    settings = tuple(
        replace(each, software=with_settings(each.software, **options, grouped_bytes=size))
        for each in found.settings
        for size in grouped
    )
    unmodelled = _UNMODELLED_OPTION.search(row.text("notes"))
    return replace(
        found,
        settings=() if unmodelled else settings,
        failure=f"{unmodelled[0]}: its sizes are not stated" if unmodelled else found.failure,
        stage="last",
        held_bytes=math.nan if held_gib is None else held_gib * GIB,
        weight=0.0,
    )
