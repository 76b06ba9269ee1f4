"""Pollux: what its answers keep to, round after round, and a tiny simulation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import finish_s, workload

from synergy_core.cluster import Cluster, NodeType
from synergy_core.policies import get_policy
from synergy_core.policies.pollux import pollux
from synergy_runs.invariants import check
from synergy_sim.assignment import as_given
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate
from synergy_sim.truth import Truth


class FakeState(SimpleNamespace):
    """What the policy reads of a `GoodputState`, without beliefs."""

    def __len__(self):
        return len(self.job_id)

    def quotas_left(self):
        return [np.inf]

    def most_gpus(self, *, growth):
        return self.most

    def goodput(self, rows, *, batch):
        result = rows.gpus ** (0.9 - 0.1 * (rows.nodes > 1)) * (1.0 + np.arange(len(self))[:, None])
        return np.where(self.known[:, None], result, np.nan)

    def single_gpu_rate(self):
        return np.tile(np.arange(1.0, 1.0 + len(self.cluster.gpu_types)), (len(self), 1))


def fake(machines, jobs):
    """jobs: (age, attained service, restarts, most GPUs, known)."""
    age, attained, restarts, most, known = (np.array(column) for column in zip(*jobs, strict=True))
    count = len(jobs)
    return FakeState(
        now_s=10_000.0,
        cluster=machines,
        job_id=np.arange(count) + 3,
        submit_time_s=10_000.0 - age,
        attained_service_gpu_s=attained.astype(float),
        restarts=restarts,
        declared_restart_s=np.full(count, 30.0),
        unsaved_s=np.zeros(count),
        gpu_type=np.full(count, -1),
        held_gpus=np.zeros(count, int),
        held_type=np.full(count, -1),
        held_placement=((),) * count,
        planned=np.zeros(count, dtype=bool),
        must_stay=np.zeros(count, dtype=bool),
        virtual_cluster=np.zeros(count, int),
        min_gpus=np.ones(count, dtype=np.int64),
        tasks=tuple(SimpleNamespace(spec=SimpleNamespace(most_gpus=64)) for _ in jobs),
        most=most,
        known=known,
        memory=None,
    )


def after(state, answer):
    """The state a round later, with the answer carried out."""
    placed = tuple(
        tuple((int(node), (1 << int(row[node])) - 1) for node in np.flatnonzero(row)) for row in answer.node_gpus
    )
    changed = {
        "now_s": state.now_s + 60,
        "held_gpus": answer.gpus,
        "held_type": answer.gpu_type,
        "held_placement": placed,
        "attained_service_gpu_s": state.attained_service_gpu_s + 60.0 * answer.gpus,
        "memory": answer.memory,
    }
    return FakeState(**{**vars(state), **changed})


ONE_TYPE = Cluster((NodeType("t4", "t4", 4, 4),))
MIXED = Cluster((NodeType("t4", "t4", 2, 4), NodeType("rtx", "rtx", 1, 8), NodeType("a100", "a100", 1, 8)))
JOBS = st.lists(
    st.tuples(
        st.integers(0, 9_000), st.integers(0, 90_000), st.integers(0, 5), st.sampled_from([1, 2, 5, 16]), st.booleans()
    ),
    min_size=1,
    max_size=6,
)
QUICK = {"population": 20, "generations": 15}


@pytest.mark.parametrize("machines", [ONE_TYPE, MIXED], ids=["one-type", "types"])
@settings(max_examples=25)
@given(jobs=JOBS)
def test_answers_keep_to_nodes_types_and_limits_and_the_same_state_gives_the_same_answer(machines, jobs):
    state = fake(machines, jobs)
    sizes = [each.gpus_per_node for each in machines.node_types for _ in range(each.nodes)]
    kinds = [machines.gpu_types.index(each.gpu_type) for each in machines.node_types for _ in range(each.nodes)]
    for _ in range(3):
        answer = pollux(state, **QUICK)
        again = pollux(state, **QUICK)
        np.testing.assert_array_equal(answer.node_gpus, again.node_gpus)
        assert (answer.node_gpus.sum(axis=0) <= sizes).all()
        np.testing.assert_array_equal(answer.node_gpus.sum(axis=1), answer.gpus)
        assert (answer.gpus <= state.most).all()
        for row, gpus, kind in zip(answer.node_gpus, answer.gpus, answer.gpu_type, strict=True):
            assert {kinds[node] for node in np.flatnonzero(row)} == ({kind} if gpus else set())
        if machines is ONE_TYPE:
            spanning = (answer.node_gpus > 0).sum(axis=1) > 1
            assert ((answer.node_gpus[spanning] > 0).sum(axis=0) <= 1).all()
        state = after(state, answer)


def test_another_seed_may_answer_otherwise_and_rounds_draw_their_own_numbers():
    state = fake(MIXED, [(5_000, 100 * i, 0, 16, True) for i in range(6)])
    answers = {pollux(state, **QUICK, seed=seed).node_gpus.tobytes() for seed in range(4)}
    assert len(answers) > 1


def test_jobs_that_gain_too_little_are_left_alone():
    state = fake(ONE_TYPE, [(5_000, 0, 0, 16, True), (5_000, 10, 0, 16, True)])
    first = pollux(state)
    later = pollux(after(state, first))
    assert (pollux(after(after(state, first), later)).node_gpus == later.node_gpus).all()


def test_a_lone_job_grows_to_what_it_may_have_and_skipping_settled_rounds_changes_nothing():
    state = fake(ONE_TYPE, [(5_000, 0, 0, 16, True)])
    answer = pollux(state)
    assert answer.gpus.tolist() == [16]
    held = after(state, answer)
    np.testing.assert_array_equal(pollux(held).node_gpus, pollux(held, skip_settled=False).node_gpus)


def write_application(folder, placements):
    folder.mkdir()
    rows = ["placement,local_bsz,step_time,sync_time"]
    for shape in placements:
        nodes, gpus = len(shape), sum(map(int, shape))
        for batch in (8, 32, 128):
            sync_s = 0.0 if gpus == 1 else 0.02 * nodes
            rows.append(f"{shape},{batch},{0.05 + 0.002 * batch + sync_s},{sync_s}")
    (folder / "placements-t4.csv").write_text("\n".join(rows) + "\n")
    for batch in (32, 512):
        epochs = [f"{40 * (e + 1)},{40 * (e + 1)},0.001,{0.01 * (e + 1)}" for e in range(5)]
        header = "progress,iteration,grad_sqr,grad_var"
        (folder / f"validation-{batch}.csv").write_text("\n".join([header, *epochs]) + "\n")


def test_a_small_workload_is_simulated_to_its_end_and_reproducibly(tmp_path):
    write_application(tmp_path / "net", ["1", "2", "3", "4", "11", "12", "13", "22", "33", "34", "44", "23", "24"])
    machines, truth = Cluster((NodeType("t4", "t4", 2, 4),)), Truth(tmp_path)
    work = workload([(30 * i, 1, 100) for i in range(5)], models=["net"] * 5)
    work = as_given(replace(work, global_batch=np.full(5, 64, np.int32)), machines, truth)
    policy = get_policy("pollux").with_parameters(**QUICK)
    execution = ExecutionModel(Costs(launch_s=30.0, restart_s=30.0), round_s=60.0)
    once, again = (simulate(work, machines, policy, execution, truth=truth) for _ in range(2))
    check(once)
    assert not np.isnan(finish_s(once)).any()
    assert once.events.digest() == again.events.digest()
