"""The messages between controller, agents and workers; see docs/executor.md.

Every message is one JSON object with a `kind`, the name of its class. Controller and agents exchange messages over a
websocket, agents and workers as lines over a socket pair. `wire.py` encodes and decodes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Share
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRun(Message):
    """The base class of messages about a run."""

    run: int
    """Number of the run; every start of a job is a new run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfProgress(OfRun):
    """The base class of messages about a job's progress. The totals are over all its runs."""

    step: int
    """Number of steps done."""
    samples: int
    """Number of samples trained on; 0 for a command."""
    work: float
    """Work done, in the unit of the job file's `work`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfCause(OfRun):
    """The base class of messages about a failure, with its known causes."""

    out_of_memory: bool = False
    """Whether memory ran out. The controller then uses a smaller micro-batch."""
    unused: bool = False
    """Whether some parameters had no part in the loss of a step. The controller then sets `Launch.unused`."""
    broken_device: bool = False
    """Whether the device reports a hardware error."""
    hung: bool = False
    """Whether no step was trained or reported for too long."""
    exit_code: int = 0
    """Exit code of a command; 0 if a signal ended it, and for a class."""


# Controller → agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(OfRun):
    """Listen for the store at which a run's ranks meet. The answer is `Reserved`.

    The round trip lets the controller hear of ended runs, and drop this one, before it is launched.
    """

    ports: str
    """Range of ports, such as 29500-29599; the agent takes the first that is or becomes free. "" for any free port."""
    opens_port: bool = True
    """Whether the agent listens on a port. If not, `Reserved` comes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlots:
    """The slots of a run on one node, and where all its ranks meet."""

    slots: list[int] = field(default_factory=list)
    """The run's slots on this node. Rank `first_rank` uses the first, the next rank the second, and so on."""
    first_rank: int = 0
    """Rank of the first slot on this node."""
    world: int = 0
    """Number of slots of the run on all nodes, which is the number of ranks of a class."""
    nodes: int = 1
    """Number of nodes of the run."""
    node_rank: int = 0
    """This node's index among the nodes of the run, from 0."""
    store_host: str = ""
    """Address at which ranks meet. The agent that reserved the port listens on it; the worker of a command frees it for
    the command's own ranks. "" if all ranks are on this node: the agent gives those of a class a store that no other
    user can open. With the key `ports`, commands on one node have an address, too."""
    store_port: int = 0
    """Port at which ranks meet; 0 if `store_host` is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """The measurements and reports that the controller requests of a run."""

    report_s: float = 1.0
    """Seconds between reports."""
    noise: bool = True
    """Whether to estimate the gradient's noise scale."""
    layers: bool = False
    """Whether `Started` reports the model's layers."""
    codecs: bool = False
    """Whether `Started` reports the speed of encoding gradients."""
    plans_on: list[int] = field(default_factory=list)
    """Numbers of slots for which rank 0 writes the possible plans to `plans.json` in the folder; empty if they are
    known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(OfRun):
    """Start this node's workers of a run: one process per slot, or one process for a command."""

    job: int
    """Number of the job."""
    file: JobFile
    """The job file, with an absolute `directory`."""
    plan: Plan
    """The parallel plan. Its degrees are fixed for the run. Its compressor is for gradients between replicas, such as
    `q4`, with exceptions by layer after commas: `q4,token.weight=none,layers.*=powersgd-4`. (In the controller it is
    the name of an offer of the core, such as `layerwise-q4`.)"""
    folder: str
    """The job's folder, on a file system that all nodes share."""
    settings: RunSettings
    """The settings of runs, with the job's precision."""
    node: NodeSlots = field(default_factory=NodeSlots)
    """The run's slots on this node."""
    share: Share | None = None
    """CPUs and memory of each slot; None: the slots' own cores, and no data cache."""
    reporting: Reporting = field(default_factory=Reporting)
    """What to measure and report."""
    unused: bool = False
    """Whether some parameters have no part in the loss of some steps. DDP then looks for them in every step."""
    observed: bool = True
    """Whether to call the job's evaluation and callbacks."""
    job_uuid: str = ""
    """UUID of the job, which its checkpoints contain."""
    saved_step: int = 0
    """Step of the job's last known checkpoint; the run fails if the folder has no checkpoint. 0: none was saved."""
    agent_silence_s: float = 30.0
    """Seconds after which ranks save and stop if their agent is silent. The controller waits longer for a silent agent
    (`wire.PINGS`)."""
    restarts: int = 0
    """Number of earlier starts of the job."""
    grace_s: float = 15.0
    """Seconds that the run gets to save when it is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(OfRun):
    """Save and stop. The answer is `Ended` with outcome paused, or done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(OfRun):
    """Tells the agent to kill a run at once, without saving. It answers with `Ended`, outcome `lost`."""


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
    """The first message of an agent."""

    node: int
    """Number of the agent's node."""
    host: str
    """Host name of the node."""
    pid: int
    """Process id of the agent."""
    slots: int
    """Number of slots."""
    gpu_type: str
    """GPU type of the slots; `cpu` without GPUs."""
    cpus: int = 0
    """Number of cores that runs may use."""
    memory_bytes: int = 0
    """The machine's memory times the fraction of the machine's cores that runs may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved(OfRun):
    """The address of a run's store; "" and 0 if the agent opened no port."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(OfCause):
    """No process of a run is left on this node. Every agent that launched it sends this once.

    The fields of the cause are those of the `Failure` with that reason; `hung` is also true if the agent killed a
    worker for it.
    """

    outcome: Outcome
    """How the run ended here; done only if all its workers said so."""
    reason: str = ""
    """If the run failed or was lost, a sentence that names rank and error. It ends with `LOST_PEERS` or `KILLED` if the
    cause is on another node, or if the controller killed the run."""


