"""One rank of a job's training under a plan."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from synergy_core.errors import InputError
from synergy_core.performance.goodput.efficiency import UNDISTORTED, Distortion, GradientErrors
from synergy_core.performance.planner.plan import Plan
from synergy_exec.training import trees
from synergy_exec.training.admitted import plan_refusal
from synergy_exec.training.checkpoint import Checkpoints, State
from synergy_exec.training.compression.exchange import Exchange, Exchanged
from synergy_exec.training.initial import Initial
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import Batch, TrainingJob, Tree
from synergy_exec.training.noise import GradientSquares, MicroBatchSquares, SquaredNorm
from synergy_exec.training.parallel import check_exchanged, exchanging, replicate
from synergy_exec.training.pipeline import OwnedStages, owned_stages
from synergy_exec.training.precision import LOW, LossScale, allow_tf32, compute_in, weights_cast_once
from synergy_exec.training.ranks import Ranks
from synergy_exec.training.supply import Supply

# Buffers that a model updates as it trains, such as the running statistics of BatchNorm.
#
# A micro-batch is normalised by its own mean and variance, so training depends on the size of a micro-batch and not on
# how many micro-batches a rank or a replica has. The buffers must not depend on that either. Therefore every
# micro-batch of a step starts from the buffers that the step started from, and the step ends with the mean over all
# micro-batches of all replicas. Evaluations, checkpoints and later steps are then the same under every plan with
# micro-batches of one size. Momentum counts steps, not micro-batches.


class StepBuffers:
    """The buffers of a rank's parts that change in training. The first step of a run shows which these are.

    group: of the replicas, or None for one replica. All ranks of it call `begin` and `end` together. Integer buffers
    (such as the number of batches) take the value after one micro-batch.
    """

    def __init__(self, parts: Sequence[nn.Module], group: ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._parts = [_PartBuffers(each) for each in parts]
        self._known = False

    def begin(self) -> None:
        """Call before the forward passes of a step."""
        for part in self._parts:
            part.passes, part.before = [], part.values()

    def end(self, micro_batches: int, *, only_finite: bool = False) -> None:
        """Call after the passes of a step. micro_batches: passes per part; earlier passes, by which a pipeline learns
        shapes, do not count. only_finite: numbers that a pass made inf or NaN stay as before the step.
        """
        for part in self._parts:
            if not self._known:
                self._forget_constants(part)
            for at, before in enumerate(part.before or ()):
                passes = [values[at] for values in part.passes[-micro_batches:]]
                after = before + self._mean(before, passes) if before.is_floating_point() else passes[-1]
                part.set(at, torch.where(after.isfinite(), after, before) if only_finite else after)
            part.before = None
            if not self._known:
                part.join()
        self._known = True

    def _mean(self, before: Tensor, passes: Sequence[Tensor]) -> Tensor:
        """Mean change of a buffer per pass, over the passes of all replicas."""
        # An unchanged buffer counts as 0, because inf − inf would be NaN.
        added = torch.stack([torch.where(after == before, 0.0, after - before) for after in passes]).sum(0)
        if self._group is None:
            return added / len(passes)
        distributed.all_reduce(added, group=self._group)
        return added / (len(passes) * self._group.size())

    def _forget_constants(self, part: _PartBuffers) -> None:
        """Forgets the buffers that no replica changed."""
        before = part.before or []
        changed = [any(not torch.equal(values[at], each) for values in part.passes) for at, each in enumerate(before)]
        flags = torch.tensor(changed, dtype=torch.int32, device=self._device)
        if self._group is not None and changed:
            distributed.all_reduce(flags, distributed.ReduceOp.MAX, group=self._group)
        kept = [at for at, flag in enumerate(flags.tolist()) if flag]
        part.places = [part.places[at] for at in kept]
        part.before = [before[at] for at in kept]
        part.passes = [[values[at] for at in kept] for values in part.passes]


class _PartBuffers:
    """The persistent buffers of one part.

    places: module and attribute name of each buffer. before: values at the start of the step, restored before every
    pass; None outside a step. passes: values after each pass. Once it is known which buffers change, those of one type
    become parts of one tensor (`join`), and `values` and `set` are about these tensors, so that a step costs a few
    operators and not a few for each buffer. _joined: each with (module, name, its part) of its buffers.
    """

    def __init__(self, part: nn.Module) -> None:
        places = {
            id(buffer): (module, name)
            for module in part.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and buffer.layout == torch.strided
        }
        self.places = list(places.values())
        self.before: list[Tensor] | None = None
        self.passes: list[list[Tensor]] = []
        self._joined: list[tuple[Tensor, list[tuple[nn.Module, str, Tensor]]]] | None = None
        if self.places:
            part.register_forward_pre_hook(self._begin_pass)
            part.register_forward_hook(self._end_pass)

    def join(self) -> None:
        """Makes buffers of one type parts of one tensor. The buffers themselves remain the same objects."""
        alike: dict[object, list[tuple[nn.Module, str]]] = {}
        for module, name in self.places:
            buffer = getattr(module, name)
            alike.setdefault(id(buffer) if isinstance(buffer, DTensor) else buffer.dtype, []).append((module, name))
        self._joined = []
        for places in alike.values():
            held = [getattr(module, name).data for module, name in places]
            if isinstance(held[0], DTensor):
                self._joined.append((held[0], []))
                continue
            whole = torch.cat([each.reshape(-1) for each in held])
            pieces = torch.split(whole, [each.numel() for each in held])
            own = [(*place, piece.view(each.shape)) for place, each, piece in zip(places, held, pieces, strict=True)]
            self._joined.append((whole, own))
            self._adopt(own)

    @staticmethod
    def _adopt(own: list[tuple[nn.Module, str, Tensor]]) -> None:
        """Makes buffers the parts of their tensor again, where the model has put other tensors in their place."""
        for module, name, piece in own:
            buffer = getattr(module, name)
            if buffer.data_ptr() != piece.data_ptr():
                piece.copy_(buffer.data)
                buffer.data = piece

    def values(self) -> list[Tensor]:
        if self._joined is None:
            return [getattr(module, name).detach().clone() for module, name in self.places]
        for _, own in self._joined:
            self._adopt(own)
        return [whole.clone() for whole, _ in self._joined]

    def set(self, at: int, value: Tensor) -> None:
        if self._joined is not None:
            self._joined[at][0].copy_(value)
            return
        module, name = self.places[at]
        # Through `data`: the backward pass has saved the buffer and would refuse a change, although it never reads it.
        getattr(module, name).data.copy_(value)

    def _begin_pass(self, *_: Any) -> None:
        for at, value in enumerate(self.before or ()):
            self.set(at, value)

    def _end_pass(self, *_: Any) -> None:
        if self.before is not None:
            self.passes.append(self.values())


def _pieces(job: TrainingJob, batch: Any, plan: Plan, replica: int) -> Iterator[tuple[int, Any, Any]]:
    """Yields (samples, inputs, targets), equally often on every replica; an empty piece has one row that is ignored."""
    inputs, targets = trees.pair(f"{type(job).__name__}.evaluation()", batch)
    (whole,) = trees.lengths((inputs, targets))
    first, end = (whole * each // plan.data for each in (replica, replica + 1))
    count = math.ceil(math.ceil(whole / plan.data) / plan.micro_batch)
    for piece in range(count):
        start, stop = (first + (end - first) * each // count for each in (piece, piece + 1))
        rows = (start, stop) if stop > start else (0, 1)
        yield stop - start, trees.rows(inputs, *rows), trees.rows(targets, *rows)


@contextmanager
def _evaluating(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Puts every module into evaluation mode, and back into its former mode afterwards."""
    modes = [(module, module.training) for part in parts for module in part.modules()]
    try:
        for part in parts:
            part.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
            if isinstance(module, FSDPModule):
                # There is no backward pass after which FSDP would shard the weights again.
                module.reshard()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step; equal on all ranks except for `exchanged`.

    loss: mean over the global batch; grad_norm: norm of the gradient; both before the weights changed. squares: for the
    noise scale, None if not measured. exchanged: this rank's exchange of gradients, None without replicas. skipped:
    whether the weights did not change, because scaled gradients were beyond float16's range.
    """

    loss: float
    grad_norm: float
    squares: GradientSquares | None
    exchanged: Exchanged | None = None
    skipped: bool = False


class Trainer:
    """One rank of a model in training under a plan, in the default process group of `plan.gpus` ranks.

    A single rank needs no process group. parts, optimizers: one of each per pipeline stage that this rank owns (one
    without a pipeline); parameters have their names in the whole model. The initial weights are those that a single
    process draws after `torch.manual_seed(seed)`.
    measure_squares: whether steps return the gradient squares for the noise scale, which costs one read of every
    micro-batch's gradient. precision: bf16, fp16, tf32 or fp32 (`precision.py`). loss_scale: under fp16, else None.
    compiled: whether torch.compile compiles each block, or the whole model if the job names no blocks.
    supply: source of batches; by default each batch is made when it is needed. unused: see `replicate`. weights: file
    of a state_dict to begin with; None for weights drawn by the job. begun: `load` will be called and find a
    checkpoint, so the weights may be anything until then.
    Raises InputError for a plan under which no job can be trained. `Admission` checks whether this job can.
    """

    def __init__(
        self,
        job: TrainingJob,
        plan: Plan,
        device: torch.device | str = "cpu",
        *,
        seed: int = 0,
        measure_squares: bool = True,
        precision: str = "fp32",
        compiled: bool = False,
        supply: Supply | None = None,
        unused: bool = False,
        weights: Path | None = None,
        begun: bool = False,
    ) -> None:
        if reason := plan_refusal(plan):
            raise InputError(reason)
        self._job, self.plan, self._seed = job, plan, seed
        self.supply = supply or Supply(job)
        self._device = torch.device(device)
        self._mesh = _mesh(plan, self._device)
        self._replica = self._mesh["data"].get_local_rank() if self._mesh is not None else 0
        self._begun = begun
        allow_tf32(precision)
        low = LOW.get(precision)
        self.loss_scale = LossScale() if precision == "fp16" else None
        self.parts = Initial(job, plan, self._mesh, self._device, seed, weights, begun=begun, low=low).parts()
        replicas = self._mesh["data"] if self._mesh is not None and plan.data > 1 else None
        self._prepare_forward(low, compiled=compiled)
        self._modules = [
            replicate(part, job.blocks, plan.zero, replicas, low=low, unused=unused, begun=begun) for part in self.parts
        ]
        whole = self._modules[0] if plan.pipeline == 1 else None
        self.exchange = (
            Exchange(whole, plan, whole.process_group, self._device, seed)
            if isinstance(whole, DistributedDataParallel)
            else None
        )
        self._buffers = StepBuffers(self.parts, None if replicas is None else replicas.get_group(), self._device)
        self.errors = self._errors()
        self._rounding = UNDISTORTED
        self.optimizers: list[Optimizer] = [_optimizer(job, part) for part in self.parts]
        self._rates = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        self._copies = plan.data * plan.tensor
        self._squares = MicroBatchSquares(self.parts, self._copies, self._device) if measure_squares else None
        self._pipeline = self._schedule()
        self._count_squares()

    def step(self, number: int, *, rate: float = 1.0) -> StepResult:
        """Takes one optimizer step on `batch(number, plan.global_batch)`, with learning rates multiplied by `rate`."""
        self._draw_from(number, self._replica)
        for part, optimizer, rates in zip(self.parts, self.optimizers, self._rates, strict=True):
            part.zero_grad()  # also gradients of parameters that the optimizer does not have
            for group, initial in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = initial * rate
        inputs, targets = self._rows(number)
        if self.exchange is not None:
            self.exchange.begin(number)
        self._buffers.begin()
        with weights_cast_once():
            if self._pipeline is None:
                loss: Tensor | None = self._accumulate(number, inputs, targets)
            else:
                loss = self._pipeline.backward(inputs, targets)
        for module in self._modules:
            check_exchanged(module)
        self._buffers.end(self.plan.accumulation, only_finite=self.loss_scale is not None)
        exchanged = self.exchange.end() if self.exchange is not None else None
        sums = self._sums(loss, exchanged)
        if self.plan.zero and sums[3].item():
            self._check_used()
        skipped = not self._unscaled(sums)
        if not skipped:
            if self._job.max_grad_norm is not None:
                self._clip(self._job.max_grad_norm, sums[1].sqrt())
            for optimizer in self.optimizers:
                optimizer.step()
        mean_loss, big, small, _, *totals = sums.tolist()
        return StepResult(mean_loss, big**0.5, self._squared(big, small, totals), exchanged, skipped)

    def evaluate(self, number: int, beat: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Evaluates after step `number`: returns the mean of each of the job's metrics over all samples of its batches.

        All ranks call it together and get the same result. Each batch is cut by rows among the replicas, and further
        into pieces no larger than the plan's micro-batch, which is known to fit into memory. beat: called before each
        batch. Raises InputError for malformed or missing batches.
        """
        self._draw_from(number, self._replica)
        job, sums, batches = self._job, dict[str, tuple[float, int]](), 0
        with _evaluating(self.parts), torch.no_grad():
            for batch in job.evaluation():
                beat()
                batches += 1
                for samples, inputs, targets in _pieces(job, batch, self.plan, self._replica):
                    inputs, targets = trees.moved((inputs, targets), self._device)
                    forward = self._pipeline.forward if self._pipeline else partial(trees.called, self.parts[0])
                    output = forward(inputs)
                    if output is not None and samples:
                        for name, value in job.metrics(output, targets).items():
                            total, of = sums.get(name, (0.0, 0))
                            sums[name] = total + float(value) * samples, of + samples
        found = Ranks().together(lambda: sums)
        if not batches:
            raise InputError(
                f"{type(job).__name__}: evaluate_every is {job.evaluate_every}, and evaluation() gives no batches; "
                "give some, or leave evaluate_every at 0."
            )
        names = dict.fromkeys(name for each in found for name in each)
        # All ranks that split a replica's layers report the replica's result, so every replica counts equally often.
        every = {name: [each[name] for each in found if name in each] for name in names}
        return {name: math.fsum(total for total, _ in each) / sum(of for _, of in each) for name, each in every.items()}

    def retune(self, micro_batch: int, accumulation: int, compressor: str | None = None) -> None:
        """Sets micro-batch, accumulation and compressor (None: unchanged) from the next step on.

        All ranks call it together. Weights stay as they are.
        """
        self.plan = dataclasses.replace(
            self.plan, micro_batch=micro_batch, accumulation=accumulation, compressor=compressor or self.plan.compressor
        )
        if self.exchange is not None:
            self.exchange.retune(self.plan)
        self.errors = self._errors()
        self._pipeline = self._schedule()
        self._count_squares()

    def state(self) -> State:
        """The state of this rank for a checkpoint; all ranks call it together."""
        held = self.exchange.held() if self.exchange is not None else {}
        return State(self.parts, self.optimizers, held)

    def load(self, checkpoints: Checkpoints, *, saved_step: int = 0) -> Progress | None:
        """Loads the newest undamaged checkpoint; returns None if there is no checkpoint. See `Checkpoints.load`."""
        state = State(self.parts, self.optimizers)
        progress = checkpoints.load(state, saved_step=saved_step)
        if progress is None:
            if self._begun:
                raise InputError("there is no checkpoint, and there was one when this run began to build its model.")
            return None
        if self.exchange is not None:
            self.exchange.hold(state.held)
        if self.loss_scale is not None and progress.loss_scale:
            self.loss_scale = LossScale(progress.loss_scale, progress.finite_steps)
        return progress

    def _errors(self) -> GradientErrors | None:
        """Compression errors of the gradients, which determine a step's worth; None without compression."""
        return self.exchange.errors() if self.exchange is not None and self.exchange.compresses else None

    def _count_squares(self) -> None:
        """Counts micro-batches' gradients only if there are several: a single one is the whole gradient."""
        if self._squares is not None:
            self._squares.wanted = self.plan.micro_batch != self.plan.global_batch

    def _schedule(self) -> OwnedStages | None:
        if self._mesh is None or self.plan.pipeline == 1:
            return None
        group = self._mesh["pipeline"].get_group()
        return OwnedStages(self._modules, self.plan, group, self._device, self._loss)

    def _rows(self, number: int) -> Batch:
        """This replica's part of the whole batch, where the job has made it."""
        whole = self.plan.global_batch
        own = whole // self.plan.data
        return self.supply.rows(number, whole, self._replica * own, (self._replica + 1) * own)

    def _accumulate(self, number: int, inputs: Tree, targets: Tree) -> Tensor:
        count, size = self.plan.accumulation, self.plan.micro_batch
        (module,) = self._modules
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for place, (x, y) in enumerate(trees.split((inputs, targets), size, count)):
            # One by one, so that the device holds one micro-batch's samples, however many there are.
            x = trees.moved(x, self._device)
            # Random numbers (dropout) depend on step and micro-batch, not on which replica has the micro-batch.
            self._draw_from(number, self._replica * count + place)
            with exchanging(module, self.plan.zero, last=place == count - 1):
                loss = self._loss(trees.called(module, x), y) / count
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _prepare_forward(self, low: torch.dtype | None, *, compiled: bool) -> None:
        """Compiles the parts on request, and makes them compute in the chosen format. The first stage of a pipeline is
        made to take samples that are not on its device.
        """
        plan, blocks = self.plan, self._job.blocks
        place = self._mesh["pipeline"].get_local_rank() if self._mesh is not None else 0
        for stage, part in zip(owned_stages(place, plan), self.parts, strict=True):
            if stage == 0 and plan.pipeline > 1:
                part.register_forward_pre_hook(lambda _, given: trees.moved(given, self._device))
            for module in (part.get_submodule(blocks).children() if blocks else [part]) if compiled else ():
                # Only the forward pass: hooks that FSDP and the noise scale put on modules are not compiled.
                module.forward = torch.compile(module.forward)
            if low is not None:
                last = stage == plan.pipeline * plan.interleave - 1
                compute_in(part, low, self._device, last=last)

    def _loss(self, output: Any, target: Tree) -> Tensor:
        """The loss to differentiate: multiplied by the loss scale, if there is one."""
        loss = _loss(self._job, output, trees.moved(target, self._device))
        return loss if self.loss_scale is None else loss * self._scale

    @property
    def _scale(self) -> float:
        """The loss scale of one micro-batch. A pipeline divides gradients by their number only when all are there."""
        assert self.loss_scale is not None
        return self.loss_scale.value / (1 if self._pipeline is None else self.plan.accumulation)

    def _unscaled(self, sums: Tensor) -> bool:
        """Divides gradients, and loss and norms in `sums`, by the loss scale. Returns whether gradients are finite;
        without a loss scale it does nothing and returns True.
        """
        if self.loss_scale is None:
            return True
        by = 1 / self._scale
        sums[0] *= by
        sums[1:3] *= by**2
        finite = math.isfinite(sums[1].item())
        self.loss_scale.update(finite=finite)
        for alike in self._alike() if finite else ():
            torch._foreach_mul_([each.grad for each in alike if each.grad is not None], by)
        return finite

    def _clip(self, most: float, norm: Tensor) -> None:
        """Scales the gradient, whose norm over all ranks is `norm`, down to at most `most`, as torch does."""
        for alike in self._alike():
            nn.utils.clip_grads_with_norm_(alike, most, norm)

    def _alike(self) -> list[list[nn.Parameter]]:
        """Parameters with a gradient, whole and sharded ones apart: torch cannot scale them in one call."""
        trained = [each for part in self.parts for each in part.parameters() if each.grad is not None]
        apart = [[each for each in trained if isinstance(each, DTensor) == sharded] for sharded in (False, True)]
        return [each for each in apart if each]

    def _draw_from(self, number: int, place: int) -> None:
        """Seeds the random generators by seed, step and place."""
        seed = hash((self._seed, number, place))
        # torch.manual_seed asks every possible kind of device and takes a hundred times as long.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _sums(self, loss: Tensor | None, exchanged: Exchanged | None) -> Tensor:
        """Sums over all ranks: loss, squared norm of the gradient, sum of the micro-batches' squared norms, number of
        parameters without a gradient, and the `totals` of the exchange on steps that measured them.
        """
        parameters = [each for part in self.parts for each in part.parameters() if each.requires_grad]
        gradients = [each.grad for each in parameters if each.grad is not None]
        whole = SquaredNorm(self._copies, self._device)
        for each in gradients:
            whole.add(each)
        nothing = torch.zeros((), dtype=torch.float32, device=self._device)
        sums = torch.stack(
            [
                nothing if loss is None else loss.float() / self._copies,
                whole.take(),
                nothing if self._squares is None else self._squares.take(),
                nothing + (len(parameters) - len(gradients)),
            ]
        )
        if exchanged is not None and exchanged.totals is not None:
            sums = torch.cat([sums, exchanged.totals])
        if self._mesh is not None:
            distributed.all_reduce(sums)
        return sums

    def _check_used(self) -> None:
        """Raises InputError if, under FSDP, some replicas used a parameter in their loss and others did not.

        FSDP then averages gradients of different parameters, unless their sizes differ, at which gloo aborts.
        """
        assert self._mesh is not None
        named = [each for part in self.parts for each in part.named_parameters() if each[1].requires_grad]
        used = torch.tensor([each.grad is not None for _, each in named], dtype=torch.int32, device=self._device)
        distributed.all_reduce(used, group=self._mesh["data"].get_group())
        odd = [name for (name, _), replicas in zip(named, used.tolist(), strict=True) if 0 < replicas < self.plan.data]
        if odd:
            raise InputError(
                f"{odd[0]} had a part in the loss of some replicas only, which FSDP cannot train; give each parameter "
                "a part in each loss, such as 0 times its sum."
            )

    def _squared(self, big: float, small: float, totals: list[float]) -> GradientSquares | None:
        plan = self.plan
        if totals:
            given, error, given_again, error_again, _ = totals
            self._rounding = Distortion(_quotient(error, given), _quotient(error_again, given_again))
        if self._squares is None:
            return None
        # A pipeline scales its gradients after they are counted; without one, losses are divided before.
        mean = small / plan.accumulation if self._pipeline else small * plan.accumulation
        known, rounding = plan.micro_batch != plan.global_batch, self._rounding
        if self.exchange is not None and self.exchange.feedback:
            # With error feedback the exchanged mean is not the mean gradient, whose norm is known only from a sketch.
            known, rounding = bool(totals), UNDISTORTED
            big = totals[4] if totals else big
        small_sqr = mean if known else None
        return GradientSquares(small_sqr, plan.micro_batch, big, plan.global_batch, rounding, plan.data)


