"""Measured memory of small training runs: Megatron's own tests, or any file with the same columns.

Columns: those of `training_times` for model and plan, with `platform` for the GPU, `dist_opt`, `zero3_fsdp` for the
sharding, `untied_embed`, `fp8`, `attn_backend`; `mem_allocated_gib` (between steps), `mem_max_gib` (the peak), both
of the last rank, which writes the log. Times in such files are those of tests, and are not read.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from synergy_core.catalog.sheets import gpu_sheet
from synergy_core.measurements import training_times
from synergy_core.measurements._cells import TableRow, rows_of
from synergy_core.measurements._table import Table
from synergy_core.measurements.training_times import GIB, TrainingStep, TrainingTimes

DESCRIPTION = "memory of training runs (layers, hidden, …, tp, pp, …, mem_allocated_gib, mem_max_gib)"

NEEDED = ("layers", "hidden", "heads", "seq_len", "micro_batch", "global_batch", "tp", "pp", "mem_max_gib")
USUAL_GPUS = "8"
"""GPUs where n_gpus is not stated: one node."""

MIB = 2**20
"""cuBLAS holds 32 MiB of the allocator's memory from Hopper on, 8 before (PyTorch); Transformer Engine 64 more."""

_UNMODELLED = re.compile(r"multi-latent-attention|mtp-num-layers|moe-shared-expert")


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a header looks like this format."""
    return "mem_max_gib" in columns or "mem_allocated_gib" in columns


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> TrainingTimes:
    """The rows of `table`, all under one model's name. Raises InputError as `training_times.read`."""
    rows = []
    for row in rows_of(table, *NEEDED):
        step = _step(row, model or "test models")
        if gpu_type is None or step.gpu_type == gpu_type:
            rows.append(step)
    return TrainingTimes(table.path, tuple(rows), {})


def _step(row: TableRow, model: str) -> TrainingStep:
    cells, hidden = row.cells, row.whole("hidden") or 0
    ffn, vocab = (re.search(r"[0-9]{4,}", row.text(name)) for name in ("ffn", "vocab"))
    zero = "3" if row.flag("zero3_fsdp") else "1" if row.flag("dist_opt") else "0"
    has_engine = "te_" in row.text("test") or "_te" in row.text("test")
    alike = TableRow(
        row.table,
        row.line,
        {
            **cells,
            "model": model,
            "gpu": cells.get("platform") or "h100",
            "gpu_mem_gb": cells.get("gpu_mem_gb", "") or ("80" if cells.get("platform") == "a100" else ""),
            "gpus_per_node": cells.get("gpus_per_node", "") or "8",
            "n_gpus": cells.get("n_gpus", "") or USUAL_GPUS,
            "ffn": ffn[0] if ffn else str(4 * hidden),
            "vocab": vocab[0] if vocab else "",
            "dp": "",
            "grad_accum": "",
            "zero": zero,
            "dtype": "fp8" if cells.get("fp8") else cells.get("dtype", ""),
            "attn_impl": cells.get("attn_backend") or ("flash" if has_engine else "unfused"),
            "source": "megatron-core",
            "notes": "",
            "iter_time_s": "",
            "peak_mem_gib": cells.get("mem_max_gib", ""),
            "mem_kind": "torch peak allocated",
        },
    )
    step = training_times.step(alike, untied=row.flag("untied_embed") or False)
    held = row.number("mem_allocated_gib")
    sheet = gpu_sheet(step.gpu_type)
    workspace = (32 if sheet is not None and sheet.since_hopper else 8) * MIB + (64 * MIB if has_engine else 0)
    settings = tuple(
        replace(each, software=replace(each.software, dropout=True, workspace_bytes=float(workspace)))
        for each in step.settings
    )
    told = replace(
        step, settings=settings, stage="last", held_bytes=math.nan if held is None else held * GIB, weight=0.0
    )
    odd = _UNMODELLED.search(row.text("notes"))
    return replace(told, settings=(), failure=f"{odd[0]}: its sizes are not stated") if odd else told
