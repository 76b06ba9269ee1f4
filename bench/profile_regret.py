"""Measures the cost of choosing plans by a quick profile, against a careful profile of the same machine:

    python -m synergy_exec +trace=demo trace.window=5s      # leaves results/profile.json, with four slots
    python -m synergy_exec profile mlp texts cnn gpt --seconds 1 backend.options.slots=4 --out careful.json
    python bench/profile_regret.py results/profile.json careful.json

For each model, number of slots and batch that both profiles measured (the careful one under at least two plans), it
prints the plan that is fastest in the quick profile. The regret is how much longer that plan's step takes than the
fastest plan's step, both times from the careful profile.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean

from synergy_core.jobs.testbed_profiles import ProfiledModel
from synergy_core.planner.plan import Plan
from synergy_runs.inputs import read_profile

Times = dict[tuple[int, int], dict[Plan, float]]
"""Step times in seconds, by (slots, batch), then by plan."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quick", type=Path)
    parser.add_argument("careful", type=Path)
    given = parser.parse_args()
    quick, careful = read_profile(given.quick).models, read_profile(given.careful).models
    regrets, same, spread = [], 0, []
    for name in sorted(quick.keys() & careful.keys()):
        chosen, truth = times(quick[name]), times(careful[name])
        for slots, batch in sorted(chosen.keys() & truth.keys()):
            there = chosen[slots, batch].keys() & truth[slots, batch].keys()
            if not there or len(truth[slots, batch]) < 2:
                continue
            first = min(there, key=chosen[slots, batch].__getitem__)
            best = min(truth[slots, batch], key=truth[slots, batch].__getitem__)
            regrets.append(truth[slots, batch][first] / truth[slots, batch][best] - 1)
            same += first == best
            spread += [chosen[slots, batch][plan] / truth[slots, batch][plan] - 1 for plan in there]
            print(f"{name:6} {slots} slots, batch {batch:3}: {first.describe():24} {regrets[-1]:+6.1%}", end="")
            print("" if first == best else f"   best: {best.describe()}")
    print(f"{same} of {len(regrets)} choices are the best; regret {mean(regrets):.1%}, at worst {max(regrets):.1%}")
    print(f"quick step times are {mean(map(abs, spread)):.0%} off by the mean, {mean(spread):+.0%} with their sign")


def times(model: ProfiledModel) -> Times:
    """Step times that were measured, not predicted."""
    found: Times = defaultdict(dict)
    for row in model.rows:
        if not row.predicted:
            found[row.plan.gpus, row.plan.global_batch][row.plan] = row.step_s
    return found


if __name__ == "__main__":
    main()