def _loss(job: TrainingJob, output: Any, target: Tree) -> Tensor:
    """The job's loss without dimensions. Raises InputError unless it is a single number with a gradient."""
    loss: Any = job.loss(output, target)
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    given = f"a tensor of {loss.numel()} numbers" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    if isinstance(loss, Tensor) and loss.numel() == 1:
        given = "a tensor that no trained parameter has a part in (requires_grad is False)"
    raise InputError(f"{type(job).__name__}.loss gave {given}; give a tensor of one number that depends on the model.")


def _optimizer(job: TrainingJob, part: nn.Module) -> Optimizer:
    """The job's optimizer of a part. Raises InputError unless it can train this part, and nothing else."""
    optimizer: Any = job.build_optimizer(part.parameters())
    name = f"{type(job).__name__}.build_optimizer"
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"{name} gave a {type(optimizer).__name__}; give one torch.optim.Optimizer.")
    inner = [each for each in tree_leaves(vars(optimizer)) if isinstance(each, Optimizer)]
    if lost := [each for each in inner if each.state is not optimizer.state]:
        raise InputError(
            f"{name} gave a {type(optimizer).__name__} around a {type(lost[0]).__name__}, and checkpoints hold the "
            "outer one's state only; write one optimizer that keeps everything in its own `state` and groups."
        )
    try:
        # Of the class, because a learning-rate scheduler replaces the method of the object.
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        raise InputError(
            f"{name} gave {type(optimizer).__name__}, whose step needs arguments; take an optimizer that steps without "
            "a closure, such as AdamW."
        ) from None
    own = {id(each) for each in part.parameters()}
    if any(id(each) not in own for group in optimizer.param_groups for each in group["params"]):
        raise InputError(
            f"{name} gave an optimizer of parameters that it did not receive; take them from its argument, and make "
            "all that is trained a part of the model."
        )
    return optimizer


def _quotient(part: float, whole: float) -> float:
    return part / whole if whole > 0 and math.isfinite(part / whole) else 0.0


def _mesh(plan: Plan, device: torch.device) -> DeviceMesh | None:
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    if world != plan.gpus:
        raise InputError(
            f"data({plan.data}) × tensor({plan.tensor}) × pipeline({plan.pipeline}) is {plan.gpus} ranks, "
            f"but the process group has {world}; start {plan.gpus}."
        )
    if world == 1:
        return None
    shape = (plan.pipeline, plan.data, plan.tensor)
    return init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "data", "tensor"))
