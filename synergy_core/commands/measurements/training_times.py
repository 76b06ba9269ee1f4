"""Measured training steps of parallel plans. Each row states a model, a plan, a machine, and seconds per step.

Columns, read by name in any order: model, layers, hidden, heads, kv_heads, ffn, gated_mlp, seq_len, vocab, params,
n_experts, topk; gpu, gpu_mem_gb, n_gpus, gpus_per_node, interconnect; global_batch, micro_batch (sequences),
grad_accum; tp, pp, vpp, dp, cp, ep, sp, zero, recompute; dtype, attn_impl; iter_time_s; peak_mem_gib, mem_kind; trust,
source, notes. An empty cell is unstated: its value is derived from other cells if possible, otherwise every possible
value becomes a setting of the row. A row with too little data for a prediction is kept, with the reason as its failure.
A row that contradicts itself is an error.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from synergy_core.commands.measurements import _rows
from synergy_core.commands.measurements._rows import Setting, UnpredictableError
from synergy_core.commands.measurements._table import Measurements, Table, TableRow
from synergy_core.performance.catalog.columns import named_in
from synergy_core.performance.planner.machine import Constants, Machine, Software
from synergy_core.performance.planner.plan import Plan, Plans, Recompute, plans_of
from synergy_core.performance.planner.step_time import step_time
from synergy_core.performance.planner.work import Work
from synergy_core.units import Floats, Ints

GIB = 2.0**30

DESCRIPTION = "training times of parallel plans (model, layers, hidden, …, gpu, n_gpus, tp, pp, dp, …, iter_time_s)"
WEIGHTS = {"A": 1.0, "A-": 0.8, "B": 0.4, "C": 0.0}
"""Weight of a row in a fit, by its `trust`. A row without a letter, such as a user's own, has full weight.

A: a table or log with the full configuration. A-: one field documented elsewhere, or rounded. B: one or two fields
unstated or inferred. C: noisy, a field missing, or second hand.
"""
MICRO_BATCHES = (1, 2, 4)
"""Values tried for an unstated micro-batch."""

_TASK = re.compile(r"task=(\w+)", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(r"\boom\b|out[ -]of[ -]memory", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One measured training step, or one layer's passes if `TrainingTimes.of_layers`. A NaN was not measured."""

    line: int
    """Line of the row in its file."""
    model: str
    """Name of the model in the file."""
    gpu_type: str
    """The catalog's name of the GPU type."""
    gpus: int
    """Number of GPUs."""
    tensor: int
    """Tensor-parallel degree."""
    pipeline: int
    """Number of pipeline stages."""
    global_batch: int
    """Sequences (or images) per step; 0 if unknown."""
    iter_time_s: float
    """Seconds of a step."""
    weight: float
    """Weight of the row in a fit, from its trust (`WEIGHTS`)."""
    settings: tuple[Setting, ...]
    """Every possible setting, the most usual first; empty if the row cannot be predicted."""
    peak_mem_bytes: float = math.nan
    """Peak memory of a GPU."""
    memory_kind: str = ""
    """Counter that measured peak_mem_bytes: `nvidia-smi`, `torch peak allocated` or `torch peak reserved`; "" if none
    did."""
    out_of_memory: bool = False
    """Whether the run ended because memory ran out."""
    unstated: tuple[str, ...] = ()
    """Columns whose missing values give several settings."""
    failure: str = ""
    """Reason why the row cannot be predicted; "" if it can."""
    held_bytes: float = math.nan
    """Memory allocated between steps."""
    stage: str = "worst"
    """Pipeline stage whose memory was measured: `first`, `last` or `worst`."""


