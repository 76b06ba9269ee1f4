"""Compressed training that is paused and goes on, under the same plan or another."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import groups
import pytest
import torch

from synergy_exec.messages import PlanMessage


def test_training_goes_on_under_another_plan(tmp_path: Path) -> None:
    compressors = ["topk-0.05", "powersgd-2", "q4"]
    plans = {
        "two": PlanMessage(data=2, micro_batch=8),
        "one": PlanMessage(micro_batch=16),
        "four": PlanMessage(data=4, micro_batch=4),
        "stages": PlanMessage(data=2, pipeline=2, micro_batch=4, accumulation=2),
    }

    def resuming(ranks: int) -> list[groups.Case]:
        return [
            (f"{name} {each}", "compression_cases:resumes", (replace(plan, compressor=each), tmp_path / each, 10))
            for name, plan in plans.items()
            if plan.world == ranks
            for each in compressors
        ]

    pausing = [
        (
            f"paused {each}",
            "compression_cases:pauses",
            (replace(plans["two"], compressor=each), tmp_path / each, 10, 10),
        )
        for each in compressors
    ]
    answers = groups.run({2: [*pausing, *resuming(2)], 1: resuming(1), 4: resuming(4)}, timeout_s=120)
    for compressor in compressors:
        paused = answers[f"paused {compressor}"]
        assert bool(paused["held"]) == (compressor != "q4")
        for name in plans:
            found = answers[f"{name} {compressor}"]
            assert found["differ"] == []
            # PowerSGD hangs on the sum of what is held back alone, which is what is saved; others go on nearby.
            within = 1e-4 if compressor == "powersgd-2" and name != "one" else 0.25
            assert found["losses"] == pytest.approx(paused["losses"][10:], abs=within), (name, compressor)
            assert all(torch.allclose(each, paused["held"][key], atol=1e-7) for key, each in found["held"].items())
            # Rank 0 has one of two stages.
            parts = {"one": 0, "stages": len(paused["held"]) // 2}.get(name, len(paused["held"]))
            assert len(found["held"]) == parts


def test_a_resumed_job_is_nearer_to_its_unbroken_curve_than_other_seeds_are(tmp_path: Path) -> None:
    """The mean loss of the 20 steps after a pause, on two replicas or on four, against the same job's without a pause:
    as near to it as three seeds' means are to each other.
    """
    steps, more, seeds = 40, 20, (3, 5, 7)
    for_two, for_four = PlanMessage(data=2, micro_batch=8), PlanMessage(data=4, micro_batch=4)
    compressors = ["topk-0.05", "powersgd-2", "q4"]

    def folder(compressor: str, seed: int) -> Path:
        return tmp_path / f"{compressor}-{seed}"

    def resuming(plan: PlanMessage) -> list[groups.Case]:
        return [
            (each, "compression_cases:resumes", (replace(plan, compressor=each), folder(each, seeds[0]), more))
            for each in compressors
        ]

    pausing = [
        (
            f"{each} {seed}",
            "compression_cases:pauses",
            (replace(for_two, compressor=each), folder(each, seed), steps, more, seed),
        )
        for each in compressors
        for seed in seeds
    ]
    unbroken = groups.run({2: pausing}, timeout_s=120)
    for plan in (for_two, for_four):
        resumed = groups.run({plan.world: resuming(plan)}, timeout_s=120)
        for each in compressors:
            means = [statistics.mean(unbroken[f"{each} {seed}"]["losses"][steps:]) for seed in seeds]
            assert resumed[each]["differ"] == []
            assert abs(statistics.mean(resumed[each]["losses"]) - means[0]) <= max(means) - min(means), (each, means)
