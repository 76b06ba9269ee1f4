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
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import compress, islice
from pathlib import Path
from typing import Any

import fit_arena
import numpy as np
import planner_bands
import yaml
from planner_bands import FILE, GPU_TYPE, MEASURED, MODEL, NODE, SOFTWARE, HeldOut, figures

from synergy_core.catalog import CATALOG, gpu_sheets
from synergy_core.commands._scoring import Fitted, fit
from synergy_core.commands._settings import table, write_whole
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements.training_times import Case
from synergy_core.goodput.calibration import Accuracy, accuracy
from synergy_core.planner.bands import family_name
from synergy_core.planner.machine import CORE, PHYSICAL, Constants, constants_for, constants_like, work_per_clock

CONSTANTS = CATALOG / "constants"

KERNELS = tuple(name for name in PHYSICAL if name not in CORE)
MEMORY_BOUND = ("backward_traffic", "backward_kernels", "optimizer_bytes_factor")
HOST = ("host_s", "host_jitter")
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
        shared=(*KERNELS, *MEMORY_BOUND, "tensor_efficiency", "card_collisions", *HOST, "score_passes"),
        own={"megatron": (*OVERLAP, "network_efficiency"), "megatron-deepspeed": ("network_efficiency", "step_s")},
        # Megatron-LM v3 and Megatron-DeepSpeed reduce gradients after the backward pass: nothing hides them.
        start={"megatron": {}, "megatron-v3": NO_OVERLAP, "megatron-deepspeed": NO_OVERLAP},
    ),
    *(
        Fit(
            f"{gpu}-fsdp",
            gpu,
            {f"llmfoundry_{gpu}_80gb_bf16": 1.0},
            own={"fsdp": (*KERNELS, *MEMORY_BOUND, *CORE, *OVERLAP, "network_efficiency", "host_s", "step_s")},
            start={"fsdp": {}},
        )
        for gpu in ("a100", "h100")
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
        own=dict.fromkeys(
            ("torchtitan", "torchtitan-fp8"), ("gemm_efficiency", "memory_efficiency", "attention_efficiency")
        ),
        start={"torchtitan": {}, "torchtitan-fp8": {}},
        after="h100-fsdp",
    ),
    Fit(
        "h100-megatron-fp8",
        "h100",
        {"mbridge_dense": 2.0, "mbridge_moe_and_other": 0.5},
        shared=("network_efficiency", *OVERLAP, "attention_efficiency", "memory_efficiency", "step_s"),
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
    """A file's rows that a fit reads: as its cases, and as columns (rows,) over all cases in turn.

    known: what the bands need of each row, still without `how` and `error`. ideal_s: FLOPs at the peak.
    """

    file: str
    cases: list[Case]
    known: list[HeldOut]
    measured_s: np.ndarray
    ideal_s: np.ndarray
    on_several_nodes: np.ndarray

    def __len__(self) -> int:
        return len(self.known)

    @property
    def model(self) -> np.ndarray:
        return np.array([row.model for row in self.known])

    def off(self, constants: dict[str, Constants]) -> np.ndarray:
        """(rows,): predicted ÷ measured − 1."""
        return np.concatenate([np.exp(case.residuals(constants[case.owner])) - 1.0 for case in self.cases])

    def score(self, off: np.ndarray, rows: np.ndarray) -> Accuracy:
        """Scores the errors `off` of some rows: a mask or indices."""
        return accuracy((1.0 + off[rows]) * self.measured_s[rows], self.measured_s[rows])

    def held_out(self, how: str, off: np.ndarray, mask: np.ndarray) -> list[HeldOut]:
        return with_errors(how, compress(self.known, mask), off[mask])


def with_errors(how: str, rows: Iterable[HeldOut], off: np.ndarray) -> list[HeldOut]:
    return [row._replace(how=how, error=-math.log1p(each)) for row, each in zip(rows, off.tolist(), strict=True)]


def path_of(file: str) -> Path:
    """A file of the measurements, in parallel/ if its name has no folder."""
    return Path(os.environ["SYNERGY_DATA"]) / (f"{file}.csv" if "/" in file else f"parallel/{file}.csv")


def rows_of(fit: str, file: str, share: float) -> Rows:
    found: Any = read(path_of(file))
    every = [case for case in found.cases() if not case.software.offload]  # bench/fit_offload.py has those
    timed = [case for case in every if np.isfinite(case.iter_time_s).any()]
    total = sum(map(len, timed))
    cases = [replace(case, owner=case.software.fitted_as, share=share * len(case) / total) for case in timed]
    known = []
    for case in cases:
        names = case.owner, constants_like(case.machine.gpu), family_name(case.architecture), case.software.precision
        sizes = np.broadcast_to(np.asarray(case.architecture.parameters(), float), (len(case),))
        for at, size, gpus in zip(case.rows.tolist(), sizes.tolist(), case.plans.gpus.tolist(), strict=True):
            known.append(HeldOut("", fit, file, *names, found.rows[at].model, size, gpus, math.nan))
    return Rows(
        file,
        cases,
        known,
        measured_s=np.concatenate([case.iter_time_s for case in cases]),
        ideal_s=np.concatenate([ideal_s(case) for case in cases]),
        on_several_nodes=np.concatenate([case.plans.gpus > case.machine.gpus_per_node for case in cases]),
    )


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


def left_out(rows: Rows, among: tuple[str, ...]) -> dict[str, list[np.ndarray]]:
    """Masks of what is held out: each model in turn, and the largest quarter of the models (at least one)."""
    models = [name for name in np.unique(rows.model).tolist() if name in among or not among]
    if len(models) < 2:
        return {}
    sizes = {name: max(row.parameters for row in rows.known if row.model == name) for name in models}
    largest = sorted(models, key=sizes.__getitem__)[-max(1, len(models) // 4) :]
    return {MODEL: [rows.model == name for name in models], "largest out": [np.isin(rows.model, largest)]}


def scores(each: Fit, done: dict[str, Fitted], unseen: list[HeldOut]) -> tuple[Fitted, dict[str, dict[str, Accuracy]]]:
    """The fit, and by file how well it holds. unseen: takes the rows that a fit did not see, and those it read."""
    files = [rows_of(each.name, file, share) for file, share in each.files.items()]
    cases = [case for rows in files for case in rows.cases]
    base = next(iter(done[each.after].constants.values())) if each.after else Constants()
    start = {owner: replace(base, **values) for owner, values in each.start.items()}
    used = {rows.file: np.isin(rows.model, each.models or rows.model) for rows in files}

    def fitted(without: dict[str, np.ndarray]) -> Fitted:
        """A fit that does not see some rows. without: their mask, by file."""
        masks = [used[rows.file] & ~without.get(rows.file, np.False_) for rows in files]
        ends = np.cumsum([len(case) for case in cases])[:-1]
        return fit(cases, each.shared, each.own, start, np.split(np.concatenate(masks), ends))

    whole = fitted({})
    result: dict[str, dict[str, Accuracy]] = {}
    for rows in files:
        off, own = rows.off(whole.constants), used[rows.file]
        found = {MEASURED: rows.score(off, own)}
        unseen += rows.held_out(MEASURED, off, own)
        if each.models:
            found["other models"] = rows.score(off, ~own)
            unseen += rows.held_out(MODEL, off, ~own)
        turns = left_out(rows, each.models)
        if len(files) > 1:
            turns = {FILE: [np.full(len(rows), True)], **turns}
        for how, masks in turns.items():
            off = np.full(len(rows), np.nan)
            for mask in masks:
                off[mask] = rows.off(fitted({rows.file: mask}).constants)[mask]
                if how in (MODEL, FILE):
                    unseen += rows.held_out(how, off, mask)
            found[how] = rows.score(off, np.concatenate([np.flatnonzero(mask) for mask in masks]))
        best = np.median(rows.measured_s / rows.ideal_s)
        found["one constant"] = accuracy(rows.ideal_s * best, rows.measured_s)
        result[rows.file] = found
    across = {rows.file: rows.on_several_nodes for rows in files}
    if 0 < sum(mask.sum() for mask in across.values()) < sum(map(len, files)):
        one_node = fitted(across).constants
        for rows in files:
            unseen += rows.held_out(NODE, rows.off(one_node), across[rows.file])
    return whole, result


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
            known = iter(rows.known)
            for case in rows.cases:
                members = list(islice(known, len(case)))
                tried = [(SOFTWARE, constants_for(case.machine, case.software, others))] if each.gpu in seen else []
                tried += [(GPU_TYPE, fit) for fit in others.get(case.owner, {}).values()]
                for how, constants in tried:
                    result += with_errors(how, members, np.exp(case.residuals(constants)) - 1.0)
    return result


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
    wanted = chosen.only or [each.name for each in FITS]
    wanted = {*wanted, *(each.after for each in FITS if each.name in wanted)}
    for each in FITS:
        if each.name not in wanted:
            continue
        done[each.name], found = scores(each, done, unseen)
        lines = [[file, how, *figures(score)] for file, parts in found.items() for how, score in parts.items()]
        print(f"\n{each.name}; at a bound: {', '.join(done[each.name].at_bounds) or 'none'}")
        print(table(("file", "rows", "n", "mape", "median", "p90", "max", "bias"), lines, left=2))
        by_owner = done[each.name].constants
        values = [
            [name.name, *(f"{getattr(constants, name.name):.4g}" for constants in by_owner.values())]
            for name in fields(Constants)
        ]
        print(table(("constant", *by_owner), values), flush=True)
        paths = {file: path_of(file) for file in each.files}
        for owner, constants in by_owner.items():
            catalog.setdefault(owner, {})[each.gpu] = planner_bands.fitted_entry(each.name, constants, paths, found)
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
    old, new = done["a100-fsdp"].constants["fsdp"], done["h100-fsdp"].constants["fsdp"]
    more = np.log(work_per_clock(gpu_sheets()["h100"]) / work_per_clock(gpu_sheets()["a100"]))
    powers = {
        name: float(round(-np.log(getattr(new, name) / getattr(old, name)) / more, 3))
        for name in ("gemm_efficiency", "attention_efficiency")
    }
    text = yaml.safe_dump({"powers": powers, "from": "fsdp on a100 and on h100", "bands": bands}, sort_keys=False)
    comment = "# Fitted by bench/fit_planner.py; constants.transferred says how it is used.\n"
    write_whole(CONSTANTS / "transfer.yaml", comment + text)


if __name__ == "__main__":
    main()
