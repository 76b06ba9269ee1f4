"""Fits the constants of step-time models to measurements, and prints them with their error and uncertainty.

FILE: a CSV of step times as for `validate`, with `sync_time`. Files of one application and GPU type are fitted
together. The fit is robust: outliers have almost no influence. --out writes a file in the catalog's format; once it is
in synergy_core/performance/catalog/models/, policies and `validate` use it. FILE may also hold training times of
parallel plans (commands/measurements/training_times.py): then the planner's constants named by --constants are
refitted, the others keep their shipped values, and `plan constants=FILE` reads the file that --out wrote.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from synergy_core.commands._settings import table, write_whole
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements.step_times import StepTimes
from synergy_core.commands.measurements.training_times import TrainingTimes
from synergy_core.commands.validate import CONSTANTS_HELP, add_naming
from synergy_core.errors import InputError
from synergy_core.performance.catalog import facts
from synergy_core.performance.goodput.calibration import Calibrated, accuracy, calibrate
from synergy_core.performance.goodput.fit import Fits, fit
from synergy_core.performance.goodput.throughput import PARAMETERS, Form, ObservedSteps, step_time
from synergy_core.performance.planner.bands import log_interval
from synergy_core.performance.planner.machine import constants_like
from synergy_core.units import Floats

SUMMARY = "fit the constants of an application on a GPU type to measurements"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="measurements to fit")
    parser.add_argument("--out", type=Path, help="write a catalog file; a folder, if there are several applications")
    parser.add_argument("--constants", default="network,software", help=CONSTANTS_HELP)
    add_naming(parser)


def run(chosen: argparse.Namespace) -> int:
    """Prints the fitted constants and writes them in the catalog's format."""
    from synergy_core.commands._scoring import by_type  # imports pandas

    measurements = [read(path, model=chosen.model, gpu_type=chosen.gpu_type) for path in chosen.files]
    plans = [file for file in measurements if isinstance(file, TrainingTimes)]
    steps = [file for file in measurements if isinstance(file, StepTimes)]
    forms = _refitted(plans, chosen.constants) if plans else {}
    for file in measurements:
        if not isinstance(file, TrainingTimes | StepTimes):
            raise InputError(f"{file.path}: nothing to fit; expected step times or training times of plans.")
    if plans and steps and chosen.out:
        raise InputError("--out takes files of step times or of training times of plans, not of both.")
    files = ", ".join(map(str, chosen.files))
    for model, gpu_types in by_type(steps).items():
        forms[model] = {**facts(model), "gpu_types": {}, "sources": [f"Fitted to {files}."]}
        for gpu_type, profile in gpu_types.items():
            entry, best, fits = measured_gpu_type(profile, robust_pollux=True)
            forms[model]["gpu_types"][gpu_type] = entry
            _print(f"{model} on {gpu_type}", profile, entry, best, fits)
    if chosen.out:
        comment = "Fitted by python -m synergy_core calibrate " + " ".join(map(str, chosen.files))
        for name, content in forms.items():
            path = chosen.out / f"{name}.yaml" if len(forms) > 1 else chosen.out
            write_whole(path, as_yaml(content, comment))
            print(f"wrote {path}")
    return 0


def _refitted(files: list[TrainingTimes], names: str) -> dict[str, dict[str, Any]]:
    """Refits and prints the planner's constants. Returns the content of catalog/constants/ by software."""
    from synergy_core.commands._scoring import refitted

    forms: dict[str, dict[str, Any]] = {}
    fits = refitted(files, names)
    pairs = {(each.software.name, constants_like(each.machine.gpu)) for file in files for each in file.cases()}
    for software, gpu_type in sorted(pairs - {*fits}):
        print(f"{software} on {gpu_type} is left out: too few rows with a time to fit; its constants stay as shipped\n")
    for (software, gpu_type), fitted in fits.items():
        constants = asdict(fitted.constants)
        low, high = log_interval(fitted.held_out, range(fitted.rows), mirrored=True)
        print(
            f"{software} on {gpu_type}: {fitted.rows} rows, {names} refitted, mean error {fitted.mean_error:.1%}; "
            f"9 in 10 rows left out of the fit took {math.exp(low):.2f} to {math.exp(high):.2f} times the prediction"
        )
        print(table(("constant", "value"), [[name, f"{value:.4g}"] for name, value in constants.items()]) + "\n")
        form = forms.setdefault(software, {"software": software, "gpu_types": {}})
        form["gpu_types"][gpu_type] = {
            "rows": fitted.rows,
            "mean_error": round(fitted.mean_error, 4),
            "band": {"low": round(low, 4), "high": round(high, 4), "rows": fitted.rows},
            "constants": {name: round(value, 9) for name, value in constants.items()},
        }
    return forms


