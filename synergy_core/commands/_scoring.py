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

from synergy_core.commands.fits import fit_of
from synergy_core.commands.measurements._rows import family_of
from synergy_core.commands.measurements.best_plans import BestPlans, CandidatePlans, candidates, search_loss
from synergy_core.commands.measurements.collectives import Collectives
from synergy_core.commands.measurements.plan_reports import PlanReport, PlanReports
from synergy_core.commands.measurements.step_times import StepTimes
from synergy_core.commands.measurements.training_times import Case, TrainingStep, TrainingTimes
from synergy_core.commands.plan import asked
from synergy_core.errors import InputError, unknown
from synergy_core.performance.catalog import (
    CATALOG,
    gpu_type_named,
    load_model,
    model_names,
    nearest_type,
    read_yaml,
    transferred,
)
from synergy_core.performance.goodput.calibration import MIN_ROWS, Accuracy, Calibrated, accuracy, calibrate
from synergy_core.performance.goodput.throughput import Form, ObservedSteps, joined
from synergy_core.performance.planner import communication
from synergy_core.performance.planner.bands import Verdict, family_name, time_band
from synergy_core.performance.planner.machine import (
    RDMA,
    Constants,
    Machine,
    Software,
    constants_for,
    constants_like,
    links_for,
    machine_named,
)
from synergy_core.performance.planner.memory import memory
from synergy_core.performance.planner.plan import Recompute
from synergy_core.units import Floats, columns_of, rows_at

Choose = Callable[[Machine, Software], Constants]
"""A function that returns the planner's constants for predictions on a machine with a training software."""

