"""How often the interval of a ratio of mean JCTs covers the truth, by number of seeds.

    python bench/bootstrap.py [--draws N]

Synthetic log-normal loads with a true ratio of 0.8: workloads differ far more than policies do, so what is paired must
cancel. One seed: stretches of 4,000 jobs are resampled; several: whole seeds of 40 jobs.
"""

from __future__ import annotations

import argparse

import numpy as np

from synergy_runs.bootstrap import ratio_of_mean_jct

TRUTH = 0.8


def covered(seeds: int, draws: int) -> float:
    """The fraction of draws whose interval holds the true ratio."""
    random, hits = np.random.default_rng(seeds), 0
    shape = (seeds, 40 if seeds > 1 else 4_000)
    for draw in range(draws):
        load = random.lognormal(0, 0.8, (seeds, 1)) * random.lognormal(0, 0.5, shape)
        first = load * random.lognormal(-0.02, 0.2, shape)
        other = TRUTH * load * random.lognormal(-0.02, 0.2, shape)
        if seeds > 1:
            other *= random.lognormal(-0.005, 0.1, (seeds, 1))
        ratio = ratio_of_mean_jct(list(other), list(first), seed=draw)
        hits += ratio.low <= TRUTH <= ratio.high
    return hits / draws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=400)
    chosen = parser.parse_args()
    for seeds in (1, 2, 3, 5, 10):
        print(f"{seeds:3} seeds: {covered(seeds, chosen.draws):.0%} of {chosen.draws} draws", flush=True)


if __name__ == "__main__":
    main()
