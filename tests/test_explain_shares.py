"""What `synergy_sim.explain` says of CPUs and memory agrees with the run: what a job has, what keeps it from more."""

import json

import numpy as np
import pytest
from composed import composed_values
from jobs import workload
from training_jobs import CATALOG, training

from synergy_core.scheduling.decisions.reasons import Waiting
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType, Share
from synergy_core.scheduling.policies import get_policy
from synergy_core.units import GB
from synergy_runs.inputs.keys import build
from synergy_runs.outputs.invariants import check
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import read_run
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.explain import Answer, Facts, demand, main
from synergy_sim.jobs import jobs_of
from synergy_sim.run import simulate_all
from synergy_sim.settings import SimulatorSettings
from synergy_sim.simulate import simulate


def node(cpus=24.0, memory_gb=500.0, storage_bytes_per_s=500e6):
    """Alexnet gains from up to 9.608 CPUs and 87.28 GB (its c and bytes, 512 samples in 0.2041 s)."""
    return NodeType("v", "v100", 1, 8, cpus, memory_gb * GB, storage_bytes_per_s)


def stored(tmp_path, work, machines, name, **parameters):
    """The facts of a run as they lie on disk, and its jobs made once more."""
    policy, costs = get_policy(name).with_parameters(**parameters), Costs(restart_s=0.0)
    execution = ExecutionModel(costs)
    run = simulate(work, machines, policy, execution, truth=CATALOG)
    check(run)
    write_run(run, tmp_path / name, "")
    made = jobs_of(work, machines, execution, CATALOG, tunes_batch=False)
    submissions = [(job.spec, job.request.share) for job in made]
    return Facts(read_run(tmp_path / name), policy, machines, execution, submissions=submissions)


def demand_of(facts, job_id, at_s=1_000.0):
    """The demand of a job that runs."""
    seen = facts.at(at_s)
    (job,) = [each for each in seen.running if each.job_id == job_id]
    return demand(seen, job)


def three(tmp_path, name, node):
    """Three jobs of one GPU, the third of which comes later."""
    machines = Cluster((node,))
    work = training([(at, 1, 9_000, "alexnet") for at in (0, 0, 400)], machines)
    return stored(tmp_path, work, machines, name)


@pytest.mark.parametrize(
    ("host", "facts"),
    [
        (node(), ("few CPUs", "9.608 CPUs and 87.28 GB for its GPU", "6 GPUs, 4.784 CPUs and 325.4 GB on node 0")),
        (node(memory_gb=200.0), ("few CPUs and too little memory",)),
        (node(96.0, 200.0), ("little memory", "9.608 CPUs and 87.28 GB for its GPU")),
    ],
)
def test_greedy_waits_though_gpus_are_free_and_says_which_of_both_is_missing(tmp_path, host, facts):
    told = Answer(three(tmp_path, "fifo+greedy", node=host), 2, 1_000.0)
    assert (told.state, told.free) == ("waiting", {0: 6})
    ((kind, text),) = told.reasons
    assert kind == Waiting.NO_SHARE
    assert all(fact in text for fact in facts)
    assert told.as_dict()["demand"]["has"] is None


def test_cpus_and_memory_may_be_free_on_different_nodes(tmp_path):
    """A node has 30 GB, too little; the CPUs of the other, which are all that it can want there, the first job has."""
    types = (NodeType("v", "v100", 1, 4, 12.0, 30 * GB, 500e6), NodeType("w", "v100", 1, 4, 5.0, 400 * GB, 500e6))
    machines = Cluster(types)
    work = training([(0, 1, 9_000, "alexnet"), (400, 1, 9_000, "alexnet")], machines)
    told = Answer(stored(tmp_path, work, machines, "fifo+greedy"), 1, 1_000.0)
    assert "not on one node: it needs 5 CPUs and 34.56 GB for its GPU" in told.reasons[0].text


ALEXNET = CATALOG.application("alexnet").pipeline
AS_SLOW = 8 * ALEXNET.sample_bytes * (1 - 10 * GB / ALEXNET.data_bytes) / (ALEXNET.cpu_s / 3)
"""Of storage with which 3 CPUs and 10 GB a GPU prepare input as slowly as it is read."""


@pytest.mark.parametrize(
    ("policy", "host", "job", "bound_by", "has", "speed"),
    [
        ("fifo+tune", node(), 0, "GPUs", Share(9.608, 87.28 * GB), 3.2),
        # Both the proportional share of 3 CPUs and what is left wait for CPUs.
        ("fifo+tune", node(), 2, "CPUs", Share(24 - 2 * 9.608, 87.28 * GB), (24 - 2 * 9.608) / 3),
        ("fifo+proportional", node(240.0, 80.0), 0, "memory", Share(30.0, 10 * GB), 1.0),
        ("fifo+proportional", node(24.0, 80.0, AS_SLOW), 0, "CPUs and memory", Share(3.0, 10 * GB), 1.0),
    ],
)
def test_what_binds_a_running_job_is_told_with_its_share_and_speed(tmp_path, policy, host, job, bound_by, has, speed):
    facts = three(tmp_path, policy, node=host)
    found = demand_of(facts, job)
    assert found.bound_by == bound_by
    assert tuple(found.has) == pytest.approx(tuple(has), rel=1e-3)
    assert found.speed == pytest.approx(speed, rel=1e-3)
    text = Answer(facts, job, 1_000.0).text()
    assert f"bound by: {'its GPUs' if bound_by == 'GPUs' else bound_by}." in text
    assert f"speed: {speed:.2f} × its speed with the proportional share" in text