BANDS = (1, 8, 32, 64, 128, 256, 512, 1024)
"""Upper ends of the bands of GPU counts by which training times of plans are reported."""
STEP_BANDS = (1, 4, 8, 16, 32, 64)
"""Upper ends of the bands of GPU counts by which step times of applications are reported."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """One line of a report. fields: values beside the score, by their names in the JSON."""

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
    scorers: dict[type, Callable[[Any, Choose], list[ScoredGroup]]]
    scorers = {BestPlans: _best_plans, Collectives: _collectives, PlanReports: _plan_reports}
    return scorers.get(type(file), _training)(file, choose)


def _group(name: str, rows: pd.DataFrame, predicted: str, measured: str, **fields: Any) -> ScoredGroup:
    """Scores one column of predictions on one of measurements. reason: why a row is not predicted, if it is not."""
    if "reason" in rows:
        fields["reasons"] = dict(Counter(filter(None, rows["reason"])))
    models, gpu_types = (", ".join(rows[column].unique()) for column in ("model", "gpu_type"))
    return ScoredGroup(name, models, gpu_types, _accuracy(rows, predicted, measured), fields)


def _accuracy(rows: pd.DataFrame, predicted: str, measured: str) -> Accuracy:
    return accuracy(*(rows[column].to_numpy(dtype=np.float64) for column in (predicted, measured)))


def band(gpus: int, ends: Sequence[int]) -> str:
    """The band that contains a number of GPUs, such as `9-32`. ends: the upper ends of all bands, rising."""
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
UNSTATED = {
    "gpu_mem_gb": "memory_bytes",
    "zero": "zero",
    "recompute": "recompute",
    "micro_batch": "micro_batch",
    "sp": "sequence",
    "attn_impl": "flash",
}
"""Column of a file that may be unstated → column of predicted settings."""
MISFIT_PENALTY = 1e3
"""Added to the distance of a setting that does not fit into memory, so that every setting that fits is closer."""


def predicted(file: TrainingTimes, choose: Choose = constants_for) -> pd.DataFrame:
    """A file's rows with predictions. A row with unstated fields is predicted in every setting; one setting is kept.

    The kept setting is the closest to the measurement, by the sum of |log(predicted ÷ measured)| of time and memory,
    among those that fit into memory if any do, because the run did fit. All predictions of a row come from its kept
    setting. The result has the columns of `TrainingStep` and of `MEASURED` (ideal_s: FLOPs ÷ peak), NaN where a row
    cannot be predicted, and two more. fits: whether the setting fits into memory. shared_s: the step time in a setting
    whose unstated fields have the same values for all rows of a set, as `_shared` finds it.
    """
    if not len(file):
        raise InputError(f"{file.path}: no row is left to score.")
    names = [field.name for field in fields(TrainingStep)]
    rows = pd.DataFrame({name: [getattr(row, name) for row in file.rows] for name in names})
    cases = file.cases(every_setting=True)
    parts = [_predict_settings(case, rows.loc[case.rows], choose, file.of_layers) for case in cases]
    empty = pd.DataFrame(columns=["row", "fits", *MEASURED, *UNSTATED.values()], dtype=np.float64)
    every = pd.concat(parts or [empty], ignore_index=True)
    row_of = every["row"].astype(np.int64)
    # Ideal times are not predictions. A row without any measurement keeps its first setting.
    distance = sum(
        np.log(every[name] / rows[measured].loc[row_of].to_numpy()).abs().fillna(0.0)
        for name, measured in MEASURED.items()
        if name != "ideal_s"
    )
    ran_out = rows["out_of_memory"].loc[row_of].to_numpy(dtype=bool)
    distance = distance + MISFIT_PENALTY * ~(every["fits"].to_numpy(dtype=bool) | ran_out)
    closest = distance.groupby(row_of).idxmin()
    shared = _shared(every.assign(row=row_of, distance=distance), rows["unstated"], _sets(file), closest)
    kept = every.loc[closest].set_index("row")[["fits", *MEASURED]]
    rows = rows.join(kept).join(every.loc[shared].set_index("row")["time_s"].rename("shared_s"))
    return rows.assign(fits=rows["fits"].eq(True))


def _sets(file: TrainingTimes) -> list[Hashable]:
    """The set of each row. Rows of one set differ only in their plan; a row that cannot be predicted is alone."""
    keys: list[Hashable] = []
    for row in file.rows:
        run = row.settings[0] if row.settings else None
        stated = (row.model, row.gpu_type, row.gpus, row.global_batch)
        keys.append((*stated, run.architecture, run.software) if run else row.line)
    return keys


def _shared(every: pd.DataFrame, unstated: pd.Series, sets: Sequence[Hashable], closest: pd.Series) -> pd.Series:
    """Chooses a setting for every row such that the unstated fields have the same values in all rows of a set.

    A comparison of plans needs such settings: if each row had its own closest setting, the measurement that a plan is
    judged by would also choose how the plan is predicted, and one plan could be predicted with recomputation and the
    other without. The values are those with the smallest sum of distances. A row that cannot have a value, such as a
    sequence split without tensor parallelism, takes its closest setting with the others; a row that fits in no setting
    with the values takes its own closest.

    every: all settings, with columns row, distance and those of `UNSTATED`. unstated: the names of each row's unstated
    fields. sets: each row's set. closest: each row's closest setting. Returns the index of a setting for each row.
    """
    result = closest.copy()
    rows_of: dict[Hashable, list[int]] = {}
    for row in closest.index:
        rows_of.setdefault(sets[row], []).append(row)
    settings_of = every.groupby("row").indices
    for members in rows_of.values():
        names = sorted({name for row in members for name in unstated[row]})
        if len(members) == 1 or not names:
            continue
        settings = every.iloc[np.concatenate([settings_of[row] for row in members])]
        values = settings[[UNSTATED[name] for name in names]].to_numpy(dtype=np.float64)
        choices = []
        for wanted in np.unique(values, axis=0):
            missed = (values != wanted).sum(axis=1)
            order = settings.assign(missed=missed).sort_values(["missed", "distance"], kind="stable")
            choices.append(order.drop_duplicates("row"))
        best = min(choices, key=lambda chosen: float(chosen["distance"].sum()))
        best = best[best["distance"] < MISFIT_PENALTY]
        result.loc[best["row"]] = best.index
    return result


def _predict_settings(case: Case, measured: pd.DataFrame, choose: Choose, of_layers: bool) -> pd.DataFrame:
    """Predicts step time and memory in each setting. measured: the settings' rows. of_layers: predict one layer."""
    stages, which = np.unique(measured["stage"].to_numpy(dtype=str), return_inverse=True)
    stage_needs = columns_of([memory(case.work, case.plans, case.software, stage=stage) for stage in stages.tolist()])
    needs = rows_at(stage_needs, (which, np.arange(len(case))))
    counters = [measured["memory_kind"] == "nvidia-smi", measured["memory_kind"] == "torch peak reserved"]
    constants = choose(case.machine, case.software)

    def step_s(layers: int, accumulation: int) -> Floats:
        architecture = replace(case.architecture, layers=np.full(len(case), layers))
        plans = replace(case.plans, accumulation=np.full(len(case), accumulation))
        work = family_of(architecture).work(architecture, plans, case.software)
        return replace(case, work=work, plans=plans).step_s(constants)

    if of_layers:
        # Time of one more micro-batch in one more layer: fixed costs, embedding, logits and optimizer cancel out.
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
            "memory_bytes": case.machine.memory_bytes,
            "flash": case.software.flash,
            **{name: getattr(case.plans, name) for name in ("zero", "recompute", "micro_batch", "sequence")},
        }
    )


