"""Scores the memory model on measured peaks, and counts the plans that ran although the model refuses them.

    SYNERGY_DATA=… python bench/fit_memory.py [--json OUT]

Reads $SYNERGY_DATA/parallel with the readers of `validate`. Per file and group: n, then errors of the prediction as
fractions of what was measured. Megatron's tests log the last rank, nanotron rank 0, torchtitan the worst rank.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from synergy_core.commands._scoring import predicted
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements._table import read_table
from synergy_core.goodput.calibration import accuracy
from synergy_core.planner.bands import family_name
from synergy_core.planner.memory import FRAGMENTATION, MARGIN, memory, visible_bytes

DATA = Path(os.environ.get("SYNERGY_DATA", "../shared/data")) / "parallel"
MEASURED = ("megatron_ci_memory", "nanotron_llama1b_h100", "torchtitan_h100_h200")
RAN = (
    *("vtrain_multi_a100", "vtrain_single_a100", "megatron_v1_2020_v100_a100", "korthikanti_table5"),
    *("llmfoundry_a100_80gb_bf16", "llmfoundry_h100_80gb_bf16", "nanotron_llama1b_h100", "torchtitan_h100_h200"),
    *("mbridge_dense", "mbridge_moe_and_other"),
)
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
    """A file's rows: the columns of `_scoring.predicted`, and setting (the first that the row may have had, which has
    its software and sizes), family, test (name of the test, or else of the model) and group (of the test)."""
    file: Any = read(DATA / f"{name}.csv")
    cells = {row.line: row.cells for row in read_table(DATA / f"{name}.csv").rows}
    rows = predicted(file)
    rows = rows[np.isfinite(rows["peak_mem_bytes"]) & np.isfinite(rows["peak_bytes"])]
    first = [file.rows[at].settings[0] for at in rows.index]
    own = [cells[line] for line in rows["line"]]
    return rows.assign(
        setting=first,
        family=[family_name(each.architecture) for each in first],
        test=[each.get("test") or each["model"] for each in own],
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


Report = list[dict[str, Any]]


def add(report: Report, file: str, group: str, told: Any, truth: Any) -> None:
    score = accuracy(np.asarray(told, float), np.asarray(truth, float))
    report.append({"file": file, "group": group, **asdict(score)})
    print(
        f"{file:<24}{group:<44}{score.n:>4} {score.mape:>8.1%} {score.median:>8.1%} {score.p90:>8.1%}"
        f" {score.max:>8.1%} {score.bias:>+8.1%} {score.spearman:>9.2f}"
    )


def measured(report: Report) -> None:
    """Peaks of every group; of Megatron's tests also the bytes between steps, and what a step adds.

    No constant is fitted to nanotron's rows, but the list of what eager autograd keeps was made with them.
    """
    for name in MEASURED:
        for (family, group), rows in rows_of(name).groupby(["family", "group"], sort=False):
            what = f"{family}{group}"
            add(report, name, f"{what}: peak", rows["peak_bytes"], rows["peak_mem_bytes"])
            if np.isfinite(rows["held_bytes"]).all():
                growth = [rows["peak_bytes"] - rows["between_bytes"], rows["peak_mem_bytes"] - rows["held_bytes"]]
                add(report, name, f"{what}: between steps", rows["between_bytes"], rows["held_bytes"])
                add(report, name, f"{what}: growth", *growth)


def must_fit(report: Report) -> None:
    """Timed plans ran on their GPUs, so one of the settings that a row may have had must fit into each memory size."""
    print(f"\n{'plans that ran':<34}{'memory':>7}{'n':>5}{'refused':>9}  largest share of the GPU's memory")
    for name in RAN:
        file: Any = read(DATA / f"{name}.csv")
        needed = []
        for case in file.cases(every_setting=True):
            share = memory(case.work, case.plans, case.software).needed / visible_bytes(case.machine)
            needed.append(pd.DataFrame({"size": case.machine.memory_bytes, "row": case.rows, "share": share}))
        least = pd.concat(needed).groupby(["size", "row"])["share"].min()
        for size, shares in reversed(list(least.groupby(level="size"))):
            kind, refused = f"{size / 1e9:.0f} GB", int((shares > 1.0 - MARGIN).sum())
            print(f"{name:<34}{kind:>7}{len(shares):>5}{refused:>9}  {shares.max():.2f}")
            report.append({"file": name, "group": f"must fit {kind}", "n": len(shares), "false_refusals": refused})


def constants(report: Report) -> None:
    """The two constants that data can tell: the workspace without one degree at a time, scored on it; fragmentation."""
    print("\nconstants")
    rows = rows_of("megatron_ci_memory")
    rows = rows[(rows["group"] == PLAIN) & (rows["family"] == "transformer") & (rows["gpu_type"] == "h100")]
    workspace = np.array([each.software.workspace_bytes for each in rows["setting"]])
    rows, shipped = rows[workspace == workspace.max()], workspace.max()
    held, bare = rows["held_bytes"].to_numpy(), rows["between_bytes"].to_numpy() - shipped
    mib = 2.0**20
    print(f"workspace: {np.median(held - bare) / mib:.0f} MiB over {len(rows)} rows, {shipped / mib:.0f} shipped")
    for name in ("tensor", "pipeline"):
        for value in sorted(rows[name].unique()):
            out = (rows[name] == value).to_numpy()
            found = float(np.median((held - bare)[~out]))
            error = float(np.mean(np.abs(bare[out] + found - held[out]) / held[out]))
            print(f"  without {name}={value}: {found / mib:.0f} MiB, {error:.1%} on its {out.sum()} rows")
            group = f"workspace without {name}={value}"
            report.append({"file": "constants", "group": group, "bytes": found, "mape": error})
    rows = rows_of("torchtitan_h100_h200")
    reserved = rows["peak_bytes"].to_numpy()
    freed = (reserved - rows["between_bytes"].to_numpy()) / (1.0 + FRAGMENTATION)
    over = (rows["peak_mem_bytes"].to_numpy() - (reserved - FRAGMENTATION * freed)) / freed
    spread = f"{over.min():.1%} to {over.max():.1%}"
    print(f"fragmentation: {np.median(over):.1%} over {len(rows)} rows ({spread}), {FRAGMENTATION:.1%} shipped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write every group there")
    chosen = parser.parse_args()
    report: Report = []
    heads = "".join(f"{name:>9}" for name in ("mape", "median", "p90", "max", "bias", "spearman"))
    print(f"{'file':<24}{'group':<44}{'n':>4}{heads}")
    measured(report)
    must_fit(report)
    constants(report)
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
