"""Bands of the planner's predictions: quantiles of the errors of held-out rows, and how many rows they hold.

`planner` and `arena` collect the rows and write the entries; synergy_core/planner/bands.py reads them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from synergy_core.goodput.calibration import Accuracy
from synergy_core.planner.bands import ANY, COVERAGE, MIN_MODELS, log_interval
from synergy_core.planner.machine import Constants

MODEL, FILE, NODE, SOFTWARE, GPU_TYPE = "family out", "file out", "one node only", "software out", "GPU type out"
"""What a fit did not see: the row's model; its file; rows on several nodes; its software on its GPU type; its software
on this GPU type, though on another."""
SMALLER = "smaller"
"""Rows of `MODEL` and `FILE` whose model is smaller than every other that their fit read."""
MEASURED = "in sample"
"""Rows as predicted by the fit that read them."""
MIN_PLANS = 4
"""Fewest rows of a model that tell its own error from that of its plans."""
MIN_TESTS = 19
"""Fewest tests of memory whose errors promise 5 % beyond either end of a band."""


class HeldOut(NamedTuple):
    """A row that a fit did not see. error: log(measured ÷ predicted)."""

    how: str
    fit: str
    file: str
    software: str
    gpu: str
    family: str
    precision: str
    model: str
    parameters: float
    gpus: int
    error: float


def figures(score: Accuracy) -> list[str]:
    """The cells of a printed score: n, mean, median, p90 and max of the errors, and the bias."""
    return [
        str(score.n),
        *(f"{each:.1%}" for each in (score.mape, score.median, score.p90, score.max)),
        f"{score.bias:+.1%}",
    ]


def fitted_entry(
    fit: str, constants: Constants, paths: Mapping[str, Path], errors: Mapping[str, Mapping[str, Accuracy]]
) -> dict[str, Any]:
    """A fit's entry in the catalog. paths: of the files that it read; errors: by file, then by what was left out."""
    return {
        "constants": {name: float(f"{value:.4g}") for name, value in asdict(constants).items()},
        "fit": fit,
        "inputs_sha256": {file: hashlib.sha256(path.read_bytes()).hexdigest() for file, path in paths.items()},
        "errors": {
            file: {
                how: {"n": score.n, "mape": round(score.mape, 4), "median": round(score.median, 4)}
                for how, score in scores.items()
            }
            for file, scores in errors.items()
        },
    }


Key = Callable[[HeldOut], Any]
GROUPS: dict[str, tuple[str, Key, str]] = {
    "GPU type": (GPU_TYPE, lambda row: (row.software, row.gpu), "rows predicted by a fit to another GPU type"),
    "software": (SOFTWARE, lambda row: row.software, "rows predicted without a fit to their software on the GPU type"),
    "GPUs": (NODE, lambda row: row.file, "rows on several nodes, predicted by a fit to single nodes"),
    "size": (SMALLER, lambda row: row.file, "rows of models smaller than any that their fit saw"),
}
"""By what was not measured: how rows that tell the error were held out, which of them count as one, a phrase."""


def of_model(row: HeldOut) -> tuple[str, str]:
    return row.file, row.model


def is_smaller(row: HeldOut, rows: Iterable[HeldOut], key: Key) -> bool:
    """Whether the row's model is smaller than all of `rows` that its fit reads, without the row's group."""
    sizes = [each.parameters for each in rows if each.fit == row.fit and key(each) != key(row)]
    return bool(sizes) and row.parameters < min(sizes)


SIZED: dict[str, Key] = {MODEL: of_model, FILE: lambda row: row.file}
"""Which rows were held out together, where a fit saw every size but theirs."""


def smaller(rows: Sequence[HeldOut]) -> list[HeldOut]:
    """The rows of `SMALLER`."""
    measured = each_model(rows)
    return [row._replace(how=SMALLER) for row in rows if row.how in SIZED and is_smaller(row, measured, SIZED[row.how])]


def each_model(rows: Iterable[HeldOut]) -> list[HeldOut]:
    """One row of every model that a fit read."""
    return list({(row.fit, of_model(row)): row for row in rows if row.how == MEASURED}.values())


