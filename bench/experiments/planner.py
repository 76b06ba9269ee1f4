"""How far the planner is from what was measured, in sample and held out: docs/accuracy_planner.md, docs/planner.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from fits import memory
from runner.dependencies import PLANS
from runner.experiment import Experiment, Result, Results, data_file, measurement
from runner.tables import ERRORS, GOAL_HEAD, errors, goal, met, number, percent, table

from synergy_core.commands import _scoring
from synergy_core.commands.measurements import read
from synergy_core.goodput.calibration import accuracy

Score = dict[str, Any]
CATALOG = tuple(f"synergy_core/catalog/{name}" for name in ("architectures", "gpus", "links", "nodes", "software"))
CONSTANTS = "synergy_core/catalog/constants"
RUBICK = "rubick/iteration_times"
ARENA = "arena/best_plan_iteration_time"


def found_in(scores: Iterable[Score], **wanted: Any) -> Score:
    """The first that has all of these; nothing if none has."""
    return next((each for each in scores if all(each.get(name) == value for name, value in wanted.items())), {})


# Fits, what they did not see, and bands made without a row's group.


def fits() -> Result:
    """Scores of each fit and file, by what was left out; coverage of bands; parts of errors that plans share."""
    from fits import bands, planner

    found = planner.everything()
    scores = [
        {"fit": fit, "file": file, "rows": how, **asdict(score)} for (fit, file, how), score in found.scores.items()
    ]
    coverage = bands.coverage(found.rows, found.memory)
    return {"scores": scores, "bands": coverage, "parts": bands.parts_of_errors(found.rows)}


FITS = measurement(fits)
HOW = {
    "family out": "model out",
    "largest out": "largest out",
    "file out": "file out",
    "other models": "other models",
}
"""What a fit did not see, as the fit names it and as the page does."""
BANDS = {
    "family out": "model out",
    "file out": "file out",
    "one node only": "more GPUs",
    "software out": "software out",
    "GPU type out": "GPU type out",
}
HELD_OUT_GOALS: tuple[tuple[str, str, str, dict[str, float]], ...] = (
    ("multi-node A100, 3D", "vtrain_multi_a100", "file out", {"mape": 0.06, "median": 0.035, "p90": 0.13}),
    ("large Megatron runs", "korthikanti_table5", "file out", {"mape": 0.05, "max": 0.10}),
    ("large Megatron runs", "megatron_v1_2020_v100_a100", "file out", {"mape": 0.05, "max": 0.10}),
    ("single-node small models", "vtrain_single_a100", "family out", {"mape": 0.10}),
    ("single-node small models", "vtrain_single_a100", "file out", {"mape": 0.10}),
    ("FSDP, more GPUs or other memory", "llmfoundry_a100_80gb_bf16", "family out", {"mape": 0.06}),
    ("FSDP, more GPUs or other memory", "llmfoundry_h100_80gb_bf16", "family out", {"mape": 0.06}),
)
"""Of each goal: its name, the file, the rows that the fit did not see, and the largest allowed errors."""


def fit_tables(results: Results) -> dict[str, str]:
    scores, bands, parts = (results[FITS][name] for name in ("scores", "bands", "parts"))

    def held_out(file: str, how: str) -> str:
        found = found_in(scores, file=file, rows=how)
        return f"{percent(found['mape'])} ({percent(found['p90'])}), n = {found['n']}" if found else "–"

    def covered(file: str, kind: str) -> str:
        one = found_in(bands, file=file, kind=kind)
        return f"{percent(one['inside'], 0)} of {one['n']} ({one['low']:.2f} to {one['high']:.2f})" if one else "–"

    fitted = [
        [each["fit"], each["file"], *errors(each), *(held_out(each["file"], how) for how in HOW)]
        for each in scores
        if each["rows"] == "in sample"
    ]
    files = dict.fromkeys(each["file"] for each in bands if each["kind"] in BANDS)
    by_file = [[name, *(covered(name, kind) for kind in BANDS)] for name in files]
    families = [each for each in bands if each["file"].endswith(" models")]
    shares = [
        [each["file"], str(each["n"]), percent(each["inside"], 0), percent(each["alike"], 0), number(each["width"])]
        for each in families
    ]
    in_memory = [
        [each["file"], each["kind"].removeprefix("memory, "), covered(each["file"], each["kind"])]
        for each in bands
        if each["kind"] not in BANDS
    ]
    goals = [
        goal(what, f"{file}, {HOW[how]}: {name}", found_in(scores, file=file, rows=how).get(name), limit)
        for what, file, how, limits in HELD_OUT_GOALS
        for name, limit in limits.items()
    ]
    for each in families:
        inside = f"{percent(each['inside'], 0)} of {each['n']}"
        holds = met(0.85 <= round(each["inside"], 2) <= 0.95)
        goals.append(["bands hold 85 to 95 %", f"{each['file']}, model out", inside, holds])
    return {
        "goals": table(GOAL_HEAD, goals, 3),
        "errors": table(("fit", "file", *ERRORS, *HOW.values()), fitted, 2),
        "bands": table(("file or family", *BANDS.values()), by_file),
        "families": table(("family", "rows", "inside", "inside, each model alike", "width"), shares),
        "memory": table(("file", "family", "inside"), in_memory, 2),
        "parts": f"{number(parts[0])} and {number(parts[1])} ({parts[2]} models)",
    }


PLANNER_FITS = Experiment(lambda: [FITS], fit_tables, needs=("data",), reads=(*CATALOG, PLANS))


# Step times as shipped, and the choice of plans.


def shipped(file: str) -> Result:
    """The groups that `python -m synergy_core validate` scores."""
    scored = _scoring.scored(read(data_file(f"{file}.csv")))
    return {"groups": [each.as_json(file.rpartition("/")[2], "") for each in scored]}


def rubicks_rows() -> Result:
    """Errors of Rubick's t5 and vit by kind of row, as the page describes them, and of rows with offloading."""
    from synergy_core.commands.measurements._table import read_table

    path = data_file(f"{RUBICK}.csv")
    rows = _scoring.predicted(read(path))  # type: ignore[arg-type]
    cells = {row.line: row.cells for row in read_table(path).rows}
    rows["plan"] = [cells[line]["plan"] for line in rows["line"]]
    offloaded = rows[(rows["plan"] == "zero-offload") & np.isfinite(rows["time_s"])]

    def kind(line: int) -> str:
        nodes, plan = cells[line]["gpus_per_node_used"], cells[line]["plan"]
        is_odd = plan != "zero-offload" and len(nodes) > 1 and any(int(gpus) % 2 for gpus in nodes)
        return "3d" if plan == "3d" else "odd nodes" if is_odd else "the others"

    def scores(which: Any, *names: str) -> list[Score]:
        return [
            {"names": key, **asdict(accuracy(*members[["time_s", "iter_time_s"]].to_numpy().T))}
            for key, members in which.groupby(list(names))
        ]

    rows["kind"] = rows["line"].map(kind)
    hosts = scores(rows[rows["model"].isin(("t5", "vit"))], "model", "kind")
    return {"hosts": hosts, "offloaded": scores(offloaded, "model")}


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


