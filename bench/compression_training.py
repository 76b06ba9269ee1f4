"""Trains the shipped GPT and CNN on two gloo ranks under every compressor: losses, bytes, and what a step is worth.

    python bench/compression_training.py [--steps 150] [--seeds 3] [--json FILE]     # minutes: 20

The first table. loss: mean of the last tenth of the steps, over the seeds, and how far seeds are apart (standard
deviation). bytes: of gradients that leave a rank in a step, counted at the collectives; predicted: what the layers'
formulas add up to. codec: milliseconds of encoding and decoding a step, median.

The second. rate: progress of a step relative to an uncompressed one of the same seed: the uncompressed run's steps
to a loss ÷ this run's, the median over losses that both reach, of curves smoothed over a tenth of the steps. error:
of unbiased compressors w as measured; of biased ones eps², twice: of a replica's gradients alone, in the uncompressed
run, which is what the core's formulas speak of, and of what the compressor was given in its own run, gradients with
what was held back of earlier ones, which is what the executor measures. All are means over measured steps. formula: of
unbiased compressors equations (2) and (3) of goodput/compressed.py with the measured w, w₂ and noise scale; of biased
ones 1 − eps² of gradients alone. λ: (1 − rate)/eps², with either.

The third: λ over all cases with eps² ≥ 0.1; held: of the other job's cases, the part whose λ is no more than this one's
0.9 quantile.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compression import measured
from torch import Tensor, distributed, multiprocessing, nn

from synergy_core.goodput.compression import compressor_named
from synergy_core.goodput.compression._compressor import LayerSizes
from synergy_core.goodput.efficiency import Distortion, compressed_gain
from synergy_core.planner.plan import Plan
from synergy_core.units import Floats
from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.training import noise
from synergy_exec.training.compression.exchange import MEASURED_EVERY, layers_of
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.trainer import Trainer

RANKS = 2
JOBS: dict[str, tuple[TrainingJob, int]] = {
    "gpt": (Gpt(), 4),
    "gpt, 4 times": (Gpt(), 16),
    "cnn": (Cnn(noise=2.0), 16),
    "cnn, twice": (Cnn(noise=2.0), 32),
}
"""Job and micro-batch."""
COMPRESSORS = [
    "none", "bf16", "fp16", "q8", "q4", "q2",
    "topk-0.3", "topk-0.1", "topk-0.01", "powersgd-8", "powersgd-4", "powersgd-1",
]  # fmt: skip
LEAST_ERROR = 0.1
"""Of cases of which λ is asked: where less is lost, the noise of curves is all there is to see."""


def train(job: str, compressor: str, seed: int, steps: int) -> dict[str, Any]:
    kind, micro_batch = JOBS[job]
    trainer = Trainer(kind, Plan(data=RANKS, micro_batch=micro_batch, compressor=compressor), seed=seed)
    began_s, progress = time.process_time(), Progress()
    gradients = OwnGradients(trainer.parts[0]) if compressor == "none" else None
    results = []
    for number in range(steps):
        results.append(trainer.step(seed * steps + number))
        if gradients is not None and number % MEASURED_EVERY == 0:
            gradients.measure()
    for each in results:
        noise.observe(progress, each.squares, RANKS * micro_batch)
    assert trainer.exchange is not None
    sizes = LayerSizes.of_shapes([(rows, columns) for _, rows, columns in layers_of(trainer.parts)])
    exchanged = [each.exchanged for each in results if each.exchanged is not None]
    shown = [tuple(each.totals.tolist()) for each in exchanged if each.totals is not None]
    return {
        "losses": [each.loss for each in results],
        "sent_bytes": exchanged[-1].sent_bytes,
        "predicted_bytes": float(compressor_named(compressor).sent_bytes(sizes, RANKS).sum()),
        "codec_s": statistics.median(each.codec_s for each in exchanged),
        "error": statistics.mean(each[1] / each[0] for each in shown) if shown else 0.0,
        "sum_error": statistics.mean(each[3] / each[2] if each[2] else 0.0 for each in shown) if shown else 0.0,
        "gradient_errors": {} if gradients is None else gradients.errors(),
        "statistics": noise.statistics(progress),
        "cpu_s": time.process_time() - began_s,
    }


class OwnGradients:
    """What every biased compressor would leave out of this rank's own gradients, of which nothing was held back."""

    def __init__(self, module: nn.Module) -> None:
        self._own: dict[str, Tensor] = {}
        self._found: dict[str, list[float]] = {}
        for name, each in module.named_parameters():
            each.register_hook(functools.partial(self._own.__setitem__, name))

    def measure(self) -> None:
        """Of the last step."""
        layers = [each.flatten(1 if each.ndim > 1 else 0).double().numpy() for each in self._own.values()]
        squares = np.array([float((each**2).sum()) for each in layers])
        generator = np.random.default_rng(0)
        for compressor in map(compressor_named, COMPRESSORS):
            if not compressor.unbiased:
                lost = [measured(compressor, each, generator) for each in layers]
                self._found.setdefault(compressor.name, []).append(float(squares @ lost / squares.sum()))

    def errors(self) -> dict[str, float]:
        """Means of eps² over the measured steps, by compressor."""
        return {name: statistics.mean(each) for name, each in self._found.items()}


