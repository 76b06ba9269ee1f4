"""What controller, agents and workers say to each other; see docs/executor.md.

Every message is one JSON object with a `kind`. Controller and agent speak over a websocket, agent and worker in lines
on a socket pair. `encode` and `decode` are the only ways in and out; a message with missing or odd fields is refused.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from synergy_core.cluster import Share
from synergy_core.errors import InputError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMessage:
    """Part of others: how to train. Degrees are fixed for a run.

    The fields of `synergy_core.planner.plan.Plan` that the executor knows. accumulation: micro-batches per step and
    replica. schedule: of a pipeline, `1f1b` (interleaved if interleave > 1) or `gpipe`. compressor: of the gradients
    that replicas exchange, such as `q4`, and after commas of layers: `q4,token.weight=none,layers.*=powersgd-4`. The
    controller has the names of the core's offers there, such as `layerwise-q4`, and tells workers what they stand for.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    zero: int = 0
    micro_batch: int = 1
    accumulation: int = 1
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    compressor: str = "none"

    @classmethod
    def of(cls, plan: Plan) -> PlanMessage:
        """The core's plan as the executor carries it out; a pipeline runs 1F1B, interleaved where the plan is."""
        return cls(
            data=plan.data,
            tensor=plan.tensor,
            pipeline=plan.pipeline,
            interleave=plan.interleave,
            zero=plan.zero,
            micro_batch=plan.micro_batch,
            accumulation=plan.accumulation,
            compressor=plan.compressor,
        )

    @property
    def core(self) -> Plan:
        """The core's plan."""
        return Plan(
            tensor=self.tensor,
            pipeline=self.pipeline,
            data=self.data,
            interleave=self.interleave,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            zero=self.zero,
            compressor=self.compressor,
        )

    @property
    def world(self) -> int:
        """How many ranks it takes."""
        return self.data * self.tensor * self.pipeline

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.data * self.micro_batch * self.accumulation

    @property
    def degrees(self) -> str:
        """What cannot change within a run, as text: `tp2 dp2 zero3` or `pp2×2 gpipe`; `1` for one slot."""
        interleaved = f"×{self.interleave}" if self.interleave > 1 else ""
        named = (("tp", self.tensor, ""), ("pp", self.pipeline, interleaved), ("dp", self.data, ""))
        parts = [f"{name}{degree}{more}" for name, degree, more in named if degree > 1]
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += [self.schedule] if self.pipeline > 1 and self.schedule != "1f1b" else []
        return " ".join(parts) or "1"


# Controller → agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(Message):
    """Listen on a free port, for the store at which this run's ranks meet; answered by `Reserved`."""

    KIND: ClassVar[str] = "reserve"
    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Message, RunSettings):
    """Start this node's workers of a run.

    job_class: `package.module:Class` or `/path/file.py:Class`. slots: which of the node's, ranks first_rank … in their
    order. store_host, store_port: where the ranks meet; the agent that reserved it holds that port itself.
    folder: the job's own, on a file system that all nodes share. work: iterations at the initial batch until it is
    done. noise: whether to estimate the gradient's noise scale. report_s: between reports. share: what each of its
    slots brings of the node's CPUs and memory; None: the slots' own cores, and nothing is kept in memory. say_layers,
    time_codecs: whether `Started` is to say what the model's layers are, and how fast gradients are encoded.
    """

    KIND: ClassVar[str] = "launch"
    run: int
    job: int
    job_class: str
    arguments: dict[str, Any] = field(default_factory=dict)
    plan: PlanMessage
    initial_batch: int
    work: float
    slots: list[int]
    first_rank: int
    world: int
    store_host: str
    store_port: int
    folder: str
    noise: bool = True
    report_s: float = 1.0
    share: Share | None = None
    say_layers: bool = False
    time_codecs: bool = False


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

    cpus: cores that runs may use, memory_bytes: the same part of the machine's memory; 0 where an agent does not say.
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
    """The store's address for a run."""

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
    """

    KIND: ClassVar[str] = "ended"
    run: int
    outcome: Outcome
    reason: str = ""


# Worker → agent → controller (the agent passes them on as they are)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Message):
    """The first step of a run is done. Seconds since launch, as the worker saw them, part by part.

    layers: name, rows and columns of each parameter that has a gradient, as replicas exchange it; codecs: by scheme,
    the fields of `CodecSpeed`; both empty unless they were asked for.
    """

    KIND: ClassVar[str] = "started"
    run: int
    step: int
    launch_s: float
    build_s: float
    load_s: float
    first_step_s: float
    layers: list[tuple[str, int, int]] = field(default_factory=list)
    codecs: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Message):
    """What rank 0 saw since the last report.

    step, samples, work: done in all. loss: of the last step. step_s: median of the slowest rank's step times at this
    batch, warm-up left out, over `steps` steps; 0 where there is none yet. sync_s: of that, seconds in
    which gradients were exchanged and nothing was computed, on the rank that waited least.
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
    sync_s: float
    steps: int
    grad_sqr: float
    grad_var: float
    memory_bytes: int
    waited_s: float = 0.0
    cpu_s: float = 0.0
    cpus: float = 0.0
    data_bytes: float = 0.0
    sent_bytes: float = 0.0
    codec_s: float = 0.0
    compressor: str = "none"
    layers: dict[str, list[float]] = field(default_factory=dict)


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
    """Rank 0, or whichever rank failed first, says why in one sentence before it exits."""

    KIND: ClassVar[str] = "failure"
    run: int
    rank: int
    reason: str
    out_of_memory: bool = False


KINDS: dict[str, type[Message]] = {each.KIND: each for each in Message.__subclasses__()}


def encode(message: Message) -> str:
    """One line of JSON."""
    return json.dumps({"kind": message.KIND, **dataclasses.asdict(message)}, separators=(",", ":"))


def decode(text: str | bytes) -> Message:
    """The message in a line of JSON. Raises InputError for anything else."""
    try:
        values = json.loads(text)
        kind = KINDS[values.pop("kind")]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"not a message: {text[:100]!r} ({type(error).__name__})") from None
    message: Message = _build(kind, values)
    return message


def _build(kind: type[Any], values: Any) -> Any:
    hints = typing.get_type_hints(kind)
    names = {each.name for each in dataclasses.fields(kind)}
    if not isinstance(values, dict) or (odd := set(values) - names):
        raise InputError(f"{kind.__name__}: unexpected {sorted(odd) if isinstance(values, dict) else values!r}")
    try:
        return kind(**{name: _part(hints[name], each) for name, each in values.items()})
    except (TypeError, ValueError) as error:
        raise InputError(f"{kind.__name__}: {error}") from None


def _part(hint: Any, value: Any) -> Any:
    if hint is PlanMessage:
        return _build(hint, value)
    if value is not None and hint in (Share, Share | None):
        return Share(*map(float, value))
    return value
