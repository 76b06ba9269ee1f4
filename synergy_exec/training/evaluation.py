"""A job's metrics on its evaluation batches, the same under every plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from synergy_core.errors import InputError
from synergy_exec.messages import PlanMessage
from synergy_exec.training import trees
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.pipeline import OwnedStages
from synergy_exec.training.ranks import Ranks


def evaluated(
    job: TrainingJob,
    parts: Sequence[nn.Module],
    pipeline: OwnedStages | None,
    plan: PlanMessage,
    replica: int,
    device: torch.device,
    beat: Callable[[], None],
) -> dict[str, float]:
    """Means over all samples of all batches, by metric; all ranks call it together and get the same.

    Batches are cut by rows among the replicas, and into pieces no larger than the plan's micro-batch, which is known
    to fit. beat: called before each batch. Raises InputError where there are no batches, or they are none.
    """
    sums: dict[str, tuple[float, int]] = {}
    batches = 0
    with _evaluating(parts), torch.no_grad():
        for batch in job.evaluation():
            beat()
            batches += 1
            for samples, inputs, targets in _pieces(job, batch, plan, replica):
                inputs, targets = trees.moved((inputs, targets), device)
                output = trees.called(parts[0], inputs) if pipeline is None else pipeline.forward(inputs)
                if output is not None and samples:
                    for name, value in job.metrics(output, targets).items():
                        total, of = sums.get(name, (0.0, 0))
                        sums[name] = total + float(value) * samples, of + samples
    found = Ranks().together(lambda: sums)
    if not batches:
        raise InputError(
            f"{type(job).__name__}: evaluate_every is {job.evaluate_every}, and evaluation() gives no batches; give "
            "some, or leave evaluate_every at 0."
        )
    names = dict.fromkeys(name for each in found for name in each)
    # Ranks that split the layers of a replica each say what all of them say together, as often for every replica.
    every = {name: [each[name] for each in found if name in each] for name in names}
    return {name: math.fsum(total for total, _ in each) / sum(of for _, of in each) for name, each in every.items()}


def _pieces(job: TrainingJob, batch: Any, plan: PlanMessage, replica: int) -> Iterator[tuple[int, Any, Any]]:
    """(samples, inputs, targets), as many on every replica; where there are none, one that does not count."""
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
    """Every module in evaluation within it, and as it was after."""
    modes = [(module, module.training) for part in parts for module in part.modules()]
    try:
        for part in parts:
            part.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
            if isinstance(module, FSDPModule):
                # No backward pass comes to share its weights out again.
                module.reshard()
