"""How far the planner is from what was measured, in sample and held out: docs/accuracy_planner.md, docs/planner.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from fits import memory, scored
from runner.dependencies import PLANS
from runner.experiment import Experiment, Result, Results, data_file, measurement
from runner.tables import ERRORS, GOAL_HEAD, NONE, error_table, errors, goal, met, number, percent, table

from synergy_core.commands import _scoring
from synergy_core.commands.fits import fit_of
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements._table import read_table
from synergy_core.commands.measurements.training_times import Case
from synergy_core.commands.plan import asked
from synergy_core.performance.goodput.calibration import accuracy
from synergy_core.performance.planner.machine import constants_for
from synergy_core.units import Floats, Ints

Score = dict[str, Any]
FOLDER = "synergy_core/performance/catalog"
CATALOG = tuple(f"{FOLDER}/{name}" for name in ("architectures", "gpus", "links", "nodes", "software"))
CONSTANTS = f"{FOLDER}/constants"
RUBICK = "rubick/iteration_times"
ARENA = "arena/best_plan_iteration_time"


def one(scores: Iterable[Score], **wanted: Any) -> Score:
    """The first score with all of these values; empty if there is none."""
    return next((each for each in scores if all(each.get(name) == value for name, value in wanted.items())), {})


# Fits, what they did not see, and bands made without a row's group.


def fits() -> Result:
    """Scores of each fit and file, by what was left out; coverage of bands; parts of errors that plans share."""
    from fits import bands, planner

    found = planner.everything()
    scores = [{**each, "rows": each["how"]} for each in found.scores]
    coverage = bands.coverage(found.rows, found.memory)
    return {"scores": scores, "bands": coverage, "parts": bands.parts_of_errors(found.rows)}


FITS = measurement(fits)
HELD_OUT = ("family out", "largest out", "file out", "other models")
BANDS = ("family out", "file out", "one node only", "software out", "GPU type out")
NAMES = {"family out": "model out", "one node only": "more GPUs"}
"""Names on the page for the rows that a fit did not see, where they differ from the names in the fit."""
HELD_OUT_GOALS: tuple[tuple[str, str, tuple[str, ...], dict[str, float]], ...] = (
    ("multi-node A100, 3D", "file out", ("vtrain_multi_a100",), {"mape": 0.06, "median": 0.035, "p90": 0.13}),
    (
        "large Megatron runs",
        "file out",
        ("korthikanti_table5", "megatron_v1_2020_v100_a100"),
        {"mape": 0.05, "max": 0.10},
    ),
    ("single-node small models", "family out", ("vtrain_single_a100",), {"mape": 0.10}),
    ("single-node small models", "file out", ("vtrain_single_a100",), {"mape": 0.10}),
    (
        "FSDP, more GPUs or other memory",
        "family out",
        ("llmfoundry_a100_80gb_bf16", "llmfoundry_h100_80gb_bf16"),
        {"mape": 0.06},
    ),
)
"""The goals: name, the rows that the fit did not see, their files, and the largest allowed errors."""


def fit_tables(results: Results) -> dict[str, str]:
    scores, bands, parts = (results[FITS][name] for name in ("scores", "bands", "parts"))

    def held_out(file: str, how: str) -> str:
        found = one(scores, file=file, rows=how)
        return f"{percent(found['mape'])} ({percent(found['p90'])}), n = {found['n']}" if found else NONE

    def covered(found: Score) -> str:
        if not found:
            return NONE
        return f"{percent(found['inside'], 0)} of {found['n']} ({found['low']:.2f} to {found['high']:.2f})"

    in_sample = [each for each in scores if each["rows"] == "in sample"]
    fitted = (
        [each["fit"], each["file"], *errors(each), *(held_out(each["file"], how) for how in HELD_OUT)]
        for each in in_sample
    )
    files = dict.fromkeys(each["file"] for each in bands if each["kind"] in BANDS)
    by_file = ([file, *(covered(one(bands, file=file, kind=kind)) for kind in BANDS)] for file in files)
    of_memory = (each for each in bands if each["kind"] not in BANDS)
    in_memory = ([each["file"], each["kind"].removeprefix("memory, "), covered(each)] for each in of_memory)
    goals = [
        goal(what, f"{file}, {NAMES.get(how, how)}: {name}", one(scores, file=file, rows=how).get(name), limit)
        for what, how, which, limits in HELD_OUT_GOALS
        for file in which
        for name, limit in limits.items()
    ]
    families = []
    for each in (each for each in bands if each["file"].endswith(" models")):
        of, inside = each["file"], percent(each["inside"], 0)
        families.append([of, str(each["n"]), inside, percent(each["alike"], 0), number(each["width"])])
        holds = met(0.85 <= round(each["inside"], 2) <= 0.95)
        goals.append(["bands hold 85 to 95 %", f"{of}, model out", f"{inside} of {each['n']}", holds])
    names, kinds = ([NAMES.get(how, how) for how in each] for each in (HELD_OUT, BANDS))
    return {
        "goals": table(GOAL_HEAD, goals, 3),
        "errors": table(("fit", "file", *ERRORS, *names), fitted, 2),
        "bands": table(("file or family", *kinds), by_file),
        "families": table(("family", "rows", "inside", "inside, each model alike", "width"), families),
        "memory": table(("file", "family", "inside"), in_memory, 2),
        "parts": f"{number(parts[0])} and {number(parts[1])} ({parts[2]} models)",
    }


PLANNER_FITS = Experiment(lambda: [FITS], fit_tables, needs=("data",), reads=(*CATALOG, PLANS))


# Step times as shipped, and the choice of plans.


def shipped(file: str) -> Result:
    """The groups that `python -m synergy_core validate` scores."""
    groups = _scoring.scored(read(data_file(f"{file}.csv")))
    return {"groups": [each.as_json(file.rpartition("/")[2], "") for each in groups]}


def rubicks_rows() -> Result:
    """Errors of Rubick's t5 and vit by kind of row, as the page describes them, and of rows with offloading."""
    path = data_file(f"{RUBICK}.csv")
    rows = _scoring.predicted(read(path))  # type: ignore[arg-type]
    cells = (
        pd.DataFrame({row.line: row.cells for row in read_table(path).rows}).T.loc[rows["line"]].set_index(rows.index)
    )
    is_offloaded, nodes = cells["plan"] == "zero-offload", cells["gpus_per_node_used"]
    is_odd = ~is_offloaded & (nodes.str.len() > 1) & nodes.str.contains("[13579]")
    rows["kind"] = np.select([cells["plan"] == "3d", is_odd], ["3d", "odd nodes"], "the others")
    rows = rows.rename(columns={"time_s": "predicted_s", "iter_time_s": "time_s"})

    def scores(which: pd.DataFrame, *by: str) -> list[Score]:
        found = scored(which.sort_values(list(by)), *by)
        return [{"names": [each[name] for name in by], **each} for each in found]

    hosts = scores(rows[rows["model"].isin(("t5", "vit"))], "model", "kind")
    return {"hosts": hosts, "offloaded": scores(rows[is_offloaded & np.isfinite(rows["predicted_s"])], "model")}


