"""Random small cases of every policy × execution model × truth, and the real Philly log, with every log checked.

    python bench/fuzz.py SEED CASES
    python bench/fuzz.py --philly [--quick]
    python bench/fuzz.py --definitions SEED TRACES

SEED CASES: so many cases of tests/cases.py, each simulated as if it had been typed, checked (`synergy_runs.invariants`)
and, where they apply, compared with a walk over all jobs (tests/case_checks.py). The smallest
failing case of each kind is printed as a job log and the keys to type. A case may take 20 CPU-seconds and 4 GiB.

--philly: 21 windows of the real log × 10, 15 and 20 nodes × every policy, with training jobs (trace.models=mix) and
without, with decisions at once and in rounds.

--definitions: so many random traces with tenants, with and without quotas, borrowing and restart costs, under every
placement (tests/naive_traces.py), each under every ordering policy, against a simulator written from the definitions
(tests/naive.py): every start, stop and end is compared.

Ends with the number of cases, of failures and CPU seconds; exits 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import case_checks
import naive_traces
import planned_models
from cases import POLICIES, RIGID, SHORTER, Case, random_case, smaller, typed

from synergy_runs import inputs
from synergy_runs.invariants import check

MOST_CPU_S = 20.0
MOST_BYTES = 4 * 2**30
MOST_TRIALS_S = 60.0
"""So long, in CPU-seconds, smaller cases are tried for each kind of failure."""
MOST_KINDS = 10
PROGRESS_S = 10.0
WINDOWS, EVERY_DAYS, FIRST_DAY = 21, 3, datetime.date(2017, 10, 3)
NODES = (10, 15, 20)


class TooSlowError(Exception):
    """A case has used up its time."""


def _too_slow(*_: Any) -> None:
    raise TooSlowError(f"not done after {MOST_CPU_S:g} CPU-seconds")


def failure_of(examine: Callable[[], Any]) -> str:
    """What is wrong, in one line; "" for nothing. Slower than `MOST_CPU_S` is wrong too."""
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
    try:
        examine()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    return ""


def kind_of(text: str) -> str:
    """The failure without its numbers and names of files, so that those alike are counted together."""
    return re.sub(r"/\S+|\d+(\.\d+)?", "#", text)


def smallest(case: Case, kind: str) -> Case:
    """The case without the jobs and keys that its failure does not need."""
    until_s = time.process_time() + MOST_TRIALS_S
    while True:
        for each in smaller(case):
            if time.process_time() > until_s:
                return case
            if kind_of(failure_of(partial(case_checks.examine, each))) == kind:
                case = each
                break
        else:
            return case


class Progress:
    """A line on standard error, now and then."""

    def __init__(self, of: int) -> None:
        self.of, self.done, self.failures = of, 0, 0
        self.shown_s = time.monotonic()

    def count(self, failed: bool) -> None:
        self.done += 1
        self.failures += failed
        if time.monotonic() - self.shown_s > PROGRESS_S:
            self.shown_s = time.monotonic()
            print(f"{self.done:,} of {self.of:,} cases, {self.failures} failures", file=sys.stderr, flush=True)


def random_cases(seed: int, cases: int) -> Progress:
    """Examines them, prints what is wrong, and how many there were and how many failed."""
    found: dict[tuple[str, str], Case] = {}
    compared: Counter[str] = Counter()
    progress = Progress(cases)
    for number in range(cases):
        case = random_case(Random(f"{seed}/{number}"))
        failure = failure_of(lambda case=case: compared.update(case_checks.examine(case)))
        progress.count(bool(failure))
        if not failure:
            continue
        kind = kind_of(failure)
        print(f"\ncase {seed}/{number}, {case.keys['policy']}: {failure}", flush=True)
        if (case.keys["policy"], kind) not in found:
            found[case.keys["policy"], kind] = least = smallest(case, kind)
            print(least, flush=True)
        if len(found) == MOST_KINDS:
            break
    print(f"{compared['walk']:,} compared with a walk over all jobs")
    return progress


def definitions(seed: int, traces: int) -> Progress:
    """Compares every ordering policy on random traces with what it is defined to do; prints where they differ."""
    progress = Progress(traces * len(naive_traces.POLICIES))
    for number in range(traces):
        trace = naive_traces.random_trace(Random(f"{seed}/{number}"))
        for policy in naive_traces.POLICIES:
            differs = naive_traces.simulated(trace, policy) != naive_traces.by_definition(trace, policy)
            progress.count(differs)
            if differs:
                print(f"\ntrace {seed}/{number}, {policy}\n{trace}", flush=True)
    print(f"{traces:,} traces × {len(naive_traces.POLICIES)} ordering policies: {progress.failures} differences")
    return progress


def philly_keys(quick: bool) -> Iterator[dict[str, Any]]:
    """What is typed for each run of several policies on one window."""
    readers = [name for name in POLICIES if name not in RIGID]
    shorter = {f"parameters.{name}.{key}": value for name, given in SHORTER.items() for key, value in given.items()}
    for number in range(0, WINDOWS, 7 if quick else 1):
        start = FIRST_DAY + datetime.timedelta(days=EVERY_DAYS * number)
        for nodes in NODES:
            common = {"cluster.nodes": nodes, "truth.measured": False, "trace.carry_in": False, "seed": number}
            for models in ("none", "mix"):
                orders = {**common, "trace.window": f"{start}/12h", "trace.models": models, "policy": RIGID}
                yield {"testbed": "ideal", **orders}
                yield {"testbed": "shockwave_v100", "testbed.exit_s": 0.0, "round_s": 1200.0, **orders}
            window = {"trace.window": f"{start}/2h", "trace.models": "mix", "round_s": 7200.0}
            yield {"testbed": "ideal", **common, **window, "policy": readers, **shorter}


def philly(quick: bool) -> Progress:
    """Every policy on every window and size; prints each that fails."""
    inputs.read_trace = cache(inputs.read_trace)  # the log is read once, not for each of its windows
    runs = list(philly_keys(quick))
    progress = Progress(sum(len(keys["policy"]) for keys in runs))
    for keys in runs:
        for made in case_checks.prepared_runs_of("philly", keys):
            failure = failure_of(lambda made=made: check(case_checks.simulated(made)))
            progress.count(bool(failure))
            if failure:
                print(f"{made.policy.name}: {failure}\n{typed(keys)}", flush=True)
    return progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, nargs="?", metavar="SEED")
    parser.add_argument("cases", type=int, nargs="?", metavar="CASES")
    parser.add_argument("--philly", action="store_true", help="the real log instead; needs SYNERGY_DATA")
    parser.add_argument("--definitions", action="store_true", help="ordering policies against their definitions")
    parser.add_argument("--quick", action="store_true", help="with --philly: every seventh window")
    chosen = parser.parse_args()
    if chosen.philly == (chosen.cases is not None):
        parser.error("expected SEED CASES, such as 0 1000, or --philly")
    signal.signal(signal.SIGVTALRM, _too_slow)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    planned_models.install()
    compare = definitions if chosen.definitions else random_cases
    done = philly(chosen.quick) if chosen.philly else compare(chosen.seed, chosen.cases)
    print(f"{done.done:,} cases, {done.failures} failures, {time.process_time():.0f} CPU-seconds")
    sys.exit(1 if done.failures else 0)


if __name__ == "__main__":
    main()
