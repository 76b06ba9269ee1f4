"""The memory model on measured peaks ($SYNERGY_DATA/parallel).

Megatron's tests log the last rank, nanotron rank 0, torchtitan the worst rank.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from runner.experiment import data_file

from synergy_core.commands._scoring import predicted, reported
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements._table import read_table
from synergy_core.commands.measurements.plan_reports import PlanReport, PlanReports
from synergy_core.performance.planner.bands import family_name

MEASURED = ("megatron_ci_memory", "nanotron_llama1b_h100", "torchtitan_h100_h200")
UNSTATED = (
    "uneven_pipeline|account_for|tunable_overlap|cross_entropy|defer_embedding"
    "|modelopt|uninstall_te|multi_dist|qk_layer|muon|gpt3_moe|a2a_ovlp"
)
"""Parts of tests' names for options that change memory and have no column: gpt3_moe has narrower experts
(--moe-ffn-hidden-size 1024), a2a_ovlp overlaps all-to-alls (NVIDIA/Megatron-LM, tests/functional_tests/test_cases/moe).

The other parts were collected from tests that were far off, so the rows without them are no held-out set.
"""
PLAIN, OTHER, RESUMED, OLDER = "", ", other options", ", resumed", ", older"
"""Groups of Megatron's tests: of its present generation; with options of `UNSTATED`; read from a checkpoint, which
their peak includes; of older generations."""


def rows_of(name: str) -> pd.DataFrame:
    """A file's rows: the columns of `_scoring.predicted`, and software, family, group; each test counts as a model."""
    path = data_file("parallel", f"{name}.csv")
    file: Any = read(path)
    cells = {row.line: row.cells for row in read_table(path).rows}
    rows = predicted(file)
    rows = rows[np.isfinite(rows["peak_mem_bytes"]) & np.isfinite(rows["peak_bytes"])]
    first = [file.rows[at].settings[0] for at in rows.index]
    own = [cells[line] for line in rows["line"]]
    return rows.assign(
        software=[each.software.fitted_as for each in first],
        family=[family_name(each.architecture) for each in first],
        model=[each.get("test") or each["model"] for each in own],
        group=[_group(each) for each in own],
    )


def _group(cells: dict[str, str]) -> str:
    generation = re.search(r"golden_values_(\w+)", cells["source"].replace("-", "_"))
    if "test" not in cells:
        return PLAIN
    if not generation or not generation[1].startswith("dev_dgx_"):
        return OLDER
    if re.search(UNSTATED, cells["test"]):
        return OTHER
    return RESUMED if generation[1].endswith("_2nd") else PLAIN


REPORTS = "public_plans/rows.csv"
RETYPED = {
    **dict.fromkeys(("LF5977", "LF1158", "LF1158z3", "D192"), "deepspeed"),
    **dict.fromkeys(("A1", "A4", "K04"), "accelerate-fsdp"),
    **dict.fromkeys(("LT7", "LT8"), "fsdp-bf16-fp8"),
}
"""Public reports whose stack has its own file in the catalog, in place of the nearest one with which they were typed;
by their notes."""


def reports() -> PlanReports:
    """Public reports of plans, with the stacks that they ran."""
    file: PlanReports = read(data_file(REPORTS))
    return replace(file, rows=tuple(_retyped(row, RETYPED.get(row.name, row.software)) for row in file.rows))


def _retyped(row: PlanReport, software: str) -> PlanReport:
    settings = [each for each in row.settings if not each.startswith("software=")]
    return replace(row, software=software, settings=(*settings, f"software={software}"))


def held_out() -> pd.DataFrame:
    """Peak memory, measured and predicted, of the rows whose options the memory model knows, for `bands`."""
    rows = reported(reports())
    rows = rows[np.isfinite(rows["peak_mem_bytes"]) & np.isfinite(rows["peak_bytes"])]
    error = np.log(rows["peak_mem_bytes"] / rows["peak_bytes"])
    parts = [rows.assign(file=REPORTS.removesuffix(".csv"), error=error)]
    for name in MEASURED:
        rows = rows_of(name)
        error = np.log(rows["peak_mem_bytes"] / rows["peak_bytes"])
        parts.append(rows.assign(file=name, error=error)[rows["group"] == PLAIN])
    return pd.concat(parts, ignore_index=True)