TRAINING = (
    *("cnn_resnet50", "korthikanti_table4_layer", "korthikanti_table5", "llmfoundry_a100_80gb_bf16"),
    *("llmfoundry_h100_80gb_bf16", "mbridge_dense", "mbridge_moe_and_other", "megatron_v1_2020_v100_a100"),
    *("nanotron_llama1b_h100", "torchtitan_h100_h200", "vtrain_multi_a100", "vtrain_single_a100"),
)
SHIPPED = [measurement(shipped, file=file) for file in (*(f"parallel/{each}" for each in TRAINING), ARENA, RUBICK)]
ODD_ROWS = measurement(rubicks_rows)
NO_PLAN = "no plan fits"
"""The reason that `validate` gives where the planner has no plan for what ran."""
UNSEEN = {"cnn_resnet50": "", "best_plan_iteration_time": "", "iteration_times": "model="}
"""Files of GPU types and software that no constant was fitted to, and the groups to show."""
CHOICES = ("one constant", "regret", "max regret", "banded", "refused", "failures")


def with_rank(score: Score) -> list[str]:
    return [*errors(score), number(score["spearman"], 3)]


def shipped_tables(results: Results) -> dict[str, str]:
    scores = [each for task in SHIPPED for each in results[task]["groups"]]
    timed = [each for each in scores if (each["group"], each["kind"]) == ("all", "time")]
    choices = [
        [
            each["file"],
            *with_rank(each),
            *(percent(each[name]) for name in ("baseline_mape", "regret_mean", "regret_max")),
        ]
        + [str(each.get(name, NONE)) for name in ("banded", "false_refusals", "failures")]
        for each in timed
    ]
    unseen = [
        [each["file"], each["group"], *with_rank(each)]
        for each in scores
        if each["file"] in UNSEEN and each["group"].startswith(UNSEEN[each["file"]])
    ]
    odd = {name: [[*each["names"], *errors(each)] for each in found] for name, found in results[ODD_ROWS].items()}
    return {
        "goals": table(GOAL_HEAD, shipped_goals(scores, timed), 3),
        "choices": table(("file", *ERRORS, "Spearman", *CHOICES), choices),
        "unseen": table(("file", "group", *ERRORS, "Spearman"), unseen, 2),
        "hosts": table(("model", "rows", *ERRORS), odd["hosts"], 2),
        "offloaded": table(("model", *ERRORS), odd["offloaded"]),
    }


