"""Says whether a model fits on given GPUs, what takes the memory, and what would make it fit.

    python -m synergy_core fits config.json gpu=rtx3090 gpus=8 software=deepspeed zero=3 seq_len=1024
    python -m synergy_core fits llama-3-70b gpu=h100 gpus=16

The first word is the model; keys are those of the command `plan`, for one GPU type and one number of GPUs. Degrees and
options that are not given are chosen: the fastest plan that fits, or else the one that needs least. The verdict is
`fits` if the upper end of the memory's 90 % band is free on the GPU, `does not fit` if the lower end is not, else `may
not fit`. If it does not surely fit, changes of single settings are tried, then of two at once, and the three with the
most samples per GPU and second are printed. The exit status is 0 if it fits, else 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from synergy_core.commands._settings import table
from synergy_core.commands.plan import GIB, Asked, asked, host_memory, in_our_names, spread, surely_fitting
from synergy_core.commands.plan_report import seconds
from synergy_core.errors import InputError
from synergy_core.performance.planner.bands import Verdict, verdict
from synergy_core.performance.planner.enumerate import leanest
from synergy_core.performance.planner.machine import GRADIENT_BYTES
from synergy_core.performance.planner.memory import Memory, memory, visible_bytes
from synergy_core.performance.planner.plan import Plan, Plans, Recompute, plans_of
from synergy_core.performance.planner.step_time import step_time

SUMMARY = "say whether a model fits on given GPUs, what takes the memory, and what would make it fit"
MAX_CHANGES = 3
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits and loss",
    "buffers": "buffers",
    "outside": "CUDA and NCCL",
}
"""Fields of `Memory`, and the names under which they are printed."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan and whether it fits. needs: of its fullest GPU."""

    plan: Plan
    verdict: Verdict
    needs: Memory
    step_time_s: float


