"""The unit in which the simulator's speed is told: SimPy itself, running as many processes of two timeouts each.

    python bench/yardstick.py [PROCESSES]

A job of a trace is at least two events, its submission and its end; each process waits for one, then for the other.
Ratios to this unit differ less between machines than seconds do. Measure it in the same process, and just before or
after what is compared with it.
"""

from __future__ import annotations

import gc
import random
import sys
import time

import simpy

PHILLY_JOBS = 82_247
GAP_S, RUN_S = 100.0, 10_000.0


def simpy_cpu_s(processes: int = PHILLY_JOBS) -> float:
    """CPU seconds of SimPy running so many processes, which wait for instants in order, then for a random time."""
    draw = random.Random(0).random
    env = simpy.Environment()

    def wait_twice(submit_s: float):
        yield env.timeout(submit_s)
        yield env.timeout(RUN_S * draw())

    collecting = gc.isenabled()
    gc.disable()  # as `simulate` does
    began_s = time.process_time()
    for at in range(processes):
        env.process(wait_twice(GAP_S * at))
    env.run()
    cpu_s = time.process_time() - began_s
    if collecting:
        gc.enable()
    return cpu_s


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else PHILLY_JOBS
    print(f"{given:,} processes of two timeouts each: {simpy_cpu_s(given):.3f} CPU-seconds")
