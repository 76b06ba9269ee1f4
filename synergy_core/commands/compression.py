"""Shows whether compressing gradients pays on given GPUs: the best batch, plan and compressor by network bandwidth.

    python -m synergy_core compression model=gpt-1.3b gpu=a100 gpus=16
    python -m synergy_core compression model=gpt-1.3b gpu=a100 gpus=16 batch=64 noise_tokens=1e5 --picture map.svg

model, gpu, gpus, software, gpus_per_node, seq_len: as for `plan`, but one GPU type and one number of GPUs.
network_gbps: bandwidth of all of a node's network cards together, by data sheet; `nvlink`: the bandwidth within a node.
batch: sequences (or images) per step for which the learning rate was tuned; by default as for `plan`. Batches are
doubled from there up to max_batch (by default 16 times as large). noise_tokens: the gradient's noise scale in tokens;
10^6 by default, as for a language model at a loss of 3; an image counts as 128 tokens. Every compressor is tried with
one strength for all layers. compressor: the one whose scheme is also tried with a separate strength for each layer.

goodput: sequences per second × statistical efficiency relative to `batch`. A compressor is chosen if it improves
goodput by at least 5 % (gain) over the best plan and batch without a compressor, as for jobs (docs/compression.md).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from synergy_core.commands._settings import (
    amount,
    as_text,
    default_batch,
    parse_settings,
    requested_model,
    table,
    whole,
    write_whole,
)
from synergy_core.commands.plan_report import COLOURS, WIDTH, svg
from synergy_core.errors import InputError
from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.goodput.compression._compressor import Compressor
from synergy_core.performance.planner.compressed import CompressedPlans, CompressedSearch, every_offer, gradients_of
from synergy_core.performance.planner.machine import (
    Machine,
    Software,
    constants_for,
    machine_named,
    running_on,
    software_named,
)
from synergy_core.performance.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.performance.planner.search import Model
from synergy_core.performance.planner.tables import IMAGE_TOKENS
from synergy_core.performance.planner.work import Architecture, Family
from synergy_core.scheduling.jobs.exchange import MARGIN

SUMMARY = "show whether compressing gradients pays, by network, with the best batch and plan"
GBPS_BYTES = 1e9 / 8.0
DOUBLINGS = 4
DEFAULTS = {
    "software": "megatron-core",
    "compressor": "powersgd-4",
    "network_gbps": (1.0, 10.0, 25.0, 100.0, 400.0, float("inf")),
    "noise_tokens": 1e6,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.add_argument("settings", nargs="+", metavar="KEY=VALUE", help="model=, gpu=, gpus= and the other keys above")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the best choice of every network as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw a map by network and noise scale")


def run(chosen: argparse.Namespace) -> int:
    """Prints choices and crossovers, and writes the JSON and the picture. Returns 1 if no plan fits into memory."""
    query = _read_settings(chosen.settings)
    if chosen.picture is not None and chosen.picture.suffix != ".svg":
        raise InputError(f"--picture {chosen.picture}: the picture is SVG; give a name that ends in .svg.")
    model = requested_model(query.model, query.seq_len)
    machine = machine_named(query.gpu, query.gpus_per_node)
    # Bandwidth within a node, all GPUs together, Gb/s; 0 for GPUs without NVLink.
    within = machine.link_bytes_per_s * machine.gpus_per_node / GBPS_BYTES if machine.link != "pcie" else 0.0
    rates = sorted({within if np.isinf(rate) else rate for rate in query.network_gbps} - {0.0})
    if not rates:
        raise InputError(f"network_gbps=nvlink: {machine.gpu.title} has no NVLink in these nodes; give Gb/s.")
    batch = query.batch or default_batch(model.architecture)
    max_batch = query.max_batch or batch << DOUBLINGS
    if max_batch < batch:
        raise InputError(f"max_batch={max_batch}: expected at least batch, {batch}.")
    found = sweep(
        model.family,
        model.architecture,
        machine,
        running_on(software_named(query.software), machine.gpu),
        gpus=query.gpus,
        batches=[batch << doublings for doublings in range((max_batch // batch).bit_length())],
        node_bytes_per_s=[rate * GBPS_BYTES for rate in rates],
        noise_scale=query.noise_tokens / (model.architecture.limits().seq_len or IMAGE_TOKENS),
        layerwise=compressor_named(query.compressor),
    )
    if found is None:
        print(f"no plan of {query.model} with a batch from {batch} to {max_batch} fits on {query.gpus} GPUs; type")
        print(f"  python -m synergy_core plan model={query.model} gpu={query.gpu} gpus={query.gpus}    # says why")
        return 1
    best = {rate: found.best(rate * GBPS_BYTES) for rate in rates}
    _print(query, found, machine, best)
    for note in model.notes:
        print(f"\n{note}")
    if chosen.json:
        content = [
            {
                "network_gbps": rate,
                "compressor": choice.plan.compressor,
                "global_batch": choice.plan.global_batch,
                "plan": choice.plan.as_dict(),
                "goodput": choice.goodput,
                "gain": choice.gain,
            }
            for rate, choice in best.items()
        ]
        write_whole(chosen.json, json.dumps(content, indent=1) + "\n")
    if chosen.picture:
        write_whole(chosen.picture, compression_map(f"{query.model} on {query.gpus} {machine.gpu.title}", found))
    return 0


def _read_settings(settings: Sequence[str]) -> SimpleNamespace:
    """Reads the settings by key; network_gbps is inf for the bandwidth within a node. Raises InputError for unknown or
    missing keys and for text that is not a number."""

    def rates(key: str, text: str) -> tuple[float, ...]:
        expected = "Gb/s as a number above 0, or nvlink"
        return tuple(float("inf") if rate == "nvlink" else amount(key, rate, expected) for rate in text.split(","))

    readers: dict[str, Callable[[str, str], Any]] = {
        **dict.fromkeys(("model", "gpu", "software", "compressor"), as_text),
        **dict.fromkeys(("gpus", "gpus_per_node", "batch", "max_batch", "seq_len"), whole),
        "network_gbps": rates,
        "noise_tokens": lambda key, text: amount(key, text, "a number of tokens above 0, such as 1e6"),
    }
    required = {"model": "gpt-1.3b", "gpu": "a100", "gpus": "16"}
    return parse_settings(settings, readers, required, **DEFAULTS)


def _print(query: SimpleNamespace, found: Sweep, machine: Machine, best: Mapping[float, Best]) -> None:
    batch_note = "" if query.batch else " (default; batch=… sets it)"
    noise_note = " (default; noise_tokens=… sets it)" if query.noise_tokens == DEFAULTS["noise_tokens"] else ""
    per_node = min(machine.gpus_per_node, query.gpus)
    print(f"{query.model} on {query.gpus} {machine.gpu.title}, {per_node} per node, {query.software}")
    print(f"  batches from {found.batches[0]}{batch_note} to {found.batches[-1]}")
    print(f"  noise scale {query.noise_tokens:g} tokens{noise_note}")
    if query.gpus <= machine.gpus_per_node:
        print("  all GPUs are in one node, so the network between nodes does not matter")
    rows = [
        [
            f"{rate:g}",
            choice.plan.compressor,
            str(choice.plan.global_batch),
            replace(choice.plan, compressor=NO_COMPRESSOR).describe(),
            f"{choice.step_s:.3g} s",
            f"{choice.goodput:.4g}/s",
            f"{choice.gain:+.1%}" if choice.gain else "",
        ]
        for rate, choice in best.items()
    ]
    print("\n" + table(("Gb/s", "compressor", "batch", "plan", "step", "goodput", "gain"), rows, left=4))
    rows = []
    for name in found.names[1:]:
        below = found.crossover(name)
        pays = {0.0: "never pays", float("inf"): "all of these"}.get(below, f"{below / GBPS_BYTES:.3g}")
        gains = (found.gain(name, rate * GBPS_BYTES) for rate in best)
        rows.append([name, pays, *("" if gain == NO_PLAN else f"{gain:+.0%}" for gain in gains)])
    print("\nGoodput of each compressor with its own best batch and plan, relative to the best without a compressor:\n")
    print(table(("compressor", "pays below Gb/s", *(f"{rate:g}" for rate in best)), rows))
    if any(name.startswith("layerwise") for name in found.names):
        print("\nlayerwise-…-E: a strength for each layer; squared error at most E × the gradient's squared norm.")


# Finds the best compressor, batch and plan of a model for each network bandwidth between nodes.


PER_DECADE = 4
"""Network rates tried per factor of 10 between requested rates, to locate the crossovers."""
NO_PLAN = -1.0
"""Gain of a compressor for which no plan was found."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best choice at one network rate. goodput: samples per second × statistical efficiency relative to the initial
    batch. gain: goodput ÷ that of the best choice without a compressor − 1; 0 if no compressor is used.
    """

    plan: Plan
    step_s: float
    goodput: float
    gain: float


@dataclass(frozen=True, eq=False)
class Sweep:
    """The fastest plan for every compressor, by network bandwidth and batch, for one model and number of GPUs.

    batches: rising; the first is the initial batch. noise_scale: in samples. found: plans of each batch by the network
    bandwidth of a node, bytes/s, rising.
    """

    batches: tuple[int, ...]
    noise_scale: float
    found: dict[float, list[CompressedPlans]]

    @property
    def names(self) -> list[str]:
        """Compressors for which a plan was found, `none` first."""
        every = [each.compressor for found in self.found.values() for plans in found for each in plans.plans]
        return list(dict.fromkeys((NO_COMPRESSOR, *every)))

    def best(self, rate: float, noise_scale: float | None = None) -> Best:
        """The best choice at a rate in `found`. noise_scale: samples; None for the sweep's own."""
        found = self._by_name(rate, noise_scale or self.noise_scale)
        uncompressed = found[NO_COMPRESSOR]
        fastest = max(found.values(), key=lambda choice: choice.goodput)
        if fastest.goodput < MARGIN * uncompressed.goodput:
            return uncompressed
        return replace(fastest, gain=fastest.goodput / uncompressed.goodput - 1.0)

    def gain(self, name: str, rate: float) -> float:
        """Goodput with the compressor ÷ without, each at its own best batch and plan, − 1; or `NO_PLAN`."""
        found = self._by_name(rate, self.noise_scale)
        return found[name].goodput / found[NO_COMPRESSOR].goodput - 1.0 if name in found else NO_PLAN

    def crossover(self, name: str) -> float:
        """The rate, bytes/s, below which the compressor pays: 0 if it never pays, inf if it pays at all rates tried.

        Interpolates linearly in log(rate) between the two rates where the gain last changes sign.
        """
        gains, rates = np.array([self.gain(name, rate) for rate in self.found]), np.log(list(self.found))
        paying = np.flatnonzero(gains > 0.0)
        if not paying.size:
            return 0.0
        last = int(paying[-1])
        if last == len(rates) - 1:
            return float("inf")
        share = gains[last] / (gains[last] - gains[last + 1])
        return float(np.exp(rates[last] + share * (rates[last + 1] - rates[last])))

    def _by_name(self, rate: float, noise_scale: float) -> dict[str, Best]:
        """The best batch and plan of each compressor."""
        best: dict[str, Best] = {}
        for plans in self.found[rate]:
            goodput = plans.goodput(noise_scale, self.batches[0]).tolist()
            for plan, step_s, value in zip(plans.plans, plans.step_s.tolist(), goodput, strict=True):
                if plan.compressor not in best or value > best[plan.compressor].goodput:
                    best[plan.compressor] = Best(plan, step_s, value, 0.0)
        return best


