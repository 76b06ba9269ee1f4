"""Which plans are proven to train what a single process would, and why another cannot be had."""

from __future__ import annotations

import copy
import fnmatch
from functools import cached_property
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from synergy_core.errors import InputError
from synergy_exec.messages import PlanMessage
from synergy_exec.training.compression.choices import SchemeByLayer
from synergy_exec.training.compression.scheme import SharedScheme
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.stages import ends
from synergy_exec.training.tensor_parallel import obstacle


class PlanKind(NamedTuple):
    """The part of a plan that decides which code trains it.

    zero: the ZeRO stage of several replicas, None of one. schedule: of a pipeline, "" without one.
    """

    zero: int | None
    tensor: bool
    schedule: str


def kind(plan: PlanMessage) -> PlanKind:
    """The kind of a plan."""
    schedule = "interleaved" if plan.interleave > 1 else plan.schedule
    return PlanKind(
        zero=plan.zero if plan.data > 1 else None,
        tensor=plan.tensor > 1,
        schedule=schedule if plan.pipeline > 1 else "",
    )


PROVEN: frozenset[PlanKind] = frozenset(
    PlanKind(zero, tensor, schedule)
    for zero, tensor, schedule in product((None, 0, 2, 3), (False, True), ("", "gpipe", "1f1b", "interleaved"))
    if not (zero == 0 and tensor)
)
"""The kinds that train what one process would: tests/exec/test_equality.py compares each with a single process."""


def refusal(job: TrainingJob, plan: PlanMessage) -> str | None:
    """Why this job cannot be trained under this plan, in a sentence that says what to change; None: it can."""
    return Admission(job).refusal(plan)


def plan_refusal(plan: PlanMessage) -> str | None:
    """Why no job can be trained under this plan, in a sentence that says what to change; None: the plan allows it."""
    return _ill_formed(plan) or _unproven(plan) or _uncompressed(plan)


def _ill_formed(plan: PlanMessage) -> str | None:
    for name in ("data", "tensor", "pipeline", "interleave", "micro_batch", "accumulation"):
        value = getattr(plan, name)
        if not isinstance(value, int) or value < 1:
            return f"{name} is {value!r}; write a whole number from 1"
    if plan.schedule not in ("1f1b", "gpipe"):
        return f"there is no schedule '{plan.schedule}'; write 1f1b or gpipe"
    if plan.pipeline == 1 and plan.interleave > 1:
        return f"interleave {plan.interleave} needs a pipeline; with pipeline 1, take interleave 1"
    if plan.schedule == "gpipe" and plan.interleave > 1:
        return f"gpipe has one stage a rank, not {plan.interleave}; take interleave 1, or schedule 1f1b"
    return None


def _unproven(plan: PlanMessage) -> str | None:
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


def _uncompressed(plan: PlanMessage) -> str | None:
    """What is in the way of the plan's compressor. One replica exchanges nothing, whatever the compressor."""
    try:
        choices = SchemeByLayer.named(plan.compressor)
    except InputError as error:
        return str(error).rstrip(".")
    for scheme in choices.schemes:
        if plan.zero and plan.data > 1 and not isinstance(scheme, SharedScheme):
            return (
                f"{scheme.name} needs and holds back whole gradients on every rank, which zero {plan.zero} is there to "
                "avoid; take zero 0, or a compressor that sums to shards, such as bf16 or q4"
            )
    return None


class Admission:
    """`refusal` for many plans of one job: what a model allows is found out once for each way to cut or split it.

    It builds the job's model, without its numbers where that is possible, and runs it.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._splits: dict[int, str | None] = {}

    def refusal(self, plan: PlanMessage) -> str | None:
        """Why the job cannot be trained under this plan, in a sentence that says what to change; None: it can."""
        return plan_refusal(plan) or self._unfit(plan)

    @cached_property
    def parameters(self) -> int:
        """How many parameters the model has."""
        return sum(each.numel() for each in self._outline[0].parameters())

    @cached_property
    def _outline(self) -> tuple[nn.Module, Tensor]:
        return outline(self._job)

    def _unfit(self, plan: PlanMessage) -> str | None:
        job = self._job
        if plan.compressor != "none" and (reason := self._unknown_layer(plan.compressor)):
            return reason
        needs_blocks = plan.pipeline > 1 or (plan.zero > 0 and job.blocks)
        if plan.tensor == 1 and not needs_blocks:
            return None
        if plan.pipeline > 1 and not job.blocks:
            return f"the job names no `blocks` to cut between; name them, or take pipeline 1 instead of {plan.pipeline}"
        if needs_blocks and (reason := self._no_blocks):
            return reason
        if plan.pipeline > 1 and (reason := self._uncut(plan.pipeline * plan.interleave)):
            return reason
        return self._unsplit(plan.tensor) if plan.tensor > 1 else None

    def _unknown_layer(self, compressor: str) -> str | None:
        names = [name for name, _ in self._outline[0].named_parameters()]
        for pattern, _ in SchemeByLayer.named(compressor).layers:
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
        return self._no_ends

    @cached_property
    def _no_ends(self) -> str | None:
        model, sample = self._outline
        try:
            ends(model, self._job.blocks, sample)
        except InputError as error:
            return str(error)
        return None

    def _unsplit(self, degree: int) -> str | None:
        if degree not in self._splits:
            model, sample = self._outline
            # It is spoilt by being split.
            self._splits[degree] = obstacle(copy.deepcopy(model), self._job.tensor_plan, degree, sample)
        return self._splits[degree]


def outline(job: TrainingJob) -> tuple[nn.Module, Tensor]:
    """The job's model and one sample's inputs, without numbers where the model can be had so."""
    inputs, _ = job.batch(0, 1)
    try:
        with torch.device("meta"):
            model = job.build_model()
        sample = inputs.to("meta")
        with torch.no_grad():
            copy.deepcopy(model)(sample)
    except (RuntimeError, NotImplementedError, TypeError):
        with torch.random.fork_rng(devices=[]):
            return job.build_model(), inputs
    return model, sample