def test_of_a_job_that_only_has_a_run_time_nothing_is_known(tmp_path):
    facts = stored(tmp_path, workload([(0, 2, 5_000)]), Cluster((node(),)), "fifo+tune")
    told = Answer(facts, 0, 1_000.0)
    assert not told.demand.known
    assert "has 3 CPUs and 62.5 GB per GPU" in told.text()


def test_a_request_is_what_a_job_without_a_model_is_measured_by(tmp_path):
    work = workload([(0, 2, 5_000), (0, 6, 5_000)])
    work = work.with_columns(cpus=np.array([20.0, 6.0]), memory_bytes=np.array([50 * GB, 60 * GB]))
    facts = stored(tmp_path, work, Cluster((node(),)), "fifo+proportional")
    told = Answer(facts, 0, 1_000.0)
    assert told.demand.wanted == Share(10.0, 25 * GB)
    assert (told.demand.bound_by, round(told.demand.most_speed, 4)) == ("CPUs", 3.3333)
    assert Answer(facts, 1, 1_000.0).demand.bound_by == "GPUs"


MODELS = ("alexnet", "shufflenet", "res50", "m5", "gnmt", "lstm", "deepspeech")


@pytest.mark.parametrize(
    ("name", "quotas"),
    [("fifo+greedy", {}), ("las+tune", {"a": 8, "b": 6}), ("ftf+proportional", {}), ("fifo+opt", {"a": 8, "b": 6})],
)
def test_whoever_waits_after_a_decision_has_a_reason_and_whoever_runs_its_share(name, quotas, tmp_path):
    types = (NodeType("v", "v100", 2, 4, 12.0, 250 * GB, 250e6), NodeType("w", "v100", 1, 8, 32.0, 300 * GB, 500e6))
    machines = Cluster(types, virtual_clusters=quotas)
    random = np.random.default_rng(3)
    rows = [
        (float(at), int(random.choice((1, 1, 2, 4))), float(random.integers(300, 4_000)), str(random.choice(MODELS)))
        for at in np.cumsum(random.exponential(150, 60))
    ]
    work = training(rows, machines, tenants=[str(each) for each in random.choice(["a", "b"], len(rows))])
    facts = stored(tmp_path, work, machines, name)
    waited = 0
    for time_s in facts.decided_s[:: max(1, len(facts.decided_s) // 25)].tolist():
        seen = facts.at(time_s)
        for job in (each for each in seen.jobs if not each.running):
            ((kind, _),) = Answer(facts, job.job_id, time_s).reasons
            assert kind != Waiting.NEXT_DECISION, (time_s, job)
            if not name.endswith(("greedy", "opt")):  # those two let jobs wait for CPUs
                assert kind != Waiting.NO_SHARE
            waited += 1
        assert all(demand(seen, job).has == job.share for job in seen.running)
    assert waited > 20


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A run of two policies, of which one makes training jobs of all rows."""
    folder = tmp_path_factory.mktemp("explain")
    log = folder / "jobs.csv"
    log.write_text(
        "job,submit_time,duration_s,gpus,model\na,0,9000,1,alexnet\nb,0,9000,1,alexnet\nc,400,9000,1,alexnet\n"
    )
    keys = ["+trace=file", f"trace.path={log}", "policy=[fifo+greedy,synergy]", "cluster.nodes=1", "figures=false"]
    keys += ["cluster.cpus_per_node=24", "cluster.memory_gb_per_node=500", "cluster.storage_mb_per_s=500"]
    values = composed_values(*keys, "progress=false", "truth.measured=false")
    simulate_all(build(SimulatorSettings, values), values, folder / "out", say=False)
    return folder / "out"


def test_stored_run_is_explained_with_its_jobs_made_once_more(results, tmp_path):
    assert main([str(results / "fifo+greedy-0"), "c", "--at", "20m", "--json", str(tmp_path / "why.json")]) == 0
    told = json.loads((tmp_path / "why.json").read_text())
    assert told["demand"]["wanted"]["cpus"] == pytest.approx(9.608, rel=1e-3)


def test_a_round_of_synergy_is_explained_with_its_shares(results, tmp_path, capsys):
    assert main([str(results / "synergy-0"), "c", "--at", "20m", "--json", str(tmp_path / "why.json")]) == 0
    text, told = capsys.readouterr().out, json.loads((tmp_path / "why.json").read_text())
    assert told["time_s"] == 1_200
    assert f"job c got {told['chosen']['label']}." in text
    assert "CPUs and" in told["chosen"]["label"]
    assert [each["resource"] for each in told["limits"]] == ["GPUs", "CPUs", "memory"]
    assert [each["total"] for each in told["limits"]] == [8, 24, 500 * GB]
    assert "of 24 CPUs used" in text
    best = max(row["reduced"] for row in told["rows"])
    assert best - told["chosen"]["reduced"] == pytest.approx(told["rounding_loss"])


def test_a_log_that_has_changed_is_refused(results, capsys):
    log = results.parent / "jobs.csv"
    text = log.read_text()
    try:
        log.write_text(text + "d,500,60,1,alexnet\n")
        assert main([str(results / "fifo+greedy-0"), "c", "--at", "20m"]) == 2
        assert "its jobs cannot be made again" in capsys.readouterr().err
    finally:
        log.write_text(text)
