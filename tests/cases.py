"""Random small cases, each what a user could type: a job log of a few rows, and keys. For tests and bench/fuzz.py."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from jobs import RIGID
from omegaconf import OmegaConf

from synergy_core.performance.catalog import load_model
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType, PlacementRule
from synergy_core.scheduling.jobs.record import NEVER
from synergy_core.scheduling.policies import OrderingPolicy, Policy, get_policy, policy_names
from synergy_runs.files import conf_folder
from synergy_runs.inputs.command_line import options

TRUTHS = ("none", "mix", "as_given", "llm", "profiled")
"""What is true of a case's jobs: a run time only; a training job drawn for it; one with all the work of its
application, with parallel plans, of a profiled model."""
TIGHT_TRUTHS = ("none", "mix", "mix")
TRAINING_TRUTHS = TRUTHS[1:]
"""Truths that jobs may have under policies that read goodput."""
NEEDS = {
    "llm": "\n(with the planner of tests/planned_models.py)",
    "profiled": "\n(truth.profile=FILE, PROFILE.to_json() of tests/test_profiled_jobs.py)",
}
RUN_TIME_POLICIES = [name for name in RIGID if not get_policy(name).reads_priority]
"""Policies that read neither goodput nor priorities; jobs of a log have no priorities."""
READERS = sorted(set(policy_names()) - set(RIGID))
POLICIES = [
    *RUN_TIME_POLICIES,
    *READERS,
    *(f"{name}+plans" for name in READERS if not getattr(get_policy(name), "plans", True)),
]
SHORTER = {"pollux": {"generations": 2, "population": 6}}
"""Nothing here depends on how long is searched."""
KINDS = ("t4", "a100", "rtx2080ti")
QUICK = ("cifar10", "ncf")
"""Applications that are done within the hour."""
TESTBEDS = conf_folder() / "testbed"
KEPT = ("policy", "trace.models", "truth.measured", "cluster.node_types")
"""Keys that shrinking a case never removes: without them it would be another case, or depend on this machine's data."""
MOST_JOBS, MOST_TIGHT_JOBS = 8, 14
RIGID_ROUNDS, READER_ROUNDS = 40, 8
"""How many rounds the longest run time is: a decision about goodput costs milliseconds."""
PATIENCE_S = (0.0, 60.0, 1_000 / 3)
SECONDS = (0.0, 0.0, 0.0, 1 / 3, 1.0, 7.0, 15.0, 62.5, 1_000 / 3)
ROUNDS_S = (None, None, 60.0, 120.0, 360.0, 100 / 3, 7.3)
LONG_ROUNDS_S = (None, None, 60.0, 120.0, 360.0)


@dataclass(frozen=True)
class Case:
    """One policy on a few jobs. columns, rows: the job log. keys: what is typed beside the log's path, the testbed
    first; quotas of tenants without a job are left out.
    """

    truth: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    keys: Mapping[str, Any]

    def __post_init__(self) -> None:
        quotas = self.keys.get("cluster.virtual_clusters")
        if quotas:
            tenants = {row[self.columns.index("virtual_cluster")] for row in self.rows}
            kept = {name: gpus for name, gpus in quotas.items() if name in tenants}
            object.__setattr__(self, "keys", {**self.keys, "cluster.virtual_clusters": kept or None})

    @property
    def log(self) -> str:
        """The job log, a file's text."""
        return "".join(",".join(map(str, row)) + "\n" for row in (self.columns, *self.rows))

    def __str__(self) -> str:
        return (
            f"{self.log}python -m synergy_sim +trace=file trace.path=FILE {typed(self.keys)}{NEEDS.get(self.truth, '')}"
        )


def typed(keys: Mapping[str, Any]) -> str:
    """The keys as on a command line."""
    return " ".join(f"'{key}={_typed(value)}'" for key, value in keys.items())


