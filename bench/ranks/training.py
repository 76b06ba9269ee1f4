"""Losses and gradient errors of the shipped GPT and CNN on two replicas, under every compressor."""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, multiprocessing, nn

from synergy_core.goodput.compression import compressor_named
from synergy_core.goodput.compression._compressor import Compressor, LayerSizes
from synergy_core.planner.plan import Plan
from synergy_core.units import Floats
from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.training import noise
from synergy_exec.training.compression.exchange import MEASURED_EVERY
from synergy_exec.training.integrity import Progress
from synergy_exec.training.trainer import Trainer

RANKS = 2
JOBS = {"gpt": Gpt(), "cnn": Cnn(noise=2.0)}


def trained(job: str, micro_batch: int, compressors: Sequence[str], seed: int, steps: int) -> dict[str, Any]:
    """By compressor: losses, noise statistics, and the error as the executor measures it. `none` has the errors that
    every biased compressor would make in this rank's own gradients, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, job, micro_batch, tuple(compressors), seed, steps)
        multiprocessing.spawn(_rank, arguments, nprocs=RANKS)
        found: dict[str, Any] = json.loads((Path(folder) / "answers.json").read_text(encoding="utf-8"))
    return found


def _rank(number: int, folder: str, job: str, micro_batch: int, compressors: Sequence[str], *rest: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=RANKS)
    answers = {each: _train(job, micro_batch, each, compressors, *rest) for each in compressors}
    if number == 0:
        (Path(folder) / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    distributed.destroy_process_group()


def _train(
    job: str, micro_batch: int, compressor: str, compressors: Sequence[str], seed: int, steps: int
) -> dict[str, Any]:
    plan = Plan(data=RANKS, micro_batch=micro_batch, compressor=compressor)
    trainer, progress = Trainer(JOBS[job], plan, seed=seed), Progress()
    gradients = OwnGradients(trainer.parts[0], compressors) if compressor == "none" else None
    losses, shown = [], []
    for number in range(steps):
        result = trainer.step(seed * steps + number)
        losses.append(result.loss)
        noise.observe(progress, result.squares, RANKS * micro_batch)
        if result.exchanged is not None and result.exchanged.totals is not None:
            shown.append(tuple(result.exchanged.totals.tolist()))
        if gradients is not None and number % MEASURED_EVERY == 0:
            gradients.measure()
    return {
        "losses": losses,
        "error": statistics.mean(each[1] / each[0] for each in shown) if shown else 0.0,
        "sum_error": statistics.mean(each[3] / each[2] if each[2] else 0.0 for each in shown) if shown else 0.0,
        "gradient_errors": {} if gradients is None else gradients.errors(),
        "statistics": noise.statistics(progress),
    }


class OwnGradients:
    """What every biased compressor would leave out of this rank's own gradients, without error feedback."""

    def __init__(self, module: nn.Module, compressors: Sequence[str]) -> None:
        self._biased = [each for each in map(compressor_named, compressors) if not each.unbiased]
        self._own: dict[str, Tensor] = {}
        self._found: dict[str, list[float]] = {}
        for name, each in module.named_parameters():
            each.register_hook(functools.partial(self._own.__setitem__, name))

    def measure(self) -> None:
        """Of the last step."""
        layers = [each.flatten(1 if each.ndim > 1 else 0).double().numpy() for each in self._own.values()]
        squares = np.array([float((each**2).sum()) for each in layers])
        for compressor in self._biased:
            lost = [lost_fraction(compressor, each) for each in layers]
            self._found.setdefault(compressor.name, []).append(float(squares @ lost / squares.sum()))

    def errors(self) -> dict[str, float]:
        """Means of eps² over the measured steps, by compressor."""
        return {name: statistics.mean(each) for name, each in self._found.items()}


def lost_fraction(compressor: Compressor, matrix: Floats) -> float:
    """The part of a matrix's squared norm that top-k or PowerSGD (by the best of its rank) leaves out."""
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
    """By layer, after so many steps of training alone: the mean gradient, and that of one batch less the mean."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # As in conf/jobs/.
    job, batch = {
        "gpt": (Gpt(hidden=128, tokens=64, learning_rate=5e-4), 4),
        "cnn": (Cnn(channels=24, noise=6.0, learning_rate=0.02), 16),
    }[job_name]
    model = job.build_model()
    optimizer = job.build_optimizer(model.parameters())
    matrices = [each for each in model.parameters() if each.ndim > 1 and each.numel() >= 1_024]

    def gradient(step: int, size: int) -> list[Floats]:
        model.zero_grad()
        inputs, targets = job.batch(step, size)
        job.loss(model(inputs), targets).backward()
        return [each.grad.flatten(1).double().numpy().copy() for each in matrices]

    for step in range(steps):
        gradient(step, batch)
        optimizer.step()
    parts = [gradient(10**6 + part, 256) for part in range(samples // 256)]
    mean = [np.mean(each, axis=0) for each in zip(*parts, strict=True)]
    return mean, [a - b for a, b in zip(gradient(2 * 10**6, batch), mean, strict=True)]
