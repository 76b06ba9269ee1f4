"""Predicts measured steps, memory and collectives, scores the predictions, and fits constants to measurements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from synergy_core.catalog import gpu_type_named, load_model, model_names, nearest_type, transferred
from synergy_core.commands.measurements._rows import family_of
from synergy_core.commands.measurements.best_plans import BestPlans, Candidates, candidates, search_loss
from synergy_core.commands.measurements.collectives import Collectives
from synergy_core.commands.measurements.step_times import StepTimes
from synergy_core.commands.measurements.training_times import Case, TrainingStep, TrainingTimes
from synergy_core.errors import InputError, unknown
from synergy_core.goodput.calibration import MIN_ROWS, Accuracy, Calibrated, accuracy, calibrate
from synergy_core.goodput.throughput import Form, ObservedSteps, joined
from synergy_core.planner import communication
from synergy_core.planner.machine import (
    RDMA,
    Constants,
    Machine,
    Software,
    constants_for,
    constants_like,
    links_for,
    machine_named,
)
from synergy_core.planner.memory import memory
from synergy_core.planner.plan import Recompute
from synergy_core.units import Floats, columns_of, rows_at

Choose = Callable[[Machine, Software], Constants]
"""A function that returns the planner's constants to predict with."""

BANDS = (1, 8, 32, 64, 128, 256, 512, 1024)
"""Training times of plans are reported per band of GPU counts; these are the bands' upper ends."""
STEP_BANDS = (1, 4, 8, 16, 32, 64)
"""Upper ends of the bands of GPU counts by which step times of applications are reported."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """One line of a report. fields: further values beside the score, by their names in the JSON."""

    name: str
    model: str
    gpu_type: str
    score: Accuracy
    fields: dict[str, Any]

    def as_json(self, file: str, source: str) -> dict[str, Any]:
        """The group as an object for `--json`; unknown values are null."""
        numbers = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in {**asdict(self.score), **self.fields}.items()
        }
        names = {"file": file, "group": self.name, "model": self.model, "gpu_type": self.gpu_type}
        return {**names, **numbers, "predicted_by": source}


def scored(file: Any, choose: Choose = constants_for) -> list[ScoredGroup]:
    """Scores every group of a file in one of the planner's formats."""
    if isinstance(file, BestPlans):
        return _best_plans(file, choose)
    if isinstance(file, Collectives):
        return _collectives(file)
    return _training(file, choose)


def _group(name: str, rows: pd.DataFrame, predicted: str, measured: str, **fields: Any) -> ScoredGroup:
    """Scores one column of predictions on one of measurements."""
    models, gpu_types = (", ".join(rows[column].unique()) for column in ("model", "gpu_type"))
    return ScoredGroup(name, models, gpu_types, _accuracy(rows, predicted, measured), fields)


def _accuracy(rows: pd.DataFrame, predicted: str, measured: str) -> Accuracy:
    return accuracy(*(rows[column].to_numpy(dtype=np.float64) for column in (predicted, measured)))


def band(gpus: int, ends: Sequence[int]) -> str:
    """The band that a number of GPUs is in, such as `9-32`. ends: the bands' upper ends, rising."""
    first = 1
    for last in ends:
        if gpus <= last:
            return f"{first}-{last}" if first < last else f"{last}"
        first = last + 1
    return f"{first}+"


# Scores of training times of plans: step times, then memory by counter, then runs that ran out of memory.


MEASURED = {
    "time_s": "iter_time_s",
    "ideal_s": "iter_time_s",
    "peak_bytes": "peak_mem_bytes",
    "between_bytes": "held_bytes",
}
"""Predicted column → measured column of `TrainingStep`."""
NEVER_FIRST = 1e3
"""Added to a setting's distance from the measurement, it puts the setting behind all others."""