def shipped_tables(results: Results) -> dict[str, str]:
    scores = [each for task in SHIPPED for each in results[task]["groups"]]
    timed = [each for each in scores if (each["group"], each["kind"]) == ("all", "time")]
    choices = [
        [each["file"], *errors(each), number(each["spearman"], 3)]
        + [percent(each[name]) for name in ("baseline_mape", "regret_mean", "regret_max")]
        + [str(each.get(name, "–")) for name in ("banded", "false_refusals", "failures")]
        for each in timed
    ]
    unseen = [
        [each["file"], each["group"], *errors(each), number(each["spearman"], 3)]
        for each in scores
        if each["file"] in UNSEEN and each["group"].startswith(UNSEEN[each["file"]])
    ]
    odd = {name: [[*each["names"], *errors(each)] for each in scores] for name, scores in results[ODD_ROWS].items()}
    return {
        "goals": table(GOAL_HEAD, shipped_goals(scores, timed), 3),
        "choices": table(("file", *ERRORS, "Spearman", *CHOICES), choices),
        "unseen": table(("file", "group", *ERRORS, "Spearman"), unseen, 2),
        "hosts": table(("model", "rows", *ERRORS), odd["hosts"], 2),
        "offloaded": table(("model", *ERRORS), odd["offloaded"]),
    }


