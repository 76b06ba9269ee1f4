"""The planner's constants, fitted to measured step times; how well they hold on what was left out; and bands.

For every fit (a GPU type, and the software that ran on it) and every file: errors in sample, with each family left out
in turn (a model, or a file), and with the largest models left out. Then, of every file, how many rows lie inside bands
that were made without them (`bands`). Reads $SYNERGY_DATA/parallel, rubick, and for bands of GPU types that were not
measured arena.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from runner.experiment import data_file
from runner.tables import error_table

from fits import GPU_TYPE, LARGEST, MEASURED, Made, arena, bands, constants_file, memory, scored, told
from fits.bands import FILE, MODEL, NODE, SOFTWARE
from synergy_core.commands._scoring import Fitted
from synergy_core.commands._scoring import fit as fit_constants
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements.training_times import Case
from synergy_core.performance.catalog import gpu_sheets
from synergy_core.performance.planner.bands import family_name
from synergy_core.performance.planner.machine import (
    CORE,
    PHYSICAL,
    Constants,
    constants_for,
    constants_like,
    work_per_clock,
)

SUMMARY = "catalog/constants: the planner's constants and bands, from measured steps (needs: data; minutes: 4)"
OTHER = "other models"
"""Rows of models that a fit never reads."""

KERNELS = tuple(name for name in PHYSICAL if name not in CORE)
MEMORY_BOUND = ("backward_traffic", "backward_kernels", "optimizer_bytes_factor")
HOST = ("host_s", "host_jitter")
OVERLAP = ("data_overlap", "data_exposed")
CUDNN = {"attention_efficiency": 0.5, "attention_backward": 2.5}
OVERLAPPED = {name: getattr(Constants(), name) for name in OVERLAP}
NO_OVERLAP = {"data_overlap": 0.0, "data_exposed": 1.0}
WEIGHTS = {"vtrain_multi_a100": 2.0, "mbridge_dense": 2.0, "mbridge_moe_and_other": 0.5}
"""Weights of files in a fit; other files have weight 1."""


@dataclass(frozen=True)
class Fit:
    """One fit: its files; constants that each software has for itself, and those that all share.

    name: begins with the GPU type. start: by software, what differs from the defaults and is not fitted unless named.
    after: the fit whose constants it starts from, all of them fixed but those named. models: of a file, those that are
    fitted to; the others are scored as `other models`. None named: all.
    """

    name: str
    files: tuple[str, ...]
    own: dict[str, tuple[str, ...]]
    shared: tuple[str, ...] = ()
    start: dict[str, dict[str, float]] = field(default_factory=dict)
    after: str = ""
    models: tuple[str, ...] = ()

    @property
    def gpu(self) -> str:
        return self.name.partition("-")[0]


FSDP = {"fsdp": (*KERNELS, *MEMORY_BOUND, *CORE, *OVERLAP, "network_efficiency", "host_s", "step_s")}
FITS = (
    Fit(
        "a100-megatron",
        ("vtrain_multi_a100", "vtrain_single_a100", "megatron_v1_2020_v100_a100", "korthikanti_table5"),
        {
            "megatron": (*OVERLAP, "network_efficiency"),
            "megatron-v3": (),
            "megatron-deepspeed": ("network_efficiency", "step_s"),
        },
        shared=(*KERNELS, *MEMORY_BOUND, "tensor_efficiency", "card_collisions", *HOST, "score_passes"),
        # Megatron-LM v3 and Megatron-DeepSpeed reduce gradients after the backward pass: nothing hides them.
        start={"megatron-v3": NO_OVERLAP, "megatron-deepspeed": NO_OVERLAP},
    ),
    *(Fit(f"{gpu}-fsdp", (f"llmfoundry_{gpu}_80gb_bf16",), FSDP) for gpu in ("a100", "h100")),
    Fit(
        "h100-nanotron",
        ("nanotron_llama1b_h100",),
        {"nanotron": ("host_s", "tensor_efficiency", "backward_traffic")},
        # At FSDP's launch time no row would wait for the host, so the fit could not move that constant.
        start={"nanotron": {"host_s": 1e-4}},
        after="h100-fsdp",
    ),
    Fit(
        "h100-torchtitan",
        ("torchtitan_h100_h200",),
        dict.fromkeys(
            ("torchtitan", "torchtitan-fp8"), ("gemm_efficiency", "memory_efficiency", "attention_efficiency")
        ),
        after="h100-fsdp",
    ),
    Fit(
        "h100-megatron-fp8",
        ("mbridge_dense", "mbridge_moe_and_other"),
        {"megatron-core-fp8": ("gemm_efficiency", "host_s"), "megatron-core": ()},
        shared=("attention_efficiency", "memory_efficiency"),
        # Only Llama 405B exchanges much for its step, and its releases differ by 5 %, more than the exchange takes. So
        # the network is as under FSDP, and overlap as assumed for software that overlaps.
        start=dict.fromkeys(("megatron-core-fp8", "megatron-core"), CUDNN | OVERLAPPED),
        after="h100-fsdp",
    ),
    # How A100s run kernels is known, and a link's rate is on its data sheet: what is left is this cluster's network and
    # what the software hides of it.
    Fit(
        "a800-tf32",
        ("rubick/iteration_times",),
        {
            "megatron-tf32": ("network_efficiency", "card_collisions"),
            "deepspeed-tf32": ("network_efficiency", *OVERLAP, "optimizer_bytes_factor"),
        },
        start={"megatron-tf32": NO_OVERLAP},
        after="a100-megatron",
        models=("bert", "roberta", "gpt2", "llama30"),
    ),
)


def path_of(file: str) -> Path:
    """The path of a measurement file; it is in parallel/ if the name has no folder."""
    return data_file(f"{file}.csv" if "/" in file else f"parallel/{file}.csv")


def read_rows(fit: Fit) -> tuple[list[Case], pd.DataFrame]:
    """What a fit reads: as cases, and as rows over all cases in turn, still without `how` and `error`."""
    cases, rows = [], []
    for file in fit.files:
        found: Any = read(path_of(file))
        timed = [
            case for case in found.cases() if not case.software.run.offload and np.isfinite(case.iter_time_s).any()
        ]
        total = sum(map(len, timed))
        for case in timed:
            owner = case.software.fitted_as
            cases.append(replace(case, owner=owner, share=WEIGHTS.get(file, 1.0) * len(case) / total))
            columns = {
                "fit": fit.name,
                "file": file,
                "software": owner,
                "gpu": constants_like(case.machine.gpu),
                "family": family_name(case.architecture),
                "precision": case.software.precision,
                "model": [found.rows[at].model for at in case.rows],
                "parameters": np.asarray(case.architecture.parameters(), float),
                "gpus": case.plans.gpus,
                "time_s": case.iter_time_s,
                "has_network": case.plans.gpus > case.machine.gpus_per_node,
            }
            rows.append(pd.DataFrame(columns))
    return cases, pd.concat(rows, ignore_index=True)


def left_out(rows: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """What is held out of a fit's rows: each file if there are several, each model of a file, the largest quarter of
    its models (at least one)."""
    for file, members in rows.groupby("file", sort=False):
        of_file = rows["file"] == file
        if len(members) < len(rows):
            yield FILE, of_file
        sizes = members.groupby("model")["parameters"].max()
        if len(sizes) > 1:
            yield from ((MODEL, of_file & (rows["model"] == name)) for name in sizes.index)
            largest = sizes.sort_values(kind="stable").index[-max(1, len(sizes) // 4) :]
            yield LARGEST, of_file & rows["model"].isin(largest)


def held_out(each: Fit, done: dict[str, Fitted]) -> tuple[Fitted, pd.DataFrame]:
    """Returns the fit, and all rows as predicted by it and by fits from which they were left out."""
    cases, rows = read_rows(each)
    used = rows["model"].isin(each.models or rows["model"])
    base = next(iter(done[each.after].constants.values())) if each.after else Constants()
    start = {owner: replace(base, **each.start.get(owner, {})) for owner in each.own}
    parts = []

    def add(how: str, fitted: Fitted, which: pd.Series) -> None:
        predicted_s = np.concatenate([case.step_s(fitted.constants[case.owner]) for case in cases])
        parts.append(told(rows[which], how, predicted_s[which]))

    def fit_to(seen: pd.Series) -> Fitted:
        keep = np.split(seen.to_numpy(), np.cumsum([len(case) for case in cases])[:-1])
        return fit_constants(cases, each.shared, each.own, start, keep)

    whole = fit_to(used)
    add(MEASURED, whole, used)
    add(OTHER, whole, ~used)
    for how, out in left_out(rows[used]):
        out = out.reindex(rows.index, fill_value=False)
        add(how, fit_to(used & ~out), out)
    on_several = rows["has_network"]
    if 0 < on_several.sum() < len(rows):
        add(NODE, fit_to(used & ~on_several), on_several)
    return whole, pd.concat(parts)


def not_measured(done: dict[str, Fitted]) -> Iterator[pd.DataFrame]:
    """Rows as predicted if their software had not been measured on their GPU type: from the fits that do not start from
    theirs, and from its own on the other GPU type, unscaled, because `transferred` is fitted to that pair."""
    for each in FITS:
        gone = {each.name}
        for other in FITS:  # a fit stands behind the one that it starts from
            gone |= {other.name} if other.after in gone else set()
        others: dict[str, dict[str, Constants]] = {}
        for other in FITS:
            for owner, constants in done[other.name].constants.items() if other.name not in gone else ():
                others.setdefault(owner, {})[other.gpu] = constants
        is_seen = any(each.gpu in fits for fits in others.values())
        cases, rows = read_rows(each)
        ends = np.cumsum([len(case) for case in cases])
        for case, end in zip(cases, ends, strict=True):
            tried = [(SOFTWARE, constants_for(case.machine, case.software, others))] if is_seen else []
            tried += [(GPU_TYPE, fit) for fit in others.get(case.owner, {}).values()]
            for how, constants in tried:
                yield told(rows[end - len(case) : end], how, case.step_s(constants))


class Everything(NamedTuple):
    """All fits. scores: by fit, file and what was left out; rows: what bands are made of, of step times and memory."""

    fitted: dict[str, Fitted]
    scores: list[dict[str, Any]]
    rows: pd.DataFrame
    memory: pd.DataFrame


def everything() -> Everything:
    """Runs all fits, which takes minutes of CPU time."""
    fitted: dict[str, Fitted] = {}
    parts = []
    for each in FITS:
        fitted[each.name], rows = held_out(each, fitted)
        parts.append(rows)
    rows = pd.concat(parts)
    scores = scored(rows[rows["how"] != NODE], "fit", "file", "how")
    parts = [rows.replace({"how": {OTHER: MODEL}}), *not_measured(fitted)]
    parts += [rows[rows["how"] == GPU_TYPE] for *_, rows in arena.every_fit()]
    return Everything(fitted, scores, pd.concat(parts, ignore_index=True), memory.held_out())


def fit() -> Made:
    found = everything()
    catalog: dict[str, dict[str, Any]] = {}
    report = [error_table(found.scores, fit="fit", file="file", rows="how")]
    for each in FITS:
        fitted = found.fitted[each.name]
        report.append(f"{each.name}: at a bound: {', '.join(fitted.at_bounds) or 'none'}")
        for owner, constants in fitted.constants.items():
            entry = bands.fitted_entry(each.name, constants, {file: path_of(file) for file in each.files}, found.scores)
            catalog.setdefault(owner, {})[each.gpu] = entry | bands.entry(found.rows, owner, each.gpu)
    files = constants_file("transfer", "planner; constants.transferred says how it is used.", transfer(found))
    for owner, gpu_types in catalog.items():
        files |= constants_file(owner, "planner.", {"gpu_types": gpu_types})
    return Made(files, "\n".join(report))


def transfer(found: Everything) -> dict[str, Any]:
    """How much less efficient the generation with twice the work per clock is, under the same software; and bands."""
    old, new = (found.fitted[f"{gpu}-fsdp"].constants["fsdp"] for gpu in ("a100", "h100"))
    more = np.log(work_per_clock(gpu_sheets()["h100"]) / work_per_clock(gpu_sheets()["a100"]))
    powers = {
        name: float(round(-np.log(getattr(new, name) / getattr(old, name)) / more, 3))
        for name in ("gemm_efficiency", "attention_efficiency")
    }
    return {"powers": powers, "from": "fsdp on a100 and on h100", "bands": bands.shared(found.rows, found.memory)}