def _print(name: str, profile: ObservedSteps, entry: dict[str, Any], best: Calibrated, fits: Fits) -> None:
    """Prints both forms' constants and errors, and predictions for 1 GPU, the most GPUs measured, and twice as many."""
    nodes, gpus = entry["nodes"], entry["gpus"]
    print(f"{name}: {len(profile)} rows, up to {nodes} nodes and {gpus} GPUs")
    pollux = dict(zip(PARAMETERS, entry["pollux"]["theta"], strict=True))
    constants = zip(best.form.parameters, best.theta.tolist(), fits.parameter_sd()[0].tolist(), strict=True)
    rows = [
        [name, f"{value:.4g}", f"{sd:.2g}", f"{pollux[name]:.4g}" if name in pollux else "–"]
        for name, value, sd in constants
    ]
    print(table(("constant", best.form.name, "± (1 sd)", "pollux"), rows))
    for form, key_of_form in ((best.form.name, "calibrated"), ("pollux", "pollux")):
        error = entry[key_of_form]["error"]
        shown = ", ".join(f"{label} {error[key]:.1%}" for label, key in _ERRORS.items())
        print(f"  {form} form: {shown} of {error['n']} rows")
    batch = float(np.median(np.asarray(profile.local_batch, dtype=float)))
    shapes = [(1, 1), (nodes, gpus), (max(2 * nodes, 2), 2 * gpus)]
    log_sd = fits.log_step_time_sd(*np.array([(n, m, batch) for n, m in shapes]).T)[0]
    predictions = "; ".join(
        f"{m} on {n}: {best.step_time(n, m, batch):.4g} s ± {sd:.0%}"
        for (n, m), sd in zip(shapes, log_sd.tolist(), strict=True)
    )
    print(f"  step predicted at {batch:g} samples per GPU (± 1 sd), GPUs on nodes: {predictions}\n")


# Fitted constants in the catalog's format, as `calibrate --out` and bench/fits.py write them.


_DIGITS = 6
_ERRORS = {"mean error": "mape", "median": "median", "p90": "p90", "max": "max"}
"""Printed label of each error statistic → its field in `Accuracy`."""


def measured_gpu_type(
    profile: ObservedSteps, *, form: Form | None = None, robust_pollux: bool = False
) -> tuple[dict[str, Any], Calibrated, Fits]:
    """Fits one application on one GPU type. Returns the catalog's entry and the fits that it was made from.

    form: the form to calibrate; None for `calibrate`'s choice. robust_pollux: whether Pollux's constants are also
    fitted robustly; policies fit these constants online and not robustly.
    """
    columns = (profile.nodes, profile.gpus, profile.local_batch, profile.step_time_s, profile.crowd)
    nodes, gpus, batch, step_s, crowd = (np.asarray(each, dtype=np.float64) for each in columns)
    best, fits = calibrate(profile, form=form)
    theta = fit([profile], robust=robust_pollux).theta[0]

    def rounded(values: Floats) -> list[float]:
        return [float(f"{each:.{_DIGITS}g}") for each in values.tolist()]

    content = {
        "min_local": int(batch.min()),
        "max_local": int(batch.max()),
        "nodes": int(nodes.max()),
        "gpus": int(gpus.max()),
        "pollux": {"theta": rounded(theta), "error": rounded_errors(step_time(theta, nodes, gpus, batch), step_s)},
        "calibrated": {
            "form": best.form.name,
            "theta": rounded(best.theta),
            "knots": rounded(best.knots),
            "log_factors": [round(each, 4) for each in best.log_factors.tolist()],
            "alone_log_factor": round(best.alone_log_factor, 4),
            "error": rounded_errors(best.step_time(nodes, gpus, batch, crowd), step_s),
        },
    }
    return content, best, fits


def rounded_errors(predicted_s: Floats, measured_s: Floats) -> dict[str, float]:
    """The errors of predictions as the catalog stores them, rounded."""
    score = accuracy(predicted_s, measured_s)
    return {"n": score.n, **{name: round(getattr(score, name), 4) for name in _ERRORS.values()}}


def as_yaml(content: dict[str, Any], comment: str) -> str:
    """Formats the content of a catalog file as YAML, below a comment."""
    import yaml  # type: ignore[import-untyped]

    body: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=118, allow_unicode=True)
    return "".join(f"# {line}\n" for line in comment.splitlines()) + body
