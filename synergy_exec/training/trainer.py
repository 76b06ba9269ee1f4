"""One rank of a job's training under a plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from synergy_core.errors import InputError
from synergy_core.goodput.compressed import UNDISTORTED, Distortion, GradientErrors
from synergy_exec.messages import PlanMessage
from synergy_exec.training import checkpoint
from synergy_exec.training.admitted import plan_refusal, refusal
from synergy_exec.training.compression.exchange import Exchange, Exchanged
from synergy_exec.training.data_parallel import exchanging, replicate
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.pipeline import OwnedStages, owned_stages
from synergy_exec.training.progress import Progress
from synergy_exec.training.squares import GradientSquares, MicroBatchSquares, squared_norm
from synergy_exec.training.stages import cut, ends
from synergy_exec.training.supply import Supply
from synergy_exec.training.tensor_parallel import split


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave, equal on every rank: loss, the mean over the global batch, and the gradient's norm, both
    before the weights changed; squares, None where they are not measured. exchanged: this rank's, None without
    replicas.
    """

    loss: float
    grad_norm: float
    squares: GradientSquares | None
    exchanged: Exchanged | None = None


class Trainer:
    """The job's model under a plan, on the default process group of `plan.world` ranks (none needed for one).

    parts, optimizers: one of each per pipeline stage that this rank owns (one in all without a pipeline); parameters
    have the names they have in the whole model. Before any step the weights are those a single process draws after
    `torch.manual_seed(seed)`.
    measure_squares: whether steps say what the noise scale needs; it costs one reading of every micro-batch's gradient.
    bfloat16: forward passes under autocast; weights, gradients and losses stay in float32. supply: of this very job;
    by default each is made when it is needed.
    Raises InputError for a plan that cannot be had.
    """

    def __init__(
        self,
        job: TrainingJob,
        plan: PlanMessage,
        device: torch.device | str = "cpu",
        *,
        seed: int = 0,
        measure_squares: bool = True,
        bfloat16: bool = False,
        supply: Supply | None = None,
    ) -> None:
        if reason := refusal(job, plan):
            raise InputError(reason)
        self._job, self.plan, self._seed = job, plan, seed
        self.supply = supply or Supply(job)
        self._device = torch.device(device)
        self._mesh = _mesh(plan, self._device)
        self._replica = self._mesh["data"].get_local_rank() if self._mesh is not None else 0
        self.parts = self._build()
        if bfloat16:
            for part in self.parts:
                _cast(part, self._device)
        replicas = self._mesh["data"] if self._mesh is not None and plan.data > 1 else None
        self._modules = [replicate(part, job.blocks, plan.zero, replicas) for part in self.parts]
        self.exchange = (
            None
            if replicas is None
            else Exchange(self.parts, self._modules, plan, replicas.get_group(), self._device, seed)
        )
        self.errors = self._errors()
        self._rounding = UNDISTORTED
        self.optimizers: list[Optimizer] = [job.build_optimizer(part.parameters()) for part in self.parts]
        self._rates = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        self._copies = plan.data * plan.tensor
        self._squares = MicroBatchSquares(self.parts, self._copies, self._device) if measure_squares else None
        self._pipeline = self._schedule()

    def step(self, number: int, *, rate: float = 1.0) -> StepResult:
        """One optimizer step on `batch(number, plan.global_batch)`, every group's initial learning rate × `rate`."""
        # What a model draws (dropout) follows from step and replica, so a checkpoint needs no generator's state.
        torch.manual_seed(hash((self._seed, number, self._replica)))
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            optimizer.zero_grad()
            for group, initial in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = initial * rate
        inputs, targets = self._rows(number)
        if self.exchange is not None:
            self.exchange.begin(number)
        loss = self._pipeline.backward(inputs, targets) if self._pipeline else self._accumulate(inputs, targets)
        exchanged = self.exchange.end() if self.exchange is not None else None
        sums = self._sums(loss, exchanged)
        for optimizer in self.optimizers:
            optimizer.step()
        return self._result(sums.tolist(), exchanged)

    def retune(self, micro_batch: int, accumulation: int, compressor: str | None = None) -> None:
        """Sets micro-batch, accumulation and compressor (None: as it is) from the next step on, on all ranks together;
        weights stay as they are.
        """
        plan = dataclasses.replace(
            self.plan, micro_batch=micro_batch, accumulation=accumulation, compressor=compressor or self.plan.compressor
        )
        if reason := plan_refusal(plan):
            raise InputError(reason)
        self.plan = plan
        if self.exchange is not None:
            self.exchange.retune(plan)
        self.errors = self._errors()
        self._pipeline = self._schedule()

    def save(self, folder: Path, progress: Progress) -> None:
        """A checkpoint, complete on disk when this returns; see `checkpoint.save`."""
        checkpoint.save(folder, self.parts, self.optimizers, progress, held=self._held())

    def save_later(self, folder: Path, progress: Progress) -> checkpoint.Saving:
        """A checkpoint that is written while training goes on; see `checkpoint.save_later`."""
        return checkpoint.save_later(folder, self.parts, self.optimizers, progress, held=self._held())

    def load(self, folder: Path) -> Progress | None:
        """Goes on from the newest whole checkpoint; None if there is none. See `checkpoint.load`."""
        held = self.exchange.wanted() if self.exchange is not None else {}
        progress = checkpoint.load(folder, self.parts, self.optimizers, held=held)
        if self.exchange is not None and progress is not None:
            self.exchange.hold(held)
        return progress

    def _errors(self) -> GradientErrors | None:
        """Of the gradients that are exchanged, where they are compressed; what a step is worth follows from it."""
        return self.exchange.errors() if self.exchange is not None and self.exchange.compresses else None

    def _held(self) -> dict[str, Tensor]:
        return self.exchange.held() if self.exchange is not None else {}

    def _build(self) -> list[nn.Module]:
        job, plan = self._job, self.plan
        torch.manual_seed(self._seed)
        model = job.build_model()
        parts = [model]
        if self._mesh is not None and plan.pipeline > 1:
            sample, _ = job.batch(0, 1)
            edges = ends(model, job.blocks, sample)
            count = plan.pipeline * plan.interleave
            owned = owned_stages(self._mesh["pipeline"].get_local_rank(), plan)
            parts = [cut(model, job.blocks, edges, stage, count) for stage in owned]
        for part in parts:
            part.to(self._device)
            if self._mesh is not None and plan.tensor > 1:
                split(part, job.tensor_plan, self._mesh["tensor"])
        return parts

    def _schedule(self) -> OwnedStages | None:
        if self._mesh is None or self.plan.pipeline == 1:
            return None
        group = self._mesh["pipeline"].get_group()
        return OwnedStages(self._modules, self.plan, group, self._device, self._job.loss)

    def _rows(self, number: int) -> tuple[Tensor, Tensor]:
        """This replica's part of the whole batch."""
        whole = self.plan.global_batch
        own = whole // self.plan.data
        inputs, targets = self.supply.rows(number, whole, self._replica * own, (self._replica + 1) * own)
        return inputs.to(self._device), targets.to(self._device)

    def _accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        count, size = self.plan.accumulation, self.plan.micro_batch
        (module,) = self._modules
        total = torch.zeros((), device=self._device)
        for place, (x, y) in enumerate(zip(torch.split(inputs, size), torch.split(targets, size), strict=True)):
            with exchanging(module, self.plan.zero, last=place == count - 1):
                loss = self._job.loss(module(x), y) / count
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _sums(self, loss: Tensor | None, exchanged: Exchanged | None) -> Tensor:
        """Loss, squared norm of the gradient and sum over micro-batches of their own, over all ranks; three numbers,
        and on steps of which the exchange measured them its `totals`.
        """
        gradients = (each.grad for part in self.parts for each in part.parameters() if each.grad is not None)
        nothing = torch.zeros((), device=self._device)
        sums = torch.stack(
            [
                nothing if loss is None else loss.float() / self._copies,
                squared_norm(gradients, self._copies, self._device),
                nothing if self._squares is None else self._squares.take(),
            ]
        )
        if exchanged is not None and exchanged.totals is not None:
            sums = torch.cat([sums, exchanged.totals])
        if self._mesh is not None:
            distributed.all_reduce(sums)
        return sums

    def _result(self, sums: list[float], exchanged: Exchanged | None) -> StepResult:
        loss, big, small, *totals = sums
        return StepResult(loss, big**0.5, self._squared(big, small, totals), exchanged)

    def _squared(self, big: float, small: float, totals: list[float]) -> GradientSquares | None:
        plan = self.plan
        if totals:
            given, error, given_again, error_again, _ = totals
            self._rounding = Distortion(_quotient(error, given), _quotient(error_again, given_again))
        if self._squares is None:
            return None
        # A pipeline's micro-batches are scaled after they are counted; the others' losses were divided before.
        mean = small / plan.accumulation if self._pipeline else small * plan.accumulation
        known, rounding = plan.micro_batch != plan.global_batch, self._rounding
        if self.exchange is not None and self.exchange.feedback:
            # What is held back makes the exchanged mean's norm tell nothing: it is known where it was sketched.
            known, rounding = bool(totals), UNDISTORTED
            big = totals[4] if totals else big
        small_sqr = mean if known else None
        return GradientSquares(small_sqr, plan.micro_batch, big, plan.global_batch, rounding, plan.data)


def _quotient(part: float, whole: float) -> float:
    return part / whole if whole > 0 and math.isfinite(part / whole) else 0.0


def _mesh(plan: PlanMessage, device: torch.device) -> DeviceMesh | None:
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    if world != plan.world:
        raise InputError(
            f"data({plan.data}) × tensor({plan.tensor}) × pipeline({plan.pipeline}) is {plan.world} ranks, "
            f"but the process group has {world}; start {plan.world}."
        )
    if world == 1:
        return None
    shape = (plan.pipeline, plan.data, plan.tensor)
    return init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "data", "tensor"))


def _cast(part: nn.Module, device: torch.device) -> None:
    forward: Callable[[Tensor], Tensor] = part.forward

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return forward(x).float()

    part.forward = autocast
