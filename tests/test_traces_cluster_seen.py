"""The cluster that a log shows: the nodes that it names, or the GPUs that its jobs held at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_runs.traces.cluster_seen import most_at_once, node_names, seen
from synergy_runs.traces.room import seconds_with_room
from synergy_runs.traces.rows import TraceRows


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("a1,b[9-11]-x", ["a1", "b9-x", "b10-x", "b11-x"]),
        ("n001", ["n001"]),
        ("r[1-2]n[3,4]x", ["r1n3x", "r1n4x", "r2n3x", "r2n4x"]),
        ("", []),
        ("None assigned", []),
    ],
)
def test_node_lists_are_written_out(text: str, names: list[str]) -> None:
    assert list(node_names(text)) == names


@settings(max_examples=50)
@given(st.text(alphabet="abn019[]-, ", max_size=20))
def test_no_node_list_breaks_the_reader(text: str) -> None:
    assert all(isinstance(name, str) for name in node_names(text))


GROUPS = st.lists(
    st.tuples(st.sampled_from(["a100", "v100"]), st.integers(1, 10), st.integers(1, 3)), min_size=1, max_size=3
)
WISHES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 5), *[st.integers(1, 30)] * 3, st.booleans()), max_size=25
)
Job = tuple[int, int, dict[int, int], bool]
"""Start, end, GPUs by node, and whether the log names the GPU type."""


def _jobs(sizes: list[int], wishes: list[tuple[int, ...]]) -> list[Job]:
    """Jobs with different parts on up to five of the nodes with room."""
    jobs: list[Job] = []
    now = 0
    for gap, most_nodes, first, gpus, length, is_typed in wishes:
        now += gap
        free = Counter(dict(enumerate(sizes)))
        for _, end, parts, _ in jobs:
            free.subtract(parts if end > now else {})
        on = [node for node in np.roll(range(len(sizes)), first).tolist() if free[node]][:most_nodes]
        if on:
            parts = {node: 1 + gpus * (at + 1) % free[node] for at, node in enumerate(on)}
            jobs.append((now, now + length, parts, bool(is_typed)))
    return jobs


def _never_smaller_than_what_was_used(
    groups: list[tuple[str, int, int]], wishes: list[tuple[int, ...]], named: str
) -> None:
    kinds, sizes = zip(*[(kind, size) for kind, size, count in groups for _ in range(count)], strict=True)
    jobs = _jobs(list(sizes), wishes)
    later = 10**6
    for is_full in (False, True):
        if is_full:  # every node is full twice, and a job of one GPU waits for it each time
            later = max((end for _, end, *_ in jobs), default=0)
            every = [({node: size}, {node: 1}) for node, size in enumerate(sizes)]
            jobs += [(later + at, later + at + 5, whole, True) for at in (0, 6) for whole, _ in every]
            jobs += [(later + at, later + at + 1, one, True) for at in (5, 11) for _, one in every]
        rows, sure = TraceRows(Path("log"), "test"), []
        for start, end, parts, is_typed in jobs:
            for kind in dict.fromkeys(kinds[node] for node in parts):  # a job of two types is a job on each
                on = {f"n{node}": gpus for node, gpus in parts.items() if kinds[node] == kind}
                texts = {"": "", "sums": ",".join(on), "parts": ";".join(f"{node}={on[node]}" for node in on)}
                rows.add(
                    1, job_name="", submit_s=min(start, later), start_s=start, duration_s=end - start,
                    gpus=sum(on.values()), log_nodes=len(on), given_gpu_type=kind if is_typed else "",
                    node_list=texts[named],
                )  # fmt: skip
                if named == "parts" or len(on) == 1:
                    sure += [(node, start, end, gpus) for node, gpus in on.items()]
        if not len(rows):
            continue
        found = Counter({(each.gpu_type, each.gpus_per_node): each.nodes for each in seen(rows).nodes})
        as_seen = sorted((size for (_, size), count in found.items() for _ in range(count)), reverse=True)
        start_s, end_s = rows.jobs["start_s"], rows.jobs["start_s"] + rows.jobs["duration_s"]
        assert sum(as_seen) >= most_at_once(start_s, end_s, rows.jobs["gpus"])
        if named:
            held = zip(rows.jobs["gpus"], rows.jobs["log_nodes"], strict=True)
            assert all(sum(as_seen[:nodes]) >= gpus for gpus, nodes in held)
            on_node = [np.array([at for name, *at in sure if name == node]).T for node in {name for name, *_ in sure}]
            peaks = sorted((most_at_once(*each) for each in on_node), reverse=True)
            assert len(as_seen) == len({node for _, _, parts, _ in jobs for node in parts})
            assert all(size >= peak for size, peak in zip(as_seen, peaks, strict=False))
            assert not is_full or found == Counter(zip(kinds, sizes, strict=True))


CASES = given(groups=GROUPS, wishes=WISHES, named=st.sampled_from(["", "sums", "parts"]))
test_no_node_is_smaller_than_what_was_used_on_it = settings(max_examples=150)(CASES(_never_smaller_than_what_was_used))
test_no_node_is_smaller_in_many_cases = pytest.mark.thorough(
    settings(max_examples=2_000)(CASES(_never_smaller_than_what_was_used))
)


@pytest.mark.parametrize("seed", range(30))
def test_waiting_passes_with_room_while_enough_gpus_of_a_type_that_the_job_may_use_are_free(seed: int) -> None:
    random, rows = np.random.default_rng(seed), TraceRows(path=Path("made"), format_name="made")
    jobs = int(random.integers(2, 80))
    submit_s, types = random.integers(0, 300, jobs), random.choice(["a100", "v100"], jobs)
    start_s = submit_s + random.integers(-3, 90, jobs) * (random.random(jobs) < 0.7)
    asked, run_s = np.where(random.random(jobs) < 0.5, types, ""), random.integers(0, 60, jobs)
    values = {"submit_s": submit_s, "start_s": start_s, "duration_s": run_s, "gpus": random.choice([1, 2, 4, 8], jobs)}
    rows.add(np.arange(jobs), job_name="", gpu_type=asked, given_gpu_type=types, **values)
    second, gpus = np.arange(400)[:, None], rows.jobs["gpus"]
    use = np.where((start_s <= second) & (second < start_s + run_s), gpus, 0)
    used = {kind: use[:, types == kind].sum(axis=1) for kind in set(types)}
    expected = [
        sum(any(n.max() - n[at] >= gpus[job] for kind, n in used.items() if asked[job] in ("", kind)) for at in span)
        for job, span in enumerate(map(range, submit_s.tolist(), start_s.tolist()))
    ]
    assert seconds_with_room(rows, seen(rows)) == pytest.approx(expected)
