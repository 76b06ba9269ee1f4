"""Every key of the executor, declared once: type, meaning, default, bounds. Below, the same fields are handed on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from synergy_core.jobs.exchange import Compression
from synergy_runs.settings import (
    COMPRESSION_MEANING,
    COMPRESSOR_MEANING,
    COUNT,
    SECONDS,
    Bounds,
    TraceSettings,
    key,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """How agents get onto nodes."""

    name: str = key("a file of synergy_exec/backends/; local: this machine", "local")
    options: dict[str, Any] = key("the backend's own, such as backend.options.slots=2", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The keys that are passed on to workers: `messages.Launch` has them, too."""

    seed: int = key("of the trace where it is drawn, and of the weights that training begins with", 0, COUNT)
    checkpoint_interval_s: float = key("seconds between checkpoints of a running job", 60.0, SECONDS)
    hang_s: float = key(
        "seconds without a step after which a job is taken to hang, unless its steps are long", 8.0, SECONDS
    )
    start_s: float = key("seconds that a job may take to its first step", 120.0, SECONDS)
    bfloat16: bool = key(
        "whether GPUs compute in bfloat16; weights, gradients and losses stay in float32, CPUs always", True
    )

    def of_runs(self) -> dict[str, Any]:
        """These keys alone, with their values."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(RunSettings)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RunSettings):
    """A whole run."""

    trace: TraceSettings | None = key(
        "which jobs arrive: +trace=demo; null: only what is submitted (with serve=true)", None
    )
    backend: BackendSettings = key("how agents get onto nodes; the cluster is what they find there", BackendSettings())
    profile: str | None = key(
        "the file that python -m synergy_exec profile wrote; its models get the plans that were fastest here. auto: "
        "measure the trace's models first, quickly, where results_dir/profile.json lacks them (with compression other "
        "than none: null); null: replicas only",
        "auto",
    )
    information: Literal["own", "declared", "shared", "all"] | None = key(
        "what policies may know of a job beside its own reports: nothing (own), its declared work, what other jobs of "
        "its model report (shared), all; null: as each policy is published",
        None,
    )
    input: Literal["known", "learned"] = key(
        "how policies know how fast training data is prepared with so many CPUs and so much memory: by profiles made "
        "before (known), or by what jobs report (learned)",
        "known",
    )
    policy: list[str] = key(
        "one policy, or a list to compare, run one after another; the first is compared to", ["synergy"]
    )
    parameters: dict[str, dict[str, Any]] = key("parameters by policy: parameters.las.quantum_s=1800", {})
    compression: Compression = key(f"{COMPRESSION_MEANING}; other than none with profile=null", "none")
    compressor: str = key(COMPRESSOR_MEANING, "powersgd-4")
    storage_mb_per_s: float | None = key(
        "at which each node reads training data that is not in its memory, MB/s, for policies that share memory out; "
        "null: as fast as need be, so that jobs ask for no memory",
        None,
        Bounds("MB/s above 0, or null", lambda value: value is None or value > 0),
    )
    load: float = key("how many times as dense as in the trace jobs arrive", 1.0)
    round_s: float = key("seconds from one decision to the next", 2.0, SECONDS)
    retries: int = key(
        "how often a job that lost its workers is tried again without a step of progress in between", 3, COUNT
    )
    serve: bool = key("whether to go on when all jobs have ended, for those that are submitted", False)
    host: str = key("the address that the controller listens on; other nodes must reach it", "127.0.0.1")
    port: int = key("its port; 0: a free one", 0, Bounds("a port, 0 to 65535", lambda value: 0 <= value <= 65_535))
    restart_s: float = key("seconds that policies take a restart to cost", 5.0, SECONDS)
    nodes_s: float = key("seconds until all agents must be there", 120.0, SECONDS)
    leave_s: float = key("seconds that agents get to save and leave", 60.0, SECONDS)
    results_dir: Path = key("where results go", Path("results"))
    figures: bool = key("whether to draw figures and write report.html and traces for Perfetto", True)
    live: bool = key("whether to show a table of all jobs (never if the output is not a terminal)", True)
