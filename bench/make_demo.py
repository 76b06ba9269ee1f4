"""Writes traces/demo.csv, the jobs of `python -m synergy_exec +trace=demo`: `python bench/make_demo.py`.

Drawn, with a fixed seed, so that two CPU cores have work for two to three minutes and not quite enough of it: jobs
that ask for one slot about fill both, sometimes several wait and sometimes one could have both, so that batch, slots
and plans change while jobs run. Nobody's log stands behind it.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SEED = 24
JOBS = 22
MEAN_GAP_S = 7.0
LEAST_S, MOST_S = 5.0, 14.0
"""Of training on one slot at the initial batch."""
STEP_S = {"cnn": 0.020, "gpt": 0.050, "mlp": 0.120}
"""Of a step at the initial batch on one core of an AMD EPYC, about: only so that no model's jobs are the long ones."""
TWO_SLOTS_FRACTION = 0.25
COLUMNS = ("submit_s", "model", "iterations", "job", "gpus")


def rows() -> list[tuple[float, str, int, str, int]]:
    """The jobs in order of arrival, as in COLUMNS; iterations are at the model's initial batch."""
    random = np.random.default_rng(SEED)
    submit_s = np.concatenate([[0.0], np.cumsum(random.exponential(MEAN_GAP_S, JOBS - 1))])
    models = [list(STEP_S)[each] for each in random.permutation(np.arange(JOBS) % len(STEP_S))]
    long_s = random.uniform(LEAST_S, MOST_S, JOBS)
    slots = 1 + (random.random(JOBS) < TWO_SLOTS_FRACTION)
    return [
        (round(float(at_s), 1), model, round(float(took_s / STEP_S[model] / 10)) * 10, f"{model}-{job:02}", int(wide))
        for job, (at_s, model, took_s, wide) in enumerate(zip(submit_s, models, long_s, slots, strict=True))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "traces" / "demo.csv")
    with parser.parse_args().out.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerows([COLUMNS, *rows()])


if __name__ == "__main__":
    main()