def predicted(file: TrainingTimes, choose: Choose = constants_for) -> pd.DataFrame:
    """A file's rows with predictions. A row with unstated fields is predicted in every setting; one of them is kept.

    A run did fit into memory: of the settings that fit, if any do, the one closest to what was measured is kept, where
    the sum of |log(predicted ÷ measured)| of time and memory is smallest. It gives all predictions of the row, so that
    none has its time from one setting and its memory from another.
    Adds to the columns of `TrainingStep` those of `MEASURED` (ideal_s: FLOPs ÷ peak), NaN where a row cannot be
    predicted, and `fits`: whether the setting fits into memory.
    """
    if not len(file):
        raise InputError(f"{file.path}: no row is left to score.")
    names = [each.name for each in fields(TrainingStep)]
    rows = pd.DataFrame({name: [getattr(row, name) for row in file.rows] for name in names})
    cases = file.cases(every_setting=True)
    parts = [_predict_settings(case, rows.loc[case.rows], choose, file.of_layers) for case in cases]
    every = pd.concat(parts or [pd.DataFrame(columns=["row", "fits", *MEASURED], dtype=np.float64)], ignore_index=True)
    of_row = every["row"].astype(np.int64)
    # Ideal times are no predictions. A row without any measurement keeps its first setting.
    off = sum(
        np.log(every[name] / rows[measured].loc[of_row].to_numpy()).abs().fillna(0.0)
        for name, measured in MEASURED.items()
        if name != "ideal_s"
    )
    ran_out = rows["out_of_memory"].loc[of_row].to_numpy(dtype=bool)
    closest = (off + NEVER_FIRST * ~(every["fits"].to_numpy(dtype=bool) | ran_out)).groupby(of_row).idxmin()
    for name in MEASURED:
        rows[name] = pd.Series(every[name].loc[closest].to_numpy(), closest.index, dtype=np.float64)
    fits = pd.Series(every["fits"].loc[closest].astype(bool).to_numpy(), closest.index)
    rows["fits"] = fits.reindex(rows.index, fill_value=False)
    return rows


def _predict_settings(case: Case, measured: pd.DataFrame, choose: Choose, of_layers: bool) -> pd.DataFrame:
    """Predicts step time and memory in each setting. measured: the settings' rows. of_layers: times of one layer."""
    stages, which = np.unique(measured["stage"].to_numpy(dtype=str), return_inverse=True)
    of_stages = columns_of([memory(case.work, case.plans, case.software, stage=each) for each in stages.tolist()])
    needs = rows_at(of_stages, (which, np.arange(len(case))))
    counters = [measured["memory_kind"] == "nvidia-smi", measured["memory_kind"] == "torch peak reserved"]
    constants = choose(case.machine, case.software)

    def step_s(layers: int, accumulation: int) -> Floats:
        architecture = replace(case.architecture, layers=np.full(len(case), layers))
        plans = replace(case.plans, accumulation=np.full(len(case), accumulation))
        work = family_of(architecture).work(architecture, plans, case.software)
        return replace(case, work=work, plans=plans).step_s(constants)

    if of_layers:
        # Times one more micro-batch through one more layer: fixed costs, embedding, logits and optimizer cancel out.
        time_s = (step_s(2, 2) - step_s(2, 1)) - (step_s(1, 2) - step_s(1, 1))
    else:
        time_s = case.step_s(constants)
    return pd.DataFrame(
        {
            "row": case.rows,
            "fits": needs.fits(case.machine),
            "time_s": time_s,
            "ideal_s": _ideal_s(case),
            "peak_bytes": np.select(counters, [needs.device_total, needs.reserved], needs.total),
            "between_bytes": needs.static,
        }
    )


def _ideal_s(of: Case | Candidates) -> Floats:
    """Step time at peak FLOP/s: three forward passes' FLOPs, or four for layers under full recomputation."""
    work, plans = of.work, of.plans
    layers = sum((np.asarray(each.count) * each.block.forward_flops for each in work.layers), np.zeros(len(plans)))
    ends = work.before.forward_flops + work.after.forward_flops
    flops = plans.passes * layers / plans.pipeline + Recompute.NONE.passes * ends / plans.pipeline
    result: Floats = flops * plans.accumulation / of.machine.gpu.matrix_flops_per_s(of.software.precision)
    return result