ERROR_GOALS = (
    ("another network and precision", "iteration_times", ("model=llama7",), 0.08),
    ("another GPU type from its data sheet", "cnn_resnet50", ("gpu=v100",), 0.15),
    ("Arena's tables", "best_plan_iteration_time", ("all", "family=bert", "family=moe", "family=wide_resnet"), 0.15),
)


def shipped_goals(scores: list[Score], timed: list[Score]) -> list[list[str]]:
    """timed: the scores of whole files."""
    of_rank = partial(goal, is_least=True, form=partial(number, digits=3))
    worst = max((each for each in timed if each["regret_mean"] is not None), key=lambda each: each["regret_mean"])
    low = min((each for each in timed if each["spearman"] is not None), key=lambda each: each["spearman"])
    refused = sum(each.get("false_refusals", 0) + each.get("reasons", {}).get(NO_PLAN, 0) for each in timed)
    ran = sum(each["n"] + each["failures"] for each in timed)
    arena = ARENA.rpartition("/")[2]
    return [
        *(
            goal(what, f"{file}, {group}: mape", one(scores, file=file, group=group).get("mape"), limit)
            for what, file, groups, limit in ERROR_GOALS
            for group in groups
        ),
        of_rank("Arena's tables", f"{arena}: rank correlation", one(timed, file=arena).get("spearman"), 0.95),
        goal("regret of the plan chosen", f"the worst file's mean: {worst['file']}", worst["regret_mean"], 0.03),
        of_rank("rank correlation", f"the worst file: {low['file']}", low["spearman"], 0.85),
        goal("no row that fits is refused", f"of {ran}, refused or without a plan", refused, 0, form=str),
    ]


PLANNER_SHIPPED = Experiment(
    lambda: [*SHIPPED, ODD_ROWS], shipped_tables, needs=("data",), reads=(*CATALOG, CONSTANTS, PLANS)
)


# Memory.


def peaks(file: str) -> Result:
    """Errors of a file's peaks by group; of Megatron's tests also of the bytes between steps, and what a step adds."""
    scores = {}
    for (family, group), rows in memory.rows_of(file).groupby(["family", "group"], sort=False):
        told = rows[["peak_bytes", "between_bytes"]].to_numpy(float).T
        truth = rows[["peak_mem_bytes", "held_bytes"]].to_numpy(float).T
        scores[f"{family}{group}", "peak"] = accuracy(told[0], truth[0])
        if np.isfinite(truth).all():
            scores[f"{family}{group}", "between steps"] = accuracy(told[1], truth[1])
            scores[f"{family}{group}", "growth"] = accuracy(told[0] - told[1], truth[0] - truth[1])
    return {
        "scores": [{"file": file, "group": of, "what": what, **asdict(each)} for (of, what), each in scores.items()]
    }


