"""Fits the planner's constants to measured step times, and tells how well they hold on what was left out.

    SYNERGY_DATA=… OPENBLAS_NUM_THREADS=1 python bench/fit_planner.py [--write] [--only a100-fsdp] [--json OUT]

For every fit (a GPU type, and the software that ran on it) and every file: n, mean, median, p90 and max of
|predicted − measured|/measured, and the signed mean; in sample, with each family left out in turn (a model, or a file),
and with the largest models left out. Beside them the one-constant baseline: FLOPs ÷ (peak × e), e the best for that
file. Then, of every file, how many rows lie inside bands that were made without them (planner_bands.py). --write
replaces synergy_core/catalog/constants/*.yaml, bands included. Reads $SYNERGY_DATA/parallel, and for bands of GPU types
that were not measured $SYNERGY_DATA/arena.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import fit_arena
import numpy as np
import planner_bands
import yaml
from planner_bands import FILE, GPU_TYPE, MEASURED, MODEL, NODE, SOFTWARE, HeldOut

from synergy_core.commands._scoring import Fitted, fit
from synergy_core.commands._settings import table, write_whole
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements.training_times import Case
from synergy_core.goodput.calibration import Accuracy, accuracy
from synergy_core.planner.machine import Constants, constants_for

HERE = Path(__file__).resolve().parents[1]
CONSTANTS = HERE / "synergy_core" / "catalog" / "constants"

KERNELS = ("gemm_efficiency", "gemm_depth", "wave_loss", "memory_efficiency", "kernel_s")
MEMORY_BOUND = ("backward_traffic", "backward_kernels", "optimizer_bytes_factor")
FLASH = ("attention_efficiency", "attention_fill", "attention_backward")
OVERLAP = ("data_overlap", "data_exposed")
CUDNN = {"attention_efficiency": 0.5, "attention_backward": 2.5}
NO_OVERLAP = {"data_overlap": 0.0, "data_exposed": 1.0}


@dataclass(frozen=True)
class Fit:
    """One fit: files with their weights; constants that all software of it shares, and those each has for itself.

    start: by software, what differs from the defaults and is not fitted unless named. after: the fit whose constants
    it starts from, all of them fixed but those named. models: of a file, those that are fitted to; the others are
    scored as `other models`. None named: all.
    """

    name: str
    gpu: str
    files: dict[str, float]
    shared: tuple[str, ...] = ()
    own: dict[str, tuple[str, ...]] = field(default_factory=dict)
    start: dict[str, dict[str, float]] = field(default_factory=dict)
    after: str = ""
    models: tuple[str, ...] = ()


FITS = (
    Fit(
        "a100-megatron",
        "a100",
        {
            "vtrain_multi_a100": 2.0,
            "vtrain_single_a100": 1.0,
            "megatron_v1_2020_v100_a100": 1.0,
            "korthikanti_table5": 1.0,
        },
        shared=(
            *KERNELS,
            *MEMORY_BOUND,
            "tensor_efficiency",
            "card_collisions",
            "host_s",
            "host_jitter",
            "score_passes",
        ),
        own={"megatron": (*OVERLAP, "network_efficiency"), "megatron-deepspeed": ("network_efficiency", "step_s")},
        # Megatron-LM v3 and Megatron-DeepSpeed reduce gradients after the backward pass: nothing hides them.
        start={"megatron": {}, "megatron-v3": NO_OVERLAP, "megatron-deepspeed": NO_OVERLAP},
    ),
    Fit(
        "a100-fsdp",
        "a100",
        {"llmfoundry_a100_80gb_bf16": 1.0},
        own={"fsdp": (*KERNELS, *MEMORY_BOUND, *FLASH, *OVERLAP, "network_efficiency", "host_s", "step_s")},
        start={"fsdp": {}},
    ),
    Fit(
        "h100-fsdp",
        "h100",
        {"llmfoundry_h100_80gb_bf16": 1.0},
        own={"fsdp": (*KERNELS, *MEMORY_BOUND, *FLASH, *OVERLAP, "network_efficiency", "host_s", "step_s")},
        start={"fsdp": {}},
    ),
    Fit(
        "h100-nanotron",
        "h100",
        {"nanotron_llama1b_h100": 1.0},
        own={"nanotron": ("host_s", "tensor_efficiency", "backward_traffic")},
        # At FSDP's launch time no row would wait for the host, so the fit could not move that constant.
        start={"nanotron": {"host_s": 1e-4}},
        after="h100-fsdp",
    ),
    Fit(
        "h100-torchtitan",
        "h100",
        {"torchtitan_h100_h200": 1.0},
        own={
            "torchtitan": ("gemm_efficiency", "memory_efficiency", "attention_efficiency"),
            "torchtitan-fp8": ("gemm_efficiency", "memory_efficiency", "attention_efficiency"),
        },
        start={"torchtitan": {}, "torchtitan-fp8": {}},
        after="h100-fsdp",
    ),
    Fit(
        "h100-megatron-fp8",
        "h100",
        {"mbridge_dense": 2.0, "mbridge_moe_and_other": 0.5},
        shared=(
            "network_efficiency",
            *OVERLAP,
            "attention_efficiency",
            "memory_efficiency",
            "step_s",
        ),
        own={"megatron-core-fp8": ("gemm_efficiency", "host_s")},
        # cuDNN's attention, whose backward pass does 2.5 times the forward pass's work at about its rate.
        start={"megatron-core-fp8": CUDNN, "megatron-core": CUDNN},
        after="h100-fsdp",
    ),
    # How A100s run kernels is known, and a link's rate is on its data sheet: what is left is this cluster's network and
    # what the software hides of it.
    Fit(
        "a800-tf32",
        "a800",
        {"rubick/iteration_times": 1.0},
        own={
            "megatron-tf32": ("network_efficiency", "card_collisions"),
            "deepspeed-tf32": ("network_efficiency", *OVERLAP, "optimizer_bytes_factor"),
        },
        start={"megatron-tf32": NO_OVERLAP, "deepspeed-tf32": {}},
        after="a100-megatron",
        models=("bert", "roberta", "gpt2", "llama30"),
    ),
)


@dataclass(frozen=True)
class Rows:
    """A file's rows as groups of a fit; model: (rows,) of each; parameters: (rows,); baseline_s: FLOPs at the peak."""

    fit: str
    file: str
    groups: list[Case]
    model: list[np.ndarray]
    parameters: list[np.ndarray]
    ideal_s: list[np.ndarray]


