"""Simulates random small cases of every policy × execution model × truth, or the real Philly log, and checks each log.

    python bench/fuzz.py SEED CASES
    python bench/fuzz.py --philly
    python bench/fuzz.py --definitions SEED TRACES
    python bench/fuzz.py --quotas FIRST CASES

SEED CASES: it simulates that many cases of tests/cases.py as if each had been typed, checks them
(`synergy_runs.outputs.invariants`) and, where they apply, compares them with a walk over all jobs
(tests/case_checks.py). It prints the smallest failing case of each kind as a job log and the keys to type. A case may
take 20 CPU-seconds and 4 GiB.

--philly: it checks every policy on 21 windows of the real log with 10, 15 and 20 nodes, with training jobs
(trace.models=mix) and without, with decisions at once and in rounds.

--definitions: it draws random traces with tenants, with and without quotas, borrowing and restart costs, under every
placement (tests/naive_traces.py). It compares every start, stop and end under every ordering policy with a simulator
written from the definitions (tests/naive.py).

--quotas: it runs every policy on random cases with quotas (tests/test_lending.py) and looks for jobs that wait within
their quotas for GPUs that are idle or lent. 1,000 cases take 50 CPU minutes.

The program prints its progress every ten seconds, and at the end the numbers of cases, failures and CPU seconds. The
exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import case_checks
import naive_traces
import planned_models
import test_lending
from cases import POLICIES, RIGID, SHORTER, Case, random_case, smaller, typed

from synergy_runs.inputs import from_settings
from synergy_runs.outputs.invariants import check

MAX_BYTES = 4 * 2**30
MAX_TRIALS_S = 60.0
"""CPU seconds for which smaller cases are tried for each kind of failure."""
MAX_KINDS = 10
PROGRESS_S = 10.0
WINDOWS, EVERY_DAYS, FIRST_DAY = 21, 3, datetime.date(2017, 10, 3)
NODES = (10, 15, 20)


def failure_of(examine: Callable[[], Any]) -> str:
    """Returns what is wrong in one line, "" for nothing."""
    try:
        with case_checks.limited():
            examine()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def kind_of(failure: str) -> str:
    """Removes numbers and file names, so that similar failures are counted together."""
    return re.sub(r"/\S+|\d+(\.\d+)?", "#", failure)


def smallest(case: Case, kind: str) -> Case:
    """Removes the jobs and keys that the failure does not need."""
    until_s = time.process_time() + MAX_TRIALS_S

    def fails_alike(each: Case) -> bool:
        if time.process_time() > until_s:
            return False
        return kind_of(failure_of(partial(case_checks.examine, each))) == kind

    while (found := next(filter(fails_alike, smaller(case)), None)) is not None:
        case = found
    return case


def random_cases(seed: int, cases: int) -> Iterator[str]:
    """Examines random cases. The first failure of each kind ends with the smallest case that fails in the same way."""
    seen: set[tuple[str, str]] = set()
    compared: Counter[str] = Counter()
    for number in range(cases):
        case = random_case(Random(f"{seed}/{number}"))
        failure = failure_of(lambda case=case: compared.update(case_checks.examine(case)))
        if not failure:
            yield ""
            continue
        policy, kind = case.keys["policy"], kind_of(failure)
        found = "" if (policy, kind) in seen else f"\n{smallest(case, kind)}"
        yield f"case {seed}/{number}, {policy}: {failure}{found}"
        seen.add((policy, kind))
        if len(seen) == MAX_KINDS:
            break
    print(f"{compared['walk']:,} compared with a walk over all jobs")


def definitions(seed: int, traces: int) -> Iterator[str]:
    """Compares every ordering policy on random traces with its definition."""
    for number in range(traces):
        trace = naive_traces.random_trace(Random(f"{seed}/{number}"))
        differing = ", ".join(naive_traces.differing(trace))
        yield differing and f"trace {seed}/{number} differs under {differing}\n{trace}"


def quotas(first: int, cases: int) -> Iterator[str]:
    """Examines every policy on cases with quotas."""
    for name, number in product(test_lending.NAMES, range(first, first + cases)):
        failure = failure_of(partial(test_lending.examine, name, number))
        yield failure and f"quotas {number}, {name}: {failure}"


def philly_keys() -> Iterator[dict[str, Any]]:
    """Yields the keys of runs, each of several policies on one window."""
    readers = [name for name in POLICIES if name not in RIGID]
    shorter = {f"parameters.{name}.{key}": value for name, given in SHORTER.items() for key, value in given.items()}
    for number, nodes in product(range(WINDOWS), NODES):
        start = FIRST_DAY + datetime.timedelta(days=EVERY_DAYS * number)
        common = {"cluster.nodes": nodes, "truth.measured": False, "trace.carry_in": False, "seed": number}
        for models in ("none", "mix"):
            orders = {**common, "trace.window": f"{start}/12h", "trace.models": models, "policy": RIGID}
            yield {"testbed": "ideal", **orders}
            yield {"testbed": "shockwave_v100", "testbed.exit_s": 0.0, "round_s": 1200.0, **orders}
        window = {"trace.window": f"{start}/2h", "trace.models": "mix", "round_s": 7200.0}
        yield {"testbed": "ideal", **common, **window, "policy": readers, **shorter}


def philly() -> Iterator[str]:
    """Examines every policy on every window and size of the real log."""
    from_settings.read_trace = cache(from_settings.read_trace)  # the log is read once, not for each of its windows
    for keys in philly_keys():
        for made in case_checks.prepared_runs_of("philly", keys):
            failure = failure_of(lambda made=made: check(case_checks.simulated(made)))
            yield failure and f"{made.policy.name}: {failure}\n{typed(keys)}"


def exit_code(outcomes: Iterator[str]) -> int:
    """Counts cases by their failures, "" for none, and prints failures and progress; 1 if anything failed."""
    done = failures = 0
    told_s = time.monotonic()
    for failure in outcomes:
        done += 1
        if failure:
            failures += 1
            print(f"\n{failure}", flush=True)
        if time.monotonic() - told_s > PROGRESS_S:
            told_s = time.monotonic()
            print(f"{done:,} cases, {failures} failures", file=sys.stderr, flush=True)
    print(f"{done:,} cases, {failures} failures, {time.process_time():.0f} CPU-seconds")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", type=int, nargs="*", metavar="SEED CASES")
    parser.add_argument("--philly", action="store_true", help="the real log instead; needs SYNERGY_DATA")
    parser.add_argument("--definitions", action="store_true", help="ordering policies against their definitions")
    parser.add_argument("--quotas", action="store_true", help="every policy on cases with quotas")
    chosen = parser.parse_args()
    if len(chosen.numbers) != (0 if chosen.philly else 2):
        parser.error("expected SEED CASES, such as 0 1000, or --philly")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    planned_models.install()
    if chosen.philly:
        return exit_code(philly())
    examined = definitions if chosen.definitions else quotas if chosen.quotas else random_cases
    return exit_code(examined(*chosen.numbers))


if __name__ == "__main__":
    sys.exit(main())
