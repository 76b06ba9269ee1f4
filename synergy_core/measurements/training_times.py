"""Measured training steps of parallel plans: one row a model, a plan, a machine, and seconds per step.

Columns, read by name in any order: model, layers, hidden, heads, kv_heads, ffn, gated_mlp, seq_len, vocab, params,
n_experts, topk; gpu, gpu_mem_gb, n_gpus, gpus_per_node, interconnect; global_batch, micro_batch (sequences),
grad_accum; tp, pp, vpp, dp, cp, ep, sp, zero, recompute; dtype, attn_impl; iter_time_s; peak_mem_gib, mem_kind; trust,
source, notes. An empty cell is unstated: what follows from others is derived, what does not is read as every setting it
may have been. A row that says less than a prediction needs is kept as a failure with its reason; one that contradicts
itself is refused.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from synergy_core.catalog.sheets import gpu_sheet
from synergy_core.errors import InputError
from synergy_core.measurements import _cases, _hardware, _stack
from synergy_core.measurements._architecture import ArchitectureColumns, architecture_of
from synergy_core.measurements._cases import Case, Measured, Setting
from synergy_core.measurements._cells import TableRow, rows_of
from synergy_core.measurements._table import Table
from synergy_core.planner.plan import RISING, Plan, Recompute

GIB = 2.0**30

DESCRIPTION = "training times of parallel plans (model, layers, hidden, …, gpu, n_gpus, tp, pp, dp, …, iter_time_s)"

NEEDED = ("model", "layers", "hidden", "heads", "seq_len", "gpu", "n_gpus", "global_batch", "micro_batch", "tp", "pp")
NEEDED_TOO = ("dp", "iter_time_s")
WEIGHTS = {"A": 1.0, "A-": 0.8, "B": 0.4, "C": 0.0}
"""Weight of a row in a fit, by its `trust`; a row of one's own, without a letter, counts in full.

A: a table or log with the full configuration. A-: one field documented elsewhere, or rounded. B: one or two fields
unstated or inferred. C: noisy, a field missing, or second hand.
"""

MICRO_BATCHES = (1, 2, 4)
"""What an unstated micro-batch may have been; the prediction that comes closest counts."""

_EXCLUDED = re.compile(r"task=(\w+)", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(r"\boom\b|out[ -]of[ -]memory", re.IGNORECASE)
_RECOMPUTE = (
    (Recompute.OPERATORS, re.compile(r"sel\w*[- ]op|operator")),
    (Recompute.SELECTIVE, re.compile(r"sel|core|attn")),
    (Recompute.FULL, re.compile(r"full|uniform|block|^(y|yes|1|true)$")),
    (Recompute.NONE, re.compile(r"^(no|none|n|0|false|off)$")),
)
_ZERO = re.compile(r"(?:zero-?)?([0-3])(?:\.0)?(\?)?")


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One row. gpu_type: the catalog's name.

    settings: every way it may have run, the most usual first; none where failure says why it cannot be predicted.
    unstated: columns that made it several. memory_kind: which counter told peak_mem_bytes. held_bytes: of the
    allocator between steps. stage: the pipeline stage whose memory it is, `first`, `last` or `worst`. Memory and
    times that were not measured are NaN.
    """

    line: int
    model: str
    gpu_type: str
    gpus: int
    tensor: int
    pipeline: int
    global_batch: int
    iter_time_s: float
    peak_mem_bytes: float
    memory_kind: str
    weight: float
    out_of_memory: bool
    settings: tuple[Setting, ...]
    unstated: tuple[str, ...] = ()
    failure: str = ""
    held_bytes: float = math.nan
    stage: str = "worst"