def path_of(file: str) -> Path:
    """A file of the measurements, in parallel/ if its name has no folder."""
    return Path(os.environ["SYNERGY_DATA"]) / (f"{file}.csv" if "/" in file else f"parallel/{file}.csv")


def rows_of(fit: str, file: str, share: float) -> Rows:
    found: Any = read(path_of(file))
    every = [each for each in found.cases() if not each.software.offload]  # bench/fit_offload.py has those
    cases = [each for each in every if np.isfinite(each.iter_time_s).any()]
    total = sum(len(each) for each in cases)
    groups, models, parameters, ideal = [], [], [], []
    for case in cases:
        group = replace(case, owner=case.software.fitted_as, share=share * len(case) / total)
        groups.append(group)
        models.append(np.array([found.rows[at].model for at in case.rows]))
        size = np.broadcast_to(np.asarray(case.architecture.parameters(), float), (len(case),))
        parameters.append(size)
        ideal.append(ideal_s(group))
    return Rows(fit, file, groups, models, parameters, ideal)


def ideal_s(group: Case) -> np.ndarray:
    """Seconds at the peak: three forward passes' products, four with full recomputation."""
    work, plans = group.work, group.plans
    flops: Any = sum(np.asarray(each.flops) for each in work.after.gemms) / plans.pipeline
    for run in work.layers:
        products: Any = sum(np.asarray(each.flops) for each in run.block.gemms)
        for each in run.block.attention:
            half = 0.5 if each.causal and group.software.flash else 1.0
            products = products + 2.0 * each.count * each.queries * each.keys * (each.width + each.value_width) * half
        flops = flops + products * run.count / plans.pipeline
    return flops * plans.passes * plans.accumulation / group.machine.gpu.matrix_flops_per_s(group.software.precision)


