"""Bands of the planner's predictions: quantiles of the errors of held-out rows, and how many rows they hold.

`fit_planner.py` and `fit_arena.py` collect the rows and write the entries; synergy_core/planner/bands.py reads them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fit_memory import UNSTATED
from numpy.typing import NDArray

from synergy_core.commands._scoring import predicted
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements._table import read_table
from synergy_core.commands.measurements.training_times import Case
from synergy_core.planner.bands import ANY, MIN_ROWS, family_name, log_interval, summary
from synergy_core.planner.machine import constants_like

MODEL, FILE, NODE, SOFTWARE, GPU_TYPE = "family out", "file out", "one node only", "software out", "GPU type out"
"""What a fit did not see: the row's model; its file; rows on several nodes; its software on its GPU type; its software
on this GPU type, though on another."""
MEASURED = "in sample"
MIN_PLANS = 4
"""Fewest rows of a model that tell its own error from that of its plans."""
MEMORY_FILES = ("megatron_ci_memory", "nanotron_llama1b_h100", "torchtitan_h100_h200")


class HeldOut(NamedTuple):
    """A row that a fit did not see. error: log(measured ÷ predicted)."""

    how: str
    file: str
    software: str
    gpu: str
    family: str
    precision: str
    model: str
    gpus: int
    error: float


def held_out(
    how: str, file: str, case: Case, models: NDArray[Any], off: NDArray[Any], mask: Any = None
) -> list[HeldOut]:
    """A case's rows. off: (rows,), predicted ÷ measured − 1; mask: those that were held out, None for all."""
    names = how, file, case.software.fitted_as, constants_like(case.machine.gpu), family_name(case.architecture)
    return [
        HeldOut(*names, case.software.precision, str(models[at]), int(case.plans.gpus[at]), -math.log1p(off[at]))
        for at in np.flatnonzero(np.ones(len(case), bool) if mask is None else mask)
    ]


Key = Callable[[HeldOut], Any]
GROUPS: dict[str, tuple[str, Key, str]] = {
    "GPU type": (GPU_TYPE, lambda row: (row.software, row.gpu), "rows predicted by a fit to another GPU type"),
    "software": (SOFTWARE, lambda row: row.software, "rows predicted without a fit to their software on the GPU type"),
    "GPUs": (NODE, lambda row: row.file, "rows on several nodes, predicted by a fit to single nodes"),
}
"""By what was not measured: how rows that tell the error were held out, which of them count as one, a phrase."""


def of_model(row: HeldOut) -> tuple[str, str]:
    return row.file, row.model


def pooled(rows: Iterable[HeldOut], software: str, gpu: str, family: str) -> tuple[list[HeldOut], str]:
    """The nearest rows that are `MIN_ROWS`, and what they are, in words."""
    left = list(rows)
    for words, wanted in (
        (
            f"{family} models under {software} on {gpu}",
            lambda row: (row.software, row.gpu, row.family) == (software, gpu, family),
        ),
        (f"{family} models on {gpu}", lambda row: (row.gpu, row.family) == (gpu, family)),
        (f"{family} models", lambda row: row.family == family),
    ):
        if len(found := [row for row in left if wanted(row)]) >= MIN_ROWS:
            return found, words
    return left, "all models"


def told(rows: Sequence[HeldOut], of: str, key: Key = of_model, *, mirrored: bool = False) -> dict[str, Any]:
    groups = [str(key(row)) for row in rows]
    return summary(np.array([row.error for row in rows]), groups, of, mirrored=mirrored)


def entry(rows: Sequence[HeldOut], software: str, gpu: str) -> dict[str, Any]:
    """Of one software on one GPU type, for its file of constants: what was measured, and a band for each family."""
    own = [row for row in rows if (row.software, row.gpu) == (software, gpu)]
    if not own:
        return {}
    families = sorted({row.family for row in own})
    seen = [row for row in rows if row.how == MODEL] or [row for row in rows if row.how == GPU_TYPE]
    return {
        "measured": {
            "gpus": max(row.gpus for row in own),
            "precisions": sorted({row.precision for row in own}),
            "families": families,
        },
        "bands": {family: told(*pooled(seen, software, gpu, family)) for family in families},
    }