@dataclass(frozen=True, slots=True)
class TrainingTimes:
    """A file's rows. excluded: how many were left out, by reason."""

    path: Path
    rows: tuple[TrainingStep, ...]
    excluded: dict[str, int]

    def __len__(self) -> int:
        return len(self.rows)

    def cases(self, *, every_setting: bool = False) -> list[Case]:
        """Rows that can be predicted, in groups; each row once, or in every setting that it may have had."""
        return _cases.cases(
            [Measured(row.settings, row.iter_time_s, row.peak_mem_bytes, row.weight) for row in self.rows],
            every_setting=every_setting,
        )


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a header looks like this format: most of what only a plan and its time have."""
    mine = {"model", "hidden", "gpu", "tp", "pp", "dp", "micro_batch", "iter_time_s", "grad_accum", "interconnect"}
    return len(mine & set(columns)) >= 6 and "mem_allocated_gib" not in columns and "fwd_ms" not in columns


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> TrainingTimes:
    """The rows of `table`. model, gpu_type: read only rows of that name.

    Raises InputError for a missing column, a cell that is no number, or a row that contradicts itself.
    """
    excluded: Counter[str] = Counter()
    rows = []
    for row in rows_of(table, *NEEDED, *NEEDED_TOO):
        task = _EXCLUDED.search(row.text("notes"))
        if task and not task[1].lower().startswith("pre"):
            excluded[f"task {task[1]}, not pre-training"] += 1
            continue
        found = step(row)
        if (model and found.model != model) or (gpu_type and found.gpu_type != gpu_type):
            excluded["of another model or GPU type than asked for"] += 1
        elif math.isnan(found.iter_time_s) and math.isnan(found.peak_mem_bytes) and not found.out_of_memory:
            excluded["nothing measured"] += 1
        else:
            rows.append(found)
    return TrainingTimes(table.path, tuple(rows), dict(excluded))


def step(row: TableRow, *, untied: bool | None = None) -> TrainingStep:
    """A row; what it lacks for a prediction becomes its failure. untied: whether logits have their own table."""
    time_text = row.text("iter_time_s")
    out = _OUT_OF_MEMORY.search(f"{time_text} {row.text('notes')} {row.text('mem_kind')}") is not None
    told = bool(time_text) and not _OUT_OF_MEMORY.search(time_text)
    seconds = row.number("iter_time_s") if told else None
    memory = row.number("peak_mem_gib") if not _OUT_OF_MEMORY.search(row.text("peak_mem_gib")) else None
    degrees = _degrees(row)
    failure = ""
    unstated: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    try:
        settings, unstated = _settings(row, degrees, untied)
    except _UnpredictableError as error:
        failure = str(error)
    stated = _hardware.gpu_type(row.text("gpu"))
    return TrainingStep(
        line=row.line,
        model=row.text("model"),
        gpu_type=settings[0].gpus.name if settings else stated,
        gpus=degrees.gpus,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        global_batch=settings[0].plan.global_batch if settings else row.whole("global_batch") or 0,
        iter_time_s=math.nan if seconds is None else seconds,
        peak_mem_bytes=math.nan if memory is None else memory * GIB,
        stage="first" if re.search(r"rank ?0", row.text("mem_kind")) else "worst",
        memory_kind=memory_kind(row.text("mem_kind")) if memory is not None else "",
        weight=WEIGHTS.get(row.text("trust").replace("−", "-") or "A", WEIGHTS["B"]),
        out_of_memory=out and seconds is None,
        settings=settings,
        unstated=unstated,
        failure=failure,
    )


def memory_kind(text: str) -> str:
    """The counter that the text names: `nvidia-smi`, `torch peak reserved`, else `torch peak allocated`."""
    plain = text.lower()
    if "smi" in plain:
        return "nvidia-smi"
    return "torch peak reserved" if "reserved" in plain else "torch peak allocated"


class _UnpredictableError(Exception):
    """A row cannot be predicted; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class _Degrees:
    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    interleave: int
    gpus: int
    zero: tuple[int, ...]


