"""What controller, agents and workers say to each other; see docs/executor.md.

Every message is one JSON object with a `kind`. Controller and agent speak over a websocket, agent and worker in lines
on a socket pair; `wire.py` writes and reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from synergy_core.cluster import Share
from synergy_core.planner.plan import Plan
from synergy_exec.settings import RunSettings

Outcome = Literal["done", "paused", "failed", "lost"]
PAUSED = 75
"""Exit code of a worker that has saved and left as asked (EX_TEMPFAIL)."""
LOST_PEERS = "lost its peers, which another node's ranks may explain"
KILLED = "killed as the controller asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The base class of all messages."""

    KIND: ClassVar[str] = ""


# Controller → agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(Message):
    """Listen for the store at which this run's ranks meet, where they are on several nodes; answered by `Reserved`.

    ports: of which one is to be taken, such as 29500-29599, as soon as one is free; "": any that is free.
    several_nodes: False: nothing is listened on, and `Reserved` comes at once. Whoever decides hears of what ended
    before the run is launched, and may drop it.
    """

    KIND: ClassVar[str] = "reserve"
    run: int
    ports: str
    several_nodes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Message, RunSettings):
    """Start this node's workers of a run.

    plan: its degrees are fixed for the run. Its compressor is that of the gradients that replicas
    exchange, such as `q4`, and after commas of layers: `q4,token.weight=none,layers.*=powersgd-4`; the controller has
    the names of the core's offers there, such as `layerwise-q4`, and tells workers what they stand for.

    job_class: `package.module:Class` or `/path/file.py:Class`; "" of a job that is a command, of which a node has one
    process: command, directory and grace_s are those of its job file; this is node `node_rank` of `nodes`. slots: which
    of the node's, ranks first_rank … in their order. store_host, store_port: where ranks on several nodes meet; the
    agent that reserved it holds that port itself. "" and 0: all ranks are on this node, whose agent gives them a store
    that no other user can open.
    folder: the job's own, on a file system that all nodes share. job_uuid: what its checkpoints say; saved_step: of the
    last that it is known to have, without which nothing is trained; 0 for none. work: iterations at the initial batch
    until it is done. noise: whether to estimate the gradient's noise scale. report_s: between reports. share: what each
    of its slots brings of the node's CPUs and memory; None: the slots' own cores, and nothing is kept in memory.
    say_layers, time_codecs: whether `Started` says what the model's layers are, and how fast gradients are encoded.
    plans_on, plans_at: numbers of slots and batches at which rank 0 finds out which plans the model may have, for the
    file `plans.json` in the folder; nothing where they are known.
    unused: some of the model's parameters have no part in some steps, which replicas that exchange gradients must know.
    code: the copy of the source that `job_class` had when it was submitted; "" for a class of a package. weights: a
    file with the state_dict that the first run begins with; "" for none. observed: whether the job evaluates and is
    told of steps. spare_memory: whether ranks give memory back as soon as it is free, which takes time.
    agent_silence_s: ranks whose agent gives no sign of life for longer save and leave; less than the controller waits.
    measure: the file of what is to be measured, in place of training
    (`profiling.selection.Task`); "" for none.
    """

    KIND: ClassVar[str] = "launch"
    run: int
    job: int
    job_class: str
    arguments: dict[str, Any] = field(default_factory=dict)
    plan: Plan
    initial_batch: int
    work: float
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
    plans_at: list[int] = field(default_factory=list)
    unused: bool = False
    code: str = ""
    weights: str = ""
    observed: bool = True
    spare_memory: bool = False
    job_uuid: str = ""
    saved_step: int = 0
    agent_silence_s: float = 30.0
    measure: str = ""
    command: list[str] = field(default_factory=list)
    directory: str = ""
    grace_s: float = 0.0
    nodes: int = 1
    node_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Message):
    """Save and leave; answered by `Ended` with outcome paused (or done, if it was)."""

    KIND: ClassVar[str] = "stop"
    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Message):
    """Leave at once; answered by `Ended` with outcome lost."""

    KIND: ClassVar[str] = "kill"
    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retune(Message):
    """Another micro-batch, accumulation or compressor from the next step that all ranks agree on; same degrees."""

    KIND: ClassVar[str] = "retune"
    run: int
    micro_batch: int
    accumulation: int
    compressor: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshare(Message):
    """Other CPUs and memory for each slot of a run that was launched with a share, at once; it trains on."""

    KIND: ClassVar[str] = "reshare"
    run: int
    share: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown(Message):
    """Stop every run with a checkpoint, then leave."""

    KIND: ClassVar[str] = "shutdown"