def _ideal_s(group: Case | CandidatePlans) -> Floats:
    """Step time at peak FLOP/s. A step has three forward passes' FLOPs, or four for layers under full recomputation."""
    work, plans = group.work, group.plans
    layers = sum((np.asarray(run.count) * run.block.forward_flops for run in work.layers), np.zeros(len(plans)))
    ends = work.before.forward_flops + work.after.forward_flops
    flops = plans.passes * layers / plans.pipeline + Recompute.NONE.passes * ends / plans.pipeline
    result: Floats = flops * plans.accumulation / group.machine.gpu.matrix_flops_per_s(group.software.precision)
    return result


def _baseline_s(ideal_s: Floats, measured_s: Floats) -> Floats:
    """Predicts with a single constant: ideal time × median(measured time ÷ ideal time)."""
    with np.errstate(invalid="ignore"):
        ratio = np.log(measured_s / ideal_s)
    return ideal_s * (math.exp(float(np.nanmedian(ratio))) if np.isfinite(ratio).any() else math.nan)


def _training(file: TrainingTimes, choose: Choose) -> list[ScoredGroup]:
    rows = predicted(file, choose)
    rows["baseline_s"] = _baseline_s(rows["ideal_s"].to_numpy(), rows["iter_time_s"].to_numpy())
    keys = _sets(file)

    def group(name: str, rows: pd.DataFrame, predicted: str, measured: str, **fields: Any) -> ScoredGroup:
        banded = sum(map(bool, rows["unstated"]))
        return _group(name, rows.assign(reason=rows["failure"]), predicted, measured, **fields, banded=banded)

    result = []
    for name, members in _bands(rows[np.isfinite(rows["iter_time_s"])]):
        times = (members["shared_s"].tolist(), members["iter_time_s"].tolist())
        settings = (file.rows[index].settings for index in members.index)
        plans = [possible[0].plan if possible else None for possible in settings]
        losses = regrets(*times, [keys[index] for index in members.index], plans)
        figures = {
            "regret_mean": float(np.mean(losses)) if losses else math.nan,
            "regret_max": max(losses, default=math.nan),
            "baseline_mape": _accuracy(members, "baseline_s", "iter_time_s").mape,
            "false_refusals": int(((members["failure"] == "") & ~members["fits"]).sum()),
        }
        result.append(group(name, members, "time_s", "iter_time_s", kind="time", **figures))
    of_memory = rows[np.isfinite(rows["peak_mem_bytes"])]
    for kind, members in of_memory.groupby("memory_kind", sort=False):
        result.append(group(f"memory: {kind}", members, "peak_bytes", "peak_mem_bytes", kind="memory"))
    if len(idle := rows[np.isfinite(rows["held_bytes"])]):
        result.append(group("memory: allocated between steps", idle, "between_bytes", "held_bytes", kind="memory"))
    if len(failed := rows[rows["out_of_memory"]]):
        accepted = int(failed["fits"].sum())
        counts = {"refused": len(failed) - accepted, "accepted": accepted}
        found = _group("ran out of memory", failed.assign(none=math.nan), "none", "none", kind="memory", **counts)
        result.append(replace(found, score=replace(found.score, n=len(failed), failures=0)))
    return result


