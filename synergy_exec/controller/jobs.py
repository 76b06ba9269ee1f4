"""A job in the controller: the scheduler's record, and the state of its runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from synergy_core.performance.catalog import gpu_sheet
from synergy_core.performance.goodput.compression._compressor import CodecSpeed, LayerSizes
from synergy_core.performance.goodput.efficiency import gain
from synergy_core.performance.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.scheduling.decisions.reasons import Stopped
from synergy_core.scheduling.jobs.exchange import GradientExchange, before_layers, exchange_of
from synergy_core.scheduling.jobs.record import Job, Request
from synergy_core.scheduling.jobs.spec import JobSpec
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile
from synergy_exec.controller.journal import ENDED, JobRow, State
from synergy_exec.job_file import JobFile
from synergy_exec.job_folder import Filed
from synergy_exec.settings import ExchangeSettings

# Possible compression of each model's gradients, known once a worker has reported the model's layers.


Layers = Sequence[tuple[str, int, int]]
"""Name, rows and columns of each parameter, as in `messages.Started`."""
_AS_PATTERN = str.maketrans({",": "?", "=": "?", "[": "[[]", "*": "[*]", "?": "[?]"})
"""Characters with a meaning in `Plan.compressor`, and patterns that match them."""


@dataclass(frozen=True)
class ModelExchange:
    """The gradient exchange of one model. names: the names of the layers that its offers compress, in order."""

    names: tuple[str, ...]
    exchange: GradientExchange

    def as_told(self, compressor: str) -> str:
        """Converts an offer's name to the `Plan.compressor` that workers read, with exceptions for single layers."""
        offer = self.exchange.offer(compressor)
        chosen = [offer.parts[at].name for at in np.broadcast_to(offer.choice, len(self.names)).tolist()]
        if compressor == NO_COMPRESSOR or not chosen:
            return compressor
        rest = Counter(chosen).most_common(1)[0][0]
        others = (f"{layer.translate(_AS_PATTERN)}={each}" for layer, each in zip(self.names, chosen, strict=True))
        return ",".join([rest, *(other for other, each in zip(others, chosen, strict=True) if each != rest)])


class ModelExchanges:
    """The gradient exchanges of all models by application (`JobSpec.application`).

    The first run on each GPU type of the cluster measures the speed of encoding. Nothing is compressed until the speed
    is known for all types without a data sheet, and the model's layers are known.
    """

    def __init__(self, settings: ExchangeSettings, gpu_types: Sequence[str]) -> None:
        self._mode, self._compressor, self._gpu_types = settings.compression, settings.compressor, tuple(gpu_types)
        self._layers: dict[str, Layers] = {}
        self._codecs: dict[str, Mapping[str, Sequence[float]]] = {}
        self._made: dict[str, ModelExchange] = {}
        self._nothing = before_layers(settings.compression)

    def lacks_layers(self, application: str) -> bool:
        return self._mode != "none" and application not in self._layers

    def lacks_codecs(self, gpu_type: str) -> bool:
        return self._mode != "none" and gpu_type not in self._codecs

    def learn(
        self, application: str, layers: Layers, gpu_type: str, codecs: Mapping[str, Sequence[float]]
    ) -> dict[str, Any]:
        """Learns a model's layers, and the speed of encoding on a GPU type (fields of `CodecSpeed` by scheme).

        Either may be empty. Returns the value for the journal, which `restore` takes.
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
        """The exchange of a model; None without compression. It has no layers until layers and speeds are known."""
        if self._nothing is None:
            return None
        layers = self._layers.get(application)
        if not layers or any(each not in self._codecs and gpu_sheet(each) is None for each in self._gpu_types):
            return ModelExchange((), self._nothing)
        if application not in self._made:
            sizes = LayerSizes.of_shapes([(rows, columns) for _, rows, columns in layers])
            codecs = {
                gpu_type: {scheme: CodecSpeed(*map(float, each)) for scheme, each in speeds.items()}
                for gpu_type, speeds in self._codecs.items()
            }
            exchange = exchange_of(sizes, self._mode, self._compressor, codecs=codecs)
            assert exchange is not None
            self._made[application] = ModelExchange(tuple(name for name, _, _ in layers), exchange)
        return self._made[application]


@dataclass(slots=True)
class Seen:
    """The last reports of a job.

    best_step: the highest step of any run. saved: steps, samples and work of the newest checkpoint. note: the last
    message about the job. spared_micro_batch: the largest micro-batch allowed since memory ran out; 0 if it never did.
    unused: whether some parameters have no part in some steps. starts: how often its workers were started.
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
    starts: int = 0

    def values(self) -> dict[str, Any]:
        """All fields by name for the journal. It is called at every report, and this is faster than `asdict`."""
        return {name: getattr(self, name) for name in self.__slots__}


