"""The best parallel plans of a model on given GPUs: their time and memory, where the time goes, why the others lose.

    python -m synergy_core plan model=gpt-175b gpu=a100-80gb gpus=1024 top=5
    python -m synergy_core plan model=mine.yaml gpu=a100,h100 gpus=8..1024 batch=1536 --picture plans.svg
    python -m synergy_core plan model=llama-3-8b gpu=h100 gpus=64 tokens=15T price=2.50 --emit megatron args.txt

model: of the catalog, a YAML file of the same form, or a config.json of Hugging Face's (nothing is fetched). gpu: GPU
or node types of the catalog, or a data sheet of your own, a YAML file in the form of synergy_core/catalog/gpus/ (then
gpus_per_node, network, and link where it is nvlink). gpus: counts, or ranges `8..1024`. batch: sequences
(or images) a step; by default what GPT-3's rule of thumb gives, 2^19 tokens for 10^8 parameters, growing with their
fourth root, to the next power of two; 1,024 images. seq_len: tokens of a sequence, of another length than the model's.
tokens: of a whole training, such as 15T: days, tokens/s and GPU-hours of it; price: of an hour of a GPU, one for all or
one for each gpu: its cost. software: a training stack of the catalog. constants: what `calibrate --out` wrote, instead
of the shipped ones. top: plans shown per count. gpus_per_node, network (bytes/s per GPU), link (nvswitch, nvlink,
pcie): of another node than usual.
Degrees can be fixed: tensor, pipeline, context, data, expert, interleave, micro_batch, zero, recompute (0 none,
1 selective, 2 full), sequence (0, 1); plan=FILE fixes all of them and the batch to those of a file that --emit wrote,
or of a launch script. With many counts, those are shown that fewer GPUs are not as fast as.

"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.commands._asked import AskedModel, default_batch, model_asked
from synergy_core.commands._question import LARGEST, Question, question
from synergy_core.errors import InputError
from synergy_core.planner.emitters import emitter_for, emitter_names

if TYPE_CHECKING:
    from synergy_core.planner.constants import Constants, OwnConstants
    from synergy_core.planner.machine import Machine
    from synergy_core.planner.plan_table import PlanTable
    from synergy_core.planner.software import Software

SUMMARY = "the best parallel plans of a model on given GPUs, and why the others lose"
MANY = 4
"""From so many counts on, one line each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("settings", nargs="+", metavar="KEY=VALUE", help="model=, gpu=, gpus=, and what is above")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every plan shown, with its parts, as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the stages and time against GPUs")
    parser.add_argument(
        "--emit",
        nargs=2,
        action="append",
        default=[],
        metavar=("FORM", "FILE"),
        help="write the best plan, of one gpu and one count, as something to apply; "
        f"FORM: {', '.join(emitter_names())}; FILE: - for the screen",
    )


def run(chosen: argparse.Namespace) -> int:
    """Prints the plans; writes what was asked for. 1 if no count has a plan."""
    from synergy_core.commands._emitting import emit, plan_from
    from synergy_core.commands._machines import constants_asked, constants_of, machine_asked, used
    from synergy_core.commands._output import write_whole
    from synergy_core.planner.explain import model_flops
    from synergy_core.planner.picture import picture
    from synergy_core.planner.search import search_all
    from synergy_core.planner.software import running_on, software_named

    asked = question(chosen.settings)
    if chosen.picture is not None and chosen.picture.suffix != ".svg":
        raise InputError(f"--picture {chosen.picture}: the picture is SVG; give a name that ends in .svg.")
    if chosen.emit and (len(asked.gpu), len(asked.gpus)) != (1, 1):
        raise InputError("--emit writes one plan; give one gpu= and one number of gpus=.")
    model = model_asked(asked.model, asked.seq_len)
    seq_len = model.architecture.limits().seq_len
    if asked.tokens is not None and not seq_len:
        raise InputError(f"tokens=: {asked.model} reads no tokens; leave it out.")
    software = software_named(asked.software)
    for form, _ in chosen.emit:
        emitter_for(form, software.name)
    if asked.plan is not None:
        asked = plan_from(asked)
    batch = asked.batch or default_batch(model.architecture)
    machines = [machine_asked(each, asked) for each in asked.gpu]
    stacks = [running_on(software, each.gpu) for each in machines]
    own = constants_asked(asked, machines)
    tables = search_all(
        model.family,
        model.architecture,
        [(each, stack, constants_of(each, stack, own)) for each, stack in zip(machines, stacks, strict=True)],
        counts=asked.gpus,
        global_batch=batch,
        keep=asked.top - 1,
        fixed=asked.fixed,
    )
    flops = model_flops(model.family, model.architecture, software) * batch
    stated = "" if asked.batch else " (default; batch=… sets it)"
    print(f"{asked.model}, batch {batch}{stated}, {software.name}")
    for note in model.notes:
        print(f"  {note}")
    for at, (table, stack) in enumerate(zip(tables, stacks, strict=True)):
        _print(table, stack, flops)
        if own is not None:
            print(used(own, table.machine))
        if not len(table):
            print(_nowhere(table, model, stack, constants_of(table.machine, stack, own), batch, asked.fixed))
        elif asked.tokens is not None:
            _print_training(asked, table, stack, own, batch * seq_len, at)
    if chosen.json:
        write_whole(
            chosen.json, json.dumps(_content(asked, batch, seq_len, tables, stacks, flops, own), indent=1) + "\n"
        )
    if chosen.picture:
        write_whole(chosen.picture, picture(asked.model, tables))
    if chosen.emit and len(tables[0]):
        emit(chosen.emit, model, tables[0], stacks[0])
    return 0 if any(len(table) for table in tables) else 1


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
        f"{machine.gpu.title}, {usable_bytes(machine) / 2**30:.1f} GiB usable of {machine.memory_bytes / 1e9:.0f}, "
        f"{machine.gpus_per_node} per node\n  "
        f"{machine.link_bytes_per_s / 1e9:.0f} GB/s within nodes, {machine.network_bytes_per_s / 1e9:.1f} GB/s between"
    )


