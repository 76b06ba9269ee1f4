"""Predicts measured plans, memory and collectives with the planner, and scores what it says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.accuracy import Accuracy, accuracy
from synergy_core.arrays import Bools, Floats
from synergy_core.errors import InputError
from synergy_core.measurements._alpa import candidates, search_loss
from synergy_core.measurements._cases import Case, machine_of
from synergy_core.measurements._hardware import Gpus
from synergy_core.measurements.best_plans import BestPlans
from synergy_core.measurements.collectives import Collectives
from synergy_core.measurements.layer_times import LayerTimes
from synergy_core.measurements.training_times import TrainingTimes
from synergy_core.planner import communication
from synergy_core.planner.constants import Constants, constants_for
from synergy_core.planner.machine import Machine
from synergy_core.planner.memory import Memory, memory
from synergy_core.planner.plan import Plans, Recompute
from synergy_core.planner.software import Software
from synergy_core.planner.step_time import step_time
from synergy_core.planner.work import Work

Choose = Callable[[Machine, Software], Constants]

BANDS = (1, 8, 32, 64, 128, 256, 512, 1024)
"""Upper ends of the bands of GPU counts that are reported apart."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """One line of a report. fields: beside the score, by the names of the JSON."""

    name: str
    model: str
    gpu_type: str
    score: Accuracy
    fields: dict[str, Any]

    def as_json(self, file: str, source: str) -> dict[str, Any]:
        """The object of `--json`; what cannot be told is null."""
        plain = {"file": file, "group": self.name, "model": self.model, "gpu_type": self.gpu_type}
        numbers = {**asdict(self.score), **self.fields}
        return {**plain, **{name: _finite(value) for name, value in numbers.items()}, "predicted_by": source}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class PredictedRows:
    """Predictions for a file's rows, arrays (rows,): of a row's settings, the one closest to what was measured.

    fits: whether some setting fits into memory. ideal_s: FLOPs ÷ peak. NaN where nothing is predicted.
    """

    time_s: Floats
    ideal_s: Floats
    peak_bytes: Floats
    held_bytes: Floats
    fits: Bools


def scored(file: Any, choose: Choose = constants_for) -> list[ScoredGroup]:
    """Every group of a file of the planner's formats."""
    if isinstance(file, BestPlans):
        return _best_plans(file, choose)
    if isinstance(file, Collectives):
        return _collectives(file)
    return _training(file, choose)


def predicted(file: TrainingTimes, choose: Choose = constants_for) -> PredictedRows:
    """Predictions of every row; of a row with unstated fields, the setting that comes closest."""
    if not len(file):
        raise InputError(f"{file.path}: no row is left to score.")
    count = len(file)
    time_s, ideal_s, peak, static = np.full((4, count), np.nan)
    rows = PredictedRows(time_s, ideal_s, peak, static, np.zeros(count, dtype=bool))
    measured_peak = np.array([each.peak_mem_bytes for each in file.rows])
    kinds = np.array([each.memory_kind for each in file.rows])
    held = np.array([each.held_bytes for each in file.rows])
    for case in file.cases(every_setting=True):
        work = case.family.work(case.architecture, case.plans, case.software)
        time = _layer_s(case, choose) if isinstance(file, LayerTimes) else _step_s(work, case, choose)
        _closest(rows.time_s, case.rows, time, case.iter_time_s)
        _closest(rows.ideal_s, case.rows, _ideal_s(work, case.plans, case.machine, case.software), case.iter_time_s)
        needs = _memory_of_stages(work, case, [file.rows[row].stage for row in case.rows.tolist()])
        told = np.select(
            [kinds[case.rows] == "nvidia-smi", kinds[case.rows] == "torch peak reserved"],
            [needs.device_total, needs.reserved],
            needs.total,
        )
        _closest(rows.peak_bytes, case.rows, told, measured_peak[case.rows])
        _closest(rows.held_bytes, case.rows, needs.static, held[case.rows])
        np.logical_or.at(rows.fits, case.rows, needs.fits(case.machine))
    return rows


