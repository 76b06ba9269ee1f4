"""The simulator's command line."""

from synergy_runs.program import Program
from synergy_sim.settings import Settings

SIMULATOR = Program(
    name="synergy_sim",
    config="config",
    settings=Settings,
    groups=("trace", "cluster", "testbed", "truth", "experiment"),
    example="philly",
    free_keys=(
        "testbed.by_model.",
        "cluster.virtual",
        "truth.slowdown.",
        "truth.max_local_batch.",
        "truth.fixed_gpus.",
        "truth.min_gpus.",
    ),
    sweeps=True,
)
