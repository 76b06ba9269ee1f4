"""Decides under which plans a job trains with the same result as in a single process, and why others are refused."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from functools import cached_property

import torch
from torch import Tensor, nn

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_exec.plans import Candidates, plans
from synergy_exec.training import trees
from synergy_exec.training.compression.exchange import sparse_layer
from synergy_exec.training.compression.layers import PLAIN, CompressorByLayer
from synergy_exec.training.compression.schemes import schemes
from synergy_exec.training.job import Batch, LoadedJob, TrainingJob, Tree
from synergy_exec.training.meta_model import keeping_random_state, on_meta_device, sharing
from synergy_exec.training.parallel import obstacle
from synergy_exec.training.pipeline import used_by_head


def plan_refusal(plan: Plan) -> str | None:
    """Why no job can be trained under this plan, as a sentence that says what to change; None if the plan is fine."""
    return _unproven(plan) or _uncompressed(plan)


_NOT_BUILT = ("context", "expert", "recompute", "sequence", "offload")
"""Fields of a plan for which the executor supports only the default."""


def _unproven(plan: Plan) -> str | None:
    for name in _NOT_BUILT:
        value, only = getattr(plan, name), getattr(Plan(), name)
        if value != only:
            return f"{name} {value} is not built; take {name} {only}"
    if plan.pipeline == 1 and plan.interleave > 1:
        return f"interleave {plan.interleave} needs a pipeline; with pipeline 1, take interleave 1"
    if plan.zero not in (0, 2, 3):
        return f"zero {plan.zero} is not built; take zero 0 (DDP), 2 or 3 (FSDP)"
    if plan.zero and plan.data == 1:
        return f"zero {plan.zero} needs several replicas, and data is 1; take zero 0, or data 2 or more"
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
    return None


def _uncompressed(plan: Plan) -> str | None:
    """Why the plan's compressor cannot be used, else None. With one replica any compressor is fine: none is used."""
    try:
        choices = CompressorByLayer.named(plan.compressor)
    except InputError as error:
        return str(error).rstrip(".")
    if odd := [each for each in choices.every if each.scheme not in schemes()]:
        return f"{odd[0].name} is not built; write synergy_exec/training/compression/schemes/{odd[0].scheme}.py"
    if choices.is_plain or plan.data == 1 or (plan.gpus == plan.data and not plan.zero):
        return None
    return (
        f"compressor {plan.compressor} is for whole replicas alone; with data {plan.data}, take zero 0, tensor 1 and "
        "pipeline 1, or compressor none"
    )