class ExecutedJob(Job):
    """A job of the executor.

    state: running and stopping mean that workers exist or may exist. reason: why it failed. stopped_for: why it was
    last stopped before its end. queued: whether the scheduler knows that the job waits.

    file: the submitted job file. uuid: identifies its folder and checkpoints. row: its row in the workload, None if it
    came over the API. exchange: possible compression of its gradients, or None. run: number of its present or last run,
    −1 before the first. launched_s: when its present run was launched. ran_s: run time before that. moved_s: time of
    its last submission, launch, reported step or end. losses: runs lost in a row without a step of progress. hung_step:
    the step at which its last run hung, −1 for none. trials: restarts for a plan that no job had tried.
    """

    spec: JobSpec
    state: State
    stopped_for: Stopped | None = None
    queued = False
    exchange: ModelExchange | None = None
    run, hung_step = -1, -1
    launched_s, ran_s = math.inf, 0.0
    trials = 0

    def __init__(
        self,
        row: JobRow,
        file: JobFile,
        *,
        gpu_types: Sequence[str],
        restart_s: float,
        profile: TestbedProfile,
        exchange: ModelExchange | None = None,
    ) -> None:
        super().__init__(
            row.job,
            row.submit_s,
            file.slots,
            request=Request(
                file.virtual_cluster,
                file.user,
                estimate_s=file.work,  # jobs declare work, not time: an iteration a second keeps their order
                priority=file.priority,
            ),
        )
        self.name, self.file, self.row, self.uuid = row.name, file, row.row, row.uuid
        self.state, self.reason, self.losses = row.state, row.reason, row.losses
        self.spec = spec_of(file, gpu_types, restart_s, profile)
        if exchange is not None:
            self.may_exchange(exchange)
        self.seen = Seen()
        self.moved_s = row.submit_s

    def may_exchange(self, exchange: ModelExchange) -> None:
        """Sets the possible compression of the job's gradients."""
        self.exchange = exchange
        self.spec = replace(self.spec, exchange=exchange.exchange)
        if self.task is not None and self.task.exchange is not None:
            self.task.may_exchange(exchange.exchange)

    def as_told(self, plan: Plan) -> Plan:
        """The plan with the compressor as workers read it."""
        if self.exchange is None:
            return plan
        return replace(plan, compressor=self.exchange.as_told(plan.compressor))

    def stands_at(self, step: int, samples: int, work: float) -> None:
        """Sets the job's progress to that of a checkpoint, because later steps were not saved."""
        self.seen.step, self.seen.samples, self.seen.work = step, samples, work
        if self.task is not None:
            self.task.done_work = work

    def goodput(self, batch: int | None) -> float:
        """Iterations at the initial batch per second; NaN before the first report, or without a batch."""
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


def spec_of(file: JobFile, gpu_types: Sequence[str], restart_s: float, profile: TestbedProfile) -> JobSpec:
    """The core's specification of a job.

    For a job without a profile any batch fits and all GPU types are equally fast. A batch that does not fit ends the
    run with the reason, and the user lowers `max_batch`. For a profiled job the profile gives speed and limits.
    """
    model = profile.of(file.name, file.application)
    restart_s = restart_s if model is None or model.costs is None else model.costs.restart_s
    given = None if model is None else model.input
    batch = file.batch or file.initial_batch
    # A job with measured input: its speed on the requested GPUs when input is not the bottleneck.
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
    return replace(spec, fixed_batch=True, min_gpus=file.min_slots, most_gpus=file.max_slots) if file.command else spec
