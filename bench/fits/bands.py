"""Bands of the planner's predictions: quantiles of the errors of held-out rows, and how many rows they hold.

`planner` and `arena` collect the rows and write the entries; synergy_core/performance/planner/bands.py reads them.
Columns of the rows: how (what the fit did not see), fit, file, software, gpu, family, precision, model, parameters,
gpus, and error, log(measured ÷ predicted). Of memory: file, software, family, model, error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fits import GPU_TYPE, MEASURED, rounded, sums
from synergy_core.performance.planner.bands import ANY, COVERAGE, MIN_MODELS, OTHER_SOFTWARE, log_interval
from synergy_core.performance.planner.machine import Constants

MODEL, FILE, NODE, SOFTWARE = "family out", "file out", "one node only", "software out"
"""What a fit did not see: the row's model; its file; rows on several nodes; its software on its GPU type. `GPU_TYPE`:
its software on this GPU type, though on another."""
SMALLER = "smaller"
"""Rows of `MODEL` and `FILE` whose model is smaller than every other that their fit read."""
MIN_PLANS = 4
"""Fewest rows of a model that tell its own error from that of its plans."""
MIN_TESTS = 19
"""Fewest tests of memory whose errors promise 5 % beyond either end of a band."""

Key = tuple[str, ...]
"""Columns whose values are alike in rows that count as one, or that are held out together."""
OF_MODEL: Key = ("file", "model")
SIZED: dict[str, Key] = {MODEL: OF_MODEL, FILE: ("file",)}
"""Splits in which the fit saw models of every other size."""
GROUPS: dict[str, tuple[str, Key, str]] = {
    "GPU type": (GPU_TYPE, ("software", "gpu"), "rows predicted by a fit to another GPU type"),
    "software": (SOFTWARE, ("software",), "rows predicted without a fit to their software on the GPU type"),
    "GPUs": (NODE, ("file",), "rows on several nodes, predicted by a fit to single nodes"),
    "size": (SMALLER, ("file",), "rows of models smaller than any that their fit saw"),
}
"""By what was not measured: how the rows that show the error were held out, which rows count as one, and a phrase."""


def fitted_entry(
    fit: str, constants: Constants, paths: Mapping[str, Path], scores: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A fit's entry in the catalog. paths: of the files that it read; scores: by fit, file and what was left out."""
    errors: dict[str, Any] = {file: {} for file in paths}
    for each in scores:
        if each["fit"] == fit:
            found = {"n": each["n"], "mape": round(each["mape"], 4), "median": round(each["median"], 4)}
            errors[each["file"]][each["how"]] = found
    values = {name: rounded(value) for name, value in asdict(constants).items()}
    return {"constants": values, "fit": fit, "inputs_sha256": sums(paths), "errors": errors}


def are(rows: pd.DataFrame, **wanted: Any) -> pd.Series:
    """Mask of the rows that have all of these values."""
    return (rows[list(wanted)] == list(wanted.values())).all(axis=1)


def models(rows: pd.DataFrame) -> int:
    return rows.groupby(list(OF_MODEL)).ngroups


def is_smaller(rows: pd.DataFrame) -> pd.Series:
    """Mask of the rows of `SMALLER`."""
    result = pd.Series(False, rows.index)
    seen = rows[rows["how"] == MEASURED].drop_duplicates(["fit", *OF_MODEL], keep="last")
    for how, key in SIZED.items():
        for (fit, *group), members in rows[rows["how"] == how].groupby(["fit", *key]):
            others = (seen["fit"] == fit) & ~are(seen, **dict(zip(key, group, strict=True)))
            result[members.index] = members["parameters"] < seen.loc[others, "parameters"].min()
    return result


