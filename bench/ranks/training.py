"""Trains the shipped GPT and CNN with compressors, and measures losses and errors of gradients."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ranks.launch import RANKS
from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.goodput.compression._compressor import Compressor, LayerSizes
from synergy_core.performance.planner.plan import Plan
from synergy_core.units import Floats
from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.training import noise
from synergy_exec.training.compression.exchange import MEASURED_EVERY
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.trainer import Trainer

JOBS = {"gpt": Gpt(), "cnn": Cnn(noise=2.0)}


def trained(rank: int, job: str, micro_batch: int, compressors: Sequence[str], seed: int, steps: int) -> dict[str, Any]:
    """Trains with each compressor; returns losses, noise statistics and the error that the executor measures.

    `none` also has the errors that every biased compressor would make in a rank's gradients, without error feedback.
    """
    return {each: _train(job, micro_batch, each, compressors, seed, steps) for each in compressors}


def _train(
    job_name: str, micro_batch: int, compressor: str, compressors: Sequence[str], seed: int, steps: int
) -> dict[str, Any]:
    job, plan = JOBS[job_name], Plan(data=RANKS, micro_batch=micro_batch, compressor=compressor)
    trainer, progress = Trainer(job, plan, seed=seed), Progress()
    biased = [] if compressor != "none" else [each for each in map(compressor_named, compressors) if not each.unbiased]
    alone: dict[str, list[float]] = {each.name: [] for each in biased}
    losses, totals = [], []
    probe = job.build_model()  # the trainer's own model has hooks that count its gradients
    for step in range(steps):
        number = seed * steps + step
        if biased and step % MEASURED_EVERY == 0:
            probe.load_state_dict(trainer.parts[0].state_dict())
            layers = gradients(job, probe, number, micro_batch)
            squares = [float((each**2).sum()) for each in layers]
            for each in biased:
                alone[each.name].append(float(np.average([lost_fraction(each, x) for x in layers], weights=squares)))
        result = trainer.step(number)
        losses.append(result.loss)
        noise.observe(progress, result.squares, RANKS * micro_batch)
        if result.exchanged is not None and result.exchanged.totals is not None:
            totals.append(result.exchanged.totals.tolist())
    return {
        "losses": losses,
        "error": statistics.mean(each[1] / each[0] for each in totals) if totals else 0.0,
        "sum_error": statistics.mean(each[3] / each[2] if each[2] else 0.0 for each in totals) if totals else 0.0,
        "gradient_errors": {name: statistics.mean(each) for name, each in alone.items()},
        "statistics": noise.statistics(progress),
    }


def gradients(job: TrainingJob, model: nn.Module, step: int, size: int) -> list[Floats]:
    """Computes the gradient of each layer on one batch, as a matrix or a vector."""
    inputs, targets = job.batch(step, size)
    found = torch.autograd.grad(job.loss(model(inputs), targets), list(model.parameters()))
    return [each.flatten(1 if each.ndim > 1 else 0).double().numpy() for each in found]


def lost_fraction(compressor: Compressor, matrix: Floats) -> float:
    """Computes the part of a matrix's squared norm that top-k or PowerSGD (at the best of its rank) leaves out."""
    if not compressor.compresses(LayerSizes.of_shapes([matrix.shape]))[0]:
        return 0.0
    scheme, _, value = compressor.name.partition("-")
    if scheme == "topk":
        squares = np.sort(matrix.ravel() ** 2)[::-1]
        kept = max(1, round(float(value) * matrix.size))
    else:
        squares, kept = np.linalg.svd(matrix, compute_uv=False) ** 2, int(value)
    return float(squares[kept:].sum() / squares.sum())


def gradients_of(job_name: str, steps: int, samples: int) -> tuple[list[Floats], list[Floats]]:
    """Returns the mean gradient by layer after this many steps on one process, and one batch's deviation from it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # As in conf/jobs/.
    job, batch = {
        "gpt": (Gpt(hidden=128, tokens=64, learning_rate=5e-4), 4),
        "cnn": (Cnn(channels=24, noise=6.0, learning_rate=0.02), 16),
    }[job_name]
    model = job.build_model()
    optimizer = job.build_optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = job.batch(step, batch)
        job.loss(model(inputs), targets).backward()
        optimizer.step()

    def layers(step: int, size: int) -> list[Floats]:
        return [each for each in gradients(job, model, step, size) if each.ndim > 1 and each.size >= 1_024]

    parts = [layers(10**6 + part, 256) for part in range(samples // 256)]
    mean = [np.mean(each, axis=0) for each in zip(*parts, strict=True)]
    return mean, [a - b for a, b in zip(layers(2 * 10**6, batch), mean, strict=True)]
