"""A job as the controller keeps it: the scheduler's record, and what is being done about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from synergy_core.goodput.efficiency import gain
from synergy_core.jobs.exchanging import ExchangingTask
from synergy_core.jobs.record import Job
from synergy_core.jobs.spec import JobSpec
from synergy_core.jobs.testbed_profiles import Profile
from synergy_exec.controller.curve import Curve
from synergy_exec.controller.exchanges import ModelExchange
from synergy_exec.job_file import JobFile
from synergy_exec.job_folder import Filed
from synergy_exec.messages import PlanMessage

State = Literal["waiting", "starting", "running", "stopping", "done", "failed", "cancelled"]
STATES: tuple[State, ...] = get_args(State)
ENDED: tuple[State, ...] = ("done", "failed", "cancelled")


@dataclass(slots=True)
class Seen:
    """What a job last reported; `best_step` is the furthest step of any run.

    saved: as it stands on disk: steps, samples, work. note: what it last noted. spared_micro_batch: the most since
    memory ran out; fitting_micro_batch: the most that fits in memory by what reports said of it; 0: nothing is known.
    unused: some parameters have no part in some steps.
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
    fitting_micro_batch: int = 0
    unused: bool = False

    def values(self) -> dict[str, Any]:
        """All of it by name, as the journal keeps it; made at every report, so in a shorter way than `asdict`'s."""
        return {name: getattr(self, name) for name in self.__slots__}


class ExecutedJob(Job):
    """A job of the executor.

    state: what is being done about it; running and stopping mean that workers exist, or may.

    file: what was submitted. reason: why it failed. run: the number of its present or last run, −1 before the first.
    losses: runs lost in a row without a step of progress; lost_s: when runs were lost, within the last hour. trials:
    how often it was restarted for a plan that nobody had tried. uuid: by which its folder and checkpoints are known.
    row: of the workload, None if it came over the API. queued: whether the scheduler has been told that it waits.
    exchange: what the exchange of its gradients may be; None where nobody is to compress them. curve: its losses as
    this controller heard of them. moved_s: when it was last submitted, launched, heard of a step of, or ended.
    """

    __slots__ = (
        "curve",
        "exchange",
        "file",
        "losses",
        "lost_s",
        "moved_s",
        "name",
        "queued",
        "reason",
        "row",
        "run",
        "seen",
        "state",
        "trials",
        "uuid",
    )

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
        self.name = name
        self.file = file
        self.spec = spec_of(file, gpu_types, restart_s, profile)
        self.exchange: ModelExchange | None = None
        if exchange is not None:
            self.may_exchange(exchange)
        self.row = row
        self.state: State = "waiting"
        self.reason = ""
        self.run = -1
        self.trials = 0
        self.losses = 0
        self.lost_s: list[float] = []
        self.uuid = uuid
        self.queued = False
        self.seen = Seen()
        self.curve = Curve()
        self.moved_s = submit_time_s

    def may_exchange(self, exchange: ModelExchange) -> None:
        """What the exchange of its gradients may be, as far as that is known."""
        assert self.spec is not None
        self.exchange = exchange
        self.spec = replace(self.spec, exchange=exchange.exchange)
        if isinstance(self.task, ExchangingTask):
            self.task.may_exchange(exchange.exchange)

    def as_told(self, plan: PlanMessage) -> PlanMessage:
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

    @property
    def filed(self) -> Filed:
        """What its folder is to say of it."""
        return Filed(self.job_id, self.uuid, self.name, self.submit_time_s, self.row, self.file)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ENDED


def spec_of(file: JobFile, gpu_types: Sequence[str], restart_s: float, profile: Profile) -> JobSpec:
    """What the core is told of a job that nobody profiled: any batch fits, and all GPU types are as fast.

    A batch that does not fit ends the run with the reason; the user lowers `max_batch`. Of a job that was
    profiled, the profile says how fast it is and what it may have.
    """
    model = profile.of(file.name, file.application)
    restart_s = restart_s if model is None else model.costs.restart_s
    given = None if model is None else model.input
    batch = file.batch or file.initial_batch
    # Of a job whose input was measured: how fast it is where input is no matter, on GPUs as many as it asks for.
    rate = 1.0 if given is None else file.slots * given.batch / (given.gpu_s * batch)
    return JobSpec(
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