# Agent → controller


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """The first message of an agent. node: its number in the cluster. slots: how many. gpu_type: `cpu` without GPUs.

    cpus: cores that runs may use, memory_bytes: the same part of the machine's memory.
    """

    KIND: ClassVar[str] = "hello"
    node: int
    host: str
    pid: int
    slots: int
    gpu_type: str
    cpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved(Message):
    """The store's address for a run; "" and 0 for one whose ranks are all on this node."""

    KIND: ClassVar[str] = "reserved"
    run: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted(Message):
    """What a rank has of the CPUs that were asked for it; the agent tells the rank itself, too.

    cores: that it may run on. cpus: of them, its own: less than asked where the node has no more, until others leave.
    """

    KIND: ClassVar[str] = "granted"
    run: int
    rank: int
    cores: list[int]
    cpus: float
    asked: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Message):
    """This node's part of a run is gone: no process of it is left. Sent once by every agent that launched it.

    A part that only suffered from another says `lost`, with `LOST_PEERS` or `KILLED` in its reason.
    outcome: done only if all its workers said so. reason: for failed and lost, one sentence that names rank and error.
    hung: whether a worker was ended because it trained no step for too long.
    """

    KIND: ClassVar[str] = "ended"
    run: int
    outcome: Outcome
    reason: str = ""
    hung: bool = False


# Worker → agent → controller (the agent passes them on as they are)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Message):
    """The first step of a run is done. Seconds since launch, as the worker saw them, part by part.

    step, samples, work: done in all, by this run and those before it that were saved. layers: name, rows and columns of
    each parameter that has a gradient, as replicas exchange it; codecs: by scheme, the fields of `CodecSpeed`; both
    empty unless they were asked for.
    """

    KIND: ClassVar[str] = "started"
    run: int
    step: int
    samples: int
    work: float
    launch_s: float
    build_s: float = 0.0
    load_s: float = 0.0
    first_step_s: float = 0.0
    layers: list[tuple[str, int, int]] = field(default_factory=list)
    codecs: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Message):
    """What rank 0 of the run saw since the last report.

    step, samples, work: done in all. told_s: when this was, on the monotonic clock of rank 0's node; the steps between
    two reports took the difference. loss: of the last step. step_s: median of the slowest rank's step times at this
    batch, warm-up left out, over `steps` steps; 0 where there is none yet. sync_s: of that, seconds in which gradients
    were exchanged and nothing was computed, on the rank that waited least.
    memory_bytes: the most that rank 0 has held at this micro-batch. memory_limit_bytes: of its GPU; 0 without one.
    grad_sqr, grad_var: smoothed squared norm and variance at the initial batch, NaN-free; both 0 while unknown.
    waited_s: of step_s, that the rank with the slowest input waited for data. cpu_s: that rank 0 and its loaders used
    for a step; 0 while unknown. cpus: that rank 0 was given; 0 without a share. data_bytes: of the job's data set; 0 of
    a job that is no `LoadedJob`. sent_bytes: of gradients that leave rank 0 in a step, codec_s: seconds that encoding
    and decoding them takes it, all under that compressor. layers: of the parts that rank 0 has, as the last measured
    step since the last report had them, by name: squared norm, and of it what was left out.
    """

    KIND: ClassVar[str] = "report"
    run: int
    step: int
    samples: int
    work: float
    loss: float
    micro_batch: int
    accumulation: int
    step_s: float
    sync_s: float = 0.0
    steps: int
    grad_sqr: float = 0.0
    grad_var: float = 0.0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    waited_s: float = 0.0
    cpu_s: float = 0.0
    cpus: float = 0.0
    data_bytes: float = 0.0
    sent_bytes: float = 0.0
    codec_s: float = 0.0
    compressor: str = "none"
    layers: dict[str, list[float]] = field(default_factory=dict)
    told_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Message):
    """A checkpoint is complete on disk: what it holds, and how long saving held training up."""

    KIND: ClassVar[str] = "saved"
    run: int
    step: int
    samples: int
    work: float
    save_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Message):
    """A rank says why it fails, in one sentence, before it exits.

    from_peers: it may only say that another rank is gone, which counts where no rank failed by itself. unsaved: the
    disk refused its last checkpoint, a newer run has begun, or the device is broken, which is not the job's fault.
    out_of_memory, unused: what the controller can remedy, by a smaller micro-batch or `Launch.unused`. broken_device:
    so the device says itself.
    """

    KIND: ClassVar[str] = "failure"
    run: int
    rank: int
    reason: str
    from_peers: bool = False
    unsaved: bool = False
    out_of_memory: bool = False
    unused: bool = False
    broken_device: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted(Message):
    """A rank saw something that its user should know, and trains on."""

    KIND: ClassVar[str] = "noted"
    run: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeansToLeave(Message):
    """A rank is about to exit with this code, 0 or PAUSED, and means it: only its agent wants to know.

    A process that user code ends says nothing.
    """

    KIND: ClassVar[str] = "leaving"
    run: int
    rank: int
    code: int
