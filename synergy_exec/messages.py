"""The messages between controller, agents and workers; see docs/executor.md.

Every message is one JSON object with a `kind`, the name of its class. Controller and agents exchange messages over a
websocket, agents and workers as lines over a socket pair. `wire.py` encodes and decodes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from synergy_core.cluster import Share
from synergy_core.planner.plan import Plan
from synergy_exec.job_file import JobFile
from synergy_exec.settings import RunSettings

Outcome = Literal["done", "paused", "failed", "lost"]
PAUSED = 75
"""Exit code of a worker that saved and stopped on request (EX_TEMPFAIL)."""
LOST_PEERS = "lost its peers, which another node's ranks may explain"
KILLED = "killed as the controller asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The base class of all messages."""


@dataclass(frozen=True, kw_only=True)
class OfRun(Message):
    """The base class of messages about a run. Without slots, because `Launch` has a second base class."""

    run: int


@dataclass(frozen=True, kw_only=True)
class OfProgress(OfRun):
    """The base class of messages about a job's progress: totals of all its runs."""

    step: int
    samples: int
    work: float


@dataclass(frozen=True, kw_only=True)
class OfCause(OfRun):
    """The base class of messages about a failure: what is known of its cause.

    out_of_memory, unused: the controller can remedy these by a smaller micro-batch or `Launch.unused`. broken_device:
    the device reports a hardware error. hung: no step was trained or reported for too long. exit_code: of a command.
    """

    out_of_memory: bool = False
    unused: bool = False
    broken_device: bool = False
    hung: bool = False
    exit_code: int = 0


# Controller → agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(OfRun):
    """Listen for the store at which a run's ranks on several nodes meet. The answer is `Reserved`.

    ports: take the first of these that is or becomes free, such as 29500-29599; "" for any. opens_port: if False,
    nothing listens and `Reserved` comes at once. The round trip lets the controller hear of ended runs, and drop this
    one, before it is launched.
    """

    ports: str
    opens_port: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(OfRun, RunSettings):
    """Start this node's workers of a run.

    plan: its degrees are fixed for the run. Its compressor is for gradients between replicas, such as `q4`, with
    exceptions by layer after commas: `q4,token.weight=none,layers.*=powersgd-4`. (In the controller it is the name of
    an offer of the core, such as `layerwise-q4`.)

    file: the job file. A command has one process per node, and this is node `node_rank` of `nodes`; its `directory` is
    absolute. restarts: how often it was started before. grace_s: seconds to save when the run is stopped.
    slots: the run's slots on this node; ranks first_rank … use them in order. store_host, store_port: where ranks on
    several nodes meet; the agent that reserved the port listens on it. "" and 0 if all ranks are on this node: its
    agent gives them a store that no other user can open.
    folder: the job's folder, on a file system that all nodes share. job_uuid: written in its checkpoints. saved_step:
    step of its last known checkpoint, without which the run refuses to train; 0 for none. noise: whether to estimate
    the gradient's noise scale. report_s: seconds between reports. share: CPUs and memory of each slot; None for the
    slots' own cores and no data cache.
    say_layers, time_codecs: whether `Started` reports the model's layers and the speed of encoding gradients.
    plans_on: numbers of slots for which rank 0 writes the possible plans to `plans.json` in the folder; empty if they
    are known. unused: whether some parameters have no part in some steps, which DDP must know. observed: whether to
    call the job's evaluation and callbacks. agent_silence_s: ranks save and stop if their agent is silent for longer.
    The controller waits longer than this for a silent agent.
    """

    job: int
    file: JobFile
    plan: Plan
    folder: str
    slots: list[int] = field(default_factory=list)
    first_rank: int = 0
    world: int = 0
    store_host: str = ""
    store_port: int = 0
    noise: bool = True
    report_s: float = 1.0
    share: Share | None = None
    say_layers: bool = False
    time_codecs: bool = False
    plans_on: list[int] = field(default_factory=list)
    unused: bool = False
    observed: bool = True
    job_uuid: str = ""
    saved_step: int = 0
    agent_silence_s: float = 30.0
    restarts: int = 0
    grace_s: float = 15.0
    nodes: int = 1
    node_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(OfRun):
    """Save and stop. The answer is `Ended` with outcome paused, or done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(OfRun):
    """Stop at once without saving. The answer is `Ended` with outcome lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retune(OfRun):
    """Use another micro-batch, accumulation or compressor from the next step that all ranks agree on."""

    micro_batch: int
    accumulation: int
    compressor: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshare(OfRun):
    """Change CPUs and memory of each slot of a run that was launched with a share, while it trains."""

    share: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown(Message):
    """Stop every run with a checkpoint, then exit. within_s: kill runs after this time; None: after their `grace_s`."""

    within_s: float | None = None


