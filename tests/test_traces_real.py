"""Published logs, where SYNERGY_DATA has them: every row is read, or left out with a reason."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from pathlib import Path

import pytest
import yaml

from synergy_core.catalog import gpu_type_named
from synergy_core.units import GB
from synergy_runs.traces import read_trace


def of_data(name: str) -> Path:
    folder = os.environ.get("SYNERGY_DATA", "")
    if not folder or not (Path(folder) / name).is_file():
        pytest.skip(f"SYNERGY_DATA names no folder with {name}")
    return Path(folder) / name


def test_philly_is_read_whole() -> None:
    rows = read_trace(of_data("traces/philly.csv"))
    assert (len(rows), rows.bad_count, rows.notes) == (82_247, 0, [])
    assert {"6214e9", "103959"} <= set(rows.virtual_clusters.values())
    assert len(rows.virtual_clusters.values()) == 15
    assert sum(gpus == 1 for gpus in rows.gpus) == 76_627
    assert max(rows.duration_s) == 4_628_226


@pytest.mark.parametrize(("name", "open_to_any"), [("default", 6_203), ("gpuspec33", 4_453)])
def test_openbs_pods_are_used_or_left_out_with_a_reason(name: str, open_to_any: int) -> None:
    rows = read_trace(of_data(f"openb/openb_pod_list_{name}.csv.gz"))
    assert (len(rows), rows.bad_count) == (6_203, 0)
    assert dict(rows.left_out) == {"no GPU (CPU-only pods)": 1_088, "never scheduled": 861}
    assert "2,573 of 6,203" in rows.notes[2]
    assert not any(map(math.isnan, rows.cpus))
    assert sum(map(math.isnan, rows.memory_bytes)) == 1
    assert Counter(rows.gpu_types.values()[code] for code in rows.gpu_type)[""] == open_to_any


def test_openbs_cluster_has_every_kind_of_node_with_two_gpus_or_more_of_which_there_are_seven() -> None:
    counts: Counter[tuple[object, ...]] = Counter()
    with of_data("openb/openb_node_list_gpu_node.csv").open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            memory_gb = round(int(row["memory_mib"]) * 2**20 / GB, 1)
            counts[gpu_type_named(row["model"].lower()), int(row["gpu"]), int(row["cpu_milli"]) / 1_000, memory_gb] += 1
    conf = Path(__file__).parents[1] / "conf" / "cluster" / "openb.yaml"
    keys = ("gpu_type", "gpus_per_node", "cpus_per_node", "memory_gb_per_node")
    nodes = yaml.safe_load(conf.read_text(encoding="utf-8"))["node_types"]
    said = {tuple(each[key] for key in keys): each["nodes"] for each in nodes}
    assert said == {kind: count for kind, count in counts.items() if kind[1] > 1 and count >= 7}
