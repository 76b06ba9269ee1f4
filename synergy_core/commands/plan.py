"""The best parallel plans of a model on given GPUs: their time and memory, where the time goes, why the others lose.

    python -m synergy_core plan model=gpt-175b gpu=a100-80gb gpus=1024 top=5
    python -m synergy_core plan model=mine.yaml gpu=a100,h100 gpus=8..1024 batch=1536 --picture plans.svg

model: of the catalog, or a YAML file of the same form. gpu: GPU or node types of the catalog. gpus: counts, or ranges
`8..1024`. batch: sequences (or images) a step; by default what GPT-3's rule of thumb gives, 2^19 tokens for 10^8
parameters, growing with their fourth root, to the next power of two; 1,024 images. software: a training stack of the
catalog. top: plans shown per count. gpus_per_node, network (bytes/s per GPU): of another node than usual.
Degrees can be fixed: tensor, pipeline, context, data, expert, interleave, micro_batch, zero, recompute (0 none,
1 selective, 2 full). With many counts, those are shown that fewer GPUs are not as fast as.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.commands._asked import default_batch, given_settings, model_asked, whole
from synergy_core.errors import InputError

if TYPE_CHECKING:
    from synergy_core.planner.architecture import Architecture, Family
    from synergy_core.planner.machine import Machine
    from synergy_core.planner.plan_table import PlanTable
    from synergy_core.planner.software import Software

SUMMARY = "the best parallel plans of a model on given GPUs, and why the others lose"
SOFTWARE = "megatron-core"
NUMBERS = ("batch", "top", "gpus_per_node")
MANY = 4
"""From so many counts on, one line each."""
LARGEST = 65536
"""Most GPUs tried in the search for a number on which a model that does not fit would."""


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked, read from `key=value` arguments."""

    model: str
    gpu: tuple[str, ...]
    gpus: tuple[int, ...]
    software: str
    batch: int | None
    top: int
    gpus_per_node: int | None
    network: float | None
    fixed: Mapping[str, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("settings", nargs="+", metavar="KEY=VALUE", help="model=, gpu=, gpus=, and what is above")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every plan shown, with its parts, as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the stages and time against GPUs")


def run(chosen: argparse.Namespace) -> int:
    """Prints the plans; writes the JSON and the picture. 1 if no count has a plan."""
    from synergy_core.commands._output import write_whole
    from synergy_core.planner.constants import constants_for
    from synergy_core.planner.explain import model_flops
    from synergy_core.planner.machine import machine_named
    from synergy_core.planner.picture import picture
    from synergy_core.planner.search import search_all
    from synergy_core.planner.software import running_on, software_named

    asked = question(chosen.settings)
    if chosen.picture is not None and chosen.picture.suffix != ".svg":
        raise InputError(f"--picture {chosen.picture}: the picture is SVG; give a name that ends in .svg.")
    family, architecture = model_asked(asked.model)
    software = software_named(asked.software)
    batch = asked.batch or default_batch(architecture)
    machines = [machine_named(each, asked.gpus_per_node, asked.network) for each in asked.gpu]
    stacks = [running_on(software, each.gpu) for each in machines]
    tables = search_all(
        family,
        architecture,
        [(each, own, constants_for(each, own)) for each, own in zip(machines, stacks, strict=True)],
        counts=asked.gpus,
        global_batch=batch,
        keep=asked.top - 1,
        fixed=asked.fixed,
    )
    flops = model_flops(family, architecture, software) * batch
    stated = "" if asked.batch else " (default; batch=… sets it)"
    print(f"{asked.model}, batch {batch}{stated}, {software.name}")
    for table, own in zip(tables, stacks, strict=True):
        _print(table, own, flops)
        if not len(table):
            print(_nowhere(table, family, architecture, own, batch, asked.fixed))
    if chosen.json:
        write_whole(chosen.json, json.dumps(_content(asked, batch, tables, stacks, flops), indent=1) + "\n")
    if chosen.picture:
        write_whole(chosen.picture, picture(asked.model, tables))
    return 0 if any(len(table) for table in tables) else 1


def question(settings: Sequence[str]) -> Question:
    """Reads `key=value` arguments. Raises InputError for what is unknown, missing or no number."""
    from synergy_core.planner.enumerate import FIXABLE

    known = ("model", "gpu", "gpus", "software", "network", *NUMBERS, *FIXABLE)
    given = given_settings(settings, known, {"model": "gpt-175b", "gpu": "a100-80gb", "gpus": "1024"})

    def number(key: str) -> int | None:
        return whole(key, given[key]) if key in given else None

    return Question(
        model=given["model"],
        gpu=tuple(given["gpu"].split(",")),
        gpus=_counts(given["gpus"]),
        software=given.get("software", SOFTWARE),
        batch=number("batch"),
        top=number("top") or 5,
        gpus_per_node=number("gpus_per_node"),
        network=_rate(given["network"]) if "network" in given else None,
        fixed={key: whole(key, given[key], least=0) for key in FIXABLE if key in given},
    )


def _counts(text: str) -> tuple[int, ...]:
    counts: list[int] = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        first = whole("gpus", low)
        last = whole("gpus", high) if dots else first
        if last < first:
            raise InputError(f"gpus={part}: the range is empty; expected the smaller count first.")
        counts += range(first, last + 1)
    return tuple(dict.fromkeys(counts))


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise InputError(f"network={text}: expected bytes/s per GPU, such as 25e9.")
    return value


def _mfu(table: PlanTable, row: int, software: Software, flops: float) -> float:
    """Model FLOPs ÷ what the GPUs could do at peak."""
    peak = table.machine.gpu.matrix_flops_per_s(software.precision) * int(table.gpus[row])
    return flops / (float(table.step_time_s[row]) * peak)


def _print(table: PlanTable, software: Software, flops: float) -> None:
    from synergy_core.commands._output import table as aligned
    from synergy_core.planner.explain import PARTS, seconds, why

    counts = sorted(set(table.gpus.tolist()))
    many = len(counts) + len(table.infeasible) >= MANY
    shown = table.efficient() if many else table
    used = [name for name in PARTS if (getattr(shown.parts, name) > 0.005 * shown.step_time_s).any()]
    rows = []
    for row in range(len(shown)):
        rows.append(
            [
                str(int(shown.gpus[row])),
                shown.plans.plan(row).describe(),
                seconds(float(shown.step_time_s[row])),
                f"{shown.memory_bytes[row] / 2**30:.1f} GiB",
                f"{_mfu(shown, row, software, flops):.1%}",
                *(f"{getattr(shown.parts, name)[row] / shown.step_time_s[row]:.0%}" for name in used),
            ]
        )
    print(f"\n{_title(table.machine)}, {software.precision}")
    if rows:
        print(aligned(("gpus", "plan", "step", "memory", "MFU", *(PARTS[each] for each in used)), rows, left=2))
    if not many:
        for row in range(len(shown)):
            if shown.rank[row] > 0:
                best = row - int(shown.rank[row])
                slower = float(shown.step_time_s[row] / shown.step_time_s[best] - 1.0)
                plan = shown.plans.plan(row).describe()
                print(f"  {int(shown.gpus[row])}: {plan} is {slower:.1%} slower: {why(shown, row, best)}")
    elif len(shown) < len(counts):
        print(f"  {len(counts) - len(shown)} counts are left out: fewer GPUs are as fast.")
    _print_infeasible(table)


def _title(machine: Machine) -> str:
    from synergy_core.planner.memory import usable_bytes

    return (
        f"{machine.gpu.title}, {usable_bytes(machine) / 2**30:.1f} GiB usable, {machine.gpus_per_node} per node\n  "
        f"{machine.link_bytes_per_s / 1e9:.0f} GB/s within nodes, {machine.network_bytes_per_s / 1e9:.1f} GB/s between"
    )


def _print_infeasible(table: PlanTable) -> None:
    """The first reason of each factor, and how many counts share it."""
    for factor in dict.fromkeys(each.factor for each in table.infeasible):
        alike = [each for each in table.infeasible if each.factor == factor]
        least = min(alike, key=lambda each: each.missing_bytes)
        others = f" ({len(alike) - 1} other counts fail on {factor} too)" if len(alike) > 1 else ""
        print(f"  no plan on {least.gpus} GPUs, {factor}: {least.message}{others}.")


def _nowhere(
    table: PlanTable,
    family: Family,
    architecture: Architecture,
    software: Software,
    batch: int,
    fixed: Mapping[str, int],
) -> str:
    """On how many GPUs the model would fit: whole nodes in powers of two."""
    from synergy_core.planner.constants import constants_for
    from synergy_core.planner.search import search

    machine, tried = table.machine, max(each.gpus for each in table.infeasible)
    counts = []
    count = machine.gpus_per_node
    while count <= LARGEST:
        counts += [count] if count > tried else []
        count *= 2
    if counts:
        constants = constants_for(machine, software)
        larger = search(
            family, architecture, machine, software, constants, counts=counts, global_batch=batch, fixed=fixed
        )
        if len(larger):
            plan = larger.plans.plan(0).describe()
            return f"  Of powers of two, {int(larger.gpus[0])} GPUs are the first that it fits on: {plan}."
    return f"  No power of two of whole nodes up to {LARGEST} GPUs has a plan; change what is said above."


def _content(
    asked: Question, batch: int, tables: Sequence[PlanTable], stacks: Sequence[Software], flops: float
) -> dict[str, Any]:
    from synergy_core.planner.explain import PARTS, why

    def of_row(table: PlanTable, software: Software, row: int) -> dict[str, Any]:
        rank = int(table.rank[row])
        return {
            "gpus": int(table.gpus[row]),
            "nodes": int(table.nodes[row]),
            "rank": rank,
            "plan": table.plans.plan(row).as_dict(),
            "step_time_s": float(table.step_time_s[row]),
            "memory_bytes": float(table.memory_bytes[row]),
            "mfu": _mfu(table, row, software, flops),
            "parts": {name: float(getattr(table.parts, name)[row]) for name in PARTS},
            **({"why": why(table, row, row - rank)} if rank else {}),
        }

    return {
        "model": asked.model,
        "batch": batch,
        "software": asked.software,
        "gpu_types": [
            {
                "gpu": table.machine.gpu.name,
                "precision": own.precision,
                "plans": [of_row(table, own, row) for row in range(len(table))],
                "infeasible": [asdict(each) for each in table.infeasible],
            }
            for table, own in zip(tables, stacks, strict=True)
        ],
    }