def sweep(
    family: Family,
    architecture: Architecture,
    machine: Machine,
    software: Software,
    *,
    gpus: int,
    batches: Sequence[int],
    node_bytes_per_s: Sequence[float],
    noise_scale: float,
    layerwise: Compressor,
) -> Sweep | None:
    """Tries every compressor and batch at the given rates and `PER_DECADE` between them; None if no plan fits.

    layerwise: a compressor of the scheme that is also tried with a separate strength for each layer.
    """
    requested = sorted(set(node_bytes_per_s))
    rates = requested[:1]
    for low, high in pairwise(requested):
        steps = int(np.ceil(PER_DECADE * np.log10(high / low)))
        rates += [*np.geomspace(low, high, steps + 1)[1:-1].tolist(), high]
    model = Model(family, architecture, software)
    search = CompressedSearch(model, gradients_of(model), every_offer(layerwise))
    found = {}
    for rate in rates:
        joined = replace(machine, network_bytes_per_s=rate / machine.gpus_per_node)
        constants = constants_for(joined, software)
        tried = (search.plans(joined, constants, gpus, batch) for batch in batches)
        found[rate] = [each for each in tried if each is not None]
    return Sweep(tuple(batches), noise_scale, found) if any(found.values()) else None


# Draws the best compressor as an SVG map over network bandwidth between nodes and gradient noise scale.


