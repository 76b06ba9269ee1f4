"""Gradient compression: how fast layers are given their compressors, and how the gradients of shipped jobs are spread.

python bench/compression.py choice       CPU seconds of the layer-wise choice, beside the programme as published
python bench/compression.py spreads      the spreads of `Gradients`, measured (torch; minutes: 5)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import brentq

from synergy_core.goodput.compression import compressor_named
from synergy_core.goodput.compression._compressor import CONVOLUTIONAL, Compressor, Gradients, LayerSizes, Spread
from synergy_core.goodput.efficiency import mixed_error
from synergy_core.goodput.layerwise import BUCKETS, frontier, least_bytes
from synergy_core.units import Floats

LAYERS, CHOICES = 1_000, 8
STEPS = (20, 100, 300)
SAMPLES = 8_192
NAMES = ("q8", "q4", "q2", "topk-0.01", "topk-0.1", "powersgd-1", "powersgd-4", "powersgd-16")


def published(sizes: Floats, errors: Floats, budget: float) -> float:
    """Fewest bytes by the plain programme: every layer, every choice, every bucket, errors rounded up."""
    cells = np.ceil(errors / budget * BUCKETS).astype(np.int64)
    row = np.zeros(BUCKETS + 1)
    for at in range(sizes.shape[0]):
        after = np.full(BUCKETS + 1, np.inf)
        for size, cell in zip(sizes[at], cells[at].tolist(), strict=True):
            if cell <= BUCKETS:
                np.minimum(after[cell:], row[: BUCKETS + 1 - cell] + size, out=after[cell:])
        row = after
    return float(row[-1])


def instances() -> dict[str, tuple[Floats, Floats]]:
    """Bytes and squared errors, (1000, 8): ranks in layers that differ, in layers that are alike; without a pattern."""
    random = np.random.default_rng(0)
    rank = 2.0 ** np.arange(CHOICES)
    numbers = 10.0 ** random.uniform(4, 7, (LAYERS, 1))
    energy, decay = random.uniform(0.5, 2.0, (LAYERS, 1)), random.uniform(0.3, 1.0, (LAYERS, 1))
    return {
        "layers differ": (np.rint(numbers * rank / 256), numbers * energy * rank**-decay),
        "layers alike": (np.tile(4_000.0 * rank, (LAYERS, 1)), np.tile(rank**-0.5, (LAYERS, 1))),
        "no pattern": (random.integers(1, 10**6, (LAYERS, CHOICES)).astype(float), random.random((LAYERS, CHOICES))),
    }


def cpu_ms(work: Callable[..., object], *arguments: object) -> float:
    """The fastest of several."""
    taken = []
    for _ in range(5):
        start = time.process_time()
        work(*arguments)
        taken.append(time.process_time() - start)
    return 1e3 * min(taken)


def choice() -> None:
    """The table of CPU times, and how far answers are from the best there could be."""
    print(f"{LAYERS} layers, {CHOICES} choices. CPU ms, the fastest of 5; bytes beyond Lagrange's bound")
    heads = ("curve ms", "choice ms", "plain ms", "curve", "choice", "plain")
    print(f"{'case':14} {'budget':>6}" + "".join(f" {each:>9}" for each in heads))
    for name, case in instances().items():
        curve = frontier(*case)
        for part in (0.1, 0.5, 0.9):
            budget = float(curve.errors[0] + part * (curve.errors[-1] - curve.errors[0]))
            best, plain = least_bytes(*case, budget), published(*case, budget)
            sent = (float(curve.sent_bytes[curve.within(budget)]), best.sent_bytes, plain)
            taken = (cpu_ms(frontier, *case), cpu_ms(least_bytes, *case, budget), cpu_ms(published, *case, budget))
            figures = [f" {each:9.1f}" for each in taken] + [f" {each / best.bound - 1.0:9.3%}" for each in sent]
            print(f"{name:14} {part:6.1f}" + "".join(figures))


def measured(compressor: Compressor, matrix: Floats, generator: np.random.Generator) -> float:
    """What the compressor really does to a matrix, relative to its squared norm; PowerSGD by the best of its rank."""
    flat, total = matrix.ravel(), float((matrix**2).sum())
    layers = LayerSizes.of_shapes([matrix.shape])
    if not compressor.compresses(layers)[0]:
        return 0.0
    if compressor.name.startswith("q"):
        return _rounding(flat, int(compressor.name[1:]), generator) / total
    if compressor.name.startswith("topk"):
        kept = max(1, round(float(compressor.name.removeprefix("topk-")) * flat.size))
        return float(np.sort(flat**2)[: flat.size - kept].sum()) / total
    squares = np.linalg.svd(matrix, compute_uv=False) ** 2
    return float(squares[int(compressor.name.removeprefix("powersgd-")) :].sum()) / total


def _rounding(flat: Floats, bits: int, generator: np.random.Generator) -> float:
    """Squared error of stochastic rounding in buckets of 512."""
    lost = 0.0
    for at in range(0, flat.size, 512):
        bucket = flat[at : at + 512]
        step = float(np.ptp(bucket)) / (2**bits - 1)
        if step > 0.0:
            scaled = (bucket - bucket.min()) / step
            lost += float(((np.floor(scaled + generator.random(bucket.size)) - scaled) ** 2).sum()) * step**2
    return lost


def spread_of(matrix: Floats) -> tuple[float, float, float]:
    """Tail, decay and range of a layer: such that top-k at 1 and 10 %, and ranks 1, 4 and 16, lose what they do."""
    tail = _fitted(matrix, ("topk-0.01", "topk-0.1"), lambda x: Spread(x, 1.0, 1.0), (0.1, 4.0))
    decay = _fitted(matrix, ("powersgd-1", "powersgd-4", "powersgd-16"), lambda x: Spread(1.0, x, 1.0), (0.0, 6.0))
    whole = matrix.ravel()[: matrix.size // 512 * 512].reshape(-1, 512)
    return tail, decay, float((np.ptp(whole, axis=1) ** 2).mean() / (whole**2).mean())


def _fitted(
    matrix: Floats, names: tuple[str, ...], make: Callable[[float], Spread], ends: tuple[float, float]
) -> float:
    """The mean over compressors of the parameter with which the formula says the measured error; NaN without any."""
    layers, generator = LayerSizes.of_shapes([matrix.shape]), np.random.default_rng(0)
    found = []
    for each in map(compressor_named, names):
        if each.compresses(layers)[0]:
            truth = measured(each, matrix, generator)

            def miss(parameter: float, each: Compressor = each, truth: float = truth) -> float:
                return float(each.error(layers, make(parameter))[0]) - truth

            misses = [miss(end) for end in ends]
            crosses = misses[0] * misses[1] < 0.0
            found.append(brentq(miss, *ends) if crosses else ends[int(np.abs(misses).argmin())])
    return float(np.mean(found)) if found else np.nan


def gradients_of(job_name: str) -> list[tuple[int, int, list[Floats], list[Floats]]]:
    """While a shipped job trains: (steps done, batch, mean gradient, gradient of one batch less that mean) by layer."""
    import torch

    from synergy_exec.examples.cnn import Cnn
    from synergy_exec.examples.gpt import Gpt

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

    found = []
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            parts = [gradient(10**6 + part, 256) for part in range(SAMPLES // 256)]
            mean = [np.mean(each, axis=0) for each in zip(*parts, strict=True)]
            one = gradient(2 * 10**6, batch)
            found.append((step, batch, mean, [a - b for a, b in zip(one, mean, strict=True)]))
        gradient(step, batch)
        optimizer.step()
    return found


def spreads() -> None:
    """Medians over layers, by job and steps done; then errors of whole gradients, as measured and by the formulas."""
    generator, shipped = np.random.default_rng(0), {"gpt": Gradients(), "cnn": CONVOLUTIONAL}
    found = {job: gradients_of(job) for job in shipped}
    print(f"{'job':5} {'steps':>5} {'part':7} {'tail':>6} {'decay':>6} {'range':>6}   median over layers")
    for job, moments in found.items():
        for step, _, signal, noise in moments:
            for part, layers in (("signal", signal), ("noise", noise)):
                middle = np.nanmedian([spread_of(each) for each in layers], axis=0)
                print(f"{job:5} {step:5} {part:7}" + "".join(f" {value:6.2f}" for value in middle))
    print("\nerror of one batch's gradient: measured, mixed from those of signal and noise, by what ships")
    for job, moments in found.items():
        for step, batch, signal, noise in moments:
            shapes = LayerSizes.of_shapes([each.shape for each in signal])
            scale = batch * _sums(noise).sum() / _sums(signal).sum()
            print(f"{job} after {step} steps, batch {batch}, noise scale {scale:.0f}")
            local = [a + b for a, b in zip(signal, noise, strict=True)]
            for each in map(compressor_named, NAMES):
                parts = [_whole(each, which, generator) for which in (signal, noise)]
                said = []
                for spread, which in ((shipped[job].signal, signal), (shipped[job].noise, noise)):
                    own = replace(spread, energy=_sums(which) / shapes.numbers)
                    said.append(float(own.shares(shapes) @ each.error(shapes, own)))
                mixed = [float(mixed_error(*pair, scale, batch)) for pair in (parts, said)]
                print(f"    {each.name:12} {_whole(each, local, generator):9.5f} {mixed[0]:9.5f} {mixed[1]:9.5f}")


def _sums(layers: list[Floats]) -> Floats:
    """Squared norm of each layer."""
    return np.array([float((each**2).sum()) for each in layers])


def _whole(compressor: Compressor, layers: list[Floats], generator: np.random.Generator) -> float:
    """Measured error of all layers together."""
    squares = _sums(layers)
    return float(squares @ [measured(compressor, each, generator) for each in layers] / squares.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("choice", "spreads"))
    {"choice": choice, "spreads": spreads}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