# Agent → worker, which is also told Stop and Retune


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted(OfRun):
    """The CPUs of a rank from now on."""

    cores: list[int]
    """Cores that it may run on."""
    cpus: float
    """Its share of these cores, in cores."""


# Worker → agent → controller (the agent passes them on as they are)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(OfProgress):
    """The first step of a run is done; for a command, its process was started.

    The fields in seconds are parts of the time since the launch.
    """

    launch_s: float
    """Seconds from the launch until the worker began to build the job; for a command, until it ran."""
    build_s: float = 0.0
    """Seconds to build the model."""
    load_s: float = 0.0
    """Seconds to load the checkpoint."""
    first_step_s: float = 0.0
    """Seconds of the first step."""
    layers: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, rows and columns of each parameter with a gradient, as replicas exchange it; empty unless requested."""
    codecs: dict[str, list[float]] = field(default_factory=dict)
    """Fields of `CodecSpeed` by scheme; empty unless requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of a rank at its present micro-batch, in bytes. All but the first are 0 without a GPU."""

    used_bytes: int = 0
    """Peak of the process's memory beyond Python and its libraries or, on a GPU, of the bytes of tensors."""
    reserved_bytes: int = 0
    """Peak of the GPU memory that torch's allocator held."""
    outside_bytes: int = 0
    """GPU memory held outside torch's allocator: CUDA's context, NCCL, other processes."""
    limit_bytes: int = 0
    """The GPU's memory minus `outside_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCost:
    """Cost and error of exchanging gradients on one rank."""

    sent_bytes: float = 0.0
    """Bytes of gradients sent in the last step."""
    codec_s: float = 0.0
    """Median seconds per step to encode and decode gradients, over the last 20 steps."""
    layers: dict[str, list[float]] = field(default_factory=dict)
    """By layer, two squared norms in the last measured step since the last report: of the compressor's input (the
    gradient, with error feedback plus the error held back) and of the part that it left out. Both are means over the
    replicas; empty if no step was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(OfProgress):
    """Progress and measurements of a run, from rank 0 or from a command's first node.

    The medians are over the last steps at this batch, without warm-up steps (`worker.steps`).
    """

    loss: float
    """Loss of the last step; NaN if it is unknown."""
    micro_batch: int
    """Samples per replica and micro-batch."""
    accumulation: int
    """Micro-batches per step."""
    step_s: float
    """Median of the slowest rank's step times in seconds; 0 if there is none yet. For a command, the mean time per step
    since its first reported step, or 1 if its work is measured in seconds."""
    sync_s: float = 0.0
    """Median seconds per step in which gradients were exchanged and nothing was computed, on the rank that waited
    least."""
    steps: int
    """Number of steps that `step_s` is the median or mean of."""
    grad_sqr: float = 0.0
    """Smoothed squared norm of the gradient at the initial batch; 0 while it is unknown. A command that reports steps
    has 1, with a variance of 0, so that each of its steps counts as one."""
    grad_var: float = 0.0
    """Smoothed variance of the gradient at the initial batch; 0 while it is unknown."""
    memory: MemoryUse = field(default_factory=MemoryUse)
    """Memory of rank 0."""
    waited_s: float = 0.0
    """Median seconds per step in which the rank with the slowest input waited for data."""
    cpu_s: float = 0.0
    """Mean CPU-seconds per step of rank 0 and its loaders, or on a GPU of its loaders alone, because CUDA keeps a core
    busy while it waits; 0 while it is unknown."""
    cpus: float = 0.0
    """Cores granted to rank 0; 0 without a share."""
    data_bytes: float = 0.0
    """Upper bound of the size of the job's data set in storage; 0 for a job that is no `LoadedJob`."""
    compressor: str = "none"
    """The compressor in use, as in `Launch.plan`."""
    exchange: ExchangeCost = field(default_factory=ExchangeCost)
    """Cost and error of exchanging gradients on rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(OfProgress):
    """A checkpoint is complete on disk."""

    save_s: float
    """Seconds that training waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted(OfRun):
    """A message of a rank for its user; training goes on."""

    text: str


# Worker → agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(OfCause):
    """A rank reports why it fails, before it exits."""

    reason: str
    """The error in one sentence."""
    from_peers: bool = False
    """Whether the error may only mean that another rank is gone; it then counts if no rank failed by itself."""
    unsaved: bool = False
    """Whether the job is not at fault, so that the run counts as lost and the job is tried again: the disk refused a
    checkpoint, a newer run of the job has begun, the device is lost or broken, or a command hung or was ended by a
    signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeansToLeave(OfRun):
    """A rank announces to its agent that it exits on purpose, with code 0 or PAUSED.

    A process that is ended by user code announces nothing.
    """

    code: int