@dataclass(frozen=True, slots=True)
class Case:
    """Settings with the same model family, machine and software, in columns (settings,).

    rows: each setting's row in the file. iter_time_s: measured; NaN if it was not. weight: relative weight of each row
    within the case, from its trust. owner: cases with the same owner share its constants in a fit. share: weight of the
    whole case in a fit.
    """

    architecture: Any
    work: Work
    plans: Plans
    machine: Machine
    software: Software
    rows: Ints
    iter_time_s: Floats
    weight: Floats
    owner: str = ""
    share: float = 1.0

    def __len__(self) -> int:
        return len(self.rows)

    def step_s(self, constants: Constants) -> Floats:
        """Predicted step times, (settings,)."""
        return step_time(self.work, self.plans, self.machine, self.software, constants).total_s

    def residuals(self, constants: Constants) -> Floats:
        """log(predicted ÷ measured step time), (settings,)."""
        result: Floats = np.log(self.step_s(constants) / self.iter_time_s)
        return result


@dataclass(frozen=True, slots=True)
class TrainingTimes(Measurements):
    """Rows of `TrainingStep`. of_layers: whether times are for the forward and backward pass of one layer and
    micro-batch instead of a step."""

    of_layers: bool = False

    def cases(self, *, every_setting: bool = False) -> list[Case]:
        """Groups the rows that can be predicted, in order of first appearance. every_setting: include every possible
        setting of a row, not only the most usual.
        """
        groups: dict[tuple[Any, ...], list[tuple[int, TrainingStep, Setting]]] = {}
        for index, row in enumerate(self.rows):
            for setting in row.settings if every_setting else row.settings[:1]:
                key = (_rows.scalars_of(setting.architecture), setting.machine, setting.software)
                groups.setdefault(key, []).append((index, row, setting))
        result = []
        for (_, machine, software), members in groups.items():
            indices, rows, settings = zip(*members, strict=True)
            architecture = _rows.stacked([each.architecture for each in settings])
            plans = plans_of([each.plan for each in settings])
            result.append(
                Case(
                    architecture=architecture,
                    work=_rows.family_of(architecture).work(architecture, plans, software),
                    plans=plans,
                    machine=machine,
                    software=software,
                    rows=np.array(indices),
                    iter_time_s=np.array([row.iter_time_s for row in rows]),
                    weight=np.array([row.weight for row in rows]),
                )
            )
        return result


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a file with these columns has this format: it has most of the columns of a plan and its time."""
    own = {"model", "hidden", "gpu", "tp", "pp", "dp", "micro_batch", "iter_time_s", "grad_accum", "interconnect"}
    return len(own & set(columns)) >= 6 and "mem_allocated_gib" not in columns and "fwd_ms" not in columns


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> TrainingTimes:
    """Parses the rows of `table`. model, gpu_type: keep only these.

    Raises InputError for a missing column, a cell that is not a number, or a row that contradicts itself.
    """
    table.need("model", "layers", "hidden", "heads", "seq_len", "gpu", "n_gpus", "global_batch", "micro_batch")
    table.need("tp", "pp", "dp", "iter_time_s")
    excluded: Counter[str] = Counter()
    rows = []
    for row in table.rows:
        task = _TASK.search(row.text("notes"))
        if task and not task[1].lower().startswith("pre"):
            excluded[f"task {task[1]}, not pre-training"] += 1
            continue
        found = step(row)
        if (model and found.model != model) or (gpu_type and found.gpu_type != gpu_type):
            excluded["of another model or GPU type than requested"] += 1
        elif math.isnan(found.iter_time_s) and math.isnan(found.peak_mem_bytes) and not found.out_of_memory:
            excluded["nothing measured"] += 1
        else:
            rows.append(found)
    return TrainingTimes(table.path, tuple(rows), dict(excluded))


def step(row: TableRow, *, untied: bool | None = None) -> TrainingStep:
    """Parses a row. Its `failure` names missing data. untied: whether logits have their own weight matrix."""

    def measured(column: str) -> float:
        """The measured value; NaN for an empty cell or one that reports running out of memory."""
        return math.nan if _OUT_OF_MEMORY.search(row.text(column)) else row.number(column) or math.nan

    seconds, peak_bytes = measured("iter_time_s"), measured("peak_mem_gib") * GIB
    degrees, zeros = _degrees(row), _zero_stages(row)
    settings: tuple[Setting, ...] = ()
    unstated: tuple[str, ...] = ()
    failure = ""
    try:
        settings, unstated = _settings(row, degrees, zeros, untied)
    except UnpredictableError as error:
        failure = str(error)
    counter = row.text("mem_kind").lower()
    method = "nvidia-smi" if "smi" in counter else f"torch peak {'reserved' if 'reserved' in counter else 'allocated'}"
    ran_out = any(
        _OUT_OF_MEMORY.search(row.text(each)) for each in ("iter_time_s", "peak_mem_gib", "notes", "mem_kind")
    )
    return TrainingStep(
        line=row.line,
        model=row.text("model"),
        gpu_type=settings[0].machine.gpu.name if settings else _rows.gpu_type(row.text("gpu")),
        gpus=degrees.gpus,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        global_batch=settings[0].plan.global_batch if settings else row.whole("global_batch") or 0,
        iter_time_s=seconds,
        peak_mem_bytes=peak_bytes,
        memory_kind="" if math.isnan(peak_bytes) else method,
        weight=WEIGHTS.get(row.text("trust").replace("−", "-") or "A", WEIGHTS["B"]),
        out_of_memory=ran_out and math.isnan(seconds),
        settings=settings,
        unstated=unstated,
        failure=failure,
        stage="first" if re.search(r"rank ?0", row.text("mem_kind")) else "worst",
    )


def _degrees(row: TableRow) -> Plan:
    """A row's degrees of parallelism. Raises InputError if their product differs from the number of GPUs."""
    tensor, pipeline, context, expert, interleave = (row.whole(name) or 1 for name in ("tp", "pp", "cp", "ep", "vpp"))
    data, gpus = row.whole("dp"), row.whole("n_gpus")
    ranks, product = tensor * pipeline * context, f"tp {tensor} · pp {pipeline} · cp {context}"
    if gpus is None:
        gpus = ranks * (data or 1)
    if data is None:
        if gpus % ranks:
            row.fail(f"got n_gpus {gpus}, expected a multiple of {product} = {ranks}. Fix one, or give dp.")
        data = gpus // ranks
    elif _zero_stages(row) == (3,) and gpus % (ranks * data) == 0:
        data = gpus // ranks  # the file states the size of a shard group
    if ranks * data != gpus:
        row.fail(
            f"got n_gpus {gpus}, expected {product} · dp {data} = {ranks * data}. "
            f"Fix n_gpus or a degree{f'; dp {gpus // ranks} would fit' if gpus % ranks == 0 else ''}."
        )
    heads, layers, kv_heads, experts, topk = (
        row.whole(name) for name in ("heads", "layers", "kv_heads", "n_experts", "topk")
    )
    for name, divisor, multiple, total, fix in (
        ("tp", tensor, "heads", heads, "heads"),
        ("kv_heads", kv_heads, "heads", heads, "heads"),
        ("ep", expert, "n_experts", experts, "n_experts"),
        ("ep", expert, "tp · cp · dp =", gpus // pipeline, "a degree"),
    ):
        if divisor and total and total % divisor:
            row.fail(f"got {name} {divisor}, expected a divisor of {multiple} {total}. Fix {name} or {fix}.")
    if experts and topk and topk > experts:
        row.fail(f"got topk {topk}, expected at most n_experts {experts}. Fix topk or n_experts.")
    if layers and pipeline * interleave > layers + 2:  # some stacks count embedding and logits as layers
        row.fail(
            f"got pp {pipeline} · vpp {interleave} = {pipeline * interleave} stages, "
            f"expected at most one per layer, {layers}. Fix pp, vpp or layers."
        )
    return Plan(tensor=tensor, pipeline=pipeline, context=context, data=data, expert=expert, interleave=interleave)


def _zero_stages(row: TableRow) -> tuple[int, ...]:
    """The possible ZeRO stages of a row: several if the row states none, or marks its stage as a guess."""
    cell = row.text("zero").lower()
    if not cell:
        return (0, 1)
    if "fsdp" in cell or "hsdp" in cell:
        return (3,)
    found = re.fullmatch(r"(?:zero-?)?([0-3])(?:\.0)?(\?)?", cell)
    if not found:
        row.refuse("zero", "0, 1, 2, 3 or fsdp, with a question mark (0?) if the stage is a guess")
    stage = int(found[1])
    return tuple(sorted({stage, 0, 1})) if found[2] else (stage,)


def _recompute(row: TableRow, software: Software) -> tuple[Recompute, ...]:
    cell = row.text("recompute").lower()
    if not cell or cell.endswith("?"):
        return software.recompute_modes
    if name := named_in("recompute", cell):
        return (Recompute[name.upper()],)
    row.refuse("recompute", "none, selective, full, selective-op or modules")


def _batches(row: TableRow, data: int) -> tuple[tuple[int, int], ...]:
    """The possible pairs of micro-batch and accumulation steps of a row: several if the row states neither."""
    batch, micro, accumulation = (row.whole(name) for name in ("global_batch", "micro_batch", "grad_accum"))
    if micro and accumulation:
        if batch and micro * accumulation * data != batch:
            row.fail(
                f"got global_batch {batch}, expected micro_batch {micro} · grad_accum {accumulation} · dp {data} = "
                f"{micro * accumulation * data}. Fix one of them, or leave grad_accum empty."
            )
        return ((micro, accumulation),)
    if batch is None:
        raise UnpredictableError("neither global_batch nor both micro_batch and grad_accum stated")
    per_replica, rest = divmod(batch, data)
    if accumulation:
        found = [(per_replica // accumulation, accumulation)] if rest == per_replica % accumulation == 0 else []
    else:
        tried = MICRO_BATCHES if micro is None else (micro,)
        found = [(size, per_replica // size) for size in tried if rest == per_replica % size == 0]
    if not found:
        raise UnpredictableError(
            f"global_batch {batch} is not a multiple of {f'micro_batch {micro} · ' if micro else ''}dp {data}"
        )
    return tuple(found)


def _settings(
    row: TableRow, degrees: Plan, zeros: tuple[int, ...], untied: bool | None
) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    """Every possible setting of a row, and the columns whose missing values give several settings."""
    if not row.text("tp") and not row.text("pp") and degrees.gpus > 1 and zeros != (3,):
        raise UnpredictableError("tp and pp not stated")
    architecture = _rows.architecture_of(row, untied)
    memory_gb, per_node = row.number("gpu_mem_gb"), row.whole("gpus_per_node") or 8
    machines = _rows.machine_choices(row.text("gpu"), memory_gb, per_node, row.text("interconnect"))
    software = _rows.software_of(row, replace(degrees, zero=zeros[0]))
    if software is None:
        raise UnpredictableError(f"precision '{row.text('dtype')}' is not modelled")
    sequence = row.flag("sp")
    choices: dict[str, tuple[Any, ...]] = {
        "gpu_mem_gb": machines,
        "zero": zeros if degrees.data > 1 else zeros[:1],
        "recompute": _recompute(row, software),
        "micro_batch": _batches(row, degrees.data),
        "sp": (sequence,) if sequence is not None else (True, False) if degrees.tensor > 1 else (False,),
        "attn_impl": _rows.with_attention(row, software),
    }
    settings = []
    for machine, zero, recompute, (micro, accumulation), split, stack in itertools.product(*choices.values()):
        plan = replace(
            degrees, micro_batch=micro, accumulation=accumulation, zero=zero, recompute=recompute, sequence=split
        )
        settings.append(Setting(architecture, plan, machine, stack))
    return tuple(settings), tuple(name for name, values in choices.items() if len(values) > 1)