def _baseline_s(ideal_s: Floats, measured_s: Floats) -> Floats:
    """Predictions with a single constant: ideal time × median(measured time ÷ ideal time)."""
    with np.errstate(invalid="ignore"):
        ratio = np.log(measured_s / ideal_s)
    return ideal_s * (math.exp(float(np.nanmedian(ratio))) if np.isfinite(ratio).any() else math.nan)


def _training(file: TrainingTimes, choose: Choose) -> list[ScoredGroup]:
    rows = predicted(file, choose)
    rows["baseline_s"] = _baseline_s(rows["ideal_s"].to_numpy(), rows["iter_time_s"].to_numpy())
    # Regret compares rows that differ only in their plan.
    alike: list[Hashable] = []
    for row in file.rows:
        run = row.settings[0] if row.settings else None
        same = (row.model, row.gpu_type, row.gpus, row.global_batch)
        alike.append((*same, run.architecture, run.software) if run else row.line)

    def group(name: str, rows: pd.DataFrame, predicted: str, measured: str, **fields: Any) -> ScoredGroup:
        reasons = dict(Counter(each for each in rows["failure"] if each))
        banded = sum(map(bool, rows["unstated"]))
        return _group(name, rows, predicted, measured, **fields, banded=banded, reasons=reasons)

    result = []
    for name, members in _bands(rows[np.isfinite(rows["iter_time_s"])]):
        times = (members["time_s"].tolist(), members["iter_time_s"].tolist())
        plans = [file.rows[at].settings[0].plan if file.rows[at].settings else None for at in members.index]
        losses = regrets(*times, [alike[at] for at in members.index], plans)
        extra = {
            "kind": "time",
            "regret_mean": float(np.mean(losses)) if losses else math.nan,
            "regret_max": max(losses, default=math.nan),
            "baseline_mape": _accuracy(members, "baseline_s", "iter_time_s").mape,
            "false_refusals": int(((members["failure"] == "") & ~members["fits"]).sum()),
        }
        result.append(group(name, members, "time_s", "iter_time_s", **extra))
    of_memory = rows[np.isfinite(rows["peak_mem_bytes"])]
    for kind, members in of_memory.groupby("memory_kind", sort=False):
        result.append(group(f"memory: {kind}", members, "peak_bytes", "peak_mem_bytes", kind="memory"))
    if len(between := rows[np.isfinite(rows["held_bytes"])]):
        result.append(group("memory: allocated between steps", between, "between_bytes", "held_bytes", kind="memory"))
    if len(out := rows[rows["out_of_memory"]]):
        accepted = int(out["fits"].sum())
        counts = {"refused": len(out) - accepted, "accepted": accepted}
        found = _group("ran out of memory", out.assign(none=math.nan), "none", "none", kind="memory", **counts)
        result.append(replace(found, score=replace(found.score, n=len(out), failures=0)))
    return result


