"""Which model predicts a file, and what to tell about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from synergy_core.catalog import load_model, model_names
from synergy_core.catalog.sheets import gpu_type_named
from synergy_core.catalog.transfer import nearest_type, transferred
from synergy_core.errors import InputError
from synergy_core.goodput.calibration import LEAST_ROWS, Calibrated, calibrate
from synergy_core.goodput.forms import Form
from synergy_core.goodput.observations import ObservedSteps, joined
from synergy_core.measurements.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model, and in one phrase where it comes from."""

    model: Calibrated
    source: str


Models = Mapping[str, Mapping[str, Calibrated]]


def by_type(files: Sequence[StepTimes]) -> dict[str, dict[str, ObservedSteps]]:
    """All rows by model and GPU type. Raises InputError, naming the files, where they are too few to fit."""
    groups: dict[str, dict[str, list[StepTimes]]] = {}
    for each in files:
        groups.setdefault(each.model, {}).setdefault(gpu_type_named(each.gpu_type), []).append(each)
    result: dict[str, dict[str, ObservedSteps]] = {}
    for model, gpu_types in groups.items():
        for gpu_type, parts in gpu_types.items():
            profile = joined([each.profile for each in parts])
            if len(profile) < LEAST_ROWS:
                paths = ", ".join(str(each.path) for each in parts)
                raise InputError(
                    f"{paths}: too few points to fit {model} on {gpu_type}; got {len(profile)}, "
                    f"expected {LEAST_ROWS} or more."
                )
            result.setdefault(model, {})[gpu_type] = profile
    return result


def calibrated_on(files: Sequence[StepTimes], form: Form | None) -> Models:
    """A robust fit per model and GPU type, in that form or `calibrate`'s choice.

    Raises InputError, naming the files, for too few rows.
    """
    return {
        model: {gpu_type: calibrate(profile, form=form)[0] for gpu_type, profile in gpu_types.items()}
        for model, gpu_types in by_type(files).items()
    }


def predictor(file: StepTimes, calibrated: Models | None) -> Prediction:
    """The model for a file: what --calibrate gave, else the catalog; of its own GPU type, else the most like it.

    Raises InputError if nothing is known of the application.
    """
    gpu_type = gpu_type_named(file.gpu_type)
    told = ""
    if calibrated is not None:
        if file.model in calibrated:
            return _of_type(calibrated[file.model], gpu_type, "a fit to the --calibrate files")
        given = ", ".join(
            f"{model} on {'/'.join(sorted(gpu_types))}" for model, gpu_types in sorted(calibrated.items())
        )
        told = f"no --calibrate file measures {file.model} (they measure {given}); "
    if file.model not in model_names() and told:
        raise InputError(
            f"{file.path}: {told}nor does the catalog know it. Give --calibrate a file of {file.model}, "
            "or name the model with --model."
        )
    known = {name: each.calibrated for name, each in load_model(file.model).gpu_types.items()}
    return _of_type(known, gpu_type, f"{told}the shipped catalog")


def _of_type(known: Mapping[str, Calibrated], gpu_type: str, source: str) -> Prediction:
    if gpu_type in known:
        return Prediction(known[gpu_type], source)
    near = nearest_type(gpu_type, known)
    model, factor = transferred(known[near], near, gpu_type)
    how = (
        f"time per sample × {factor:.3g} by memory bandwidth"
        if factor != 1.0
        else f"unscaled: no data sheet of {gpu_type}"
    )
    told = f"transferred from {near} as {gpu_type} is not in it ({how}; all-reduces as on {near})"
    return Prediction(model, f"{source}, {told}")
