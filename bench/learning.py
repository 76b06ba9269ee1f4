"""What a few measured plans of one's own model are worth: error and regret after 0, 1, 3 and 7 of them.

    SYNERGY_DATA=… OPENBLAS_NUM_THREADS=1 python bench/learning.py [--draws 20]

For each model of Rubick's table, so many of its plans are drawn at random, the constants below are refitted to them as
`calibrate --constants` does, starting from the shipped ones, and all its other plans are predicted. Error: mean of
|predicted ÷ measured − 1|. Regret: how much slower than the best measured plan the plan is that is predicted to be the
fastest on the same GPUs; drawn plans count with the time that was measured. Arena's table does not name its plans.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_tables import NONE, table

from synergy_core.commands._scoring import fit, regrets
from synergy_core.commands.measurements import read
from synergy_core.planner.machine import constants_for

CONSTANTS = ("gemm_efficiency", "tensor_efficiency", "network_efficiency", "data_exposed")
"""Of computing, and of tensor-parallel, network and hidden data-parallel communication."""
COUNTS = (0, 1, 3, 7)


def learnt(cases: list[Any], drawn: set[int]) -> dict[int, float]:
    """Predicted seconds by row, after the drawn rows were measured."""
    seconds: dict[int, float] = {}
    software = {case.software.name for case in cases}
    for name in software:
        mine = [replace(case, owner="") for case in cases if case.software.name == name]
        start = constants_for(mine[0].machine, mine[0].software)
        keep = [np.isin(case.rows, list(drawn)) for case in mine]
        known = sum(int(each.sum()) for each in keep)
        constants = start
        if known:
            shared = [replace(case, share=each.sum() / known) for case, each in zip(mine, keep, strict=True)]
            constants = fit(shared, CONSTANTS, {}, {"": start}, keep).constants[""]
        for case in mine:
            seconds.update(zip(case.rows.tolist(), case.step_s(constants).tolist(), strict=True))
    return seconds


def rubick(draws: int) -> list[list[str]]:
    """Table rows, one per model: mean error and mean regret for each number of measured plans."""
    file = read(Path(os.environ["SYNERGY_DATA"]) / "rubick" / "iteration_times.csv")
    rows = []
    for model in sorted({row.model for row in file.rows}):
        mine = file.only(model, None)
        cases = [each for each in mine.cases() if not each.software.offload]
        at = sorted({row for case in cases for row in case.rows.tolist()})
        measured = {row: mine.rows[row].iter_time_s for row in at}
        settings = [mine.rows[row].settings[0] for row in at]
        keys = [(setting.plan.gpus, str(setting.machine)) for setting in settings]
        plans = [setting.plan for setting in settings]
        cells = [f"{len(at)}"]
        for count in COUNTS:
            errors, losses = [], []
            for draw in range(draws if count else 1):
                random = np.random.default_rng((draw, count))
                drawn = set(random.choice(at, min(count, len(at) // 2), replace=False).tolist())
                seconds = learnt(cases, drawn)
                errors += [abs(seconds[row] / measured[row] - 1) for row in at if row not in drawn]
                believed = [measured[row] if row in drawn else seconds[row] for row in at]
                losses += regrets(believed, list(measured.values()), keys, plans)
            cells += [f"{np.mean(errors):.1%}", f"{np.mean(losses):.1%}" if losses else NONE]
        rows.append([model, *cells])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, help="of measured plans, for each number of them (20)")
    chosen = parser.parse_args()
    header = ("model", "plans", *(f"{what} after {count}" for count in COUNTS for what in ("error", "regret")))
    print(table(header, rubick(chosen.draws), 1))


if __name__ == "__main__":
    main()