def pools(rows: Sequence[HeldOut], software: str, gpu: str, family: str) -> list[tuple[list[HeldOut], str]]:
    """Rows and what they are, in words: the nearest, and as long as those are of fewer than `MIN_MODELS` models also
    the next nearest."""
    result = []
    for words, wanted in (
        (f"{family} models under {software} on {gpu}", {"software": software, "gpu": gpu, "family": family}),
        (f"{family} models on {gpu}", {"gpu": gpu, "family": family}),
        (f"{family} models", {"family": family}),
        ("all models", {}),
    ):
        if found := [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]:
            result.append((found, words))
            if len(set(map(of_model, found))) >= MIN_MODELS:
                break
    return result


def nearest(rows: Sequence[HeldOut], software: str, gpu: str, family: str) -> dict[str, Any]:
    """The band of step times of the nearest rows: the widest of the pools.

    A pool of fewer than `MIN_MODELS` models is filled up with the mean square error of the next wider pool, and its
    band is that of Student's t with as many degrees of freedom (the moderated t-statistic of Smyth, Statistical
    Applications in Genetics and Molecular Biology 3(1), 2004).
    """
    *nearer, widest = pools(rows, software, gpu, family)
    bands = [told(*widest, mirrored=True)]
    square = (bands[0]["high"] / stats.norm.ppf((1.0 + COVERAGE) / 2.0)) ** 2
    for found, of in reversed(nearer):
        models: dict[Any, list[float]] = {}
        for row in found:
            models.setdefault(of_model(row), []).append(row.error**2)
        own = sum(float(np.mean(each)) for each in models.values())
        square = (own + (MIN_MODELS - len(models)) * square) / MIN_MODELS
        end = round(float(stats.t.ppf((1.0 + COVERAGE) / 2.0, MIN_MODELS)) * math.sqrt(square), 4)
        bands.append({"low": -end, "high": end, "rows": len(found), "of": of})
    return max(bands, key=lambda band: float(band["high"]))


def told(rows: Sequence[HeldOut], of: str, key: Key = of_model, *, mirrored: bool = False) -> dict[str, Any]:
    """The entry of a catalog file for the errors of these rows. of: which rows they are, in words."""
    errors, groups = np.array([row.error for row in rows]), [str(key(row)) for row in rows]
    low, high = log_interval(errors, groups, mirrored=mirrored)
    return {"low": round(low, 4), "high": round(high, 4), "rows": len(rows), "of": of}


def entry(rows: Sequence[HeldOut], software: str, gpu: str) -> dict[str, Any]:
    """Of one software on one GPU type, for its file of constants: what was measured, and a band for each family."""
    own = [row for row in rows if (row.software, row.gpu) == (software, gpu)]
    if not own:
        return {}
    fits = {row.fit for row in own}
    sizes = [row.parameters for row in each_model(rows) or rows if row.fit in fits]
    families = sorted({row.family for row in own})
    seen = [row for row in rows if row.how == MODEL] or [row for row in rows if row.how == GPU_TYPE]
    return {
        "measured": {
            "gpus": max(row.gpus for row in own),
            "smallest_parameters": int(min(sizes)),
            "precisions": sorted({row.precision for row in own}),
            "families": families,
        },
        "bands": {family: nearest(seen, software, gpu, family) for family in families},
    }


def shared(rows: Sequence[HeldOut], memory: Sequence[HeldOut]) -> dict[str, Any]:
    """Bands that belong to no fit, for transfer.yaml: by family, for what was not measured, and of memory."""
    seen = [row for row in rows if row.how == MODEL]
    families = sorted({row.family for row in seen})
    rows = [*rows, *smaller(rows)]
    result: dict[str, Any] = {
        "step time": {family: nearest(seen, "", "", family) for family in (*families, ANY)},
        **{
            name: told([row for row in rows if row.how == how], words, key, mirrored=True)
            for name, (how, key, words) in GROUPS.items()
        },
        "memory": {ANY: told(memory, "all models")},
    }
    for software, family in sorted({(name, row.family) for row in memory for name in ("", row.software)}):
        found = memory_pool(memory, software, family)
        if not software or {row.software for row in found} == {software}:
            under = f" under {software}" if software else ""
            result["memory"][f"{software} {family}".strip()] = told(found, f"{family} models{under}")
    return result


