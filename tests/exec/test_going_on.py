"""A run that goes on elsewhere: with other keys, on fewer or more nodes, from another folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError
from synergy_exec.backends import Meeting, _agents
from synergy_exec.changeable import CHANGEABLE, changed
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.whole_cluster import enter, whole_cluster
from synergy_exec.settings import Settings
from synergy_runs.log import Kind


def test_keys_that_may_be_others_are_keys() -> None:
    assert set(CHANGEABLE) < {each.name for each in dataclasses.fields(Settings)}


def test_typed_keys_take_the_place_of_those_before() -> None:
    before = {"host": "127.0.0.1", "seed": 3, "backend": {"name": "local", "options": {"slots": 2, "nodes": 1}}}
    typed = ["host=10.0.0.2", "backend.options.slots=4", "memory_gb_per_slot=null"]
    assert changed(before, typed) == {
        "host": "10.0.0.2",
        "seed": 3,
        "backend": {"name": "local", "options": {"slots": 4, "nodes": 1}},
        "memory_gb_per_slot": None,
    }


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["seed=4", "host=a"], "^seed: a run goes on with what it was begun with. These may be others: "),
        (["host=[a"], "expected keys and values such as host=10.0.0.1"),
    ],
)
def test_what_the_run_is_stays(typed: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        changed({"seed": 3}, typed)


def nodes_of(*slots: int, gpu_type: str = "cpu") -> Cluster:
    return Cluster(tuple(NodeType(f"{gpu_type}-{at}", gpu_type, 1, each) for at, each in enumerate(slots)))


def test_facts_are_on_nodes_as_large_as_each_ever_was(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")

    def sizes(*slots: int) -> list[int]:
        enter(journal, nodes_of(*slots))
        whole = whole_cluster(journal)
        assert whole is not None
        return [each.gpus_per_node for each in whole.node_type_of]

    assert sizes(4) == [4]
    assert sizes(2, 2) == [2, 2]  # nothing was on the node of four yet
    journal.fact(0.0, int(Kind.START), 0, 2, ((1, 3),))
    assert sizes(1) == [2, 2]
    assert sizes(3, 1, 1) == [3, 2, 1]
    assert sizes(3) == [3, 2, 1]
    with pytest.raises(InputError, match=r"node 1 has h100 now, and had cpu when this run began\. Give it nodes as"):
        enter(journal, Cluster((*nodes_of(3).node_types, NodeType("h", "h100", 1, 8))))


def test_agents_started_in_another_folder_write_into_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray's do: their folder is not the one in which the command was typed."""
    monkeypatch.chdir(tmp_path)
    meeting = Meeting(url="", token_file=Path("results/token"), folder=Path("results"))
    assert _agents.log_of(1, meeting) == tmp_path / "results" / "agent-1.txt"
