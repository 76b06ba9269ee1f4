"""Splitting linear layers and embeddings over ranks, as a job's `tensor_plan` says."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from synergy_exec.training import trees
from synergy_exec.training.job import Tree

Split = Literal["column", "row"]


def matching(model: nn.Module, pattern: str) -> list[str]:
    """The names of modules that a pattern of a `tensor_plan` means; a `*` stands within one part of a name."""
    wanted = pattern.split(".")
    return [
        name
        for name, _ in model.named_modules()
        if len(parts := name.split(".")) == len(wanted) and all(map(fnmatchcase, parts, wanted))
    ]


def split(model: nn.Module, plan: Mapping[str, Split], mesh: DeviceMesh) -> None:
    """Make the layers that `plan` names hold this rank's part, in place.

    A column layer's output stays split, for a row layer to take; a row layer's and an embedding's is whole.
    """
    styles = {
        name: _style(module, kind)
        for pattern, kind in plan.items()
        for name in matching(model, pattern)
        # A stage of a pipeline keeps the modules of others, emptied.
        if (module := model.get_submodule(name)).weight is not None
    }
    parallelize_module(model, mesh, styles)


def _style(module: nn.Module, kind: Split) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        if kind == "row":
            return RowwiseParallel(input_layouts=Replicate())
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel() if kind == "column" else RowwiseParallel()


def obstacle(model: nn.Module, plan: Mapping[str, Split], degree: int, sample: Tree) -> str | None:
    """Why the layers of a model cannot be split `degree` ways as planned; None: they can.

    model: on the meta device or a copy to spoil: a forward pass over parts of the right shapes is tried on it.
    sample: inputs, on the model's device.
    """
    if not plan:
        return "the job has no tensor_plan: name the layers to split, or take tensor 1"
    for pattern, kind in plan.items():
        if kind not in ("column", "row"):
            return f"tensor_plan['{pattern}'] is '{kind}'; write 'column' or 'row'"
        names = matching(model, pattern)
        if not names:
            return f"tensor_plan's '{pattern}' matches no module of the model; correct its name"
        for name in names:
            if reason := _indivisible(name, model.get_submodule(name), kind, degree):
                return reason
    return _misfit(model, plan, degree, sample)


def _indivisible(name: str, module: nn.Module, kind: Split, degree: int) -> str | None:
    if isinstance(module, nn.Linear):
        field = "out_features" if kind == "column" else "in_features"
    elif isinstance(module, nn.Embedding):
        field = "embedding_dim" if kind == "column" else "num_embeddings"
    else:
        return f"tensor_plan names {name}, a {type(module).__name__}; only Linear and Embedding can be split"
    size = getattr(module, field)
    if size % degree:
        return f"tensor {degree} does not divide {name}'s {field}, {size}; take a degree that does"
    return None


def _misfit(model: nn.Module, plan: Mapping[str, Split], degree: int, sample: Tree) -> str | None:
    """Whether what is between the split layers copes with parts: heads that do not divide, a layer left split."""
    with torch.no_grad():
        whole = trees.shapes(trees.called(model, sample))
        for pattern, kind in plan.items():
            for name in matching(model, pattern):
                module = model.get_submodule(name)
                if isinstance(module, nn.Linear):
                    _shrink(module, kind, degree)
        try:
            parted = trees.shapes(trees.called(model, sample))
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            return f"the model cannot be split {degree} ways: its forward fails on a rank's part ({reason})"
    if parted != whole:
        return (
            f"split {degree} ways the model gives {_in_words(parted)}, not {_in_words(whole)}: "
            "each 'column' layer of tensor_plan needs a 'row' layer after it"
        )
    return None


def _shrink(module: nn.Linear, kind: Split, degree: int) -> None:
    if kind == "column":
        module.weight = nn.Parameter(module.weight[: module.out_features // degree])
        if module.bias is not None:
            module.bias = nn.Parameter(module.bias[: module.out_features // degree])
    else:
        module.weight = nn.Parameter(module.weight[:, : module.in_features // degree])


def _in_words(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes))
