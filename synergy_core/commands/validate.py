"""Scores predicted step times on measured ones, as a table and, with --json, as a list of objects.

FILE: a CSV of step times: `placement` (or `num_nodes` and `num_replicas`), `local_bsz`, `step_time` in seconds, and
`sync_time` where it is used for --calibrate. Application and GPU type are read from <application>/placements-<gpu>.csv
(or scalability-<gpu>.csv), or given. Or a file of the planner's: training times of parallel plans with their degrees
(columns as in synergy_core/measurements/training_times.py), memory, collectives, layers, image models, best plans; any
file is recognised by its columns. Without --calibrate the shipped catalog predicts; with it, a robust fit to those
files. Errors are fractions of what was measured; bias is signed, positive where predictions are too large. Rows that
leave a field open are predicted in every setting that it may have had, and the closest counts (`banded`). Regret: of
rows alike in model, GPUs and batch, the measured time of the plan predicted fastest ÷ the best − 1. Baseline: FLOPs ÷
peak times one constant, fitted to the file itself.
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
    from synergy_core.commands._plans import Choose
    from synergy_core.commands._predictor import Prediction
    from synergy_core.measurements.step_times import StepTimes

SUMMARY = "score the shipped or fitted constants on measurements"
BANDS = (1, 4, 8, 16, 32, 64)
"""Upper ends of the bands of GPU counts that are reported apart."""
FORM_HELP = (
    "form fitted with --calibrate: saturating, crowded or pollux; by default whichever of the first two foretells "
    "held-out placements better"
)
CONSTANTS_HELP = "of plans, what is refitted: network, software (one factor each), or names of the planner's constants"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="measurements to predict")
    parser.add_argument("--calibrate", nargs="+", type=Path, metavar="FILE", help="measurements to fit the model to")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every group as JSON")
    parser.add_argument("--form", help=FORM_HELP)
    parser.add_argument("--constants", default="network,software", help=CONSTANTS_HELP)
    add_naming(parser)


def add_naming(parser: argparse.ArgumentParser) -> None:
    """What overrides the names taken from paths."""
    parser.add_argument("--model", help="the application of all files, instead of their folder's name")
    parser.add_argument("--gpu-type", help="the GPU type of all files, instead of the one in their names")


def run(chosen: argparse.Namespace) -> int:
    """Prints the table; writes the JSON."""
    from synergy_core.commands._output import write_whole
    from synergy_core.commands._predictor import calibrated_on, predictor
    from synergy_core.commands._refit import constants_from
    from synergy_core.goodput.forms import form_named
    from synergy_core.measurements import read
    from synergy_core.measurements.step_times import StepTimes
    from synergy_core.measurements.training_times import TrainingTimes

    def each(paths: list[Path]) -> list[Any]:
        return [read(path, model=chosen.model, gpu_type=chosen.gpu_type) for path in paths]

    form = form_named(chosen.form) if chosen.form else None
    files = each(chosen.files)
    given = each(chosen.calibrate) if chosen.calibrate else []
    steps = [file for file in given if isinstance(file, StepTimes)]
    models = calibrated_on(steps, form) if steps else None
    results: list[dict[str, Any]] = []
    choose = constants_from([file for file in given if isinstance(file, TrainingTimes)], chosen.constants)
    for file in files:
        if not isinstance(file, StepTimes):
            results += _planned(file, *choose)
            continue
        used = predictor(file, models)
        found = scores(file, used)
        results += [
            {
                "file": str(file.path),
                "group": group,
                "model": file.model,
                "gpu_type": file.gpu_type,
                "kind": "time",
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

    predicted = used.model.step_time(file.nodes, file.gpus, file.local_batch, file.crowd)
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


def _planned(file: Any, choose: Choose, source: str) -> list[dict[str, Any]]:
    """Prints a file of the planner's formats; its groups as JSON objects."""
    from synergy_core.commands._output import table
    from synergy_core.commands._plans import scored

    groups = scored(file, choose)
    print(f"{file.path}: {len(file.rows)} rows; predicted by {source}.")
    for reason, count in getattr(file, "excluded", {}).items():
        print(f"  {count} left out: {reason}")
    for reason, count in (groups[0].fields.get("reasons", {}) if groups else {}).items():
        print(f"  {count} not predicted: {reason}")
    percents = ("mape", "median", "p90", "max")
    extra = ("regret_mean", "regret_max", "baseline_mape")
    rows = [
        [
            each.name,
            str(each.score.n),
            *(_percent(getattr(each.score, name)) for name in percents),
            _percent(each.score.bias, "+"),
            str(each.score.failures),
            "–" if math.isnan(each.score.spearman) else f"{each.score.spearman:.3f}",
            *(_percent(each.fields.get(name, math.nan)) for name in extra),
            *(str(each.fields.get(name, "–")) for name in ("banded", "false_refusals", "refused", "accepted")),
        ]
        for each in groups
    ]
    head = ("regret", "max regret", "baseline", "banded", "false refusals", "refused", "accepted")
    print(table(("group", "n", *percents, "bias", "failures", "spearman", *head), rows))
    if any(each.fields.get("banded") for each in groups):
        print("  banded: rows that leave a setting open; of each, the setting closest to what was measured counts,")
        print("  so errors and regrets of groups with such rows are lower bounds.")
    print()
    return [each.as_json(str(file.path), source) for each in groups]


def _percent(value: float, sign: str = "") -> str:
    return "–" if math.isnan(value) else f"{value:{sign}.1%}"


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
