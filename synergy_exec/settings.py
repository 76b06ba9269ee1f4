"""Declares every key of the executor once: type, meaning, default, bounds."""

from __future__ import annotations

import dataclasses
import re
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
    FIGURES_MEANING,
    FOLDER,
    FRACTION,
    MAX_WAIT_MEANING,
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    Figures,
    TraceSettings,
    group,
    key,
)

Precision = Literal["auto", "bf16", "fp16", "tf32", "fp32"]
"""The format in which a job computes (`training/precision.py`)."""
AUTO = "auto"
"""Value of `profile`: models without measurements are measured on this cluster first."""


def _is_range(ports: str) -> bool:
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", ports)
    return found is not None and 1 <= int(found[1]) <= int(found[2]) <= 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """Settings of the backend, which starts agents on nodes."""

    name: str = key("name of a file in synergy_exec/backends/; local: this machine", "local")
    options: dict[str, Any] = key("options of the backend, such as backend.options.slots=2", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Settings of how slots are shared out among jobs."""

    virtual_clusters: dict[str, int] | None = key(
        "quotas: null, or {name: slots}; each job names the virtual cluster whose quota it uses",
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
    """The keys that workers receive in `messages.Launch`."""

    seed: int = key("random seed of the trace, if it is drawn, and of the initial weights", 0, COUNT)
    checkpoint_interval_s: float = key("seconds between checkpoints of a running job", 60.0, ABOVE_ZERO)
    keep_checkpoints: int = key("number of checkpoints of a running job that are kept, the newest ones", 2, POSITIVE)
    hang_s: float = key(
        "seconds without a step after which a job counts as hung and is stopped; ten of its median steps if that is "
        "longer. Commands have hang_s in their job files",
        60.0,
        ABOVE_ZERO,
    )
    start_s: float = key(
        "time limit in seconds for each phase of a job without steps: building, loading, saving, waiting for data, "
        "evaluating, and the first step",
        600.0,
        ABOVE_ZERO,
    )
    log_mb: float = key("maximum size of a job's log in MB; the oldest part is dropped", 64.0, ABOVE_ZERO)
    memory_gb_per_slot: float | None = key(
        "maximum memory in GB of each rank and of each process that it starts (RLIMIT_DATA); for the processes of a "
        "command, times its slots on the node; null: no limit",
        None,
        ABOVE_ZERO,
    )
    interface: str | None = key(
        "network interface that ranks on several nodes communicate over, such as eth0; null: the one over which the "
        "node of a rank reaches the node of rank 0",
        None,
    )
    precision: Precision = key(
        "number format of computations in jobs of classes whose job files set none; weights, reduced gradients and "
        "losses stay in float32. auto: bf16 on GPUs that have it, else fp32",
        "auto",
    )

    def of_job(self, precision: Precision) -> RunSettings:
        """The settings of a job's runs. precision: the job file's, which takes precedence unless it is auto."""
        return self if precision == "auto" else dataclasses.replace(self, precision=precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings of the policies, and of what they know about jobs."""

    policy: list[str] = key(
        "one policy, or a list, run one after another; the others are compared to the first", ["synergy"]
    )
    parameters: dict[str, dict[str, Any]] = key("parameters by policy: parameters.las.quantum_s=1800", {})
    information: Literal["own", "declared", "shared", "all"] | None = key(
        "what policies know about a job besides its own reports: nothing (own), its declared work (declared), reports "
        "of other jobs of its model (shared), both (all); null: as each policy is published",
        None,
    )
    input: Literal["known", "learned"] = key(
        "how policies know the speed of input preparation by CPUs and memory: from profiles measured beforehand "
        "(known), or from the jobs' reports (learned)",
        "known",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Settings of how models are measured."""

    profile: str | None = key(
        "a file written by python -m synergy_exec profile; jobs of its models get the plans that it measured as "
        "fastest. auto: results_dir/profile.json, after a quick measurement of the trace's models that it lacks; with "
        "compression other than none, auto means null. null: replicas only",
        AUTO,
    )
    explore_fraction: float = key(
        "maximum fraction of a job's training time spent on restarts to try plans that no job has measured, with "
        "profile=auto; 0: no trials",
        0.05,
        FRACTION,
    )
    profile_s: float = key(
        "time limit in seconds for measuring models; plans that were not measured in time are predicted, or not used "
        "(default of python -m synergy_exec profile: 600)",
        180.0,
        ABOVE_ZERO,
    )
    restart_s: float = key(
        "restart time that policies assume for models without a measured one, seconds", 5.0, ABOVE_ZERO
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """Settings of how replicas exchange gradients."""

    compression: Compression = key(f"{COMPRESSION_MEANING}. All but none require profile=null or auto", "none")
    compressor: str = key(COMPRESSOR_MEANING, "powersgd-4")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of how agents connect to the controller, are restarted, and leave."""

    host: str = key(
        "address that the controller listens on; other nodes must reach it",
        "127.0.0.1",
        Bounds("an address, such as 127.0.0.1", bool),
    )
    port: int = key(
        "port that the controller listens on; 0: any free port",
        0,
        Bounds("a port, 0 to 65535", lambda value: 0 <= value <= 65_535),
    )
    ports: str | None = key(
        "range of the ports at which ranks meet, such as 29500-29599; each concurrent run needs one; null: any free "
        "ports. Ranks exchange data over other ports, which the kernel chooses",
        None,
        Bounds("two ports such as 29500-29599", _is_range),
    )
    agents_per_hour: int = key(
        "maximum number of immediate restarts of a node's lost agent within an hour. The next loss ends the run; with "
        "serve=true, restarts are delayed instead, and the node is excluded until it has an agent again",
        3,
        COUNT,
    )
    nodes_s: float = key("seconds that a started agent has to connect", 120.0, ABOVE_ZERO)
    leave_s: float = key(
        "minimum time in seconds that agents have to save and exit; commands and large checkpoints may have more",
        60.0,
        ABOVE_ZERO,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All keys of a run. Each part of the executor receives the group that it needs."""

    trace: TraceSettings | None = key(
        "the jobs that arrive: +trace=demo; null: only jobs that users submit (requires serve=true)", None
    )
    backend: BackendSettings = key("how agents are started on nodes; their slots are the cluster", BackendSettings())
    cluster: QueueSettings = key("how slots are shared out among jobs", QueueSettings())
    policies: PolicySettings = group(PolicySettings)
    profiling: ProfileSettings = group(ProfileSettings)
    exchange: ExchangeSettings = group(ExchangeSettings)
    storage_mb_per_s: float | None = key(
        "rate at which each node reads training data that is not cached in its memory, MB/s, for policies that share "
        "out memory; null: never a bottleneck, so jobs request no memory",
        None,
        ABOVE_ZERO,
    )
    load: float = key("factor on the trace's arrival rate; 1: as in the trace", 1.0)
    round_s: float = key(
        "seconds between decisions; when a job's end frees slots, the next decision comes at once", 2.0, ABOVE_ZERO
    )
    retries: int = key(
        "maximum number of retries of a job that loses its workers again without a step of progress in between; a job "
        "file may allow more",
        3,
        COUNT,
    )
    serve: bool = key("whether to keep running for further submissions when all jobs have ended", False)
    agents: AgentSettings = group(AgentSettings)
    run: RunSettings = group(RunSettings)
    results_dir: Path = key("folder for results", Path("results"), FOLDER)
    figures: Figures = key(FIGURES_MEANING, True)


CHANGEABLE = (
    *("backend", "host", "port", "ports", "interface", "nodes_s", "leave_s"),
    *("round_s", "retries", "agents_per_hour", "hang_s", "start_s"),
    *("checkpoint_interval_s", "keep_checkpoints", "log_mb", "memory_gb_per_slot"),
    "figures",
)
"""Keys that may change when a run resumes, because they do not affect what it trains."""
OF_TRAINING = ("seed", "precision", "compression", "compressor")
"""Keys that affect how jobs are trained. A service that takes over the queue of another must have the same values."""


EXECUTOR = Program(
    name="synergy_exec",
    config="executor",
    settings=Settings,
    groups=("trace",),
    example="demo",
    without_trace="serve=true",
)
