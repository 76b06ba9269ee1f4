"""Scores predicted step times on measured ones, as a table and, with --json, as a list of objects.

FILE: a CSV of step times: `placement` (or `num_nodes` and `num_replicas`), `local_bsz`, `step_time` in seconds, and
`sync_time` if the file is used for --calibrate. Application and GPU type are taken from the path
<application>/placements-<gpu>.csv (or scalability-<gpu>.csv), or from options. FILE may also be a file for the planner:
training times of parallel plans with their degrees (columns as in commands/measurements/training_times.py), memory,
collectives, layers, image models or best plans. The columns decide the format. Predictions come from the shipped
catalog, or with --calibrate from a robust fit to those files. Errors are fractions of the measured value; bias is
signed, positive if predictions are too large. A row with an unstated field is predicted for every possible value, and
the closest prediction is scored (`banded`). Regret: among rows with the same model, GPUs and batch, measured time of
the plan predicted fastest ÷ the best − 1; an unstated field has the same value for all of these rows. Baseline: FLOPs ÷
peak FLOP/s × one constant fitted to the file.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.commands._settings import table, write_whole
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements.plan_reports import PlanReports
from synergy_core.commands.measurements.step_times import StepTimes
from synergy_core.commands.measurements.training_times import TrainingTimes
from synergy_core.performance.goodput.throughput import form_named

if TYPE_CHECKING:
    from synergy_core.commands._scoring import ScoredGroup

SUMMARY = "score the shipped or fitted constants on measurements"
FORM_HELP = (
    "form fitted with --calibrate: saturating, crowded or pollux; by default saturating or crowded, whichever predicts "
    "held-out placements better"
)
CONSTANTS_HELP = "constants refitted to times of plans: network, software (one factor each), or names of constants"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="measurements to predict")
    parser.add_argument("--calibrate", nargs="+", type=Path, metavar="FILE", help="measurements to fit the model to")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every group as JSON")
    parser.add_argument("--form", help=FORM_HELP)
    parser.add_argument("--constants", default="network,software", help=CONSTANTS_HELP)
    add_naming(parser)


def add_naming(parser: argparse.ArgumentParser) -> None:
    """Adds the options that override the names taken from paths."""
    parser.add_argument("--model", help="the application of all files; by default the name of their folder")
    parser.add_argument("--gpu-type", help="the GPU type of all files; by default the one in their names")


def run(chosen: argparse.Namespace) -> int:
    """Prints the scores of each file as a table and writes the JSON."""
    from synergy_core.commands._scoring import calibrated_on, constants_from, predictor, scored, step_scores

    form = form_named(chosen.form) if chosen.form else None
    files, calibration_files = (
        [read(path, model=chosen.model, gpu_type=chosen.gpu_type) for path in paths]
        for paths in (chosen.files, chosen.calibrate or [])
    )
    steps = [file for file in calibration_files if isinstance(file, StepTimes)]
    models = calibrated_on(steps, form) if steps else None
    plans = [file for file in calibration_files if isinstance(file, TrainingTimes)]
    choose, constants = constants_from(plans, chosen.constants)
    results: list[dict[str, Any]] = []
    for file in files:
        if isinstance(file, StepTimes):
            model, source = predictor(file, models)
            groups = step_scores(file, model)
            print(f"{file.path}: {file.model} on {file.gpu_type}, {len(file)} rows; predicted by {source}.")
            if file.ignored_columns:
                print(f"  ignored columns: {', '.join(file.ignored_columns)}")
        else:
            groups, source = scored(file, choose), constants
            print(f"{file.path}: {len(file.rows)} rows; predicted by {source}.")
            for reason, count in file.excluded.items():
                print(f"  {count} left out: {reason}")
            for reason, count in (groups[0].fields.get("reasons", {}) if groups else {}).items():
                print(f"  {count} not predicted: {reason}")
        _print(groups, _MORE_COLUMNS.get(type(file), _COLUMNS_OF_PLANS))
        results += [group.as_json(str(file.path), source) for group in groups]
    if chosen.json:
        write_whole(chosen.json, json.dumps(results, indent=1, allow_nan=False) + "\n")
    return 0


# Columns of the table: header, name in the JSON, number format.
_COLUMNS = (
    ("n", "n", ""),
    *((name, name, ".1%") for name in ("mape", "median", "p90", "max")),
    ("bias", "bias", "+.1%"),
    ("failures", "failures", ""),
    ("spearman", "spearman", ".3f"),
)
_COLUMNS_OF_PLANS = (
    ("regret", "regret_mean", ".1%"),
    ("max regret", "regret_max", ".1%"),
    ("baseline", "baseline_mape", ".1%"),
    *((name.replace("_", " "), name, "") for name in ("banded", "false_refusals", "refused", "accepted")),
)
_COLUMNS_OF_REPORTS = (
    ("in band", "in_band", ""),
    ("ends", "width", ".2f"),
    ("right", "right", ""),
    ("undecided", "undecided", ""),
)
_MORE_COLUMNS: dict[type, tuple[tuple[str, str, str], ...]] = {StepTimes: (), PlanReports: _COLUMNS_OF_REPORTS}
"""Columns of each format beside `_COLUMNS`; those of plans for every other."""


def _print(groups: list[ScoredGroup], more: tuple[tuple[str, str, str], ...]) -> None:
    """Prints the scores. more: columns beside the usual ones; if there are any, missing values are dashes."""
    columns = _COLUMNS + more
    rows = []
    for group in groups:
        figures = {**asdict(group.score), **group.fields}
        values = [(figures.get(key, math.nan), form) for _, key, form in columns]
        rows.append([group.name, *("–" if more and math.isnan(value) else f"{value:{form}}" for value, form in values)])
    print(table(("group", *(header for header, _, _ in columns)), rows))
    if any(group.fields.get("banded") for group in groups):
        print("  banded: rows with unstated settings. Each is scored in the setting closest to its measurement, so the")
        print("  errors of groups with such rows are lower bounds. Regrets compare plans in one setting for all.")
    print()
