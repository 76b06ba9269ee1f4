"""The cluster that a Slurm log shows: nodes that it names, GPUs that its jobs held at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_traces_slurm import read

from synergy_runs.traces.cluster_seen import seen, setting
from synergy_runs.traces.slurm import node_names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("a1,b[9-11]-x", ["a1", "b9-x", "b10-x", "b11-x"]),
        ("n001", ["n001"]),
        ("", []),
        ("None assigned", []),
    ],
)
def test_node_lists_are_written_out(text: str, names: list[str]) -> None:
    assert node_names(text) == names


@given(st.text(alphabet="abn019[]-, ", max_size=20))
def test_no_node_list_breaks_the_reader(text: str) -> None:
    assert all(isinstance(name, str) for name in node_names(text))


TWO_TYPES = [
    {"JobID": f"{number}", "AllocTRES": f"gres/gpu:{kind}={gpus},gres/gpu={gpus},node={nodes}", "NodeList": names}
    for number, (kind, gpus, nodes, names) in enumerate(
        [("a100", 8, 1, "a1"), ("a100", 16, 2, "a[2-3]"), ("v100", 3, 1, "v1"), ("v100", 2, 1, "v2")]
    )
]
"""All at once."""


def test_the_cluster_is_told_from_what_its_jobs_held(tmp_path: Path) -> None:
    a100, v100 = seen(read(tmp_path, *TWO_TYPES)).nodes
    assert (a100.gpu_type, a100.most_gpus, a100.nodes, a100.gpus_per_node, a100.named) == ("a100", 24, 3, 8, True)
    assert (v100.gpu_type, v100.most_gpus, v100.nodes, v100.gpus_per_node) == ("v100", 5, 2, 4)
    assert setting([a100, v100]) == (
        "'cluster.node_types=[{gpu_type: a100, nodes: 3, gpus_per_node: 8}, "
        "{gpu_type: v100, nodes: 2, gpus_per_node: 4}]'"
    )


def test_without_names_there_are_as_few_nodes_as_hold_what_was_held(tmp_path: Path) -> None:
    a100, v100 = seen(read(tmp_path, *TWO_TYPES, without=("NodeList",))).nodes
    assert (a100.nodes, a100.gpus_per_node, a100.named) == (3, 8, False)
    assert (v100.nodes, v100.gpus_per_node) == (2, 4)


def test_jobs_one_after_another_need_no_more_gpus_than_one_of_them(tmp_path: Path) -> None:
    later = {"JobID": "124", "Start": "2024-01-01T01:01:00", "End": "2024-01-01T02:01:00"}
    (only,) = seen(read(tmp_path, {}, later)).nodes
    assert (only.most_gpus, only.nodes, only.gpus_per_node) == (4, 1, 4)


def test_without_starts_or_types_less_is_told(tmp_path: Path) -> None:
    assert seen(read(tmp_path, {}, without=("Start",))).nodes == ()
    (untyped,) = seen(read(tmp_path, {"AllocTRES": "gres/gpu=4,node=1"})).nodes
    assert setting([untyped]) == "cluster.nodes=1 cluster.gpus_per_node=4"