def shipped_goals(scores: list[Score], timed: list[Score]) -> list[list[str]]:
    """timed: the scores of whole files."""

    def error(what: str, file: str, group: str, limit: float) -> list[str]:
        return goal(what, f"{file}, {group}: mape", found_in(scores, file=file, group=group).get("mape"), limit)

    rank = partial(number, digits=3)
    regrets = [each for each in timed if each["regret_mean"] is not None]
    worst = max(regrets, key=lambda each: each["regret_mean"])
    low = min((each for each in timed if each["spearman"] is not None), key=lambda each: each["spearman"])
    arena = "best_plan_iteration_time"
    refused = sum(each.get("false_refusals", 0) + each.get("reasons", {}).get(NO_PLAN, 0) for each in timed)
    ran = sum(each["n"] + each["failures"] for each in timed)
    return [
        error("another network and precision", "iteration_times", "model=llama7", 0.08),
        error("another GPU type from its data sheet", "cnn_resnet50", "gpu=v100", 0.15),
        *(
            error("Arena's tables", arena, group, 0.15)
            for group in ("all", "family=bert", "family=moe", "family=wide_resnet")
        ),
        goal("Arena's tables", f"{arena}: rank correlation", found_in(timed, file=arena).get("spearman"), 0.95,
             is_least=True, form=rank),
        goal("regret of the plan chosen", f"the worst file's mean: {worst['file']}", worst["regret_mean"], 0.03),
        goal("rank correlation", f"the worst file: {low['file']}", low["spearman"], 0.85, is_least=True, form=rank),
        goal("no row that fits is refused", f"of {ran}, refused or without a plan", refused, 0, form=str),
    ]  # fmt: skip


PLANNER_SHIPPED = Experiment(
    lambda: [*SHIPPED, ODD_ROWS], shipped_tables, needs=("data",), reads=(*CATALOG, CONSTANTS, PLANS)
)


# Memory.


def peaks(file: str) -> Result:
    """Errors of a file's peaks by group; of Megatron's tests also of the bytes between steps, and what a step adds."""
    result = []
    for (family, group), rows in memory.rows_of(file).groupby(["family", "group"], sort=False):
        pairs = {"peak": (rows["peak_bytes"], rows["peak_mem_bytes"])}
        if np.isfinite(rows["held_bytes"]).all():
            told, truth = rows["between_bytes"], rows["held_bytes"]
            growth = rows["peak_bytes"] - told, rows["peak_mem_bytes"] - truth
            pairs |= {"between steps": (told, truth), "growth": growth}
        for what, (told, truth) in pairs.items():
            score = asdict(accuracy(np.asarray(told, float), np.asarray(truth, float)))
            result.append({"file": file, "group": f"{family}{group}", "what": what, **score})
    return {"scores": result}


PEAKS = [measurement(peaks, file=file) for file in memory.MEASURED]


def memory_tables(results: Results) -> dict[str, str]:
    scores = [each for task in PEAKS for each in results[task]["scores"] if memory.OLDER not in each["group"]]
    plain = [each for each in scores if each["what"] == "peak" and "," not in each["group"]]
    goals = []
    for each in plain:
        which = f"{each['file']}, {each['group']}s"
        goals.append(goal("memory, allocator's peak", f"{which}: mape", each["mape"], 0.07))
        goals.append(goal("peak not too low by over 8 %", f"{which}: bias", each["bias"], -0.08, is_least=True))
    return {
        "goals": table(GOAL_HEAD, goals, 3),
        "scores": table(
            ("file", "group", *ERRORS),
            ([each["file"], f"{each['group']}: {each['what']}", *errors(each)] for each in scores),
            2,
        ),
    }


PLANNER_MEMORY = Experiment(lambda: PEAKS, memory_tables, needs=("data",), reads=CATALOG)