def _bands(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """All rows, then the rows of each model, GPU type, degree and band of GPU counts, where there are several."""
    if len(rows):
        yield "all", rows
    keys: dict[str, Any] = {"model": "model", "gpu": "gpu_type", "tp": "tensor", "pp": "pipeline"}
    keys["gpus"] = rows["gpus"].map(lambda gpus: band(gpus, BANDS))
    for name, key in keys.items():
        groups = sorted(rows.groupby(key, sort=False), key=lambda group: (len(str(group[0])), group[0]))
        if len(groups) > 1:
            yield from ((f"{name}={value}", members) for value, members in groups)


def regrets(
    predicted_s: Sequence[float], measured_s: Sequence[float], keys: Sequence[Hashable], plans: Sequence[Hashable]
) -> list[float]:
    """Regret of each set of rows with equal `keys`: measured time of the plan predicted fastest ÷ the best time − 1.

    Rows that repeat a plan count as their mean. Sets with a single plan are left out.
    """
    sets: dict[Hashable, dict[Hashable, list[tuple[float, float]]]] = {}
    for key, plan, *times in zip(keys, plans, predicted_s, measured_s, strict=True):
        if math.isfinite(times[0]):
            sets.setdefault(key, {}).setdefault(plan, []).append((times[0], times[1]))
    result = []
    for members in sets.values():
        if len(members) > 1:
            means = [tuple(np.mean(times, axis=0).tolist()) for times in members.values()]
            fastest = min(means, key=lambda mean: mean[0])
            result.append(fastest[1] / min(measured for _, measured in means) - 1.0)
    return result


# Scores of best plans found by another system, and of single collectives.


def _best_plans(file: BestPlans, choose: Choose) -> list[ScoredGroup]:
    """Scores the step time of the best plan among Alpa's candidates for every row."""
    found, reasons = candidates(file.rows)
    rows = pd.DataFrame(
        {
            "model": [row.model.split("-")[0] for row in file.rows],
            "gpu_type": [row.gpu_type for row in file.rows],
            "iter_time_s": [row.iter_time_s for row in file.rows],
            "time_s": math.nan,
            "ideal_s": math.nan,
            "reason": [reasons.get(at, "") for at in range(len(file.rows))],
        }
    )
    for each in found:
        seconds, best = each.best(choose(each.machine, each.software), search_loss(each.software.name))
        rows.loc[each.rows, "time_s"] = seconds
        rows.loc[each.rows, "ideal_s"] = _ideal_s(each)[best]
    rows["baseline_s"] = _baseline_s(rows["ideal_s"].to_numpy(), rows["iter_time_s"].to_numpy())
    groups = [("all", rows)]
    for key, column in (("family", "model"), ("gpu", "gpu_type")):
        groups += [(f"{key}={value}", members) for value, members in rows.groupby(column, sort=False)]
    result = []
    for name, members in groups:
        extra = {
            "kind": "time",
            "regret_mean": math.nan,
            "regret_max": math.nan,
            "baseline_mape": _accuracy(members, "baseline_s", "iter_time_s").mape,
            "banded": 0,
            "reasons": dict(Counter(members["reason"][members["time_s"].isna()])),
        }
        result.append(_group(name, members, "time_s", "iter_time_s", **extra))
    return result


_COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all-reduce": communication.all_reduce_s,
    "all-gather": communication.all_gather_s,
    "reduce-scatter": communication.reduce_scatter_s,
    "all-to-all": communication.all_to_all_s,
}


def _collectives(file: Collectives) -> list[ScoredGroup]:
    """Scores single collectives by GPU type, operation and ranks. The model leaves out a framework's own overhead."""
    if not file.rows:
        return []
    rows = pd.DataFrame(file.rows)
    rows = rows[rows["operation"].isin(_COLLECTIVES)].assign(model=rows["operation"])
    result = []
    group: Any
    for group, members in rows.groupby(["gpu_type", "operation", "ranks", "per_node"], sort=False):
        gpu_type, operation, ranks, per_node = group
        time_s, reasons = np.full(len(members), np.nan), {}
        try:
            links = links_for(machine_named(gpu_type))
            time_s = _COLLECTIVES[operation](members["nbytes"].to_numpy(), ranks, per_node, links)
        except InputError as error:
            reasons = {str(error): len(members)}
        name = f"{gpu_type} {operation} ranks={ranks} per node={per_node}"
        result.append(
            _group(
                name, members.assign(predicted_s=time_s), "predicted_s", "time_s", kind="collective", reasons=reasons
            )
        )
    return result


# Step times of an application: the model that predicts them, its source, and its score.


Models = Mapping[str, Mapping[str, Calibrated]]
"""Fitted step-time models by application and GPU type."""


