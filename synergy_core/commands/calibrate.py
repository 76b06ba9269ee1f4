"""Fits a model's constants to measured step times, and prints them with their error and uncertainty.

FILE: a CSV of step times as for `validate`, with `sync_time`. Files of one application and GPU type are fitted
together. The fit is robust: a measurement that all others contradict has next to no say. --out writes the catalog's
form: put it into synergy_core/catalog/models/, and policies and `validate` use it. Training times of parallel plans
(synergy_core/measurements/training_times.py) refit the planner's constants named by --constants; the others stay, and
`plan constants=FILE` uses what --out wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.commands.validate import CONSTANTS_HELP, add_naming

if TYPE_CHECKING:
    from synergy_core.goodput.calibration import Calibrated
    from synergy_core.goodput.fit import Fits
    from synergy_core.goodput.observations import ObservedSteps
    from synergy_core.measurements.training_times import TrainingTimes

SUMMARY = "fit the constants of an application on a GPU type to measurements"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="measurements to fit")
    parser.add_argument("--out", type=Path, help="write the catalog's form; a folder if there are several applications")
    parser.add_argument("--constants", default="network,software", help=CONSTANTS_HELP)
    add_naming(parser)


def run(chosen: argparse.Namespace) -> int:
    """Prints the constants; writes the catalog form."""
    from synergy_core.catalog.writing import as_yaml, measured_gpu_type
    from synergy_core.commands._output import write_whole
    from synergy_core.commands._predictor import by_type
    from synergy_core.errors import InputError
    from synergy_core.measurements import read
    from synergy_core.measurements.step_times import StepTimes
    from synergy_core.measurements.training_times import TrainingTimes

    every = [read(path, model=chosen.model, gpu_type=chosen.gpu_type) for path in chosen.files]
    plans = [file for file in every if isinstance(file, TrainingTimes)]
    if plans:
        _plans(plans, chosen)
    files = [file for file in every if isinstance(file, StepTimes)]
    for file in every:
        if not isinstance(file, TrainingTimes | StepTimes):
            raise InputError(f"{file.path}: holds no training times; a fit needs some.")
    if plans and files and chosen.out:
        raise InputError("--out takes either step times of applications or training times of plans, not both at once.")
    fitted: dict[str, dict[str, Any]] = {}
    for model, gpu_types in by_type(files).items():
        for gpu_type, profile in gpu_types.items():
            entry, best, fits = measured_gpu_type(profile, robust_pollux=True)
            fitted.setdefault(model, {})[gpu_type] = entry
            _print(model, gpu_type, profile, entry, best, fits)
    if chosen.out and files:
        for model, gpu_types in fitted.items():
            path = chosen.out / f"{model}.yaml" if len(fitted) > 1 else chosen.out
            comment = "Fitted by python -m synergy_core calibrate " + " ".join(str(each) for each in chosen.files)
            write_whole(path, as_yaml(_with_facts(model, gpu_types, chosen.files), comment))
            print(f"wrote {path}")
    return 0


def _plans(files: list[TrainingTimes], chosen: argparse.Namespace) -> None:
    """Refits the planner's constants; prints them beside the shipped ones, and writes the catalog form."""
    from synergy_core.catalog.writing import as_yaml
    from synergy_core.commands._output import table, write_whole
    from synergy_core.commands._refit import catalog_form, refitted

    found = refitted(files, chosen.constants)
    for (software, gpu_type), each in found.items():
        print(
            f"{software} on {gpu_type}: {each.rows} rows, {chosen.constants} refitted, mean error {each.mean_error:.1%}"
        )
        constants = each.constants
        values = [[name, f"{getattr(constants, name):.4g}"] for name in constants.__dataclass_fields__]
        print(table(("constant", "value"), values))
        print()
    if chosen.out:
        for software, content in (forms := catalog_form(found)).items():
            path = chosen.out / f"{software}.yaml" if len(forms) > 1 else chosen.out
            comment = "Fitted by python -m synergy_core calibrate " + " ".join(str(each) for each in chosen.files)
            write_whole(path, as_yaml(content, comment))
            print(f"wrote {path}")


def _with_facts(model: str, gpu_types: dict[str, Any], paths: list[Path]) -> dict[str, Any]:
    """The fitted types under what the catalog knows of the application; null where it knows nothing."""
    from synergy_core.catalog import facts

    return {**facts(model), "gpu_types": gpu_types, "sources": [f"Fitted to {', '.join(str(each) for each in paths)}."]}


def _print(
    model: str, gpu_type: str, profile: ObservedSteps, entry: dict[str, Any], best: Calibrated, fits: Fits
) -> None:
    """The constants of both forms, their error, and how sure the fit is where it was measured and beyond."""
    import numpy as np

    from synergy_core.commands._output import table
    from synergy_core.goodput.throughput import PARAMETERS

    print(f"{model} on {gpu_type}: {len(profile)} rows, up to {entry['nodes']} nodes and {entry['gpus']} GPUs")
    sd = fits.parameter_sd()[0]
    pollux = dict(zip(PARAMETERS, entry["pollux"]["theta"], strict=True))
    rows = [
        [name, f"{value:.4g}", f"{sd[at]:.2g}", f"{pollux[name]:.4g}" if name in pollux else "–"]
        for at, (name, value) in enumerate(zip(best.form.parameters, best.theta.tolist(), strict=True))
    ]
    print(table(("constant", best.form.name, "± (1 sd)", "pollux"), rows))
    for name in ("calibrated", "pollux"):
        error = entry[name]["error"]
        form = best.form.name if name == "calibrated" else name
        print(
            f"  {form} form: mean error {error['mape']:.1%}, median {error['median']:.1%}, p90 {error['p90']:.1%}, "
            f"max {error['max']:.1%} of {error['n']} rows"
        )
    batch = float(np.median(np.asarray(profile.local_batch, dtype=float)))
    nodes, gpus = entry["nodes"], entry["gpus"]
    shapes = [(1, 1), (nodes, gpus), (max(2 * nodes, 2), 2 * gpus)]
    sure = fits.log_step_time_sd(*np.array([(n, m, batch) for n, m in shapes]).T)[0]
    told = "; ".join(
        f"{m} on {n}: {best.step_time(n, m, batch):.4g} s ± {each:.0%}"
        for (n, m), each in zip(shapes, sure.tolist(), strict=True)
    )
    print(f"  step predicted at {batch:g} samples per GPU (± 1 sd), GPUs on nodes: {told}\n")
