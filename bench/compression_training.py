"""Trains the shipped GPT and CNN on two gloo ranks under every compressor, and prints losses, bytes and seconds.

    python bench/compression_training.py [--steps 200] [--seeds 3] [--json FILE]

loss: mean of the last tenth of the steps, over the seeds, and how far seeds are apart (standard deviation). bytes: of
gradients that leave a rank in a step, counted at the collectives; predicted: what the layers' formulas add up to.
codec: milliseconds of encoding and decoding a step, median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.messages import PlanMessage
from synergy_exec.training.trainer import Trainer

JOBS = {"gpt": (Gpt, 8), "cnn": (Cnn, 16)}
"""Class and micro-batch."""
COMPRESSORS = ["none", "bf16", "fp16", "q8", "q4", "q2", "topk-0.1", "topk-0.01", "powersgd-4", "powersgd-1"]
RANKS = 2


def train(job: str, compressor: str, seed: int, steps: int) -> dict[str, Any]:
    kind, micro_batch = JOBS[job]
    trainer = Trainer(kind(), PlanMessage(data=RANKS, micro_batch=micro_batch, compressor=compressor), seed=seed)
    results = [trainer.step(seed * steps + number) for number in range(steps)]
    assert trainer.exchange is not None
    exchanged = [each.exchanged for each in results if each.exchanged is not None]
    return {
        "losses": [each.loss for each in results],
        "sent_bytes": exchanged[-1].sent_bytes,
        "predicted_bytes": trainer.exchange.predicted_bytes,
        "codec_s": statistics.median(each.codec_s for each in exchanged),
    }


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = [(job, compressor) for job in JOBS for compressor in COMPRESSORS]
    cases = [(*name, seed, options.steps) for name in names for seed in range(options.seeds)]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/answers.json"
        multiprocessing.spawn(rank, (f"{folder}/store", cases, out), nprocs=RANKS)
        answers = json.loads(Path(out).read_text())
    last = max(1, options.steps // 10)
    print(f"\n| job | compressor | loss | ± | bytes | predicted | codec ms |\n|{'---|' * 7}")
    for at, (job, compressor) in enumerate(names):
        own = answers[at * options.seeds : (at + 1) * options.seeds]
        losses = [statistics.mean(each["losses"][-last:]) for each in own]
        apart = statistics.stdev(losses) if len(losses) > 1 else 0.0
        codec_s = statistics.median(each["codec_s"] for each in own)
        print(
            f"| {job} | {compressor} | {statistics.mean(losses):.4f} | {apart:.4f} | {own[0]['sent_bytes']:,.0f} "
            f"| {own[0]['predicted_bytes']:,.0f} | {1000 * codec_s:.2f} |"
        )
    if options.json:
        found = [{"job": c[0], "compressor": c[1], "seed": c[2], **a} for c, a in zip(cases, answers, strict=True)]
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