def _memory_of_stages(work: Work, case: Case, stages: Sequence[str]) -> Memory:
    """Memory of every setting, each on the pipeline stage that its row was measured on."""
    first, *others = dict.fromkeys(stages)
    result = memory(work, case.plans, case.software, stage=first)
    for stage in others:
        here = np.array([each == stage for each in stages])
        told = memory(work, case.plans, case.software, stage=stage)
        result = Memory(*(np.where(here, getattr(told, f.name), getattr(result, f.name)) for f in fields(Memory)))
    return result


def _closest(into: Floats, rows: NDArray[np.int64], told: Floats, truth: Floats) -> None:
    """Keeps for each row the prediction with the smallest relative error; the first where nothing was measured."""
    for row, value, wanted in zip(
        rows.tolist(), np.broadcast_to(told, rows.shape).tolist(), truth.tolist(), strict=True
    ):
        before = into[row]
        if math.isnan(before) or abs(value - wanted) < abs(before - wanted):
            into[row] = value


def _step_s(work: Work, case: Case, choose: Choose) -> Floats:
    constants = choose(case.machine, case.software)
    return step_time(work, case.plans, case.machine, case.software, constants).total_s


def _layer_s(case: Case, choose: Choose) -> Floats:
    """Seconds of one more micro-batch through one more layer: fixed costs, embedding, logits, optimizer cancel out."""

    def total(layers: int, accumulation: int) -> Floats:
        a = replace(case.architecture, layers=np.full(len(case), layers))
        plans = replace(case.plans, accumulation=np.full(len(case), accumulation))
        work = case.family.work(a, plans, case.software)
        return _step_s(work, replace(case, architecture=a, plans=plans), choose)

    return (total(2, 2) - total(2, 1)) - (total(1, 2) - total(1, 1))


def _ideal_s(work: Work, plans: Plans, machine: Machine, software: Software) -> Floats:
    """Seconds of a step at the GPUs' peak: FLOPs of three forward passes, of layers four with full recomputation."""
    layers = sum((np.asarray(each.count) * each.block.forward_flops for each in work.layers), np.zeros(len(plans)))
    ends = work.before.forward_flops + work.after.forward_flops
    flops = plans.passes * layers / plans.pipeline + Recompute.NONE.passes * ends / plans.pipeline
    peak = machine.gpu.matrix_flops_per_s(software.precision)
    result: Floats = flops * plans.accumulation / peak
    return result


def _training(file: TrainingTimes, choose: Choose) -> list[ScoredGroup]:
    """Times, in bands of what differs between rows; then memory by counter; then rows that ran out of memory."""
    rows = predicted(file, choose)
    measured = np.array([each.iter_time_s for each in file.rows])
    timed = np.isfinite(measured)
    with np.errstate(invalid="ignore"):
        ratio = np.log(measured / rows.ideal_s)
    level = math.exp(float(np.nanmedian(ratio))) if np.isfinite(ratio).any() else math.nan
    baseline = rows.ideal_s * level
    result = [_time_group(name, at, file, rows, measured, baseline) for name, at in _bands(file, timed) if at.any()]
    kinds = np.array([each.memory_kind for each in file.rows])
    peaks = np.array([each.peak_mem_bytes for each in file.rows])
    for kind in dict.fromkeys(kinds[np.isfinite(peaks)].tolist()):
        at = np.isfinite(peaks) & (kinds == kind)
        result.append(_memory_group(kind, at, file, rows.peak_bytes, peaks))
    held = np.array([each.held_bytes for each in file.rows])
    if np.isfinite(held).any():
        result.append(_memory_group("allocated between steps", np.isfinite(held), file, rows.held_bytes, held))
    out = np.array([each.out_of_memory for each in file.rows], dtype=bool)
    if out.any():
        nothing = accuracy(np.empty(0), np.empty(0))
        refused = int((out & ~rows.fits).sum())
        counts = {"kind": "memory", "refused": refused, "accepted": int(out.sum()) - refused}
        result.append(ScoredGroup("ran out of memory", *_named(file, out), replace(nothing, n=int(out.sum())), counts))
    return result


