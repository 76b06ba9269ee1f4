"""Fitted constants in the catalog's form: what `calibrate --out` and bench/make_catalog.py write."""

from __future__ import annotations

from typing import Any

import numpy as np

from synergy_core.accuracy import Accuracy, accuracy
from synergy_core.arrays import Floats
from synergy_core.goodput.calibration import Calibrated, calibrate
from synergy_core.goodput.fit import Fits, fit
from synergy_core.goodput.forms import Form
from synergy_core.goodput.observations import ObservedSteps
from synergy_core.goodput.throughput import step_time

_DIGITS = 6


def measured_gpu_type(
    profile: ObservedSteps, *, form: Form | None = None, robust_pollux: bool = False
) -> tuple[dict[str, Any], Calibrated, Fits]:
    """The catalog's entry for one application on one GPU type, and the calibration behind it.

    form: of the calibration; None for `calibrate`'s choice. robust_pollux: whether Pollux's constants, too, are fitted
    robustly; policies' beliefs are not.
    """
    nodes, gpus, batch, step, crowd = (
        np.asarray(each, dtype=np.float64)
        for each in (profile.nodes, profile.gpus, profile.local_batch, profile.step_time_s, profile.crowd)
    )
    best, fits = calibrate(profile, form=form)
    theta = fit([profile], robust=robust_pollux).theta[0]
    content = {
        "min_local": int(batch.min()),
        "max_local": int(batch.max()),
        "nodes": int(nodes.max()),
        "gpus": int(gpus.max()),
        "pollux": {
            "theta": _rounded(theta),
            "error": _error(accuracy(step_time(theta, nodes, gpus, batch), step)),
        },
        "calibrated": {
            "form": best.form.name,
            "theta": _rounded(best.theta),
            "knots": _rounded(best.knots),
            "log_factors": [round(each, 4) for each in best.log_factors.tolist()],
            "alone_log_factor": round(best.alone_log_factor, 4),
            "error": _error(accuracy(best.step_time(nodes, gpus, batch, crowd), step)),
        },
    }
    return content, best, fits


def as_yaml(content: dict[str, Any], comment: str) -> str:
    """The text of a catalog file, under a comment."""
    import yaml  # type: ignore[import-untyped]

    body: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=118, allow_unicode=True)
    return "".join(f"# {line}\n" for line in comment.splitlines()) + body


def _rounded(values: Floats) -> list[float]:
    return [float(f"{each:.{_DIGITS}g}") for each in values.tolist()]


def _error(found: Accuracy) -> dict[str, float]:
    fractions = {name: round(getattr(found, name), 4) for name in ("mape", "median", "p90", "max")}
    return {"n": found.n, **fractions}