def with_smaller(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([rows, rows[is_smaller(rows)].assign(how=SMALLER)], ignore_index=True)


def pools(rows: pd.DataFrame, software: str, gpu: str, family: str) -> list[tuple[pd.DataFrame, str]]:
    """Rows and what they are, in words: the nearest, and as long as those are of fewer than `MIN_MODELS` models also
    the next nearest."""
    result = []
    for words, wanted in (
        (f"{family} models under {software} on {gpu}", {"family": family, "gpu": gpu, "software": software}),
        (f"{family} models on {gpu}", {"family": family, "gpu": gpu}),
        (f"{family} models", {"family": family}),
        ("all models", {}),
    ):
        found = rows[are(rows, **wanted)]
        if len(found):
            result.append((found, words))
            if models(found) >= MIN_MODELS:
                break
    return result


def nearest(rows: pd.DataFrame, software: str, gpu: str, family: str) -> dict[str, Any]:
    """The band of step times of the nearest rows: the widest of the pools.

    A pool of fewer than `MIN_MODELS` models is filled up with the mean square error of the next wider pool, and its
    band is that of Student's t with as many degrees of freedom (the moderated t-statistic of Smyth, Statistical
    Applications in Genetics and Molecular Biology 3(1), 2004).
    """
    *nearer, widest = pools(rows, software, gpu, family)
    bands = [told(*widest, mirrored=True)]
    square = (bands[0]["high"] / stats.norm.ppf((1.0 + COVERAGE) / 2.0)) ** 2
    for found, of in reversed(nearer):
        own = (found["error"] ** 2).groupby([found[name] for name in OF_MODEL]).mean()
        square = (own.sum() + (MIN_MODELS - len(own)) * square) / MIN_MODELS
        end = round(float(stats.t.ppf((1.0 + COVERAGE) / 2.0, MIN_MODELS)) * math.sqrt(square), 4)
        bands.append({"low": -end, "high": end, "rows": len(found), "of": of})
    return max(bands, key=lambda band: float(band["high"]))


def ends_of(rows: pd.DataFrame, key: Key = OF_MODEL, *, mirrored: bool = False) -> tuple[float, float]:
    return log_interval(rows["error"].to_numpy(), rows.groupby(list(key)).ngroup().to_numpy(), mirrored=mirrored)


def told(rows: pd.DataFrame, of: str, key: Key = OF_MODEL, *, mirrored: bool = False) -> dict[str, Any]:
    """The entry of a catalog file for the errors of these rows. of: which rows they are, in words."""
    low, high = ends_of(rows, key, mirrored=mirrored)
    return {"low": round(low, 4), "high": round(high, 4), "rows": len(rows), "of": of}


def entry(rows: pd.DataFrame, software: str, gpu: str) -> dict[str, Any]:
    """A software's entry for a GPU type in its constants file: what was measured, and a band for each family."""
    own = rows[are(rows, software=software, gpu=gpu)]
    if not len(own):
        return {}
    measured = rows[rows["how"] == MEASURED] if (rows["how"] == MEASURED).any() else rows
    families = sorted(own["family"].unique())
    seen = rows[rows["how"] == (MODEL if (rows["how"] == MODEL).any() else GPU_TYPE)]
    return {
        "measured": {
            "gpus": int(own["gpus"].max()),
            "smallest_parameters": int(measured.loc[measured["fit"].isin(own["fit"]), "parameters"].min()),
            "precisions": sorted(own["precision"].unique()),
            "families": families,
        },
        "bands": {family: nearest(seen, software, gpu, family) for family in families},
    }


def shared(rows: pd.DataFrame, memory: pd.DataFrame) -> dict[str, Any]:
    """Bands that belong to no fit, for transfer.yaml: by family, for what was not measured, and of memory."""
    seen, every = rows[rows["how"] == MODEL], with_smaller(rows)
    result: dict[str, Any] = {
        "step time": {family: nearest(seen, "", "", family) for family in (*sorted(seen["family"].unique()), ANY)},
        **{
            name: told(every[every["how"] == how], words, key, mirrored=True)
            for name, (how, key, words) in GROUPS.items()
        },
        "memory": {ANY: told(memory, "all models")},
    }
    pairs = memory[["software", "family"]].drop_duplicates()
    for software, family in sorted(
        {*pairs.itertuples(index=False, name=None), *(("", each) for each in pairs["family"])}
    ):
        result["memory"][f"{software} {family}".strip()] = memory_entry(memory, software, family)
    result["memory"][OTHER_SOFTWARE] = {
        **_within(_of_stacks(memory), memory.groupby(list(STACK)).ngroups),
        "rows": len(memory),
        "of": "stacks, each as if it had not been measured",
    }
    return result


STACK: Key = ("software", "family")


def _of_stacks(memory: pd.DataFrame) -> float:
    """Mean square error of a stack with a family of models; each counts alike, however many rows it has. No constant of
    the memory model is fitted, so each is as if it had not been measured.
    """
    return float((memory["error"] ** 2).groupby([memory[name] for name in STACK]).mean().mean())


def _within(square: float, degrees: int) -> dict[str, float]:
    """The ends of a band of Student's t with that mean square."""
    end = round(float(stats.t.ppf((1.0 + COVERAGE) / 2.0, degrees)) * math.sqrt(square), 4)
    return {"low": -end, "high": end}


def memory_entry(memory: pd.DataFrame, software: str, family: str) -> dict[str, Any]:
    """The band of a family's memory under a software ("": any). If fewer than `MIN_TESTS` models were measured, it is
    filled up with the mean square error of stacks, as `nearest` fills up bands of times.
    """
    own = memory[memory["family"] == family]
    own = own[own["software"] == software] if software else own
    words = f"{family} models under {software}" if software else f"{family} models"
    if models(own) >= MIN_TESTS:
        return told(own, words)
    each = (own["error"] ** 2).groupby([own[name] for name in OF_MODEL]).mean()[:MIN_MODELS]
    square = (each.sum() + (MIN_MODELS - len(each)) * _of_stacks(memory)) / MIN_MODELS
    return {**_within(float(square), MIN_MODELS), "rows": len(own), "of": words}


def parts_of_errors(rows: pd.DataFrame) -> tuple[float, float, int]:
    """Standard deviations of errors that all plans of a model share on a GPU type, and of a plan's own beside that; and
    how many models they are of: those with `MIN_PLANS` rows or more.

    By medians of absolute deviations (× 1.4826 for a normal distribution), so that a few odd rows do not decide; each
    model counts alike.
    """
    groups = rows[rows["how"] == MODEL].groupby(["software", "gpu", "model"])["error"]
    errors = [each for _, each in groups if len(each) >= MIN_PLANS]
    own = [stats.median_abs_deviation(each) for each in errors]
    shared = [abs(each.median()) for each in errors]
    return 1.4826 * float(np.median(shared)), 1.4826 * float(np.median(own)), len(errors)


def coverage(rows: pd.DataFrame, memory: pd.DataFrame) -> list[dict[str, Any]]:
    """Of each file, and family: how many rows lie inside bands made without their group, by what a fit did not see.

    Without the model, the file, the software, or the software on the GPU type; rows on more GPUs than the fit saw:
    without the file. inside: fraction of the rows; alike: the same with each model counting alike; low, high: ends of
    the median band; width: geometric mean of high ÷ low.
    """
    every, rows = with_smaller(rows), rows.assign(small=is_smaller(rows))
    families = rows[rows["how"] == MODEL].groupby("family", sort=False)
    parts = [
        (how, file, members, key)
        for how, key in {**SIZED, **{how: key for how, key, _ in GROUPS.values()}}.items()
        for file, members in rows[rows["how"] == how].groupby("file", sort=False)
    ] + [(MODEL, f"{family} models", members, OF_MODEL) for family, members in families]
    result = []
    for kind, of, scored, key in parts:
        ends = {}
        alike = ["software", "gpu", "family", "small", *key]
        for (software, gpu, family, small, *group), members in scored.groupby(alike):
            others = every[~are(every, **dict(zip(key, group, strict=True)))]
            rest = others[others["how"] == MODEL]
            unknown = {kind, SMALLER if small else "", "" if family in rest["family"].array else SOFTWARE}
            more = [(others[others["how"] == how], each) for how, each, _ in GROUPS.values() if how in unknown]
            high = [told(found, "", each, mirrored=True)["high"] for found, each in more if len(found)]
            end = max([nearest(rest, software, gpu, family)["high"], *high])
            ends |= dict.fromkeys(members.index, (-end, end))
        result.append(_covered(kind, of, scored, ends))
    for (file, family), scored in memory.groupby(["file", "family"], sort=False):
        ends = {}
        for (software, model), members in scored.groupby(["software", "model"]):
            rest = memory[~are(memory, file=file, model=model)]
            if not are(rest, software=software, family=family).any():
                end = _within(_of_stacks(rest), rest.groupby(list(STACK)).ngroups)
            else:
                end = memory_entry(rest, software, family)
            ends |= dict.fromkeys(members.index, (end["low"], end["high"]))
        result.append(_covered(f"memory, {family}", file, scored, ends))
    return result


def _covered(kind: str, of: str, rows: pd.DataFrame, ends: Mapping[Any, Sequence[float]]) -> dict[str, Any]:
    """ends: of each row's band, by its index."""
    low, high = np.array([ends[at] for at in rows.index]).T
    inside = rows["error"].between(low, high)
    return {
        "kind": kind,
        "file": of,
        "n": len(rows),
        "inside": float(inside.mean()),
        "alike": float(inside.groupby([rows[name] for name in OF_MODEL]).mean().mean()),
        "low": float(np.exp(np.median(low))),
        "high": float(np.exp(np.median(high))),
        "width": float(np.exp(np.mean(high - low))),
    }