def starts(each: Fit, done: dict[str, Fitted]) -> dict[str, Constants]:
    base = next(iter(done[each.after].constants.values())) if each.after else Constants()
    return {owner: replace(base, **values) for owner, values in each.start.items()}


def residuals(rows: Rows, constants: dict[str, Constants]) -> list[np.ndarray]:
    return [np.exp(group.residuals(constants[group.owner])) - 1.0 for group in rows.groups]


def scored_on(off: list[np.ndarray], masks: list[np.ndarray], rows: Rows) -> Accuracy:
    """Scores relative errors of some rows of a file."""
    measured = np.concatenate([group.iter_time_s[mask] for group, mask in zip(rows.groups, masks, strict=True)])
    return accuracy((1.0 + np.concatenate([o[m] for o, m in zip(off, masks, strict=True)])) * measured, measured)


def left_out(rows: Rows, among: tuple[str, ...]) -> dict[str, list[list[np.ndarray]]]:
    """Masks of what is held out: each model in turn, and the largest quarter of the models (at least one)."""
    models = np.unique(np.concatenate(rows.model))
    models = models[np.isin(models, among or models)]
    size = {
        name: max(p[m == name].max(initial=0) for m, p in zip(rows.model, rows.parameters, strict=True))
        for name in models
    }
    result: dict[str, list[list[np.ndarray]]] = {}
    if len(models) > 1:
        result["family out"] = [[m == name for m in rows.model] for name in models]
        big = sorted(models, key=lambda name: size[name])[-max(1, len(models) // 4) :]
        result["largest out"] = [[np.isin(m, big) for m in rows.model]]
    return result


def scores(each: Fit, done: dict[str, Fitted], unseen: list[HeldOut]) -> tuple[Fitted, dict[str, dict[str, Accuracy]]]:
    """The fit, and by file how well it holds. unseen: takes the rows that a fit did not see, and those it read."""
    files = [rows_of(each.name, file, share) for file, share in each.files.items()]
    groups = [group for rows in files for group in rows.groups]
    start = starts(each, done)
    mine = [np.isin(m, each.models or m) for rows in files for m in rows.model]

    def fitted(keep: list[np.ndarray] | None = None) -> Fitted:
        return fit(groups, each.shared, each.own, start, [a & b for a, b in zip(mine, keep or mine, strict=True)])

    whole = fitted()
    result: dict[str, dict[str, Accuracy]] = {}
    for rows in files:
        measured = np.concatenate([group.iter_time_s for group in rows.groups])

        def told(off: list[np.ndarray], measured: np.ndarray = measured) -> Accuracy:
            return accuracy((1.0 + np.concatenate(off)) * measured, measured)

        off, used = residuals(rows, whole.constants), [np.isin(m, each.models or m) for m in rows.model]
        found = {"in sample": scored_on(off, used, rows)}
        unseen += held_out(MEASURED, rows, whole.constants, used)
        if each.models:
            others = [~mask for mask in used]
            found["other models"] = scored_on(off, others, rows)
            unseen += held_out(MODEL, rows, whole.constants, others)
        if len(files) > 1:  # nothing of this file at all
            without = fitted([np.full(len(g), other is not rows) for other in files for g in other.groups]).constants
            found[FILE] = told(residuals(rows, without))
            unseen += held_out(FILE, rows, without)
        for name, turns in left_out(rows, each.models).items():
            collected, truth = [], []
            for masks in turns:
                keep = []
                for other in files:
                    keep += (
                        [~mask for mask in masks]
                        if other is rows
                        else [np.full(len(g.iter_time_s), True) for g in other.groups]
                    )
                partly = fitted(keep)
                for group, mask, off in zip(rows.groups, masks, residuals(rows, partly.constants), strict=True):
                    collected.append(off[mask])
                    truth.append(group.iter_time_s[mask])
                if name == MODEL:
                    unseen += held_out(MODEL, rows, partly.constants, masks)
            joined = np.concatenate(truth)
            found[name] = accuracy((1.0 + np.concatenate(collected)) * joined, joined)
        ideal = np.concatenate(rows.ideal_s)
        found["one constant"] = accuracy(ideal * np.median(measured / ideal), measured)
        result[rows.file] = found
    near = [group.plans.gpus <= group.machine.gpus_per_node for group in groups]
    if 0 < sum(each.sum() for each in near) < sum(map(len, groups)):
        one_node = fitted(near).constants
        for rows in files:
            unseen += held_out(NODE, rows, one_node, [g.plans.gpus > g.machine.gpus_per_node for g in rows.groups])
    return whole, result


def held_out(
    how: str, rows: Rows, constants: dict[str, Constants], masks: list[np.ndarray] | None = None
) -> list[HeldOut]:
    """The rows of the masks, or all, as predicted with these constants."""
    parts = zip(rows.groups, rows.model, residuals(rows, constants), masks or [None] * len(rows.groups), strict=True)
    return [row for part in parts for row in planner_bands.held_out(how, rows.fit, rows.file, *part)]


def not_measured(done: dict[str, Fitted]) -> list[HeldOut]:
    """Rows as predicted if their software had not been measured on their GPU type: from the fits that do not start from
    theirs, and from its own on the other GPU type, unscaled, because `transferred` is fitted to that pair."""
    result = []
    for each in FITS:
        gone = {each.name}
        for other in FITS:  # a fit stands behind the one that it starts from
            gone |= {other.name} if other.after in gone else set()
        others: dict[str, dict[str, Constants]] = {}
        for other in FITS:
            for owner, constants in done[other.name].constants.items() if other.name not in gone else ():
                others.setdefault(owner, {})[other.gpu] = constants
        seen = {gpu for fits in others.values() for gpu in fits}
        for rows in (rows_of(each.name, file, share) for file, share in each.files.items()):
            for group, models in zip(rows.groups, rows.model, strict=True):
                known = [(SOFTWARE, constants_for(group.machine, group.software, others))] if each.gpu in seen else []
                known += [(GPU_TYPE, fit) for fit in others.get(group.owner, {}).values()]
                for how, constants in known:
                    off = np.exp(group.residuals(constants)) - 1.0
                    result += planner_bands.held_out(how, rows.fit, rows.file, group, models, off)
    return result


def entry(each: Fit, constants: Constants, found: dict[str, dict[str, Accuracy]]) -> dict[str, Any]:
    return {
        "constants": {name: float(f"{value:.4g}") for name, value in asdict(constants).items()},
        "fit": each.name,
        "inputs_sha256": {file: hashlib.sha256(path_of(file).read_bytes()).hexdigest() for file in each.files},
        "errors": {
            file: {
                name: {"n": score.n, "mape": round(score.mape, 4), "median": round(score.median, 4)}
                for name, score in parts.items()
            }
            for file, parts in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="FIT")
    parser.add_argument("--json", type=Path, metavar="OUT")
    chosen = parser.parse_args()
    if chosen.json:  # before the minutes that the fits take
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
    if chosen.write and chosen.only:
        parser.error("--write needs every fit: a file holds several, and bands are made of all; leave --only out")
    done: dict[str, Fitted] = {}
    catalog: dict[str, dict[str, Any]] = {}
    everything = []
    unseen: list[HeldOut] = []
    for each in FITS:
        if (
            chosen.only
            and each.name not in chosen.only
            and not any(f.after == each.name for f in FITS if f.name in chosen.only)
        ):
            continue
        done[each.name], found = scores(each, done, unseen)
        lines = [
            [
                file,
                name,
                str(s.n),
                *(f"{getattr(s, key):.1%}" for key in ("mape", "median", "p90", "max")),
                f"{s.bias:+.1%}",
            ]
            for file, parts in found.items()
            for name, s in parts.items()
        ]
        print(f"\n{each.name}; at a bound: {', '.join(done[each.name].at_bounds) or 'none'}")
        print(table(("file", "rows", "n", "mape", "median", "p90", "max", "bias"), lines, left=2))
        values = [
            [name.name, *(f"{getattr(c, name.name):.4g}" for c in done[each.name].constants.values())]
            for name in fields(Constants)
        ]
        print(table(("constant", *done[each.name].constants), values), flush=True)
        for owner, constants in done[each.name].constants.items():
            catalog.setdefault(owner, {})[each.gpu] = entry(each, constants, found)
        everything += [
            {"fit": each.name, "file": file, "rows": name, **asdict(score)}
            for file, parts in found.items()
            for name, score in parts.items()
        ]
    if not chosen.only:
        unseen += [*not_measured(done), *fit_arena.held_out()]
        memory = planner_bands.memory_rows()
        inside = planner_bands.coverage(unseen, memory)
        lines = [
            [
                e["kind"], e["file"], str(e["n"]), f"{e['inside']:.0%}", f"{e['alike']:.0%}",
                *(f"{e[name]:.2f}" for name in ("low", "high", "width")),
            ]
            for e in inside
        ]  # fmt: skip
        print(
            "\nbands: rows inside, the band made without the row's own group; the same with each model counting alike;"
        )
        print("median ends, factors of the prediction; geometric mean of high ÷ low")
        print(table(("left out", "file", "n", "inside", "alike", "low", "high", "width"), lines, left=2))
        everything += [{"rows": "bands", **each} for each in inside]
        shared, own, models = planner_bands.parts_of_errors(unseen)
        print(f"\nstandard deviation of the error that a model's plans share: {shared:.3f}, of a plan's own: {own:.3f}")
        print(f"({models} models, each held out)")
        everything.append({"rows": "parts of errors", "shared": shared, "own": own, "models": models})
    if chosen.json:
        write_whole(chosen.json, json.dumps(everything, indent=1) + "\n")
    if chosen.write:
        CONSTANTS.mkdir(exist_ok=True)
        for owner, gpu_types in catalog.items():
            for gpu, found in gpu_types.items():
                found |= planner_bands.entry(unseen, owner, gpu)
            text = yaml.safe_dump({"gpu_types": gpu_types}, sort_keys=False, width=120)
            write_whole(CONSTANTS / f"{owner}.yaml", f"# Fitted by bench/fit_planner.py.\n{text}")
        write_transfer(done, planner_bands.shared(unseen, memory))


def write_transfer(done: dict[str, Fitted], bands: dict[str, Any]) -> None:
    """How much less efficient the generation with twice the work per clock is, under the same software; and bands."""
    from synergy_core.catalog import gpu_sheets
    from synergy_core.planner.machine import work_per_clock

    old, new = done["a100-fsdp"].constants["fsdp"], done["h100-fsdp"].constants["fsdp"]
    more = np.log(work_per_clock(gpu_sheets()["h100"]) / work_per_clock(gpu_sheets()["a100"]))
    powers = {
        name: float(round(-np.log(getattr(new, name) / getattr(old, name)) / more, 3))
        for name in ("gemm_efficiency", "attention_efficiency")
    }
    text = yaml.safe_dump({"powers": powers, "from": "fsdp on a100 and on h100", "bands": bands}, sort_keys=False)
    write_whole(
        CONSTANTS / "transfer.yaml",
        f"# Fitted by bench/fit_planner.py; constants.transferred says how it is used.\n{text}",
    )


if __name__ == "__main__":
    main()
