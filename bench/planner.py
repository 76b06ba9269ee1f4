"""How fast the planner searches, and what Crius's Cells lose by looking at less: `python bench/planner.py`.

Cold: nothing remembered, modules imported and catalogs read. Goals: a 175B GPT on every count 8…1,024 of four GPU types
in 1 s, the same again in 1 ms, a 1T GPT on 16,384 GPUs in 3 s. Times are CPU seconds, the median of `--repeat` runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cells
import numpy as np

from synergy_core.commands._settings import table
from synergy_core.planner import search
from synergy_core.planner.families import architecture_named
from synergy_core.planner.machine import constants_for, machine_named, software_named

TYPES = ("a100-80gb", "h100", "v100", "a40")
CELL_COUNTS = (8, 16, 32, 64, 128, 256, 512)
CELL_MODELS = (("gpt-1.3b", 512), ("gpt-6.7b", 1024), ("gpt-22b", 1024), ("gpt-175b", 1536))


def machines(names: tuple[str, ...], software_name: str) -> list[tuple[Any, Any, Any]]:
    software = software_named(software_name)
    found = [machine_named(name) for name in names]
    return [(each, software, constants_for(each, software)) for each in found]


def cpu_seconds(
    calls: Sequence[Callable[[], Any]], repeat: int, before: Callable[[], Any] = lambda: None
) -> tuple[float, list[Any]]:
    """Median CPU seconds of making all calls once, and the results of the last time. `before` is not timed."""
    times = []
    for _ in range(repeat):
        before()
        started = time.process_time()
        results = [call() for call in calls]
        times.append(time.process_time() - started)
    return statistics.median(times), results


def speed(software: str, repeat: int) -> None:
    rows = []
    for model, batch, types, counts, goal in (
        ("gpt-175b", 1536, TYPES, range(8, 1025), 1.0),
        ("gpt-1t", 3072, TYPES[:1], (16384,), 3.0),
    ):
        family, architecture = architecture_named(model)
        asked = [
            partial(search.search, family, architecture, *on, counts=counts, global_batch=batch, keep=3)
            for on in machines(types, software)
        ]
        cold, tables = cpu_seconds(asked, repeat, search._remembered.cache_clear)
        cached, _ = cpu_seconds(asked, 20 * repeat)
        rows.append(
            [
                f"{model}, {len(counts)} counts to {max(counts)}, {len(types)} types",
                str(sum(each.timed for each in tables)),
                str(sum(len(each.best()) for each in tables)),
                f"{cold:.3f}",
                f"{goal:.1f}",
                f"{cached * 1e3:.3f}",
                "1.0",
            ]
        )
    print(table(("question", "plans timed", "best plans", "cold s", "goal s", "again ms", "goal ms"), rows))


def compare_cells(software_name: str) -> None:
    """Best proxy and tuned Cell against the search's optimum, and how many plans each has timed."""
    rows = []
    (on,) = machines(TYPES[:1], software_name)
    for model, batch in CELL_MODELS:
        family, architecture = architecture_named(model)
        optimum = search.search(family, architecture, *on, counts=CELL_COUNTS, global_batch=batch)
        best = optimum.best()
        best = best.take(best.plans.tensor <= on[0].gpus_per_node)
        proxies = cells.estimate(family, architecture, *on, counts=CELL_COUNTS, global_batch=batch)
        at = {int(proxies.gpus[row]): row for row in proxies.best().tolist()}
        shares, tuned_shares, timed = [], [], 0
        for gpus, seconds in zip(best.gpus.tolist(), best.step_time_s.tolist(), strict=True):
            if gpus not in at:
                continue
            row = at[gpus]
            tuned = cells.tune(
                family,
                architecture,
                *on,
                gpus=gpus,
                stages=int(proxies.stages[row]),
                tensor_side=bool(proxies.tensor_side[row]),
                global_batch=batch,
            )
            shares.append(seconds / float(proxies.step_time_s[row]))
            tuned_shares.append(seconds / tuned.step_time_s if tuned else 0.0)
            timed += tuned.timed if tuned else 0
        rows.append(
            [
                model,
                f"{len(shares)}/{len(best)}",
                *(f"{each:.1%}" for each in (np.mean(shares), min(shares), np.mean(tuned_shares), min(tuned_shares))),
                str(proxies.timed),
                str(timed),
                str(optimum.timed),
            ]
        )
    print(f"\nCells on {TYPES[0]}, {len(CELL_COUNTS)} counts: throughput as a share of the optimum's")
    header = ("model", "counts", "proxy", "worst", "tuned", "worst", "timed: proxies", "tuning", "search")
    print(table(header, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--software", default="megatron-core", help="training stack of the catalog")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each cold question")
    chosen = parser.parse_args()
    speed(chosen.software, chosen.repeat)
    compare_cells(chosen.software)


if __name__ == "__main__":
    main()