def _bands(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields all rows, then the rows of each model, GPU type, degree and band of GPU counts if there are several."""
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

    Repeated rows of one plan count as the fastest of them, because releases of the software may differ by more than
    plans do. Sets with a single plan are left out.
    """
    sets: dict[Hashable, dict[Hashable, list[tuple[float, float]]]] = {}
    for key, plan, *times in zip(keys, plans, predicted_s, measured_s, strict=True):
        if math.isfinite(times[0]):
            sets.setdefault(key, {}).setdefault(plan, []).append((times[0], times[1]))
    result = []
    for members in sets.values():
        if len(members) > 1:
            best = [tuple(np.min(times, axis=0).tolist()) for times in members.values()]
            fastest = min(best, key=lambda times: times[0])
            result.append(fastest[1] / min(measured for _, measured in best) - 1.0)
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
            "reason": [reasons.get(index, "") for index in range(len(file.rows))],
        }
    )
    for group in found:
        seconds, best = group.best(choose(group.machine, group.software), search_loss(group.software.name))
        rows.loc[group.rows, "time_s"] = seconds
        rows.loc[group.rows, "ideal_s"] = _ideal_s(group)[best]
    rows["baseline_s"] = _baseline_s(rows["ideal_s"].to_numpy(), rows["iter_time_s"].to_numpy())
    rows.loc[rows["time_s"].notna(), "reason"] = ""
    groups = [("all", rows)]
    for key, column in (("family", "model"), ("gpu", "gpu_type")):
        groups += [(f"{key}={value}", members) for value, members in rows.groupby(column, sort=False)]
    result = []
    for name, members in groups:
        baseline = _accuracy(members, "baseline_s", "iter_time_s").mape
        figures = {"regret_mean": math.nan, "regret_max": math.nan, "baseline_mape": baseline, "banded": 0}
        result.append(_group(name, members, "time_s", "iter_time_s", kind="time", **figures))
    return result


def _plan_reports(file: PlanReports, _: Choose) -> list[ScoredGroup]:
    """Scores times, peaks of memory and verdicts of reported plans, each for all software and by software.

    right: verdicts that are as reported; undecided: those that the band leaves open (`may not fit`). in_band: measured
    values within the printed band. width: median ratio of a band's ends.
    """
    rows = reported(file)
    result = []
    for title, predicted, measured in (("time", "time_s", "iter_time_s"), ("memory", "peak_bytes", "peak_mem_bytes")):
        for name, members in _by_software(rows[np.isfinite(rows[measured])]):
            low, high = members[f"{title}_low"], members[f"{title}_high"]
            bands = {
                "in_band": int(members[measured].between(low * members[predicted], high * members[predicted]).sum()),
                "width": float((high / low).median()),
            }
            result.append(_group(f"{title}: {name}", members, predicted, measured, kind=title, banded=0, **bands))
    for name, members in _by_software(rows[rows["fits"].notna()].assign(none=math.nan)):
        right = (members["verdict"] == np.where(members["fits"].astype(bool), Verdict.FITS, Verdict.NOT)).sum()
        counts = {"right": int(right), "undecided": int((members["verdict"] == Verdict.MAY).sum())}
        found = _group(f"verdict: {name}", members, "none", "none", kind="verdict", banded=0, **counts)
        failed = int((members["reason"] != "").sum())
        result.append(replace(found, score=replace(found.score, n=len(members), failures=failed)))
    return result


def reported(file: PlanReports) -> pd.DataFrame:
    """The columns of `PlanReport`, and what is predicted: time_s, peak_bytes, the ends of their bands as factors,
    verdict and family; or the reason why nothing is.
    """
    return pd.DataFrame([{**asdict(row), **_reported(row)} for row in file.rows])


