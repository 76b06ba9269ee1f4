"""A log that shows its own cluster: its nodes, its GPU types, its partitions."""

import json
from collections import Counter

import numpy as np
import pytest
from composed import composed

from synergy_core.errors import InputError
from synergy_runs.outputs.facts import Kind
from synergy_runs.outputs.invariants import check
from synergy_sim.prepare import prepared_runs
from synergy_sim.simulate import simulate

HEAD = "JobID|User|Account|Partition|State|Submit|Start|ElapsedRaw|AllocTRES|ReqTRES|NodeList\n"
START_S = 1_767_571_200
PARTITIONS = {"short": ("a100", ("a1",)), "long": ("a100", ("a2", "a3")), "old": ("v100", ("v1",))}
SHORT = "{gpu_type: a100@short, nodes: 3, gpus_per_node: 4}"
LONG = "{gpu_type: h100@long, nodes: 1, gpus_per_node: 4}"
OLD = "{gpu_type: v100@old, nodes: 1, gpus_per_node: 4}"


def sacct(path, jobs=60):
    """Jobs of 15 minutes, half of them for the partition short; a node of four GPUs runs one job at a time."""
    random, lines = np.random.default_rng(4), [HEAD]
    busy = {name: START_S for _, names in PARTITIONS.values() for name in names}
    for number in range(jobs):
        partition = ("short", "short", "long", "old")[number % 4]
        kind, names = PARTITIONS[partition]
        node = min(names, key=lambda name: busy[name])
        gpus, submit_s = int(random.choice((1, 2, 4))), START_S + 300 * number
        start_s = max(busy[node], submit_s)
        busy[node] = start_s + 900
        given = f"gres/gpu:{kind}={gpus},gres/gpu={gpus},node=1"
        fields = (number + 1, "ann", "lab", partition, "COMPLETED", submit_s, start_s, 900, given, f"gres/gpu={gpus}")
        lines.append("|".join(map(str, (*fields, node))) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture
def log(tmp_path):
    return sacct(tmp_path / "jobs.txt")


def prepared(log, *overrides):
    common = ("figures=false", "progress=false", "same_information=false")
    (run,) = prepared_runs(composed("+trace=file", f"trace.path={log}", *common, *overrides))
    return run


def machines(log, *overrides):
    run = prepared(log, "policy=fifo", *overrides)
    return [(each.gpu_type, each.nodes, each.gpus_per_node) for each in run.cluster.node_types]


def test_the_cluster_is_the_one_that_the_log_shows(log):
    assert machines(log) == [("a100", 3, 4), ("v100", 1, 4)]
    assert machines(log, "cluster.gpu_type=h100") == [("h100", 3, 4), ("h100", 1, 4)]
    assert machines(log, "cluster.nodes=7") == [("a100", 7, 4)]
    assert machines(log, "cluster.gpus_per_node=2", "trace.min_gpus=2") == [("a100", 6, 2), ("v100", 2, 2)]
    assert machines(log, "cluster.nodes=2", "cluster.gpus_per_node=8", "cluster.gpu_type=t4") == [("t4", 2, 8)]


def test_a_log_without_starts_is_refused_with_sizes_that_fit_it(tmp_path):
    """At most 16 + 8 + 4 GPUs are asked for at once; on average 2.8, and the largest job asks for 16."""
    path = tmp_path / "jobs.csv"
    path.write_text("submit_time,duration_s,gpus\n0,100,16\n0,100,8\n10,100,4\n1000,0,1\n")
    with pytest.raises(InputError, match=r"cluster\.nodes=4 no job would have to wait.*cluster\.nodes=2 "):
        machines(path)
    assert machines(path, "cluster.nodes=4") == [("v100", 4, 8)]


@pytest.mark.parametrize(
    "policy",
    [*("fifo", "easy", "srtf", "themis", "gavel", "sia", "optimus", "synergy", "ftf"),
     pytest.param("pollux", marks=pytest.mark.thorough)],
)  # fmt: skip
def test_jobs_stay_on_the_nodes_of_their_partition_under_every_policy(policy, tmp_path):
    run = prepared(sacct(tmp_path / "jobs.txt", jobs=28), f"policy={policy}", "cluster.partitions=trace")
    work = run.workload
    nodes = {(each.gpu_type, each.nodes, each.gpus_per_node) for each in run.cluster.node_types}
    assert nodes == {("a100@short", 1, 4), ("a100@long", 2, 4), ("v100@old", 1, 4)}
    assert not work.conversions  # each job stays on the type that it ran on
    done = simulate(work, run.cluster, run.policy, run.execution, truth=run.truth, seed=0)
    check(done)
    of_node = [each.partition("@")[2] for each in run.cluster.type_of_node]
    starts = np.flatnonzero(done.events.kind == Kind.START)
    ran_in = [of_node[node] for node in done.events.node[starts]]
    submitted_to = [work.jobs["partition"][job] for job in done.events.job_id[starts]]
    assert len(starts) >= 28
    assert ran_in == submitted_to


def test_a_full_partition_waits_beside_idle_nodes_of_others(log):
    waits_s = []
    for key in ("cluster.partitions=trace", "cluster.partitions=null"):
        run = prepared(log, "policy=fifo", key)
        events = simulate(run.workload, run.cluster, run.policy, run.execution).events
        starts = events.kind == Kind.START
        waits_s.append(float(events.time_s[starts].sum() - run.workload.jobs["submit_time_s"].sum()))
    assert waits_s[0] > 2 * waits_s[1]


def test_nodes_of_a_partition_are_changed_by_naming_them(log):
    types = f"cluster.node_types=[{SHORT}, {LONG}, {OLD}]"
    work = prepared(log, "policy=fifo", "cluster.partitions=trace", types).workload
    bound = Counter(work.jobs["gpu_type"].categories[code] for code in work.jobs["gpu_type"].codes)
    assert bound == {"a100@short": 30, "h100@long": 15, "v100@old": 15}
    assert [(each.of, each.on, each.jobs) for each in work.conversions] == [("a100", "h100", 15)]
    is_long = np.array([work.jobs["partition"].categories[code] == "long" for code in work.jobs["partition"].codes])
    np.testing.assert_allclose(work.jobs["duration_s"][is_long], 900 * 1555 / 3350, atol=1e-3)
    assert (work.jobs["duration_s"][~is_long] == 900).all()


@pytest.mark.parametrize("override", ["cluster.nodes=4", "cluster.gpu_type=h100", "cluster.gpus_per_node=2"])
def test_a_pool_of_nodes_cannot_be_shared_out_to_partitions(override, log):
    with pytest.raises(InputError, match="gpu_type: a100@short, nodes: 1"):
        machines(log, "cluster.partitions=trace", override)


SHARED = "JobID|Partition|State|Submit|Start|ElapsedRaw|AllocTRES|NodeList\n"


def on_partitions(path, *jobs):
    """A log in which one job of six GPUs ran on each of these (partition, GPU type, nodes)."""
    rows = (f"{i}|{queue}|COMPLETED|{i}|{i}|9|gres/gpu:{kind}=6|{on}\n" for i, (queue, kind, on) in enumerate(jobs))
    path.write_text(SHARED + "".join(rows))
    return path


def test_partitions_on_the_same_nodes_are_one_pool_and_one_on_all_nodes_may_use_all(tmp_path):
    jobs = [(queue, "t4", on) for queue, on in (("a", "n1"), ("b", "n1"), ("c", "n2"), ("all", "n[1-3]"))]
    run = prepared(on_partitions(tmp_path / "log", *jobs), "policy=fifo", "cluster.partitions=trace")
    assert [(each.gpu_type, each.nodes) for each in run.cluster.node_types] == [("t4@a", 1), ("t4@all", 1), ("t4@c", 1)]
    assert list(run.workload.jobs["gpu_type"]) == ["t4@a", "t4@a", "t4@c", ""]


def test_partitions_that_share_nodes_or_are_not_in_the_log_are_refused(tmp_path):
    overlapping = on_partitions(tmp_path / "log", ("a", "t4", "n[1-2]"), ("b", "t4", "n[2-3]"))
    with pytest.raises(InputError, match=r"several partitions \(n2\)"):
        machines(overlapping, "cluster.partitions=trace")
    plain = tmp_path / "jobs.csv"
    plain.write_text("submit_time,duration_s,gpus\n0,100,1\n")
    with pytest.raises(InputError, match="names no partitions"):
        machines(plain, "cluster.partitions=trace")


def test_the_summary_holds_the_conversions_and_what_is_said_names_the_cluster(log, tmp_path, typed):
    done = typed("+trace=file", f"trace.path={log}", "policy=fifo", "figures=false", "cluster.gpu_type=h100")
    assert done.returncode == 0, done.stderr
    assert all(each in done.stderr for each in ("3 × 4 h100 + 1 × 4 h100", "3 partitions (short, long, old)"))
    (path,) = tmp_path.rglob("fifo-0/summary.json")
    told = json.loads(path.read_text())["run_times_converted"]
    assert {(each["of"], each["on"], each["jobs"]) for each in told} == {("a100", "h100", 45), ("v100", "h100", 15)}
    assert all(each["low"] < each["factor"] == each["high"] for each in told)


def test_a_node_of_240_processors_is_as_many_nodes_of_one(tmp_path):
    path, random = tmp_path / "log.swf", np.random.default_rng(1)
    jobs = enumerate(random.integers(1, (240, 500), (40, 2)).tolist())
    rows = (f"{i} {9 * i} 5 {length} {n} -1 -1 {n} 900 -1 1 1 1 1 1 1 -1 -1\n" for i, (n, length) in jobs)
    path.write_text("; MaxProcs: 240\n" + "".join(rows))
    apart = ("cluster.nodes=240", "cluster.gpus_per_node=1", "cluster.placement=spread")
    starts = []
    for keys in ((), apart):
        run = prepared(path, "policy=easy", *keys)
        done = simulate(run.workload, run.cluster, run.policy, run.execution)
        check(done)
        first = (done.events.kind == Kind.START) & (done.events.part == 0)
        starts.append(dict(zip(done.events.job_id[first].tolist(), done.events.time_s[first].tolist(), strict=True)))
    assert starts[0] == starts[1]