def by_type(files: Sequence[StepTimes]) -> dict[str, dict[str, ObservedSteps]]:
    """Joins all rows of each model and GPU type. Raises InputError, naming the files, if they are too few to fit."""
    groups: dict[tuple[str, str], list[StepTimes]] = {}
    for each in files:
        groups.setdefault((each.model, gpu_type_named(each.gpu_type)), []).append(each)
    result: dict[str, dict[str, ObservedSteps]] = {}
    for (model, gpu_type), parts in groups.items():
        profile = joined([each.profile for each in parts])
        if len(profile) < MIN_ROWS:
            raise InputError(
                f"{', '.join(str(each.path) for each in parts)}: too few points to fit {model} on {gpu_type}; "
                f"got {len(profile)}, expected {MIN_ROWS} or more."
            )
        result.setdefault(model, {})[gpu_type] = profile
    return result


def calibrated_on(files: Sequence[StepTimes], form: Form | None) -> Models:
    """A robust fit per model and GPU type. form: None for `calibrate`'s choice. Raises InputError as `by_type`."""
    return {
        model: {gpu_type: calibrate(profile, form=form)[0] for gpu_type, profile in gpu_types.items()}
        for model, gpu_types in by_type(files).items()
    }


def predictor(file: StepTimes, calibrated: Models | None) -> tuple[Calibrated, str]:
    """The step-time model for a file, and its source in one phrase.

    The fit to the --calibrate files is preferred to the catalog, and the file's GPU type to the most similar one.
    Raises InputError if neither the fit nor the catalog knows the application.
    """
    gpu_type, source = gpu_type_named(file.gpu_type), "the shipped catalog"
    if calibrated is not None and file.model in calibrated:
        known, source = calibrated[file.model], "a fit to the --calibrate files"
    else:
        if calibrated is not None:
            given = [f"{model} on {'/'.join(sorted(gpu_types))}" for model, gpu_types in sorted(calibrated.items())]
            missing = f"no --calibrate file measures {file.model} (they measure {', '.join(given)}); "
            source = missing + source
            if file.model not in model_names():
                raise InputError(
                    f"{file.path}: {missing}nor does the catalog know it. Give --calibrate a file of {file.model}, "
                    "or name the model with --model."
                )
        known = {name: each.calibrated for name, each in load_model(file.model).gpu_types.items()}
    if gpu_type in known:
        return known[gpu_type], source
    near = nearest_type(gpu_type, known)
    model, factor = transferred(known[near], near, gpu_type)
    how = f"time per sample × {factor:.3g} by memory bandwidth"
    if factor == 1.0:
        how = f"unscaled: no data sheet of {gpu_type}"
    return model, f"{source}, transferred from {near} as {gpu_type} is not in it ({how}; all-reduces as on {near})"


def step_scores(file: StepTimes, model: Calibrated) -> list[ScoredGroup]:
    """Scores the whole file as `all`, then each band of nodes and GPUs that occurs in it."""
    predicted_s = model.step_time(file.nodes, file.gpus, file.local_batch, file.crowd)
    counts = zip(file.nodes.tolist(), file.gpus.tolist(), strict=True)
    names = np.array([f"nodes={nodes} gpus={band(gpus, STEP_BANDS)}" for nodes, gpus in counts])
    order = np.lexsort((file.gpus, file.nodes))
    groups = {"all": np.ones(len(file), dtype=bool)}
    groups |= {name: names == name for name in dict.fromkeys(names[order].tolist())}
    return [
        ScoredGroup(name, file.model, file.gpu_type, accuracy(predicted_s[at], file.step_time_s[at]), {"kind": "time"})
        for name, at in groups.items()
    ]


# Fits the planner's constants to measured step times: robust least squares of their logarithms, with a prior near
# physically plausible values.
#
# Residuals are log(predicted ÷ measured) under a soft-L1 loss of scale 0.05, so that models of all sizes count equally
# and outliers have little influence. Each case has a fixed total weight, so that a file with many rows does not
# dominate one with few.


