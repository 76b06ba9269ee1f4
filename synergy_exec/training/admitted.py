"""Which plans are proven to train what a single process would, and why another cannot be had."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from synergy_core.errors import InputError
from synergy_core.planner.plan import Plan
from synergy_exec.training import trees
from synergy_exec.training.bare import Bare, bare, drawing_nothing
from synergy_exec.training.compression.layers import CompressorByLayer
from synergy_exec.training.job import Batch, TrainingJob, Tree
from synergy_exec.training.parallel import obstacle
from synergy_exec.training.pipeline import Ends, ends


class PlanKind(NamedTuple):
    """The part of a plan that decides which code trains it.

    zero: the ZeRO stage of several replicas, None of one. schedule: of a pipeline, "" without one.
    """

    zero: int | None
    tensor: bool
    schedule: str


def kind(plan: Plan) -> PlanKind:
    """The kind of a plan."""
    schedule = "interleaved" if plan.interleave > 1 else "1f1b"
    return PlanKind(
        zero=plan.zero if plan.data > 1 else None,
        tensor=plan.tensor > 1,
        schedule=schedule if plan.pipeline > 1 else "",
    )


PROVEN: frozenset[PlanKind] = frozenset(
    PlanKind(zero, tensor, schedule)
    for zero, tensor, schedule in product((None, 0, 2, 3), (False, True), ("", "1f1b", "interleaved"))
    if not (zero == 0 and tensor)
)
"""The kinds that train what one process would: tests/exec/test_equality.py compares each with a single process."""


def refusal(job: TrainingJob, plan: Plan) -> str | None:
    """Why this job cannot be trained under this plan, in a sentence that says what to change; None: it can."""
    return Admission(job).refusal(plan)


def plan_refusal(plan: Plan) -> str | None:
    """Why no job can be trained under this plan, in a sentence that says what to change; None: the plan allows it."""
    return _ill_formed(plan) or _unproven(plan) or _uncompressed(plan)


_NOT_BUILT = ("context", "expert", "recompute", "sequence", "offload")
"""Fields of a plan that the executor has only at their defaults."""


def _ill_formed(plan: Plan) -> str | None:
    for name in ("data", "tensor", "pipeline", "interleave", "micro_batch", "accumulation"):
        value = getattr(plan, name)
        if not isinstance(value, int) or value < 1:
            return f"{name} is {value!r}; write a whole number from 1"
    for name in _NOT_BUILT:
        value, only = getattr(plan, name), getattr(Plan(), name)
        if value != only:
            return f"{name} {value} is not built; take {name} {only}"
    if plan.pipeline == 1 and plan.interleave > 1:
        return f"interleave {plan.interleave} needs a pipeline; with pipeline 1, take interleave 1"
    return None


def _unproven(plan: Plan) -> str | None:
    if plan.zero not in (0, 2, 3):
        return f"zero {plan.zero} is not built; take zero 0 (DDP), 2 or 3 (FSDP)"
    if plan.zero and plan.data == 1:
        return f"zero {plan.zero} shares out among replicas, of which there is one; take zero 0, or data 2 or more"
    if plan.zero == 0 and plan.data > 1 and plan.tensor > 1:
        return f"DDP fails on layers that are split; with data {plan.data} and tensor {plan.tensor}, take zero 2 or 3"
    if plan.accumulation < plan.pipeline:
        return (
            f"accumulation {plan.accumulation} leaves stages of pipeline {plan.pipeline} without a micro-batch; "
            f"take {plan.pipeline} or more, with smaller micro-batches"
        )
    if plan.interleave > 1 and plan.accumulation % plan.pipeline:
        return (
            f"accumulation {plan.accumulation} is no multiple of pipeline {plan.pipeline}, which interleaving needs; "
            f"take {-(-plan.accumulation // plan.pipeline) * plan.pipeline}, or interleave 1"
        )
    assert kind(plan) in PROVEN
    return None


def _uncompressed(plan: Plan) -> str | None:
    """What is in the way of the plan's compressor. One replica exchanges nothing, whatever the compressor."""
    try:
        choices = CompressorByLayer.named(plan.compressor)
    except InputError as error:
        return str(error).rstrip(".")
    for compressor in choices.every:
        if plan.zero and plan.data > 1 and not compressor.unbiased:
            return (
                f"{compressor.name} needs and holds back whole gradients on every rank, which zero {plan.zero} is "
                "there to avoid; take zero 0, or a compressor that sums to shards, such as bf16 or q4"
            )
    return None


