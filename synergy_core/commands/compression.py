"""Whether compressing gradients pays on given GPUs: the best batch, plan and compressor together, by network.

    python -m synergy_core compression model=gpt-1.3b gpu=a100 gpus=16
    python -m synergy_core compression model=gpt-1.3b gpu=a100 gpus=16 batch=64 noise_tokens=1e5 --picture map.svg

model, gpu, gpus, software, gpus_per_node, seq_len: as for `plan`; one type and one number of GPUs. network_gbps: what
a node's
network cards carry, by data sheet, all GPUs of a node together; `nvlink`: as much as they have within the node. batch:
sequences (or images) a step at which the learning rate was tuned; by default as for `plan`. Batches are tried from
there to max_batch (by default 16 times as large), doubling. noise_tokens: the gradient's noise scale in tokens; 10^6
by default, as of a language model at a loss of 3; an image counts as 128. compressor: of its scheme layers choose by
themselves, beside every compressor for all layers.

goodput: sequences per second, each counted by what one is worth at the batch given. A compressor is taken where it
promises 5 % more than the best plan and batch without one, as tasks do (docs/compression.md); gain: by how much.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.commands._asked import default_batch, given_settings, model_asked, whole
from synergy_core.errors import InputError

if TYPE_CHECKING:
    from synergy_core.commands._sweep import Best, Sweep
    from synergy_core.planner.machine import Machine

SUMMARY = "whether compressing gradients pays, by network, with the best batch and plan"
GBPS = "1,10,25,100,400,nvlink"
GBPS_BYTES = 1e9 / 8.0
DOUBLINGS = 4
NOISE_TOKENS = 1e6
NEEDED = {"model": "gpt-1.3b", "gpu": "a100", "gpus": "16"}
KNOWN = (
    *NEEDED,
    "software",
    "gpus_per_node",
    "network_gbps",
    "batch",
    "max_batch",
    "noise_tokens",
    "compressor",
    "seq_len",
)


@dataclass(frozen=True, slots=True)
class CompressionQuestion:
    """What was asked. network_gbps: inf for as much as within a node. batch, max_batch: None where nothing is said."""

    model: str
    gpu: str
    gpus: int
    software: str
    gpus_per_node: int | None
    network_gbps: tuple[float, ...]
    batch: int | None
    max_batch: int | None
    noise_tokens: float
    compressor: str
    seq_len: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("settings", nargs="+", metavar="KEY=VALUE", help="model=, gpu=, gpus=, and what is above")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the best choice of every network as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw it by network and noise scale")


def run(chosen: argparse.Namespace) -> int:
    """Prints choices and crossovers; writes the JSON and the picture. 1 if the model fits under no plan."""
    from synergy_core.commands._compression_map import compression_map
    from synergy_core.commands._output import write_whole
    from synergy_core.commands._sweep import sweep
    from synergy_core.goodput.compression import compressor_named
    from synergy_core.planner.machine import machine_named
    from synergy_core.planner.software import running_on, software_named
    from synergy_core.planner.tables import IMAGE_TOKENS

    asked = question(chosen.settings)
    if chosen.picture is not None and chosen.picture.suffix != ".svg":
        raise InputError(f"--picture {chosen.picture}: the picture is SVG; give a name that ends in .svg.")
    model = model_asked(asked.model, asked.seq_len)
    family, architecture = model.family, model.architecture
    machine = machine_named(asked.gpu, asked.gpus_per_node)
    rates = _rates(asked, machine)
    batch = asked.batch or default_batch(architecture)
    most = asked.max_batch or batch << DOUBLINGS
    if most < batch:
        raise InputError(f"max_batch={most}: expected at least the batch of {batch}.")
    found = sweep(
        family,
        architecture,
        machine,
        running_on(software_named(asked.software), machine.gpu),
        gpus=asked.gpus,
        batches=[batch << each for each in range((most // batch).bit_length())],
        node_bytes_per_s=[each * GBPS_BYTES for each in rates],
        noise_scale=asked.noise_tokens / (architecture.limits().seq_len or IMAGE_TOKENS),
        layerwise=compressor_named(asked.compressor),
    )
    if found is None:
        print(f"no plan of {asked.model} with a batch from {batch} to {most} fits on {asked.gpus} GPUs; type")
        print(f"  python -m synergy_core plan model={asked.model} gpu={asked.gpu} gpus={asked.gpus}    # says why")
        return 1
    best = [found.best(each * GBPS_BYTES) for each in rates]
    _print(asked, found, machine, rates, best)
    for note in model.notes:
        print(f"\n{note}")
    if chosen.json:
        content = [_row(rate, each) for rate, each in zip(rates, best, strict=True)]
        write_whole(chosen.json, json.dumps(content, indent=1) + "\n")
    if chosen.picture:
        write_whole(chosen.picture, compression_map(f"{asked.model} on {asked.gpus} {machine.gpu.title}", found))
    return 0


def question(settings: Sequence[str]) -> CompressionQuestion:
    """Reads `key=value` arguments. Raises InputError for what is unknown, missing or no number."""
    given = given_settings(settings, KNOWN, NEEDED)

    def number(key: str) -> int | None:
        return whole(key, given[key]) if key in given else None

    gbps = given.get("network_gbps", GBPS).split(",")
    return CompressionQuestion(
        model=given["model"],
        gpu=given["gpu"],
        gpus=whole("gpus", given["gpus"]),
        software=given.get("software", "megatron-core"),
        gpus_per_node=number("gpus_per_node"),
        network_gbps=tuple(
            float("inf") if each == "nvlink" else _positive("network_gbps", each, "Gb/s, or nvlink") for each in gbps
        ),
        batch=number("batch"),
        max_batch=number("max_batch"),
        noise_tokens=_positive("noise_tokens", given.get("noise_tokens", f"{NOISE_TOKENS:g}"), "tokens, such as 1e6"),
        compressor=given.get("compressor", "powersgd-4"),
        seq_len=number("seq_len"),
    )


def _positive(key: str, text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise InputError(f"{key}={text}: expected {what}, a number above 0.")
    return value


def _rates(asked: CompressionQuestion, machine: Machine) -> list[float]:
    """Gb/s of a whole node, rising; `nvlink` is left out where the GPUs have none."""
    within = machine.link_bytes_per_s * machine.gpus_per_node / GBPS_BYTES if machine.link != "pcie" else 0.0
    rates = {within if each == float("inf") else each for each in asked.network_gbps} - {0.0}
    if not rates:
        raise InputError(f"network_gbps=nvlink: {machine.gpu.title} has none in these nodes; give Gb/s.")
    return sorted(rates)


def _print(
    asked: CompressionQuestion, found: Sweep, machine: Machine, rates: Sequence[float], best: Sequence[Best]
) -> None:
    from synergy_core.commands._output import table
    from synergy_core.goodput.offers import POINTS
    from synergy_core.planner.plan import NO_COMPRESSOR

    per_node = min(machine.gpus_per_node, asked.gpus)
    stated = "" if asked.batch else " (default; batch=… sets it)"
    noise = " (default; noise_tokens=… sets it)" if asked.noise_tokens == NOISE_TOKENS else ""
    print(f"{asked.model} on {asked.gpus} {machine.gpu.title}, {per_node} per node, {found.software.name}")
    print(f"  batches from {found.batches[0]}{stated} to {found.batches[-1]}")
    print(f"  noise scale {asked.noise_tokens:g} tokens{noise}")
    if asked.gpus <= machine.gpus_per_node:
        print("  all GPUs are in one node: what joins nodes plays no role")
    rows = [
        [
            f"{rate:g}",
            each.plan.compressor,
            str(each.plan.global_batch),
            replace(each.plan, compressor=NO_COMPRESSOR).describe(),
            f"{each.step_s:.3g} s",
            f"{each.goodput:.4g}/s",
            f"{each.gain:+.1%}" if each.gain else "",
        ]
        for rate, each in zip(rates, best, strict=True)
    ]
    print()
    print(table(("Gb/s", "compressor", "batch", "plan", "step", "goodput", "gain"), rows, left=4))
    shown = [
        [name, _below(found.crossover(name)), *(_gain(found.gain(name, rate * GBPS_BYTES)) for rate in rates)]
        for name in found.names
        if name != NO_COMPRESSOR
    ]
    print("\nEach with its own best batch and plan, against the best without a compressor:\n")
    print(table(("compressor", "pays below Gb/s", *(f"{each:g}" for each in rates)), shown, left=1))
    if any(name.startswith("layerwise") for name in found.names):
        print(f"\nlayerwise-…-{POINTS[0]:g}: each layer its own, all within that part of the gradient's squared norm.")


def _below(rate: float) -> str:
    """A crossover, bytes/s, in words."""
    if rate == 0.0:
        return "never pays"
    return "all of these" if rate == float("inf") else f"{rate / GBPS_BYTES:.3g}"


def _gain(gain: float) -> str:
    return "" if gain == -1.0 else f"{gain:+.0%}"


def _row(rate: float, best: Best) -> dict[str, Any]:
    """One object of the JSON."""
    return {
        "network_gbps": rate,
        "compressor": best.plan.compressor,
        "global_batch": best.plan.global_batch,
        "plan": best.plan.as_dict(),
        "goodput": best.goodput,
        "gain": best.gain,
    }
