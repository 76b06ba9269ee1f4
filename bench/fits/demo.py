"""The jobs of `python -m synergy_exec +trace=demo`.

Drawn, with a fixed seed, so that four slots on two CPU cores have work for about two minutes: one job of each model
within seconds, then pairs, a long job and soon a short one beside it: the long one has all slots, then two, then all
again, so that batches, slots and plans change while jobs run. Each model is one for which another kind of plan is the
fastest, or the only one that fits (conf/jobs). Nobody's log stands behind it.
"""

from __future__ import annotations

import numpy as np

from fits import Made

SUMMARY = "traces/demo.csv: draws the demo's jobs"
SEED = 1
LONG, SHORT = {"gpt": 2, "mlp": 6}, {"cnn": 4, "texts": 3, "gpt": 1}
"""Number of jobs of each model: first of a pair, and second."""
PAIR_S, WITHIN_S, FIRST_S = (11.0, 13.0), (3.0, 5.0), 1.5
"""Time from one pair to the next, within a pair, and between the first four jobs: minimum and maximum."""
LONG_S, SHORT_S = (15.0, 20.0), (4.0, 6.0)
"""Training time at the initial batch on the requested slots, as data-parallel replicas: minimum and maximum."""
STEP_S = {
    "cnn": {1: 0.046, 2: 0.033},
    "gpt": {1: 0.160, 2: 0.100},
    "mlp": {1: 0.320, 2: 0.200},
    "texts": {2: 0.500},
}
"""Time of such a step, about, by slots that share two cores of an AMD EPYC. No model's jobs are the long ones."""
TWO_SLOTS_FRACTION = 0.4
COLUMNS = ("submit_s", "model", "iterations", "job", "gpus")


def rows() -> list[tuple[float, str, int, str, int]]:
    """The jobs in order of arrival, as in COLUMNS; iterations are at the model's initial batch."""
    random = np.random.default_rng(SEED)
    jobs = [(FIRST_S * place, model, SHORT_S) for place, model in enumerate(STEP_S)]
    longs, shorts = (
        random.permutation([model for model, count in each.items() for _ in range(count)]) for each in (LONG, SHORT)
    )
    at_s = jobs[-1][0]
    for long, short in zip(longs, shorts, strict=True):
        at_s += random.uniform(*PAIR_S)
        jobs += [(at_s, str(long), LONG_S), (at_s + random.uniform(*WITHIN_S), str(short), SHORT_S)]
    made = []
    for job, (submit_s, model, between_s) in enumerate(jobs):
        wide, takes_s = random.random() < TWO_SLOTS_FRACTION, random.uniform(*between_s)
        slots = 2 if wide or 1 not in STEP_S[model] else 1
        iterations = max(10, round(takes_s / STEP_S[model][slots] / 10) * 10)
        made.append((round(submit_s, 1), model, iterations, f"{model}-{job:02}", slots))
    return made


def fit() -> Made:
    lines = [",".join(map(str, row)) for row in (COLUMNS, *rows())]
    return Made({"traces/demo.csv": "\n".join(lines) + "\n"}, f"{len(lines) - 1} jobs")
