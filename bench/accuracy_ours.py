"""Synergy against Sia: mean completion times, what must not get worse, and the goals for both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from accuracy_asked import FILES, SHORT, Asked, Variant, short
from accuracy_runs import Run
from accuracy_tables import NONE, Ratios, each, marked, met, number, table, with_half

SAME = ("information=all", "parameters.sia.growth=4", "parameters.sia.first_gpus=4", "parameters.sia.batch_limit=max")
SIA = Variant("sia", "sia")
OURS = (
    SIA,
    Variant("sia, shared", "sia", ("information=shared",)),
    Variant("sia given the same", "sia", SAME),
    Variant("synergy, own", "synergy", ("information=own",)),
    Variant("synergy, declared", "synergy", ("information=declared",)),
    Variant("synergy, shared", "synergy", ("information=shared",)),
    Variant("synergy", "synergy"),
)
CLUSTERS = (("heterogeneous", ()), ("homogeneous", ("cluster=homogeneous",)))
GIVEN_THE_SAME = OURS[2]
GOALS = {"synergy": 0.82, "synergy, own": 0.90}
AIM = 0.75
BOUND = 1.05
"""What must not get worse may be so many times sia's."""


def ours_runs() -> list[Run]:
    kinds = [more for _, more in CLUSTERS]
    return [variant.run(file, *more) for file in FILES for more in kinds for variant in OURS]


def ours_body(asked: Asked) -> str:
    parts = [
        "The figures are mean JCT ÷ mean JCT of `sia` as published, on the same file and seed. *sia given the same*\n"
        "has information=all, growth=4, first_gpus=4, batch_limit=max. `synergy` knows declared work and shared\n"
        "observations; *own*: neither. A seed moves every submission by a uniform ± 1 s (seed 0 moves none). ±: 95\n"
        "% interval over seeds, Student's t of ratios paired by seed, pooled over the files of a row. *over files*:\n"
        "95 % interval by Student's t of the files' ratios.\n\n"
        "synergy's parameters were chosen on philly and saturn 1 and 2, heterogeneous, among about 90 variants;\n"
        "rank weights and lateness were chosen among 40 variants on all six files and on real Philly from\n"
        "2017-10-30 and 2017-11-06. sia's parameters are as published. So no file here was held out, and a gain of\n"
        "about a point on the first four files may come from that choice. *Against offered load*, below, uses other\n"
        "days. How starts count was chosen among nine variants, on Rubick's trace, philly-2 and newtrace-2. On 64\n"
        "T4, `sia` ends much later than published, but sia given the same does not; so ratios of p99 and makespan\n"
        "to `sia` say more about `sia` than about synergy there."
    ]
    for cluster, more in CLUSTERS:
        parts.append(f"### {cluster[0].upper()}{cluster[1:]}\n\n" + _ratio_table(asked, more))
        parts.append(_bounds_table(asked, more))
    parts.insert(1, _goals(asked))
    return "\n\n".join(parts)


def _ratios(
    asked: Asked, variant: Variant, more: tuple[str, ...], figure: str = "mean_jct_h", files: Sequence[str] = FILES
) -> Ratios:
    return asked.ratios([(variant.run(file, *more), SIA.run(file, *more)) for file in files], figure)


def _goals(asked: Asked) -> str:
    rows = []
    for cluster, more in CLUSTERS:
        found = {variant.name: _ratios(asked, variant, more) for variant in OURS}
        for name, goal in (*GOALS.items(), ("synergy", AIM)):
            what = f"{name}: mean ratio of six files at most {goal}" + (" (the aim)" if goal == AIM else "")
            rows.append([cluster, what, found[name].said(), _verdict(found[name], found[name].mean <= goal)])
        same = asked.ratios([(OURS[-1].run(file, *more), GIVEN_THE_SAME.run(file, *more)) for file in FILES])
        rows.append([cluster, "synergy ÷ sia given the same: below 1", same.said(), _verdict(same, same.mean < 1)])
        for figure, word in BOUNDED:
            worst = _ratios(asked, OURS[-1], more, figure)
            at = int(np.nanargmax(worst.files)) if worst.known else 0
            what = f"synergy: {word} on no file above {BOUND} of sia's"
            value = f"{number(worst.files[at])} ({short(FILES[at])})" if worst.known else NONE
            holds = worst.files[at] <= BOUND
            rows.append([cluster, what, value, _verdict(worst, holds, enough=not holds)])
    return table(("cluster", "goal", "found", ""), rows, 2)


def _verdict(found: Ratios, holds: bool, *, enough: bool = False) -> str:
    """Whether a goal for all files is met; open while files are missing, unless what is known is `enough`."""
    if not found.known:
        return NONE
    return met(holds) if found.complete or enough else f"open: {found.known} of {len(found.files)} files"


def _ratio_table(asked: Asked, more: tuple[str, ...]) -> str:
    rows = []
    for variant in OURS:
        found, four = _ratios(asked, variant, more), _ratios(asked, variant, more, files=SHORT)
        cells = [with_half(*pair) for pair in zip(found.files, found.half, strict=True)]
        over = f"{found.said()}; over files ± {number(found.files_half, 3)}"
        if variant == SIA:
            cells, over, mean = ["1"] * len(FILES), "1", "1"
        else:
            mean = four.said()
        rows.append([variant.name, *cells, mean, over])
    return table(("mean JCT ÷ sia's", *map(short, FILES), "mean of first four", "mean of six"), rows)


BOUNDED = (("p99_jct_h", "p99 JCT"), ("makespan_h", "makespan"), ("worst_ftf", "worst finish-time fairness"))


def _bounds_table(asked: Asked, more: tuple[str, ...]) -> str:
    rows = []
    for variant in OURS[1:]:
        found = [_ratios(asked, variant, more, figure).files for figure, _ in BOUNDED]
        rows.append([variant.name, *(each(of, lambda value: marked(value, BOUND)) for of in zip(*found, strict=True))])
    return (
        "p99 JCT / makespan / worst finish-time fairness, each ÷ sia's (means over seeds); bold if above the bound\n"
        f"of {BOUND}. Finish-time fairness is Sia's (docs/metrics.md defines Themis's, by requested GPUs): ρ = Σ\n"
        "over GPU types of their share of the GPUs × JCT ÷ T, where T = one launch + the true run time, with the\n"
        "best batch of every epoch, on at most 64 ÷ N GPUs of that type, and N is the mean number of active jobs\n"
        "over the job's life, under that policy.\n\n" + table(("÷ sia's", *map(short, FILES)), rows)
    )
