"""Declares every key of the executor once: type, meaning, default, bounds."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from synergy_core.jobs.exchange import Compression
from synergy_runs.inputs.command_line import Program
from synergy_runs.inputs.keys import (
    ABOVE_ZERO,
    COMPRESSION_MEANING,
    COMPRESSOR_MEANING,
    COUNT,
    FIGURES_MEANING,
    FOLDER,
    FRACTION,
    MAX_WAIT_MEANING,
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    Figures,
    TraceSettings,
    key,
)

Precision = Literal["auto", "bf16", "fp16", "tf32", "fp32"]
"""The format in which a job computes (`training/precision.py`)."""
AUTO = "auto"
"""Value of `profile`: measure here what is missing."""


def _is_range(ports: str) -> bool:
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", ports)
    return found is not None and 1 <= int(found[1]) <= int(found[2]) <= 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """How agents are started on nodes."""

    name: str = key("a file of synergy_exec/backends/; local: this machine", "local")
    options: dict[str, Any] = key("the backend's own, such as backend.options.slots=2", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """How slots are shared out among jobs."""

    virtual_clusters: dict[str, int] | None = key(
        "quotas: null, or {name: slots}; a job says which it counts against",
        None,
        Bounds("{name: slots}, each at least 0", lambda quotas: not quotas or min(quotas.values()) >= 0),
    )
    borrowing: bool = key("whether jobs may exceed the quota of their virtual cluster while slots are idle", False)
    reclaim: Literal["any", "never"] | None = key(
        "with borrowing, whether a job within its quota stops jobs beyond theirs: any, or never (a quota is then no "
        "guarantee); null: any under policies that stop jobs, never under the others",
        None,
    )
    max_wait: float = key(MAX_WAIT_MEANING, 2.0, NOT_NEGATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The keys that are passed on to workers in `messages.Launch`."""

    seed: int = key("of the trace where it is drawn, and of the weights that training begins with", 0, COUNT)
    checkpoint_interval_s: float = key("seconds between checkpoints of a running job", 60.0, ABOVE_ZERO)
    keep_checkpoints: int = key("how many checkpoints of a running job are kept, the newest", 2, POSITIVE)
    hang_s: float = key(
        "seconds without a step after which a job is taken to hang, unless its steps are long", 60.0, ABOVE_ZERO
    )
    start_s: float = key(
        "seconds that a job may take to build, to load, to save, to wait for data, or to its first step",
        600.0,
        ABOVE_ZERO,
    )
    log_mb: float = key(
        "megabytes of what a job prints that are kept; of more, what was printed first goes",
        64.0,
        ABOVE_ZERO,
    )
    memory_gb_per_slot: float | None = key(
        "GB of memory that a rank may allocate, and each process that it starts (RLIMIT_DATA); a command: for each of "
        "its slots. null: whatever there is",
        None,
        ABOVE_ZERO,
    )
    interface: str | None = key(
        "the network interface over which ranks talk to each other, such as eth0; null: the one by which a rank's node "
        "reaches that of rank 0",
        None,
    )
    precision: Precision = key(
        "format in which classes compute whose job files do not say; weights, reduced gradients and losses stay in "
        "float32. auto: bf16 on GPUs that have it, else fp32",
        "auto",
    )

    def of_runs(self, precision: Precision = "auto") -> dict[str, Any]:
        """The values of these keys by name. precision: of the job file, which counts before that of the run."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(RunSettings)}
        return values if precision == "auto" else {**values, "precision": precision}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RunSettings):
    """All keys of a run."""

    trace: TraceSettings | None = key(
        "which jobs arrive: +trace=demo; null: only what is submitted (with serve=true)", None
    )
    backend: BackendSettings = key("how agents get onto nodes; the cluster is what they find there", BackendSettings())
    cluster: QueueSettings = key("how the slots that agents find are shared out", QueueSettings())
    profile: str | None = key(
        "the file that python -m synergy_exec profile wrote; its models get the plans that were fastest here. auto: "
        "measure the trace's models first, quickly, where results_dir/profile.json lacks them (with compression other "
        "than none: null); null: replicas only",
        AUTO,
    )
    explore_fraction: float = key(
        "of a job's time, what may go at most into restarts for plans that nobody has measured: with profile=auto jobs "
        "that are submitted try them, and so they are measured while they train. 0: none",
        0.05,
        FRACTION,
    )
    profile_s: float = key(
        "seconds that measuring models takes at the most; what there was no time for is predicted, or left out (python "
        "-m synergy_exec profile takes 600 unless it is given)",
        180.0,
        ABOVE_ZERO,
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
        ABOVE_ZERO,
    )
    load: float = key("how many times as dense as in the trace jobs arrive", 1.0)
    round_s: float = key("seconds from one decision to the next", 2.0, ABOVE_ZERO)
    retries: int = key(
        "how often a job that lost its workers is tried again without a step of progress in between", 3, COUNT
    )
    agents_per_hour: int = key(
        "how often within an hour a node's agent that was lost is started again at once; after that, with serve=true, "
        "there are pauses, and the node is left out until it has an agent again",
        3,
        COUNT,
    )
    serve: bool = key("whether to go on when all jobs have ended, for those that are submitted", False)
    host: str = key(
        "the address that the controller listens on; other nodes must reach it",
        "127.0.0.1",
        Bounds("an address, such as 127.0.0.1", bool),
    )
    port: int = key("its port; 0: a free one", 0, Bounds("a port, 0 to 65535", lambda value: 0 <= value <= 65_535))
    ports: str | None = key(
        "the ports at which ranks meet, such as 29500-29599, one for each run at once; null: any that are free. What "
        "ranks exchange goes over ports that the kernel chooses, whatever stands here",
        None,
        Bounds("two ports such as 29500-29599", _is_range),
    )
    restart_s: float = key("seconds that policies take a restart to cost", 5.0, ABOVE_ZERO)
    nodes_s: float = key("seconds until all agents must be there", 120.0, ABOVE_ZERO)
    leave_s: float = key("seconds that agents get to save and leave", 60.0, ABOVE_ZERO)
    results_dir: Path = key("where results go", Path("results"), FOLDER)
    figures: Figures = key(FIGURES_MEANING, True)


# Keys that may change when a run resumes: they say where and how it runs, not what it trains.


CHANGEABLE = (
    *("backend", "host", "port", "ports", "interface", "nodes_s", "leave_s"),
    *("round_s", "retries", "agents_per_hour", "hang_s", "start_s"),
    *("checkpoint_interval_s", "keep_checkpoints", "log_mb", "memory_gb_per_slot"),
    "figures",
)


OF_TRAINING = ("seed", "precision", "compression", "compressor")
"""Keys that say how jobs are trained. A service that takes over the queue of another must have the same."""


# The executor's command line.


EXECUTOR = Program(
    name="synergy_exec",
    config="executor",
    settings=Settings,
    groups=("trace",),
    example="demo",
    without_trace="serve=true",
)