def _print_training(
    asked: Question, table: PlanTable, software: Software, own: OwnConstants | None, step_tokens: int, at: int
) -> None:
    """Days and cost of the best plan of every count that is shown."""
    from synergy_core.commands._training import error_of, told, trainings

    assert asked.tokens is not None
    shown = table.efficient() if len(table.best()) >= MANY else table.best()
    price = asked.price[at] if asked.price else None
    found = trainings(shown, asked.tokens, step_tokens, price)
    print(told(found, asked.tokens, step_tokens, error_of(table.machine, software, own)))


def _print_infeasible(table: PlanTable) -> None:
    """The first reason of each factor, and how many counts share it."""
    for factor in dict.fromkeys(each.factor for each in table.infeasible):
        alike = [each for each in table.infeasible if each.factor == factor]
        least = min(alike, key=lambda each: each.missing_bytes)
        others = f" ({len(alike) - 1} other counts fail on {factor} too)" if len(alike) > 1 else ""
        print(f"  no plan on {least.gpus} GPUs, {factor}: {least.message}{others}.")


def _nowhere(
    table: PlanTable,
    model: AskedModel,
    software: Software,
    constants: Constants,
    batch: int,
    fixed: Mapping[str, int],
) -> str:
    """On how many GPUs the model would fit: whole nodes in powers of two."""
    from synergy_core.planner.search import search

    machine, tried = table.machine, max(each.gpus for each in table.infeasible)
    counts = []
    count = machine.gpus_per_node
    while count <= LARGEST:
        counts += [count] if count > tried else []
        count *= 2
    if counts:
        larger = search(
            *(model.family, model.architecture, machine, software, constants),
            counts=counts,
            global_batch=batch,
            fixed=fixed,
        )
        if len(larger):
            plan = larger.plans.plan(0).describe()
            return f"  Of powers of two, {int(larger.gpus[0])} GPUs are the first that it fits on: {plan}."
    return f"  No power of two of whole nodes up to {LARGEST} GPUs has a plan; change what is said above."


def _content(
    asked: Question,
    batch: int,
    seq_len: int,
    tables: Sequence[PlanTable],
    stacks: Sequence[Software],
    flops: float,
    own: OwnConstants | None,
) -> dict[str, Any]:
    from synergy_core.commands._training import error_of, trainings
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

    def training_of(table: PlanTable, software: Software, at: int) -> dict[str, Any]:
        if asked.tokens is None:
            return {}
        error = error_of(table.machine, software, own)
        price = asked.price[at] if asked.price else None
        found = trainings(table.best(), asked.tokens, batch * seq_len, price)
        return {
            "tokens": asked.tokens,
            "expected_error": None if error is None else asdict(error),
            "trainings": [asdict(each) for each in found],
        }

    return {
        "model": asked.model,
        "batch": batch,
        "software": asked.software,
        "gpu_types": [
            {
                "gpu": table.machine.gpu.name,
                "precision": stack.precision,
                "plans": [of_row(table, stack, row) for row in range(len(table))],
                "infeasible": [asdict(each) for each in table.infeasible],
                **training_of(table, stack, at),
            }
            for at, (table, stack) in enumerate(zip(tables, stacks, strict=True))
        ],
    }