def rank(number: int, store: str, cases: list[tuple[str, str, int, int]], out: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS)
    answers = []
    for case in cases:
        answers.append(train(*case))
        if number == 0:
            print(*case[:3], f"{statistics.mean(answers[-1]['losses'][-len(answers[-1]['losses']) // 10 :]):.4f}")
            sys.stdout.flush()
    if number == 0:
        Path(out).write_text(json.dumps(answers))
    distributed.destroy_process_group()


# What a step is worth


def times_to(losses: Sequence[float]) -> tuple[Floats, Floats]:
    """(steps, losses): when each loss was first reached, falling; of means over a tenth of the steps."""
    width = max(1, len(losses) // 10)
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    return np.arange(len(smooth)) + width / 2, np.minimum.accumulate(smooth)


def rate(plain: Sequence[float], other: Sequence[float]) -> float:
    """Steps of the first to a loss ÷ steps of the other; median over losses from a quarter of the way to the end."""
    curves = [times_to(each) for each in (plain, other)]
    high = max(float(falling[len(falling) // 4]) for _, falling in curves)
    low = max(float(falling[-1]) for _, falling in curves)
    levels = np.linspace(high, low, 20)
    first, second = (np.interp(-levels, -falling, steps) for steps, falling in curves)
    return float(np.median(first / second))


def formula(answer: dict[str, Any], plain: dict[str, Any], batch: int) -> float:
    """What the core says a step under an unbiased compressor is worth, relative to an uncompressed one."""
    distorted = Distortion(answer["error"], answer["sum_error"])
    return float(compressed_gain(1.0, *plain["statistics"], RANKS, distorted))


def show_losses(cases: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """The first table."""
    print(f"\n| job | compressor | loss | ± | bytes | predicted | codec, ms |\n|{'---|' * 7}")
    for (job, compressor), answers in cases.items():
        last = max(1, len(answers[0]["losses"]) // 10)
        losses = [statistics.mean(each["losses"][-last:]) for each in answers]
        codec_s = statistics.median(each["codec_s"] for each in answers)
        print(
            f"| {job} | {compressor} | {statistics.mean(losses):.4f} | {apart(losses):.4f} "
            f"| {answers[0]['sent_bytes']:,.0f} | {answers[0]['predicted_bytes']:,.0f} | {1000 * codec_s:.2f} |"
        )


def show_worth(cases: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """The second table and the third."""
    found: dict[str, dict[str, list[float]]] = {"alone": {}, "given": {}}
    print(f"\n| job | compressor | error, alone | given | rate | ± | formula | λ, alone | given |\n|{'---|' * 9}")
    for (job, name), answers in cases.items():
        if name == "none":
            continue
        plain, unbiased = cases[job, "none"], compressor_named(name).unbiased
        errors = {"given": [each["error"] for each in answers]}
        errors["alone"] = errors["given"] if unbiased else [each["gradient_errors"][name] for each in plain]
        rates = [rate(first["losses"], second["losses"]) for first, second in zip(plain, answers, strict=True)]
        said = [1.0 - each for each in errors["alone"]]
        if unbiased:
            batch = RANKS * JOBS[job][1]
            said = [formula(second, first, batch) for first, second in zip(plain, answers, strict=True)]
        line = f"| {job} | {name} | {statistics.mean(errors['alone']):.4f} | {statistics.mean(errors['given']):.4f} "
        line += f"| {statistics.mean(rates):.3f} | {apart(rates):.3f} | {statistics.mean(said):.3f} |"
        if unbiased:
            print(line + " | |")
            continue
        weights = {which: [(1.0 - r) / e for r, e in zip(rates, each, strict=True)] for which, each in errors.items()}
        print(line + f" {statistics.mean(weights['alone']):.2f} | {statistics.mean(weights['given']):.2f} |")
        if statistics.mean(errors["given"]) >= LEAST_ERROR:
            for which, each in weights.items():
                found[which].setdefault(job.partition(",")[0], []).extend(each)
    print(f"\n| eps² of | job | cases | λ, median | 0.9 quantile | largest | held |\n|{'---|' * 7}")
    for which, by_job in found.items():
        for job, each in by_job.items():
            middle, upper, most = np.quantile(each, (0.5, 0.9, 1.0))
            others = [value for other, some in by_job.items() if other != job for value in some]
            held = f"{np.mean(np.array(others) <= upper):.0%}" if others else ""
            print(f"| {which} | {job} | {len(each)} | {middle:.2f} | {upper:.2f} | {most:.2f} | {held} |")
        every = [value for some in by_job.values() for value in some]
        middle, upper, most = np.quantile(every, (0.5, 0.9, 1.0))
        print(f"| {which} | both | {len(every)} | {middle:.2f} | {upper:.2f} | {most:.2f} | |")


def apart(values: Sequence[float]) -> float:
    """Standard deviation; 0 of one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = [(job, compressor) for job in options.jobs for compressor in COMPRESSORS]
    asked = [(*name, seed, options.steps) for name in names for seed in range(options.seeds)]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/answers.json"
        multiprocessing.spawn(rank, (f"{folder}/store", asked, out), nprocs=RANKS)
        answers = json.loads(Path(out).read_text())
    found = [{"job": c[0], "compressor": c[1], "seed": c[2], **a} for c, a in zip(asked, answers, strict=True)]
    if options.json:
        options.json.write_text(json.dumps(found))
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in found:
        cases.setdefault((each["job"], each["compressor"]), []).append(each)
    show_losses(cases)
    show_worth(cases)
    minutes = RANKS * sum(each["cpu_s"] for each in found) / 60
    print(f"\n{minutes:.0f} minutes of CPU")


if __name__ == "__main__":
    main()