LOSS_SCALE = 0.05
SPREAD = {
    "gemm_efficiency": 0.15,
    "gemm_depth": 0.7,
    "wave_loss": 0.7,
    "memory_efficiency": 0.1,
    "attention_efficiency": 0.5,
    "attention_fill": 1.0,
    "attention_backward": 0.25,
    "score_passes": 0.3,
    "backward_traffic": 0.3,
    "backward_kernels": 0.3,
    "kernel_s": 0.4,
    "host_s": 1.0,
    "host_jitter": 1.0,
    "launch_norm": 0.4,
    "tensor_efficiency": 0.15,
    "network_efficiency": 0.2,
    "card_collisions": 1.0,
    "data_overlap": 0.5,
    "data_exposed": 1.0,
    "optimizer_bytes_factor": 0.3,
    "step_s": 1.0,
}
"""Prior standard deviation of each constant's logarithm around its starting value."""
UPPER_BOUNDS = {
    **dict.fromkeys(("gemm_efficiency", "wave_loss", "memory_efficiency", "data_overlap", "data_exposed"), 1.0),
    "attention_efficiency": 0.8,
    "network_efficiency": 1.0 / RDMA.efficiency,
}
"""Largest plausible values: 1 for fractions, the data sheet's rate of a network, and the best published efficiency of
fused attention."""
PRIOR_WEIGHT = 0.003
"""Cost of moving a constant by one prior standard deviation, relative to the mean loss of a row."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Fitted constants by owner. at_bounds: `owner.name` of the constants that ended at a bound, for a report."""

    constants: Mapping[str, Constants]
    at_bounds: tuple[str, ...]


def fit(
    cases: Sequence[Case],
    shared: Sequence[str],
    own: Mapping[str, Sequence[str]],
    start: Mapping[str, Constants],
    keep: Sequence[NDArray[np.bool_]] | None = None,
) -> Fitted:
    """Fits constants to measured steps: one value for all owners if named in `shared`, one per owner if named in `own`.

    Shared constants start from the first owner's. keep: for each case, a mask of the rows to fit to; None for all.
    """
    owners = list(start)
    names = [("", name) for name in shared] + [(owner, name) for owner in owners for name in own.get(owner, ())]
    centre = np.log([getattr(start[owner or owners[0]], name) for owner, name in names])
    spread = np.array([SPREAD[name] for _, name in names])
    low = centre - 4.0 * spread
    high = np.minimum(centre + 4.0 * spread, [np.log(UPPER_BOUNDS.get(name, np.inf)) for _, name in names])

    def constants(x: Floats) -> dict[str, Constants]:
        values = list(zip(names, np.exp(x).tolist(), strict=True))
        return {
            owner: replace(start[owner], **{name: value for (whose, name), value in values if whose in ("", owner)})
            for owner in owners
        }

    def costs(x: Floats) -> Floats:
        now = constants(x)
        parts = []
        for at, case in enumerate(cases):
            rows = slice(None) if keep is None else keep[at]
            off = case.residuals(now[case.owner])[rows]
            weight = case.weight[rows]
            if len(off) and weight.sum() > 0:
                soft = np.sqrt(2.0 * (np.sqrt(1.0 + (off / LOSS_SCALE) ** 2) - 1.0)) * LOSS_SCALE
                parts.append(np.sqrt(case.share * weight / weight.sum()) * soft)
        return np.concatenate([*parts, PRIOR_WEIGHT * (x - centre) / spread])

    first = np.clip(centre, low + 1e-9, high - 1e-9)
    found = least_squares(costs, first, bounds=(low, high), diff_step=1e-3, max_nfev=40)
    edge = np.minimum(found.x - low, high - found.x) < 1e-3
    bound = tuple(f"{owner or 'all'}.{name}" for (owner, name), at in zip(names, edge, strict=True) if at)
    return Fitted(constants(found.x), bound)