def _degrees(row: TableRow) -> _Degrees:
    """The row's degrees of parallelism; they must multiply to the GPUs."""
    tensor, pipeline, context = (row.whole(name) or 1 for name in ("tp", "pp", "cp"))
    data, gpus, zero = row.whole("dp"), row.whole("n_gpus"), _zero(row)
    model_ranks = tensor * pipeline * context
    named = f"tp {tensor} · pp {pipeline} · cp {context}"
    if gpus is None:
        gpus = model_ranks * (data or 1)
    if data is None:
        if gpus % model_ranks:
            row.contradicts(f"got n_gpus {gpus}, expected a multiple of {named} = {model_ranks}. Fix one, or give dp.")
        data = gpus // model_ranks
    elif zero == (3,) and gpus % (model_ranks * data) == 0:
        data = gpus // model_ranks  # the degree stated is that of a shard group
    if model_ranks * data != gpus:
        row.contradicts(
            f"got n_gpus {gpus}, expected {named} · dp {data} = {model_ranks * data}. "
            f"Fix n_gpus or a degree{f'; dp {gpus // model_ranks} would fit' if gpus % model_ranks == 0 else ''}."
        )
    heads, layers, expert = row.whole("heads"), row.whole("layers"), row.whole("ep") or 1
    if heads and heads % tensor:
        row.contradicts(f"got tp {tensor}, expected a divisor of heads {heads}. Fix tp or heads.")
    groups, experts, chosen = row.whole("kv_heads"), row.whole("n_experts"), row.whole("topk")
    if heads and groups and heads % groups:
        row.contradicts(f"got kv_heads {groups}, expected a divisor of heads {heads}. Fix kv_heads or heads.")
    if experts and experts % expert:
        row.contradicts(f"got ep {expert}, expected a divisor of n_experts {experts}. Fix ep or n_experts.")
    if experts and chosen and chosen > experts:
        row.contradicts(f"got topk {chosen}, expected at most n_experts {experts}. Fix topk or n_experts.")
    interleave = row.whole("vpp") or 1
    if layers and pipeline * interleave > layers + 2:  # embedding and logits may count as layers
        row.contradicts(
            f"got pp {pipeline} · vpp {interleave} = {pipeline * interleave} stages, "
            f"expected at most one per layer, {layers}. Fix pp, vpp or layers."
        )
    if (gpus // pipeline) % expert:
        row.contradicts(
            f"got ep {expert}, expected a divisor of tp · cp · dp = {gpus // pipeline}. Fix ep or a degree."
        )
    return _Degrees(tensor, pipeline, context, data, expert, interleave, gpus, zero)


def _zero(row: TableRow) -> tuple[int, ...]:
    """The ZeRO stages that the row may have run under: several where it does not state one."""
    cell = row.text("zero").lower()
    if not cell:
        return (0, 1)
    if "fsdp" in cell or "hsdp" in cell:
        return (3,)
    found = _ZERO.fullmatch(cell)
    if not found:
        row.refuse("zero", "0, 1, 2, 3 or fsdp; 0? where the stage is not stated")
    stage = int(found[1])
    return tuple(sorted({stage, 0, 1})) if found[2] else (stage,)


def _recompute(row: TableRow) -> tuple[Recompute, ...]:
    cell = row.text("recompute").lower()
    if not cell or cell.endswith("?"):
        return RISING
    for kind, pattern in _RECOMPUTE:
        if pattern.search(cell):
            return (kind,)
    row.refuse("recompute", "none, selective, full or selective-op")


def _batches(row: TableRow, data: int) -> tuple[tuple[int, int], ...]:
    """(micro-batch, accumulation) that the row may have run with: several where it states neither."""
    whole, micro, accumulation = (row.whole(name) for name in ("global_batch", "micro_batch", "grad_accum"))
    if whole is None:
        if micro is None or accumulation is None:
            raise _UnpredictableError("global_batch not stated, nor both micro_batch and grad_accum")
        return ((micro, accumulation),)
    if micro is not None and accumulation is not None:
        if micro * accumulation * data != whole:
            row.contradicts(
                f"got global_batch {whole}, expected micro_batch {micro} · grad_accum {accumulation} · dp {data} = "
                f"{micro * accumulation * data}. Fix one of them, or leave grad_accum empty."
            )
        return ((micro, accumulation),)
    if micro is None and accumulation is None:
        found = tuple((each, whole // (each * data)) for each in MICRO_BATCHES if whole % (each * data) == 0)
    else:
        divisor = (micro or accumulation or 1) * data
        other = whole // divisor
        found = ((micro or other, accumulation or other),) if whole % divisor == 0 else ()
    if not found:
        raise _UnpredictableError(
            f"global_batch {whole} is not a multiple of {f'micro_batch {micro} · ' if micro else ''}dp {data}"
        )
    return found


def _gated(row: TableRow) -> bool:
    return row.flag("gated_mlp") or False


def _stated(row: TableRow, untied: bool | None) -> ArchitectureColumns:
    """What the row says of the model."""
    return ArchitectureColumns(
        model=row.text("model"),
        layers=row.whole("layers"),
        hidden=row.whole("hidden"),
        heads=row.whole("heads"),
        kv_heads=row.whole("kv_heads"),
        ffn=row.whole("ffn"),
        gated=_gated(row),
        seq_len=row.whole("seq_len"),
        vocab=row.whole("vocab"),
        params=row.number("params"),
        experts=row.whole("n_experts"),
        top_k=row.whole("topk"),
        untied=untied,
    )


def _settings(row: TableRow, degrees: _Degrees, untied: bool | None) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    """Every way the row may have run, and the columns that leave a choice."""
    if not row.text("tp") and not row.text("pp") and degrees.gpus > 1 and degrees.zero != (3,):
        raise _UnpredictableError("tp and pp not stated")
    stated = _stated(row, untied)
    try:
        architecture = architecture_of(stated)
    except InputError as error:
        raise _UnpredictableError(str(error)) from None
    per_node = row.whole("gpus_per_node") or 8
    gpus = _hardware.choices(row.text("gpu"), row.number("gpu_mem_gb"), per_node, row.text("interconnect"))
    if gpu_sheet(gpus[0].name) is None:
        raise _UnpredictableError(f"no data sheet of GPU '{row.text('gpu')}' in the catalog")
    name = _stack.software_name(
        source=row.text("source"),
        notes=row.text("notes"),
        model=row.text("model"),
        gpu=_hardware.gpu_type(row.text("gpu")),
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        zero=degrees.zero[0],
    )
    software = _stack.software(
        name,
        dtype=row.text("dtype"),
        attention=row.text("attn_impl"),
        gated=_gated(row),
        gpu=_hardware.gpu_type(row.text("gpu")),
        notes=row.text("notes"),
    )
    if software is None:
        raise _UnpredictableError(f"precision '{row.text('dtype')}' is not modelled")
    sequence = row.flag("sp")
    sequences = (sequence,) if sequence is not None else (True, False) if degrees.tensor > 1 else (False,)
    zeros = degrees.zero if degrees.data > 1 else degrees.zero[:1]
    recomputes, batches = _recompute(row), _batches(row, degrees.data)
    settings = tuple(
        Setting(
            architecture,
            Plan(
                tensor=degrees.tensor,
                pipeline=degrees.pipeline,
                context=degrees.context,
                data=degrees.data,
                expert=degrees.expert,
                interleave=degrees.interleave,
                micro_batch=micro,
                accumulation=accumulation,
                zero=zero,
                recompute=recompute,
                sequence=split,
            ),
            each,
            software,
        )
        for each, zero, recompute, (micro, accumulation), split in itertools.product(
            gpus, zeros, recomputes, batches, sequences
        )
    )
    counts = {
        "gpu_mem_gb": len(gpus),
        "zero": len(zeros),
        "recompute": len(recomputes),
        "micro_batch": len(batches),
        "sp": len(sequences),
    }
    return settings, tuple(name for name, count in counts.items() if count > 1)
