"""Cutting a model into the stages of a pipeline, with every parameter under its own name."""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from synergy_core.errors import InputError
from synergy_exec.training.bare import sharing


@dataclass(frozen=True, slots=True)
class Ends:
    """Names of the parameters used before the blocks and after them."""

    before: frozenset[str]
    after: frozenset[str]


def ends(model: nn.Module, blocks: str, sample: Tensor) -> Ends:
    """Which parameters the model's `embed` and `head` use, seen by running both.

    sample: inputs, any number of samples. Raises InputError when a parameter is used by both (the stages would train
    two copies of it), or when the model computes something else than head(blocks(embed(x))); on the meta device only
    the shape can tell.
    """
    # A frozen parameter leaves no trace in the graph, hence the copy in which none is.
    trial: Any = sharing(model).eval()
    names = {id(parameter): name for name, parameter in trial.named_parameters()}
    embedded = trial.embed(sample)
    with torch.no_grad():
        hidden = embedded
        for block in _blocks(trial, blocks):
            hidden = block(hidden)
    output = trial.head(hidden.detach())
    with torch.no_grad():
        whole = trial(sample)
    same = whole.shape == output.shape and (whole.is_meta or torch.allclose(whole, output, rtol=1e-3, atol=1e-5))
    if not same:
        raise InputError(
            f"{type(model).__name__}.forward(x) differs from head({blocks}(embed(x))), so a pipeline would train "
            "another model; make them the same, or leave the job's `blocks` empty."
        )
    before, after = (frozenset(names[each] for each in _used(each)) for each in (embedded, output))
    if both := sorted(before & after):
        raise InputError(
            f"{type(model).__name__}: embed and head both use {', '.join(both)}, which a pipeline cannot share "
            "between its ends; give each its own, or leave the job's `blocks` empty."
        )
    return Ends(before, after)


def cut(model: nn.Module, blocks: str, edges: Ends, stage: int, stages: int) -> nn.Module:
    """A copy of the model with only what `stage` of `stages` trains; called, it computes that stage.

    The blocks stand in a ModuleDict under their places in the whole model, so names do not change. A parameter that
    nothing uses stays with the first stage.
    """
    part: Any = copy.deepcopy(model)
    layers = list(_blocks(part, blocks))
    own = {
        str(place): layers[place] for place in range(len(layers) * stage // stages, len(layers) * (stage + 1) // stages)
    }
    for name, _ in list(part.named_parameters()):
        first = name not in edges.after
        if not name.startswith(f"{blocks}.") and stage != (0 if first else stages - 1):
            place, _, last = name.rpartition(".")
            owner = part.get_submodule(place)
            owner.register_parameter(last, None)
            if owner is not part and not list(owner.parameters(recurse=False)):
                # Statistics that another stage keeps: a checkpoint must not find this stage's, which never change.
                for buffer, _ in list(owner.named_buffers(recurse=False)):
                    owner.register_buffer(buffer, None)
                if hasattr(owner, "track_running_stats"):
                    # Else BatchNorm would make one up as it is loaded.
                    owner.track_running_stats = False
    parent, _, last = blocks.rpartition(".")
    setattr(part.get_submodule(parent), last, nn.ModuleDict(own))

    def forward(self: Any, x: Tensor) -> Tensor:
        if stage == 0:
            x = self.embed(x)
        for layer in own:
            x = self.get_submodule(f"{blocks}.{layer}")(x)
        if stage == stages - 1:
            x = self.head(x)
        return x

    part.forward = types.MethodType(forward, part)
    whole_part: nn.Module = part
    return whole_part


def _blocks(model: nn.Module, blocks: str) -> nn.ModuleList:
    layers = model.get_submodule(blocks)
    assert isinstance(layers, nn.ModuleList)
    return layers


def _used(output: Tensor) -> set[int]:
    """The ids of the leaves in the graph that computed `output`."""
    leaves, seen, queue = set(), set(), [output.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.add(id(variable))
        queue.extend(each for each, _ in node.next_functions)
    return leaves