def memory_pool(rows: Sequence[HeldOut], software: str, family: str) -> list[HeldOut]:
    """Rows that make a band of memory: of the family under the software; else of the family; else all."""
    kin = [row for row in rows if row.family == family]
    own = [row for row in kin if row.software == software]
    return next((found for found in (own, kin) if len(set(map(of_model, found))) >= MIN_TESTS), list(rows))


def parts_of_errors(rows: Iterable[HeldOut]) -> tuple[float, float, int]:
    """Standard deviations of errors that all plans of a model share on a GPU type, and of a plan's own beside that; and
    how many models they are of: those with `MIN_PLANS` rows or more.

    By medians of absolute deviations (× 1.4826 for a normal distribution), so that a few odd rows do not decide; each
    model counts alike.
    """
    groups: dict[Any, list[float]] = {}
    for row in rows:
        if row.how == MODEL:
            groups.setdefault((row.software, row.gpu, row.model), []).append(row.error)
    errors = [np.array(each) for each in groups.values() if len(each) >= MIN_PLANS]
    own = [stats.median_abs_deviation(each) for each in errors]
    shared = [abs(np.median(each)) for each in errors]
    return 1.4826 * float(np.median(shared)), 1.4826 * float(np.median(own)), len(errors)


def coverage(rows: Sequence[HeldOut], memory: Sequence[HeldOut]) -> list[dict[str, Any]]:
    """Of each file, and family: how many rows lie inside bands made without their group, by what a fit did not see.

    Without the model, the file, the software, or the software on the GPU type; rows on more GPUs than the fit saw:
    without the file. inside: fraction of the rows; alike: the same with each model counting alike; low, high: ends of
    the median band; width: geometric mean of high ÷ low.
    """
    base, measured, every = [row for row in rows if row.how == MODEL], each_model(rows), [*rows, *smaller(rows)]
    keys = {**SIZED, **{how: key for how, key, _ in GROUPS.values()}}
    result = []

    def count(kind: str, of: str, scored: Sequence[HeldOut], base: Sequence[HeldOut], key: Key) -> None:
        @cache
        def ends(group: Any, software: str, gpu: str, family: str, is_small: bool) -> tuple[float, float]:
            rest = [other for other in base if key(other) != group]
            if kind not in keys:
                found = memory_pool(rest, software, family)
                return log_interval(np.array([other.error for other in found]), [str(of_model(o)) for o in found])
            unknown = {kind, SMALLER if is_small else "", "" if family in {o.family for o in rest} else SOFTWARE}
            parts = [
                ([other for other in every if other.how == how and key(other) != group], alike)
                for how, alike, _ in GROUPS.values()
                if how in unknown
            ]
            highs = [told(those, "", alike, mirrored=True)["high"] for those, alike in parts if those]
            end = max([nearest(rest, software, gpu, family)["high"], *highs])
            return -end, end

        own = [
            ends(key(row), row.software, row.gpu, row.family, kind in SIZED and is_smaller(row, measured, key))
            for row in scored
        ]
        low, high = np.array(own).T
        inside = np.array([a <= row.error <= b for row, (a, b) in zip(scored, own, strict=True)])
        models = np.array([str(of_model(row)) for row in scored])
        result.append(
            {
                "kind": kind,
                "file": of,
                "n": len(scored),
                "inside": float(inside.mean()),
                "alike": float(np.mean([inside[models == name].mean() for name in np.unique(models)])),
                "low": float(np.exp(np.median(low))),
                "high": float(np.exp(np.median(high))),
                "width": float(np.exp(np.mean(high - low))),
            }
        )

    for how, key in keys.items():
        for file in dict.fromkeys(row.file for row in rows if row.how == how):
            count(how, file, [row for row in rows if (row.how, row.file) == (how, file)], base, key)
    for family in dict.fromkeys(row.family for row in base):
        count(MODEL, f"{family} models", [row for row in base if row.family == family], base, of_model)
    for file, family in dict.fromkeys((row.file, row.family) for row in memory):
        scored = [row for row in memory if (row.file, row.family) == (file, family)]
        count(f"memory, {family}", file, scored, memory, of_model)
    return result