# Refits a few of the planner's constants to a user's own training times; the others stay as shipped.


FACTORS = {"network": "network_efficiency", "software": "gemm_efficiency"}
"""Short names that users type for two constants: a slower network, and slower software."""
MIN_REFIT_ROWS = 3


REFIT_PARTS = 5
"""Rows are dealt into this many parts; each part is predicted by a fit to the others."""


class Refit(NamedTuple):
    """Refitted constants, the number of rows they were fitted to, and their mean absolute error on those rows.

    held_out: (rows,), log(measured ÷ predicted), each row by a fit that did not see it.
    """

    constants: Constants
    rows: int
    mean_error: float
    held_out: Floats


def refitted(files: Sequence[TrainingTimes], named: str) -> dict[tuple[str, str], Refit]:
    """Refits constants per software and GPU type in the files. GPUs that differ only in memory size share constants.

    named: constants to fit, separated by commas. Raises InputError for unknown names and too few rows.
    """
    which = [FACTORS.get(each.strip(), each.strip()) for each in named.split(",")]
    for each in which:
        if each not in SPREAD:
            raise unknown("constant", each, [*FACTORS, *SPREAD])
    cases: dict[tuple[str, str], list[Case]] = {}
    for file in files:
        for case in file.cases():
            cases.setdefault((case.software.name, constants_like(case.machine.gpu)), []).append(case)
    if files and not cases:
        reasons = [f"{count} {why}" for file in files for why, count in file.excluded.items()]
        reasons += sorted({row.failure for file in files for row in file.rows if row.failure})
        raise InputError(
            f"nothing to fit: no row has a time and a setting that can be predicted ({'; '.join(reasons)})."
        )
    result = {}
    for (software, gpu_type), members in cases.items():
        keep = [case.iter_time_s > 0 for case in members]
        rows = int(sum(each.sum() for each in keep))
        if rows < MIN_REFIT_ROWS:
            raise InputError(
                f"too few rows of {software} on {gpu_type} to fit; got {rows}, expected {MIN_REFIT_ROWS} or more."
            )
        shared = [replace(case, share=len(case) / rows) for case in members]
        start = constants_for(members[0].machine, members[0].software)
        found = fit(shared, which, {}, {"": start}, keep).constants[""]
        off = _residuals(shared, found, keep)
        dealt = np.random.default_rng(0).permutation(rows) % min(rows, REFIT_PARTS)
        held_out = []
        for part in range(dealt.max() + 1):
            out = [np.zeros(len(kept), dtype=bool) for kept in keep]
            ends = np.cumsum([kept.sum() for kept in keep])[:-1]
            for mask, kept, mine in zip(out, keep, np.split(dealt == part, ends), strict=True):
                mask[kept] = mine
            rest = [kept & ~mask for kept, mask in zip(keep, out, strict=True)]
            held_out.append(-_residuals(shared, fit(shared, which, {}, {"": start}, rest).constants[""], out))
        error = float(np.abs(np.expm1(off)).mean())
        result[software, gpu_type] = Refit(found, rows, error, np.concatenate(held_out))
    return result


def _residuals(cases: Sequence[Case], constants: Constants, at: Sequence[NDArray[np.bool_]]) -> Floats:
    return np.concatenate([case.residuals(constants)[mask] for case, mask in zip(cases, at, strict=True)])


def constants_from(files: Sequence[TrainingTimes], named: str) -> tuple[Choose, str]:
    """The constants to predict with, shipped or refitted to `files` if there are any, and a name for them."""
    if not files:
        return constants_for, "the shipped constants"
    found = refitted(files, named)

    def choose(machine: Machine, software: Software) -> Constants:
        known = found.get((software.name, constants_like(machine.gpu)))
        return known.constants if known else constants_for(machine, software)

    rows = sum(each.rows for each in found.values())
    return choose, f"the shipped constants, {named} refitted to {rows} rows"