def _typed(value: Any) -> str:
    """Formats a value as Hydra's command line has it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_typed(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_typed, value)) + "]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def random_case(random: Random, name: str | None = None) -> Case:
    """Any execution model × truth × cluster, for the policy called `name` or, without a name, for any policy.

    Half of the cases of policies that read no goodput are *tight*: one or two GPUs, no costs, times on a beat. There
    much happens at one instant.
    """
    if name is None:
        name = random.choice(RUN_TIME_POLICIES if random.random() < 0.5 else POLICIES)
    policy = get_policy(name)
    tight = name in RUN_TIME_POLICIES and random.random() < 0.5
    truth = random.choice(TIGHT_TRUTHS if tight else TRUTHS if name in RUN_TIME_POLICIES else TRAINING_TRUTHS)
    limits = _parameters(random, policy)
    execution = _tight_execution(random) if tight else _execution(random, truth, policy, limits)
    one_type = tight or (truth == "llm" and policy.name.startswith("pollux"))
    machines, cluster = _cluster(random, truth, tight, one_type)
    longest_s = _longest_s(policy, execution)
    columns, rows = _log(random, truth, machines, Times(random, longest_s, tight))
    models = {"profiled": "as_given"}.get(truth, truth)
    keys = {
        **execution,
        "policy": policy.name,
        "seed": random.randrange(100),
        "trace.models": models,
        "truth.measured": False,
        **cluster,
        **limits,
    }
    if truth == "llm":
        keys["trace.llm_gpus"] = 1
    if truth != "none":
        keys |= _blur(random, policy)
    return Case(truth, columns, rows, keys)


def _longest_s(policy: Policy, execution: Mapping[str, Any]) -> float:
    round_s = execution.get("round_s") or OmegaConf.load(TESTBEDS / f"{execution['testbed']}.yaml").get("round_s")
    own_s = 300.0 if isinstance(policy, OrderingPolicy) else policy.round_s
    return (READER_ROUNDS if getattr(policy, "reads_goodput", False) else RIGID_ROUNDS) * (round_s or own_s)


def smaller(case: Case) -> Iterator[Case]:
    """The case less a job, or less a key, which then is what conf/ says; the log's first job stays."""
    for row in range(len(case.rows) - 1, 0, -1):
        yield replace(case, rows=(*case.rows[:row], *case.rows[row + 1 :]))
    for key in case.keys:
        if key not in KEPT:
            yield replace(case, keys={name: value for name, value in case.keys.items() if name != key})


def _lease_s(policy: Policy, round_s: float | None, limits: Mapping[str, Any]) -> float:
    """How long a job surely runs before another has its turn; inf where jobs do not take turns for ever.

    Where starting, stopping and what is lost between checkpoints take longer than that, no job ever ends.
    """
    if not isinstance(policy, OrderingPolicy):
        return min(round_s or policy.round_s, policy.round_s)
    return min((value for name, value in limits.items() if ".quantum" in name), default=NEVER)