LEFT, TOP, ROW = 110, 70, 24
NOISES = 16
"""Number of noise scales drawn, from a hundredth of the requested one to a hundred times as much."""
GREY = "#e4e4e4"
MIN_TICK_WIDTH, MIN_LABEL_WIDTH = 50.0, 22
"""Pixels that the number at a tick mark and the number in a cell take."""


def compression_map(title: str, found: Sweep) -> str:
    """Draws an SVG document with a cell for each rate tried and each noise scale. A cell's colour shows the
    compressor's scheme; a darker shade is a larger gain.
    """

    def scheme_of(best: Best) -> str:
        """The compressor's name with N in place of its number."""
        return re.sub(r"[\d.]+$", "N", best.plan.compressor)

    noises = (found.noise_scale * np.geomspace(0.01, 100.0, NOISES)).tolist()
    cells = [[found.best(rate, noise) for rate in found.found] for noise in noises]
    schemes = sorted({scheme_of(each) for row in cells for each in row} - {NO_COMPRESSOR})
    colours = {NO_COMPRESSOR: GREY, **dict(zip(schemes, cycle(COLOURS), strict=False))}
    width = (WIDTH - LEFT - 30) / len(found.found)
    bottom = TOP + ROW * NOISES
    body = [
        _text(LEFT, 26, title, size=18),
        _text(LEFT, 50, "best compressor, each cell with its own best batch and plan; number: gain over none, in %"),
    ]
    for index, (row, noise) in enumerate(zip(cells, noises, strict=True)):
        y = bottom - ROW * (index + 1)
        if index % 3 == 0 or index == NOISES - 1:
            body.append(_text(LEFT - 8, y + ROW / 2 + 4, _short(noise), anchor="end"))
        for column, each in enumerate(row):
            x = LEFT + column * width
            opacity = min(1.0, 0.35 + each.gain) if each.gain else 1.0
            tip = escape(f"{each.plan.describe()}: batch {each.plan.global_batch}, {each.gain:+.1%}")
            body.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{ROW}" fill="{colours[scheme_of(each)]}" '
                f'fill-opacity="{opacity:.2f}" stroke="white"><title>{tip}</title></rect>'
            )
            if each.gain and width >= MIN_LABEL_WIDTH:
                label = f"{100 * each.gain:.0f}"
                body.append(_text(x + width / 2, y + ROW / 2 + 4, label, anchor="middle", size=10))
    for column, rate in enumerate(found.found):
        if column % max(1, round(MIN_TICK_WIDTH / width)) == 0:
            body.append(_text(LEFT + (column + 0.5) * width, bottom + 18, _short(rate / GBPS_BYTES), anchor="middle"))
    body.append(_text(LEFT + (WIDTH - LEFT) / 2, bottom + 40, "network of a node, Gb/s", anchor="middle"))
    body.append(
        f'<text transform="translate(28,{TOP + ROW * NOISES / 2:.0f}) rotate(-90)" text-anchor="middle">'
        "gradient noise scale, samples</text>"
    )
    x = float(LEFT)
    for name, colour in colours.items():
        body.append(f'<rect x="{x:.0f}" y="{bottom + 54}" width="14" height="14" fill="{colour}"/>')
        body.append(_text(x + 20, bottom + 66, name))
        x += 50 + 8 * len(name)
    return svg(bottom + 84, body)


def _short(value: float) -> str:
    """Formats a number in few characters: `4.9`, `31`, `12k`."""
    return f"{value / 1000:.2g}k" if value >= 1000 else f"{value:.3g}" if value >= 100 else f"{value:.2g}"


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'