def _bands(file: TrainingTimes, wanted: Bools) -> list[tuple[str, Bools]]:
    """All rows, then those of each model, GPU type, degree and band of GPUs, where there are several."""
    result = [("all", wanted)]
    keys: dict[str, list[Any]] = {
        "model": [each.model for each in file.rows],
        "gpu": [each.gpu_type for each in file.rows],
        "tp": [each.tensor for each in file.rows],
        "pp": [each.pipeline for each in file.rows],
        "gpus": [_band(each.gpus) for each in file.rows],
    }
    for name, values in keys.items():
        every = [value for value, at in zip(values, wanted, strict=True) if at]
        distinct = sorted(set(every), key=lambda value: (len(value), value) if isinstance(value, str) else value)
        if len(distinct) > 1:
            result += [(f"{name}={each}", wanted & np.array([value == each for value in values])) for each in distinct]
    return result


def _band(gpus: int) -> str:
    low = 1
    for high in BANDS:
        if gpus <= high:
            return f"{low}-{high}" if low < high else f"{high}"
        low = high + 1
    return f"{low}+"


def _time_group(
    name: str, at: Bools, file: TrainingTimes, rows: PredictedRows, measured: Floats, baseline: Floats
) -> ScoredGroup:
    members = [each for each, inside in zip(file.rows, at, strict=True) if inside]
    score = accuracy(rows.time_s[at], measured[at])
    keys = [
        (each.model, each.gpu_type, each.gpus, each.global_batch, first.architecture, first.software)
        if (first := next(iter(each.settings), None))
        else each.line
        for each in members
    ]
    plans = [each.settings[0].plan if each.settings else None for each in members]
    losses = regrets(rows.time_s[at], measured[at], keys, plans)
    ran = np.array([not each.failure for each in members], dtype=bool)
    fields = {
        "kind": "time",
        "regret_mean": float(np.mean(losses)) if losses else math.nan,
        "regret_max": max(losses, default=math.nan),
        "baseline_mape": accuracy(baseline[at], measured[at]).mape,
        "banded": sum(bool(each.unstated) for each in members),
        "false_refusals": int((ran & ~rows.fits[at]).sum()),
        "reasons": dict(Counter(each.failure for each in members if each.failure)),
    }
    return ScoredGroup(name, *_named(file, at), score, fields)


def regrets(
    predicted_s: Floats, measured_s: Floats, keys: Sequence[Hashable], plans: Sequence[Hashable]
) -> list[float]:
    """The regret of each set of rows alike in `keys`: measured time of the plan predicted fastest ÷ the best − 1.

    Rows that repeat a plan count as their mean. Sets with a single plan have none.
    """
    sets: dict[Hashable, dict[Hashable, list[int]]] = {}
    for at, (key, plan) in enumerate(zip(keys, plans, strict=True)):
        if math.isfinite(predicted_s[at]):
            sets.setdefault(key, {}).setdefault(plan, []).append(at)
    result = []
    for members in sets.values():
        if len(members) > 1:
            told = [float(predicted_s[each].mean()) for each in members.values()]
            truth = [float(measured_s[each].mean()) for each in members.values()]
            result.append(truth[int(np.argmin(told))] / min(truth) - 1.0)
    return result


def _memory_group(kind: str, at: Bools, file: TrainingTimes, told: Floats, truth: Floats) -> ScoredGroup:
    members = [each for each, inside in zip(file.rows, at, strict=True) if inside]
    fields = {
        "kind": "memory",
        "banded": sum(bool(each.unstated) for each in members),
        "reasons": dict(Counter(each.failure for each in members if each.failure)),
    }
    return ScoredGroup(f"memory: {kind}", *_named(file, at), accuracy(told[at], truth[at]), fields)


