"""Alibaba's OpenB and spot GPUs, on rows of our own; OpenB's own files where they are at hand."""

from __future__ import annotations

import csv
import gzip
import math
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from test_traces_clusters import states, written

from synergy_core.catalog import gpu_type_named
from synergy_core.units import GB
from synergy_runs.traces import read_trace
from synergy_runs.traces.rows import TraceRows
from synergy_sim.__main__ import main

OPENB = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
SPOT = "job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type"


def pod(
    name: str = "p",
    cpu: str = "8000",
    memory: str = "16384",
    gpus: str = "1",
    milli: str = "1000",
    spec: str = "",
    phase: str = "Succeeded",
    times: str = "100,700,130",
) -> str:
    return f"{name},{cpu},{memory},{gpus},{milli},{spec},LS,{phase},{times}"


def openb(folder: Path, *lines: str) -> TraceRows:
    path = folder / "openb_pod_list_default.csv.gz"
    path.write_bytes(gzip.compress("".join(line + "\n" for line in (OPENB, *lines)).encode()))
    return read_trace(path)


def gpu_types(rows: TraceRows) -> list[str]:
    names = rows.gpu_types.values()
    return [names[code] for code in rows.gpu_type]


def test_a_pod_is_a_job_with_its_cpus_and_memory(tmp_path: Path) -> None:
    rows = openb(tmp_path, pod("0012", cpu="3152", gpus="8", memory="262144"))
    assert rows.format_name == "openb"
    assert (rows.submit_s[0], rows.start_s[0], rows.duration_s[0], rows.gpus[0]) == (100, 130, 570, 8)
    assert (rows.cpus[0], rows.memory_bytes[0]) == (3.152, 256 * 2**30)
    assert (rows.job_name, gpu_types(rows), states(rows)) == (["0012"], [""], ["completed"])
    assert rows.notes == [
        "1 of 1 pods (100.0 %) are replayed",
        "times count from the log's start: dates count from 1970-01-01",
    ]


def test_part_of_a_gpu_becomes_a_whole_one_and_is_said(tmp_path: Path) -> None:
    rows = openb(tmp_path, pod("a", milli="460"), pod("b", milli="160"), pod("c"))
    assert list(rows.gpus) == [1, 1, 1]
    assert rows.notes[2:] == [
        "2 of 3 pods request part of a GPU, 0.310 on average: here each is a job on one whole GPU"
    ]


def test_one_gpu_type_binds_and_several_are_left_open(tmp_path: Path) -> None:
    specs = ("T4", "V100M32|V100M32", "V100M16", "G2", "V100M16|V100M32", "P100|T4")
    rows = openb(tmp_path, *(pod(f"p{number}", spec=spec) for number, spec in enumerate(specs)))
    assert gpu_types(rows) == ["t4", "v100-32gb", "v100", "g2", "", ""]
    assert rows.notes[2:] == [
        "2 pods list several GPU types: here they run on any type",
        "GPU types that the catalog does not have bind pods by their names: g2 (1)",
    ]


def test_pods_deleted_while_running_were_killed_and_those_of_the_last_instant_are_counted(tmp_path: Path) -> None:
    times = ("100,700,130", "100,900,130", "200,900,200")
    rows = openb(tmp_path, *(pod(f"p{at}", phase="Running", times=each) for at, each in enumerate(times)))
    assert states(rows) == ["killed"] * 3
    assert rows.notes[-1] == "2 running pods end at the log's last instant: how much longer they ran is unknown"
    assert states(openb(tmp_path, pod(phase="Failed"))) == ["failed"]


def spot(folder: Path, *lines: str) -> TraceRows:
    return read_trace(written(folder, "job_info_df.csv", SPOT, *lines))