class Admission:
    """Checks under which plans one job can be trained. It builds and runs the model once for each way to split it.

    The model is built on torch's meta device if its forward pass runs there.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._unsplit: dict[int, str | None] = {}

    def refusal(self, plan: Plan) -> str | None:
        """Why the job cannot be trained under this plan, as a sentence that says what to change; None if it can."""
        return plan_refusal(plan) or self._unfit(plan)

    def candidates(self, sizes: list[int], batches: list[int]) -> Candidates:
        """The possible plans of the job's model on these numbers of slots at these batches."""
        job = self._job
        loaded = (job.samples, job.item_bytes) if isinstance(job, LoadedJob) else (0, 0)
        found = {size: plans(size, batches, self.refusal) for size in sizes}
        parameters = list(self._outline[0].parameters())
        numbers = sum(each.numel() for each in parameters)
        # Parameters and their gradients are the least that the ranks of a replica hold together.
        held_bytes = sum(each.numel() * each.element_size() * (1 + each.requires_grad) for each in parameters)
        return Candidates(found, float(numbers), float(held_bytes), *loaded)

    @cached_property
    def _sample(self) -> Batch:
        return self._job.batch(0, 1)

    @cached_property
    def _meta(self) -> nn.Module | None:
        return on_meta_device(self._job).model

    @property
    def _structure(self) -> nn.Module:
        """The model, on the meta device if it can be built there, whether or not it runs there."""
        return self._outline[0] if self._meta is None else self._meta

    @cached_property
    def _outline(self) -> tuple[nn.Module, Tree]:
        """The model and one sample's inputs, on the meta device if the model runs there."""
        inputs, model = self._sample[0], self._meta
        if model is not None:
            without_numbers = trees.moved(inputs, torch.device("meta"))
            # In evaluation mode, because BatchNorm in training refuses a single sample.
            with torch.no_grad(), contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                trees.called(copy.deepcopy(model).eval(), without_numbers)
                return model, without_numbers
        with keeping_random_state():
            return self._job.build_model(), inputs

    def _unfit(self, plan: Plan) -> str | None:
        blocks = self._job.blocks
        if plan.pipeline > 1:
            if odd := [each for each in self._sample if not isinstance(each, Tensor)]:
                return (
                    f"a pipeline takes one tensor of inputs and one of targets, and {type(self._job).__name__}.batch "
                    f"gives a {type(odd[0]).__name__}; give tensors, or take pipeline 1 instead of {plan.pipeline}"
                )
            if not blocks:
                return f"the job names no `blocks` to cut between; name them, or take pipeline 1, not {plan.pipeline}"
        if (plan.pipeline > 1 or plan.zero) and blocks and self._no_blocks:
            return self._no_blocks
        if (plan.pipeline > 1 or plan.zero) and blocks and self._shared:
            return self._shared
        if (plan.pipeline > 1 or plan.tensor > 1) and self._uncopied:
            return self._uncopied
        if plan.pipeline > 1 and (reason := self._uncut(plan.pipeline * plan.interleave)):
            return reason
        if plan.data > 1 and self._replicas_differ:
            return self._replicas_differ
        if plan.data > 1 and (plan.zero or plan.compressor != PLAIN.name) and self._sparse:
            return self._sparse
        if plan.zero and self._unsharded:
            return self._unsharded
        if (plan.gpus > plan.data or plan.zero) and self._hooked:
            return self._hooked
        if plan.tensor > 1 and plan.tensor not in self._unsplit:
            model, sample = self._outline
            trial = copy.deepcopy(model).eval()  # `obstacle` changes it
            self._unsplit[plan.tensor] = obstacle(trial, self._job.tensor_plan, plan.tensor, sample)
        return self._unsplit.get(plan.tensor)

    @cached_property
    def _no_blocks(self) -> str | None:
        blocks = self._job.blocks
        try:
            layers = self._structure.get_submodule(blocks)
        except AttributeError:
            return f"the model has no '{blocks}', which the job names as its blocks; correct `blocks`"
        if not isinstance(layers, nn.ModuleList):
            return f"the model's '{blocks}' is a {type(layers).__name__}; blocks are an nn.ModuleList"
        return None

    @cached_property
    def _shared(self) -> str | None:
        """Why the model cannot be cut or sharded block by block: a parameter of a block is also used elsewhere."""
        model = self._structure
        blocks = list(model.get_submodule(self._job.blocks).children())
        inner = {id(module) for block in blocks for module in block.modules()}
        outside = (module for module in model.modules() if id(module) not in inner)
        groups = [
            {id(each) for module in outside for each in module._parameters.values()},
            *({id(each) for each in block.parameters()} for block in blocks),
        ]
        users = Counter(each for group in groups for each in group)
        if several := [name for name, each in model.named_parameters() if users[id(each)] > 1]:
            return f"{several[0]} is shared with another block; take zero 0 and pipeline 1, or give each block its own"
        return None

    @cached_property
    def _uncopied(self) -> str | None:
        model, _ = self._outline
        try:
            sharing(model)  # a copy that takes no memory for parameters
        except Exception as error:  # modules may raise anything
            text = " ".join(str(error).split())[:200]
            return f"the model cannot be copied ({type(error).__name__}: {text}); take tensor 1 and pipeline 1"
        return None

    @cached_property
    def _replicas_differ(self) -> str | None:
        for name, module in self._structure.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                return f"{name} has max_norm, which changes its weight by the samples of one replica only; take data 1"
        return None

    @cached_property
    def _sparse(self) -> str | None:
        name = sparse_layer(self._structure)
        return f"{name} has sparse gradients; take zero 0 and compressor none, or sparse=False" if name else None

    @cached_property
    def _hooked(self) -> str | None:
        for name, each in self._structure.named_parameters():
            if each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None):
                return (
                    f"{name} has a hook, which is lost where a plan splits the model; take zero 0, tensor 1 and "
                    "pipeline 1, or leave the hook out (to clip gradients, set max_grad_norm)"
                )
        return None

    @cached_property
    def _unsharded(self) -> str | None:
        """Why FSDP2 cannot shard the parameters."""
        model = self._structure
        for name, each in model.named_parameters():
            if not each.dim() or not each.numel() or not each.is_contiguous():
                what = "not contiguous" if each.numel() > 1 else "empty" if each.dim() else "without dimensions"
                return f"FSDP cannot shard {name}, which is {what}; take zero 0, or change its shape or memory format"
        blocks = list(model.get_submodule(self._job.blocks).children()) if self._job.blocks else []
        inner = {id(each) for block in blocks for each in block.parameters()}
        others = [each for each in model.parameters() if id(each) not in inner]
        for group in (others, *(block.parameters() for block in blocks)):
            types = {str(each.dtype).removeprefix("torch.") for each in group if each.requires_grad}
            if len(types) > 1:
                return (
                    f"FSDP needs trained parameters of one type within a block and outside the blocks, and they are "
                    f"{' and '.join(sorted(types))}; take zero 0"
                )
        return None

    def _uncut(self, stages: int) -> str | None:
        model, _ = self._outline
        for method in ("embed", "head"):
            if not callable(getattr(model, method, None)):
                return f"the model has no method `{method}`; write it (see TrainingJob), or take pipeline 1"
        if self._job.blocks not in dict(model.named_modules()):
            return "the blocks are inside a compiled model; compile the blocks instead, or take pipeline 1"
        count = len(list(model.get_submodule(self._job.blocks).children()))
        if count < stages:
            return f"the model has {count} blocks for {stages} stages; take at most {count} stages"
        return self._mixed_ends or self._dropped

    @cached_property
    def _mixed_ends(self) -> str | None:
        model, sample = self._outline
        try:
            used_by_head(model, self._job.blocks, sample)
        except InputError as error:
            return str(error)
        return None

    @cached_property
    def _dropped(self) -> str | None:
        """Why optimizers of parts of the model might not train what one optimizer of the whole model trains."""
        # Other objects, because an optimizer may put hooks on its parameters.
        every = self._outline[0].named_parameters()
        named = {name: nn.Parameter(each.detach(), each.requires_grad) for name, each in every}
        names, half = list(named), len(named) // 2

        def trained(names: list[str]) -> set[str]:
            groups = self._job.build_optimizer(named[name] for name in names).param_groups
            given = {id(each) for group in groups for each in group["params"]}
            return {name for name in names if id(named[name]) in given}

        # An optimizer need not accept tensors without numbers. If it fails with others, too, training will say so.
        with contextlib.suppress(Exception):
            if odd := sorted(trained(names) ^ (trained(names[:half]) | trained(names[half:]))):
                return (
                    f"build_optimizer trains {odd[0]} or not, depending on which other parameters it gets, and a stage "
                    "has only some; choose parameters one by one, such as by their shape, or take pipeline 1"
                )
        return None