# Agent → controller


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """The first message of an agent.

    node: its number. slots: number of slots. gpu_type: `cpu` without GPUs. cpus: cores that runs may use. memory_bytes:
    the machine's memory times the fraction of the machine's cores that runs may use.
    """

    node: int
    host: str
    pid: int
    slots: int
    gpu_type: str
    cpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved(OfRun):
    """The address of a run's store; "" and 0 if all its ranks are on this node."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(OfCause):
    """No process of a run is left on this node. Every agent that launched it sends this once.

    outcome: done only if all its workers said so. reason: if it failed or was lost, a sentence that names rank and
    error; it contains `LOST_PEERS` or `KILLED` if the cause is on another node. hung: also if the agent killed a worker
    for it. The other fields of the cause are those of the `Failure` with that reason.
    """

    outcome: Outcome
    reason: str = ""


# Agent → worker, which is also told Stop and Retune


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted(OfRun):
    """The CPUs of a rank from now on. cores: cores that it may run on. cpus: its share of them."""

    cores: list[int]
    cpus: float


# Worker → agent → controller (the agent passes them on as they are)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(OfProgress):
    """The first step of a run is done. The fields in seconds are the parts of the time since the launch.

    layers: name, rows and columns of each parameter with a gradient, as replicas exchange it. codecs: fields of
    `CodecSpeed` by scheme. Both are empty unless requested.
    """

    launch_s: float
    build_s: float = 0.0
    load_s: float = 0.0
    first_step_s: float = 0.0
    layers: list[tuple[str, int, int]] = field(default_factory=list)
    codecs: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(OfProgress):
    """Progress and measurements of a run, from rank 0.

    loss: of the last step. step_s: median of the slowest rank's step times at
    this batch, without warm-up, over `steps` steps; 0 if there is none yet. sync_s: the part of it in which gradients
    were exchanged and nothing was computed, on the rank that waited least. waited_s: the part in which the rank with
    the slowest input waited for data.
    memory_bytes: peak memory of rank 0 at this micro-batch. Only with a GPU: reserved_bytes, the peak of what torch's
    allocator held for it; outside_bytes, what else is in the GPU's memory (CUDA's context, NCCL, other
    processes); memory_limit_bytes, the GPU's memory without these. grad_sqr,
    grad_var: smoothed squared norm and variance of the gradient at the initial batch; both 0 while unknown. cpu_s: CPU
    seconds of rank 0 and its loaders per step; 0 while unknown. cpus: granted to rank 0; 0 without a share. data_bytes:
    of the job's data set; 0 for a job that is no `LoadedJob`. sent_bytes, codec_s: bytes of gradients that rank 0 sends
    per step under `compressor`, and seconds to encode and decode them. layers: by layer of rank 0, squared norm of the
    gradient and of the part that compression left out, from the last measured step since the last report.
    """

    loss: float
    micro_batch: int
    accumulation: int
    step_s: float
    sync_s: float = 0.0
    steps: int
    grad_sqr: float = 0.0
    grad_var: float = 0.0
    memory_bytes: int = 0
    reserved_bytes: int = 0
    outside_bytes: int = 0
    memory_limit_bytes: int = 0
    waited_s: float = 0.0
    cpu_s: float = 0.0
    cpus: float = 0.0
    data_bytes: float = 0.0
    sent_bytes: float = 0.0
    codec_s: float = 0.0
    compressor: str = "none"
    layers: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(OfProgress):
    """A checkpoint is complete on disk. save_s: how long training waited for it."""

    save_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted(OfRun):
    """A message of a rank for its user; training goes on."""

    text: str


# Worker → agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(OfCause):
    """A rank reports in one sentence why it fails, before it exits.

    from_peers: the error may only mean that another rank is gone; it counts if no rank failed by itself. unsaved: the
    disk refused the last checkpoint, a newer run has begun, or the device is broken, which is not the job's fault.
    """

    reason: str
    from_peers: bool = False
    unsaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MeansToLeave(OfRun):
    """A rank announces to its agent that it exits on purpose, with code 0 or PAUSED.

    A process that is ended by user code announces nothing.
    """

    code: int
