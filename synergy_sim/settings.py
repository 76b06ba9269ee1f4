"""Every key of the simulator with its type and its meaning. The defaults are in conf/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from synergy_core.scheduling.jobs.exchange import Compression
from synergy_runs.inputs.command_line import Program
from synergy_runs.inputs.keys import (
    ABOVE_ZERO,
    COMPRESSION_MEANING,
    COMPRESSOR_MEANING,
    COUNT,
    FACTOR,
    FIGURES_MEANING,
    FOLDER,
    FRACTION,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    ROUND,
    SEEDS,
    Bounds,
    ClusterSettings,
    Figures,
    TraceSettings,
    key,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedSettings:
    """How decisions are carried out."""

    round_s: float | None = key(
        "decide once per round of this many seconds; null: at every arrival and end of a job", bounds=ROUND
    )
    own_rounds: bool = key("whether allocation policies keep the round length they were published with")
    refill_s: float = key(
        "maximum seconds until GPUs freed by a job's end are given away; 0: at the round's end", bounds=NOT_NEGATIVE
    )
    decide_fraction: float = key("fraction of a round after which the next is decided; 1: at its end", bounds=PART)
    launch_s: float = key("seconds before a job's first step", bounds=NOT_NEGATIVE)
    restart_s: float = key("seconds before the first step after a preemption", bounds=NOT_NEGATIVE)
    resize_fraction: float = key(
        "fraction of restart_s that a job pauses if only its number of GPUs changes", bounds=FRACTION
    )
    exit_s: float = key("seconds to save and exit after the last step of a run", bounds=NOT_NEGATIVE)
    checkpoint_interval_s: float = key(
        "training seconds between checkpoints; 0: a job saves when it is stopped", bounds=NOT_NEGATIVE
    )
    stretch: Literal["none", "log", "linear"] = key("how n ended leases delay a round: a·ln(1+n) or b·min(n, most)")
    stretch_s: float = key("a or b of the stretch", bounds=NOT_NEGATIVE)
    stretch_jobs: int | None = key("maximum number of ended leases n that count; null: no limit", bounds=COUNT)
    start_delay_s: float = key("seconds before the first round", bounds=NOT_NEGATIVE)
    early_launch: bool = key("whether a job may start on idle GPUs before its round begins")
    free_moves: bool = key("whether a move is free if the job keeps its GPU type and its GPUs per node")
    whole_seconds: bool = key("whether epochs of training jobs end at whole seconds")
    whole_rounds: bool = key("whether training jobs do whole iterations per round and end at the end of a round")
    storage_bytes_per_s: float = key(
        "bytes per second at which jobs with parallel plans save and load checkpoints", bounds=ABOVE_ZERO
    )
    startup_s: float = key(
        "startup seconds of a job with parallel plans, in addition to saving and loading", bounds=NOT_NEGATIVE
    )
    by_model: dict[str, dict[str, float]] = key(
        "costs that differ for a model (launch_s, restart_s, exit_s, checkpoint_interval_s): {resnet50: {launch_s: 20}}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSettings:
    """Jobs with parallel plans."""

    error: float = key(
        "standard deviation of the logarithm of true ÷ planned step times, by architecture and GPU type",
        bounds=FRACTION,
    )
    plan_error: float = key(
        "standard deviation of an additional error of each plan, drawn by its parallel degrees", bounds=FRACTION
    )
    noise_tokens: float = key("noise scale of the gradient in tokens", bounds=ABOVE_ZERO)
    batch_growth: float = key(
        "maximum batch as a multiple of the requested batch; 1: the batch is fixed", bounds=FACTOR
    )
    memory_error: bool = key("whether plans may run out of memory: peaks differ from the planner's as in measurements")
    known: bool = key("whether policies know true step times and jobs run under the truly fastest plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthSettings:
    """How fast training jobs really run."""

    profiles: Path | None = key("a folder of measured tables; null: profiles in $SYNERGY_DATA, else the catalog")
    measured: bool = key("whether to use measured tables if there are any")
    slowdown: dict[str, float] = key("by model, true run time ÷ sum of its step times: {bert: 1.2}")
    max_local_batch: dict[str, int] = key("by model, maximum samples per GPU, if below what fits in memory")
    fixed_gpus: dict[str, int] = key(
        "by model, the GPUs that its jobs request and always run on, at the requested batch"
    )
    min_gpus: dict[str, int] = key("by model, the minimum number of GPUs that its jobs request and run on")
    not_preemptible: list[str] = key("models whose jobs, once started, keep their GPUs")
    most_gpus: int = key("maximum GPUs of a job, unless it requests more", bounds=POSITIVE)
    labels: int = key(
        "number of labels that each model is split into; jobs share observations within a label", bounds=POSITIVE
    )
    declared_error: float | None = key(
        "standard deviation of the logarithm of declared ÷ true work; null: 0.5 if jobs are assigned a model, 0 "
        "if the log names it",
        bounds=Bounds("a number from 0 to 10", lambda value: 0 <= value <= 10),
    )
    noise_fraction: float = key(
        "standard deviation of the logarithm of observed ÷ true step times",
        bounds=Bounds("a fraction in [0, 1)", lambda value: 0 <= value < 1),
    )
    straggler_fraction: float = key("probability that a run of a job straggles", bounds=FRACTION)
    straggler_slowdown: float = key("factor by which a straggling run is slower", bounds=FACTOR)
    profile: Path | None = key(
        "a testbed's profile (python -m synergy_exec profile): measured step times and costs of its models"
    )
    planned: PlannedSettings = key("jobs with parallel plans")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSettings:
    """All settings of a run."""

    trace: TraceSettings = key("the jobs that arrive: +trace=philly; demo needs truth.profile=FILE")
    cluster: ClusterSettings = key("the nodes they run on: cluster=default or heterogeneous")
    testbed: TestbedSettings = key("how decisions are carried out: testbed=ideal or shockwave_v100")
    truth: TruthSettings = key("how fast training jobs really run")
    information: Literal["own", "declared", "shared", "all"] | None = key(
        "what policies know about a job besides its own reports: nothing (own), its declared work (declared), reports "
        "of other jobs of its model (shared), both (all); null: as each policy is published"
    )
    input: Literal["known", "learned"] = key(
        "how policies know the speed of input preparation by CPUs and memory: from profiles measured beforehand "
        "(known), or from the jobs' reports (learned)"
    )
    policy: list[str] = key(
        "one policy, or a list; the others are compared to the first. Other parameters for one row: "
        "sia(information=all,growth=4); on the terms of another policy: sia(like=synergy)"
    )
    same_information: bool = key(
        "whether a policy with less information or fewer plans than another in the list is also run on the terms of "
        "that policy: sia(like=synergy)"
    )
    parameters: dict[str, dict[str, Any]] = key("parameters by policy: parameters.las.quantum_s=1800")
    seed: list[int] = key("one seed or a list; each policy sees the same jobs for the same seed", bounds=SEEDS)
    compression: Compression = key(COMPRESSION_MEANING)
    compressor: str = key(COMPRESSOR_MEANING)
    restart_s: float = key("seconds before the first step of a preempted job that resumes", bounds=NOT_NEGATIVE)
    round_s: float | None = key("decide once per round of this many seconds; null: as the policy does", bounds=ROUND)
    results_dir: Path = key("folder for results", bounds=FOLDER)
    figures: Figures = key(FIGURES_MEANING)
    progress: bool = key("whether to show a progress bar (never if the output is not a terminal)")


# The simulator's command line.


SIMULATOR = Program(
    name="synergy_sim",
    config="config",
    settings=SimulatorSettings,
    groups=("trace", "cluster", "testbed", "truth", "experiment"),
    example="philly",
    sweeps=True,
)