class Admission:
    """`refusal` for many plans of one job: what a model allows is found out once for each way to cut or split it.

    It builds the job's model, without its numbers where that is possible, and runs it. answers: to what it has asked
    the model so far, as JSON has them; another's of the same model spare the asking.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self.answers: dict[str, Any] = {}

    def refusal(self, plan: Plan) -> str | None:
        """Why the job cannot be trained under this plan, in a sentence that says what to change; None: it can."""
        return plan_refusal(plan) or self._unfit(plan)

    def asks(self, plan: Plan) -> bool:
        """Whether it is the model that tells whether the plan can be had."""
        return plan.tensor > 1 or plan.pipeline > 1 or (plan.zero > 0 and bool(self._job.blocks))

    @cached_property
    def parameters(self) -> int:
        """How many parameters the model has."""
        return sum(each.numel() for each in self._outline[0].parameters())

    @cached_property
    def held_bytes(self) -> int:
        """Of its parameters and their gradients, which all ranks of a replica hold together at the least."""
        found = self._outline[0].parameters()
        return sum(each.numel() * each.element_size() * (1 + each.requires_grad) for each in found)

    @cached_property
    def bare(self) -> Bare:
        """The model without its numbers."""
        return bare(self._job)

    @property
    def runs_bare(self) -> bool:
        """Whether the model computes without numbers too."""
        return bool(self._answer("runs bare", self._found_to_run_bare))

    @property
    def edges(self) -> Ends:
        """Of the stages of a pipeline. Raises InputError where the model cannot be cut."""
        found = self._answer("ends", self._found_ends)
        if isinstance(found, str):
            raise InputError(found)
        return Ends(*map(frozenset, found))

    @property
    def inputs(self) -> Tree:
        """One sample's."""
        return self._sample[0]

    @property
    def bare_inputs(self) -> Tree:
        """Without numbers."""
        return trees.moved(self.inputs, torch.device("meta"))

    @cached_property
    def _sample(self) -> Batch:
        return self._job.batch(0, 1)

    def _answer(self, question: str, find: Callable[[], Any]) -> Any:
        if question not in self.answers:
            self.answers[question] = find()
        return self.answers[question]

    @cached_property
    def _outline(self) -> tuple[nn.Module, Tree]:
        """The model and one sample's inputs, without numbers where it computes so."""
        if self.runs_bare:
            assert self.bare.model is not None
            return self.bare.model, self.bare_inputs
        with drawing_nothing():
            return self._job.build_model(), self.inputs

    def _found_to_run_bare(self) -> bool:
        if self.bare.model is None:
            return False
        try:
            with torch.no_grad():
                # One sample alone has no variance, which BatchNorm asks for in training.
                trees.called(copy.deepcopy(self.bare.model).eval(), self.bare_inputs)
        except (RuntimeError, NotImplementedError, TypeError):
            return False
        return True

    def _unfit(self, plan: Plan) -> str | None:
        job = self._job
        if plan.compressor != "none" and (reason := self._unknown_layer(plan.compressor)):
            return reason
        if not self.asks(plan):
            return None
        if plan.pipeline > 1 and (reason := self._nested(plan.pipeline)):
            return reason
        if plan.pipeline > 1 and not job.blocks:
            return f"the job names no `blocks` to cut between; name them, or take pipeline 1 instead of {plan.pipeline}"
        if (plan.pipeline > 1 or plan.zero) and job.blocks and (reason := self._no_blocks):
            return reason
        if plan.pipeline > 1 and (reason := self._uncut(plan.pipeline * plan.interleave)):
            return reason
        return self._unsplit(plan.tensor) if plan.tensor > 1 else None

    def _nested(self, pipeline: int) -> str | None:
        """Whether batches are more than a pipeline can send from stage to stage and compare at its end."""
        odd = [each for each in self._sample if not isinstance(each, Tensor)]
        if not odd:
            return None
        return (
            f"a pipeline takes one tensor of inputs and one of targets, and {type(self._job).__name__}.batch gives a "
            f"{type(odd[0]).__name__}; give tensors, or take pipeline 1 instead of {pipeline}"
        )

    def _unknown_layer(self, compressor: str) -> str | None:
        names = [name for name, _ in self._outline[0].named_parameters()]
        for pattern, _ in CompressorByLayer.named(compressor).layers:
            if not fnmatch.filter(names, pattern):
                return f"compressor '{compressor}' names '{pattern}', which is no parameter's name; correct it"
        return None

    @cached_property
    def _no_blocks(self) -> str | None:
        (model, _), blocks = self._outline, self._job.blocks
        try:
            layers = model.get_submodule(blocks)
        except AttributeError:
            return f"the model has no '{blocks}', which the job names as its blocks; correct `blocks`"
        if not isinstance(layers, nn.ModuleList):
            return f"the model's '{blocks}' is a {type(layers).__name__}; blocks are an nn.ModuleList"
        return None

    def _uncut(self, stages: int) -> str | None:
        model, _ = self._outline
        for method in ("embed", "head"):
            if not callable(getattr(model, method, None)):
                return f"the model has no method `{method}`; write it (see TrainingJob), or take pipeline 1"
        count = len(list(model.get_submodule(self._job.blocks).children()))
        if count < stages:
            return f"the model has {count} blocks for {stages} stages; take at most {count} stages"
        found = self._answer("ends", self._found_ends)
        return found if isinstance(found, str) else None

    def _found_ends(self) -> list[list[str]] | str:
        model, sample = self._outline
        try:
            found = ends(model, self._job.blocks, sample)
        except InputError as error:
            return str(error)
        return [sorted(found.before), sorted(found.after)]

    def _unsplit(self, degree: int) -> str | None:
        def found() -> str | None:
            model, sample = self._outline
            # It is spoilt by being split.
            return obstacle(copy.deepcopy(model).eval(), self._job.tensor_plan, degree, sample)

        reason: str | None = self._answer(f"tensor {degree}", found)
        return reason
