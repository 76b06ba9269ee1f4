"""Waiting in a log that passed with room for the job, compared with its definition."""

from pathlib import Path

import numpy as np
import pytest

from synergy_runs.traces.cluster_seen import seen
from synergy_runs.traces.room import seconds_with_room
from synergy_runs.traces.rows import TraceRows


@pytest.mark.parametrize("seed", range(30))
def test_seconds_with_room_are_those_in_which_enough_gpus_of_a_type_that_the_job_may_use_are_free(seed):
    random, rows = np.random.default_rng(seed), TraceRows(path=Path("made"), format_name="made")
    jobs = int(random.integers(2, 80))
    submit_s, types = random.integers(0, 300, jobs), random.choice(["a100", "v100"], jobs)
    start_s = submit_s + random.integers(-3, 90, jobs) * (random.random(jobs) < 0.7)
    start_s = np.where(random.random(jobs) < 0.1, np.nan, start_s)
    asked = np.where(random.random(jobs) < 0.5, types, "")
    run_s, gpus = random.integers(0, 60, jobs), random.choice([1, 2, 4, 8, 12], jobs)
    values = {"submit_s": submit_s, "start_s": start_s, "duration_s": run_s, "gpus": gpus, "given_gpu_type": types}
    rows.add(np.arange(jobs), job_name="", gpu_type=asked, **values)
    second = np.arange(400)[:, None]
    use = np.where((start_s <= second) & (second < start_s + run_s), gpus, 0)
    free = {kind: use[:, types == kind].sum(axis=1).max() - use[:, types == kind].sum(axis=1) for kind in set(types)}
    expected = [
        sum(any(free[kind][at] >= gpus[job] for kind in free if asked[job] in ("", kind)) for at in range(*span))
        for job, span in enumerate(zip(submit_s.tolist(), np.nan_to_num(start_s).astype(int).tolist(), strict=True))
    ]
    expected = np.where(np.isnan(start_s), np.nan, expected)
    assert seconds_with_room(rows, seen(rows)) == pytest.approx(expected, nan_ok=True)