def _by_software(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields all rows, then those of each software."""
    if len(rows):
        yield "all", rows
    for name, members in rows.groupby("software", sort=True):
        yield str(name), members


def _reported(report: PlanReport) -> dict[str, Any]:
    """Predicts a report's plan, or the best that has its degrees: time, allocator's peak, verdict, and bands."""
    missing = {"time_s": math.nan, "peak_bytes": math.nan, "verdict": "", "reason": "", "family": ""}
    missing |= dict.fromkeys(("time_low", "time_high", "memory_low", "memory_high"), math.nan)
    try:
        found = asked(report.settings)
        fit = fit_of(found)
    except InputError as error:
        return {**missing, "reason": str(error)}
    (answer,) = found.answers
    room = answer.memory_band
    time = time_band(answer.table.machine, answer.software, found.model.architecture, fit.plan.gpus)
    return {
        "time_s": fit.step_time_s,
        "peak_bytes": float(fit.needs.total[0]),
        "verdict": fit.verdict,
        "reason": "",
        "family": family_name(found.model.architecture),
        **{"time_low": time.low, "time_high": time.high, "memory_low": room.low, "memory_high": room.high},
    }


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all-reduce": communication.all_reduce_s,
    "all-gather": communication.all_gather_s,
    "reduce-scatter": communication.reduce_scatter_s,
    "all-to-all": communication.all_to_all_s,
}


def _collectives(file: Collectives, _: Choose) -> list[ScoredGroup]:
    """Scores single collectives by GPU type, operation and ranks. Predictions exclude the overhead of a framework."""
    if not file.rows:
        return []
    rows = pd.DataFrame(file.rows)
    rows = rows[rows["operation"].isin(COLLECTIVES)].assign(model=rows["operation"])
    result = []
    group: Any
    for group, members in rows.groupby(["gpu_type", "operation", "ranks", "per_node"], sort=False):
        gpu_type, operation, ranks, per_node = group
        time_s, reason = np.full(len(members), np.nan), ""
        try:
            links = links_for(machine_named(gpu_type))
            time_s = COLLECTIVES[operation](members["nbytes"].to_numpy(), ranks, per_node, links)
        except InputError as error:
            reason = str(error)
        name = f"{gpu_type} {operation} ranks={ranks} per node={per_node}"
        both = members.assign(predicted_s=time_s, reason=reason)
        result.append(_group(name, both, "predicted_s", "time_s", kind="collective"))
    return result


# Step times of an application: finds the model that predicts them, and scores it.


Models = Mapping[str, Mapping[str, Calibrated]]
"""Fitted step-time models by application and GPU type."""


def by_type(files: Sequence[StepTimes]) -> dict[str, dict[str, ObservedSteps]]:
    """Joins all rows of each model and GPU type. Raises InputError, naming the files, if a fit needs more rows."""
    groups: dict[tuple[str, str], list[StepTimes]] = {}
    for file in files:
        groups.setdefault((file.model, gpu_type_named(file.gpu_type)), []).append(file)
    result: dict[str, dict[str, ObservedSteps]] = {}
    for (model, gpu_type), parts in groups.items():
        profile = joined([file.profile for file in parts])
        if len(profile) < MIN_ROWS:
            raise InputError(
                f"{', '.join(str(file.path) for file in parts)}: too few rows to fit {model} on {gpu_type}; "
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
    """Returns the step-time model for a file, and its source in one phrase.

    A fit to the --calibrate files is preferred to the catalog; a missing GPU type is predicted by the most similar one.
    Raises InputError if neither the fit nor the catalog knows the application.
    """
    gpu_type, source = gpu_type_named(file.gpu_type), "the shipped catalog"
    if calibrated is not None and file.model in calibrated:
        known, source = calibrated[file.model], "a fit to the --calibrate files"
    else:
        if calibrated is not None:
            fitted = [f"{model} on {'/'.join(sorted(gpu_types))}" for model, gpu_types in sorted(calibrated.items())]
            missing = f"no --calibrate file measures {file.model} (they measure {', '.join(fitted)}); "
            source = missing + source
            if file.model not in model_names():
                raise InputError(
                    f"{file.path}: {missing}nor is it in the catalog. Give --calibrate a file of {file.model}, "
                    "or name the model with --model."
                )
        known = {name: profile.calibrated for name, profile in load_model(file.model).gpu_types.items()}
    if gpu_type in known:
        return known[gpu_type], source
    nearest = nearest_type(gpu_type, known)
    model, factor = transferred(known[nearest], nearest, gpu_type)
    scaling = f"time per sample × {factor:.3g} by memory bandwidth"
    if factor == 1.0:
        scaling = f"unscaled: no data sheet of {gpu_type}"
    source += f", transferred from {nearest} as {gpu_type} is not in it ({scaling}; all-reduces as on {nearest})"
    return model, source


def step_scores(file: StepTimes, model: Calibrated) -> list[ScoredGroup]:
    """Scores the whole file as `all`, then each band of nodes and GPUs that occurs in it."""
    predicted_s = model.step_time(file.nodes, file.gpus, file.local_batch, file.crowd)
    counts = zip(file.nodes.tolist(), file.gpus.tolist(), strict=True)
    names = np.array([f"nodes={nodes} gpus={band(gpus, STEP_BANDS)}" for nodes, gpus in counts])
    order = np.lexsort((file.gpus, file.nodes))
    groups = {"all": np.ones(len(file), dtype=bool)}
    groups |= {name: names == name for name in dict.fromkeys(names[order].tolist())}
    return [
        ScoredGroup(
            name, file.model, file.gpu_type, accuracy(predicted_s[rows], file.step_time_s[rows]), {"kind": "time"}
        )
        for name, rows in groups.items()
    ]


# Fits the planner's constants to measured step times by robust least squares of the times' logarithms, with a prior
# around the starting values.
#
# Residuals are log(predicted ÷ measured) under a soft-L1 loss, so that models of all sizes count equally and outliers
# have little influence. The total weight of a case is fixed, so that long files do not dominate short ones.


LOSS_SCALE = 0.05
"""Residual, in log(predicted ÷ measured), beyond which the soft-L1 loss grows linearly."""
PRIORS = read_yaml(CATALOG / "priors.yaml")
SPREAD: Mapping[str, float] = PRIORS["spread"]
"""Prior standard deviation of each constant's logarithm around its starting value."""
UPPER_BOUNDS: Mapping[str, float] = {**PRIORS["largest"], "network_efficiency": 1.0 / RDMA.efficiency}
"""Largest plausible values; for a network, the data sheet's rate."""
PRIOR_WEIGHT = 0.003
"""Cost of moving a constant by one prior standard deviation, relative to the mean loss of a row."""


def soft_l1(residuals: Floats, scale: float) -> Floats:
    """Residuals whose squares are the soft-L1 loss: as the given ones up to `scale`, beyond it as their square root."""
    result: Floats = np.sqrt(2.0 * (np.sqrt(1.0 + (residuals / scale) ** 2) - 1.0)) * scale
    return result


@dataclass(frozen=True, slots=True)
class Fitted:
    """Fitted constants by owner. at_bounds: `owner.name` of the constants that ended at a bound."""

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

    A shared constant starts from the first owner's value. keep: by case, a mask of the rows to fit to; None for all.
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
        tried = constants(x)
        parts = []
        for index, case in enumerate(cases):
            rows = slice(None) if keep is None else keep[index]
            residuals = case.residuals(tried[case.owner])[rows]
            weight = case.weight[rows]
            if len(residuals) and weight.sum() > 0:
                parts.append(np.sqrt(case.share * weight / weight.sum()) * soft_l1(residuals, LOSS_SCALE))
        return np.concatenate([*parts, PRIOR_WEIGHT * (x - centre) / spread])

    first = np.clip(centre, low + 1e-9, high - 1e-9)
    found = least_squares(costs, first, bounds=(low, high), diff_step=1e-3, max_nfev=40)
    at_bound = np.minimum(found.x - low, high - found.x) < 1e-3
    at_bounds = tuple(f"{owner or 'all'}.{name}" for (owner, name), hit in zip(names, at_bound, strict=True) if hit)
    return Fitted(constants(found.x), at_bounds)


# Refits a few of the planner's constants to a user's own training times; the others keep their shipped values.


FACTORS = {"network": "network_efficiency", "software": "gemm_efficiency"}
"""Short names that users type for two constants: the speed of the network, and of the software."""
MIN_REFIT_ROWS = 3
REFIT_PARTS = 5
"""Number of random parts for cross-validation: each part is predicted by a fit to the others."""


class Refit(NamedTuple):
    """Refitted constants, the number of rows that they were fitted to, and the mean absolute error on these rows.

    held_out: (rows,), log(measured ÷ predicted), where each row is predicted by a fit to other rows.
    """

    constants: Constants
    rows: int
    mean_error: float
    held_out: Floats


def refitted(files: Sequence[TrainingTimes], names: str) -> dict[tuple[str, str], Refit]:
    """Refits constants per software and GPU type in the files. GPUs that differ only in memory size share constants.

    names: constants to fit, separated by commas. Pairs with fewer than `MIN_REFIT_ROWS` rows are left out, unless all
    have. Raises InputError for unknown names and too few rows.
    """
    wanted = [FACTORS.get(name.strip(), name.strip()) for name in names.split(",")]
    for name in wanted:
        if name not in SPREAD:
            raise unknown("constant", name, [*FACTORS, *SPREAD])
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
    timed = {pair: int(sum((case.iter_time_s > 0).sum() for case in members)) for pair, members in cases.items()}
    if timed and max(timed.values()) < MIN_REFIT_ROWS:
        got = ", ".join(f"{rows} of {software} on {gpu_type}" for (software, gpu_type), rows in timed.items())
        raise InputError(f"too few rows to fit; got {got}, expected {MIN_REFIT_ROWS} or more.")
    result = {}
    for (software, gpu_type), members in cases.items():
        keep, rows = [case.iter_time_s > 0 for case in members], timed[software, gpu_type]
        if rows < MIN_REFIT_ROWS:
            continue
        shared = [replace(case, share=len(case) / rows) for case in members]
        start = constants_for(members[0].machine, members[0].software)
        found = fit(shared, wanted, {}, {"": start}, keep).constants[""]
        residuals = _residuals(shared, found, keep)
        part_of = np.full(sum(map(len, members)), -1)
        part_of[np.concatenate(keep)] = np.random.default_rng(0).permutation(rows) % min(rows, REFIT_PARTS)
        held_out = []
        for part in range(part_of.max() + 1):
            left_out = np.split(part_of == part, np.cumsum([len(case) for case in members])[:-1])
            rest = [kept & ~mask for kept, mask in zip(keep, left_out, strict=True)]
            held_out.append(-_residuals(shared, fit(shared, wanted, {}, {"": start}, rest).constants[""], left_out))
        error = float(np.abs(np.expm1(residuals)).mean())
        result[software, gpu_type] = Refit(found, rows, error, np.concatenate(held_out))
    return result


def _residuals(cases: Sequence[Case], constants: Constants, masks: Sequence[NDArray[np.bool_]]) -> Floats:
    return np.concatenate([case.residuals(constants)[mask] for case, mask in zip(cases, masks, strict=True)])


def constants_from(files: Sequence[TrainingTimes], names: str) -> tuple[Choose, str]:
    """Returns the constants to predict with, refitted to `files` if there are any, and their source in a phrase."""
    if not files:
        return constants_for, "the shipped constants"
    found = refitted(files, names)

    def choose(machine: Machine, software: Software) -> Constants:
        known = found.get((software.name, constants_like(machine.gpu)))
        return known.constants if known else constants_for(machine, software)

    rows = sum(refit.rows for refit in found.values())
    return choose, f"the shipped constants, {names} refitted to {rows} rows"
