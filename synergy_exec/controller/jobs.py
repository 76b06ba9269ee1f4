"""A job as the controller keeps it: the scheduler's record, and what is being done about it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from synergy_core.catalog import gpu_sheet
from synergy_core.goodput.compression._compressor import CodecSpeed, LayerSizes
from synergy_core.goodput.efficiency import gain
from synergy_core.jobs.exchange import Compression, GradientExchange, before_layers, exchange_of
from synergy_core.jobs.record import Job
from synergy_core.jobs.spec import JobSpec
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.scheduling.reasons import Stopped
from synergy_exec.controller.journal import ENDED
from synergy_exec.job_file import JobFile
from synergy_exec.job_folder import Filed

# What the exchange of each model's gradients may be: known once a worker has said what the model's layers are.


Layers = Sequence[tuple[str, int, int]]
"""Name, rows and columns of each parameter, as in `messages.Started`."""
_ODD = str.maketrans({",": "?", "=": "?", "[": "[[]", "*": "[*]", "?": "[?]"})
"""What has a meaning in `Plan.compressor`, as a pattern that fits it."""


@dataclass(frozen=True)
class ModelExchange:
    """Of the jobs of one model. names: of the layers that its offers are about, in their order."""

    names: tuple[str, ...]
    exchange: GradientExchange

    def as_told(self, compressor: str) -> str:
        """An offer's name as `Plan.compressor` has it for workers: by layer, where layers differ."""
        offer = self.exchange.offer(compressor)
        chosen = [offer.parts[at].name for at in np.broadcast_to(offer.choice, len(self.names)).tolist()]
        if compressor == NO_COMPRESSOR or not chosen:
            return compressor
        rest = Counter(chosen).most_common(1)[0][0]
        others = (f"{layer.translate(_ODD)}={each}" for layer, each in zip(self.names, chosen, strict=True))
        return ",".join([rest, *(other for other, each in zip(others, chosen, strict=True) if each != rest)])


class ModelExchanges:
    """Of all models, by application (`JobSpec.application`).

    mode, compressor: how jobs come by theirs (`exchange_of`). gpu_types: of the cluster. Speeds of encoding are
    measured by the first run on each type; until they are known of all types that have no data sheet, and of a model
    until its layers are, nothing is compressed.
    """

    def __init__(self, mode: Compression, compressor: str, gpu_types: Sequence[str]) -> None:
        self._mode, self._compressor, self._gpu_types = mode, compressor, tuple(gpu_types)
        self._layers: dict[str, Layers] = {}
        self._codecs: dict[str, Mapping[str, Sequence[float]]] = {}
        self._made: dict[str, ModelExchange] = {}
        self._nothing = before_layers(mode)

    def lacks_layers(self, application: str) -> bool:
        return self._mode != "none" and application not in self._layers

    def lacks_codecs(self, gpu_type: str) -> bool:
        return self._mode != "none" and gpu_type not in self._codecs

    def learn(
        self, application: str, layers: Layers, gpu_type: str, codecs: Mapping[str, Sequence[float]]
    ) -> dict[str, Any]:
        """What a model's layers are, and how fast encoding is on a GPU type: fields of `CodecSpeed` by scheme. Either
        may be empty. Returns what the journal keeps, and `restore` takes.
        """
        if layers:
            self._layers[application] = layers
        if codecs:
            self._codecs[gpu_type] = codecs
            self._made.clear()
        return {"layers": self._layers, "codecs": self._codecs}

    def restore(self, known: Mapping[str, Any]) -> None:
        self._layers, self._codecs = dict(known["layers"]), dict(known["codecs"])

    def of(self, application: str) -> ModelExchange | None:
        """Of that model; None where nobody compresses. Of no layers while they are not known."""
        if self._nothing is None:
            return None
        layers = self._layers.get(application)
        if not layers or any(each not in self._codecs and gpu_sheet(each) is None for each in self._gpu_types):
            return ModelExchange((), self._nothing)
        if application not in self._made:
            sizes = LayerSizes.of_shapes([(rows, columns) for _, rows, columns in layers])
            codecs = {
                kind: {scheme: CodecSpeed(*map(float, each)) for scheme, each in speeds.items()}
                for kind, speeds in self._codecs.items()
            }
            exchange = exchange_of(sizes, self._mode, self._compressor, codecs=codecs)
            assert exchange is not None
            self._made[application] = ModelExchange(tuple(name for name, _, _ in layers), exchange)
        return self._made[application]


