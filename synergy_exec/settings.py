"""Every key of the executor: its type and its meaning; defaults stand in conf/executor.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from synergy_runs.settings import TraceSettings, key


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """How agents get onto nodes."""

    name: str = key("local (this machine), ray or slurm")
    options: dict[str, Any] = key("the backend's own, such as backend.options.slots=2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A whole run."""

    trace: TraceSettings | None = key("which jobs arrive: +trace=demo; null: only what is submitted (with serve=true)")
    backend: BackendSettings = key("how agents get onto nodes; the cluster is what they find there")
    profile: str | None = key(
        "the file that python -m synergy_exec profile wrote; its models get the plans that were fastest here. auto: "
        "measure the trace's models first, quickly, where results_dir/profile.json lacks them; null: replicas only"
    )
    information: Literal["own", "declared", "shared", "all"] | None = key(
        "what policies may know of a job beside its own reports: nothing (own), its declared work, what other jobs of "
        "its model report (shared), all; null: as each policy is published"
    )
    policy: list[str] = key("one policy, or a list to compare, run one after another; the first is compared to")
    parameters: dict[str, dict[str, Any]] = key("parameters by policy: parameters.las.quantum_s=1800")
    seed: int = key("of the trace where it is drawn, and of the weights that training begins with")
    load: float = key("how many times as dense as in the trace jobs arrive")
    round_s: float = key("seconds from one decision to the next")
    retries: int = key("how often a job that lost its workers is tried again without a step of progress in between")
    serve: bool = key("whether to go on when all jobs have ended, for those that are submitted")
    host: str = key("the address that the controller listens on; other nodes must reach it")
    port: int = key("its port; 0: a free one")
    restart_s: float = key("seconds that policies take a restart to cost")
    checkpoint_interval_s: float = key("seconds between checkpoints of a running job")
    hang_s: float = key("seconds without a step after which a job is taken to hang, unless its steps are long")
    start_s: float = key("seconds that a job may take to its first step")
    bfloat16: bool = key("whether GPUs compute in bfloat16; weights, gradients and losses stay in float32, CPUs always")
    nodes_s: float = key("seconds until all agents must be there")
    leave_s: float = key("seconds that agents get to save and leave")
    results_dir: Path = key("where results go")
    figures: bool = key("whether to draw figures and write report.html and traces for Perfetto")
    live: bool = key("whether to show a table of all jobs (never if the output is not a terminal)")
