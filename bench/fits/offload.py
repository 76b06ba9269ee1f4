"""The two constants of an offloaded optimizer, fitted to two models of Rubick and scored on the others.

A step's time is linear in both: seconds of the CPUs per parameter, and the reciprocal of PCIe's efficiency. The rest of
the step is the planner's. synergy_core/planner/step_time.py has the constants; errors are of those as fitted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from runner.experiment import data_file
from scipy.optimize import least_squares

from fits import Made
from synergy_core.commands._scoring import predicted
from synergy_core.commands._settings import table
from synergy_core.commands.measurements import read
from synergy_core.goodput.calibration import accuracy
from synergy_core.planner import step_time

SUMMARY = "writes nothing: the two constants of an offloaded optimizer (needs: data)"
FITTED = ("bert", "gpt2")
"""A small model, and the largest whose time is known well without offloading. The form of the model was chosen with all
rows in view; its constants are fitted to these two alone."""


def fit() -> Made:
    file: Any = read(data_file("rubick", "iteration_times.csv"))
    offloaded = np.array([any(each.software.offload for each in row.settings) for row in file.rows])

    def seconds(update_s: float, copy: float) -> np.ndarray:
        """(rows,): predicted step times. copy: 1 ÷ PCIe's efficiency."""
        step_time.HOST_UPDATE_S, step_time.HOST_COPY_EFFICIENCY = update_s, 1.0 / copy if copy else np.inf
        times: np.ndarray = predicted(file)["time_s"].to_numpy()[offloaded]
        return times

    rest = seconds(0.0, 0.0)
    update, copy = seconds(1e-9, 0.0) - rest, seconds(0.0, 1.0) - rest
    measured = np.array([row.iter_time_s for row in file.rows])[offloaded]
    models = np.array([row.model for row in file.rows])[offloaded]
    mine = np.isin(models, FITTED)

    def told(x: np.ndarray) -> np.ndarray:
        return rest + x[0] * update + x[1] * copy

    found = least_squares(lambda x: np.log(told(x) / measured)[mine], [1.0, 2.0], loss="soft_l1", f_scale=0.1).x
    constants = (
        f"HOST_UPDATE_S = {found[0] * 1e-9:.2e}, HOST_COPY_EFFICIENCY = {1.0 / found[1]:.3f}; fitted to {FITTED}"
    )
    rows = []
    for model in dict.fromkeys(models.tolist()):
        of = models == model
        score = accuracy(told(found)[of], measured[of])
        numbers = [f"{score.mape:.1%}", f"{score.max:.1%}", f"{score.bias:+.1%}"]
        rows.append([model, "fitted" if model in FITTED else "", str(score.n), *numbers])
    return Made({}, f"{constants}\n\n{table(('model', '', 'n', 'mape', 'max', 'bias'), rows)}")