# Collectives.


def collectives() -> Result:
    from fits import links

    *_, told = links.everything()
    found = links.scores(told)
    return {
        "scores": [{"how": how, "gpu": gpu, "link": kind, **asdict(each)} for (how, gpu, kind), each in found.items()]
    }


LINKS = measurement(collectives)


def collectives_tables(results: Results) -> dict[str, str]:
    rows = ([each["how"], each["gpu"], each["link"], *errors(each)] for each in results[LINKS]["scores"])
    return {"scores": table(("rows", "GPU", "link", *ERRORS), rows, 3)}


COLLECTIVES = Experiment(lambda: [LINKS], collectives_tables, needs=("data",))


# What a few measured plans of one's own model are worth.

REFITTED = ("gemm_efficiency", "tensor_efficiency", "network_efficiency", "data_exposed")
"""Of computing, and of tensor-parallel, network and hidden data-parallel communication."""
COUNTS = (0, 1, 3, 7)
DRAWS = 5


def learnt(cases: list[Any], names: tuple[str, ...], drawn: set[int]) -> dict[int, float]:
    """Predicted seconds by row, after the drawn rows were measured."""
    from synergy_core.planner.machine import constants_for

    seconds: dict[int, float] = {}
    for name in {case.software.name for case in cases}:
        mine = [replace(case, owner="") for case in cases if case.software.name == name]
        constants = constants_for(mine[0].machine, mine[0].software)
        keep = [np.isin(case.rows, list(drawn)) for case in mine]
        if known := sum(int(each.sum()) for each in keep):
            shared = [replace(case, share=each.sum() / known) for case, each in zip(mine, keep, strict=True)]
            constants = _scoring.fit(shared, names, {}, {"": constants}, keep).constants[""]
        for case in mine:
            seconds.update(zip(case.rows.tolist(), case.step_s(constants).tolist(), strict=True))
    return seconds


def learning(model: str, measured: int, draws: int, constants: tuple[str, ...]) -> Result:
    """Mean error of all plans but those drawn; and regret, where drawn plans count with the measured time."""
    mine = read(data_file(f"{RUBICK}.csv")).only(model, None)
    cases = [each for each in mine.cases() if not each.software.offload]
    at = sorted({row for case in cases for row in case.rows.tolist()})
    time_s = {row: mine.rows[row].iter_time_s for row in at}
    settings = [mine.rows[row].settings[0] for row in at]
    keys = [(setting.plan.gpus, str(setting.machine)) for setting in settings]
    errors, losses = [], []
    for draw in range(draws if measured else 1):
        random = np.random.default_rng((draw, measured))
        drawn = set(random.choice(at, min(measured, len(at) // 2), replace=False).tolist())
        seconds = learnt(cases, constants, drawn)
        errors += [abs(seconds[row] / time_s[row] - 1) for row in at if row not in drawn]
        believed = [time_s[row] if row in drawn else seconds[row] for row in at]
        losses += _scoring.regrets(believed, list(time_s.values()), keys, [each.plan for each in settings])
    return {"plans": len(at), "error": float(np.mean(errors)), "regret": float(np.mean(losses)) if losses else None}


LEARNT = {
    (model, count): measurement(learning, model=model, measured=count, draws=DRAWS, constants=REFITTED)
    for model in ("bert", "gpt2", "llama30", "llama7", "roberta", "t5", "vit")
    for count in COUNTS
}


def learning_tables(results: Results) -> dict[str, str]:
    rows = []
    for model in dict.fromkeys(model for model, _ in LEARNT):
        found = [results[LEARNT[model, count]] for count in COUNTS]
        cells = (percent(each[name]) for each in found for name in ("error", "regret"))
        rows.append([model, str(found[0]["plans"]), *cells])
    names = (f"{what} after {count}" for count in COUNTS for what in ("error", "regret"))
    return {"plans": table(("model", "plans", *names), rows)}


LEARNING = Experiment(lambda: list(LEARNT.values()), learning_tables, needs=("data",), reads=(*CATALOG, CONSTANTS))
