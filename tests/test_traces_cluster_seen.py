"""The cluster that a Slurm log shows: nodes that it names, GPUs that its jobs held at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_traces_formats import Row, read

from synergy_runs.traces.cluster_seen import seen, setting
from synergy_runs.traces.room import seconds_with_room
from synergy_runs.traces.rows import TraceRows
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


@settings(max_examples=50)
@given(st.text(alphabet="abn019[]-, ", max_size=20))
def test_no_node_list_breaks_the_reader(text: str) -> None:
    assert all(isinstance(name, str) for name in node_names(text))


def held(kind: str, gpus: int, nodes: int, names: str, **more: str) -> Row:
    return {
        "JobID": names,
        "AllocTRES": f"gres/gpu{kind}={gpus},gres/gpu={gpus},node={nodes}",
        "NodeList": names,
    } | more


AT_ONCE = [
    held(":a100", 8, 1, "a1"),
    held(":a100", 16, 2, "a[2-3]"),
    held(":v100", 3, 1, "v1"),
    held(":v100", 2, 1, "v2"),
]
LATER = {"JobID": "124", "Start": "2024-01-01T01:01:00", "End": "2024-01-01T02:01:00"}


@pytest.mark.parametrize(
    ("rows", "without", "expected"),
    [
        pytest.param(AT_ONCE, (), [("a100", 24, 3, 8, True), ("v100", 5, 2, 4, True)], id="what its jobs held"),
        pytest.param(
            AT_ONCE,
            ("NodeList",),
            [("a100", 24, 3, 8, False), ("v100", 5, 2, 4, False)],
            id="as few nodes as hold that",
        ),
        pytest.param([{}, LATER], (), [("a100", 4, 1, 4, False)], id="one job after another"),
        pytest.param([{}], ("Start",), [], id="no starts"),
    ],
)
def test_the_cluster_is_told_from_its_log(
    tmp_path: Path, rows: list[Row], without: tuple[str, ...], expected: list[tuple[object, ...]]
) -> None:
    nodes = seen(read(tmp_path, "slurm", *rows, without=without)).nodes
    found = [(each.gpu_type, each.most_gpus, each.nodes, each.gpus_per_node, each.named) for each in nodes]
    assert found == expected


def test_the_cluster_is_named_by_what_to_type(tmp_path: Path) -> None:
    assert setting(seen(read(tmp_path, "slurm", *AT_ONCE)).nodes) == (
        "'cluster.node_types=[{gpu_type: a100, nodes: 3, gpus_per_node: 8}, "
        "{gpu_type: v100, nodes: 2, gpus_per_node: 4}]'"
    )
    untyped = read(tmp_path, "slurm", {"AllocTRES": "gres/gpu=4,node=1"})
    assert setting(seen(untyped).nodes) == "cluster.nodes=1 cluster.gpus_per_node=4"


@pytest.mark.parametrize("seed", range(30))
def test_waiting_passes_with_room_while_enough_gpus_of_a_type_that_the_job_may_use_are_free(seed: int) -> None:
    random, rows = np.random.default_rng(seed), TraceRows(path=Path("made"), format_name="made")
    jobs = int(random.integers(2, 80))
    submit_s, types = random.integers(0, 300, jobs), random.choice(["a100", "v100"], jobs)
    start_s = submit_s + random.integers(-3, 90, jobs) * (random.random(jobs) < 0.7)
    asked, run_s = np.where(random.random(jobs) < 0.5, types, ""), random.integers(0, 60, jobs)
    values = {"submit_s": submit_s, "start_s": start_s, "duration_s": run_s, "gpus": random.choice([1, 2, 4, 8], jobs)}
    rows.add(np.arange(jobs), job_name="", gpu_type=asked, given_gpu_type=types, **values)
    second, gpus = np.arange(400)[:, None], rows.gpus
    use = np.where((start_s <= second) & (second < start_s + run_s), gpus, 0)
    used = {kind: use[:, types == kind].sum(axis=1) for kind in set(types)}
    expected = [
        sum(any(n.max() - n[at] >= gpus[job] for kind, n in used.items() if asked[job] in ("", kind)) for at in span)
        for job, span in enumerate(map(range, submit_s.tolist(), start_s.tolist()))
    ]
    assert seconds_with_room(rows, seen(rows)) == pytest.approx(expected)