def _execution(random: Random, truth: str, policy: Policy, limits: Mapping[str, Any]) -> dict[str, Any]:
    """A testbed of conf/ as it stands, or its keys drawn. Work that is not drawn to fit is not done in short rounds."""
    long = truth in ("as_given", "mix", "llm")
    takes_turns = isinstance(policy, OrderingPolicy) and _lease_s(policy, None, limits) < NEVER
    if random.random() < 0.25 and not takes_turns:
        short = ("executor",) if long or not isinstance(policy, OrderingPolicy) else ()
        return {"testbed": random.choice([name for name in options("testbed") if name not in short])}
    round_s = random.choice(LONG_ROUNDS_S if long else ROUNDS_S)
    most_s = _lease_s(policy, round_s, limits) / 5
    costs = [seconds for seconds in SECONDS if seconds <= most_s]
    keys: dict[str, Any] = {
        "testbed": "ideal",
        "restart_s": random.choice(costs),
        "round_s": round_s,
        "testbed.launch_s": random.choice(costs),
        "testbed.exit_s": random.choice(costs),
        "testbed.checkpoint_interval_s": random.choice(costs),
        "testbed.resize_fraction": random.choice((1.0, 0.5, 0.0)),
        "testbed.free_moves": random.random() < 0.5,
        "testbed.whole_seconds": random.random() < 0.5,
        "testbed.own_rounds": random.random() < 0.3,
    }
    if truth == "llm":
        keys["testbed.startup_s"] = random.choice(costs)
    rounds = {
        "testbed.decide_fraction": random.choice((1.0, 0.5, 0.33, 0.9)),
        "testbed.stretch": random.choice(("none", "log", "linear")),
        "testbed.stretch_s": random.choice((6.3, 100.0)),
        "testbed.stretch_jobs": random.choice((None, 1)),
        "testbed.start_delay_s": random.choice((0.0, 10.0, 200.0)),
        "testbed.early_launch": random.random() < 0.7,
    }
    return keys if keys["round_s"] is None else keys | rounds


def _tight_execution(random: Random) -> dict[str, Any]:
    keys = {"testbed": "ideal", "restart_s": 0.0, "round_s": random.choice((None, None, 60.0, 120.0))}
    return keys if keys["round_s"] is None else keys | {"testbed.decide_fraction": random.choice((1.0, 0.5, 0.5))}


