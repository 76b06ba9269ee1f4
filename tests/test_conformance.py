"""The rules that every policy keeps: all that are registered do, and one made to break each rule is caught by it."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from training_jobs import policy_named

from synergy_core.checking.cases import NOW_S
from synergy_core.checking.conformance import conforms
from synergy_core.checking.rules import RULES, BrokenRuleError
from synergy_core.scheduling.jobs.views import Allocations
from synergy_core.scheduling.policies import get_policy, policy_names

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def few(monkeypatch):
    """Whole runs of six jobs only."""
    monkeypatch.setattr("synergy_core.checking.conformance.JOBS", (6,))


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_keeps_the_rules(name, few):
    conforms(policy_named(name))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("tiresias", {"promote_knob": 0.5}), ("las", {"quantum_s": 60.0}), ("sia", {"method": "steps"})],
)
def test_rules_are_kept_under_other_parameters(name, parameters, few):
    conforms(get_policy(name).with_parameters(**parameters))


def order(key, **more):
    return replace(get_policy("fifo"), name="bad", key=key, words=None, **more)


def allocation(allocate, **more):
    return replace(get_policy("themis"), name="bad", allocate=allocate, rank=None, **more)


def greedy(state, order, *, capacity=True, quotas=True, types=True, stays=True, most=None):
    """Starts jobs that fit, in this order of rows, under the chosen rules; jobs that may not be stopped come first."""
    order = sorted(order, key=lambda row: not (stays and state.must_stay[row]))
    left = [state.cluster.gpus_of(kind) if capacity else np.inf for kind in state.cluster.gpu_types]
    quota = state.quotas_left() if quotas else [np.inf] * len(state.virtual_clusters)
    gpus, kinds = np.zeros(len(state), dtype=np.int64), np.full(len(state), -1)
    for row in order:
        need, tenant = min(int(state.gpus[row]), most or 99), int(state.virtual_cluster[row])
        for kind in state.types_for(row) if types else range(len(left)):
            if need <= left[kind] and need <= quota[tenant] and not gpus[row]:
                left[kind] -= need
                quota[tenant] -= need
                gpus[row], kinds[row] = need, kind
    return Allocations(gpus, kinds)


def listed(state):
    return list(range(len(state)))


def by_size(state):
    return np.lexsort((state.job_id, state.gpus)).tolist()


def only(wanted):
    """Jobs of wanted sizes alone."""
    return lambda state: greedy(state, [row for row in by_size(state) if wanted(state.gpus[row])])


def writes(state):
    state.gpus[0] = 1
    return greedy(state, by_size(state))


def crammed(state, nodes):
    """All on the first node."""
    answer = greedy(state, by_size(state))
    return replace(answer, node_gpus=np.outer(answer.gpus, np.eye(nodes, dtype=np.int64)[0]))


def doubled(state):
    """Twice what the first job that waits requests, and for all others what they hold."""
    first = np.flatnonzero(state.held_gpus == 0)[:1]
    gpus, kinds = state.held_gpus.copy(), state.held_type.copy()
    for row in first.tolist():
        for kind in state.types_for(row):
            free = state.cluster.gpus_of(state.cluster.gpu_types[kind]) - gpus[kinds == kind].sum()
            held = gpus[state.virtual_cluster == state.virtual_cluster[row]].sum()
            room = min(free, state.quotas_left()[int(state.virtual_cluster[row])] - held)
            if not gpus[row] and room > 0:
                gpus[row], kinds[row] = min(2 * state.gpus[row], 16, room), kind
    return Allocations(gpus, kinds)


def changes_its_mind():
    calls = count()
    return lambda state: greedy(state, by_size(state)[:: 1 if next(calls) % 2 else -1])


def at_work(then):
    """As `then` says when put to work, which no round makes decide at the instant of the cases; well-behaved before."""
    return lambda state: then(state) if state.now_s != NOW_S else greedy(state, by_size(state))


def renames(job):
    job._job.request = job._job.request._replace(user="somebody")
    return (job.submit_time_s,)


def next_change_that_renames(job, now_s):
    renames(job)


def counts():
    calls = count()
    return lambda job: (next(calls),)


def another_way_each_run():
    """Turns its order round whenever the clock has gone back: of two runs, one is by size and one is not."""
    runs, now_s = count(), np.inf
    turn = next(runs)

    def allocate(state):
        nonlocal turn, now_s
        turn = next(runs) if state.now_s < now_s else turn
        now_s = state.now_s
        return greedy(state, by_size(state)[:: 1 if turn % 2 else -1])

    return allocate


STARTS_NOBODY = allocation(lambda state: greedy(state, []))
BROKEN = [
    ("answers", order(lambda job: (1 / (job.gpus - 4),))),
    ("answers", order(lambda job: (0 / (job.submit_time_s - 630),))),  # when the first job put to work arrives
    ("answers", order(lambda job: (job.submit_time_s,), next_change=lambda job, now_s: "soon")),
    ("answers", replace(order(lambda job: (job.submit_time_s,)), words=lambda job: None)),
    ("answers", allocation(lambda state: state.gpus)),
    ("answers", allocation(lambda state: Allocations(np.array([1, 1]), np.array([-1, -1])))),
    ("answers", allocation(lambda state: Allocations(-state.gpus, state.gpu_type))),
    ("answers", allocation(lambda state: greedy(state, by_size(state)), round_s=0.0)),
    ("answers", allocation(at_work(lambda state: {}[0]))),
    ("answers", allocation(at_work(lambda state: greedy(state, by_size(state), capacity=False)))),
    ("comparable", order(lambda job: [job.submit_time_s])),
    ("comparable", order(lambda job: (float("nan"),))),
    ("comparable", order(lambda job: (job.gpus if job.gpus > 2 else "small",))),
    ("comparable", order(lambda job: (), preemptive=True, falls_while_running=True)),
    ("pure", order(counts())),
    ("pure", allocation(changes_its_mind())),
    ("reads", order(renames)),
    ("reads", order(lambda job: (job.submit_time_s,), next_change=next_change_that_renames)),
    ("reads", allocation(writes)),
    ("foretold", order(lambda job: (job.attained_service_gpu_s,), preemptive=True)),
    ("foretold", order(lambda job: (-job.waited_s,))),
    ("foretold", order(lambda job: (job.attained_service_gpu_s,), preemptive=True, falls_while_running=True)),
    ("capacity", allocation(lambda state: greedy(state, by_size(state), capacity=False))),
    ("capacity", allocation(lambda state: crammed(state, state.cluster.nodes))),
    ("answers", allocation(lambda state: crammed(state, 5))),
    ("quotas", allocation(lambda state: greedy(state, by_size(state), quotas=False))),
    ("types", allocation(lambda state: greedy(state, by_size(state), types=False))),
    ("whole", allocation(lambda state: greedy(state, by_size(state), most=2))),
    ("stays", allocation(lambda state: greedy(state, by_size(state), stays=False))),
    ("sizes", replace(get_policy("gavel"), name="bad", allocate=doubled, rank=None)),
    ("order", allocation(lambda state: greedy(state, listed(state)))),
    ("starts", STARTS_NOBODY),
    ("rank", replace(get_policy("themis"), rank=lambda state: np.full(len(state), np.nan))),
    ("ends", allocation(at_work(only(lambda gpus: gpus > 1)))),
    ("placed", allocation(at_work(lambda state: greedy(state, by_size(state), quotas=False)))),
    ("placed", allocation(at_work(lambda state: greedy(state, by_size(state), types=False)))),
    ("entitled", allocation(at_work(lambda state: greedy(state, by_size(state)[:1])))),
    ("repeats", allocation(at_work(changes_its_mind()))),
]


@pytest.mark.parametrize(("rule", "policy"), BROKEN, ids=[f"{rule}-{at}" for at, (rule, _) in enumerate(BROKEN)])
def test_policy_that_breaks_a_rule_is_told_which(rule, policy):
    with pytest.raises(BrokenRuleError, match=rf"breaks the rule '{rule}' .*Smallest case: .*GPUs") as caught:
        conforms(policy)
    assert caught.value.rule == rule


def test_every_rule_has_a_policy_that_breaks_it():
    assert {rule for rule, _ in BROKEN} == set(RULES)


SMALLEST = {
    "order": (allocation(lambda state: greedy(state, listed(state))), 2),
    "ends": (allocation(at_work(only(lambda gpus: gpus == 4))), 1),
    "repeats": (allocation(at_work(another_way_each_run())), 4),
}
"""How many jobs it takes to break the rule: two to tell one order from another, four to ask for more than 16 GPUs."""


@pytest.mark.parametrize("rule", SMALLEST)
def test_the_smallest_case_has_no_job_too_many(rule, monkeypatch):
    monkeypatch.setattr("synergy_core.checking.conformance.JOBS", (8,))
    policy, jobs = SMALLEST[rule]
    with pytest.raises(BrokenRuleError, match=rf"breaks the rule '{rule}'") as caught:
        conforms(policy)
    assert str(caught.value).partition("Smallest case")[2].count("for tenant") == jobs


@pytest.mark.parametrize("round_s", [7.7, 33.3])
def test_round_that_no_float_holds_exactly_iscarried_out(round_s, few):
    conforms(allocation(lambda state: greedy(state, by_size(state)), round_s=round_s))


PLUG_IN = '''"""Narrow jobs first."""

from synergy_core.scheduling.policies import ordering_policy
from synergy_core.scheduling.jobs.views import JobView


@ordering_policy(backfill="greedy")
def narrow(job: JobView) -> tuple[int, float]:
    """Fewest GPUs first, then by arrival."""
    return job.gpus, job.submit_time_s


@ordering_policy(preemptive=True)
def hungry(job: JobView) -> tuple[float]:
    """Least attained service, and nobody is told when that changes."""
    return (job.attained_service_gpu_s,)
'''


@pytest.fixture
def plug_in(tmp_path):
    """An installed package of somebody else's: one module, and the entry point that names it."""
    (tmp_path / "their_policies.py").write_text(PLUG_IN, encoding="utf-8")
    told = tmp_path / "their_policies-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.0\n", encoding="utf-8")
    (told / "entry_points.txt").write_text("[synergy.policies]\ntheirs = their_policies\n", encoding="utf-8")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}


def said(environment, *words):
    done = subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_plug_in_is_one_file_which_the_command_checks_and_the_simulator_runs(plug_in, tmp_path):
    status, shown, errors = said(plug_in, "synergy_core", "check", "narrow", "hungry")
    assert status == 2
    assert shown.startswith("narrow: keeps the rules\n  jobs wait at most cluster.max_wait × ")
    assert errors.startswith("error: policy hungry breaks the rule 'foretold'")
    keys = ("+trace=philly", "trace.window=2017-10-02/6h", "figures=false", "progress=false")
    status, shown, errors = said(plug_in, "synergy_sim", *keys, "policy=[fifo,narrow]", f"results_dir={tmp_path}/out")
    assert (status, "narrow" in shown) == (0, True), errors
