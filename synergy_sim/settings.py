"""Every key of the simulator: its type and its meaning; defaults stand in conf/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from synergy_core.jobs.exchange import Compression
from synergy_runs.command_line import Program
from synergy_runs.settings import (
    ABOVE_ZERO,
    COMPRESSION_MEANING,
    COMPRESSOR_MEANING,
    COUNT,
    FACTOR,
    FOLDER,
    FRACTION,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    ROUND,
    SEEDS,
    Bounds,
    ClusterSettings,
    TraceSettings,
    key,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedSettings:
    """How decisions are carried out."""

    round_s: float | None = key(
        "decide once per round of so many seconds; null: whenever something happens", bounds=ROUND
    )
    own_rounds: bool = key("whether policies that allocate keep the round they were published with")
    refill_s: float = key(
        "seconds within which GPUs that a job's end frees are given away; 0: at the round's end", bounds=NOT_NEGATIVE
    )
    decide_fraction: float = key("where in a round the next is decided, in (0, 1]; 1: at its end", bounds=PART)
    launch_s: float = key("seconds before a job's first step", bounds=NOT_NEGATIVE)
    restart_s: float = key("seconds before the first step after a preemption", bounds=NOT_NEGATIVE)
    resize_fraction: float = key(
        "how much of restart_s a job stands still where only its GPUs' number changes", bounds=FRACTION
    )
    exit_s: float = key("seconds to save and leave after the last step of a run", bounds=NOT_NEGATIVE)
    checkpoint_interval_s: float = key(
        "training seconds between checkpoints; 0: saves when told to stop", bounds=NOT_NEGATIVE
    )
    stretch: Literal["none", "log", "linear"] = key("how ended leases delay a round: a·ln(1+n) or b·min(n, most)")
    stretch_s: float = key("a or b of the stretch", bounds=NOT_NEGATIVE)
    stretch_jobs: int | None = key(
        "most of the linear stretch; null: no limit",
        bounds=COUNT,
    )
    start_delay_s: float = key("seconds before the first round", bounds=NOT_NEGATIVE)
    early_launch: bool = key("whether a job may start on idle GPUs before its round does")
    free_moves: bool = key("whether a job that moves but keeps its GPU type and its GPUs per node pays nothing")
    whole_seconds: bool = key("whether epochs of training jobs end at whole seconds")
    whole_rounds: bool = key("whether training jobs do whole iterations per round and end at the end of one")
    storage_bytes_per_s: float = key(
        "at which jobs with parallel plans save and load their checkpoints", bounds=ABOVE_ZERO
    )
    startup_s: float = key(
        "seconds such a job starts up, beside saving and loading, whenever it starts", bounds=NOT_NEGATIVE
    )
    by_model: dict[str, dict[str, float]] = key("other costs for a model: {resnet50: {launch_s: 20}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSettings:
    """Jobs with parallel plans."""

    error: float = key(
        "standard deviation of the logarithm of true ÷ planned step times, by architecture and GPU type",
        bounds=FRACTION,
    )
    plan_error: float = key(
        "standard deviation of a further part that each plan has of its own, drawn by its degrees", bounds=FRACTION
    )
    noise_tokens: float = key("noise scale of the gradient, tokens", bounds=ABOVE_ZERO)
    batch_growth: float = key(
        "up to how many times the requested batch they may train at; 1: it is fixed", bounds=FACTOR
    )
    memory_error: bool = key("whether plans may run out of memory: peaks differ from the planner's as measured ones do")
    known: bool = key("whether policies know their true step times, and jobs the truly fastest plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthSettings:
    """How fast training jobs really run."""

    profiles: Path | None = key("a folder of measured tables; null: profiles in $SYNERGY_DATA, else the catalog")
    measured: bool = key("whether to use measured tables where there are some")
    slowdown: dict[str, float] = key("by model, how much slower jobs are than their steps add up to: {bert: 1.2}")
    max_local_batch: dict[str, int] = key("by model, most samples on a GPU where less than what fits")
    fixed_gpus: dict[str, int] = key(
        "by model, the GPUs that its jobs request and always run on, at the requested batch"
    )
    min_gpus: dict[str, int] = key("by model, the fewest GPUs that its jobs request and run on")
    not_preemptible: list[str] = key("models whose jobs, once started, keep their GPUs")
    most_gpus: int = key("GPUs that any job may grow to, unless it asks for more", bounds=POSITIVE)
    labels: int = key(
        "into how many unrelated labels each model is split; observations are shared within one", bounds=POSITIVE
    )
    declared_error: float | None = key(
        "standard deviation of the logarithm of declared ÷ true work; null: 0.5 where jobs are assigned a model, 0 "
        "where the log names it",
        bounds=Bounds("a number from 0 to 10", lambda value: 0 <= value <= 10),
    )
    noise_fraction: float = key(
        "standard deviation of the logarithm of observed ÷ true step times",
        bounds=Bounds("a fraction in [0, 1)", lambda value: 0 <= value < 1),
    )
    straggler_fraction: float = key("probability that a run of a job straggles", bounds=FRACTION)
    straggler_slowdown: float = key("how much slower it then is", bounds=FACTOR)
    profile: Path | None = key(
        "a testbed's profile (python -m synergy_exec profile): how fast its models are, and costs"
    )
    planned: PlannedSettings = key("jobs with parallel plans")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A whole run."""

    trace: TraceSettings = key("which jobs arrive: +trace=philly")
    cluster: ClusterSettings = key("what they run on: cluster=default or heterogeneous")
    testbed: TestbedSettings = key("how decisions are carried out: testbed=ideal or shockwave_v100")
    truth: TruthSettings = key("how fast training jobs really run")
    information: Literal["own", "declared", "shared", "all"] | None = key(
        "what policies may know of a job beside its own reports: nothing (own), its declared work, what other jobs of "
        "its model report (shared), all; null: as each policy is published"
    )
    input: Literal["known", "learned"] = key(
        "how policies know how fast training data is prepared with so many CPUs and so much memory: by profiles made "
        "before (known), or by what jobs report (learned)"
    )
    policy: list[str] = key(
        "one policy, or a list to compare; the first is what the others are compared to. With other parameters for one "
        "row: sia(information=all,growth=4); on the terms of another policy: sia(like=synergy)"
    )
    same_information: bool = key(
        "whether a policy that is told less, or may give jobs less, than another of the list is also run on the terms "
        "of that one: sia(like=synergy)"
    )
    parameters: dict[str, dict[str, Any]] = key("parameters by policy: parameters.las.quantum_s=1800")
    seed: list[int] = key("one seed or a list; each policy sees the same jobs for the same seed", bounds=SEEDS)
    compression: Compression = key(COMPRESSION_MEANING)
    compressor: str = key(COMPRESSOR_MEANING)
    restart_s: float = key("what a preempted job pays when it resumes, seconds", bounds=NOT_NEGATIVE)
    round_s: float | None = key("decide once per round of so many seconds; null: as the policy does", bounds=ROUND)
    results_dir: Path = key("where results go", bounds=FOLDER)
    figures: bool = key("whether to draw figures and write report.html and traces for Perfetto")
    progress: bool = key("whether to show a progress bar (never if the output is not a terminal)")


# The simulator's command line.


SIMULATOR = Program(
    name="synergy_sim",
    config="config",
    settings=Settings,
    groups=("trace", "cluster", "testbed", "truth", "experiment"),
    example="philly",
    sweeps=True,
)