PEAKS = [measurement(peaks, file=file) for file in memory.MEASURED]


def memory_tables(results: Results) -> dict[str, str]:
    scores = [each for task in PEAKS for each in results[task]["scores"] if memory.OLDER not in each["group"]]
    goals = []
    for each in scores:
        if each["what"] == "peak" and "," not in each["group"]:
            which = f"{each['file']}, {each['group']}s"
            goals.append(goal("memory, allocator's peak", f"{which}: mape", each["mape"], 0.07))
            goals.append(goal("peak not too low by over 8 %", f"{which}: bias", each["bias"], -0.08, is_least=True))
    rows = ([each["file"], f"{each['group']}: {each['what']}", *errors(each)] for each in scores)
    return {"goals": table(GOAL_HEAD, goals, 3), "scores": table(("file", "group", *ERRORS), rows, 2)}


def public() -> Result:
    """Public reports of what fitted, how full and how fast, under the stacks that they ran, scored by stack."""
    return {"groups": [each.as_json("", "") for each in _scoring.scored(memory.reports())]}


PUBLIC = measurement(public)


def public_tables(results: Results) -> dict[str, str]:
    groups = {each["group"]: each for each in results[PUBLIC]["groups"]}
    stacks = sorted({name.partition(": ")[2] for name in groups} - {"all"})
    rows = []
    for stack in ("all", *stacks):
        time, peak, verdict = (groups.get(f"{what}: {stack}") for what in ("time", "memory", "verdict"))
        cells = [f"{verdict['right']} of {verdict['n']}", str(verdict["undecided"])] if verdict else [NONE] * 2
        for each in (peak, time):
            cells += (
                [
                    *(percent(each["median"]), percent(each["bias"], sign="+")),
                    *(f"{each['in_band']} of {each['n']}", number(each["width"])),
                ]
                if each
                else [NONE] * 4
            )
        rows.append([stack, *cells])
    ends = ("median error", "bias", "in band", "ends")
    head = ("stack", "verdicts right", "open", *(f"{what}: {each}" for what in ("peak", "time") for each in ends))
    return {"public": table(head, rows)}


ASSUMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "Megatron-LM of 2021": (
        "model=gpt-1t gpu=a100-80gb gpus=3072 batch=3072 tensor=8 pipeline=64 data=6 micro_batch=1 recompute=full "
        "interleave=1 software=megatron",
        ("interleave=2", "software=megatron-v3", "network=12.5e9"),
    ),
    "176B on 384 A100": (
        "model=gpt-175b gpu=a100-80gb gpus=384 batch=2048 tensor=4 pipeline=12 data=8 micro_batch=2 recompute=full "
        "zero=1 software=megatron-deepspeed network=6.25e9",
        ("software=megatron", "network=12.5e9", "micro_batch=1"),
    ),
    "torchtitan on several nodes": (
        "model=llama-3-70b gpu=h100 gpus=128 seq_len=8192 batch=256 tensor=8 data=16 micro_batch=2 zero=3 "
        "recompute=full software=torchtitan",
        ("network=25e9", "recompute=operators", "tensor=4 data=32"),
    ),
}
"""Runs like those of families of which no row is in the data, and settings that rows of such runs may leave open."""


def assumed() -> Result:
    """How much a setting that was read wrongly would change the step time of runs like those of ASSUMED."""

    def step_s(settings: str) -> float:
        return fit_of(asked(settings.split())).step_time_s

    rows = []
    for family, (typed, changes) in ASSUMED.items():
        for change in changes:
            changed = {word.partition("=")[0]: word for word in (*typed.split(), *change.split())}
            rows.append([family, change, step_s(" ".join(changed.values())) / step_s(typed) - 1.0])
    return {"rows": rows}


OPEN = measurement(assumed)


def assumed_tables(results: Results) -> dict[str, str]:
    rows = ([family, f"`{change}`", percent(more, sign="+")] for family, change, more in results[OPEN]["rows"])
    return {"assumed": table(("runs", "if it was", "step time"), rows, 2)}


