"""Finds when compressing gradients pays, by bandwidth and way of choosing compressors: docs/compression.md.

Each seed draws its own jobs from Philly's statistics, alike for all ways of choosing, so seeds are independent.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
from runner.experiment import Experiment, Measurement, Result, Results, compose, measurement
from runner.tables import number, table

from synergy_core.performance.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.units import HOUR_S
from synergy_runs.outputs.facts import compressed_gpu_s_by_model
from synergy_runs.outputs.metrics import job_table
from synergy_runs.outputs.numbers import Means, Ratio, ratio_of_means, ratio_text
from synergy_sim.prepare import prepared_runs
from synergy_sim.simulate import simulate
from synergy_sim.truth import GBPS as BITS_PER_S
from synergy_sim.truth import Truth
from synergy_sim.truth.application import Application, DataParallelApplication

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
"""Suffix of a naive way's name when it runs in the world that it assumes."""
FAST_GBPS, SLOW_GBPS = 100.0, 10.0
GPU_TYPE, ON_NODES = "a100", (4, 4)
"""GPUs of the job that runs alone."""


def outcome(compression: str, compressor: str, gbps: float, seed: int, models: str, is_free: bool) -> Result:
    """Simulates one workload; GPU-seconds are by model and compressor. is_free: compression costs no progress."""
    own = [f"compression={compression}", f"compressor={compressor}", f"cluster.network_gbps={gbps}"]
    settings, _ = compose(["experiment=compression", *own, f"seed={seed}", f"trace.models={models}"])
    (what,) = prepared_runs(settings)
    with patch.object(Application, "compression", lambda *_: None) if is_free else nullcontext():
        run = simulate(what.workload, what.cluster, what.policy, what.execution, truth=what.truth, seed=seed)
    gpu_s = [[*key, value] for key, value in compressed_gpu_s_by_model(run).items()]
    return {"jct_s": float(np.nanmean(job_table(run).jct_s)), "jobs": len(run.workload), "gpu_s": gpu_s}


def believed(**arguments: Any) -> Result:
    """Simulates the world that `naive` believes in, where a compressed gradient is worth as much as another."""
    return outcome(**arguments, is_free=True)