def fit_of(found: Asked) -> Fit:
    """The fastest plan that surely fits, or else the one that needs least memory.

    Raises InputError if no plan has the requested degrees.
    """
    (answer,) = found.answers
    machine, band, software = answer.table.machine, answer.memory_band, answer.software
    plans, row = surely_fitting(found, answer)

    def fit(columns: Plans, row: int) -> Fit:
        columns = columns.take(np.array([row]))
        work = found.model.family.work(found.model.architecture, columns, software)
        needs = memory(work, columns, software)
        step_s = step_time(work, columns, machine, software, found.constants(machine, software)).total_s[0]
        does = verdict(float(needs.needed[0]), band, machine) if needs.fits_host(machine)[0] else Verdict.NOT
        return Fit(columns.plan(0), does, needs, float(step_s))

    if not len(plans):
        (reason,) = plans.infeasible
        if reason.leanest is None:
            raise InputError(f"no plan on {reason.gpus} GPUs: {reason.message}.")
        return fit(plans_of([reason.leanest]), 0)
    if row is not None:
        return fit(plans.plans, row)
    lean = leanest(plans.plans, found.query.fixed, software)
    work = found.model.family.work(found.model.architecture, lean, software)
    return fit(lean, int(memory(work, lean, software).needed.argmin()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    words = "the model, gpu=, gpus= and other keys of the command plan"
    parser.add_argument("settings", nargs="+", metavar="MODEL | KEY=VALUE", help=words)


def run(chosen: argparse.Namespace) -> int:
    """Prints the verdict, the parts of the memory, and what would make it fit. Returns 0 if it fits, else 1."""
    settings = in_our_names([word if "=" in word else f"model={word}" for word in chosen.settings])
    if of_plan := {word.split("=")[0] for word in settings} & {"tokens", "price", "top"}:
        raise InputError(f"{', '.join(sorted(of_plan))}: fits prints no cost and one plan; type plan for these.")
    found = asked(settings)
    if len(found.query.gpu) * len(found.query.gpus) != 1:
        raise InputError("fits answers for one GPU type and one number of GPUs; type plan for several.")
    (answer,) = found.answers
    machine, fit = answer.table.machine, fit_of(found)
    needed, limit = float(fit.needs.needed[0]) / GIB, visible_bytes(machine) / GIB
    band = spread(*answer.memory_band.of(needed), "{:.1f}".format)
    for note in found.model.notes:
        print(f"  {note}")
    time = "" if fit.verdict is Verdict.NOT else f", {seconds(fit.step_time_s)} a step"
    count = f"{found.query.gpus[0]} × {machine.gpu.title}"
    print(
        f"{fit.verdict}: {found.query.model} on {count} needs {needed:.1f} GiB (90%: {band}) of {limit:.1f} on the "
        f"fullest GPU\n  {fit.plan.describe()}, batch {found.batch:,}, {found.stated}{time}"
    )
    rows = [
        [name, f"{size:.1f} GiB", f"{size / needed:.0%}"]
        for part, name in PARTS.items()
        if (size := float(getattr(fit.needs, part)[0]) / GIB) > 0.005 * needed
    ]
    print(table(("", "memory", ""), rows))
    if fit.needs.host[0]:
        print(f"  offloaded: {host_memory(fit.needs, machine)}")
    for phrase in answer.memory_band.extrapolated:
        print(f"  extrapolated, so the interval is wider: {phrase}")
    for note in found.notes:
        print(f"  {note}")
    if fit.verdict is Verdict.FITS:
        return 0
    more = answer.memory_band.of(needed)[1] - limit
    lacking = f"{more:.1f} GiB less would be safe" if more > 0 else f"it needs {host_memory(fit.needs, machine)}"
    print(f"  {lacking}. Changes that make it surely fit, each tried:")
    ways = _ways(settings, found, fit)
    for way in ways[:MAX_CHANGES]:
        print(f"  {way}")
    if not ways:
        print("  none of those tried, nor two of them at once; try more GPUs or a smaller model")
    return 1


def _ways(settings: Sequence[str], found: Asked, fit: Fit) -> list[str]:
    """Sentences on changes under which the model surely fits, those with most samples per GPU and second first.

    Of each setting the smallest change that suffices; if none does alone, pairs of settings.
    """
    given = {**dict(word.split("=", 1) for word in settings), "batch": found.batch}
    changes = _changes(found, fit)

    def tried(changed: dict[str, Any], words: str) -> tuple[bool, float, str] | None:
        try:
            other = asked(
                [f"{key}={value}" for key, value in {**given, **changed}.items()], replacing={"batch", *changed}
            )
            there = fit_of(other)
        except InputError:
            return None  # no plan has these degrees
        if there.verdict is not Verdict.FITS:
            return None
        size, time = float(there.needs.needed[0]) / GIB, seconds(there.step_time_s)
        host = f", {host_memory(there.needs, other.answers[0].table.machine)}" if there.needs.host[0] else ""
        sentence = f"{words}: {size:.1f} GiB{host}, {time} a step, {there.plan.describe()}"
        rate = other.batch / there.step_time_s / other.query.gpus[0]
        return "lora" in changed, -rate, sentence

    singles = (next(filter(None, (tried(change, words) for words, change in each.items())), None) for each in changes)
    ways = [way for way in singles if way]
    if not ways:
        largest = [list(each.items())[-1] for each in changes]
        pairs = (tried(one | two, f"{word} {with_it}") for (word, one), (with_it, two) in combinations(largest, 2))
        ways = [way for way in pairs if way]
    return [sentence for *_, sentence in sorted(ways)]


def _changes(found: Asked, fit: Fit) -> Iterator[dict[str, dict[str, Any]]]:
    """For each setting that may help, what to type, the smallest change first, and the settings that it stands for."""
    (answer,) = found.answers
    software, query, plan, gpus = answer.software, found.query, fit.plan, found.query.gpus[0]

    def typed(key: str, *values: object) -> dict[str, dict[str, Any]]:
        return {f"{key}={value}": {key: value} for value in values}

    smaller = [plan.micro_batch >> power for power in range(1, plan.micro_batch.bit_length())]
    sharded = [
        stage for stage in software.supports.zeros if stage > plan.zero and "zero" in query.fixed and plan.data > 1
    ]
    recomputed = ["full"] * ("full" in software.supports.recomputes and plan.recompute != Recompute.FULL)
    less_precise = ["bf16"] * (
        "bf16" in software.supports.gradients and software.gradient_bytes > GRADIENT_BYTES["bf16"]
    )
    tokens = found.model.architecture.limits().seq_len
    replicas = {"data": 2 * plan.data} if "data" in query.fixed else {}
    changes = [
        typed("recompute", *(recomputed if "recompute" in query.fixed else [])),
        typed("micro_batch", *(smaller if "micro_batch" in query.fixed else [])),
        typed("zero", *sharded),
        typed("gradients", *less_precise),
        typed("seq_len", *([tokens // 2] if tokens > 1 else [])),
        {f"gpus={2 * gpus} batch={2 * found.batch}": {"gpus": 2 * gpus, "batch": 2 * found.batch, **replicas}},
    ]
    third = "offload=parameters" in software.supports.tunings and (plan.data == 1 or query.fixed.get("zero", 3) == 3)
    offloads = ["optimizer", *["optimizer,parameters"] * third]
    tunings = {"optimizer": ["adamw8bit"], "loss": ["chunked"], "offload": offloads}
    changes += [
        typed(key, *values)
        for key, values in tunings.items()
        if key in software.supports.tunings and getattr(query, key) is None
    ]
    if "lora" in software.supports.tunings and query.lora is None:
        changes.append({"lora=16 quantize=4 (QLoRA, which trains adapters alone)": {"lora": 16, "quantize": 4}})
    return filter(None, changes)
