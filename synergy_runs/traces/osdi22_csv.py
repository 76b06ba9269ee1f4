"""Reader of the job lists of Synergy's evaluation (OSDI 2022), which the generator `osdi22` also draws.

Columns: job (an id), arrival_s (from the list's start), duration_s (with the GPU-proportional share of a node's CPUs
and memory), model, gpus.
"""

from __future__ import annotations

from synergy_runs.traces._reading import Number, Text, by_header, jobs_from_zero
from synergy_runs.traces.rows import seconds, whole

NAME = "osdi22_csv"
SUMMARY = "job lists of Synergy (OSDI 2022): job, arrival_s, duration_s, model, gpus"
COLUMNS = {
    "job_name": Text("job"),
    "submit_s": Number("arrival_s", seconds),
    "duration_s": Number("duration_s", seconds),
    "gpus": Number("gpus", whole),
    "model": Text("model"),
}
recognises = by_header(*(each.name for each in COLUMNS.values()))
read = jobs_from_zero(COLUMNS)