State = Literal["waiting", "starting", "running", "stopping", "done", "failed", "cancelled"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(slots=True)
class Seen:
    """What a job last reported; `best_step` is the furthest step of any run.

    saved: as it stands on disk: steps, samples, work. note: what it last noted. spared_micro_batch: the most since
    memory ran out; 0: it never did. unused: some parameters have no part in some steps.
    """

    step: int = 0
    samples: int = 0
    work: float = 0.0
    loss: float = float("nan")
    step_s: float = 0.0
    memory_bytes: int = 0
    best_step: int = 0
    statistics: tuple[float, float] | None = field(default=None)
    saved: tuple[int, int, float] = (0, 0, 0.0)
    note: str = ""
    spared_micro_batch: int = 0
    unused: bool = False

    def values(self) -> dict[str, Any]:
        """All of it by name, as the journal keeps it; made at every report, so in a shorter way than `asdict`'s."""
        return {name: getattr(self, name) for name in self.__slots__}


class ExecutedJob(Job):
    """A job of the executor.

    state: what is being done about it; running and stopping mean that workers exist, or may. reason: why it failed.
    stopped_for: why it was last stopped before its end. queued: whether the scheduler has been told that it waits.

    file: what was submitted. uuid: by which its folder and checkpoints are known. row: of the workload, None if it came
    over the API. exchange: what the exchange of its gradients may be; None where nobody is to compress them.
    run: the number of its present or last run, −1 before the first. launched_s: when its present run was launched;
    ran_s: for how long it had run before. moved_s: when it was last submitted, launched, heard of a step of, or ended.
    losses: runs lost in a row without a step of progress.
    hung_step: the step at which its last run hung, −1 for none.
    trials: how often it was restarted for a plan that nobody had tried.
    """

    state: State = "waiting"
    reason = ""
    stopped_for: Stopped | None = None
    queued = False
    exchange: ModelExchange | None = None
    run, hung_step = -1, -1
    launched_s, ran_s = math.inf, 0.0
    losses, trials = 0, 0

    def __init__(
        self,
        job_id: int,
        name: str,
        file: JobFile,
        submit_time_s: float,
        *,
        gpu_types: Sequence[str],
        restart_s: float,
        profile: Profile,
        exchange: ModelExchange | None = None,
        row: int | None = None,
        uuid: str = "",
        estimate_s: float = float("inf"),
    ) -> None:
        super().__init__(
            job_id,
            submit_time_s,
            file.slots,
            virtual_cluster=file.virtual_cluster,
            user=file.user,
            estimate_s=estimate_s,
            priority=file.priority,
        )
        self.name, self.file, self.row, self.uuid = name, file, row, uuid
        self.spec = spec_of(file, gpu_types, restart_s, profile)
        if exchange is not None:
            self.may_exchange(exchange)
        self.seen = Seen()
        self.moved_s = submit_time_s

    def may_exchange(self, exchange: ModelExchange) -> None:
        """What the exchange of its gradients may be, as far as that is known."""
        assert self.spec is not None
        self.exchange = exchange
        self.spec = replace(self.spec, exchange=exchange.exchange)
        if self.task is not None and self.task.exchange is not None:
            self.task.may_exchange(exchange.exchange)

    def as_told(self, plan: Plan) -> Plan:
        """The plan as its workers are told it."""
        if self.exchange is None:
            return plan
        return replace(plan, compressor=self.exchange.as_told(plan.compressor))

    def stands_at(self, step: int, samples: int, work: float) -> None:
        """It is no further than that: what a run did since was not saved, or it goes on from there."""
        self.seen.step, self.seen.samples, self.seen.work = step, samples, work
        if self.task is not None:
            self.task.done_work = work

    def goodput(self, batch: int | None) -> float:
        """Iterations at the initial batch per second; NaN while nothing was reported, or it has no batch."""
        seen = self.seen
        if not batch or not seen.step_s:
            return math.nan
        known = seen.statistics
        return (gain(batch / self.file.initial_batch, *known) if known else 1.0) / seen.step_s

    def ran_seconds(self, now_s: float) -> float:
        return self.ran_s + max(0.0, now_s - self.launched_s)

    @property
    def filed(self) -> Filed:
        return Filed(self.job_id, self.uuid, self.name, self.file)

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def spec_of(file: JobFile, gpu_types: Sequence[str], restart_s: float, profile: Profile) -> JobSpec:
    """What the core is told of a job that nobody profiled: any batch fits, and all GPU types are as fast.

    A batch that does not fit ends the run with the reason; the user lowers `max_batch`. Of a job that was
    profiled, the profile says how fast it is and what it may have.
    """
    model = profile.of(file.name, file.application)
    restart_s = restart_s if model is None or model.costs is None else model.costs.restart_s
    given = None if model is None else model.input
    batch = file.batch or file.initial_batch
    # Of a job whose input was measured: how fast it is where input is no matter, on GPUs as many as it asks for.
    rate = 1.0 if given is None else file.slots * given.batch / (given.gpu_s * batch)
    spec = JobSpec(
        application=file.application,
        initial_batch=file.initial_batch,
        max_batch=file.max_batch,
        requested_batch=batch,
        requested_gpus=file.slots,
        local_batches=dict.fromkeys(gpu_types, (1, file.max_batch)),
        single_gpu_rate=dict.fromkeys(gpu_types, 1.0),
        requested_rate=dict.fromkeys(gpu_types, rate),
        declared_work=file.work,
        restart_s=restart_s,
        declared_restart_s=restart_s,
        resize_s=restart_s,
        architecture="" if model is None else model.name,
        pipeline=None if given is None else given.pipeline,
    )
    return replace(spec, fixed_batch=True, min_gpus=file.slots, most_gpus=file.slots) if file.command else spec
