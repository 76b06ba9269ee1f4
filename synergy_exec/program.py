"""The executor's command line."""

from synergy_exec.settings import Settings
from synergy_runs.program import Program

EXECUTOR = Program(
    name="synergy_exec",
    config="executor",
    settings=Settings,
    groups=("trace",),
    example="demo",
    free_keys=("backend.options.",),
)