def shared(rows: Sequence[HeldOut], memory: Sequence[HeldOut]) -> dict[str, Any]:
    """Bands that belong to no fit, for transfer.yaml: by family, for what was not measured, and of memory."""
    seen = [row for row in rows if row.how == MODEL]
    families = sorted({row.family for row in seen})
    result: dict[str, Any] = {
        "step time": {family: told(*pooled(seen, "", "", family)) for family in (*families, ANY)},
        **{
            name: told([row for row in rows if row.how == how], words, key, mirrored=True)
            for name, (how, key, words) in GROUPS.items()
        },
        "memory": {
            family: told(*pooled(memory, "", "", family)) for family in (*sorted({m.family for m in memory}), ANY)
        },
    }
    for software, family in sorted({(row.software, row.family) for row in memory}):
        found = [row for row in memory if (row.software, row.family) == (software, family)]
        if len(found) >= MIN_ROWS:
            result["memory"][f"{software} {family}"] = told(found, f"{family} models under {software}")
    return result


def memory_rows() -> list[HeldOut]:
    """Peak memory, measured and predicted: Megatron's tests of its current generation (`dev`) whose options the memory
    model knows, and every row of the other files. fit_memory.py says which constants were chosen on them. Each test
    counts as a model."""
    result = []
    for name in MEMORY_FILES:
        path = Path(os.environ["SYNERGY_DATA"]) / "parallel" / f"{name}.csv"
        file: Any = read(path)
        cells = {row.line: row.cells for row in read_table(path).rows}
        rows = predicted(file)
        for at, line, measured, peak in zip(
            rows.index, rows["line"], rows["peak_mem_bytes"], rows["peak_bytes"], strict=True
        ):
            cell = cells[line]
            other = "test" in cell and ("golden_values_dev" not in cell["source"] or re.search(UNSTATED, cell["test"]))
            if np.isfinite(measured) and np.isfinite(peak) and not other:
                one = file.rows[at].settings[0]
                names = name, one.software.fitted_as, constants_like(one.machine.gpu), family_name(one.architecture)
                model = cell.get("test") or file.rows[at].model
                error = float(np.log(measured / peak))
                result.append(HeldOut(MODEL, *names, one.software.precision, model, file.rows[at].gpus, error))
    return result


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
    own = [np.median(np.abs(each - np.median(each))) for each in errors]
    shared = [abs(np.median(each)) for each in errors]
    return 1.4826 * float(np.median(shared)), 1.4826 * float(np.median(own)), len(errors)


def coverage(rows: Sequence[HeldOut], memory: Sequence[HeldOut]) -> list[dict[str, Any]]:
    """Of each file, and family: how many rows lie inside bands made without their group, by what a fit did not see.

    Without the model, the file, the software, or the software on the GPU type; rows on more GPUs than the fit saw:
    without the file.
    """
    base = [row for row in rows if row.how == MODEL]
    nested: dict[str, tuple[Key, str]] = {
        MODEL: (of_model, ""),
        FILE: (lambda row: row.file, ""),
        NODE: (lambda row: row.file, "GPUs"),
        SOFTWARE: (lambda row: row.software, "software"),
        GPU_TYPE: (lambda row: (row.software, row.gpu), "GPU type"),
    }
    result = []

    def count(
        kind: str, of: str, scored: Sequence[HeldOut], base: Sequence[HeldOut], key: Key, widened: str = ""
    ) -> None:
        inside, lows, highs = 0, [], []
        for row in scored:
            rest = [other for other in base if key(other) != key(row)]
            members, _ = pooled(rest, row.software, row.gpu, row.family)
            bands = [(members, of_model, False)]
            unknown = row.family not in {other.family for other in rest}
            for name in filter(None, (widened, "software" if unknown else "")):
                how, group, _ = GROUPS[name]
                bands.append(([r for r in rows if r.how == how and key(r) != key(row)], group, True))
            ends = [
                log_interval(np.array([r.error for r in those]), [str(group(r)) for r in those], mirrored=mirrored)
                for those, group, mirrored in bands
                if those
            ]
            low, high = min(each[0] for each in ends), max(each[1] for each in ends)
            inside += low <= row.error <= high
            lows.append(low)
            highs.append(high)
        low, high = math.exp(float(np.median(lows))), math.exp(float(np.median(highs)))
        result.append(
            {
                "kind": kind,
                "file": of,
                "n": len(scored),
                "inside": inside / len(scored),
                "low": low,
                "high": high,
            }
        )

    for how, (key, widened) in nested.items():
        for file in dict.fromkeys(row.file for row in rows if row.how == how):
            count(how, file, [row for row in rows if (row.how, row.file) == (how, file)], base, key, widened)
    for family in dict.fromkeys(row.family for row in base):
        count(MODEL, f"{family} models", [row for row in base if row.family == family], base, of_model)
    for file, family in dict.fromkeys((row.file, row.family) for row in memory):
        scored = [row for row in memory if (row.file, row.family) == (file, family)]
        count(f"memory, {family}", file, scored, memory, of_model)
    return result
