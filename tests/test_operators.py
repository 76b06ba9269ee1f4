"""What an operator types: his own log, nodes to add; and policies side by side on equal terms."""

import gzip
import json

import pyarrow.parquet as pq
import pytest
from composed import composed
from test_traces_formats import text_of

from synergy_sim.prepare import prepared_runs

POLLUX = "name,time,application,num_replicas,batch_size\n"


def sacct(path, delimiter="|"):
    """Six jobs of two types, each submitted a minute after the one before and started half an hour later."""
    rows = []
    for number, kind in enumerate(["a100", "v100"] * 3):
        tres, submit_s = f"gres/gpu:{kind}=2,gres/gpu=2,node=1", 1_767_571_200 + 60 * number
        who = {"JobID": str(number + 1), "User": "ann" if number % 2 else "bob", "Partition": f"{kind}-queue"}
        when = {"Submit": str(submit_s), "Start": str(submit_s + 1_800), "Elapsed": "10:00"}
        rows.append(who | when | {"AllocTRES": tres, "ReqTRES": tres, "NodeList": f"{kind}-n01"})
    content = text_of("slurm", *rows, separator=delimiter, without=("End", "Timelimit")).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


TWO_TYPES = (
    "cluster.node_types=[{gpu_type: a100, nodes: 1, gpus_per_node: 2}, {gpu_type: v100, nodes: 1, gpus_per_node: 2}]"
)


def test_an_operators_log_shows_its_own_waits_and_keeps_who_sent_what(tmp_path, typed):
    log = sacct(tmp_path / "jobs.txt.gz", ";")
    done = typed("+trace=file", f"trace.path={log}", TWO_TYPES, "policy=[fifo,srtf]", "figures=false")
    assert done.returncode == 0, done.stderr
    assert "as logged" in done.stdout
    (folder,) = tmp_path.rglob("as-logged-0")
    assert json.loads((folder / "summary.json").read_text())["mean_waiting_s"] == 1_800.0
    jobs = pq.read_table(folder / "jobs.parquet").to_pydict()
    assert set(jobs["partition"]) == {"a100-queue", "v100-queue"}
    assert (set(jobs["virtual_cluster"]), set(jobs["user"])) == ({"vision"}, {"ann", "bob"})
    denser = typed("+trace=file", f"trace.path={log}", TWO_TYPES, "policy=fifo", "figures=false", "cluster.load=2")
    assert "as logged" not in denser.stdout


@pytest.mark.parametrize(
    ("overrides", "nodes"),
    [
        (["cluster.nodes=3", "cluster.add_nodes=8"], [11]),
        (["cluster.nodes=3", "cluster.add_nodes=-2"], [1]),
        ([TWO_TYPES, "cluster.node_types.1.nodes=12"], [1, 12]),
        (["cluster=heterogeneous", "cluster.node_types.0.nodes=5"], [5, 3, 6]),
    ],
)
def test_nodes_are_added_where_they_are_wanted(overrides, nodes, tmp_path):
    log = sacct(tmp_path / "jobs.txt")
    common = ("+trace=file", f"trace.path={log}", "policy=fifo", "cluster.ignore_gpu_types=true")
    (run,) = prepared_runs(composed(*common, *overrides))
    assert [each.nodes for each in run.cluster.node_types] == nodes


def test_what_a_packed_log_cannot_show_is_said_above_the_table(tmp_path, typed):
    rows = ({}, {"name": "b", "gpu_milli": "500", "memory_mib": "0"}, {"name": "c", "num_gpu": "0"})
    unscheduled = {"name": "d", "scheduled_time": ""}
    log = tmp_path / "openb_pod_list_default.csv.gz"
    log.write_bytes(gzip.compress(text_of("openb", *rows, unscheduled).encode()))
    done = typed("+trace=file", f"trace.path={log}", "policy=fifo", "figures=false")
    for each in (
        "2 of 4 pods",
        "1 of 2 pods request part of a GPU",
        "requests no memory",
        "1 never scheduled; 1 no GPU",
    ):
        assert each in done.stderr
    assert {each.parent.name for each in tmp_path.rglob("summary.json")} == {"fifo-0", "as-logged-0"}


def test_a_policy_that_is_told_less_is_also_run_on_equal_terms(tmp_path, typed):
    log = tmp_path / "jobs.csv"
    log.write_text(POLLUX + "a,0,cifar10,2,512\nb,0,ncf,1,1024\nc,90,cifar10,4,1024\n")
    common = ("experiment=sia_sosp23", f"trace.path={log}", "cluster=homogeneous", "figures=false")
    done = typed(*common, "policy=[sia,synergy]")
    assert done.returncode == 0, done.stderr
    assert "added, for a comparison on equal terms: sia-like-synergy (information=all, growth=4" in done.stderr
    assert "(on equal terms)" in " ".join(done.stdout.split())
    names = ["sia-0", "sia-like-synergy-0", "synergy-0"]
    assert sorted(path.parent.name for path in tmp_path.rglob("summary.json")) == names
    alone = typed(*common, "policy=[sia,synergy]", "same_information=false", f"results_dir={tmp_path / 'other'}")
    assert "added" not in alone.stderr
    assert "add sia(like=synergy)" in " ".join(alone.stdout.split())
    assert not list((tmp_path / "other").rglob("sia-like-synergy-0"))


def test_a_policy_stands_twice_with_other_parameters(tmp_path, typed):
    log = sacct(tmp_path / "jobs.txt")
    done = typed("+trace=file", f"trace.path={log}", TWO_TYPES, "policy=[las,las(quantum_s=60)]", "figures=false")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob("las-quantum_s-60-0/config.yaml")
    assert "las(quantum_s=60)" in path.read_text()
    assert "las-quantum_s-60" in done.stdout
