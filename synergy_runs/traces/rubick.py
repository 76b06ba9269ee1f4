"""Reader of the job lists of Rubick (MLSys 2025): models with their requested GPUs and a number of steps.

Columns: name, submission_time (s), application, num_gpus, steps (at the model's only batch), is_sla (1: a guaranteed
job). Ignored: duration, which follows from the steps; num_cpus, since Rubick's nodes have enough CPUs; exec_plan,
the plan that the user requested, since every policy runs jobs under the best plan measured on their GPUs.
"""

from __future__ import annotations

from functools import partial

from synergy_runs.traces._reading import Number, Text, by_header, jobs_from_zero
from synergy_runs.traces.rows import number, one_of, seconds, whole

NAME = "rubick"
SUMMARY = "job lists of Rubick: name, submission_time, application, num_gpus, steps, is_sla"
GUARANTEED, BEST_EFFORT = "guaranteed", "best-effort"
"""Virtual clusters: jobs that are guaranteed the speed of their request, and all other jobs."""
COLUMNS = {
    "job_name": Text("name"),
    "submit_s": Number("submission_time", seconds),
    "model": Text("application", lambda text, column: f"rubick-{text.strip()}"),
    "gpus": Number("num_gpus", whole),
    "iterations": Number("steps", partial(number, expected="steps")),
    "virtual_cluster": Text(
        "is_sla", partial(one_of, meanings={"0": BEST_EFFORT, "1": GUARANTEED}), missing=BEST_EFFORT
    ),
}
recognises = by_header("exec_plan", "is_sla")
read = jobs_from_zero(COLUMNS, duration_s=0.0)