def _named(file: TrainingTimes, at: Bools) -> tuple[str, str]:
    members = [each for each, inside in zip(file.rows, at, strict=True) if inside]
    return tuple(", ".join(dict.fromkeys(each)) for each in zip(*((m.model, m.gpu_type) for m in members), strict=True))  # type: ignore[return-value]


def _best_plans(file: BestPlans, choose: Choose) -> list[ScoredGroup]:
    """The best plan for every row among those that Alpa chooses from."""
    found, reasons = candidates(file.rows)
    predicted_s, roofs = np.full((2, len(file.rows)), np.nan)
    for each in found:
        seconds, best = each.best(choose(each.machine, each.software), search_loss(each.software.name))
        predicted_s[each.rows] = seconds
        roofs[each.rows] = _ideal_s(each.work, each.plans, each.machine, each.software)[best]
    measured = np.array([row.iter_time_s for row in file.rows])
    with np.errstate(invalid="ignore"):
        ratio = np.log(measured / roofs)
    baseline = roofs * (math.exp(float(np.nanmedian(ratio))) if np.isfinite(ratio).any() else math.nan)
    families = [row.model.split("-")[0] for row in file.rows]
    gpu_types = [row.gpu_type for row in file.rows]
    groups = [("all", np.ones(len(measured), dtype=bool))]
    groups += [(f"family={each}", np.array([value == each for value in families])) for each in dict.fromkeys(families)]
    groups += [(f"gpu={each}", np.array([value == each for value in gpu_types])) for each in dict.fromkeys(gpu_types)]
    result = []
    for name, at in groups:
        fields = {
            "kind": "time",
            "regret_mean": math.nan,
            "regret_max": math.nan,
            "baseline_mape": accuracy(baseline[at], measured[at]).mape,
            "banded": 0,
            "reasons": dict(Counter(why for row, why in reasons.items() if at[row] and math.isnan(predicted_s[row]))),
        }
        models = ", ".join(dict.fromkeys(each for each, inside in zip(families, at, strict=True) if inside))
        types = ", ".join(dict.fromkeys(each for each, inside in zip(gpu_types, at, strict=True) if inside))
        result.append(ScoredGroup(name, models, types, accuracy(predicted_s[at], measured[at]), fields))
    return result


_OPERATIONS = {
    "all-reduce": communication.all_reduce_s,
    "all-gather": communication.all_gather_s,
    "reduce-scatter": communication.reduce_scatter_s,
    "all-to-all": communication.all_to_all_s,
}


def _collectives(file: Collectives) -> list[ScoredGroup]:
    """Collectives alone, by GPU type, operation and ranks; times of a framework around them are not in the model."""
    keys = [
        (each.gpu_type, each.operation, each.ranks, each.per_node)
        for each in file.rows
        if each.operation in _OPERATIONS
    ]
    result = []
    for key in dict.fromkeys(keys):
        gpu_type, operation, ranks, per_node = key
        members = [each for each in file.rows if (each.gpu_type, each.operation, each.ranks, each.per_node) == key]
        size, truth = (np.array([getattr(each, name) for each in members]) for name in ("nbytes", "time_s"))
        reasons = {}
        try:
            links = communication.links_for(machine_of(Gpus(gpu_type, None, None)))
            told = _OPERATIONS[operation](size, ranks, per_node, links)
        except InputError as error:
            told, reasons = np.full(len(size), np.nan), {str(error): len(size)}
        name = f"{gpu_type} {operation} ranks={ranks} per node={per_node}"
        result.append(
            ScoredGroup(name, operation, gpu_type, accuracy(told, truth), {"kind": "collective", "reasons": reasons})
        )
    return result