def one_job(compressor: str, gbps: float) -> Result:
    """Computes what `naive` believes and gets by model: goodput halfway through ÷ the best without compression."""
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
    """Lists plans of one job on ON_NODES, from the smallest batch to the largest."""
    replicas, (least, most) = sum(ON_NODES), app.local_batches(GPU_TYPE, ON_NODES)
    most = min(most, app.max_batch // replicas)
    sizes = np.unique(np.geomspace(least, most, 31).round().astype(int)).tolist()
    return [Plan(data=replicas, micro_batch=each, compressor=compressor) for each in sizes]


def _goodput(app: DataParallelApplication, plan: Plan, gains: Sequence[float]) -> float:
    """Iterations at the initial batch per second, halfway through."""
    return gains[len(gains) // 2] / app.iteration_s(GPU_TYPE, ON_NODES, plan)


Runs = dict[float, dict[str, list[Measurement]]]
"""One task per seed, by bandwidth and way of choosing; naive ways also run in the world that they assume."""
Found = dict[float, dict[str, list[Result]]]
"""The results of these tasks."""


def _runs(rates: Sequence[float], ways: Sequence[str], seeds: int, models: str) -> Runs:
    def each_seed(gbps: float, way: str, function: Callable[..., Result], **more: bool) -> list[Measurement]:
        given = {"compression": WAYS[way][0], "compressor": WAYS[way][1], "gbps": gbps}
        return [
            measurement(function, policies=("synergy",), **given, seed=seed, models=models, **more)
            for seed in range(seeds)
        ]

    return {
        gbps: {way: each_seed(gbps, way, outcome, is_free=False) for way in ways}
        | {way + BELIEVED: each_seed(gbps, way, believed) for way in NAIVE}
        for gbps in rates
    }


def _all(runs: Runs) -> list[Measurement]:
    return [run for ways in runs.values() for seeds in ways.values() for run in seeds]


def _ratio(ways: Mapping[str, list[Result]], way: str, beside: str = "none") -> Ratio:
    """Ratio of mean JCTs over workloads."""
    pairs = zip(ways[way], ways[beside], strict=True)
    return ratio_of_means([Means(mine["jct_s"], other["jct_s"], 0.0) for mine, other in pairs], limits=False)


def _shares(outcomes: Sequence[Result], models: Sequence[str] = ()) -> dict[str, float]:
    """Shares of the GPU time of these models, or of all, by compressor; the largest first."""
    spent: Counter[str] = Counter()
    for model, compressor, gpu_s in (row for each in outcomes for row in each["gpu_s"]):
        spent[compressor] += gpu_s * (model in models or not models)
    total = spent.total() or math.nan
    return {compressor: gpu_s / total for compressor, gpu_s in spent.most_common()}


HOLDS = {"≥": operator.ge, ">": operator.gt, "≤": operator.le, "<": operator.lt}
Claim = tuple[str, dict[float, float], str, float]
"""A claim's text, a figure for each bandwidth, and the relation to a limit that each figure must have."""


def _claims(claims: Sequence[Claim]) -> str:
    """Makes a table with a row per claim and the figures that decide it."""
    rows = []
    for claim, figures, relation, limit in claims:
        shown = "; ".join(f"{gbps:g} Gb/s: {value:.3f}" for gbps, value in figures.items())
        holds = all(HOLDS[relation](value, limit) for value in figures.values())
        rows.append([f"{claim} {relation} {limit:g}", shown, "yes" if holds else "**no**"])
    return table(["claim", "here", "holds"], rows, 3)


def _tables(runs: Runs, results: Results, studied: Sequence[str] = ()) -> dict[str, str]:
    """studied: models of `MIX` that are claimed to stay uncompressed; none if the runs have other models."""
    found: Found = {
        gbps: {way: [results[run] for run in seeds] for way, seeds in ways.items()} for gbps, ways in runs.items()
    }
    ways = [way for way in next(iter(found.values())) if not way.endswith(BELIEVED)]
    fast = {gbps: each for gbps, each in found.items() if gbps >= FAST_GBPS}
    slow = {gbps: each for gbps, each in found.items() if gbps <= SLOW_GBPS}
    from_fast, named = f"from {FAST_GBPS:g} Gb/s on", " and ".join(studied) or "all models"

    def ratios(way: str, beside: str = "none", among: Found = found) -> dict[float, float]:
        return {gbps: _ratio(each, way, beside).value for gbps, each in among.items()}

    def kept(way: str) -> dict[float, float]:
        """By bandwidth, the largest fraction of its predicted goodput that any model reached when running alone."""
        return {gbps: max(got / believed for believed, got in results[ALONE[way, gbps]].values()) for gbps in found}

    theirs: list[Claim] = [
        (f"L-GreCo does not pay {from_fast}: `lgreco` ÷ `none`", ratios("lgreco", among=fast), "≥", 1.0),
        (f"nor with adapted batches {from_fast}: `naive` ÷ `none`", ratios("naive", among=fast), "≥", 1.0),
        (f"nor where nothing adapts {from_fast}: `lgreco` ÷ `fixed batch`", ratios("lgreco", "fixed batch", fast),
         "≥", 1.0),
        *((f"`{way}` gives less than it promises: mean JCT got ÷ believed", ratios(way, way + BELIEVED), ">", 1.0)
          for way in NAIVE),
        *((f"`{way}` promises one job alone more than it gives: goodput got ÷ believed, greatest of the models,",
           kept(way), "<", 1.0) for way in NAIVE if studied),
    ]  # fmt: skip
    uncompressed = {gbps: _shares(each["coadaptive"], studied).get(NO_COMPRESSOR, 0.0) for gbps, each in fast.items()}
    behind = {
        gbps: max(_ratio(each, "coadaptive", way).value for way in ways if way != "coadaptive")
        for gbps, each in found.items()
    }
    ours: list[Claim] = [
        (f"{from_fast}, `coadaptive` leaves {named} uncompressed: share of GPU time", uncompressed, "≥", 0.95),
        *((f"`{way}` is no better than `none`: `{way}` ÷ `none`", ratios(way), "≥", 1.0) for way in NAIVE),
        ("`coadaptive` is as good as the best of the others: ratio of mean JCTs", behind, "≤", 1.01),
        (f"up to {SLOW_GBPS:g} Gb/s, `coadaptive` ÷ `none`", ratios("coadaptive", among=slow), "≤", 0.85),
    ]
    groups = {model: (model,) for model in MIX} if studied else {"shares of GPU time": ()}
    promises, jcts, compressors = [], [], []
    for gbps, each in found.items():
        promises.append([f"{gbps:g}"])
        for way in NAIVE:
            promises[-1] += [number(_ratio(each, of).value, 3) for of in (way + BELIEVED, way)]
            promises[-1].append(ratio_text(_ratio(each, way, way + BELIEVED)))
        none_s = np.mean([one["jct_s"] for one in each["none"]])
        jcts.append([f"{gbps:g}", number(none_s / HOUR_S), *(ratio_text(_ratio(each, way)) for way in ways[1:])])
        shares = [_shares(each["coadaptive"], models) for models in groups.values()]
        shown = [[f"{name} {share:.0%}" for name, share in some.items() if share >= 0.01] for some in shares]
        compressors.append([f"{gbps:g}", *map(", ".join, shown)])
    said = [f"`{way}`: {what}" for way in NAIVE for what in ("believed", "got", "got ÷ believed")]
    return {
        "jobs": f"{sum(each['jobs'] for each in next(iter(found.values()))['none'])}",
        "claims": _claims(theirs),
        "ours": _claims(ours),
        "promises": table(["Gb/s", *said], promises),
        "jct": table(["Gb/s", "none, h", *(f"{way} ÷ none" for way in ways[1:])], jcts),
        "compressors": table(["Gb/s", *groups], compressors),
    }


RUNS = _runs((1.0, 10.0, 100.0, 400.0), tuple(WAYS), 4, "mix")
ALONE = {(way, gbps): measurement(one_job, compressor=WAYS[way][1], gbps=gbps) for gbps in RUNS for way in NAIVE}


def _replica_tables(results: Results) -> dict[str, str]:
    rows = [
        [f"`{way}`", f"{gbps:g}", *(f"{believed:.2f} → {got:.2f}" for believed, got in results[task].values())]
        for (way, gbps), task in ALONE.items()
    ]
    return _tables(RUNS, results, STUDIED) | {"alone": table(["way", "Gb/s", *MIX], rows)}


READS = ("conf/experiment/compression.yaml", "traces/philly.json", "synergy_core/performance/catalog/gpus")
COMPRESSION_FINDINGS = Experiment(
    lambda: [*_all(RUNS), *ALONE.values()], _replica_tables, reads=(*READS, "synergy_core/performance/catalog/models")
)

PLANNED_RUNS = _runs((10.0, 100.0), [way for way in WAYS if way != "uniform"], 1, "llm")
COMPRESSION_PLANS = Experiment(
    lambda: _all(PLANNED_RUNS),
    lambda results: _tables(PLANNED_RUNS, results),
    reads=(*READS, "synergy_core/performance/catalog/architectures", "plans"),
)
