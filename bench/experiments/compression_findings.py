"""When compressing gradients pays, by bandwidth, under every way of choosing: docs/compression_findings.md.

Seeds draw jobs of their own from Philly's statistics, alike for all ways: they are independent workloads.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import numpy as np
from runner.experiment import Experiment, Measurement, Result, Results, compose, measurement
from runner.tables import number, table

from synergy_core.planner.plan import NO_COMPRESSOR, Plan
from synergy_runs.facts import compressed_gpu_s_by_model
from synergy_runs.metrics import job_table
from synergy_runs.numbers import Means, Ratio, ratio_of_means
from synergy_sim.prepare import prepared_runs
from synergy_sim.simulate import simulate
from synergy_sim.truth import GBPS as BITS_PER_S
from synergy_sim.truth import Truth
from synergy_sim.truth.application import Application, DataParallelApplication
from synergy_sim.truth.planned import PlannedApplication

MIX = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
"""The models of `trace.models=mix`."""
STUDIED = ("cifar10", "imagenet")
"""Models for which the page claims that they stay uncompressed."""
WAYS: dict[str, tuple[str, str]] = {
    "none": ("none", "powersgd-4"),
    "fixed batch": ("uniform", "none"),
    "uniform": ("uniform", "powersgd-4"),
    "lgreco": ("lgreco", "powersgd-4"),
    "naive": ("naive", "powersgd-4"),
    "naive q4": ("naive", "q4"),
    "coadaptive": ("coadaptive", "powersgd-4"),
}
"""`compression=` and `compressor=` by way of choosing."""
NAIVE = ("naive", "naive q4")
BELIEVED = ", believed"
"""Ends the name of a naive way in the world that it believes in."""
FAST_GBPS, SLOW_GBPS = 100.0, 10.0
GPU_TYPE, ON_NODES = "a100", (4, 4)
"""What the job runs on that stands alone."""


def outcome(compression: str, compressor: str, gbps: float, seed: int, models: str, is_free: bool) -> Result:
    """Mean JCT of one workload, and GPU-seconds by model and compressor.

    is_free: in the world that `naive` believes in, where a compressed gradient is worth as much as an uncompressed one.
    """
    own = [f"compression={compression}", f"compressor={compressor}", f"cluster.network_gbps={gbps}"]
    settings, _ = compose(["experiment=compression", *own, f"seed={seed}", f"trace.models={models}"])
    (what,) = prepared_runs(settings)
    with ExitStack() as stack:
        for kind in (DataParallelApplication, PlannedApplication) if is_free else ():
            stack.enter_context(patch.object(kind, "compression", Application.compression))
        run = simulate(what.workload, what.cluster, what.policy, what.execution, truth=what.truth, seed=seed)
    gpu_s = [[*key, value] for key, value in compressed_gpu_s_by_model(run).items()]
    return {"jct_s": float(np.nanmean(job_table(run).jct_s)), "jobs": len(run.workload), "gpu_s": gpu_s}


def one_job(compressor: str, gbps: float) -> Result:
    """By model: goodput of one job halfway through, believed and got by `naive`, ÷ the best without compression."""
    truth = Truth(None, compression="naive", compressor=compressor, network_bytes_per_s=gbps * BITS_PER_S / 8)
    found = {}
    for model in MIX:
        app = truth.application(model)
        offered = [(_goodput(app, plan, app.gains(plan.global_batch)), plan) for plan in _plans(app, app.exchange.only)]
        believed, chosen = max(offered, key=lambda pair: pair[0])
        alone = max(_goodput(app, plan, app.gains_under(plan)) for plan in _plans(app, NO_COMPRESSOR))
        found[model] = [believed / alone, _goodput(app, chosen, app.gains_under(chosen)) / alone]
    return found


def _plans(app: DataParallelApplication, compressor: str) -> list[Plan]:
    """Plans of one job on ON_NODES, of every batch that fits."""
    replicas, (least, most) = sum(ON_NODES), app.local_batches(GPU_TYPE, ON_NODES)
    most = min(most, app.max_batch // replicas)
    sizes = sorted({round(least * (most / least) ** (step / 30)) for step in range(31)})
    return [Plan(data=replicas, micro_batch=each, compressor=compressor) for each in sizes]


def _goodput(app: DataParallelApplication, plan: Plan, gains: Sequence[float]) -> float:
    """Iterations at the initial batch per second, halfway through."""
    return gains[len(gains) // 2] / app.iteration_s(GPU_TYPE, ON_NODES, plan)


Found = dict[float, dict[str, list[Result]]]
"""Outcomes of all workloads by bandwidth and way."""
Runs = dict[tuple[float, str, int], Measurement]
"""Tasks by bandwidth, way and seed; naive ways also in the world that they believe in."""


def _runs(rates: Sequence[float], ways: Sequence[str], seeds: int, models: str) -> Runs:
    chosen = {way: (*WAYS[way], False) for way in ways}
    chosen |= {way + BELIEVED: (*WAYS[way], True) for way in NAIVE}
    return {
        (gbps, way, seed): measurement(
            outcome, policies=("synergy",), compression=compression, compressor=compressor, gbps=gbps, seed=seed,
            models=models, is_free=is_free,
        )
        for gbps in rates for way, (compression, compressor, is_free) in chosen.items() for seed in range(seeds)
    }  # fmt: skip


def _ratio(ways: Mapping[str, list[Result]], way: str, beside: str = "none") -> Ratio:
    """Of mean JCTs, over workloads."""
    pairs = zip(ways[way], ways[beside], strict=True)
    return ratio_of_means([Means(mine["jct_s"], other["jct_s"], 0.0) for mine, other in pairs], limits=False)


def _with_interval(ratio: Ratio) -> str:
    interval = f" [{ratio.low:.3f}, {ratio.high:.3f}]" if np.isfinite(ratio.low) else ""
    return f"{ratio.value:.3f}{interval}"


def _gpu_s(outcomes: Sequence[Result], models: Sequence[str] = ()) -> Counter[str]:
    """GPU-seconds of these models, or of all, by compressor."""
    spent: Counter[str] = Counter()
    for model, compressor, gpu_s in (row for each in outcomes for row in each["gpu_s"]):
        spent[compressor] += gpu_s * (model in models or not models)
    return spent


def _shares(spent: Counter[str]) -> str:
    total = sum(spent.values())
    return ", ".join(f"{name} {gpu_s / total:.0%}" for name, gpu_s in spent.most_common() if gpu_s >= 0.01 * total)


Claim = tuple[str, dict[float, float], Callable[[float, float], bool], float]
"""What is claimed, a figure for each bandwidth, and the relation to a limit that each must have."""
SIGNS = {operator.ge: "≥", operator.gt: ">", operator.le: "≤", operator.lt: "<"}


def _claims(claims: Sequence[Claim]) -> str:
    """A line per claim, with the figures that decide it."""
    lines = []
    for claim, figures, relation, limit in claims:
        shown = "; ".join(f"{gbps:g} Gb/s: {value:.3f}" for gbps, value in figures.items())
        holds = all(relation(value, limit) for value in figures.values())
        lines.append([f"{claim} {SIGNS[relation]} {limit:g}", shown, "yes" if holds else "**no**"])
    return table(["claim", "here", "holds"], lines, 3)


def _tables(runs: Runs, ways: Sequence[str], studied: Sequence[str], results: Results) -> dict[str, str]:
    """studied: models that are claimed to stay uncompressed; () for all, without tables by model."""
    found: Found = {}
    for (gbps, way, _), run in runs.items():
        found.setdefault(gbps, {}).setdefault(way, []).append(results[run])
    fast = {gbps: each for gbps, each in found.items() if gbps >= FAST_GBPS}
    slow = {gbps: each for gbps, each in found.items() if gbps <= SLOW_GBPS}

    def values(among: Found, way: str, beside: str = "none") -> dict[float, float]:
        return {gbps: _ratio(each, way, beside).value for gbps, each in among.items()}

    from_fast = f"from {FAST_GBPS:g} Gb/s on"
    theirs: list[Claim] = [
        (f"L-GreCo does not pay {from_fast}: `lgreco` ÷ `none`", values(fast, "lgreco"), operator.ge, 1.0),
        (f"nor with adapted batches {from_fast}: `naive` ÷ `none`", values(fast, "naive"), operator.ge, 1.0),
    ]
    unadapted = values(fast, "lgreco", "fixed batch")
    theirs.append((f"nor where nothing adapts {from_fast}: `lgreco` ÷ `fixed batch`", unadapted, operator.ge, 1.0))
    for way in NAIVE:
        claim = f"`{way}` gives less than it promises: mean JCT got ÷ believed"
        theirs.append((claim, values(found, way, way + BELIEVED), operator.gt, 1.0))
    for way in NAIVE if studied else ():
        most = {gbps: max(got / believed for believed, got in results[ALONE[way, gbps]].values()) for gbps in found}
        claim = f"`{way}` promises one job alone more than it gives: goodput got ÷ believed, greatest of the models,"
        theirs.append((claim, most, operator.lt, 1.0))
    spent = {gbps: _gpu_s(each["coadaptive"], studied) for gbps, each in fast.items()}
    uncompressed = {gbps: each[NO_COMPRESSOR] / sum(each.values()) for gbps, each in spent.items()}
    rivals = [way for way in ways if way != "coadaptive"]
    behind = {
        gbps: _mean_s(each, "coadaptive") / min(_mean_s(each, way) for way in rivals) for gbps, each in found.items()
    }
    named = " and ".join(studied) or "all models"
    ours: list[Claim] = [
        (f"{from_fast}, `coadaptive` leaves {named} uncompressed: share of GPU time", uncompressed, operator.ge, 0.95),
        ("`naive` is no better than `none`: `naive` ÷ `none`", values(found, "naive"), operator.ge, 1.0),
        ("`naive q4` is no better than `none`: `naive q4` ÷ `none`", values(found, "naive q4"), operator.ge, 1.0),
        ("`coadaptive` is as good as the best of the others: ratio of mean JCTs", behind, operator.le, 1.01),
        (f"up to {SLOW_GBPS:g} Gb/s, `coadaptive` ÷ `none`", values(slow, "coadaptive"), operator.le, 0.85),
    ]
    others = [way for way in ways if way != "none"]
    promises = []
    for gbps, each in found.items():
        promises.append([f"{gbps:g}"])
        for way in NAIVE:
            promises[-1] += [number(_ratio(each, one).value, 3) for one in (way + BELIEVED, way)]
            promises[-1].append(_with_interval(_ratio(each, way, way + BELIEVED)))
    jcts = [
        [f"{gbps:g}", number(_mean_s(each, "none") / 3600), *(_with_interval(_ratio(each, way)) for way in others)]
        for gbps, each in found.items()
    ]
    groups = {model: (model,) for model in MIX} if studied else {"shares of GPU time": ()}
    chosen = [
        [f"{gbps:g}", *(_shares(_gpu_s(each["coadaptive"], models)) for models in groups.values())]
        for gbps, each in found.items()
    ]
    alone = [
        [f"`{way}`", f"{gbps:g}", *(f"{believed:.2f} → {got:.2f}" for believed, got in results[task].values())]
        for (way, gbps), task in ALONE.items()
        if studied
    ]
    said = [f"`{way}`: {what}" for way in NAIVE for what in ("believed", "got", "got ÷ believed")]
    return {
        "jobs": f"{sum(each['jobs'] for each in next(iter(found.values()))['none'])}",
        "claims": _claims(theirs),
        "ours": _claims(ours),
        "promises": table(["Gb/s", *said], promises),
        "alone": table(["way", "Gb/s", *MIX], alone, 2),
        "jct": table(["Gb/s", "none, h", *(f"{way} ÷ none" for way in others)], jcts),
        "compressors": table(["Gb/s", *groups], chosen),
    }


def _mean_s(ways: Mapping[str, list[Result]], way: str) -> float:
    return float(np.mean([each["jct_s"] for each in ways[way]]))


RUNS = _runs((1.0, 10.0, 100.0, 400.0), tuple(WAYS), 4, "mix")
ALONE = {
    (way, gbps): measurement(one_job, compressor=WAYS[way][1], gbps=gbps)
    for gbps in dict.fromkeys(gbps for gbps, *_ in RUNS)
    for way in NAIVE
}


READS = ("conf/experiment/compression.yaml", "traces/philly.json", "synergy_core/catalog/gpus")
COMPRESSION_FINDINGS = Experiment(
    lambda: [*RUNS.values(), *ALONE.values()],
    partial(_tables, RUNS, tuple(WAYS), STUDIED),
    reads=(*READS, "synergy_core/catalog/models"),
)

PLANNED_WAYS = tuple(way for way in WAYS if way != "uniform")
PLANNED_RUNS = _runs((10.0, 100.0), PLANNED_WAYS, 1, "llm")
COMPRESSION_PLANS = Experiment(
    lambda: list(PLANNED_RUNS.values()),
    partial(_tables, PLANNED_RUNS, PLANNED_WAYS, ()),
    reads=(*READS, "synergy_core/catalog/architectures", "plans"),
)
