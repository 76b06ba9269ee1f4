"""How much of eight slots' worth of plans profiling measures, and what that loses: `python bench/profile_pruning.py`.

Step times under every plan are the planner's for models and GPUs of its catalog, each measurement with an error of 5 %.
Lost is what the plan chosen by these measurements takes longer than the fastest there is, by number of slots and batch,
under profile=auto and under the command, and where everything is measured, which errs by the noise alone. And under
profile=auto when its time is up after 24 measurements: at other batches the plan predicted to be the fastest is chosen.
"""

from __future__ import annotations

import argparse
import math
from math import inf

import numpy as np

from synergy_core.commands._settings import table
from synergy_core.planner.families import architecture_named
from synergy_core.planner.machine import constants_for, machine_named, software_named
from synergy_core.planner.plan import Plan, plans_of
from synergy_core.planner.step_time import step_time
from synergy_exec.plans import Candidates, plans, sizes_of
from synergy_exec.profiling.machine import Part
from synergy_exec.profiling.profile import QUICK, Effort
from synergy_exec.profiling.selection import Selection
from synergy_exec.training.admitted import plan_refusal

SLOTS, BATCHES, BLOCKS = 8, [16, 32, 64, 128], 24
NOISE = 0.05
IN_A_HURRY = 24
ON = [(model, gpu) for model in ("gpt-125m", "gpt-1.3b", "gpt-6.7b", "resnet-50") for gpu in ("a100-80gb", "v100")]


def refusal(plan: Plan) -> str | None:
    cut = BLOCKS % (plan.pipeline * plan.interleave)
    return plan_refusal(plan) or (f"{BLOCKS} blocks do not divide so" if cut else None)


def truth(model: str, gpu: str, there: list[Plan]) -> dict[Plan, float]:
    family, architecture = architecture_named(model)
    machine, software = machine_named(gpu), software_named("megatron")
    columns = plans_of(list(there))
    work = family.work(architecture, columns, software)
    seconds = step_time(work, columns, machine, software, constants_for(machine, software)).total_s
    return dict(zip(there, seconds.tolist(), strict=True))


def measured(
    candidates: Candidates,
    step_s: dict[Plan, float],
    effort: Effort | None,
    seed: int,
    most: float = inf,
) -> tuple[int, list[float]]:
    """How many step times were measured, at the most so many, and what the choice loses for each number of slots and
    batch. effort: None measures everything.
    """
    random = np.random.default_rng(seed)
    selection = Selection(Part("gpu", 0, 1, SLOTS), every_batch=(effort or QUICK).every_batch)
    selection.found(candidates)
    everything = iter(selection.plans)
    chosen: dict[tuple[int, int], tuple[float, Plan]] = {}
    count = 0
    while count < most and (plan := selection.next() if effort else next(everything, None)) is not None:
        seen_s = step_s[plan] * math.exp(NOISE * random.standard_normal())
        selection.measured(plan, seen_s, memory_bytes=0.0, limit_bytes=inf)
        key = plan.gpus, plan.global_batch
        chosen[key] = min(chosen.get(key, (inf, plan)), (seen_s, plan), key=lambda each: each[0])
        count += 1
    chosen = {(plan.gpus, plan.global_batch): (seen_s, plan) for plan, seen_s in selection.predicted()} | chosen
    best: dict[tuple[int, int], float] = {}
    for plan, took_s in step_s.items():
        key = plan.gpus, plan.global_batch
        best[key] = min(took_s, best.get(key, inf))
    return count, [step_s[chosen[key][1]] / best[key] - 1.0 for key in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    candidates = Candidates({size: plans(size, BATCHES, refusal) for size in sizes_of(SLOTS)})
    there = [plan for found in candidates.plans.values() for plan in found]
    rows = []
    for model, gpu in ON:
        step_s = truth(model, gpu, there)
        row = [f"{model}, {gpu}", str(len(there))]
        for effort, most in ((QUICK, IN_A_HURRY), (QUICK, inf), (Effort(), inf), (None, inf)):
            found = [measured(candidates, step_s, effort, seed, most) for seed in seeds]
            lost = np.concatenate([each for _, each in found])
            row += [f"{np.mean([count for count, _ in found]):.0f}", f"{lost.mean():.1%}, {lost.max():.0%}"]
        rows.append(row)
    lost = "lost: mean, most"
    print(table(("model, GPU", "plans", "in a hurry", lost, "auto", lost, "command", lost, "all", lost), rows))


if __name__ == "__main__":
    main()