PLANNER_MEMORY = Experiment(
    lambda: [*PEAKS, PUBLIC, OPEN],
    lambda results: memory_tables(results) | public_tables(results) | assumed_tables(results),
    needs=("data",),
    reads=(*CATALOG, CONSTANTS),
)


# Collectives.


def collectives() -> Result:
    from fits import links

    return {"scores": links.scores(links.everything()[-1])}


LINKS = measurement(collectives)


def collectives_tables(results: Results) -> dict[str, str]:
    return {"scores": error_table(results[LINKS]["scores"], rows="how", GPU="gpu", link="link")}


COLLECTIVES = Experiment(lambda: [LINKS], collectives_tables, needs=("data",))


# What a few measured plans of one's own model are worth.

REFITTED = ("gemm_efficiency", "tensor_efficiency", "network_efficiency", "data_exposed")
"""Constants fitted again: of compute, and of tensor-parallel, network and exposed data-parallel communication."""
COUNTS = (0, 1, 3, 7)
DRAWS = 5


def learnt(cases: list[Case], names: tuple[str, ...], drawn: Ints) -> Floats:
    """Predicted seconds in the order of the rows, after the drawn rows were measured."""
    seconds: dict[int, float] = {}
    for name in {case.software.name for case in cases}:
        mine = [replace(case, owner="") for case in cases if case.software.name == name]
        constants = constants_for(mine[0].machine, mine[0].software)
        keep = [np.isin(case.rows, drawn) for case in mine]
        if known := sum(each.sum() for each in keep):
            shared = [replace(case, share=each.sum() / known) for case, each in zip(mine, keep, strict=True)]
            constants = _scoring.fit(shared, names, {}, {"": constants}, keep).constants[""]
        for case in mine:
            seconds |= zip(case.rows.tolist(), case.step_s(constants), strict=True)
    return np.array([seconds[row] for row in sorted(seconds)])


def learning(model: str, measured: int, draws: int, constants: tuple[str, ...]) -> Result:
    """Mean error of all plans but those drawn; and regret, where drawn plans count with the measured time."""
    mine = read(data_file(f"{RUBICK}.csv")).only(model, None)
    cases = [each for each in mine.cases() if not each.software.run.offload]
    at = sorted({row for case in cases for row in case.rows.tolist()})
    time_s = np.array([mine.rows[row].iter_time_s for row in at])
    settings = [mine.rows[row].settings[0] for row in at]
    keys, plans = [(each.plan.gpus, str(each.machine)) for each in settings], [each.plan for each in settings]
    errors, losses = [], []
    for draw in range(draws if measured else 1):
        random = np.random.default_rng((draw, measured))
        drawn = np.isin(at, random.choice(at, min(measured, len(at) // 2), replace=False))
        seconds = learnt(cases, constants, np.array(at)[drawn])
        errors += np.abs(seconds / time_s - 1)[~drawn].tolist()
        losses += _scoring.regrets(np.where(drawn, time_s, seconds).tolist(), time_s.tolist(), keys, plans)
    return {"plans": len(at), "error": float(np.mean(errors)), "regret": float(np.mean(losses)) if losses else None}


LEARNT = {
    model: [measurement(learning, model=model, measured=count, draws=DRAWS, constants=REFITTED) for count in COUNTS]
    for model in ("bert", "gpt2", "llama30", "llama7", "roberta", "t5", "vit")
}


def learning_tables(results: Results) -> dict[str, str]:
    rows = []
    for model, tasks in LEARNT.items():
        cells = (percent(results[task][name]) for task in tasks for name in ("error", "regret"))
        rows.append([model, str(results[tasks[0]]["plans"]), *cells])
    names = (f"{what} after {count}" for count in COUNTS for what in ("error", "regret"))
    return {"plans": table(("model", "plans", *names), rows)}


LEARNING = Experiment(
    lambda: [task for tasks in LEARNT.values() for task in tasks],
    learning_tables,
    needs=("data",),
    reads=(*CATALOG, CONSTANTS),
)
