"""What each part of synergy is worth alone, and how much of its gain survives wrong declarations and noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from accuracy_asked import SHORT, Asked, Variant, short
from accuracy_ours import GIVEN_THE_SAME, OURS, SAME, SIA
from accuracy_runs import Run
from accuracy_tables import number, table

BASE = (
    "information=own",
    "parameters.synergy.batch_limit=requested",
    "parameters.synergy.growth=2",
    "parameters.synergy.first_gpus=1",
    "parameters.synergy.rank_power=0",
    "parameters.synergy.restart_charge=0",
)


def _with(*changes: str) -> tuple[str, ...]:
    """The bare objective with some of its settings put back."""
    keys = {change.partition("=")[0] for change in changes}
    return (*(setting for setting in BASE if setting.partition("=")[0] not in keys), *changes)


FULL = OURS[-1]
ABLATION = (
    FULL,
    Variant("batch limit: as requested", "synergy", ("parameters.synergy.batch_limit=requested",)),
    Variant("own observations", "synergy", ("information=declared",)),
    Variant("first start 1 GPU, growth 2", "synergy",
            ("parameters.synergy.first_gpus=1", "parameters.synergy.growth=2")),
    Variant("no rank weights (rank_power=0)", "synergy", ("parameters.synergy.rank_power=0",)),
    Variant("no aging (aging_power=0)", "synergy", ("parameters.synergy.aging_power=0",)),
    Variant("no restart charge (restart_charge=0)", "synergy", ("parameters.synergy.restart_charge=0",)),
    Variant("charge over all remaining time (horizon_s=10⁹)", "synergy", ("parameters.synergy.horizon_s=1.0e9",)),
    Variant("linear utility (utility_power=1)", "synergy", ("parameters.synergy.utility_power=1",)),
    Variant("undeclared work", "synergy", ("information=shared",)),
    Variant("greedy in place of the optimum", "synergy", greedy=True),
)  # fmt: skip
ADDED = (
    SIA,
    Variant("batch limit: the job's maximum", "sia", ("parameters.sia.batch_limit=max",)),
    Variant("shared observations", "sia", ("information=shared",)),
    Variant("first start up to 4 GPUs, growth 4", "sia", ("parameters.sia.first_gpus=4", "parameters.sia.growth=4")),
    Variant("the three together (sia given the same)", "sia", SAME),
    Variant("greedy in place of the optimum", "sia", greedy=True),
)
OBJECTIVE = (
    Variant("synergy's objective alone", "synergy", BASE),
    Variant("+ rank weights", "synergy", _with("parameters.synergy.rank_power=1")),
    Variant("+ restart charge", "synergy", _with("parameters.synergy.restart_charge=1.5")),
    Variant("+ declared work", "synergy", _with("information=declared")),
    Variant("+ the three together", "synergy",
            _with("parameters.synergy.rank_power=1", "parameters.synergy.restart_charge=1.5",
                  "information=declared")),
)  # fmt: skip


ELASTIC = tuple(
    Variant(f"a resize takes {fraction:g} of a restart", "synergy", (f"testbed.resize_fraction={fraction}",))
    for fraction in (0.5, 0.25, 0.1)
)


FREE = ("testbed=pollux", "testbed.launch_s=0", "testbed.restart_s=0", "testbed.free_moves=true")
ROOM = (
    FULL,
    Variant("starts and restarts cost synergy nothing", "synergy", FREE),
    Variant("they cost neither anything", "synergy", FREE),
)
ROOM_ABOVE = (GIVEN_THE_SAME, GIVEN_THE_SAME, Variant("sia given the same", "sia", (*SAME, *FREE)))


def ablation_runs() -> list[Run]:
    every = (*ABLATION, *ADDED, *OBJECTIVE, *ELASTIC, *ROOM, *ROOM_ABOVE)
    return [variant.run(file) for file in SHORT for variant in every]


def ablation_body(asked: Asked) -> str:
    removed = _against(asked, ABLATION, [SIA] * len(ABLATION), FULL)
    added = _against(asked, ADDED, [SIA] * len(ADDED))
    objective = _against(asked, OBJECTIVE, [SIA] * len(OBJECTIVE))
    return (
        "The figures are mean JCT ÷ sia's on the four files of 160 jobs, heterogeneous; intervals as above. *÷\n"
        "synergy*: the mean ratio to the whole synergy, paired by file and seed.\n\n"
        "Each part removed from synergy:\n\n" + removed + "\n\n"
        "Each part added to sia, whose objective reads no declared work:\n\n" + added + "\n\n"
        "Parts for which sia has no parameter, added to synergy's objective, with all else as in sia. Without\n"
        "weights and charge the objective does not read declared work, so that row cannot differ:\n\n"
        + objective
        + "\n\n"
        "Elastic jobs: a change of GPUs of the same type costs only part of the restart delay\n"
        "(`testbed.resize_fraction`); sia is as published, with whole restarts:\n\n"
        + _against(asked, ELASTIC, [SIA] * len(ELASTIC))
        + "\n\n"
        "The cost of changes, ÷ sia given the same. No policy can reach the second row on these machines; its\n"
        "distance from the first row bounds the gain from fewer, cheaper or better timed changes:\n\n"
        + _against(asked, ROOM, ROOM_ABOVE)
        + "\n\nGreedy repeatedly takes the step up with the greatest gain per further GPU, until none fits."
    )


def _against(asked: Asked, variants: Sequence[Variant], others: Sequence[Variant], also: Variant | None = None) -> str:
    rows = []
    for variant, other in zip(variants, others, strict=True):
        found = asked.ratios([(variant.run(file), other.run(file)) for file in SHORT])
        p99 = asked.ratios([(variant.run(file), other.run(file)) for file in SHORT], "p99_jct_h").mean
        restarts = float(np.mean([asked.mean(variant.run(file), "restarts_per_job") for file in SHORT]))
        row = [variant.name, *(number(value, 3) for value in found.files), found.said(),
               number(p99), number(restarts, 1)]  # fmt: skip
        if also is not None:
            to_full = asked.ratios([(variant.run(file), also.run(file)) for file in SHORT])
            row.append("1" if variant == also else to_full.said())
        rows.append(row)
    header = ["", *map(short, SHORT), "mean of four", "p99 ÷ sia's", "restarts a job"]
    return table([*header, "÷ synergy"] if also is not None else header, rows)


DISTURBED = (
    ("as it is", ()),
    ("declared work wrong, σ = 0.3", ("truth.declared_error=0.3",)),
    ("declared work wrong, σ = 0.7", ("truth.declared_error=0.7",)),
    ("declared work wrong, σ = 1.5", ("truth.declared_error=1.5",)),
    ("applications split into 5 labels", ("truth.labels=5",)),
    ("applications split into 20 labels", ("truth.labels=20",)),
    ("noise in observations, σ = 0.05", ("truth.noise_fraction=0.05",)),
    ("noise in observations, σ = 0.2", ("truth.noise_fraction=0.2",)),
    *((f"checkpoints every {each} s", (f"testbed.checkpoint_interval_s={each}",)) for each in (120, 600, 3_600)),
)
REACHES_SIA = ("truth.noise_fraction", "testbed.checkpoint_interval_s")
"""sia reads no declared work and shares nothing between jobs."""


def _sensitivity() -> tuple[list[Variant], list[Variant]]:
    ours = [Variant(name, "synergy", settings) for name, settings in DISTURBED]
    theirs = [
        Variant(name, "sia", settings if any(each.startswith(REACHES_SIA) for each in settings) else ())
        for name, settings in DISTURBED
    ]
    return ours, theirs


def sensitivity_runs() -> list[Run]:
    return [variant.run(file) for file in SHORT for variants in _sensitivity() for variant in variants]


def sensitivity_body(asked: Asked) -> str:
    ours, theirs = _sensitivity()
    return (
        "The figures are synergy ÷ sia under the same disturbance, on the four files of 160 jobs, heterogeneous. σ:\n"
        "standard deviation of the logarithm of declared ÷ true work, or of observed ÷ true step times. *÷\n"
        "synergy*: ratio to undisturbed synergy. Disturbances are drawn anew with every seed. Checkpoints: a\n"
        "stopped job loses its work since the last checkpoint; in the other rows a job saves when it is stopped.\n"
        "Goal: with checkpoints every 600 s, at most 1.10 ÷ synergy.\n\n" + _against(asked, ours, theirs, ours[0])
    )
