"""Scores predicted step times on measured ones, as a table and, with --json, as a list of objects.

FILE: a CSV of step times: `placement` (or `num_nodes` and `num_replicas`), `local_bsz`, `step_time` in seconds, and
`sync_time` where it is used for --calibrate. Application and GPU type are read from <application>/placements-<gpu>.csv
(or scalability-<gpu>.csv), or given. Without --calibrate the shipped catalog predicts; with it, a robust fit to those
files. Errors are fractions of the measured time; bias is signed, positive where predictions are too long.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from synergy_core.accuracy import Accuracy
    from synergy_core.commands._predictor import Prediction
    from synergy_core.measurements.step_times import StepTimes

SUMMARY = "score the shipped or fitted constants on measurements"
BANDS = (1, 4, 8, 16, 32, 64)
"""Upper ends of the bands of GPU counts that are reported apart."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="measurements to predict")
    parser.add_argument("--calibrate", nargs="+", type=Path, metavar="FILE", help="measurements to fit the model to")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every group as JSON")
    parser.add_argument("--form", default="saturating", help="form fitted with --calibrate: saturating or pollux")
    add_naming(parser)


def add_naming(parser: argparse.ArgumentParser) -> None:
    """What overrides the names taken from paths."""
    parser.add_argument("--model", help="the application of all files, instead of their folder's name")
    parser.add_argument("--gpu-type", help="the GPU type of all files, instead of the one in their names")


def run(chosen: argparse.Namespace) -> int:
    """Prints the table; writes the JSON."""
    from synergy_core.commands._output import write_whole
    from synergy_core.commands._predictor import calibrated_on, predictor
    from synergy_core.goodput.forms import form_named
    from synergy_core.measurements import read

    def each(paths: list[Path]) -> list[StepTimes]:
        return [read(path, model=chosen.model, gpu_type=chosen.gpu_type) for path in paths]

    form = form_named(chosen.form)
    files = each(chosen.files)
    models = calibrated_on(each(chosen.calibrate), form) if chosen.calibrate else None
    results: list[dict[str, Any]] = []
    for file in files:
        used = predictor(file, models)
        found = scores(file, used)
        results += [
            {
                "file": str(file.path),
                "group": group,
                "model": file.model,
                "gpu_type": file.gpu_type,
                **_plain(score),
                "predicted_by": used.source,
            }
            for group, score in found.items()
        ]
        _print(file, used, found)
    if chosen.json:
        write_whole(chosen.json, json.dumps(results, indent=1, allow_nan=False) + "\n")
    return 0


def scores(file: StepTimes, used: Prediction) -> dict[str, Accuracy]:
    """The whole file as `all`, then every band of nodes and GPUs that it has."""
    import numpy as np

    from synergy_core.accuracy import accuracy

    predicted = used.model.step_time(file.nodes, file.gpus, file.local_batch)
    result = {"all": accuracy(predicted, file.step_time_s)}
    names = np.array([_band(*each) for each in zip(file.nodes.tolist(), file.gpus.tolist(), strict=True)])
    order = np.lexsort((file.gpus, file.nodes))
    for name in dict.fromkeys(names[order].tolist()):
        inside = names == name
        result[name] = accuracy(predicted[inside], file.step_time_s[inside])
    return result


def _band(nodes: int, gpus: int) -> str:
    low = 1
    for high in BANDS:
        if gpus <= high:
            return f"nodes={nodes} gpus={low}-{high}" if low < high else f"nodes={nodes} gpus={high}"
        low = high + 1
    return f"nodes={nodes} gpus={low}+"


def _plain(score: Accuracy) -> dict[str, float | None]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(score).items()
    }


def _print(file: StepTimes, used: Prediction, found: dict[str, Accuracy]) -> None:
    from synergy_core.commands._output import table

    print(f"{file.path}: {file.model} on {file.gpu_type}, {len(file)} rows; predicted by {used.source}.")
    if file.ignored_columns:
        print(f"  ignored columns: {', '.join(file.ignored_columns)}")
    rows = [
        [
            group,
            str(each.n),
            *(f"{getattr(each, key):.1%}" for key in ("mape", "median", "p90", "max")),
            f"{each.bias:+.1%}",
            str(each.failures),
            f"{each.spearman:.3f}",
        ]
        for group, each in found.items()
    ]
    print(table(("group", "n", "mape", "median", "p90", "max", "bias", "failures", "spearman"), rows))
    print()