def _cluster(random: Random, truth: str, tight: bool, one_type: bool) -> tuple[Cluster, dict[str, Any]]:
    """One type or several, nodes of 1 to 8 GPUs, tenants, every rule of placement; and the keys that make it."""
    if truth == "profiled":
        shapes = [("cpu", 1, random.randint(1, 4))]
    elif tight:
        shapes = [(random.choice(KINDS), 1, random.randint(1, 2))]
    else:
        kinds = random.choices(KINDS, k=1 if one_type else random.choice((1, 1, 2, 3)))
        sizes = (1, 2, 4, 8) if truth == "llm" else range(1, 9)  # plans come in powers of two
        shapes = [(kind, random.choice((1, 1, 2, 3)), random.choice(sizes)) for kind in kinds]
    types = tuple(NodeType(f"{kind}-{i}", kind, nodes, gpus) for i, (kind, nodes, gpus) in enumerate(shapes))
    total = sum(each.gpus for each in types)
    tenants = min(random.choice((0, 0, 1, 2, 3)), total)
    quotas = {name: random.randint(1, total // tenants) for name in "abc"[:tenants]}
    made: dict[str, Any] = {
        "borrowing": bool(quotas) and random.random() < 0.5,
        "placement": random.choice(typing.get_args(PlacementRule)),
        "patience_s": random.choice(PATIENCE_S),
    }
    made["reclaim"] = (None, "any", "never")[sum(quotas.values()) % 3]  # not drawn, so that all else stays as recorded
    keys = {f"cluster.{name}": value for name, value in made.items()}
    keys["cluster.node_types"] = [
        {"gpu_type": each.gpu_type, "nodes": each.nodes, "gpus_per_node": each.gpus_per_node} for each in types
    ]
    keys["cluster.virtual_clusters"] = quotas or None
    return Cluster(types, quotas, **made), keys


def _log(
    random: Random, truth: str, machines: Cluster, times: Times
) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """Draws a few jobs, each of which the cluster can run: column names and rows. The first job arrives at 0 s."""
    given = truth in ("as_given", "profiled")
    what = ("model", "iterations", "global_batch") if given else ("duration_s", "estimate_s")
    columns = ("submit_s" if given else "submit_time", "gpus", "virtual_cluster", "user", "gpu_type", *what)
    rows: list[tuple[Any, ...]] = []
    for row in range(random.randint(1, times.most_jobs)):
        submit_s = times.submit_s(row)
        tenant = random.choice(tuple(machines.virtual_clusters) or ("",))
        kind = random.choice(("", "", *machines.gpu_types))
        most = machines.most_gpus_for(kind, tenant)
        gpus = random.randint(1, min(most, {"profiled": 2}.get(truth, 16)))
        if truth == "llm" and not row:
            gpus = 1  # at least one job is to become a language model
        asked = (submit_s, gpus, tenant, random.choice("uv"), kind)
        if truth == "profiled":
            rows.append((*asked, "wide", random.randint(1, int(10 * times.most_s + 1)), 8))
        elif given:
            model = random.choice(QUICK)
            rows.append((*asked, model, 1, load_model(model).initial_batch * min(gpus, 4)))
        else:
            duration_s = times.run_time_s()
            rows.append((*asked, duration_s, round(duration_s * random.choice((1.0, 1.0, 0.5, 3.0)), 3)))
    return columns, tuple(rows)


class Times:
    """Submissions and run times of one log. On a beat of a second or half a minute, ends meet decisions, submissions
    and one another; off it, nothing does. Some logs pause after the first job, which leaves sums fewer digits.
    """

    def __init__(self, random: Random, longest_s: float, tight: bool) -> None:
        self.random = random
        self.most_jobs = MOST_TIGHT_JOBS if tight else MOST_JOBS
        self.beat_s = random.choice((1.0, 30.0) if tight else (None, None, 1.0, 30.0))
        most_s = longest_s ** random.uniform(0.5, 1.0)  # as short as a restart, or as long as many rounds
        self.most_s = most_s if self.beat_s is None else min(longest_s, self.beat_s * random.choice((4, 20, 20, 100)))
        self.pause_s = random.choice((0.0, 100_000.0, 100_000.0) if tight else (0.0, 0.0, 100_000.0))
        self.last_s = 0.0

    def submit_s(self, row: int) -> float:
        gap_s = self._some_s(self.random.choice((0.3, 1.0)) * self.most_s) if self.random.random() < 0.8 else 0.0
        if row:
            self.last_s = round(self.last_s + gap_s + (self.pause_s if row == 1 else 0.0), 3)
        return self.last_s

    def run_time_s(self) -> float:
        return self._some_s(self.most_s)

    def _some_s(self, most_s: float) -> float:
        if self.beat_s is None:
            return round(self.random.uniform(0.0, most_s), 3)
        return self.beat_s * self.random.randint(0, max(1, int(most_s / self.beat_s)))


def _parameters(random: Random, policy: Policy) -> dict[str, Any]:
    """Limits in seconds or GPU-seconds as they are, or so much less that small cases meet them; other backfill."""
    known: dict[str, Any] = dict(SHORTER.get(policy.name.removesuffix("+plans"), {}))
    factor = random.choice((1.0, 0.1, 0.01))
    function = policy.key if isinstance(policy, OrderingPolicy) else policy.allocate
    for name, each in inspect.signature(function).parameters.items():
        if name.endswith("_s") and factor < 1.0:
            many = isinstance(each.default, tuple)
            known[name] = [limit * factor for limit in each.default] if many else each.default * factor
    if isinstance(policy, OrderingPolicy) and not policy.preemptive and random.random() < 0.3:
        known["backfill"] = random.choice(("none", "greedy", "easy"))
    return {f"parameters.{policy.name}.{name}": value for name, value in known.items()}


def _blur(random: Random, policy: Policy) -> dict[str, Any]:
    """Draws stragglers, and errors of what is known about training jobs."""
    keys = {"truth.straggler_fraction": random.choice((0.0, 0.5)), "truth.straggler_slowdown": 1.7}
    if isinstance(policy, OrderingPolicy):
        return keys
    return keys | {
        "information": random.choice((None, "own", "declared", "shared", "all")),
        "truth.noise_fraction": random.choice((0.0, 0.2)),
        "truth.declared_error": random.choice((0.0, 0.5)),
        "truth.not_preemptible": random.choice(([], ["cifar10"])),
    }
