"""The planner's constants, fitted to measured step times; how well they hold on what was left out; and bands.

For every fit (a GPU type, and the software that ran on it) and every file: errors in sample, with each family left out
in turn (a model, or a file), and with the largest models left out. Then, of every file, how many rows lie inside bands
that were made without them (`bands`). Reads $SYNERGY_DATA/parallel, rubick, and for bands of GPU types that were not
measured arena.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from runner.experiment import data_file

from fits import Made, arena, bands, memory
from fits.bands import FILE, GPU_TYPE, MEASURED, MODEL, NODE, SOFTWARE, HeldOut
from synergy_core.catalog import gpu_sheets
from synergy_core.commands._scoring import Fitted
from synergy_core.commands._scoring import fit as fit_constants
from synergy_core.commands._settings import table
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements.training_times import Case
from synergy_core.goodput.calibration import Accuracy, accuracy
from synergy_core.planner.bands import family_name
from synergy_core.planner.machine import CORE, PHYSICAL, Constants, constants_for, constants_like, work_per_clock

SUMMARY = "catalog/constants: the planner's constants and bands, from measured steps (needs: data; minutes)"
CONSTANTS = "synergy_core/catalog/constants"

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

    known: what the bands need of each row, still without `how` and `error`.
    """

    file: str
    cases: list[Case]
    known: list[HeldOut]
    measured_s: np.ndarray
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
    return data_file(f"{file}.csv" if "/" in file else f"parallel/{file}.csv")


def rows_of(fit: str, file: str, share: float) -> Rows:
    found: Any = read(path_of(file))
    every = [case for case in found.cases() if not case.software.offload]  # fits/offload.py has those
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
        on_several_nodes=np.concatenate([case.plans.gpus > case.machine.gpus_per_node for case in cases]),
    )


def left_out(rows: Rows, among: tuple[str, ...]) -> dict[str, list[np.ndarray]]:
    """Masks of what is held out: each model in turn, and the largest quarter of the models (at least one)."""
    models = [name for name in np.unique(rows.model).tolist() if name in among or not among]
    if len(models) < 2:
        return {}
    sizes = {name: max(row.parameters for row in rows.known if row.model == name) for name in models}
    largest = sorted(models, key=sizes.__getitem__)[-max(1, len(models) // 4) :]
    return {MODEL: [rows.model == name for name in models], "largest out": [np.isin(rows.model, largest)]}


Scores = dict[str, dict[str, Accuracy]]
"""By file, then by what was left out."""


def scores(each: Fit, done: dict[str, Fitted], unseen: list[HeldOut]) -> tuple[Fitted, Scores]:
    """The fit, and how well it holds. unseen: takes the rows that a fit did not see, and those it read."""
    files = [rows_of(each.name, file, share) for file, share in each.files.items()]
    cases = [case for rows in files for case in rows.cases]
    base = next(iter(done[each.after].constants.values())) if each.after else Constants()
    start = {owner: replace(base, **values) for owner, values in each.start.items()}
    used = {rows.file: np.isin(rows.model, each.models or rows.model) for rows in files}

    def fitted(without: dict[str, np.ndarray]) -> Fitted:
        """A fit that does not see some rows. without: their mask, by file."""
        masks = [used[rows.file] & ~without.get(rows.file, np.False_) for rows in files]
        ends = np.cumsum([len(case) for case in cases])[:-1]
        return fit_constants(cases, each.shared, each.own, start, np.split(np.concatenate(masks), ends))

    whole = fitted({})
    result: Scores = {}
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


class Everything(NamedTuple):
    """All fits. rows: what bands are made of, of step times and of memory."""

    fitted: dict[str, Fitted]
    scores: dict[str, Scores]
    rows: list[HeldOut]
    memory: list[HeldOut]


def everything() -> Everything:
    """Minutes of CPU time."""
    fitted: dict[str, Fitted] = {}
    found: dict[str, Scores] = {}
    rows: list[HeldOut] = []
    for each in FITS:
        fitted[each.name], found[each.name] = scores(each, fitted, rows)
    rows += not_measured(fitted)
    for *_, unseen in arena.every_fit():
        rows += unseen
    return Everything(fitted, found, rows, memory.held_out())


def fit() -> Made:
    found = everything()
    catalog: dict[str, dict[str, Any]] = {}
    report = []
    for each in FITS:
        fitted, errors = found.fitted[each.name], found.scores[each.name]
        paths = {file: path_of(file) for file in each.files}
        for owner, constants in fitted.constants.items():
            entry = bands.fitted_entry(each.name, constants, paths, errors)
            catalog.setdefault(owner, {})[each.gpu] = entry | bands.entry(found.rows, owner, each.gpu)
        lines = [[file, how, *bands.figures(score)] for file, parts in errors.items() for how, score in parts.items()]
        report.append(f"{each.name}; at a bound: {', '.join(fitted.at_bounds) or 'none'}")
        report.append(table(("file", "rows", "n", "mape", "median", "p90", "max", "bias"), lines, left=2) + "\n")
    files = {f"{CONSTANTS}/transfer.yaml": transfer(found)}
    for owner, gpu_types in catalog.items():
        text = yaml.safe_dump({"gpu_types": gpu_types}, sort_keys=False, width=120)
        files[f"{CONSTANTS}/{owner}.yaml"] = f"# Fitted by bench/fits.py planner.\n{text}"
    return Made(files, "\n".join(report))


def transfer(found: Everything) -> str:
    """How much less efficient the generation with twice the work per clock is, under the same software; and bands."""
    old, new = (found.fitted[f"{gpu}-fsdp"].constants["fsdp"] for gpu in ("a100", "h100"))
    more = np.log(work_per_clock(gpu_sheets()["h100"]) / work_per_clock(gpu_sheets()["a100"]))
    powers = {
        name: float(round(-np.log(getattr(new, name) / getattr(old, name)) / more, 3))
        for name in ("gemm_efficiency", "attention_efficiency")
    }
    content = {"powers": powers, "from": "fsdp on a100 and on h100", "bands": bands.shared(found.rows, found.memory)}
    comment = "# Fitted by bench/fits.py planner; constants.transferred says how it is used.\n"
    return comment + yaml.safe_dump(content, sort_keys=False)
