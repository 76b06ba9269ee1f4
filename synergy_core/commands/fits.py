"""Says whether a model fits on given GPUs, what takes the memory, and what would make it fit.

    python -m synergy_core fits config.json gpu=rtx3090 gpus=8 software=deepspeed zero=3 seq_len=1024
    python -m synergy_core fits llama-3-70b gpu=h100 gpus=16

The first word is the model; keys are those of the command `plan`, for one GPU type and one number of GPUs. Degrees and
options that are not given are chosen: the fastest plan that fits, or else the one that needs least. The verdict is
`fits` if the upper end of the memory's 90 % band is free on the GPU, `does not fit` if the lower end is not, else `may
not fit`. If it does not surely fit, single changes are tried, and the three with the most samples per GPU and second
are printed. The exit status is 0 if it fits, else 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from synergy_core.commands._settings import table
from synergy_core.commands.plan import KEPT_PLANS, OFFLOADED, Asked, asked, host_memory, in_our_names, spread
from synergy_core.errors import InputError
from synergy_core.planner.bands import Verdict, verdict
from synergy_core.planner.enumerate import leanest
from synergy_core.planner.explain import seconds
from synergy_core.planner.machine import GRADIENT_BYTES
from synergy_core.planner.memory import Memory, memory, visible_bytes
from synergy_core.planner.plan import Plan, Plans, Recompute, plans_of
from synergy_core.planner.step_time import step_time

SUMMARY = "say whether a model fits on given GPUs, what takes the memory, and what would make it fit"
GIB = 2.0**30
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


def fit_of(found: Asked, **changed: Any) -> Fit:
    """The fastest plan that surely fits, or else the one that needs least memory.

    changed: fields of the software that differ. Raises InputError if no plan has the requested degrees.
    """
    (answer,) = found.answers
    machine, band = answer.table.machine, answer.bands.memory
    software = replace(answer.software, **changed)
    plans = found.find(machine, found.query.gpus, KEPT_PLANS, **changed)

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
    sure = [row for row, needed in enumerate(plans.memory_bytes) if verdict(needed, band, machine) is Verdict.FITS]
    if sure:
        return fit(plans.plans, sure[0])
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
    found = asked(settings)
    if len(found.query.gpu) * len(found.query.gpus) != 1:
        raise InputError("fits answers for one GPU type and one number of GPUs; type plan for several.")
    (answer,) = found.answers
    machine, fit = answer.table.machine, fit_of(found)
    needed, limit = float(fit.needs.needed[0]) / GIB, visible_bytes(machine) / GIB
    band = spread(*answer.bands.memory.of(needed), "{:.1f}".format)
    for note in found.model.notes:
        print(f"  {note}")
    time = "" if fit.verdict is Verdict.NOT else f", {seconds(fit.step_time_s)} a step"
    count = f"{found.query.gpus[0]} × {machine.gpu.title}"
    print(
        f"{fit.verdict}: {found.query.model} on {count} needs {needed:.1f} GiB (90%: {band}) of {limit:.1f} on the "
        f"fullest GPU\n  {fit.plan.describe()}, {found.stated}{time}"
    )
    rows = [
        [name, f"{size:.1f} GiB", f"{size / needed:.0%}"]
        for part, name in PARTS.items()
        if (size := float(getattr(fit.needs, part)[0]) / GIB) > 0.005 * needed
    ]
    print(table(("", "memory", ""), rows))
    for phrase in answer.bands.memory.extrapolated:
        print(f"  extrapolated, so the interval is wider: {phrase}")
    for note in found.notes:
        print(f"  {note}")
    if fit.verdict is Verdict.FITS:
        return 0
    print(f"  {(answer.bands.memory.of(needed)[1] - limit):.1f} GiB less would be safe; each of these was tried:")
    ways = sorted(_changes(settings, found, fit), key=lambda each: -each[0])[:MAX_CHANGES]
    if len(ways) < MAX_CHANGES and found.query.lora is None:
        words = [*settings, f"batch={found.batch}", "lora=16", "quantize=4"]
        changed = asked(words, replacing=("batch", "lora", "quantize"))
        ways += _sentence("lora=16 quantize=4 (QLoRA, which trains adapters alone)", changed, fit_of(changed))
    for _, sentence in ways:
        print(f"  {sentence}")
    if not ways:
        print("  no single change makes it fit; try more GPUs or a smaller model")
    return 1


def _changes(settings: Sequence[str], found: Asked, fit: Fit) -> Iterator[tuple[float, str]]:
    """Yields (samples per GPU and second, sentence) for each single change under which the model surely fits."""
    (answer,) = found.answers
    software, query, plan, gpus = answer.software, found.query, fit.plan, found.query.gpus[0]
    given = dict(word.split("=", 1) for word in settings)
    tried: dict[str, dict[str, Any]] = {}
    if "full" in software.recomputes and plan.recompute != Recompute.FULL and "recompute" in query.fixed:
        tried["recompute=full"] = {"recompute": int(Recompute.FULL)}
    if plan.micro_batch > 1 and "micro_batch" in query.fixed:
        tried["micro_batch=1"] = {"micro_batch": 1}
    for stage in [each for each in software.zeros if each > plan.zero and "zero" in query.fixed and plan.data > 1]:
        tried[f"zero={stage}"] = {"zero": stage}
    if "bf16" in software.gradients and software.gradient_bytes > GRADIENT_BYTES["bf16"]:
        tried["gradients=bf16"] = {"gradients": "bf16"}
    tried |= {
        f"{key}={value}": {key: value}
        for key, value in (("optimizer", "adamw8bit"), ("loss", "chunked"))
        if getattr(query, key) is None
    }
    if (tokens := found.model.architecture.limits().seq_len) > 1:
        tried[f"seq_len={tokens // 2}"] = {"seq_len": tokens // 2}
    more = {"gpus": 2 * gpus, "batch": 2 * found.batch}
    more |= {"data": 2 * plan.data} if "data" in given else {}
    tried[f"gpus={2 * gpus}, with batch={2 * found.batch}"] = more
    for words, changed in tried.items():
        try:
            words_of = {**given, "batch": found.batch, **changed}
            other = asked([f"{key}={value}" for key, value in words_of.items()], replacing={"batch", *changed})
            yield from _sentence(words, other, fit_of(other))
        except InputError:
            continue  # no plan has these degrees
    if query.offload is None:
        yield from _sentence(OFFLOADED, found, fit_of(found, offload=True))


def _sentence(words: str, found: Asked, fit: Fit) -> Iterator[tuple[float, str]]:
    """Yields (samples per GPU and second, sentence) if the plan surely fits. words: what was changed."""
    if fit.verdict is Verdict.FITS:
        size, time = float(fit.needs.needed[0]) / GIB, seconds(fit.step_time_s)
        host = f", {host_memory(fit.needs, found.answers[0].table.machine)}" if fit.needs.host[0] else ""
        rate = found.batch / fit.step_time_s / found.query.gpus[0]
        yield rate, f"{words}: {size:.1f} GiB{host}, {time} a step, {fit.plan.describe()}"