def test_a_spot_table_row_is_a_job_of_all_its_workers(tmp_path: Path) -> None:
    rows = spot(tmp_path, "007,13,A100-SXM4-80GB,15,2,94,60,71718,Spot", "8,57,GPU-series-1,,1,1,0,9,HP")
    assert rows.format_name == "spot2026"
    assert (rows.submit_s[0], rows.duration_s[0], rows.gpus[0], rows.cpus[0]) == (60, 71_718, 188, 1_410)
    assert (rows.job_name, rows.virtual_clusters.values()) == (["007", "8"], ("13", "57"))
    assert gpu_types(rows) == ["a100-80gb", "gpu-series-1"]
    assert math.isnan(rows.cpus[1])
    assert all(map(math.isnan, rows.memory_bytes))
    assert rows.notes[1:] == ["1 of 2 jobs are Spot, others HP: here all are equal"]


def test_a_packed_log_is_recognised_replayed_and_what_is_lost_is_said_above_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    openb(tmp_path, pod("a", milli="500"), pod("b", memory="0"), pod("c", gpus="0"), pod("d", times="1,2,"))
    given = ["+trace=file", f"trace.path={tmp_path / 'openb_pod_list_default.csv.gz'}", "policy=fifo"]
    monkeypatch.setattr(sys, "argv", ["synergy_sim", *given, "figures=false", f"results_dir={tmp_path / 'r'}"])
    main()
    said = capsys.readouterr()
    for line in (
        "2 of 4 pods (50.0 %) are replayed",
        "1 of 2 pods request part of a GPU, 0.500 on average: here each is a job on one whole GPU",
        "1 of 2 rows requests no memory",
        "left out: 1 never scheduled; 1 no GPU (CPU-only pods)",
    ):
        assert line in said.err.splitlines()
    assert "file · 2 jobs" in said.out
    assert {each.parent.name for each in (tmp_path / "r").rglob("summary.json")} == {"fifo-0", "as-logged-0"}


def own_file(name: str) -> Path:
    folder = os.environ.get("SYNERGY_DATA", "")
    path = Path(folder) / "openb" / name
    if not folder or not path.is_file():
        pytest.skip(f"SYNERGY_DATA names no folder with openb/{name}")
    return path


@pytest.mark.parametrize("name", ["default", "gpuspec33"])
def test_the_real_pods_are_used_or_left_out_with_a_reason(name: str) -> None:
    rows = read_trace(own_file(f"openb_pod_list_{name}.csv.gz"))
    assert (len(rows), rows.bad_count) == (6_203, 0)
    assert dict(rows.left_out) == {"no GPU (CPU-only pods)": 1_088, "never scheduled": 861}
    assert rows.notes[0] == "6,203 of 8,152 pods (76.1 %) are replayed"
    assert rows.notes[2].startswith("2,573 of 6,203 pods request part of a GPU, 0.578 on average")
    assert not any(map(math.isnan, rows.cpus))
    assert sum(map(math.isnan, rows.memory_bytes)) == 1
    assert Counter(gpu_types(rows))[""] == (6_203 if name == "default" else 4_453)


def test_the_clusters_nodes_are_those_of_the_list() -> None:
    """Every kind of node with two GPUs or more of which there are seven or more."""
    with own_file("openb_node_list_gpu_node.csv").open(encoding="utf-8") as stream:
        counts = Counter(
            (
                gpu_type_named(row["model"].lower()),
                int(row["gpu"]),
                int(row["cpu_milli"]) / 1_000,
                round(int(row["memory_mib"]) * 2**20 / GB, 1),
            )
            for row in csv.DictReader(stream)
        )
    conf = Path(__file__).parents[1] / "conf" / "cluster" / "openb.yaml"
    keys = ("gpu_type", "gpus_per_node", "cpus_per_node", "memory_gb_per_node")
    nodes = yaml.safe_load(conf.read_text(encoding="utf-8"))["node_types"]
    said = {tuple(each[key] for key in keys): each["nodes"] for each in nodes}
    assert said == {kind: count for kind, count in counts.items() if kind[1] > 1 and count >= 7}
