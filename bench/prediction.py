"""How well run times are predicted from jobs that have ended, over the predictor's two constants.

    python bench/prediction.py [TRACE ...] [--log FILE]

Four weeks of each generated trace (philly, venus, earth, saturn, uranus), or a real log, in order of ends: each job is
predicted when it arrives, learnt when it ends (as if it never waited). Spearman's rank correlation of prediction and
truth is what an order needs; the median absolute percentage error is printed beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from synergy_core.goodput.calibration import spearman
from synergy_core.jobs.record import Job
from synergy_core.scheduling.order import DurationPredictor
from synergy_core.units import DAY_S
from synergy_runs.generators import generate
from synergy_runs.traces import read_trace
from synergy_runs.workload import Workload, from_rows

PRIOR_JOBS = (0.5, 1.0, 2.0, 4.0)
FADES = (0.7, 0.8, 0.9, 0.97, 1.0)


def predictions(work: Workload, predictor: DurationPredictor) -> np.ndarray:
    """Predicted seconds per job."""
    result = np.empty(len(work))
    columns = (work.submit_time_s, work.gpus, work.duration_s, work.virtual_cluster_code, work.user_code)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for job_id, (submit_s, gpus, duration_s, tenant, user) in enumerate(rows):
        job = Job(job_id, submit_s, gpus, virtual_cluster=str(tenant), user=work.users[user])
        result[job_id] = predictor.predict_s(job)
        predictor.ended(job, duration_s, submit_s + duration_s)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", default=["philly", "venus", "earth", "saturn", "uranus"])
    parser.add_argument("--log", type=Path, help="a real log instead")
    chosen = parser.parse_args()
    if chosen.log:
        works = [from_rows(read_trace(chosen.log), name=chosen.log.name)]
    else:
        works = [from_rows(generate(name, window_s=28 * DAY_S), name=name) for name in chosen.traces]
    print(
        f"{'prior jobs':>10} {'fade':>6}  "
        + "  ".join(f"{work.name:>16}" for work in works)
        + "  (Spearman, median APE)"
    )
    for prior_jobs in PRIOR_JOBS:
        for fade in FADES:
            cells = []
            for work in works:
                guess_s = predictions(work, DurationPredictor(prior_jobs=prior_jobs, fade=fade))
                error = np.abs(guess_s - work.duration_s) / np.maximum(work.duration_s, 1.0)
                cells.append(f"{spearman(guess_s, work.duration_s):8.3f} {np.median(error):7.0%}")
            print(f"{prior_jobs:10g} {fade:6g}  " + "  ".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
